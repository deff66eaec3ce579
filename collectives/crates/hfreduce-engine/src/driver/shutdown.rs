//! Shutdown of the tree links: abort with a reason, orderly close, and loss.

use super::Driver;
use hfreduce_transport::wire::{Frame, Head};

impl Driver {
    /// Aborts the tree links: memory of callers is not accessed after this; neighbors receive the
    /// reason.
    pub(super) fn flood(&mut self, payload: &[u8], from: Option<usize>) {
        let Some(tree_links) = &mut self.tree_links else { return };
        for (at, link) in tree_links.links.iter_mut().enumerate() {
            link.due.clear();
            link.transport.detach();
            link.transport.forget(&self.poller);
            // One of several streams may be lost; the others are still used.
            if Some(at) != from {
                let head = Head { payload_bytes: payload.len(), ..Head::bare(Frame::Abort) };
                link.transport.push_final(&head, payload);
            }
        }
        tree_links.unready.clear();
        tree_links.finished.clear();
    }

    /// Sends final frames; true once all are sent or the peers are gone.
    pub(super) fn flush_final_frames(&mut self) -> bool {
        let mut all_sent = self.p2p.flush_final_frames();
        let Some(tree_links) = &mut self.tree_links else { return all_sent };
        let mut sent_keys = Vec::new();
        for link in &mut tree_links.links {
            // A failed link is not waited for.
            let _ = link.transport.flush(&self.poller, &mut sent_keys);
            all_sent &= link.transport.is_flushed();
        }
        all_sent
    }

    pub(super) fn close_tree_links(&mut self, next: u64) {
        if let Some(tree_links) = &mut self.tree_links {
            for link in &mut tree_links.links {
                link.transport.push_final(&Head::bare(Frame::Close { next }), &[]);
            }
        }
        self.flush_final_frames();
    }

    /// Bytes that the neighbors' machines have not acknowledged.
    pub(super) fn unsent_bytes(&self) -> usize {
        let links = self.tree_links.iter().flat_map(|tree_links| &tree_links.links);
        links.map(|link| link.transport.unsent_bytes()).sum()
    }

    /// Retires a link that has ended; true if the peer had closed it.
    pub(super) fn retire_link(&mut self, at: usize) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return true };
        let link = &mut tree_links.links[at];
        link.transport.forget(&self.poller);
        link.closed = true;
        link.due.clear();
        link.transport.peer_closed()
    }
}
