//! Inputs of growth and rebalancing: which nodes can take replicas, and which moves cannot complete.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::{ChainId, NodeId, TargetId};
use threefs_core::routing::{Chain, Move, PublicState};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::placement;
use crate::view::{GrowthInputs, LastHeartbeat, View, is_closed, is_offline};

/// A node with less than this fraction of its capacity free receives no more targets.
const FREE_PARTS_MIN: u64 = 10;
/// After this many failed syncs a move is abandoned: the disk is probably full and stays so.
const FAILED_SYNCS_MAX: u32 = 3;
/// After this time without a heartbeat of its destination a move is abandoned: the node may be lost
/// for good, and few moves are made at once. A restart, or a reboot, is shorter.
pub(crate) const DEAD_DESTINATION_MS: u64 = 600_000;
/// How long the node then receives no targets, while an operator or other moves free space.
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
            weights: self.weights(),
            measured: self.capacities.keys().copied().collect(),
            sizes: self.sizes(),
            moves_wait: self.pace.waits(now),
            doomed_moves: self.doomed_moves(now).map(|this| this.chain).collect(),
        }
    }

    /// Nodes that receive no more targets: their disk is nearly full, or a move to them has failed
    /// recently. Nodes of unknown capacity are not full.
    pub(crate) fn full(&self, now: Millis) -> BTreeSet<NodeId> {
        let is_full = |last: &LastHeartbeat| {
            let free = last.capacity_bytes.saturating_sub(last.used_bytes());
            last.capacity_bytes > 0 && free < last.capacity_bytes / FREE_PARTS_MIN
        };
        let full = self.heartbeats.iter().filter(|(_, last)| is_full(last));
        let refusing = self.refusing_moves.iter().filter(|(_, until)| now < **until);
        full.map(|(node, _)| *node).chain(refusing.map(|(node, _)| *node)).collect()
    }

    /// The bytes of each chain that a node has reported.
    pub(crate) fn chain_bytes(&self) -> BTreeMap<ChainId, u64> {
        let mut bytes: BTreeMap<ChainId, u64> = BTreeMap::new();
        for line in self.heartbeats.values().flat_map(|last| &last.targets) {
            let most = bytes.entry(line.chain).or_default();
            *most = line.used_bytes.max(*most);
        }
        bytes.retain(|chain, _| self.routing.chains.contains_key(chain));
        bytes
    }

    /// The size of each chain.
    pub(crate) fn sizes(&self) -> BTreeMap<ChainId, u32> {
        placement::sizes(&self.chain_bytes())
    }

    /// Nodes with a target that cannot be opened.
    pub(crate) fn broken(&self) -> impl Iterator<Item = NodeId> {
        let broken = |last: &LastHeartbeat| last.targets.iter().any(is_closed);
        self.heartbeats.iter().filter(move |(_, last)| broken(last)).map(|(node, _)| *node)
    }

    /// Counts destinations of moves that stopped while their node was alive: the disk is full or
    /// failing.
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

    /// Time since the last heartbeat of a node that this primary knows of.
    pub(crate) fn silent_ms(&self, node: NodeId, now: Millis) -> u64 {
        now.since(self.heartbeats.get(&node).map_or(self.since, |last| last.at.max(self.since)))
    }

    /// Whether a move cannot complete: its node is leaving or dead for long, its disk is repeatedly
    /// full, or its target cannot be opened.
    fn cannot_complete(&self, this: &Move, now: Millis) -> bool {
        let chain = self.routing.chains.get(&this.chain);
        let Some(place) = chain.and_then(|chain| chain.place(this.destination)) else {
            return false;
        };
        let failed_syncs = self.failed_syncs.get(&this.destination).copied().unwrap_or(0);
        let is_closed =
            self.report_of(place.node, place.target).is_some_and(|line| is_closed(&line));
        self.goal.leaving.contains(&place.node)
            || failed_syncs >= FAILED_SYNCS_MAX
            || is_closed
            || self.silent_ms(place.node, now) >= DEAD_DESTINATION_MS
    }

    /// Moves that cannot complete.
    pub(crate) fn doomed_moves(&self, now: Millis) -> impl Iterator<Item = &Move> {
        self.routing.moves.values().filter(move |this| self.cannot_complete(this, now))
    }

    /// Records an abandoned move to this node.
    pub(crate) fn refuse_moves(&mut self, node: NodeId, destination: TargetId, now: Millis) {
        self.failed_syncs.remove(&destination);
        self.refusing_moves.insert(node, now.after(REFUSE_MOVES_MS));
    }
}
