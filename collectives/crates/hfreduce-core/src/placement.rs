//! Placement of ranks on nodes.

use std::collections::HashMap;

use hfreduce_plan::NodePlace;

/// A placement that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The list is empty.
    #[error("the placement list is empty; give (node, zone) for every rank")]
    Empty,
    /// A node is in two zones.
    #[error("node `{node}` is in zone `{one}` for one rank and in `{other}` for rank {rank}")]
    TwoZones {
        /// The node.
        node: String,
        /// Its first zone.
        one: String,
        /// The other.
        other: String,
        /// The rank that disagrees.
        rank: usize,
    },
}

/// Ranks grouped into nodes. Nodes are numbered by first appearance, local ranks in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    nodes: Vec<NodePlace>,
    members: Vec<Vec<u32>>,
    node_of: Vec<u32>,
    local_of: Vec<u32>,
}

impl Placement {
    /// Groups ranks by node, from the (node, zone) of every rank.
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn new(ranks: &[(String, String)]) -> Result<Self, PlacementError> {
        if ranks.is_empty() {
            return Err(PlacementError::Empty);
        }
        let mut index: HashMap<&str, usize> = HashMap::new();
        let mut placement =
            Self { nodes: vec![], members: vec![], node_of: vec![], local_of: vec![] };
        for (rank, (node, zone)) in ranks.iter().enumerate() {
            let next = placement.nodes.len();
            let at = *index.entry(node).or_insert(next);
            if at == next {
                placement.nodes.push(NodePlace { name: node.clone(), zone: zone.clone() });
                placement.members.push(vec![]);
            }
            if placement.nodes[at].zone != *zone {
                return Err(PlacementError::TwoZones {
                    node: node.clone(),
                    one: placement.nodes[at].zone.clone(),
                    other: zone.clone(),
                    rank,
                });
            }
            placement.node_of.push(at as u32);
            placement.local_of.push(placement.members[at].len() as u32);
            placement.members[at].push(rank as u32);
        }
        Ok(placement)
    }

    /// Number of ranks.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.node_of.len()
    }

    /// The nodes, for the plan.
    #[inline]
    pub fn nodes(&self) -> &[NodePlace] {
        &self.nodes
    }

    /// The node index of a rank.
    #[inline]
    pub fn node_of(&self, rank: u32) -> usize {
        self.node_of[rank as usize] as usize
    }

    /// The node name of a rank.
    #[inline]
    pub fn node_name(&self, rank: u32) -> &str {
        &self.nodes[self.node_of(rank)].name
    }

    /// The index of a rank among its node's ranks.
    #[inline]
    pub fn local_of(&self, rank: u32) -> usize {
        self.local_of[rank as usize] as usize
    }

    /// The ranks of a node, in order.
    #[inline]
    pub fn members(&self, node: usize) -> &[u32] {
        &self.members[node]
    }

    /// The smallest number of ranks that any node has.
    #[inline]
    pub fn members_min(&self) -> usize {
        self.members.iter().map(Vec::len).min().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(node, zone)| ((*node).into(), (*zone).into())).collect()
    }

    #[test]
    fn ranks_of_one_node_need_not_be_consecutive() {
        let placement =
            Placement::new(&pairs(&[("a", "A"), ("b", "B"), ("a", "A"), ("b", "B"), ("c", "B")]))
                .unwrap();
        assert_eq!(placement.members(0), [0, 2]);
        assert_eq!(placement.members(1), [1, 3]);
        assert_eq!((placement.node_of(4), placement.local_of(3)), (2, 1));
        assert_eq!(placement.members_min(), 1);
    }

    #[test]
    fn the_error_of_a_node_in_two_zones_names_it() {
        let error = Placement::new(&pairs(&[("a", "A"), ("a", "B")])).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
