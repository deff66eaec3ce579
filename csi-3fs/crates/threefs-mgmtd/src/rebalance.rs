//! Rebalancing: the chains to add and the replicas to move when nodes join or leave. Pure.
//!
//! The goal: the numbers of targets on participating nodes differ by at most one, and a leaving
//! node has none. A move takes one target from the node with the most to the node with the fewest,
//! so no plan with fewer moves reaches the goal. Such a move always exists: a node with more
//! targets than another has a chain that the other does not have.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ChainId, NodeId};

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

/// Placement of chains on nodes, and the participating nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Placement {
    /// The nodes of each chain.
    pub chains: BTreeMap<ChainId, BTreeSet<NodeId>>,
    /// Live nodes that may have targets. Others keep what they have.
    pub staying: BTreeSet<NodeId>,
    /// Nodes to drain, disjoint from `staying`.
    pub leaving: BTreeSet<NodeId>,
    /// Staying nodes that receive no more targets: they have no space.
    pub full: BTreeSet<NodeId>,
    /// Chains that wait for an unavailable node before they can start.
    pub waiting: usize,
}

impl Placement {
    /// The moves that reach the goal, in a valid order.
    pub(crate) fn moves(mut self) -> Vec<PlannedMove> {
        let mut moves = Vec::new();
        let mut times: BTreeMap<ChainId, u32> = BTreeMap::new();
        let mut loads = self.loads();
        let leaving = std::mem::take(&mut self.leaving);
        for (chain, from) in self.on_nodes(&leaving) {
            let free = loads.iter().filter(|(node, _)| {
                !self.full.contains(node) && !self.chains[&chain].contains(node)
            });
            // Fewer nodes than replicas: the replica stays.
            let Some(to) = free.min_by_key(|(_, load)| **load).map(|(node, _)| *node) else {
                continue;
            };
            moves.push(self.make(PlannedMove { chain, from, to }, &mut loads));
        }
        loop {
            let fullest =
                loads.iter().max_by_key(|(node, load)| (**load, std::cmp::Reverse(**node)));
            let has_room = loads.iter().filter(|(node, _)| !self.full.contains(node));
            let emptiest = has_room.min_by_key(|(node, load)| (**load, **node));
            let (Some((&from, &most)), Some((&to, &least))) = (fullest, emptiest) else { break };
            let movable = |nodes: &BTreeSet<NodeId>| nodes.contains(&from) && !nodes.contains(&to);
            // The chain with the fewest moves: replicas of one chain cannot be moved concurrently.
            let chain = self
                .chains
                .iter()
                .filter(|(_, nodes)| movable(nodes))
                .min_by_key(|(id, _)| (times.get(id).copied().unwrap_or(0), **id));
            match chain {
                Some((&chain, _)) if most > least + 1 => {
                    *times.entry(chain).or_default() += 1;
                    moves.push(self.make(PlannedMove { chain, from, to }, &mut loads));
                }
                _ => break,
            }
        }
        moves
    }

    /// Replicas that remain on draining nodes after these moves: no other node has space.
    pub(crate) fn stuck(&self, moves: &[PlannedMove]) -> usize {
        let go = moves.iter().filter(|step| self.leaving.contains(&step.from)).count();
        self.on_nodes(&self.leaving).len().saturating_sub(go)
    }

    /// Nodes of additional chains, such that each staying node can be first in `chains_per_node`
    /// chains, not counting those that wait; empty if there are fewer staying nodes than replicas.
    pub(crate) fn new_chains(&self, replicas: u32, chains_per_node: u32) -> Vec<Vec<NodeId>> {
        let goal = self.staying.len() * chains_per_node as usize;
        let missing = goal.saturating_sub(self.chains.len() - self.waiting);
        let mut loads = self.loads();
        loads.retain(|node, _| !self.full.contains(node));
        if loads.len() < replicas as usize {
            return Vec::new();
        }
        let mut chains = Vec::with_capacity(missing);
        for _ in 0..missing {
            let mut emptiest: Vec<NodeId> = loads.keys().copied().collect();
            emptiest.sort_by_key(|node| (loads[node], *node));
            emptiest.truncate(replicas as usize);
            for node in &emptiest {
                *loads.entry(*node).or_default() += 1;
            }
            chains.push(emptiest);
        }
        chains
    }

    /// Number of targets on each staying node.
    fn loads(&self) -> BTreeMap<NodeId, usize> {
        let mut loads: BTreeMap<NodeId, usize> =
            self.staying.iter().map(|node| (*node, 0)).collect();
        for node in self.chains.values().flatten() {
            loads.entry(*node).and_modify(|load| *load += 1);
        }
        loads
    }

    fn on_nodes(&self, nodes: &BTreeSet<NodeId>) -> Vec<(ChainId, NodeId)> {
        let of_chain = |(id, on): (&ChainId, &BTreeSet<NodeId>)| {
            on.intersection(nodes).map(|node| (*id, *node)).collect::<Vec<_>>()
        };
        self.chains.iter().flat_map(of_chain).collect()
    }

    fn make(&mut self, planned: PlannedMove, loads: &mut BTreeMap<NodeId, usize>) -> PlannedMove {
        let nodes = self.chains.entry(planned.chain).or_default();
        nodes.remove(&planned.from);
        nodes.insert(planned.to);
        loads.entry(planned.from).and_modify(|load| *load -= 1);
        loads.entry(planned.to).and_modify(|load| *load += 1);
        planned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::first_chains;
    use proptest::prelude::*;

    /// A cluster with initial nodes, some dead or leaving, and additional ones.
    fn placement() -> impl Strategy<Value = (Placement, u32)> {
        (1u32..9, 1u32..5, 0u32..9, any::<u16>(), any::<u16>())
            .prop_flat_map(|(nodes, chains, added, dead, leaving)| {
                (Just((nodes, chains, added, dead, leaving)), 1..=nodes.min(4))
            })
            .prop_map(|((nodes, chains_per_node, added, dead, leaving), replicas)| {
                let first: Vec<NodeId> = (0..nodes).map(NodeId).collect();
                let of = |mask: u16, node: u32| (mask >> (node % 16)) & 3 == 3;
                let chains = first_chains(&first, replicas, chains_per_node)
                    .iter()
                    .map(|it| (it.id, it.targets.iter().map(|place| place.node).collect()))
                    .collect();
                let all = || (0..nodes + added).filter(|node| !of(dead, *node));
                let staying = all().filter(|node| !of(leaving, *node)).map(NodeId).collect();
                let leaving = (0..nodes + added).filter(|node| of(leaving, *node)).map(NodeId);
                let leaving = leaving.collect();
                (Placement { chains, staying, leaving, ..Placement::default() }, replicas)
            })
    }

    proptest! {
        #[test]
        fn the_plan_balances_all_nodes_without_two_replicas_on_one((before, replicas) in placement()) {
            let moves = before.clone().moves();
            let mut after = before.clone();
            for step in &moves {
                let on = after.chains.get_mut(&step.chain).unwrap();
                prop_assert!(on.remove(&step.from), "{step:?}: the source is not there");
                prop_assert!(on.insert(step.to), "{step:?}: two replicas on one node");
                prop_assert!(before.staying.contains(&step.to));
                let may_leave = before.staying.contains(&step.from) || before.leaving.contains(&step.from);
                prop_assert!(may_leave, "{step:?}: the node is neither staying nor leaving");
            }
            prop_assert!(after.chains.values().all(|on| on.len() == replicas as usize));
            let loads: Vec<usize> = after.loads().into_values().collect();
            let spread = loads.iter().max().unwrap_or(&0) - loads.iter().min().unwrap_or(&0);
            prop_assert!(spread <= 1, "{loads:?}");
            if before.staying.len() >= replicas as usize {
                prop_assert!(after.on_nodes(&before.leaving).is_empty());
                prop_assert_eq!(before.stuck(&moves), 0);
            }
            prop_assert!(after.moves().is_empty() || before.staying.len() < replicas as usize);
        }

        #[test]
        fn a_node_moves_no_more_than_its_surplus((before, _) in placement()) {
            let mut before = before;
            before.leaving.clear();
            let loads = before.loads();
            let least = loads.values().sum::<usize>() / loads.len().max(1);
            let surplus: usize = loads.values().map(|load| load.saturating_sub(least)).sum();
            prop_assert!(before.moves().len() <= surplus);
        }

        #[test]
        fn new_chains_go_to_the_nodes_with_the_fewest_targets((before, replicas) in placement(), per_node in 1u32..4) {
            let chains = before.new_chains(replicas, per_node);
            let enough = before.staying.len() >= replicas as usize;
            let goal = before.staying.len() * per_node as usize;
            let missing = if enough { goal.saturating_sub(before.chains.len()) } else { 0 };
            prop_assert_eq!(chains.len(), missing);
            for nodes in &chains {
                let different: BTreeSet<&NodeId> = nodes.iter().collect();
                prop_assert_eq!(different.len(), replicas as usize);
                prop_assert!(nodes.iter().all(|node| before.staying.contains(node)));
            }
        }
    }

    #[test]
    fn a_full_node_receives_no_targets_and_can_lose_some() {
        let on = |nodes: &[u32]| nodes.iter().copied().map(NodeId).collect::<BTreeSet<_>>();
        let chains: BTreeMap<ChainId, BTreeSet<NodeId>> =
            (1..=6).map(|id| (ChainId(id), on(&[2, 3]))).collect();
        let placement = Placement {
            chains,
            staying: on(&[1, 2, 3, 4]),
            full: on(&[1, 2]),
            ..Placement::default()
        };
        let moves = placement.clone().moves();
        assert!(!moves.is_empty() && moves.iter().all(|it| it.to == NodeId(4)), "{moves:?}");
        assert!(moves.iter().any(|it| it.from == NodeId(2)), "{moves:?}");
        let chains = placement.new_chains(2, 2);
        assert_eq!(chains.len(), 2);
        assert!(chains.iter().flatten().all(|node| !placement.full.contains(node)), "{chains:?}");
        assert!(placement.new_chains(3, 2).is_empty(), "only two have space");
    }

    #[test]
    fn a_balanced_cluster_is_unchanged() {
        let nodes: Vec<NodeId> = (1..=5).map(NodeId).collect();
        let chains = first_chains(&nodes, 3, 2);
        let chains: BTreeMap<ChainId, BTreeSet<NodeId>> = chains
            .iter()
            .map(|chain| (chain.id, chain.targets.iter().map(|place| place.node).collect()))
            .collect();
        let placement =
            Placement { chains, staying: nodes.into_iter().collect(), ..Placement::default() };
        assert!(placement.new_chains(3, 2).is_empty());
        assert!(placement.moves().is_empty());
    }
}
