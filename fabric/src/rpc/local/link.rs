//! A byte stream over two rings and a UNIX socket, whose only purpose is to wake the other side and
//! to end with its process.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::task::coop;

use super::invalid;
use super::memory::Share;
use super::ring::{Consumer, Producer, ring_bytes};
use crate::fork::{self, Registration};
use crate::shm::Mapped;

/// Bytes of shared memory for a connection with rings of this capacity.
pub(super) const fn link_bytes(capacity: usize) -> usize {
    2 * ring_bytes(capacity)
}

/// The end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Server,
    Client,
}

/// A connection through shared memory.
pub(in crate::rpc) struct Link {
    reader: LinkReader,
    writer: LinkWriter,
}

impl Link {
    /// The memory is zeroed.
    ///
    /// # Errors
    /// `InvalidData` if the memory has not [`link_bytes`] of the capacity, or the kernel's error.
    pub(super) fn new(
        socket: UnixStream,
        memory: Mapped,
        capacity: usize,
        side: Side,
        share: Option<Share>,
    ) -> io::Result<Self> {
        let memory = Arc::new(memory);
        let (requests, replies) = (0, ring_bytes(capacity));
        let (from, to) = match side {
            Side::Server => (requests, replies),
            Side::Client => (replies, requests),
        };
        let consumer = Consumer::new(&memory, from, capacity).ok_or_else(invalid)?;
        let producer = Producer::new(&memory, to, capacity).ok_or_else(invalid)?;
        let bell = Arc::new(Bell::new(socket, share)?);
        let reader = LinkReader { bell: Arc::clone(&bell), consumer };
        Ok(Self { reader, writer: LinkWriter { bell, producer } })
    }

    /// Both directions. One task must use both: the socket wakes the task that waited last.
    pub(in crate::rpc) fn split(self) -> (LinkReader, LinkWriter) {
        (self.reader, self.writer)
    }
}

/// The socket of a connection. A byte on it means: look at the rings again.
struct Bell {
    /// Dropped before the socket is closed.
    _inherited: Registration,
    /// The server's.
    _share: Option<Share>,
    socket: AsyncFd<std::os::unix::net::UnixStream>,
    hung_up: AtomicBool,
}

impl Bell {
    fn new(socket: UnixStream, share: Option<Share>) -> io::Result<Self> {
        let socket = socket.into_std()?;
        let inherited = fork::close_in_children(&socket);
        // Not for writing: that the peer has read a byte wakes no writer.
        // SAFETY: the socket owns its descriptor, which stays the same and open until the `AsyncFd`
        // that owns the socket is dropped. Only a forked child has another file there, and it does
        // not run the runtime.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?;
        Ok(Self { _inherited: inherited, _share: share, socket, hung_up: AtomicBool::new(false) })
    }

    fn ring(&self) -> io::Result<()> {
        match rustix::net::send(
            self.socket.get_ref(),
            &[1],
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            // Full: the peer has not seen earlier bytes, and will look after it has. Closed: this
            // side sees it when it waits.
            Ok(_) | Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the peer rings or has closed the connection.
    fn poll_rung(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(context))?;
            let mut bytes = [0; 64];
            match rustix::net::recv(self.socket.get_ref(), &mut bytes, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Ok((received, _)) if received > 0 => {
                    // A stream that returns fewer bytes than asked for is empty.
                    if received < bytes.len() {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
                // Closed, or reset because the peer has not read everything.
                Ok(_) | Err(_) => {
                    self.hung_up.store(true, Relaxed);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

/// The receiving direction.
pub(in crate::rpc) struct LinkReader {
    bell: Arc<Bell>,
    consumer: Consumer,
}

impl AsyncRead for LinkReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { bell, consumer } = self.get_mut();
        let coop = ready!(coop::poll_proceed(context));
        loop {
            // Read before the ring: what a peer wrote before it hung up still arrives.
            let hung_up = bell.hung_up.load(Relaxed);
            // SAFETY: `read` only writes into the memory, and never uninitialised bytes.
            let read = consumer.read(unsafe { buffer.unfilled_mut() }, || bell.ring())?;
            if read > 0 || hung_up || buffer.remaining() == 0 {
                // SAFETY: `read` has initialised this many bytes.
                unsafe { buffer.assume_init(read) };
                buffer.advance(read);
                coop.made_progress();
                return Poll::Ready(Ok(()));
            }
            if !consumer.wait()? {
                ready!(bell.poll_rung(context))?;
            }
        }
    }
}

/// The sending direction.
pub(in crate::rpc) struct LinkWriter {
    bell: Arc<Bell>,
    producer: Producer,
}

impl AsyncWrite for LinkWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { bell, producer } = self.get_mut();
        let coop = ready!(coop::poll_proceed(context));
        loop {
            if bell.hung_up.load(Relaxed) {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let written = producer.write(parts, || bell.ring())?;
            if written > 0 || parts.iter().all(|part| part.is_empty()) {
                coop.made_progress();
                return Poll::Ready(Ok(written));
            }
            if !producer.wait()? {
                ready!(bell.poll_rung(context))?;
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(self.bell.socket.get_ref(), Shutdown::Write)?))
    }
}

#[cfg(test)]
#[path = "link_test.rs"]
mod tests;
