//! Updates of the flight recorder by the driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Driver, TreeLinks};
use crate::work::WorkState;
use hfreduce_shm::flight::PeerState;

impl Driver {
    /// Records the progress of an operation along the trees: one store per chunk.
    pub(super) fn record_progress(&self, at: usize) {
        let active = &self.active[at];
        let through = |next: u64| next.clamp(active.first, active.end()) - active.first;
        let (contributed, delivered) = (through(self.next_stage), through(self.next_deliver));
        self.shared.recorder.progress(active.work.flight, contributed as u32, delivered as u32);
    }

    /// Records a heartbeat, what the rank waits for, and the state of its neighbors, ten times a
    /// second.
    pub(super) fn record_tick(&self, now: Instant) {
        if self.shared.broken.get().is_none() {
            let (phase, waited) = self.waiting_for();
            self.record_waiting(&phase, waited);
        }
        self.shared.recorder.beat(now, self.known());
    }

    pub(super) fn record_waiting(&self, phase: &str, waited: Option<u32>) {
        let oldest = self.oldest_work();
        if let Some(work) = oldest {
            self.shared.recorder.waits_for(work.flight, waited);
        }
        // While the ranks connect, no operation is in progress: the phase set by `connect` applies.
        if oldest.is_some() || self.liveness_active {
            self.shared.recorder.waiting(oldest.map(|work| work.sequence), phase, waited);
        }
    }

    /// The operation that `waiting_for` describes.
    fn oldest_work(&self) -> Option<&Arc<WorkState>> {
        let tree = self.active.front().map(|active| &active.work);
        tree.or_else(|| self.p2p.works().min_by_key(|work| work.sequence))
    }

    fn known(&self) -> impl Iterator<Item = (PeerState, Instant)> {
        let ranks = self.shared.identity.locals();
        let heard = |peer: usize| self.started + Duration::from_millis(self.live.heard_ms(peer));
        let locals = ranks.iter().enumerate().map(move |(local, rank)| {
            let (entered, left) = (self.shm.entered(local), self.shm.closed_at(local).is_some());
            let known = PeerState { rank: *rank, link: false, entered, waiting_for: None, left };
            (known, heard(local))
        });
        let links =
            self.tree_links.iter().flat_map(|tree_links: &TreeLinks| &tree_links.links).enumerate();
        let links = links.map(move |(at, link)| {
            // A neighbor without operations reports u64::MAX.
            let (sequence, waiting_for) = link.peer_progress.unwrap_or((u64::MAX, None));
            let left = link.left.is_some() || link.is_closed();
            let entered = sequence.wrapping_add(1);
            let known = PeerState { rank: link.peer_rank, link: true, entered, waiting_for, left };
            (known, heard(ranks.len() + at))
        });
        locals.chain(links)
    }
}
