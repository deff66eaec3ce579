//! The collective plan: two trees over the machines of one job, as a pure function of their order and zones.
//!
//! Half of every vector travels in tree 0 and half in tree 1. A machine that works hard in one tree (it has
//! children to add) is a leaf of the other, so that both directions of every network card are busy and none is
//! busy twice: no machine has more than [`DEGREE_MAX`] tree neighbours in all.
//!
//! ```text
//!   tree 0, 8 machines: 0            tree 1 is its mirror: 7
//!                       |                                  |
//!                       4                                  3
//!                     /   \                              /   \
//!                    2     6                            1     5
//!                   / \   / \                          / \   / \
//!                  1   3 5   7                        0   2 4   6
//! ```
//!
//! Zones are joined by exactly one edge a tree; more than two form a chain in the order in which they first appear.
//! With two zones both edges lie on one pair of machines, the *bridge pair*, because a cluster routes the job over
//! one pair. Where it may use two, [`Bridging::TwoPairs`] puts the edges on different machines, and no bridge has to
//! add in both trees. See [`Plan`] for what holds for every plan.
//!
//! Pure: no clock, socket, thread or random number; the same list gives the same plan on every machine.

mod compose;
mod describe;
mod tree;
mod validate;

pub use tree::{Links, Tree};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Tree neighbours that one machine may have, both trees counted together.
pub const DEGREE_MAX: usize = 4;

/// Children that one machine may have in one tree: (left, right).
pub const CHILDREN_MAX: usize = 2;

/// Where one machine stands: its name and the zone (network island) it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodePlace {
    /// The machine's name; unique in a plan.
    pub name: String,
    /// The name of its zone.
    pub zone: String,
}

impl NodePlace {
    /// A place from anything that reads as a string.
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

/// Over how many pairs of machines the two trees cross from zone to zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bridging {
    /// Both trees on the same pair: one route between the zones is enough.
    OnePair,
    /// Each tree on a pair of its own. Only a zone of one machine, or one border of an odd zone in the middle of a
    /// chain, has both on one machine.
    TwoPairs,
}

/// Two trees over the machines of one job.
///
/// What [`Plan::validate`] checks, and every plan from [`Plan::new`] satisfies:
/// 1. each tree spans all machines, has one root and no cycle, and parents and children agree;
/// 2. a machine has at most two children in a tree and [`DEGREE_MAX`] neighbours in both together;
/// 3. a machine has two or more neighbours in at most one tree (it is a leaf of the other), unless it carries
///    crossings of both;
/// 4. a tree has exactly `zones - 1` crossings, the fewest there can be;
/// 5. with two zones both trees cross on the same pair, or, with [`Bridging::TwoPairs`], on different machines of
///    every zone that has two.
///
/// The order of summation is part of the plan: own value first, then the children in the order listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    nodes: Vec<NodePlace>,
    trees: [Tree; 2],
    bridging: Bridging,
}

impl Plan {
    /// The plan of an ordered list of machines. The bridge pair of two zones is the last machine of the first one
    /// and the first machine of the second one: neighbours, where the list goes zone by zone.
    pub fn new(nodes: &[NodePlace]) -> Result<Self, PlanError> {
        compose::compose(nodes, Bridging::OnePair, None)
    }

    /// As [`Plan::new`], with the bridge pair given by the names of one machine of each of the two zones.
    pub fn with_bridge(nodes: &[NodePlace], bridge: (&str, &str)) -> Result<Self, PlanError> {
        compose::compose(nodes, Bridging::OnePair, Some(bridge))
    }

    /// As [`Plan::new`], with the crossings of the two trees on different machines.
    pub fn with_two_pairs(nodes: &[NodePlace]) -> Result<Self, PlanError> {
        compose::compose(nodes, Bridging::TwoPairs, None)
    }

    /// A plan that somebody else made: the parent of each machine in each tree, none for the root. It has to keep
    /// every promise of a plan of ours.
    pub fn from_parents(
        nodes: &[NodePlace],
        parents: [&[Option<usize>]; 2],
        bridging: Bridging,
    ) -> Result<Self, PlanError> {
        compose::check_names(nodes)?;
        let trees =
            [Tree::from_parents(0, nodes, parents[0])?, Tree::from_parents(1, nodes, parents[1])?];
        let plan = Self { nodes: nodes.to_vec(), trees, bridging };
        plan.validate()?;
        Ok(plan)
    }

    /// Reads what [`Plan::describe`] wrote, and checks it.
    pub fn read(description: &serde_json::Value) -> Result<Self, PlanError> {
        describe::read(description)
    }

    /// The machines in the order given; every index in the plan points into this list.
    pub fn nodes(&self) -> &[NodePlace] {
        &self.nodes
    }

    /// Over how many pairs it crosses.
    pub fn bridging(&self) -> Bridging {
        self.bridging
    }

    /// The two trees.
    pub fn trees(&self) -> &[Tree; 2] {
        &self.trees
    }

    /// The links of machine `node` in tree `tree`, if both exist.
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

    /// How often each tree crosses from zone to zone.
    pub fn crossings(&self) -> [usize; 2] {
        [self.crossings_of(0).len(), self.crossings_of(1).len()]
    }

    /// The edges from root to the deepest leaf, per tree.
    pub fn depth(&self) -> [usize; 2] {
        [self.trees[0].depth(), self.trees[1].depth()]
    }

    /// Neighbours of `node` in both trees together.
    pub fn degree(&self, node: usize) -> usize {
        self.trees.iter().map(|tree| tree.degree(node)).sum()
    }

    /// Checks everything that a plan promises (see [`Plan`]).
    pub fn validate(&self) -> Result<(), PlanError> {
        validate::validate(self)
    }

    /// The plan for people and tools, as JSON.
    pub fn describe(&self) -> serde_json::Value {
        describe::describe(self)
    }
}

/// Why there is no plan, or why one was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The list of machines is empty.
    #[error("a plan needs at least one node, and the list is empty")]
    Empty,
    /// A machine has no name.
    #[error("node {index} has an empty name: give every node its own name")]
    Unnamed {
        /// Its position in the list.
        index: usize,
    },
    /// Two machines share a name.
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
        /// What is wrong with it.
        why: &'static str,
    },
    /// A tree is not a spanning tree.
    #[error("tree {tree}: {why} at node `{node}`")]
    Broken {
        /// Which tree.
        tree: usize,
        /// The machine.
        node: String,
        /// What is wrong there.
        why: &'static str,
    },
    /// A description of a plan that cannot be read.
    #[error("a plan's description: {why}; write it with `Plan::describe`")]
    Description {
        /// Which field, which value.
        why: String,
    },
    /// A machine has too many neighbours.
    #[error("node `{node}` has {degree} tree neighbours, more than {DEGREE_MAX}")]
    Degree {
        /// The machine.
        node: String,
        /// Its neighbours.
        degree: usize,
    },
    /// A machine adds in both trees.
    #[error("node `{node}` is interior in both trees and carries no crossing")]
    Interior {
        /// The machine.
        node: String,
    },
    /// The trees cross zones more or less often than they must.
    #[error("tree {tree} crosses zones {crossings} times, and {zones} zones need {}", zones - 1)]
    Crossings {
        /// Which tree.
        tree: usize,
        /// How often it does.
        crossings: usize,
        /// How many zones there are.
        zones: usize,
    },
    /// Both trees cross on one machine, and the plan says that they do not.
    #[error(
        "both trees cross zones at node `{node}`, and the plan says two pairs: use another node, or one pair"
    )]
    SharedBridge {
        /// The machine.
        node: String,
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
