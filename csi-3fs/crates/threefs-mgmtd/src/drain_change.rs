//! Draining of nodes: a mark per node. Operators that drain different nodes at the same time do not
//! affect each other.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use threefs_core::ids::NodeId;

/// A change of the nodes that are drained. May be repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DrainChange {
    /// These are drained too.
    Add(Vec<NodeId>),
    /// These are kept.
    Remove(Vec<NodeId>),
    /// All nodes are kept.
    RemoveAll,
}

impl DrainChange {
    /// The nodes that are drained after the change.
    #[must_use]
    pub fn apply(&self, mut leaving: BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        match self {
            Self::Add(nodes) => leaving.extend(nodes),
            Self::Remove(nodes) => leaving.retain(|node| !nodes.contains(node)),
            Self::RemoveAll => leaving.clear(),
        }
        leaving
    }
}
