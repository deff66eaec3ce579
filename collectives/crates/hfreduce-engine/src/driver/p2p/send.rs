//! Sending side of point-to-point connections.

use std::sync::atomic::Ordering;

use hfreduce_kernels::Store;

use super::Note;
use super::staging::{PieceRoute, STAGED_FROM_BYTES};
use crate::driver::{Driver, TOKEN_P2P_IN, TOKEN_P2P_OUT};
use hfreduce_transport::poller::Ready;
use hfreduce_transport::transport::{Payload, StableMemory};
use hfreduce_transport::wire::{Frame, Head, PIECE_BYTES_MAX};

/// Pieces queued in a socket at a time.
const QUEUED_MAX: usize = 2;

impl Driver {
    /// Sends as much as possible; true if anything changed.
    pub(in crate::driver) fn progress_p2p(&mut self) -> bool {
        let mut moved = false;
        let outward: Vec<u32> = self.p2p.outgoing.keys().copied().collect();
        for peer in outward {
            moved |= self.load_p2p(peer);
            moved |= self.flush_p2p(peer, false);
        }
        let inward: Vec<u32> = self.p2p.incoming.keys().copied().collect();
        for peer in inward {
            self.ack_slots(peer);
            moved |= self.flush_p2p(peer, true);
        }
        moved
    }

    fn load_p2p(&mut self, peer: u32) -> bool {
        let near = self.local_of(peer).is_some();
        let (local, slot_bytes) = (self.shared.identity.local(), self.shm.shape().slot_bytes);
        let p2p = &mut self.p2p;
        let Some(outgoing) = p2p.outgoing.get_mut(&peer) else { return false };
        let Some(connection) = &mut outgoing.connection else { return false };
        let mut loaded = false;
        while let Some((word, payload)) = outgoing.words.pop_front() {
            connection.push(&word, Payload::Owned(payload), Note::default());
            loaded = true;
        }
        while connection.queued() < QUEUED_MAX {
            let Some(stream) = outgoing.messages.front_mut() else { break };
            let Some(found) = p2p.operations.get(&stream.ticket.operation) else { break };
            let Some(transfer) = found.operation.transfers.get(stream.ticket.transfer) else {
                break;
            };
            let route =
                p2p.slots.route(near && transfer.bytes >= STAGED_FROM_BYTES, outgoing.staged);
            let most = match route {
                PieceRoute::Wait => break,
                PieceRoute::Socket => PIECE_BYTES_MAX,
                PieceRoute::Slot => slot_bytes.min(PIECE_BYTES_MAX),
            };
            let bytes = (transfer.bytes - stream.sent).min(most);
            let from = transfer.offset + stream.sent;
            let Some(memory) = found.operation.input.contiguous(from, bytes) else { break };
            let slot = if route == PieceRoute::Slot { p2p.slots.take() } else { None };
            let staged = slot.and_then(|slot| Some((slot, self.shm.message(local, slot)?)));
            stream.sent += bytes;
            let last = stream.sent == transfer.bytes;
            let frame = Frame::Piece { message: stream.message };
            let mapped = staged.map(|(slot, _)| slot as u64);
            let head = Head { payload_bytes: bytes, mapped, ..Head::bare(frame) };
            let payload = if let Some((_, place)) = staged {
                outgoing.staged += 1;
                self.shared.counters.staged_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
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
            loaded = true;
            if last {
                outgoing.messages.pop_front();
            }
        }
        loaded
    }

    pub(super) fn flush_p2p(&mut self, peer: u32, inward: bool) -> bool {
        let mut sent_notes = Vec::new();
        let Some(connection) = self.p2p_connection(peer, inward) else { return false };
        if connection.queued() == 0 {
            return false;
        }
        let before = connection.sent_bytes;
        let flushed = connection.flush(&mut sent_notes);
        let moved = connection.sent_bytes != before;
        let full = connection.queued() > 0;
        if let Err(error) = flushed {
            // As for tree links: frames that the peer sent before come first.
            let token = if inward { TOKEN_P2P_IN } else { TOKEN_P2P_OUT } | u64::from(peer);
            self.handle_p2p_event(Ready { token, readable: true, writable: false });
            if self.p2p_connection(peer, inward).is_some() {
                self.p2p_lost(peer, inward, &error);
            }
            return true;
        }
        self.update_p2p_interest(peer, inward, full);
        for ticket in sent_notes.into_iter().filter_map(|note| note.completes) {
            self.transferred(ticket);
        }
        moved
    }

    fn update_p2p_interest(&mut self, peer: u32, inward: bool, full: bool) {
        let token = if inward { TOKEN_P2P_IN } else { TOKEN_P2P_OUT } | u64::from(peer);
        let poller = &self.poller;
        if inward {
            if let Some(incoming) = self.p2p.incoming.get_mut(&peer)
                && std::mem::replace(&mut incoming.wants_room, full) != full
            {
                let _ = poller.want_room(&incoming.connection, token, full);
            }
        } else if let Some(outgoing) = self.p2p.outgoing.get_mut(&peer)
            && std::mem::replace(&mut outgoing.wants_room, full) != full
            && let Some(connection) = &outgoing.connection
        {
            let _ = poller.want_room(connection, token, full);
        }
    }
}
