//! What goes out over direct connections.

use std::sync::atomic::Ordering;

use hfreduce_kernels::Store;

use super::Note;
use super::staging::{STAGED_FROM_BYTES, Way};
use crate::drivers::poller::Ready;
use crate::drivers::transport::{Lasting, Payload};
use crate::drivers::wire::{Frame, Head, PIECE_BYTES_MAX};
use crate::drivers::{Driver, TOKEN_MESH_IN, TOKEN_MESH_OUT};

/// Pieces handed to a socket at a time.
const QUEUED_MAX: usize = 2;

impl Driver {
    /// Sends what can be sent; true if anything moved.
    pub(in crate::drivers) fn move_mesh(&mut self) -> bool {
        let mut moved = false;
        let outward: Vec<u32> = self.mesh.outgoing.keys().copied().collect();
        for peer in outward {
            moved |= self.load_mesh(peer);
            moved |= self.flush_mesh(peer, false);
        }
        let inward: Vec<u32> = self.mesh.incoming.keys().copied().collect();
        for peer in inward {
            self.return_slots(peer);
            moved |= self.flush_mesh(peer, true);
        }
        moved
    }

    fn load_mesh(&mut self, peer: u32) -> bool {
        let near = self.local_of(peer).is_some();
        let (local, slot_bytes) = (self.shared.identity.local(), self.board.shape().slot_bytes);
        let mesh = &mut self.mesh;
        let Some(outgoing) = mesh.outgoing.get_mut(&peer) else { return false };
        let Some(connection) = &mut outgoing.connection else { return false };
        let mut loaded = false;
        while let Some((word, payload)) = outgoing.words.pop_front() {
            connection.push(&word, Payload::Owned(payload), Note::default());
            loaded = true;
        }
        while connection.queued() < QUEUED_MAX {
            let Some(stream) = outgoing.streams.front_mut() else { break };
            let Some(found) = mesh.operations.get(&stream.ticket.operation) else { break };
            let Some(transfer) = found.operation.transfers.get(stream.ticket.transfer) else {
                break;
            };
            let way = mesh.slots.way(near && transfer.bytes >= STAGED_FROM_BYTES, outgoing.staged);
            let most = match way {
                Way::Wait => break,
                Way::Socket => PIECE_BYTES_MAX,
                Way::Slot => slot_bytes.min(PIECE_BYTES_MAX),
            };
            let bytes = (transfer.bytes - stream.sent).min(most);
            let from = transfer.offset + stream.sent;
            let Some(memory) = found.operation.input.contiguous(from, bytes) else { break };
            let slot = if way == Way::Slot { mesh.slots.take() } else { None };
            let staged = slot.and_then(|slot| Some((slot, self.board.message(local, slot)?)));
            stream.sent += bytes;
            let last = stream.sent == transfer.bytes;
            let frame = Frame::Piece { message: stream.message };
            let lent = staged.map(|(slot, _)| slot as u64);
            let head = Head { payload_bytes: bytes, lent, ..Head::bare(frame) };
            let payload = if let Some((_, place)) = staged {
                outgoing.staged += 1;
                self.shared.counters.staged_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                // SAFETY: inside the operation's input, which does not change until the operation
                // ends; the slot holds as much, and no peer reads it before this frame comes.
                unsafe { hfreduce_kernels::copy_raw(Store::Cached, memory, place, bytes) };
                Payload::Lent(bytes)
            } else {
                // SAFETY: inside the operation's input, which stays unchanged until the operation
                // ends: not before this frame is gone or `detach` was called.
                Payload::Memory(unsafe { Lasting::new(memory, bytes) })
            };
            let completes = last.then_some(stream.ticket);
            let slot = staged.map(|(slot, _)| slot);
            connection.push(&head, payload, Note { completes, slot });
            loaded = true;
            if last {
                outgoing.streams.pop_front();
            }
        }
        loaded
    }

    pub(super) fn flush_mesh(&mut self, peer: u32, inward: bool) -> bool {
        let mut gone = Vec::new();
        let Some(connection) = self.mesh_connection(peer, inward) else { return false };
        if connection.queued() == 0 {
            return false;
        }
        let before = connection.sent_bytes;
        let flushed = connection.flush(&mut gone);
        let moved = connection.sent_bytes != before;
        let full = connection.queued() > 0;
        if let Err(error) = flushed {
            // As along the trees: what it said before comes first.
            let token = if inward { TOKEN_MESH_IN } else { TOKEN_MESH_OUT } | u64::from(peer);
            self.mesh_event(Ready { token, readable: true, writable: false });
            if self.mesh_connection(peer, inward).is_some() {
                self.mesh_lost(peer, inward, &error);
            }
            return true;
        }
        self.mesh_room(peer, inward, full);
        for ticket in gone.into_iter().filter_map(|note| note.completes) {
            self.transferred(ticket);
        }
        moved
    }

    fn mesh_room(&mut self, peer: u32, inward: bool, full: bool) {
        let token = if inward { TOKEN_MESH_IN } else { TOKEN_MESH_OUT } | u64::from(peer);
        let poller = &self.poller;
        if inward {
            if let Some(incoming) = self.mesh.incoming.get_mut(&peer)
                && std::mem::replace(&mut incoming.wants_room, full) != full
            {
                let _ = poller.want_room(&incoming.connection, token, full);
            }
        } else if let Some(outgoing) = self.mesh.outgoing.get_mut(&peer)
            && std::mem::replace(&mut outgoing.wants_room, full) != full
            && let Some(connection) = &outgoing.connection
        {
            let _ = poller.want_room(connection, token, full);
        }
    }
}
