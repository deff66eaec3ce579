//! Receiving side of point-to-point connections, and their end.

use std::io;

use super::{P2p, P2pOperation, TOKEN_IN};
use crate::driver::fault::Fault;
use crate::driver::node::Node;
use crate::driver::operations::Operations;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::matching::{ANY_RANK, Envelope};
use hfreduce_core::tree::Violation;
use hfreduce_transport::connection::Arrival;
use hfreduce_transport::poller::Ready;
use hfreduce_transport::wire::{Frame, Head};

impl P2p {
    pub(in crate::driver) fn handle(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        event: Ready,
    ) -> Result<(), Fault> {
        let peer = event.token as u32;
        let inward = event.token & !0xffff_ffff == TOKEN_IN;
        if event.writable {
            self.flush(node, operations, peer, inward)?;
        }
        if !event.readable {
            return Ok(());
        }
        if let Some(connection) = self.connection(peer, inward) {
            connection.readable();
        }
        while let Some(connection) = self.connection(peer, inward) {
            let arrival = connection.receive_next();
            for note in connection.take_copied() {
                self.unstage(node, operations, peer, note);
            }
            let result = match arrival {
                Ok(None) => break,
                Ok(Some(Arrival::Head(head))) if inward => self.inward_head(node, peer, &head),
                Ok(Some(Arrival::Head(head))) => self.outward_head(peer, &head),
                Ok(Some(Arrival::Owned(bytes))) => {
                    let incoming = self.incoming.get_mut(&peer).filter(|_| inward);
                    let Some((message, envelope)) = incoming.and_then(|i| i.eager.take()) else {
                        // The final frame of an aborted peer, which is not the cause.
                        return Err(AbortReason::decode(&bytes, node.rank()).into());
                    };
                    self.unexpected.insert((peer, message), bytes);
                    self.pairs.offered(peer, message, envelope, true)
                }
                Ok(Some(Arrival::Payload)) => {
                    let incoming = self.incoming.get_mut(&peer);
                    if let Some((message, bytes)) = incoming.and_then(|i| i.receiving.take()) {
                        self.pairs.arrived(peer, message, bytes);
                    }
                    Ok(())
                }
                Err(error) => return self.disconnected(node, peer, inward, &error),
            };
            result.map_err(|why| node.violation(peer, why))?;
            self.act(node, operations)?;
        }
        Ok(())
    }

    fn inward_head(&mut self, node: &Node, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Offer { message, tag, bytes, fingerprint } => {
                let envelope = Envelope { tag, bytes, fingerprint };
                match self.incoming.get_mut(&peer) {
                    Some(incoming) if head.payload_bytes > 0 => {
                        incoming.eager = Some((message, envelope));
                        incoming.connection.body_owned(head.payload_bytes);
                        Ok(())
                    }
                    _ => self.pairs.offered(peer, message, envelope, false),
                }
            }
            Frame::Piece { message } => {
                let bytes = head.payload_bytes;
                let (ticket, have) = self.pairs.piece(peer, message, bytes as u64)?;
                let active = self.operations.get(&ticket.operation);
                let place = active.and_then(|active| {
                    let transfer = active.operation.transfers.get(ticket.transfer)?;
                    active.operation.output.contiguous(transfer.offset + have as usize, bytes)
                });
                let (Some(place), Some(incoming)) = (place, self.incoming.get_mut(&peer)) else {
                    return Err(Violation::Protocol("a piece does not fit its message".into()));
                };
                if let Some(slot) = head.mapped {
                    // SAFETY: as below; the copy ends before this returns.
                    return unsafe { self.take_staged(node, (peer, message), slot, place, bytes) };
                }
                incoming.receiving = Some((message, bytes as u64));
                // SAFETY: inside the operation's output, which is exclusive until the operation
                // ends; it cannot end before this piece has arrived or `detach` was called.
                unsafe { incoming.connection.body(place, bytes) };
                Ok(())
            }
            Frame::Abort => self.receive_reason(peer, true, head),
            Frame::Close { .. } => {
                if let Some(incoming) = self.incoming.get_mut(&peer) {
                    incoming.peer_closed = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("unexpected {other:?} between two ranks"))),
        }
    }

    fn outward_head(&mut self, peer: u32, head: &Head) -> Result<(), Violation> {
        match head.frame {
            Frame::Grant { message } => self.pairs.granted(peer, message),
            // It carries acknowledgments.
            Frame::Credit => Ok(()),
            Frame::Abort => self.receive_reason(peer, false, head),
            Frame::Close { .. } => {
                if let Some(outgoing) = self.outgoing.get_mut(&peer) {
                    outgoing.peer_closed = true;
                }
                Ok(())
            }
            other => Err(Violation::Protocol(format!("unexpected {other:?} between two ranks"))),
        }
    }

    fn receive_reason(&mut self, peer: u32, inward: bool, head: &Head) -> Result<(), Violation> {
        if let Some(connection) = self.connection(peer, inward) {
            connection.body_owned(head.payload_bytes);
        }
        Ok(())
    }

    /// Handles the end of a connection: a failure only if a transfer still needs it.
    pub(super) fn disconnected(
        &mut self,
        node: &Node,
        peer: u32,
        inward: bool,
        error: &io::Error,
    ) -> Result<(), Fault> {
        if node.shm.is_aborted() {
            return Err(Fault::Recorded);
        }
        // Dropping a connection closes its socket, which also removes it from epoll.
        let peer_closed = if inward {
            self.incoming.remove(&peer).is_some_and(|incoming| incoming.peer_closed)
        } else {
            self.outgoing.remove(&peer).is_some_and(|outgoing| outgoing.peer_closed)
        };
        let mut open = self.operations.values().flat_map(P2pOperation::open);
        let needed = open.any(|transfer| match transfer.peer {
            // A closed peer sends nothing more, but others may.
            ANY_RANK => inward && !peer_closed,
            needed => needed == peer && transfer.sends != inward,
        });
        if !needed {
            return Ok(());
        }
        if peer_closed {
            let detail = "it closed the communicator before this message".into();
            return Err(node.fault(ErrorKind::PeerLeft, peer, detail));
        }
        Err(node.lost_peer(peer, error))
    }
}
