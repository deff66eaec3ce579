//! The stream of a connection: TCP, with or without TLS, or shared memory.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio_rustls::TlsStream;

use super::local::{Link, LinkReader, LinkWriter};
use crate::class::TrafficClass;

/// Time without an acknowledgement after which a peer is considered dead. By default the kernel
/// retries for a quarter of an hour with increasing intervals, and calls wait behind the
/// unacknowledged data.
const UNHEARD_MAX: Duration = Duration::from_secs(30);

/// Read size below TLS, whose own reads are 4 KiB.
const RECEIVE_BYTES: usize = 64 << 10;

/// Size of the buffer through which frames are read.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// A stream whose two directions are used independently.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<Metered>>),
    Local(Box<Link>),
}

impl Stream {
    pub(super) fn split(self) -> (ReadHalf, WriteHalf) {
        match self {
            Self::Plain(stream) => {
                let (read, write) = stream.into_split();
                (ReadHalf::Plain(read), WriteHalf::Plain(write))
            }
            Self::Tls(stream) => {
                // One task uses both halves, so neither waits for the other's lock.
                let (read, write) = tokio::io::split(stream);
                (ReadHalf::Tls(read), WriteHalf::Tls(write))
            }
            Self::Local(link) => {
                let (read, write) = link.split();
                (ReadHalf::Local(read), WriteHalf::Local(write))
            }
        }
    }
}

pub(super) enum ReadHalf {
    Plain(OwnedReadHalf),
    Tls(tokio::io::ReadHalf<Box<TlsStream<Metered>>>),
    Local(LinkReader),
}

impl ReadHalf {
    /// Size of the buffer through which frames are read; larger reads bypass it. Small reads cost a
    /// system call, except from shared memory.
    pub(super) fn buffer_bytes(&self) -> usize {
        match self {
            Self::Plain(_) | Self::Tls(_) => READ_BUFFER_BYTES,
            // Every read is at least as large, so none uses the buffer.
            Self::Local(_) => 1,
        }
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_read(context, buffer),
            Self::Tls(half) => match ready!(Pin::new(half).poll_read(context, buffer)) {
                // No `close_notify`: frames have lengths, so truncation is detected anyway.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
                result => Poll::Ready(result),
            },
            Self::Local(half) => Pin::new(half).poll_read(context, buffer),
        }
    }
}

pub(super) enum WriteHalf {
    Plain(OwnedWriteHalf),
    Tls(tokio::io::WriteHalf<Box<TlsStream<Metered>>>),
    Local(LinkWriter),
}

impl AsyncWrite for WriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_write(context, bytes),
            Self::Tls(half) => Pin::new(half).poll_write(context, bytes),
            Self::Local(half) => Pin::new(half).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_write_vectored(context, parts),
            Self::Tls(half) => Pin::new(half).poll_write_vectored(context, parts),
            Self::Local(half) => Pin::new(half).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_flush(context),
            Self::Tls(half) => Pin::new(half).poll_flush(context),
            Self::Local(half) => Pin::new(half).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(half) => Pin::new(half).poll_shutdown(context),
            Self::Tls(half) => Pin::new(half).poll_shutdown(context),
            Self::Local(half) => Pin::new(half).poll_shutdown(context),
        }
    }
}

/// The socket below TLS. Until the peer has authenticated, the number of bytes read from it is
/// bounded, which bounds the buffers of TLS; afterwards the socket is read in large steps.
pub(super) struct Metered {
    socket: TcpStream,
    state: State,
}

enum State {
    /// Bytes that may still be read.
    Unauthenticated(usize),
    Authenticated {
        buffer: Box<[u8]>,
        from: usize,
        to: usize,
    },
}

impl Metered {
    pub(super) fn new(socket: TcpStream, bytes_max: usize) -> Self {
        Self { socket, state: State::Unauthenticated(bytes_max) }
    }

    /// Removes the bound.
    pub(super) fn authenticated(&mut self) {
        let buffer = vec![0; RECEIVE_BYTES].into();
        self.state = State::Authenticated { buffer, from: 0, to: 0 };
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { socket, state } = self.get_mut();
        match state {
            State::Unauthenticated(left) => {
                if *left == 0 {
                    let detail = "too many bytes before it authenticated";
                    return Poll::Ready(Err(io::Error::other(detail)));
                }
                // At most a client hello: not worth uninitialised memory.
                let room = out.remaining().min(*left);
                let mut bounded = ReadBuf::new(out.initialize_unfilled_to(room));
                ready!(Pin::new(socket).poll_read(context, &mut bounded))?;
                let read = bounded.filled().len();
                *left -= read;
                out.advance(read);
            }
            State::Authenticated { buffer, from, to } => {
                if from == to {
                    let mut fresh = ReadBuf::new(buffer);
                    ready!(Pin::new(socket).poll_read(context, &mut fresh))?;
                    (*from, *to) = (0, fresh.filled().len());
                }
                let count = out.remaining().min(*to - *from);
                out.put_slice(&buffer[*from..*from + count]);
                *from += count;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

/// Sets the socket options: no delay, keepalive and user timeout, and the class's DSCP.
pub(super) fn prepare(stream: &TcpStream, class: TrafficClass) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(UNHEARD_MAX))?;
    Ok(class.apply(stream)?)
}
