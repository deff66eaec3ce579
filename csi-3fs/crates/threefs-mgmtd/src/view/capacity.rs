//! Capacities of the nodes. The stored ones count: a node does not know its capacity until it has
//! measured its disk and opened its targets, whose space it counts.

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::ids::NodeId;

use crate::placement::{self, Placement, Use};
use crate::view::{LastHeartbeat, View, is_closed};

/// A smaller change than this fraction is not stored: it does not change a plan.
const CHANGE_PARTS_MIN: u64 = 64;

impl View {
    /// Capacities that have changed since they were stored.
    pub(crate) fn new_capacities(&self) -> Vec<(NodeId, u64)> {
        let changed = |(node, last): &(&NodeId, &LastHeartbeat)| {
            let stored = self.capacities.get(*node).copied().unwrap_or(0);
            last.capacity_bytes > 0
                && (stored == 0 || stored.abs_diff(last.capacity_bytes) > stored / CHANGE_PARTS_MIN)
                && self.has_opened_targets(**node, last)
        };
        let new = self.heartbeats.iter().filter(changed);
        new.map(|(node, last)| (*node, last.capacity_bytes)).collect()
    }

    fn has_opened_targets(&self, node: NodeId, last: &LastHeartbeat) -> bool {
        self.routing.targets_of_node(node).all(|(_, place)| {
            last.targets.iter().any(|line| line.target == place.target && !is_closed(line))
        })
    }

    /// The weight of each node: its capacity. One that was never known counts as reported.
    pub(crate) fn weights(&self) -> BTreeMap<NodeId, u32> {
        let reported = |node| self.heartbeats.get(node).map_or(0, |last| last.capacity_bytes);
        let capacity = |node| self.capacities.get(node).copied().unwrap_or_else(|| reported(node));
        placement::weights(&self.nodes.keys().map(|node| (*node, capacity(node))).collect())
    }

    /// Nodes of a placement whose capacity was never known: how much the others should hold is
    /// unknown too.
    pub(crate) fn unknown_capacities(&self, placement: &Placement) -> BTreeSet<NodeId> {
        let unknown = placement.nodes.iter().filter(|(node, site)| {
            site.state != Use::Leaving && !self.capacities.contains_key(node)
        });
        unknown.map(|(node, _)| *node).collect()
    }
}
