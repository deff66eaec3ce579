//! Interface of transports, which carry frames between this rank and one tree neighbor.
//!
//! The tree links and their shutdown use [`Transport`] only; the core, the plan, failure handling
//! and everything above do not depend on it. Implementations:
//! - `tcp`: TCP, one connection or several;
//! - `in_process`: queues in memory, for ranks that are threads of one process.
//!
//! A transport promises:
//! - Pushed frames leave, each of them whole. Frames may overtake each other; the core identifies
//!   them by operation, chunk and stage. Only [`Transport::push_final`] follows all frames before
//!   it.
//! - The note of a frame is returned once its memory may change, not before.
//! - A head is returned before its payload is received, and the payload is stored at the
//!   destination that is set then.
//! - After [`Transport::detach`] it accesses no memory but its own, though frames may be in flight.
//! - It returns an error after everything that the peer had sent.
//! - All descriptors that it waits for are in the poller: a rank blocks in one place.

use std::io;

use super::poller::{Poller, Ready};
use super::wire::Head;
use hfreduce_core::credit::Key;
use hfreduce_core::{DataHead, Place};

/// Maximum number of frames queued in a transport: enough for one system call to send several, few
/// enough that an older chunk which becomes ready does not queue behind many younger ones.
pub const QUEUED_MAX: usize = 4;
/// Position of a descriptor's number in the poller's token; the number of the link is below.
pub const DESCRIPTOR_SHIFT: u32 = 16;

/// Returned when a frame has been sent: the chunk that it carried, if any.
pub type Note = Option<Key>;
/// Returned when a payload is complete: its head, and its destination.
pub type Bound = (DataHead, Place);

/// Payload of a frame.
#[derive(Debug)]
pub enum Payload {
    /// Bytes owned by the frame.
    Owned(Vec<u8>),
    /// Memory owned by the caller.
    Memory(StableMemory),
    /// Bytes in this rank's segment, which the peer copies from there: the head holds the offset.
    /// The frame completes once the peer has acknowledged it.
    Mapped(usize),
    /// As `Mapped`, but the peer reads the bytes in place, and its next frame acknowledges them.
    MappedInPlace(usize),
}

/// Memory that stays valid and unchanged until its frame has been sent.
#[derive(Debug)]
pub struct StableMemory {
    at: *const u8,
    bytes: usize,
}

// SAFETY: the owner keeps the memory valid wherever the frame is, and it is not written meanwhile.
unsafe impl Send for StableMemory {}

impl StableMemory {
    /// # Safety
    /// The memory must stay valid for `bytes` and unchanged until its frame has been sent or its
    /// transport was detached.
    pub unsafe fn new(at: *const u8, bytes: usize) -> Self {
        Self { at, bytes }
    }
}

impl Payload {
    /// The bytes that follow the head on the wire; none for a payload that the peer maps.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Payload::Owned(bytes) => bytes,
            Payload::Memory(StableMemory { bytes: 0, .. })
            | Payload::Mapped(_)
            | Payload::MappedInPlace(_) => &[],
            // SAFETY: guaranteed by the caller of `StableMemory::new`; a frame that has been sent
            // has no payload.
            Payload::Memory(memory) => unsafe {
                std::slice::from_raw_parts(memory.at, memory.bytes)
            },
        }
    }
}

/// A received head or payload.
#[derive(Debug)]
pub enum Received {
    /// A head: [`Transport::body`] or [`Transport::body_owned`] sets the destination of its
    /// payload.
    Head(Head),
    /// A payload is complete.
    Payload(Bound),
    /// An owned payload is complete.
    Owned(Vec<u8>),
}

/// A transport of one link, used by one thread at a time. The cost of dynamic dispatch is negligible
/// compared with a chunk of some hundred KiB, or with the system call for a small one.
pub trait Transport: Send {
    /// Number of TCP connections; 0 for other transports.
    fn streams(&self) -> usize;

    /// Registers its descriptors, each under `token | number << DESCRIPTOR_SHIFT`.
    ///
    /// # Errors
    /// A system call failed.
    fn watch(&mut self, poller: &Poller, token: u64) -> io::Result<()>;

    /// Removes its descriptors from the poller.
    fn forget(&self, poller: &Poller);

    /// Handles an event of the descriptor of this number; true if queued frames may be sent now.
    fn woken(&mut self, line: usize, event: Ready) -> bool;

    /// Makes the next [`Transport::receive_next`] check all descriptors.
    fn look_again(&mut self);

    /// True if another frame would be sent soon.
    fn takes_more(&self) -> bool;

    /// True if a heartbeat would not queue behind other frames.
    fn is_idle(&self) -> bool;

    /// Queues a frame.
    fn push(&mut self, head: &Head, payload: Payload, note: Note);

    /// Queues a heartbeat in each part that may end separately.
    fn beat(&mut self, head: &Head);

    /// Queues the final frame: an end after it is orderly.
    fn push_final(&mut self, head: &Head, payload: &[u8]);

    /// Sends as much as possible; notes of sent frames are added to `sent_notes`.
    ///
    /// # Errors
    /// A connection failed; [`Transport::receive_next`] returns what the peer had sent, then the
    /// error.
    fn flush(&mut self, poller: &Poller, sent_notes: &mut Vec<Note>) -> io::Result<()>;

    /// True if nothing is queued for a live peer.
    fn is_flushed(&self) -> bool;

    /// Bytes that would be lost if the transport were dropped now.
    fn unsent_bytes(&self) -> usize;

    /// Returns the next arrival, if any.
    ///
    /// # Errors
    /// The end of the peer: `UnexpectedEof`, `InvalidData` for an invalid frame, or the error of a
    /// system call.
    fn receive_next(&mut self, poller: &Poller) -> io::Result<Option<Received>>;

    /// Sets the destination of the payload of the last head; `bound` is returned with it.
    ///
    /// # Safety
    /// The memory must stay valid for `bytes` and exclusive until the payload is complete or
    /// [`Transport::detach`] was called.
    unsafe fn body(&mut self, at: *mut u8, bytes: usize, bound: Bound);

    /// Receives the payload of the last head into a new vector.
    fn body_owned(&mut self, bytes: usize);

    /// Detaches the transport from all memory but its own. Frames that are not partly sent are
    /// dropped.
    fn detach(&mut self);

    /// True if every part that may end separately has received data since this was last true.
    fn poll_received(&mut self) -> bool;

    /// Bytes sent and received.
    fn traffic(&self) -> (u64, u64);

    /// True if the peer has closed all parts: its end is orderly.
    fn peer_closed(&self) -> bool;

    /// True if neighbors on one machine may map each other's memory over it.
    fn supports_peer_memory(&self) -> bool {
        false
    }

    /// Notes of mapped frames that the peer has copied since the last call.
    fn take_copied(&mut self) -> Vec<Note> {
        Vec::new()
    }

    /// Records that the mapped payload of the last head has been copied.
    fn copied(&mut self, _bytes: usize) {}

    /// Records that a payload of the peer has been read in place.
    fn read_in_place(&mut self, _bytes: usize) {}

    /// True if acknowledgments are due.
    fn has_unacked(&self) -> bool {
        false
    }
}

#[cfg(test)]
#[path = "transport_test.rs"]
mod tests;
