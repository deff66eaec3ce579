//! Peer memory of tree links: maps the segments that neighbors offer and reads payloads from them.

use fabric::shm::View;
use hfreduce_core::DataHead;
use hfreduce_core::tree::{Partial, Violation};
use hfreduce_core::{Kind, Stage};
use hfreduce_kernels::Store;
use hfreduce_transport::transport::Payload;
use hfreduce_transport::wire::{Frame, Head};

use super::Driver;

/// True for a frame whose mapped payload is read in place. Both ends decide alike.
pub(super) fn is_read_in_place(data: &DataHead) -> bool {
    data.stage == Stage::Up && data.fingerprint.kind == Kind::Allreduce
}

impl Driver {
    /// Handles a neighbor's offer of its segment.
    pub(super) fn map_peer_segment(&mut self, at: usize, token: u64) {
        let Some(tree_links) = &mut self.tree_links else { return };
        let bytes = tree_links.links[at].peer_memory.peer_segment_bytes;
        let view = tree_links.mapping_listener.take(token).and_then(|fd| View::open(&fd, bytes));
        match view {
            Ok(view) => {
                let link = &mut tree_links.links[at];
                link.peer_memory.view = Some(view);
                let mapped = Head::bare(Frame::MappingReady);
                link.transport.push(&mapped, Payload::Owned(vec![]), None);
                self.flush_link(at);
            }
            Err(error) => {
                let rank = tree_links.links[at].peer_rank;
                tracing::info!(%error, rank, "cannot map the segment of a neighbor: payloads use TCP");
            }
        }
    }

    /// Records the offset of a partial sum in a neighbor's segment; fails and returns false if it
    /// is invalid.
    pub(super) fn record_mapped_partial(
        &mut self,
        partial: &Partial,
        offset: u64,
        bytes: usize,
    ) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[partial.link];
        let peer_memory = &mut link.peer_memory;
        let slot_bytes = peer_memory.slot_bytes;
        if peer_memory.view.as_ref().and_then(|view| view.at(offset, slot_bytes)).is_none() {
            self.fail_invalid_mapping(partial.link, offset, bytes);
            return false;
        }
        let mapped_partials = &mut peer_memory.mapped_partials[partial.class];
        let slot = partial.slot as usize;
        mapped_partials.resize(mapped_partials.len().max(slot + 1), None);
        mapped_partials[slot] = Some(offset);
        link.transport.read_in_place(bytes);
        true
    }

    fn fail_invalid_mapping(&mut self, at: usize, offset: u64, bytes: usize) {
        let why = format!("invalid offset {offset} of {bytes} mapped bytes");
        self.violated_on(at, Violation::Protocol(why));
    }

    /// Copies a mapped payload; fails and returns false if its offset is invalid.
    ///
    /// # Safety
    /// `place` must be writable for `bytes` and exclusive.
    pub(super) unsafe fn copy_from_peer(
        &mut self,
        at: usize,
        offset: u64,
        place: *mut u8,
        bytes: usize,
    ) -> bool {
        let Some(tree_links) = &mut self.tree_links else { return false };
        let link = &mut tree_links.links[at];
        let Some(source) = link.peer_memory.view.as_ref().and_then(|view| view.at(offset, bytes))
        else {
            self.fail_invalid_mapping(at, offset, bytes);
            return false;
        };
        // SAFETY: the view holds the bytes and their owner keeps them unchanged until they are
        // acknowledged; otherwise only the data is wrong. The destination does not overlap the
        // view: it is this rank's segment or pool.
        unsafe { hfreduce_kernels::copy_raw(Store::Cached, source, place, bytes) };
        link.transport.copied(bytes);
        true
    }
}
