//! TCP transport between tree neighbors: one connection, or several that share the chunks.
//!
//! One connection has one congestion window, one path through the network and one queue of the
//! network card, and so one processor that handles its interrupts. Several have more of each. A
//! large chunk is sent over one of them, in turn over those with room; small payloads use the
//! first. Frames may overtake each other and are not reordered: the core identifies a chunk by its
//! number.
//!
//! Each stream carries heartbeats, and each ends with a close frame or the abort reason. A stream
//! that is cut or silent is a loss of the peer, even if the other streams work.

use std::io;
use std::net::TcpStream;

use super::connection::{Arrival, Connection};
use super::poller::{Poller, Ready};
use super::transport::{Bound, DESCRIPTOR_SHIFT, Note, Payload, QUEUED_MAX, Received, Transport};
use super::wire::{Frame, Head};
use hfreduce_core::credit::CLASSES;

/// Smaller payloads stay on the first stream: several of them are sent in one system call, and the
/// receiver wakes up for one socket.
const SPREAD_FROM_BYTES: usize = 32 << 10;

struct Stream {
    connection: Connection<Note>,
    /// Returned with the payload in progress.
    bound: Option<Bound>,
    /// The socket is full.
    full: bool,
    /// The send error; frames that the peer sent before are still to be read.
    broken: Option<io::Error>,
    /// The peer has closed the stream or sent the abort reason.
    peer_closed: bool,
    ended: bool,
    polled_bytes: u64,
}

impl Stream {
    fn is_open(&self) -> bool {
        !self.ended && self.broken.is_none()
    }

    fn takes_more(&self) -> bool {
        self.is_open() && !self.full && self.connection.queued() < QUEUED_MAX
    }
}

/// TCP streams of one tree link.
pub struct Streams {
    streams: Vec<Stream>,
    token: u64,
    /// The stream of the last large payload.
    turn: usize,
    /// The stream of the last arrival.
    current: usize,
    /// Why a stream ended, while the others are read for a more specific reason.
    end_error: Option<io::Error>,
}

impl Streams {
    /// Creates the transport from connected sockets, in the order that both ends agree on; chunks
    /// have at most `slot_bytes`.
    ///
    /// # Errors
    /// A system call failed.
    pub fn new(sockets: Vec<TcpStream>, slot_bytes: usize) -> io::Result<Self> {
        let stream = |socket| {
            Ok(Stream {
                connection: Connection::new(socket, slot_bytes)?,
                bound: None,
                full: false,
                broken: None,
                peer_closed: false,
                ended: false,
                polled_bytes: 0,
            })
        };
        let streams = sockets.into_iter().map(stream).collect::<io::Result<Vec<Stream>>>()?;
        Ok(Self { streams, token: 0, turn: 0, current: 0, end_error: None })
    }

    fn token(&self, at: usize) -> u64 {
        self.token | (at as u64) << DESCRIPTOR_SHIFT
    }

    /// Selects the stream for a payload.
    fn choose(&mut self, bytes: usize) -> usize {
        let count = self.streams.len();
        if count > 1 && bytes >= SPREAD_FROM_BYTES {
            let next = (self.turn + 1) % count;
            let mut order = (next..count).chain(0..next);
            self.turn = order.find(|at| self.streams[*at].takes_more()).unwrap_or(next);
            return self.turn;
        }
        0
    }

    /// Handles the end of a stream; the other streams may hold the reason.
    fn end(&mut self, at: usize, error: io::Error, poller: &Poller) {
        let stream = &mut self.streams[at];
        poller.forget(&stream.connection);
        stream.ended = true;
        if !stream.peer_closed && self.end_error.is_none() {
            self.end_error = Some(error);
            self.look_again();
        }
    }

    /// Returns the next arrival of one stream.
    fn receive_from(&mut self, at: usize) -> io::Result<Option<Received>> {
        let stream = &mut self.streams[at];
        let Some(arrival) = stream.connection.receive_next()? else {
            return stream.broken.take().map_or(Ok(None), Err);
        };
        self.current = at;
        Ok(Some(match arrival {
            Arrival::Head(head) => {
                stream.peer_closed |= matches!(head.frame, Frame::Close { .. });
                Received::Head(head)
            }
            Arrival::Owned(bytes) => Received::Owned(bytes),
            Arrival::Payload => match stream.bound.take() {
                Some(bound) => Received::Payload(bound),
                None => return Err(io::Error::from(io::ErrorKind::InvalidData)),
            },
        }))
    }
}

impl Transport for Streams {
    fn streams(&self) -> usize {
        self.streams.len()
    }

    fn watch(&mut self, poller: &Poller, token: u64) -> io::Result<()> {
        self.token = token;
        for (at, stream) in self.streams.iter().enumerate() {
            poller.watch(&stream.connection, self.token(at))?;
        }
        Ok(())
    }

    fn forget(&self, poller: &Poller) {
        self.streams.iter().for_each(|stream| poller.forget(&stream.connection));
    }

    fn woken(&mut self, line: usize, event: Ready) -> bool {
        if let (true, Some(stream)) = (event.readable, self.streams.get_mut(line)) {
            stream.connection.readable();
        }
        event.writable
    }

    fn look_again(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.connection.readable());
    }

    fn takes_more(&self) -> bool {
        self.streams.iter().any(Stream::takes_more)
    }

    fn is_idle(&self) -> bool {
        self.streams.iter().any(|stream| stream.is_open() && stream.connection.queued() == 0)
    }

    fn push(&mut self, head: &Head, payload: Payload, note: Note) {
        let at = self.choose(payload.bytes().len());
        self.streams[at].connection.push(head, payload, note);
    }

    fn beat(&mut self, head: &Head) {
        let mut head = *head;
        let idle = |stream: &&mut Stream| stream.is_open() && stream.connection.queued() == 0;
        for stream in self.streams.iter_mut().filter(idle) {
            stream.connection.push(&head, Payload::Owned(Vec::new()), None);
            // Credits are sent once.
            head.credits = [0; CLASSES];
        }
    }

    fn push_final(&mut self, head: &Head, payload: &[u8]) {
        for stream in self.streams.iter_mut().filter(|stream| stream.is_open()) {
            stream.connection.push(head, Payload::Owned(payload.to_vec()), None);
        }
    }

    fn flush(&mut self, poller: &Poller, notes: &mut Vec<Note>) -> io::Result<()> {
        let mut flushed = Ok(());
        for at in 0..self.streams.len() {
            let token = self.token(at);
            let stream = &mut self.streams[at];
            if !stream.is_open() || (stream.connection.queued() == 0 && !stream.full) {
                continue;
            }
            match stream.connection.flush(notes) {
                Ok(()) => {
                    let full = stream.connection.queued() > 0;
                    if full != stream.full {
                        stream.full = full;
                        let _ = poller.want_room(&stream.connection, token, full);
                    }
                }
                Err(error) => {
                    flushed = Err(error.kind().into());
                    stream.broken = Some(error);
                }
            }
        }
        flushed
    }

    fn is_flushed(&self) -> bool {
        self.streams.iter().all(|stream| !stream.is_open() || stream.connection.queued() == 0)
    }

    fn unsent_bytes(&self) -> usize {
        let open = self.streams.iter().filter(|stream| stream.is_open());
        open.map(|stream| stream.connection.unsent_bytes()).sum()
    }

    fn receive_next(&mut self, poller: &Poller) -> io::Result<Option<Received>> {
        let mut looks = 1;
        while looks > 0 {
            looks -= 1;
            for step in 0..self.streams.len() {
                let at = (self.current + step) % self.streams.len();
                if self.streams[at].ended {
                    continue;
                }
                let has_ended = self.end_error.is_some();
                match self.receive_from(at) {
                    Ok(Some(received)) => return Ok(Some(received)),
                    Ok(None) => {}
                    Err(error) => self.end(at, error, poller),
                }
                looks += usize::from(!has_ended && self.end_error.is_some());
            }
        }
        if let Some(error) = self.end_error.take() {
            return Err(error);
        }
        match self.streams.iter().all(|stream| stream.ended) {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => Ok(None),
        }
    }

    unsafe fn body(&mut self, at: *mut u8, bytes: usize, bound: Bound) {
        let stream = &mut self.streams[self.current];
        stream.bound = Some(bound);
        // SAFETY: guaranteed by the caller.
        unsafe { stream.connection.body(at, bytes) };
    }

    fn body_owned(&mut self, bytes: usize) {
        self.streams[self.current].connection.body_owned(bytes);
    }

    fn detach(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.connection.detach());
    }

    fn poll_received(&mut self) -> bool {
        let silent = |stream: &Stream| {
            !stream.ended
                && !stream.peer_closed
                && stream.connection.received_bytes == stream.polled_bytes
        };
        if self.streams.iter().any(silent) {
            return false;
        }
        for stream in &mut self.streams {
            stream.polled_bytes = stream.connection.received_bytes;
        }
        true
    }

    fn traffic(&self) -> (u64, u64) {
        self.streams.iter().map(|stream| &stream.connection).fold(
            (0, 0),
            |(sent_bytes, received), one| {
                (sent_bytes + one.sent_bytes, received + one.received_bytes)
            },
        )
    }

    fn peer_closed(&self) -> bool {
        self.streams.iter().all(|stream| stream.peer_closed)
    }

    fn supports_peer_memory(&self) -> bool {
        true
    }

    fn take_copied(&mut self) -> Vec<Note> {
        self.streams[self.current].connection.take_copied()
    }

    fn copied(&mut self, bytes: usize) {
        self.streams[self.current].connection.copied(bytes);
    }

    fn read_in_place(&mut self, bytes: usize) {
        self.streams[self.current].connection.received_bytes += bytes as u64;
    }

    fn has_unacked(&self) -> bool {
        // Mapped payloads have no bytes here, so they use the first stream only.
        self.streams[0].connection.has_unacked()
    }
}
