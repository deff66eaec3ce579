//! Placement of replicas on storage nodes: initial chains, additional chains, and the moves that
//! drain nodes, restore the domain rule and balance nodes. Pure and deterministic.
//!
//! **Domain rule** ([`rule`]). Replicas of a chain are on different storage services: a node is one
//! disk of a service. They are in different hosts, racks and zones as far as the topology allows it:
//! of every level, a domain has at most as many replicas of a chain as are needed to place all of
//! them. No step violates the rule; a chain that violates it, because the topology has changed, is
//! moved.
//!
//! **Load.** Nodes get replicas in proportion to their capacity. A balancing move is made only if it
//! reduces the sum of `load² / capacity`. Without domains, and with equal nodes and chains, the
//! numbers of replicas on two nodes differ by at most one, and no plan with fewer moves does that.
//! Within a domain the same holds; how the domains compare is then given by the rule.
//!
//! **Failures** ([`spread`]). When a node fails, the other replicas of its chains take its reads.
//! A pair of nodes should share `replicas - 1` of the chains of one, divided by the number of other
//! nodes. New chains are arranged by local search such that the busiest peer gets at most 1.3 times
//! the mean if pairs share three or more chains on average; chains that hold data are not moved for
//! it, but every move that is necessary for another reason prefers it.
//!
//! **Time.** The search examines at most [`spread::SWAPS_MAX`] swaps, a plan at most
//! [`moves::STEPS_MAX`] candidates; what remains is planned after the first moves.

mod blocked;
mod chains;
mod layout;
mod moves;
mod rule;
mod spread;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ChainId, NodeId};
use threefs_core::location::Location;

pub(crate) use rule::Rule;
pub(crate) use spread::worst_share;

/// Range of target ids per node, so that a target id determines its node.
pub(crate) const TARGETS_PER_NODE: u64 = 1 << 20;

/// A replica to be moved from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlannedMove {
    /// Its chain.
    pub chain: ChainId,
    /// Its node.
    pub from: NodeId,
    /// The destination node.
    pub to: NodeId,
}

/// What a plan may do with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It receives replicas and gives some.
    Open,
    /// It gives replicas and receives none: it has no space, or its capacity is unknown.
    Full,
    /// It keeps what it has: it is dead.
    Dead,
    /// It is drained.
    Leaving,
}

/// A storage node.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub location: Location,
    /// Capacity, from 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    pub state: Use,
}

/// Weight of the largest node.
pub(crate) const WEIGHT_MAX: u32 = 64;

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Members {
    pub nodes: BTreeSet<NodeId>,
    /// Bytes, in units of the mean of all chains; at least 1. See [`sizes`].
    pub size: u32,
}

/// Placement of chains on nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    pub chains: BTreeMap<ChainId, Members>,
    /// All registered nodes.
    pub nodes: BTreeMap<NodeId, Site>,
    /// Replicas of a chain.
    pub replicas: u32,
    /// Chains that wait for an unavailable node before they can start.
    pub waiting: usize,
}

impl Placement {
    /// The domain rule of its nodes.
    pub(crate) fn rule(&self) -> Rule {
        Rule::new(&self.nodes, self.replicas)
    }

    /// Chains with more replicas in a domain than the rule allows.
    pub(crate) fn violations(&self, rule: &Rule) -> impl Iterator<Item = (ChainId, &Members)> {
        let violates = |members: &Members| self.excess(rule, &members.nodes) > 0;
        let violating = self.chains.iter().filter(move |(_, members)| violates(members));
        violating.map(|(id, members)| (*id, members))
    }

    /// Whether a move is valid now: the plan may assume that other moves of its chain precede it.
    pub(crate) fn permits(&self, rule: &Rule, planned: &PlannedMove) -> bool {
        let Some(members) = self.chains.get(&planned.chain) else { return false };
        let mut after = members.nodes.clone();
        after.remove(&planned.from)
            && after.insert(planned.to)
            && self.excess(rule, &after) <= self.excess(rule, &members.nodes)
    }

    /// The replicas on draining nodes.
    pub(crate) fn on_leaving(&self) -> usize {
        let leaves = |node: &&NodeId| self.state(**node) == Some(Use::Leaving);
        self.chains.values().map(|chain| chain.nodes.iter().filter(leaves).count()).sum()
    }

    /// Replicas that remain on draining nodes after these moves: no other node may receive them.
    pub(crate) fn stuck(&self, moves: &[PlannedMove]) -> usize {
        let leaves = |step: &&PlannedMove| self.state(step.from) == Some(Use::Leaving);
        self.on_leaving().saturating_sub(moves.iter().filter(leaves).count())
    }

    /// Live nodes that are not draining.
    pub(crate) fn staying(&self) -> usize {
        let stays = |site: &&Site| matches!(site.state, Use::Open | Use::Full);
        self.nodes.values().filter(stays).count()
    }

    /// Replicas of a chain above the limits of the rule, without those on draining nodes.
    fn excess(&self, rule: &Rule, nodes: &BTreeSet<NodeId>) -> u32 {
        let sites = nodes.iter().filter_map(|node| self.nodes.get(node));
        let stays = sites.filter(|site| site.state != Use::Leaving);
        let services: BTreeSet<NodeId> = nodes.iter().map(|node| node.service()).collect();
        rule.excess(stays.map(|site| &site.location)) + (nodes.len() - services.len()) as u32
    }

    fn state(&self, node: NodeId) -> Option<Use> {
        self.nodes.get(&node).map(|site| site.state)
    }
}

/// Weights of nodes with these capacities; 0 = unknown, which counts as the mean. Rounded, so that
/// small differences have no effect.
pub(crate) fn weights(capacities: &BTreeMap<NodeId, u64>) -> BTreeMap<NodeId, u32> {
    let known: Vec<u128> =
        capacities.values().filter(|bytes| **bytes > 0).map(|bytes| u128::from(*bytes)).collect();
    let most = known.iter().max().copied().unwrap_or(1);
    let mean = known.iter().sum::<u128>().checked_div(known.len() as u128).unwrap_or(1);
    let weight = |bytes: u64| {
        let bytes = if bytes == 0 { mean } else { u128::from(bytes) };
        let rounded = (bytes * u128::from(WEIGHT_MAX) + most / 2) / most;
        (rounded as u32).clamp(1, WEIGHT_MAX)
    };
    capacities.iter().map(|(node, bytes)| (*node, weight(*bytes))).collect()
}

/// Sizes of chains that hold these bytes. The unit is the mean and the result is rounded: chains of
/// similar size are equal, so that a plan does not change with every write.
pub(crate) fn sizes(bytes: &BTreeMap<ChainId, u64>) -> BTreeMap<ChainId, u32> {
    const SIZE_MAX: u128 = 8;
    let filled: Vec<u128> =
        bytes.values().filter(|bytes| **bytes > 0).map(|bytes| u128::from(*bytes)).collect();
    let mean = filled.iter().sum::<u128>().checked_div(filled.len() as u128).unwrap_or(1).max(1);
    let size = |bytes: u64| ((u128::from(bytes) + mean / 2) / mean).clamp(1, SIZE_MAX) as u32;
    bytes.iter().map(|(chain, bytes)| (*chain, size(*bytes))).collect()
}

#[cfg(test)]
#[path = "placement_test.rs"]
mod tests;

#[cfg(test)]
#[path = "disks_test.rs"]
mod disks_test;
