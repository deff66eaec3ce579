//! How the links along the trees end: with a reason, with leave taken, or without a word.

use super::Driver;
use super::wire::{Frame, Head};

impl Driver {
    /// Everything ends: no memory of callers is touched after this; neighbours are told why.
    pub(super) fn flood(&mut self, payload: &[u8], from: Option<usize>) {
        let Some(trunk) = &mut self.trunk else { return };
        for (at, link) in trunk.links.iter_mut().enumerate() {
            link.due.clear();
            link.transport.detach();
            link.transport.forget(&self.poller);
            // One of several streams may be lost; the others still tell.
            if Some(at) != from {
                let head = Head { payload_bytes: payload.len(), ..Head::bare(Frame::Abort) };
                link.transport.push_last(&head, payload);
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
        for link in &mut trunk.links {
            // What is broken listens no more, and is not waited for.
            let _ = link.transport.flush(&self.poller, &mut gone);
            said &= link.transport.is_flushed();
        }
        said
    }

    pub(super) fn leave_trunk(&mut self, next: u64) {
        if let Some(trunk) = &mut self.trunk {
            for link in &mut trunk.links {
                link.transport.push_last(&Head::bare(Frame::Bye { next }), &[]);
            }
        }
        self.flush_last_words();
    }

    /// Bytes that the neighbours' machines have not taken yet.
    pub(super) fn unsent_bytes(&self) -> usize {
        let links = self.trunk.iter().flat_map(|trunk| &trunk.links);
        links.map(|link| link.transport.unsent_bytes()).sum()
    }

    /// A link ended; true if that is in order because the peer took leave.
    pub(super) fn close_link(&mut self, at: usize) -> bool {
        let Some(trunk) = &mut self.trunk else { return true };
        let link = &mut trunk.links[at];
        link.transport.forget(&self.poller);
        link.closed = true;
        link.due.clear();
        link.transport.has_left()
    }
}
