//! One direction of a connection: a ring of bytes in shared memory with one producer and one
//! consumer, which are processes that do not trust each other.
//!
//! Both positions count bytes from the start of the connection, so their difference is the number
//! of bytes in the ring. Each side keeps its own position in private memory and only publishes it.
//! It reads the peer's position once for each step and checks it: a peer can stop a ring or fill it
//! with wrong bytes, which it could send anyway, but cannot make the other side access memory
//! outside the ring. Bytes are copied out before they are interpreted.
//!
//! A side that finds the ring empty or full announces that it waits, looks again, and sleeps until
//! the other side rings its bell (`super::link`). The bell rings only for a side that waits, and for
//! a writer only once half of the ring is free, so that a long transfer causes few wake-ups.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use crate::atomics::{Atomic, Atomics, Native};
use crate::shm::Mapped;

/// Bytes between two publications of a position: the other side copies them while this side copies
/// the next ones.
const PIECE_BYTES: usize = 64 << 10;

/// The peer has published a position that is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer wrote an impossible position into the shared memory of the connection")]
pub(super) struct Corrupt;

impl From<Corrupt> for std::io::Error {
    fn from(corrupt: Corrupt) -> Self {
        Self::new(std::io::ErrorKind::InvalidData, corrupt)
    }
}

/// Keeps what one side writes out of the cache lines that the other one writes.
#[repr(C, align(128))]
#[derive(Default)]
struct Line<T>(T);

/// The shared positions of a ring. Zeroed memory is an empty ring.
#[repr(C)]
pub(super) struct Positions<A: Atomics = Native> {
    /// Bytes written.
    tail: Line<A::U64>,
    /// Bytes consumed.
    head: Line<A::U64>,
    reader_waits: Line<A::U32>,
    writer_waits: Line<A::U32>,
}

impl<A: Atomics> Positions<A> {
    /// Bytes that can be read, for the reader at `head`.
    fn readable(&self, head: u64, capacity: usize) -> Result<usize, Corrupt> {
        let bytes = self.tail.0.load(Acquire).wrapping_sub(head);
        if bytes > capacity as u64 { Err(Corrupt) } else { Ok(bytes as usize) }
    }

    /// Bytes that can be written, for the writer at `tail`.
    fn writable(&self, tail: u64, capacity: usize) -> Result<usize, Corrupt> {
        let bytes = tail.wrapping_sub(self.head.0.load(Acquire));
        if bytes > capacity as u64 { Err(Corrupt) } else { Ok(capacity - bytes as usize) }
    }

    /// Publishes that everything before `tail` is written. True: ring the reader's bell.
    fn wrote(&self, tail: u64) -> bool {
        self.tail.0.store(tail, Release);
        Self::takes(&self.reader_waits.0)
    }

    /// Publishes that everything before `head` may be overwritten. True: ring the writer's bell.
    fn consumed(&self, head: u64, is_half_free: bool) -> bool {
        self.head.0.store(head, Release);
        is_half_free && Self::takes(&self.writer_waits.0)
    }

    /// Whether the other side waits; it is woken once. The fence is between the store of a position
    /// before and the load of the flag, as the other side's is between its store of the flag and its
    /// load of the position: one of both sees the other's store.
    fn takes(waits: &A::U32) -> bool {
        A::fence(SeqCst);
        waits.load(Relaxed) != 0 && waits.swap(0, Relaxed) != 0
    }

    fn announce(waits: &A::U32) {
        waits.store(1, Relaxed);
        A::fence(SeqCst);
    }
}

/// Shared bytes of a ring with this capacity.
pub(super) const fn ring_bytes(capacity: usize) -> usize {
    size_of::<Positions>() + capacity
}

/// A ring inside a mapping.
struct Ring {
    memory: Arc<Mapped>,
    offset: usize,
    capacity: usize,
}

impl Ring {
    /// `None` if the memory does not hold it. The capacity is a power of two.
    fn new(memory: &Arc<Mapped>, offset: usize, capacity: usize) -> Option<Self> {
        let aligned = offset.is_multiple_of(align_of::<Positions>());
        memory.at(offset as u64, ring_bytes(capacity))?;
        let memory = Arc::clone(memory);
        (aligned && capacity.is_power_of_two()).then_some(Self { memory, offset, capacity })
    }

    fn positions(&self) -> &Positions {
        // SAFETY: `new` checked that the positions are inside the mapping, which lives as long as
        // `self`, and aligned: mappings start at pages. They consist of atomics, for which every
        // bit pattern is valid and which other processes may change at any time.
        unsafe { &*self.memory.base().add(self.offset).cast::<Positions>() }
    }

    /// The contiguous bytes from a position: the address, and how many of `bytes` come before the
    /// end of the ring.
    fn place(&self, position: u64, bytes: usize) -> (*mut u8, usize) {
        let at = position as usize & (self.capacity - 1);
        // SAFETY: `at` is less than the capacity, and `new` checked that the ring is inside the
        // mapping.
        let address = unsafe { self.memory.base().add(self.offset + size_of::<Positions>() + at) };
        (address, bytes.min(self.capacity - at))
    }
}

/// The writing end.
pub(super) struct Producer {
    ring: Ring,
    tail: u64,
}

impl Producer {
    /// The writing end of the empty ring at an offset of the memory, if it is inside.
    pub(super) fn new(memory: &Arc<Mapped>, offset: usize, capacity: usize) -> Option<Self> {
        Some(Self { ring: Ring::new(memory, offset, capacity)?, tail: 0 })
    }

    /// Copies as many bytes of the parts as fit. Calls `ring_bell` whenever the reader must be
    /// woken.
    pub(super) fn write<E: From<Corrupt>>(
        &mut self,
        parts: &[IoSlice<'_>],
        mut ring_bell: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        let space = self.ring.positions().writable(self.tail, self.ring.capacity)?;
        let (mut written, mut unpublished) = (0, 0);
        for part in parts {
            let mut part: &[u8] = &part[..part.len().min(space - written)];
            while !part.is_empty() {
                let (piece, rest) = part.split_at(part.len().min(PIECE_BYTES - unpublished));
                self.copy(piece);
                (part, written, unpublished) =
                    (rest, written + piece.len(), unpublished + piece.len());
                if unpublished == PIECE_BYTES {
                    unpublished = 0;
                    if self.ring.positions().wrote(self.tail) {
                        ring_bell()?;
                    }
                }
            }
        }
        if unpublished > 0 && self.ring.positions().wrote(self.tail) {
            ring_bell()?;
        }
        Ok(written)
    }

    /// Announces that the writer waits for space. True if there is space after all.
    pub(super) fn wait(&self) -> Result<bool, Corrupt> {
        let positions = self.ring.positions();
        Positions::<Native>::announce(&positions.writer_waits.0);
        Ok(positions.writable(self.tail, self.ring.capacity)? > 0)
    }

    /// Copies bytes that fit to the tail.
    fn copy(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (address, length) = self.ring.place(self.tail, bytes.len());
            let (now, rest) = bytes.split_at(length);
            // SAFETY: `place` returned `length` bytes of the mapping, which do not overlap private
            // memory. No reference to shared bytes exists in this process, and only this end of the
            // ring writes them here; what a peer does to them at the same time changes only what it
            // reads itself.
            unsafe { address.copy_from_nonoverlapping(now.as_ptr(), length) };
            (bytes, self.tail) = (rest, self.tail.wrapping_add(length as u64));
        }
    }
}

/// The reading end.
pub(super) struct Consumer {
    ring: Ring,
    head: u64,
}

impl Consumer {
    /// The reading end of the empty ring at an offset of the memory, if it is inside.
    pub(super) fn new(memory: &Arc<Mapped>, offset: usize, capacity: usize) -> Option<Self> {
        Some(Self { ring: Ring::new(memory, offset, capacity)?, head: 0 })
    }

    /// Copies bytes into `into`, from its start, and returns their number: all that are there or
    /// that fit. Calls `ring_bell` whenever the writer must be woken.
    pub(super) fn read<E: From<Corrupt>>(
        &mut self,
        into: &mut [MaybeUninit<u8>],
        mut ring_bell: impl FnMut() -> Result<(), E>,
    ) -> Result<usize, E> {
        let there = self.ring.positions().readable(self.head, self.ring.capacity)?;
        let bytes = there.min(into.len());
        let mut read = 0;
        while read < bytes {
            let piece = &mut into[read..bytes.min(read + PIECE_BYTES)];
            self.copy(piece);
            read += piece.len();
            let is_half_free = there - read <= self.ring.capacity / 2;
            if self.ring.positions().consumed(self.head, is_half_free) {
                ring_bell()?;
            }
        }
        Ok(bytes)
    }

    /// Announces that the reader waits for bytes. True if there are some after all.
    pub(super) fn wait(&self) -> Result<bool, Corrupt> {
        let positions = self.ring.positions();
        Positions::<Native>::announce(&positions.reader_waits.0);
        Ok(positions.readable(self.head, self.ring.capacity)? > 0)
    }

    /// Copies bytes that are there from the head, and initialises all of `into`.
    fn copy(&mut self, mut into: &mut [MaybeUninit<u8>]) {
        while !into.is_empty() {
            let (address, length) = self.ring.place(self.head, into.len());
            let (now, rest) = into.split_at_mut(length);
            // SAFETY: `place` returned `length` bytes of the mapping, which do not overlap private
            // memory. They are read once, as plain bytes, and no reference to them exists: a peer
            // that changes them at the same time determines the copied values, which are its to
            // choose, and nothing else.
            unsafe { address.copy_to_nonoverlapping(now.as_mut_ptr().cast(), length) };
            (into, self.head) = (rest, self.head.wrapping_add(length as u64));
        }
    }
}

#[cfg(test)]
#[path = "ring_models.rs"]
mod models;
#[cfg(test)]
#[path = "ring_test.rs"]
mod tests;
