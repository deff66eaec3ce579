//! In-process transport: frames between ranks that are threads of one process, through queues in
//! memory. It has one descriptor, a doorbell, and no socket.
//!
//! The two ends find each other as those of any transport do: over the authenticated connection one
//! end sends the other its address. Here that is a number in a table of the process.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, LazyLock, Mutex};

use fabric::auth::nonce;
use fabric::deadline::Deadline;
use rustix::fd::OwnedFd;

use super::poller::{self, Poller, Ready};
use super::transport::{Bound, Note, Payload, QUEUED_MAX, Received, Transport};
use super::wire::{Frame, HEAD_BYTES, Head};
use hfreduce_shm::lock;

/// Bytes in flight in one direction, beyond which the sender waits.
const UNDER_WAY_BYTES: usize = 1 << 20;

/// Ends that wait to be taken by the other rank.
static WAITING: LazyLock<Mutex<HashMap<u64, InProcess>>> = LazyLock::new(Mutex::default);

/// One direction.
#[derive(Default)]
struct Queue {
    frames: VecDeque<(Head, Vec<u8>)>,
    bytes: usize,
    /// One of the ends is closed.
    over: bool,
}

struct End {
    queue: Mutex<Queue>,
    /// Notifies the reader of the queue: it has grown, or the queue of the other direction has
    /// room.
    doorbell: OwnedFd,
}

/// One end of an in-process link.
pub struct InProcess {
    inward: Arc<End>,
    outward: Arc<End>,
    /// Frames that are not sent yet.
    waiting: VecDeque<(Head, Payload, Note)>,
    broken: bool,
    /// The payload of the last head, and what follows once its destination is known.
    payload: Vec<u8>,
    complete: Option<Received>,
    peer_closed: bool,
    sent_bytes: u64,
    received_bytes: u64,
    polled_bytes: u64,
}

impl InProcess {
    /// Creates the two ends of a link.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let end = || {
            Ok::<_, io::Error>(Arc::new(End {
                queue: Mutex::default(),
                doorbell: poller::doorbell()?,
            }))
        };
        let (first, other) = (end()?, end()?);
        Ok((Self::between(first.clone(), other.clone()), Self::between(other, first)))
    }

    /// Finds the other end over an authenticated connection.
    ///
    /// # Errors
    /// The peer has disconnected, or runs in another process.
    pub fn meet(mut stream: TcpStream, dialed: bool, deadline: Deadline) -> io::Result<Self> {
        let mut number = [0; 8];
        if dialed {
            let (own, other) = Self::pair()?;
            number.copy_from_slice(&nonce()?[..8]);
            lock(&WAITING).insert(u64::from_le_bytes(number), other);
            stream.write_all(&number)?;
            return Ok(own);
        }
        let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(remaining))?;
        stream.read_exact(&mut number)?;
        let endpoint = lock(&WAITING).remove(&u64::from_le_bytes(number));
        endpoint.ok_or_else(|| io::Error::other("its ranks are not all threads of one process"))
    }

    fn between(inward: Arc<End>, outward: Arc<End>) -> Self {
        Self {
            inward,
            outward,
            waiting: VecDeque::new(),
            broken: false,
            payload: Vec::new(),
            complete: None,
            peer_closed: false,
            sent_bytes: 0,
            received_bytes: 0,
            polled_bytes: 0,
        }
    }
}

impl Transport for InProcess {
    fn streams(&self) -> usize {
        0
    }

    fn watch(&mut self, poller: &Poller, token: u64) -> io::Result<()> {
        poller.watch_edges(&self.inward.doorbell, token)
    }

    fn forget(&self, poller: &Poller) {
        poller.forget(&self.inward.doorbell);
    }

    fn woken(&mut self, _line: usize, _event: Ready) -> bool {
        !self.waiting.is_empty()
    }

    fn look_again(&mut self) {}

    fn takes_more(&self) -> bool {
        self.waiting.len() < QUEUED_MAX && !self.broken
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.broken
    }

    fn push(&mut self, head: &Head, payload: Payload, note: Note) {
        self.waiting.push_back((*head, payload, note));
    }

    fn beat(&mut self, head: &Head) {
        self.push(head, Payload::Owned(Vec::new()), None);
    }

    fn push_final(&mut self, head: &Head, payload: &[u8]) {
        self.push(head, Payload::Owned(payload.to_vec()), None);
    }

    fn flush(&mut self, _poller: &Poller, notes: &mut Vec<Note>) -> io::Result<()> {
        let mut queue = lock(&self.outward.queue);
        if queue.over && !self.broken && !self.waiting.is_empty() {
            self.broken = true;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let before = self.sent_bytes;
        while queue.bytes < UNDER_WAY_BYTES
            && !queue.over
            && let Some((head, payload, note)) = self.waiting.pop_front()
        {
            let bytes = HEAD_BYTES + payload.bytes().len();
            queue.frames.push_back((head, payload.bytes().to_vec()));
            queue.bytes += bytes;
            self.sent_bytes += bytes as u64;
            notes.push(note);
        }
        drop(queue);
        if self.sent_bytes > before {
            poller::notify(&self.outward.doorbell);
        }
        Ok(())
    }

    fn is_flushed(&self) -> bool {
        self.waiting.is_empty() || self.broken
    }

    fn unsent_bytes(&self) -> usize {
        match self.broken {
            true => 0,
            false => self.waiting.iter().map(|(_, p, _)| HEAD_BYTES + p.bytes().len()).sum(),
        }
    }

    fn receive_next(&mut self, _poller: &Poller) -> io::Result<Option<Received>> {
        if let Some(complete) = self.complete.take() {
            return Ok(Some(complete));
        }
        let mut queue = lock(&self.inward.queue);
        let Some((head, payload)) = queue.frames.pop_front() else {
            return if queue.over { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(None) };
        };
        let was_full = queue.bytes >= UNDER_WAY_BYTES;
        let bytes = HEAD_BYTES + payload.len();
        queue.bytes -= bytes;
        let has_room = queue.bytes < UNDER_WAY_BYTES;
        drop(queue);
        if was_full && has_room {
            poller::notify(&self.outward.doorbell);
        }
        self.received_bytes += bytes as u64;
        self.peer_closed |= matches!(head.frame, Frame::Close { .. });
        self.payload = payload;
        Ok(Some(Received::Head(head)))
    }

    unsafe fn body(&mut self, at: *mut u8, bytes: usize, bound: Bound) {
        let bytes = bytes.min(self.payload.len());
        // SAFETY: the destination is valid for `bytes` and exclusive (guaranteed by the caller),
        // and does not overlap the local vector.
        unsafe { std::ptr::copy_nonoverlapping(self.payload.as_ptr(), at, bytes) };
        self.complete = Some(Received::Payload(bound));
    }

    fn body_owned(&mut self, _bytes: usize) {
        self.complete = Some(Received::Owned(std::mem::take(&mut self.payload)));
    }

    fn detach(&mut self) {
        // No frame is partly sent, and arrived payloads have been copied.
        self.waiting.clear();
    }

    fn poll_received(&mut self) -> bool {
        std::mem::replace(&mut self.polled_bytes, self.received_bytes) != self.received_bytes
    }

    fn traffic(&self) -> (u64, u64) {
        (self.sent_bytes, self.received_bytes)
    }

    fn peer_closed(&self) -> bool {
        self.peer_closed
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        for end in [&self.inward, &self.outward] {
            lock(&end.queue).over = true;
        }
        poller::notify(&self.outward.doorbell);
    }
}
