//! The seam for transports: what carries frames between this rank and one tree neighbour.
//!
//! The tree links and the farewell know [`Transport`] and nothing of what is behind it; core, plan,
//! failure and everything above know not even that. Behind it are
//! - `streams`: TCP, one connection or several;
//! - `in_process`: queues in memory, for ranks that are threads of one process.
//!
//! A transport promises:
//! - What was pushed leaves, each frame whole. Frames may overtake each other; the core tells them
//!   by operation, chunk and stage. [`Transport::push_final`] alone comes behind all before it.
//! - A frame's note comes back once its memory may change, not before.
//! - A head is told before its payload moves, and the payload goes to the place that is named then.
//! - After [`Transport::detach`] it touches no memory but its own, though frames may be under way.
//! - Before it tells an error it has told everything that the peer had said.
//! - All that it waits for are descriptors in the poller: a rank blocks in one place.

use std::io;
use std::net::TcpStream;

use fabric::deadline::Deadline;

use super::in_process::InProcess;
use super::poller::{Poller, Ready};
use super::streams::Streams;
use super::wire::Head;
use crate::core::credit::Key;
use crate::core::{DataHead, Place};
use crate::endpoint::TransportKind;

/// Frames handed to a carrier at a time: enough for one system call to take several, few enough
/// that an older chunk which becomes ready does not queue behind many younger ones.
pub const QUEUED_MAX: usize = 4;
/// Where the number of a transport's descriptor is in the token of the poller; the link's number
/// is below.
pub const DESCRIPTOR_SHIFT: u32 = 16;

/// What comes back when a frame is gone: the chunk that it carried, if any.
pub type Note = Option<Key>;
/// What comes back when a payload is complete: what it is, and the place that it went to.
pub type Bound = (DataHead, Place);

/// What a frame carries besides its head.
#[derive(Debug)]
pub enum Payload {
    /// Bytes of our own.
    Owned(Vec<u8>),
    /// Memory of somebody else's.
    Memory(StableMemory),
    /// So many bytes of our segment, which the peer copies from there: the head says where. The
    /// frame is gone once the peer has said that it did.
    Mapped(usize),
    /// The same, where the peer reads them without a copy and its answer tells that it did.
    MappedInPlace(usize),
}

/// Memory that stays valid and unchanged until its frame is gone.
#[derive(Debug)]
pub struct StableMemory {
    at: *const u8,
    bytes: usize,
}

// SAFETY: a place that its owner keeps valid wherever the frame is; nobody writes to it meanwhile.
unsafe impl Send for StableMemory {}

impl StableMemory {
    /// # Safety
    /// The memory must stay valid for `bytes`, and nobody may write to it, until its frame is gone or
    /// its carrier was detached.
    pub unsafe fn new(at: *const u8, bytes: usize) -> Self {
        Self { at, bytes }
    }
}

impl Payload {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Payload::Owned(bytes) => bytes,
            Payload::Memory(StableMemory { bytes: 0, .. })
            | Payload::Mapped(_)
            | Payload::MappedInPlace(_) => &[],
            // SAFETY: the promise of `StableMemory::new`; a frame that is gone has no payload.
            Payload::Memory(memory) => unsafe {
                std::slice::from_raw_parts(memory.at, memory.bytes)
            },
        }
    }
}

/// What arrived.
#[derive(Debug)]
pub enum Received {
    /// A head: say with [`Transport::body`] or [`Transport::body_owned`] where its payload goes.
    Head(Head),
    /// A payload is complete.
    Payload(Bound),
    /// An owned payload is complete.
    Owned(Vec<u8>),
}

/// What carries frames to the rank at the other end of these connections, which have proved who is
/// there; `dialed` says which of the two we are. A transport of another kind tells the peer over
/// them where it is.
///
/// # Errors
/// What the kernel says, or the end of the peer.
pub fn open(
    kind: TransportKind,
    connections: Vec<TcpStream>,
    dialed: bool,
    slot_bytes: usize,
    deadline: Deadline,
) -> io::Result<Box<dyn Transport>> {
    Ok(match kind {
        TransportKind::Tcp => Box::new(Streams::new(connections, slot_bytes)?),
        TransportKind::InProcess => {
            let first = connections.into_iter().next().ok_or(io::ErrorKind::NotConnected)?;
            Box::new(InProcess::meet(first, dialed, deadline)?)
        }
    })
}

/// See the module's text. Called by one thread at a time, through a pointer: for a chunk of some
/// hundred KiB, and beside the system call that a small one takes, that is nothing.
pub trait Transport: Send {
    /// TCP connections in it; 0 where it is something else.
    fn streams(&self) -> usize;

    /// Registers its descriptors, each under `token | number << DESCRIPTOR_SHIFT`.
    ///
    /// # Errors
    /// What the kernel says.
    fn watch(&mut self, poller: &Poller, token: u64) -> io::Result<()>;

    /// Takes them out again.
    fn forget(&self, poller: &Poller);

    /// Something happened at the descriptor of this number; true if what waits may go on now.
    fn woken(&mut self, line: usize, event: Ready) -> bool;

    /// There may be something to read wherever there was nothing.
    fn look_again(&mut self);

    /// True if another frame would soon be on its way.
    fn takes_more(&self) -> bool;

    /// True if a sign of life would not queue behind anything.
    fn is_idle(&self) -> bool;

    /// Queues a frame.
    fn push(&mut self, head: &Head, payload: Payload, note: Note);

    /// Queues a sign of life: each part that may end by itself has to give one.
    fn beat(&mut self, head: &Head);

    /// Queues the last frame, so that whatever ends from now on has ended in order.
    fn push_final(&mut self, head: &Head, payload: &[u8]);

    /// Sends what can go; notes of frames that are gone go to `gone`.
    ///
    /// # Errors
    /// Something is broken; [`Transport::receive_next`] tells what the peer said before, then why.
    fn flush(&mut self, poller: &Poller, gone: &mut Vec<Note>) -> io::Result<()>;

    /// True if nothing is queued for a peer that listens.
    fn is_flushed(&self) -> bool;

    /// Bytes that would be lost if it were dropped now.
    fn unsent_bytes(&self) -> usize;

    /// The next arrival, if there is one.
    ///
    /// # Errors
    /// The end of the peer: `UnexpectedEof`, `InvalidData` for what makes no sense, or what the
    /// kernel says.
    fn receive_next(&mut self, poller: &Poller) -> io::Result<Option<Received>>;

    /// The payload of the head just told goes there, and `bound` comes back with it.
    ///
    /// # Safety
    /// The memory must stay valid for `bytes` and untouched until the payload is complete or
    /// [`Transport::detach`] was called.
    unsafe fn body(&mut self, at: *mut u8, bytes: usize, bound: Bound);

    /// The payload of the head just told goes into memory of its own.
    fn body_owned(&mut self, bytes: usize);

    /// From now on it reads and writes no memory but its own. Frames that have not begun are gone.
    fn detach(&mut self);

    /// True if every part of it that may end by itself was heard since this was last true.
    fn heard(&mut self) -> bool;

    /// Bytes sent and received.
    fn traffic(&self) -> (u64, u64);

    /// True if the peer has taken leave everywhere: its end is in order.
    fn peer_closed(&self) -> bool;

    /// True if neighbours on one machine may use it to lend each other memory (`peer_memory`).
    fn supports_peer_memory(&self) -> bool {
        false
    }

    /// Lent frames that the peer has copied since the last call.
    fn take_copied(&mut self) -> Vec<Note> {
        Vec::new()
    }

    /// We have copied a payload that the peer lent with the head just told.
    fn copied(&mut self, _bytes: usize) {}

    /// We read a payload of the peer's where it lies.
    fn read_in_place(&mut self, _bytes: usize) {}

    /// True while the peer does not know of all that we copied.
    fn owes_acks(&self) -> bool {
        false
    }
}

#[cfg(test)]
#[path = "transport_test.rs"]
mod tests;
