//! Placement of the initial chains: balanced and deterministic. Pure.
//!
//! Chain `(round, n)` is on the nodes `n, n + s, n + 2s, …` (mod N), with a stride `s` that depends
//! on the round. So every node is first in `chains_per_node` chains and a member of `replicas *
//! chains_per_node`, and the reads of a dead node are taken over by different partners in each
//! round.

use threefs_core::ids::{ChainId, NodeId, TargetId};
use threefs_core::routing::Chain;

/// Range of target ids per node, so that a target id determines its node.
pub(crate) const TARGETS_PER_NODE: u64 = 1 << 20;

/// The initial chains over `nodes`, which are sorted by id.
pub fn first_chains(nodes: &[NodeId], replicas: u32, chains_per_node: u32) -> Vec<Chain> {
    let count = nodes.len();
    let strides = strides(count, replicas as usize);
    let mut targets_made = vec![0u64; count];
    let mut chains = Vec::with_capacity(count * chains_per_node as usize);
    for round in 0..chains_per_node as usize {
        let stride = strides[round % strides.len()];
        for first in 0..count {
            let targets: Vec<(TargetId, NodeId)> = (0..replicas as usize)
                .map(|place| {
                    let node = (first + place * stride) % count;
                    targets_made[node] += 1;
                    let number = u64::from(nodes[node].0) * TARGETS_PER_NODE + targets_made[node];
                    (TargetId(number), nodes[node])
                })
                .collect();
            let id = ChainId(chains.len() as u32 + 1);
            chains.push(Chain::create(id, &targets));
        }
    }
    chains
}

/// Strides that reach `replicas` different nodes; 1 always does.
fn strides(count: usize, replicas: usize) -> Vec<usize> {
    let distinct = |stride: &usize| {
        let mut places: Vec<usize> = (0..replicas).map(|place| place * stride % count).collect();
        places.sort_unstable();
        places.dedup();
        places.len() == replicas
    };
    let good: Vec<usize> = (1..count).filter(distinct).collect();
    if good.is_empty() { vec![1] } else { good }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        #[test]
        fn every_node_has_the_same_number_of_targets(
            (nodes, replicas, chains_per_node) in
                (1u32..20).prop_flat_map(|nodes| (Just(nodes), 1..=nodes.min(5), 1u32..6))
        ) {
            let ids: Vec<NodeId> = (10..10 + nodes).map(NodeId).collect();
            let chains = first_chains(&ids, replicas, chains_per_node);
            prop_assert_eq!(chains.len() as u32, nodes * chains_per_node);
            let mut members: BTreeMap<NodeId, u32> = BTreeMap::new();
            let mut firsts: BTreeMap<NodeId, u32> = BTreeMap::new();
            let mut targets = BTreeSet::new();
            for chain in &chains {
                let on: BTreeSet<NodeId> = chain.targets.iter().map(|t| t.node).collect();
                prop_assert_eq!(on.len() as u32, replicas, "replicas share a node");
                on.into_iter().for_each(|node| *members.entry(node).or_default() += 1);
                *firsts.entry(chain.targets[0].node).or_default() += 1;
                chain.targets.iter().for_each(|t| assert!(targets.insert(t.target)));
            }
            prop_assert!(members.values().all(|count| *count == replicas * chains_per_node));
            prop_assert!(firsts.values().all(|count| *count == chains_per_node));
            prop_assert_eq!(members.len() as u32, nodes);
        }
    }

    #[test]
    fn the_reads_of_a_dead_node_spread_over_more_than_two_others() {
        let ids: Vec<NodeId> = (0..7).map(NodeId).collect();
        let partners: BTreeSet<NodeId> = first_chains(&ids, 3, 3)
            .iter()
            .filter(|chain| chain.targets.iter().any(|t| t.node == NodeId(0)))
            .flat_map(|chain| chain.targets.iter().map(|t| t.node))
            .collect();
        assert_eq!(partners.len(), 7);
    }
}
