//! Inputs of growth and rebalancing: which nodes can take replicas, and which moves cannot complete.

use std::collections::BTreeSet;

use threefs_core::ids::{NodeId, TargetId};
use threefs_core::routing::{Chain, Move, PublicState};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::view::{GrowthInputs, LastHeartbeat, View, is_closed, is_offline};

/// A node with less than this part of its bytes free gets nothing more.
const FREE_PARTS_MIN: u64 = 10;
/// A move whose destination has given up so often is given up: a full disk does not get emptier.
const FAILED_SYNCS_MAX: u32 = 3;
/// How long a node gets nothing after that. An operator makes room meanwhile, or other moves do.
const REFUSE_MOVES_MS: u64 = 600_000;

impl View {
    /// See [`GrowthInputs`].
    pub(crate) fn growth_inputs(&self, timers: &Timers, now: Millis) -> GrowthInputs {
        let alive = self.nodes.keys().filter(|node| self.is_alive(**node, timers, now));
        GrowthInputs {
            routing: self.routing.version,
            goal: self.goal.clone(),
            alive: alive.copied().collect(),
            full: self.full(now),
            doomed_moves: self.doomed_moves().map(|this| this.chain).collect(),
        }
    }

    /// Nodes that shall get nothing more: their disk has hardly any room left, or a move to
    /// them has failed lately. A node that has said nothing of its room has some.
    pub(crate) fn full(&self, now: Millis) -> BTreeSet<NodeId> {
        let is_full = |heartbeats: &LastHeartbeat| {
            let free = heartbeats.capacity_bytes.saturating_sub(heartbeats.used_bytes());
            heartbeats.capacity_bytes > 0 && free < heartbeats.capacity_bytes / FREE_PARTS_MIN
        };
        let full = self.heartbeats.iter().filter(|(_, heartbeats)| is_full(heartbeats));
        let refused = self.refusing_moves.iter().filter(|(_, until)| now < **until);
        full.map(|(node, _)| *node).chain(refused.map(|(node, _)| *node)).collect()
    }

    /// Nodes with a target that cannot even be opened.
    pub(crate) fn broken(&self) -> impl Iterator<Item = NodeId> {
        let broken = |heartbeats: &LastHeartbeat| heartbeats.targets.iter().any(is_closed);
        self.heartbeats
            .iter()
            .filter(move |(_, heartbeats)| broken(heartbeats))
            .map(|(node, _)| *node)
    }

    /// A move's destination has given up while its node was alive: its disk is full, or fails.
    pub(crate) fn count_failed_syncs(&mut self, timers: &Timers, now: Millis, chains: &[Chain]) {
        for chain in chains {
            let Some(this) = self.routing.moves.get(&chain.id) else { continue };
            let before = self.routing.chains.get(&chain.id);
            let was_syncing = before.and_then(|chain| chain.state_of(this.destination))
                == Some(PublicState::Syncing);
            let Some(place) = chain.place(this.destination) else { continue };
            if was_syncing
                && place.state == PublicState::Offline
                && self.is_alive(place.node, timers, now)
                && self.report_of(place.node, place.target).is_some_and(|line| is_offline(&line))
            {
                *self.failed_syncs.entry(this.destination).or_default() += 1;
            }
        }
    }

    /// Whether a move will not succeed where it goes: to a node that shall leave, to a disk that is
    /// full again and again, to a target that cannot even be opened.
    pub(super) fn cannot_complete(&self, this: &Move) -> bool {
        let chain = self.routing.chains.get(&this.chain);
        let Some(place) = chain.and_then(|chain| chain.place(this.destination)) else {
            return false;
        };
        let failed_syncs = self.failed_syncs.get(&this.destination).copied().unwrap_or(0);
        let is_closed =
            self.report_of(place.node, place.target).is_some_and(|line| is_closed(&line));
        self.goal.leaving.contains(&place.node) || failed_syncs >= FAILED_SYNCS_MAX || is_closed
    }

    /// Moves that will not succeed.
    pub(crate) fn doomed_moves(&self) -> impl Iterator<Item = &Move> {
        self.routing.moves.values().filter(|this| self.cannot_complete(this))
    }

    /// A move to this node was given up.
    pub(crate) fn refuse_moves(&mut self, node: NodeId, destination: TargetId, now: Millis) {
        self.failed_syncs.remove(&destination);
        self.refusing_moves.insert(node, now.after(REFUSE_MOVES_MS));
    }
}
