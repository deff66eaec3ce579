//! Abort and close of point-to-point connections.

use super::{Note, P2p};
use hfreduce_transport::connection::Connection;
use hfreduce_transport::poller::Poller;
use hfreduce_transport::transport::Payload;
use hfreduce_transport::wire::{Frame, Head};

impl P2p {
    /// Detaches all connections from callers' memory and from the poller.
    pub(in crate::driver) fn detach(&mut self, poller: &Poller) {
        for outgoing in self.outgoing.values_mut() {
            outgoing.messages.clear();
            outgoing.frames.clear();
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

    /// Sends the abort reason to all connected ranks. Called after `detach`.
    pub(in crate::driver) fn send_reason(&mut self, cause: &[u8]) {
        for connection in self.connections() {
            send_reason(connection, cause);
        }
    }

    /// Sends a close frame to all connected ranks.
    pub(in crate::driver) fn close(&mut self, next: u64) {
        let close = Head::bare(Frame::Close { next });
        for connection in self.connections() {
            connection.push(&close, Payload::Owned(vec![]), Note::default());
        }
        self.flush_final_frames();
    }

    /// Sends final frames; true once all are sent or the peers have disconnected.
    pub(in crate::driver) fn flush_final_frames(&mut self) -> bool {
        let mut all_sent = true;
        for connection in self.connections() {
            all_sent &= connection.flush(&mut Vec::new()).is_err() || connection.queued() == 0;
        }
        all_sent
    }

    /// Bytes that the peers' machines have not acknowledged.
    pub(in crate::driver) fn unsent_bytes(&mut self) -> usize {
        self.connections().map(|connection| connection.unsent_bytes()).sum()
    }

    fn connections(&mut self) -> impl Iterator<Item = &mut Connection<Note>> {
        let outgoing = self.outgoing.values_mut().filter_map(|o| o.connection.as_mut());
        outgoing.chain(self.incoming.values_mut().map(|incoming| &mut incoming.connection))
    }
}

/// Queues the abort reason, after a frame that is partly sent.
pub(super) fn send_reason(connection: &mut Connection<Note>, cause: &[u8]) {
    let head = Head { payload_bytes: cause.len(), ..Head::bare(Frame::Abort) };
    connection.push(&head, Payload::Owned(cause.to_vec()), Note::default());
}
