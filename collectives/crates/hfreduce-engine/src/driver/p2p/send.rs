//! Sending side of point-to-point connections.

use std::sync::atomic::Ordering;

use hfreduce_kernels::Store;

use super::staging::{PieceRoute, STAGED_FROM_BYTES};
use super::{Note, P2p, token};
use crate::driver::fault::Fault;
use crate::driver::node::Node;
use crate::driver::operations::Operations;
use hfreduce_transport::poller::Ready;
use hfreduce_transport::transport::{Payload, StableMemory};
use hfreduce_transport::wire::{Frame, Head, PIECE_BYTES_MAX};

/// Pieces queued in a socket at a time.
const QUEUED_MAX: usize = 2;

impl P2p {
    /// Sends as much as possible; true if anything changed.
    pub(in crate::driver) fn progress(
        &mut self,
        node: &Node,
        operations: &mut Operations,
    ) -> Result<bool, Fault> {
        let mut moved = false;
        let outward: Vec<u32> = self.outgoing.keys().copied().collect();
        for peer in outward {
            moved |= self.load(node, peer);
            moved |= self.flush(node, operations, peer, false)?;
        }
        let inward: Vec<u32> = self.incoming.keys().copied().collect();
        for peer in inward {
            self.ack_slots(peer);
            moved |= self.flush(node, operations, peer, true)?;
        }
        Ok(moved)
    }

    fn load(&mut self, node: &Node, peer: u32) -> bool {
        let near = node.local_of(peer).is_some();
        let (local, slot_bytes) = (node.local(), node.shm.shape().slot_bytes);
        let Some(outgoing) = self.outgoing.get_mut(&peer) else { return false };
        let Some(connection) = &mut outgoing.connection else { return false };
        let mut loaded = false;
        while let Some((head, payload)) = outgoing.frames.pop_front() {
            connection.push(&head, Payload::Owned(payload), Note::default());
            loaded = true;
        }
        while connection.queued() < QUEUED_MAX {
            let Some(stream) = outgoing.messages.front_mut() else { break };
            let Some(active) = self.operations.get(&stream.ticket.operation) else { break };
            let Some(transfer) = active.operation.transfers.get(stream.ticket.transfer) else {
                break;
            };
            let route =
                self.slots.route(near && transfer.bytes >= STAGED_FROM_BYTES, outgoing.staged);
            let most = match route {
                PieceRoute::Wait => break,
                PieceRoute::Socket => PIECE_BYTES_MAX,
                PieceRoute::Slot => slot_bytes.min(PIECE_BYTES_MAX),
            };
            let bytes = (transfer.bytes - stream.sent_bytes).min(most);
            let from = transfer.offset + stream.sent_bytes;
            let Some(memory) = active.operation.input.contiguous(from, bytes) else { break };
            let slot = if route == PieceRoute::Slot { self.slots.take() } else { None };
            let staged = slot.and_then(|slot| Some((slot, node.shm.message(local, slot)?)));
            stream.sent_bytes += bytes;
            let last = stream.sent_bytes == transfer.bytes;
            let frame = Frame::Piece { message: stream.message };
            let mapped = staged.map(|(slot, _)| slot as u64);
            let head = Head { payload_bytes: bytes, mapped, ..Head::bare(frame) };
            let payload = if let Some((_, place)) = staged {
                outgoing.staged += 1;
                node.shared.counters.staged_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                // SAFETY: inside the operation's input, which does not change until the operation
                // ends; the slot holds as many bytes, and the peer reads it only after this frame.
                unsafe { hfreduce_kernels::copy_raw(Store::Cached, memory, place, bytes) };
                Payload::Mapped(bytes)
            } else {
                // SAFETY: inside the operation's input, which stays unchanged until the operation
                // ends: not before this frame has been sent or `detach` was called.
                Payload::Memory(unsafe { StableMemory::new(memory, bytes) })
            };
            let completes = last.then_some(stream.ticket);
            let slot = staged.map(|(slot, _)| slot);
            connection.push(&head, payload, Note { completes, slot });
            node.shared.peer_bytes.count_sent(peer, bytes);
            loaded = true;
            if last {
                outgoing.messages.pop_front();
            }
        }
        loaded
    }

    pub(super) fn flush(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        peer: u32,
        inward: bool,
    ) -> Result<bool, Fault> {
        let mut sent_notes = Vec::new();
        let Some(connection) = self.connection(peer, inward) else { return Ok(false) };
        if connection.queued() == 0 {
            return Ok(false);
        }
        let before = connection.sent_bytes;
        let flushed = connection.flush(&mut sent_notes);
        let moved = connection.sent_bytes != before;
        let full = connection.queued() > 0;
        if let Err(error) = flushed {
            // As for tree links: frames that the peer sent earlier are handled first.
            let ready = Ready { token: token(peer, inward), readable: true, writable: false };
            self.handle(node, operations, ready)?;
            if self.connection(peer, inward).is_some() {
                self.disconnected(node, peer, inward, &error)?;
            }
            return Ok(true);
        }
        self.update_interest(node, peer, inward, full);
        for ticket in sent_notes.into_iter().filter_map(|note| note.completes) {
            self.transferred(node, operations, ticket);
        }
        Ok(moved)
    }

    fn update_interest(&mut self, node: &Node, peer: u32, inward: bool, full: bool) {
        let token = token(peer, inward);
        if inward {
            if let Some(incoming) = self.incoming.get_mut(&peer)
                && std::mem::replace(&mut incoming.wants_room, full) != full
            {
                let _ = node.poller.want_room(&incoming.connection, token, full);
            }
        } else if let Some(outgoing) = self.outgoing.get_mut(&peer)
            && std::mem::replace(&mut outgoing.wants_room, full) != full
            && let Some(connection) = &outgoing.connection
        {
            let _ = node.poller.want_room(connection, token, full);
        }
    }
}
