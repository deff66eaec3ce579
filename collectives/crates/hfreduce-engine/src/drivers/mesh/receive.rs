//! What comes over direct connections, and their end.

use std::io;

use super::MeshOperation;
use crate::cause::{Cause, CauseKind};
use crate::core::pair::{ANY_RANK, Letter};
use crate::core::tree::Violation;
use crate::drivers::connection::Arrival;
use crate::drivers::poller::Ready;
use crate::drivers::wire::{Frame, Head};
use crate::drivers::{Driver, TOKEN_MESH_IN};

impl Driver {
    pub(in crate::drivers) fn mesh_event(&mut self, event: Ready) {
        let peer = event.token as u32;
        let inward = event.token & !0xffff_ffff == TOKEN_MESH_IN;
        if event.writable {
            self.flush_mesh(peer, inward);
        }
        if !event.readable {
            return;
        }
        if let Some(connection) = self.mesh_connection(peer, inward) {
            connection.readable();
        }
        while self.shared.broken.get().is_none() {
            let Some(connection) = self.mesh_connection(peer, inward) else { return };
            let arrival = connection.receive_next();
            for note in connection.take_returned() {
                self.unstage(peer, note);
            }
            let taken = match arrival {
                Ok(None) => return,
                Ok(Some(Arrival::Head(head))) if inward => self.inward_head(peer, &head),
                Ok(Some(Arrival::Head(head))) => self.outward_head(peer, &head),
                Ok(Some(Arrival::Owned(bytes))) => {
                    let incoming = self.mesh.incoming.get_mut(&peer).filter(|_| inward);
                    if let Some((message, letter)) = incoming.and_then(|i| i.eager.take()) {
                        self.mesh.held.insert((peer, message), bytes);
                        self.mesh.pairs.offered(peer, message, letter, true)
                    } else {
                        // The last word of a peer for which everything has ended: it is not the
                        // culprit.
                        self.fail(Cause::decode(&bytes, self.shared.identity.rank), None);
                        return;
                    }
                }
                Ok(Some(Arrival::Payload)) => {
                    let incoming = self.mesh.incoming.get_mut(&peer);
                    if let Some((message, bytes)) = incoming.and_then(|i| i.receiving.take()) {
                        self.mesh.pairs.arrived(peer, message, bytes);
                    }
                    Ok(())
                }
                Err(error) => {
                    self.mesh_lost(peer, inward, &error);
                    return;
                }
            };
            if let Err(why) = taken {
                self.violated(peer, why);
            }
            self.act_mesh();
        }
    }

    fn inward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Offer { message, tag, bytes, print } => {
                let letter = Letter { tag, bytes, print };
                match self.mesh.incoming.get_mut(&peer) {
                    Some(incoming) if head.payload_bytes > 0 => {
                        incoming.eager = Some((message, letter));
                        incoming.connection.body_owned(head.payload_bytes);
                        Ok(())
                    }
                    _ => self.mesh.pairs.offered(peer, message, letter, false),
                }
            }
            Frame::Piece { message } => {
                let bytes = head.payload_bytes;
                let (ticket, have) = self.mesh.pairs.piece(peer, message, bytes as u64)?;
                let found = self.mesh.operations.get(&ticket.operation);
                let place = found.and_then(|found| {
                    let transfer = found.operation.transfers.get(ticket.transfer)?;
                    found.operation.output.contiguous(transfer.offset + have as usize, bytes)
                });
                let (Some(place), Some(incoming)) = (place, self.mesh.incoming.get_mut(&peer))
                else {
                    return Err(Violation::Protocol("a piece has no place here".into()));
                };
                if let Some(slot) = head.lent {
                    // SAFETY: as below; the copy ends before this returns.
                    return unsafe { self.take_staged((peer, message), slot, place, bytes) };
                }
                incoming.receiving = Some((message, bytes as u64));
                // SAFETY: inside the operation's output, which is ours until the operation ends;
                // it cannot end before this piece has arrived or `detach` was called.
                unsafe { incoming.connection.body(place, bytes) };
                Ok(())
            }
            Frame::Abort => self.hear_cause(peer, true, head),
            Frame::Bye { .. } => {
                if let Some(incoming) = self.mesh.incoming.get_mut(&peer) {
                    incoming.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("{other:?} came between two ranks"))),
        }
    }

    fn outward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Grant { message } => self.mesh.pairs.granted(peer, message),
            // It carries what was returned.
            Frame::Credit => Ok(()),
            Frame::Abort => self.hear_cause(peer, false, head),
            Frame::Bye { .. } => {
                if let Some(outgoing) = self.mesh.outgoing.get_mut(&peer) {
                    outgoing.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("{other:?} came between two ranks"))),
        }
    }

    fn hear_cause(&mut self, peer: u32, inward: bool, head: &Head) -> Result<(), Violation> {
        if let Some(connection) = self.mesh_connection(peer, inward) {
            connection.body_owned(head.payload_bytes);
        }
        Ok(())
    }

    /// A direct connection ended: a failure only if somebody still needs it.
    pub(super) fn mesh_lost(&mut self, peer: u32, inward: bool, error: &io::Error) {
        self.heed_abort();
        // Dropping a connection closes its socket, and epoll forgets a closed one by itself.
        let left = if inward {
            self.mesh.incoming.remove(&peer).is_some_and(|incoming| incoming.left)
        } else {
            self.mesh.outgoing.remove(&peer).is_some_and(|outgoing| outgoing.left)
        };
        let mut open = self.mesh.operations.values().flat_map(MeshOperation::open);
        let needed = open.any(|transfer| match transfer.peer {
            // Who took leave sends nothing more, but others may.
            ANY_RANK => inward && !left,
            needed => needed == peer && transfer.sends != inward,
        });
        drop(open);
        if !needed {
            return;
        }
        if left {
            let detail = "it closed the communicator before this message".into();
            self.fail(self.blame(CauseKind::PeerLeft, peer, detail), None);
        } else {
            self.peer_lost(peer, error);
        }
    }
}
