//! Diagnosis: the event and the rank that this rank waits for, in errors, heartbeats and the flight
//! recorder.

use std::sync::Arc;
use std::time::Instant;

use super::operations::ReduceAlgorithm;
use super::{Driver, last_arriver, ring};
use crate::work::WorkState;
use hfreduce_core::tree::Waiting;
use hfreduce_core::{Fingerprint, Ranks, Stage};
use hfreduce_shm::flight::PeerState;
use hfreduce_transport::wire::{Frame, Head};

impl Driver {
    /// The oldest collective operation in progress at this rank.
    pub(super) fn oldest(&self) -> Option<(u64, Fingerprint)> {
        let tree = self.operations.active.front().map(|active| &active.work);
        let oldest = |work: &&Arc<WorkState>| work.sequence;
        tree.into_iter()
            .chain(self.p2p.collectives())
            .min_by_key(oldest)
            .map(|w| (w.sequence, w.fingerprint))
    }

    pub(super) fn heartbeat(&self) -> Head {
        match self.oldest() {
            None => Head::idle(),
            Some((sequence, fingerprint)) => {
                let waiting_for = self.waiting_for().1;
                Head::bare(Frame::Heartbeat { sequence, fingerprint, waiting_for })
            }
        }
    }

    /// What the oldest operation along the trees waits for: a description, and the rank.
    pub(super) fn waiting_for(&self) -> (String, Option<u32>) {
        let (node, operations) = (&self.node, &self.operations);
        let Some(active) = operations.active.front() else {
            let oldest = self.p2p.works().min_by_key(|work| work.sequence);
            let waiting = oldest.and_then(|work| self.p2p.waiting_for(work));
            return waiting.or_else(|| operations.waiting_for_window(node)).unwrap_or_default();
        };
        let identity = node.identity();
        let sequence = active.work.sequence;
        // Of several, one that is held back by the window is not the cause.
        let absent = (0..identity.locals().len())
            .filter(|local| node.shm.entered(*local) <= sequence)
            .min_by_key(|local| node.shm.ended(*local));
        if let Some(absent) = absent {
            let rank = identity.locals()[absent];
            return (format!("waiting for rank {rank} to call it"), Some(rank));
        }
        if self.local.lacks_input(node, operations) {
            return ("waiting for its own input to arrive".to_owned(), Some(identity.rank));
        }
        let delivered = self.local.delivered;
        match active.algorithm {
            ReduceAlgorithm::Ring => return ring::waiting_for(node, &self.local.slots, delivered),
            ReduceAlgorithm::LastArriver => return last_arriver::waiting_for(node, delivered),
            ReduceAlgorithm::Owner | ReduceAlgorithm::Undecided => {}
        }
        let Some(waiting) = self.channel.as_ref().and_then(|channel| channel.tree.core.waiting())
        else {
            let chunk = (delivered - active.first.min(delivered)) as u32;
            let rank = identity.locals()[identity.owner_of(chunk)];
            return (format!("waiting for the result from rank {rank}"), Some(rank));
        };
        match waiting {
            Waiting::Local(key) => self.waiting_for_local(key),
            Waiting::Frame(_, link, stage) => {
                let what = if stage == Stage::Up { "a partial sum" } else { "the result" };
                self.waiting_for_link(sequence, link, &format!("waiting for {what} from"))
            }
            Waiting::Peer(_, link) => self.waiting_for_link(sequence, link, "sending to"),
        }
    }

    fn waiting_for_local(&self, key: (u64, u32)) -> (String, Option<u32>) {
        let Some((_, chunk, number)) = self.operations.find_key(key) else {
            return (String::new(), None);
        };
        let late = self.node.identity().locals().iter().enumerate().find(|(local, rank)| {
            chunk.source.includes(**rank) && self.node.shm.staged(*local) <= number
        });
        let rank = late.map(|(_, rank)| *rank).or(match chunk.source {
            Ranks::One(rank) => Some(rank),
            Ranks::All => None,
        });
        (
            format!(
                "waiting for the input of {}",
                rank.map_or("a rank".into(), |r| format!("rank {r}"))
            ),
            rank,
        )
    }

    fn waiting_for_link(&self, sequence: u64, link: usize, what: &str) -> (String, Option<u32>) {
        let Some(channel) = &self.channel else { return (String::new(), None) };
        let link = &channel.tree.links[link];
        let identity = self.node.identity();
        let node = identity.placement.node_name(link.peer_rank);
        let phase = format!("{what} rank {} on node {node}", link.peer_rank);
        match link.peer_progress {
            // The neighbor is in the same operation and has determined which rank the group waits
            // for.
            Some((peer_sequence, Some(rank)))
                if peer_sequence == sequence && rank != identity.rank =>
            {
                (phase, Some(rank))
            }
            _ => (phase, Some(link.peer_rank)),
        }
    }

    /// Records a heartbeat, what the rank waits for, and the state of its neighbors, ten times a
    /// second.
    pub(super) fn record_tick(&self, now: Instant) {
        if !self.node.is_broken() {
            let (phase, waited) = self.waiting_for();
            self.record_waiting(&phase, waited);
        }
        self.node.shared.recorder.beat(now, self.peer_states());
    }

    pub(super) fn record_waiting(&self, phase: &str, waited: Option<u32>) {
        let recorder = &self.node.shared.recorder;
        let oldest = self.oldest_work();
        if let Some(work) = oldest {
            recorder.waits_for(work.flight, waited);
        }
        // While the ranks connect, no operation is in progress: the phase set by `connect` applies.
        if oldest.is_some() || self.heartbeats.is_active {
            recorder.waiting(oldest.map(|work| work.sequence), phase, waited);
        }
    }

    /// The operation that `waiting_for` describes.
    fn oldest_work(&self) -> Option<&Arc<WorkState>> {
        let tree = self.operations.active.front().map(|active| &active.work);
        tree.or_else(|| self.p2p.works().min_by_key(|work| work.sequence))
    }

    fn peer_states(&self) -> impl Iterator<Item = (PeerState, Instant)> {
        let ranks = self.node.identity().locals();
        let shm = &self.node.shm;
        let locals = ranks.iter().enumerate().map(|(local, rank)| {
            let (entered, closed) = (shm.entered(local), shm.closed_at(local).is_some());
            let state = PeerState { rank: *rank, link: false, entered, waiting_for: None, closed };
            (state, self.heartbeats.last_message_at(local))
        });
        let links = self.channel.iter().flat_map(|channel| &channel.tree.links).enumerate();
        let links = links.map(|(at, link)| {
            // A neighbor without operations reports u64::MAX.
            let (sequence, waiting_for) = link.peer_progress.unwrap_or((u64::MAX, None));
            let closed = link.end_sequence.is_some() || link.is_closed();
            let entered = sequence.wrapping_add(1);
            let state =
                PeerState { rank: link.peer_rank, link: true, entered, waiting_for, closed };
            (state, self.heartbeats.last_message_at(ranks.len() + at))
        });
        locals.chain(links)
    }
}
