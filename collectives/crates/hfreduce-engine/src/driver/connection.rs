//! Frames over one non-blocking socket: several in one system call each way, payloads without a
//! copy of ours.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{SendAncillaryBuffer, SendFlags};

use fabric::fork::{Registration, close_in_children};

use super::transport::Payload;
use super::wire::{HEAD_BYTES, Head};

/// Heads and small payloads are read together into this much.
const STASH_BYTES: usize = 16 << 10;
/// Frames in one system call.
const BATCH: usize = 8;

struct Outgoing<N> {
    head: [u8; HEAD_BYTES],
    payload: Payload,
    note: N,
}

/// What arrived.
#[derive(Debug)]
pub enum Arrival {
    /// A head: say with [`Connection::body`] or [`Connection::body_owned`] where its payload goes.
    Head(Head),
    /// The payload is complete.
    Payload,
    /// An owned payload is complete.
    Owned(Vec<u8>),
}

enum Body {
    None,
    Memory { at: *mut u8, left: usize },
    Owned { bytes: Vec<u8>, filled: usize },
}

/// One connection; `N` is what the owner wants back when a frame is gone.
pub struct Connection<N> {
    /// A forked child does not keep it open. Before the stream: dropped first.
    _closed_in_children: Registration,
    stream: TcpStream,
    slot_bytes: usize,
    queue: VecDeque<Outgoing<N>>,
    /// Bytes of the first queued frame that are gone.
    gone: usize,
    /// Frames whose payload the peer has still to copy, and those of which it said that it did.
    mapped: VecDeque<N>,
    acked: Vec<N>,
    /// Payloads of the peer's that we copied and have not told it.
    owed: u32,
    stash: Vec<u8>,
    start: usize,
    end: usize,
    body: Body,
    /// Nothing more to read until the next event.
    drained: bool,
    /// Bytes received and sent.
    pub received_bytes: u64,
    /// See above.
    pub sent_bytes: u64,
}

// SAFETY: the raw pointers inside are places for payloads, which the owner keeps valid wherever
// the connection is used; the connection itself is used by one thread at a time.
unsafe impl<N: Send> Send for Connection<N> {}

impl<N> Connection<N> {
    /// Over a connected socket; chunks have at most `slot_bytes`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(stream: TcpStream, slot_bytes: usize) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            _closed_in_children: close_in_children(&stream),
            stream,
            slot_bytes,
            queue: VecDeque::new(),
            gone: 0,
            mapped: VecDeque::new(),
            acked: Vec::new(),
            owed: 0,
            stash: vec![0; STASH_BYTES],
            start: 0,
            end: 0,
            body: Body::None,
            drained: false,
            received_bytes: 0,
            sent_bytes: 0,
        })
    }

    /// Frames that are not gone yet.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Queues a frame behind the others.
    pub fn push(&mut self, head: &Head, payload: Payload, note: N) {
        let acked = u8::try_from(self.owed).unwrap_or(u8::MAX);
        self.owed -= u32::from(acked);
        let head = Head { acked, ..*head };
        self.queue.push_back(Outgoing { head: head.encode(), payload, note });
    }

    /// Drops every frame that has not begun and makes the one that has independent of any memory
    /// but its own: what the payloads pointed to may go away now.
    pub fn detach(&mut self) {
        self.mapped.clear();
        self.acked.clear();
        self.queue.truncate(usize::from(self.gone > 0));
        if let Some(first) = self.queue.front_mut() {
            first.payload = Payload::Owned(first.payload.bytes().to_vec());
        }
        if let Body::Memory { left, .. } = self.body {
            self.body = Body::Owned { bytes: vec![0; left], filled: 0 };
        }
    }

    /// Sends what the socket takes. Returns the notes of frames that are gone; the queue is empty
    /// unless the socket is full.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn flush(&mut self, gone: &mut Vec<N>) -> io::Result<()> {
        while !self.queue.is_empty() {
            let mut slices: [IoSlice<'_>; BATCH * 2] = std::array::from_fn(|_| IoSlice::new(&[]));
            let mut count = 0;
            let mut skip = self.gone;
            for frame in self.queue.iter().take(BATCH) {
                for part in [&frame.head[..], frame.payload.bytes()] {
                    let from = skip.min(part.len());
                    skip -= from;
                    if from < part.len() {
                        slices[count] = IoSlice::new(&part[from..]);
                        count += 1;
                    }
                }
            }
            let sent = rustix::net::sendmsg(
                &self.stream,
                &slices[..count],
                &mut SendAncillaryBuffer::default(),
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            );
            match sent {
                Ok(bytes) => self.advance(bytes, gone),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn advance(&mut self, bytes: usize, gone: &mut Vec<N>) {
        self.sent_bytes += bytes as u64;
        self.gone += bytes;
        while let Some(first) = self.queue.front() {
            let length = HEAD_BYTES + first.payload.bytes().len();
            if self.gone < length {
                return;
            }
            self.gone -= length;
            let Some(frame) = self.queue.pop_front() else { return };
            match frame.payload {
                Payload::Mapped(bytes) => {
                    self.sent_bytes += bytes as u64;
                    self.mapped.push_back(frame.note);
                    continue;
                }
                Payload::MappedInPlace(bytes) => self.sent_bytes += bytes as u64,
                Payload::Owned(_) | Payload::Memory(..) => {}
            }
            gone.push(frame.note);
        }
    }

    /// Lent frames that the peer has copied since the last call.
    pub fn take_copied(&mut self) -> Vec<N> {
        std::mem::take(&mut self.acked)
    }

    /// We have copied a payload that the peer lent.
    pub fn copied(&mut self, bytes: usize) {
        self.received_bytes += bytes as u64;
        self.owed += 1;
    }

    /// True while the peer does not know of all that we copied.
    pub fn owes_acks(&self) -> bool {
        self.owed > 0
    }

    /// Bytes that the peer's machine has not taken yet, ours and the kernel's. Closing the socket
    /// before this is zero may throw them away. Zero once the peer has closed: it needs nothing.
    pub fn unsent_bytes(&self) -> usize {
        if self.peer_is_gone() {
            return 0;
        }
        let queued: usize = self.queue.iter().map(|f| HEAD_BYTES + f.payload.bytes().len()).sum();
        let mut in_kernel: libc::c_int = 0;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.stream);
        // SAFETY: TIOCOUTQ on a socket writes one int.
        let asked = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut in_kernel) };
        queued.saturating_sub(self.gone) + if asked == 0 { in_kernel.max(0) as usize } else { 0 }
    }

    /// The kernel goes on counting bytes that a reset connection will never send.
    fn peer_is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut set = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut set, Some(&now)).is_ok_and(|events| events > 0)
    }

    /// The socket has become readable.
    pub fn readable(&mut self) {
        self.drained = false;
    }

    /// The payload of the head just seen goes there.
    ///
    /// # Safety
    /// The memory must stay valid for `bytes` and untouched until the payload is complete or
    /// [`Connection::detach`] was called.
    pub unsafe fn body(&mut self, at: *mut u8, bytes: usize) {
        self.body = Body::Memory { at, left: bytes };
    }

    /// The payload of the head just seen goes into memory of its own.
    pub fn body_owned(&mut self, bytes: usize) {
        self.body = Body::Owned { bytes: vec![0; bytes], filled: 0 };
    }

    /// The next arrival, if there is one.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end, `InvalidData` for a head that makes no sense, or what the kernel
    /// says.
    pub fn receive_next(&mut self) -> io::Result<Option<Arrival>> {
        loop {
            if !matches!(self.body, Body::None) {
                if !self.fill_body()? {
                    return Ok(None);
                }
                return Ok(Some(match std::mem::replace(&mut self.body, Body::None) {
                    Body::Owned { bytes, .. } => Arrival::Owned(bytes),
                    _ => Arrival::Payload,
                }));
            }
            if self.end - self.start >= HEAD_BYTES {
                let mut head = [0; HEAD_BYTES];
                head.copy_from_slice(&self.stash[self.start..self.start + HEAD_BYTES]);
                self.start += HEAD_BYTES;
                let head = Head::decode(&head, self.slot_bytes)
                    .map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
                for _ in 0..head.acked {
                    let why = "it returned more payloads than it was lent";
                    let note = self.mapped.pop_front();
                    let note = note.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, why));
                    self.acked.push(note?);
                }
                return Ok(Some(Arrival::Head(head)));
            }
            if self.drained {
                return Ok(None);
            }
            self.receive(&mut [])?;
        }
    }

    /// Moves payload bytes; true once it is complete.
    fn fill_body(&mut self) -> io::Result<bool> {
        loop {
            let place: &mut [u8] = match &mut self.body {
                Body::None => return Ok(true),
                Body::Memory { left: 0, .. } => &mut [],
                // SAFETY: the place is valid and ours until the payload is complete (see `body`).
                Body::Memory { at, left } => unsafe { std::slice::from_raw_parts_mut(*at, *left) },
                Body::Owned { bytes, filled } => {
                    let (at, left) = (bytes[*filled..].as_mut_ptr(), bytes.len() - *filled);
                    // SAFETY: the rest of a vector of ours, which nobody moves or grows meanwhile.
                    unsafe { std::slice::from_raw_parts_mut(at, left) }
                }
            };
            if place.is_empty() {
                return Ok(true);
            }
            let stashed = (self.end - self.start).min(place.len());
            let moved = if stashed > 0 {
                place[..stashed].copy_from_slice(&self.stash[self.start..self.start + stashed]);
                self.start += stashed;
                stashed
            } else if self.drained {
                return Ok(false);
            } else {
                self.receive(place)?
            };
            match &mut self.body {
                Body::Memory { at, left } => {
                    *at = at.wrapping_add(moved);
                    *left -= moved;
                }
                Body::Owned { filled, .. } => *filled += moved,
                Body::None => {}
            }
        }
    }

    /// Reads into `place` first and into the stash after it; returns what went into `place`.
    fn receive(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.stash.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let wanted = place.len() + self.stash.len() - self.end;
        let inside = place.len();
        let mut slices = [IoSliceMut::new(place), IoSliceMut::new(&mut self.stash[self.end..])];
        let slices = if inside == 0 { &mut slices[1..] } else { &mut slices[..] };
        let bytes = match rustix::io::readv(&self.stream, slices) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                self.drained = true;
                return Ok(0);
            }
            Err(error) => return Err(error.into()),
        };
        self.received_bytes += bytes as u64;
        self.drained = bytes < wanted;
        self.end += bytes.saturating_sub(inside);
        Ok(bytes.min(inside))
    }
}

impl<N> AsFd for Connection<N> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
#[path = "connection_test.rs"]
mod tests;
