//! Nodes that this process serves.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use threefs_core::ids::{NodeId, TargetId};

use crate::node::Node;
use crate::target::Target;

/// The nodes that this process serves now.
#[derive(Default)]
pub(crate) struct Nodes(RwLock<BTreeMap<NodeId, Arc<Node>>>);

impl Nodes {
    /// The target `id`, if it is running on one of them.
    pub(crate) fn target(&self, id: TargetId) -> Option<Arc<Target>> {
        let nodes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        nodes.values().find_map(|node| node.target(id))
    }

    pub(crate) fn insert(&self, node: Arc<Node>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(node.id, node);
    }

    pub(crate) fn remove(&self, node: NodeId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&node);
    }
}
