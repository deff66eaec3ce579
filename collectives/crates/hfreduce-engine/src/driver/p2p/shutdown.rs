//! The last words over direct connections: why everything ended, or that we take leave.

use super::{Note, P2p};
use crate::driver::connection::Connection;
use crate::driver::poller::Poller;
use crate::driver::transport::Payload;
use crate::driver::wire::{Frame, Head};

impl P2p {
    /// No connection points into callers' memory after this, and nobody listens to one any more.
    pub(in crate::driver) fn detach(&mut self, poller: &Poller) {
        for outgoing in self.outgoing.values_mut() {
            outgoing.messages.clear();
            outgoing.words.clear();
        }
        for incoming in self.incoming.values_mut() {
            incoming.receiving = None;
            incoming.eager = None;
        }
        for connection in self.connections() {
            poller.forget(&*connection);
            connection.detach();
        }
    }

    /// Tells everybody who is connected why everything ended. After `detach`.
    pub(in crate::driver) fn tell(&mut self, cause: &[u8]) {
        for connection in self.connections() {
            tell(connection, cause);
        }
    }

    /// Takes leave of everybody who is connected.
    pub(in crate::driver) fn leave(&mut self, next: u64) {
        let close = Head::bare(Frame::Close { next });
        for connection in self.connections() {
            connection.push(&close, Payload::Owned(vec![]), Note::default());
        }
        self.flush_final_frames();
    }

    /// Sends what is left to say; true once all is said or nobody listens.
    pub(in crate::driver) fn flush_final_frames(&mut self) -> bool {
        let mut said = true;
        for connection in self.connections() {
            said &= connection.flush(&mut Vec::new()).is_err() || connection.queued() == 0;
        }
        said
    }

    /// Bytes that the peers' machines have not taken yet.
    pub(in crate::driver) fn unsent_bytes(&mut self) -> usize {
        self.connections().map(|connection| connection.unsent_bytes()).sum()
    }

    fn connections(&mut self) -> impl Iterator<Item = &mut Connection<Note>> {
        let outgoing = self.outgoing.values_mut().filter_map(|o| o.connection.as_mut());
        outgoing.chain(self.incoming.values_mut().map(|incoming| &mut incoming.connection))
    }
}

/// Says why everything ended, behind what this connection has begun to send.
pub(super) fn tell(connection: &mut Connection<Note>, cause: &[u8]) {
    let head = Head { payload_bytes: cause.len(), ..Head::bare(Frame::Abort) };
    connection.push(&head, Payload::Owned(cause.to_vec()), Note::default());
}
