//! Frames over one non-blocking socket: several per system call in each direction, payloads without
//! an additional copy.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{SendAncillaryBuffer, SendFlags};

use fabric::fork::{Registration, close_in_children};

use super::transport::Payload;
use super::wire::{HEAD_BYTES, Head};

/// Size of the buffer into which heads and small payloads are read together.
const STASH_BYTES: usize = 16 << 10;
/// Maximum number of frames per system call.
const BATCH: usize = 8;

struct Outgoing<N> {
    head: [u8; HEAD_BYTES],
    payload: Payload,
    note: N,
}

/// An arrival.
#[derive(Debug)]
pub enum Arrival {
    /// A head: [`Connection::body`] or [`Connection::body_owned`] sets the destination of its
    /// payload.
    Head(Head),
    /// The payload is complete.
    Payload,
    /// An owned payload is complete.
    Owned(Vec<u8>),
}

enum Body {
    None,
    Memory { at: *mut u8, remaining: usize },
    Owned { bytes: Vec<u8>, filled: usize },
}

/// One connection; `N` is returned to the owner when a frame has been sent.
pub struct Connection<N> {
    /// Closes the socket in forked children. Before the stream: dropped first.
    _closed_in_children: Registration,
    stream: TcpStream,
    slot_bytes: usize,
    queue: VecDeque<Outgoing<N>>,
    /// Bytes of the first queued frame that have been sent.
    head_sent_bytes: usize,
    /// Frames whose payload the peer has yet to copy, and those that it has acknowledged.
    mapped: VecDeque<N>,
    acked: Vec<N>,
    /// Payloads of the peer that were copied and not acknowledged yet.
    unacked: u32,
    stash: Vec<u8>,
    start: usize,
    end: usize,
    body: Body,
    /// Nothing to read until the next event.
    drained: bool,
    /// Bytes received.
    pub received_bytes: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
}

// SAFETY: the raw pointers are payload destinations, which the owner keeps valid wherever the
// connection is used; the connection is used by one thread at a time.
unsafe impl<N: Send> Send for Connection<N> {}

impl<N> Connection<N> {
    /// Over a connected socket; chunks have at most `slot_bytes`.
    ///
    /// # Errors
    /// A system call failed.
    pub fn new(stream: TcpStream, slot_bytes: usize) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            _closed_in_children: close_in_children(&stream),
            stream,
            slot_bytes,
            queue: VecDeque::new(),
            head_sent_bytes: 0,
            mapped: VecDeque::new(),
            acked: Vec::new(),
            unacked: 0,
            stash: vec![0; STASH_BYTES],
            start: 0,
            end: 0,
            body: Body::None,
            drained: false,
            received_bytes: 0,
            sent_bytes: 0,
        })
    }

    /// Number of frames that have not been sent.
    #[inline]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Queues a frame.
    #[inline]
    pub fn push(&mut self, head: &Head, payload: Payload, note: N) {
        let acked = u8::try_from(self.unacked).unwrap_or(u8::MAX);
        self.unacked -= u32::from(acked);
        let head = Head { acked, ..*head };
        self.queue.push_back(Outgoing { head: head.encode(), payload, note });
    }

    /// Drops all frames that are not partly sent, and copies the one that is: the memory of their
    /// payloads may be reused.
    pub fn detach(&mut self) {
        self.mapped.clear();
        self.acked.clear();
        self.queue.truncate(usize::from(self.head_sent_bytes > 0));
        if let Some(first) = self.queue.front_mut() {
            first.payload = Payload::Owned(first.payload.bytes().to_vec());
        }
        if let Body::Memory { remaining, .. } = self.body {
            self.body = Body::Owned { bytes: vec![0; remaining], filled: 0 };
        }
    }

    /// Sends as much as possible. Returns the notes of sent frames; the queue is empty unless the
    /// socket is full.
    ///
    /// # Errors
    /// The connection failed.
    pub fn flush(&mut self, sent_notes: &mut Vec<N>) -> io::Result<()> {
        while !self.queue.is_empty() {
            let mut slices: [IoSlice<'_>; BATCH * 2] = std::array::from_fn(|_| IoSlice::new(&[]));
            let mut count = 0;
            let mut skip = self.head_sent_bytes;
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
            let result = rustix::net::sendmsg(
                &self.stream,
                &slices[..count],
                &mut SendAncillaryBuffer::default(),
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            );
            match result {
                Ok(bytes) => self.advance(bytes, sent_notes),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn advance(&mut self, bytes: usize, sent_notes: &mut Vec<N>) {
        self.sent_bytes += bytes as u64;
        self.head_sent_bytes += bytes;
        while let Some(first) = self.queue.front() {
            let length = HEAD_BYTES + first.payload.bytes().len();
            if self.head_sent_bytes < length {
                return;
            }
            self.head_sent_bytes -= length;
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
            sent_notes.push(frame.note);
        }
    }

    /// Notes of mapped frames that the peer has acknowledged since the last call.
    #[inline]
    pub fn take_copied(&mut self) -> Vec<N> {
        std::mem::take(&mut self.acked)
    }

    /// Records that a mapped payload of the peer has been copied.
    #[inline]
    pub fn copied(&mut self, bytes: usize) {
        self.received_bytes += bytes as u64;
        self.unacked += 1;
    }

    /// True if acknowledgments are due.
    #[inline]
    pub fn has_unacked(&self) -> bool {
        self.unacked > 0
    }

    /// Bytes that the peer's machine has not acknowledged, including those in the kernel. Closing
    /// the socket before this is zero may discard them. Zero once the peer has closed.
    pub fn unsent_bytes(&self) -> usize {
        if self.peer_is_gone() {
            return 0;
        }
        let queued: usize = self.queue.iter().map(|f| HEAD_BYTES + f.payload.bytes().len()).sum();
        let mut in_kernel: libc::c_int = 0;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.stream);
        // SAFETY: TIOCOUTQ on a socket writes one int.
        let status = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut in_kernel) };
        queued.saturating_sub(self.head_sent_bytes)
            + if status == 0 { in_kernel.max(0) as usize } else { 0 }
    }

    /// The kernel keeps counting bytes that a reset connection will never send.
    fn peer_is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut set = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut set, Some(&now)).is_ok_and(|events| events > 0)
    }

    /// Records that the socket has become readable.
    #[inline]
    pub fn readable(&mut self) {
        self.drained = false;
    }

    /// Sets the destination of the payload of the last head.
    ///
    /// # Safety
    /// The memory must stay valid for `bytes` and exclusive until the payload is complete or
    /// [`Connection::detach`] was called.
    #[inline]
    pub unsafe fn body(&mut self, at: *mut u8, bytes: usize) {
        self.body = Body::Memory { at, remaining: bytes };
    }

    /// Receives the payload of the last head into a new vector.
    #[inline]
    pub fn body_owned(&mut self, bytes: usize) {
        self.body = Body::Owned { bytes: vec![0; bytes], filled: 0 };
    }

    /// Returns the next arrival, if any.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the stream, `InvalidData` for an invalid head, or the error of
    /// a system call.
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
                    let why = "it acknowledged more payloads than it was sent";
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

    /// Receives payload bytes; true once the payload is complete.
    fn fill_body(&mut self) -> io::Result<bool> {
        loop {
            let place: &mut [u8] = match &mut self.body {
                Body::None => return Ok(true),
                Body::Memory { remaining: 0, .. } => &mut [],
                // SAFETY: the destination is valid and exclusive until the payload is complete (see
                // `body`).
                Body::Memory { at, remaining } => unsafe {
                    std::slice::from_raw_parts_mut(*at, *remaining)
                },
                Body::Owned { bytes, filled } => {
                    let (at, remaining) = (bytes[*filled..].as_mut_ptr(), bytes.len() - *filled);
                    // SAFETY: the rest of the local vector, which is neither moved nor grown
                    // meanwhile.
                    unsafe { std::slice::from_raw_parts_mut(at, remaining) }
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
                Body::Memory { at, remaining } => {
                    *at = at.wrapping_add(moved);
                    *remaining -= moved;
                }
                Body::Owned { filled, .. } => *filled += moved,
                Body::None => {}
            }
        }
    }

    /// Reads into `place` first and into the buffer after it; returns the bytes in `place`.
    fn receive(&mut self, place: &mut [u8]) -> io::Result<usize> {
        self.stash.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let missing = place.len() + self.stash.len() - self.end;
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
        self.drained = bytes < missing;
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
