//! How tree connections end: with a reason, with leave taken, or without a word.

use super::Driver;
use super::connection::Payload;
use super::wire::{Frame, Head};

impl Driver {
    /// Everything ends: no memory of callers is touched after this; neighbours are told why.
    pub(super) fn flood(&mut self, payload: &[u8], from: Option<usize>) {
        let Some(trunk) = &mut self.trunk else { return };
        for (at, link) in trunk.links.iter_mut().enumerate() {
            link.due.clear();
            link.receiving = None;
            link.connection.detach();
            self.poller.forget(&link.connection);
            if Some(at) != from && !link.closed {
                let head = Head { payload_bytes: payload.len(), ..Head::bare(Frame::Abort) };
                link.connection.push(&head, Payload::Owned(payload.to_vec()), None);
            }
        }
        trunk.unready.clear();
        trunk.finished.clear();
    }

    /// Sends what is left to say; true once all is said or nobody listens.
    pub(super) fn flush_last_words(&mut self) -> bool {
        let mut said = self.mesh.flush_last_words();
        let Some(trunk) = &mut self.trunk else { return said };
        let mut gone = Vec::new();
        for link in trunk.links.iter_mut().filter(|link| !link.closed) {
            match link.connection.flush(&mut gone) {
                Ok(()) => said &= link.connection.queued() == 0,
                Err(_) => link.closed = true,
            }
        }
        said
    }

    pub(super) fn leave_trunk(&mut self, next: u64) {
        if let Some(trunk) = &mut self.trunk {
            for link in trunk.links.iter_mut().filter(|link| !link.closed) {
                link.connection.push(
                    &Head::bare(Frame::Bye { next }),
                    Payload::Owned(vec![]),
                    None,
                );
            }
        }
        self.flush_last_words();
    }

    /// Bytes that the neighbours' machines have not taken yet.
    pub(super) fn unsent_bytes(&self) -> usize {
        let links = self.trunk.iter().flat_map(|trunk| &trunk.links).filter(|link| !link.closed);
        links.map(|link| link.connection.unsent_bytes()).sum()
    }

    /// A link ended; true if that is in order because the peer took leave.
    pub(super) fn close_link(&mut self, at: usize) -> bool {
        let Some(trunk) = &mut self.trunk else { return true };
        let link = &mut trunk.links[at];
        self.poller.forget(&link.connection);
        link.closed = true;
        link.due.clear();
        link.left.is_some()
    }
}
