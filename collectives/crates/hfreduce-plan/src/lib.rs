//! The collective plan: two trees over the nodes of one job, as a pure function of their order and zones.
//!
//! Half of every vector travels in tree 0 and half in tree 1. A node that is interior in one tree (it adds the
//! values of children) is a leaf of the other, so that both directions of every network card are used and none
//! carries twice the traffic: a node has at most [`DEGREE_MAX`] tree neighbors in total.
//!
//! ```text
//! tree 0, 8 nodes:    0            tree 1 is its mirror: 7
//!                       |                                  |
//!                       4                                  3
//!                     /   \                              /   \
//!                    2     6                            1     5
//!                   / \   / \                          / \   / \
//!                  1   3 5   7                        0   2 4   6
//! ```
//!
//! Zones are joined by exactly one edge in each tree; more than two zones form a chain in the order in which
//! they first appear. With two zones both edges lie on one pair of nodes, the *bridge pair*, because a cluster
//! routes the job over one pair. See [`Plan`] for the invariants of every plan.
//!
//! Pure: no clock, socket, thread or random number; the same list yields the same plan on every node.

mod compose;
mod describe;
mod tree;
mod validate;
#[cfg(test)]
mod validate_test;

pub use tree::{Links, Tree};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Maximum number of tree neighbors of one node, both trees counted together.
pub const DEGREE_MAX: usize = 4;

/// Maximum number of children of one node in one tree: (left, right).
pub const CHILDREN_MAX: usize = 2;

/// A node and its zone (network island).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodePlace {
    /// Name of the node; unique in a plan.
    pub name: String,
    /// Name of its zone.
    pub zone: String,
}

impl NodePlace {
    /// A place from a name and a zone.
    pub fn new(name: impl Into<String>, zone: impl Into<String>) -> Self {
        Self { name: name.into(), zone: zone.into() }
    }
}

/// One edge of one tree that joins two zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Crossing {
    /// 0 or 1.
    pub tree: usize,
    /// The end nearer to the root: an index into [`Plan::nodes`].
    pub parent: usize,
    /// The other end.
    pub child: usize,
}

/// Two trees over the nodes of one job.
///
/// Invariants of every plan:
/// 1. each tree spans all nodes, has one root and no cycle, and parents and children agree;
/// 2. a node has at most two children in a tree and [`DEGREE_MAX`] neighbors in both together;
/// 3. a node has two or more neighbors in at most one tree (it is a leaf of the other), unless it carries a
///    crossing;
/// 4. a tree has exactly `zones - 1` crossings, the minimum;
/// 5. with two zones both trees cross on the same pair.
///
/// The order of summation is part of the plan: the node's value first, then the children in the order listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    nodes: Vec<NodePlace>,
    trees: [Tree; 2],
}

impl Plan {
    /// The plan of an ordered list of nodes. The bridge pair of two zones is the last node of the first zone
    /// and the first node of the second: neighbors, if the list is sorted by zone.
    pub fn new(nodes: &[NodePlace]) -> Result<Self, PlanError> {
        compose::compose(nodes, None)
    }

    /// As [`Plan::new`], with the bridge pair given by the names of one node of each of the two zones.
    pub fn with_bridge(nodes: &[NodePlace], bridge: (&str, &str)) -> Result<Self, PlanError> {
        compose::compose(nodes, Some(bridge))
    }

    /// The nodes in the order given; every index in the plan points into this list.
    pub fn nodes(&self) -> &[NodePlace] {
        &self.nodes
    }

    /// The two trees.
    pub fn trees(&self) -> &[Tree; 2] {
        &self.trees
    }

    /// The links of node `node` in tree `tree`, if both exist.
    pub fn links(&self, tree: usize, node: usize) -> Option<&Links> {
        self.trees.get(tree)?.links.get(node)
    }

    /// The edges of `tree` that join two zones.
    pub fn crossings_of(&self, tree: usize) -> Vec<Crossing> {
        let Some(links) = self.trees.get(tree).map(|tree| &tree.links) else { return Vec::new() };
        let zone = |node: usize| self.nodes.get(node).map(|place| place.zone.as_str());
        links
            .iter()
            .enumerate()
            .filter_map(|(child, links)| links.parent.map(|parent| (parent, child)))
            .filter(|&(parent, child)| zone(parent) != zone(child))
            .map(|(parent, child)| Crossing { tree, parent, child })
            .collect()
    }

    /// Number of crossings of each tree.
    pub fn crossings(&self) -> [usize; 2] {
        [self.crossings_of(0).len(), self.crossings_of(1).len()]
    }

    /// Depth of each tree: the edges from the root to the deepest leaf.
    pub fn depth(&self) -> [usize; 2] {
        [self.trees[0].depth(), self.trees[1].depth()]
    }

    /// Neighbors of `node` in both trees together.
    pub fn degree(&self, node: usize) -> usize {
        self.trees.iter().map(|tree| tree.degree(node)).sum()
    }

    /// The plan as JSON.
    pub fn describe(&self) -> serde_json::Value {
        describe::describe(self)
    }
}

/// The reason why a plan cannot be made, or was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The list of nodes is empty.
    #[error("a plan needs at least one node, and the list is empty")]
    Empty,
    /// A node has no name.
    #[error("node {index} has an empty name: give every node a unique name")]
    Unnamed {
        /// Its position in the list.
        index: usize,
    },
    /// Two nodes share a name.
    #[error("nodes {first} and {second} are both named `{name}`: name every node once")]
    Duplicate {
        /// The name.
        name: String,
        /// The first position.
        first: usize,
        /// The second position.
        second: usize,
    },
    /// The bridge pair does not fit the list.
    #[error("bridge ({a}, {b}): {why}; name one node of each of two zones")]
    Bridge {
        /// The first name given.
        a: String,
        /// The second name given.
        b: String,
        /// What is wrong with the pair.
        why: &'static str,
    },
    /// A tree is not a spanning tree.
    #[error("tree {tree}: {why} at node `{node}`")]
    Broken {
        /// Which tree.
        tree: usize,
        /// The node.
        node: String,
        /// What is wrong at the node.
        why: &'static str,
    },
    /// A node has too many neighbors.
    #[error("node `{node}` has {degree} tree neighbors, more than {DEGREE_MAX}")]
    Degree {
        /// The node.
        node: String,
        /// The number of its neighbors.
        degree: usize,
    },
    /// A node adds in both trees.
    #[error("node `{node}` is interior in both trees and carries no crossing")]
    Interior {
        /// The node.
        node: String,
    },
    /// A tree has more or fewer crossings than required.
    #[error("tree {tree} crosses zones {crossings} times, and {zones} zones need {}", zones - 1)]
    Crossings {
        /// Which tree.
        tree: usize,
        /// Its number of crossings.
        crossings: usize,
        /// The number of zones.
        zones: usize,
    },
    /// The two trees cross on different pairs.
    #[error(
        "the trees cross between `{first}` and between `{second}`: two zones have one bridge pair"
    )]
    TwoBridges {
        /// The pair of tree 0.
        first: String,
        /// The pair of tree 1.
        second: String,
    },
}
