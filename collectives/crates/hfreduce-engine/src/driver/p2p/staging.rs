//! Payloads between ranks of one node: through slots of the segment instead of a socket.
//!
//! ```text
//! sender    copies a piece into one of its slots, sends a head with the slot's number
//! receiver  copies it to its destination, and acknowledges it with the next head that it sends
//! sender    may use the slot again; the message is sent once its last piece was copied
//! ```
//! A peer holds at most [`PER_PEER`] slots, and without a free one a piece uses the socket: no
//! message waits for another peer's.

use hfreduce_kernels::Store;

use super::{Note, P2p};
use crate::driver::node::Node;
use crate::driver::operations::Operations;
use hfreduce_core::tree::Violation;
use hfreduce_shm::segment::MESSAGE_SLOTS;
use hfreduce_transport::transport::Payload;
use hfreduce_transport::wire::{Frame, Head};

/// Shorter messages use the socket: their payload follows the head in one system call.
pub(super) const STAGED_FROM_BYTES: usize = 32 << 10;
/// One slot is filled while the other one is read.
const PER_PEER: usize = 2;

/// Free message slots of this rank.
#[derive(Debug)]
pub(super) struct Slots(Vec<usize>);

/// Route of the next piece of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceRoute {
    Socket,
    Slot,
    /// Wait until the peer has returned a slot.
    Wait,
}

impl Default for Slots {
    fn default() -> Self {
        Self((0..MESSAGE_SLOTS).rev().collect())
    }
}

impl Slots {
    /// The route to a peer with `used` slots; `staged`: it is on this node and the message is long.
    pub(super) fn route(&self, staged: bool, used: usize) -> PieceRoute {
        let free = !self.0.is_empty();
        if !staged || (used == 0 && !free) {
            PieceRoute::Socket
        } else if used < PER_PEER && free {
            PieceRoute::Slot
        } else {
            PieceRoute::Wait
        }
    }

    pub(super) fn take(&mut self) -> Option<usize> {
        self.0.pop()
    }
}

impl P2p {
    /// Copies a piece of a message from the slot of its sender.
    ///
    /// # Safety
    /// `place` must be writable for `bytes` and belong to the message.
    pub(super) unsafe fn take_staged(
        &mut self,
        node: &Node,
        (peer, message): (u32, u64),
        slot: u64,
        place: *mut u8,
        bytes: usize,
    ) -> Result<(), Violation> {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        let source = node.local_of(peer).and_then(|local| node.shm.message(local, slot));
        let source = source.filter(|_| bytes <= node.shm.shape().slot_bytes);
        let (Some(source), Some(incoming)) = (source, self.incoming.get_mut(&peer)) else {
            let why = format!("invalid message slot {slot} for {bytes} bytes");
            return Err(Violation::Protocol(why));
        };
        // SAFETY: the slot holds the bytes and its owner keeps them until they are acknowledged;
        // the destination is valid (guaranteed by the caller) and not in the segment.
        unsafe { hfreduce_kernels::copy_raw(Store::Cached, source, place, bytes) };
        incoming.connection.copied(bytes);
        self.pairs.arrived(peer, message, bytes as u64);
        Ok(())
    }

    /// Acknowledges copied slots, unless another head has done so.
    pub(super) fn ack_slots(&mut self, peer: u32) {
        if let Some(incoming) = self.incoming.get_mut(&peer)
            && incoming.connection.has_unacked()
        {
            let head = Head::bare(Frame::Credit);
            incoming.connection.push(&head, Payload::Owned(vec![]), Note::default());
        }
    }

    /// Handles the acknowledgment of a slot.
    pub(super) fn unstage(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        peer: u32,
        note: Note,
    ) {
        if let Some(slot) = note.slot {
            self.slots.0.push(slot);
        }
        if let Some(outgoing) = self.outgoing.get_mut(&peer) {
            outgoing.staged = outgoing.staged.saturating_sub(1);
        }
        if let Some(ticket) = note.completes {
            self.transferred(node, operations, ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_waits_only_for_its_peer() {
        let mut slots = Slots::default();
        assert_eq!(slots.route(false, 0), PieceRoute::Socket);
        assert_eq!(
            (slots.route(true, 0), slots.route(true, 1)),
            (PieceRoute::Slot, PieceRoute::Slot)
        );
        assert_eq!(slots.route(true, PER_PEER), PieceRoute::Wait);
        let indices: Vec<usize> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(indices, (0..MESSAGE_SLOTS).collect::<Vec<_>>());
        // Other peers hold all slots: this peer's messages neither wait for them nor overtake each
        // other.
        assert_eq!(
            (slots.route(true, 0), slots.route(true, 1)),
            (PieceRoute::Socket, PieceRoute::Wait)
        );
    }
}
