//! Receiving side of point-to-point connections, and their end.

use std::io;

use super::P2pOperation;
use crate::driver::{Driver, TOKEN_P2P_IN};
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::matching::{ANY_RANK, Envelope};
use hfreduce_core::tree::Violation;
use hfreduce_transport::connection::Arrival;
use hfreduce_transport::poller::Ready;
use hfreduce_transport::wire::{Frame, Head};

impl Driver {
    pub(in crate::driver) fn handle_p2p_event(&mut self, event: Ready) {
        let peer = event.token as u32;
        let inward = event.token & !0xffff_ffff == TOKEN_P2P_IN;
        if event.writable {
            self.flush_p2p(peer, inward);
        }
        if !event.readable {
            return;
        }
        if let Some(connection) = self.p2p_connection(peer, inward) {
            connection.readable();
        }
        while self.shared.broken.get().is_none() {
            let Some(connection) = self.p2p_connection(peer, inward) else { return };
            let arrival = connection.receive_next();
            for note in connection.take_copied() {
                self.unstage(peer, note);
            }
            let taken = match arrival {
                Ok(None) => return,
                Ok(Some(Arrival::Head(head))) if inward => self.inward_head(peer, &head),
                Ok(Some(Arrival::Head(head))) => self.outward_head(peer, &head),
                Ok(Some(Arrival::Owned(bytes))) => {
                    let incoming = self.p2p.incoming.get_mut(&peer).filter(|_| inward);
                    if let Some((message, envelope)) = incoming.and_then(|i| i.eager.take()) {
                        self.p2p.held.insert((peer, message), bytes);
                        self.p2p.pairs.offered(peer, message, envelope, true)
                    } else {
                        // The final frame of an aborted peer, which is not the cause.
                        self.fail(AbortReason::decode(&bytes, self.shared.identity.rank), None);
                        return;
                    }
                }
                Ok(Some(Arrival::Payload)) => {
                    let incoming = self.p2p.incoming.get_mut(&peer);
                    if let Some((message, bytes)) = incoming.and_then(|i| i.receiving.take()) {
                        self.p2p.pairs.arrived(peer, message, bytes);
                    }
                    Ok(())
                }
                Err(error) => {
                    self.p2p_lost(peer, inward, &error);
                    return;
                }
            };
            if let Err(why) = taken {
                self.violated(peer, why);
            }
            self.run_p2p_actions();
        }
    }

    fn inward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Offer { message, tag, bytes, fingerprint } => {
                let envelope = Envelope { tag, bytes, fingerprint };
                match self.p2p.incoming.get_mut(&peer) {
                    Some(incoming) if head.payload_bytes > 0 => {
                        incoming.eager = Some((message, envelope));
                        incoming.connection.body_owned(head.payload_bytes);
                        Ok(())
                    }
                    _ => self.p2p.pairs.offered(peer, message, envelope, false),
                }
            }
            Frame::Piece { message } => {
                let bytes = head.payload_bytes;
                let (ticket, have) = self.p2p.pairs.piece(peer, message, bytes as u64)?;
                let found = self.p2p.operations.get(&ticket.operation);
                let place = found.and_then(|found| {
                    let transfer = found.operation.transfers.get(ticket.transfer)?;
                    found.operation.output.contiguous(transfer.offset + have as usize, bytes)
                });
                let (Some(place), Some(incoming)) = (place, self.p2p.incoming.get_mut(&peer))
                else {
                    return Err(Violation::Protocol("a piece does not fit its message".into()));
                };
                if let Some(slot) = head.mapped {
                    // SAFETY: as below; the copy ends before this returns.
                    return unsafe { self.take_staged((peer, message), slot, place, bytes) };
                }
                incoming.receiving = Some((message, bytes as u64));
                // SAFETY: inside the operation's output, which is exclusive until the operation
                // ends; it cannot end before this piece has arrived or `detach` was called.
                unsafe { incoming.connection.body(place, bytes) };
                Ok(())
            }
            Frame::Abort => self.receive_reason(peer, true, head),
            Frame::Close { .. } => {
                if let Some(incoming) = self.p2p.incoming.get_mut(&peer) {
                    incoming.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("unexpected {other:?} between two ranks"))),
        }
    }

    fn outward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Grant { message } => self.p2p.pairs.granted(peer, message),
            // It carries acknowledgments.
            Frame::Credit => Ok(()),
            Frame::Abort => self.receive_reason(peer, false, head),
            Frame::Close { .. } => {
                if let Some(outgoing) = self.p2p.outgoing.get_mut(&peer) {
                    outgoing.left = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("unexpected {other:?} between two ranks"))),
        }
    }

    fn receive_reason(&mut self, peer: u32, inward: bool, head: &Head) -> Result<(), Violation> {
        if let Some(connection) = self.p2p_connection(peer, inward) {
            connection.body_owned(head.payload_bytes);
        }
        Ok(())
    }

    /// Handles the end of a connection: a failure only if a transfer still needs it.
    pub(super) fn p2p_lost(&mut self, peer: u32, inward: bool, error: &io::Error) {
        self.check_abort_record();
        // Dropping a connection closes its socket, which also removes it from epoll.
        let peer_closed = if inward {
            self.p2p.incoming.remove(&peer).is_some_and(|incoming| incoming.left)
        } else {
            self.p2p.outgoing.remove(&peer).is_some_and(|outgoing| outgoing.left)
        };
        let mut open = self.p2p.operations.values().flat_map(P2pOperation::open);
        let needed = open.any(|transfer| match transfer.peer {
            // A closed peer sends nothing more, but others may.
            ANY_RANK => inward && !peer_closed,
            needed => needed == peer && transfer.sends != inward,
        });
        drop(open);
        if !needed {
            return;
        }
        if peer_closed {
            let detail = "it closed the communicator before this message".into();
            self.fail(self.reason_for(ErrorKind::PeerLeft, peer, detail), None);
        } else {
            self.peer_lost(peer, error);
        }
    }
}
