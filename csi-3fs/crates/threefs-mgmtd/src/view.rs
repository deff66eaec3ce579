//! What a primary knows in memory, and what follows from it. Pure: time comes in as [`Millis`].

mod growth;
mod promotion;
mod scan;

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::chain::Reason;
use threefs_core::heartbeat::{DataFolder, Heartbeat, LocalReport, LocalState, TargetReport};
use threefs_core::ids::{ChainId, NodeId, RoutingVersion, StoreId, TargetId};
use threefs_core::routing::Move;
use threefs_core::routing::{Chain, PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::ops::{Fence, Loaded};
use crate::protocol::{ClusterStatus, MgmtdError, NodeStatus};
use crate::rows::{NodeRow, PlacementGoal};

/// A primary's knowledge. Routing is exactly what is stored; heartbeats are only here.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub fence: Fence,
    /// When this primary began.
    pub since: Millis,
    /// Before the last renewal that succeeded was asked for.
    pub renewed_at: Millis,
    pub routing: RoutingInfo,
    pub nodes: BTreeMap<NodeId, NodeRow>,
    pub goal: PlacementGoal,
    /// The store with which each target has served.
    pub stores: BTreeMap<TargetId, StoreId>,
    /// What was decided last about growth, if nothing was to be done.
    pub settled_inputs: Option<GrowthInputs>,
    heartbeats: BTreeMap<NodeId, LastHeartbeat>,
    /// Nodes of which a new life has spoken, and since when: the former one counts as dead.
    restarting: BTreeMap<NodeId, Millis>,
    /// How often a destination of a move has given up while its node was alive.
    failed_syncs: BTreeMap<TargetId, u32>,
    /// Nodes on which a move has failed, and until when they are left alone.
    refusing_moves: BTreeMap<NodeId, Millis>,
    ticked_at: Millis,
    /// When a node whose data is of another cluster, or of lost chains, was last refused.
    refused_data_at: Option<Millis>,
}

/// All that growth is decided from. As long as it is the same, so is the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrowthInputs {
    routing: RoutingVersion,
    goal: PlacementGoal,
    alive: BTreeSet<NodeId>,
    full: BTreeSet<NodeId>,
    doomed_moves: Vec<ChainId>,
}

/// The newest heartbeat of a node's present life.
#[derive(Clone, Debug)]
struct LastHeartbeat {
    at: Millis,
    sequence: u64,
    targets: Vec<TargetReport>,
    /// Of all targets together.
    capacity_bytes: u64,
}

impl LastHeartbeat {
    fn used_bytes(&self) -> u64 {
        self.targets.iter().map(|line| line.used_bytes).sum()
    }
}

/// What a scan decides.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub chains: Vec<Chain>,
    pub reasons: Vec<Reason>,
    /// Moves that are complete with it.
    pub ended: Vec<Move>,
    /// Targets that serve with another store than is known.
    pub stores: Vec<(TargetId, StoreId)>,
}

impl Changes {
    /// Nothing is to be written.
    pub(crate) fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.stores.is_empty()
    }
}

/// What has to happen before a heartbeat can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Nothing.
    Known,
    /// Only its answer, again: it was taken, and that did not reach the node.
    Repeated,
    /// The node, or its address, has to be written down first.
    Register,
    /// It is a new life: the targets of the former one have to leave SERVING and SYNCING first.
    Restarted,
}

impl View {
    pub(crate) fn new(fence: Fence, loaded: Loaded, now: Millis) -> Self {
        Self {
            fence,
            since: now,
            renewed_at: now,
            routing: loaded.routing,
            nodes: loaded.nodes,
            goal: loaded.goal,
            stores: loaded.stores,
            settled_inputs: None,
            heartbeats: BTreeMap::new(),
            restarting: BTreeMap::new(),
            failed_syncs: BTreeMap::new(),
            refusing_moves: BTreeMap::new(),
            ticked_at: now,
            refused_data_at: None,
        }
    }

    /// Refuses a node whose data is not of this cluster.
    pub(crate) fn check_data(
        &mut self,
        node: NodeId,
        data: DataFolder,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let ours = self.routing.cluster;
        let refusal = match data {
            DataFolder::Of(theirs) if theirs != ours => {
                MgmtdError::OtherCluster { node, theirs, ours }
            }
            DataFolder::Unmarked if self.routing.chains.is_empty() => {
                MgmtdError::ChainsLost { node }
            }
            _ => return Ok(()),
        };
        self.refused_data_at = Some(now);
        Err(refusal)
    }

    /// Whether the first chains may be made: not while nodes with data of other chains report, which
    /// means that this store is not the one that the cluster had.
    pub(crate) fn may_make_chains(&self, timers: &Timers, now: Millis) -> bool {
        // Refused processes end and are started again: they need longer than a heartbeat does.
        let quiet_ms = timers.node_failure_ms.saturating_mul(30);
        self.refused_data_at.is_none_or(|at| now.since(at) >= quiet_ms)
    }

    /// A tick. Time in which mgmtd itself did not run (a starved or stopped process) is not silence
    /// of the nodes: their heartbeats wait in its sockets. Taking somebody for dead later than one
    /// could is always safe.
    pub(crate) fn tick(&mut self, timers: &Timers, now: Millis) {
        let slept_ms = now.since(self.ticked_at).saturating_sub(timers.scan_ms * 2);
        self.ticked_at = now;
        if slept_ms > 0 {
            self.heartbeats
                .values_mut()
                .for_each(|heartbeats| heartbeats.at = heartbeats.at.after(slept_ms));
        }
    }

    /// Whether the lease certainly still holds.
    pub(crate) fn holds_lease(&self, timers: &Timers, now: Millis) -> bool {
        now.since(self.renewed_at) < timers.primary_lease_ms
    }

    /// How long until it is known who is alive: every node that holds targets has been heard, or
    /// has had its full time to speak since this primary began. `None` = it is known.
    pub(crate) fn startup_remaining_ms(&self, timers: &Timers, now: Millis) -> Option<u64> {
        let waited = now.since(self.since);
        let all_heard = || {
            let mut holders = self.routing.chains.values().flat_map(|chain| &chain.targets);
            holders.all(|place| self.heartbeats.contains_key(&place.node))
        };
        let left = timers.node_failure_ms.checked_sub(waited).filter(|left| *left > 0)?;
        (!all_heard()).then_some(left)
    }

    /// What a heartbeat needs, or why it is refused.
    pub(crate) fn admit(&self, heartbeat: &Heartbeat) -> Result<Admission, MgmtdError> {
        let node = heartbeat.node;
        let Some(row) = self.nodes.get(&node) else { return Ok(Admission::Register) };
        if row.former_incarnations.contains(&heartbeat.incarnation) {
            return Err(MgmtdError::Replaced { node, address: row.info.address.clone() });
        }
        if row.incarnation != heartbeat.incarnation {
            return Ok(Admission::Restarted);
        }
        if self.restarting.contains_key(&node) {
            return Err(MgmtdError::Replaced { node, address: row.info.address.clone() });
        }
        match self.heartbeats.get(&node) {
            // Not heard anew: it says when the node was alive no better than the first time.
            Some(heartbeats) if heartbeat.sequence == heartbeats.sequence => {
                Ok(Admission::Repeated)
            }
            Some(heartbeats) if heartbeat.sequence < heartbeats.sequence => {
                Err(MgmtdError::Stale {
                    node,
                    sequence: heartbeat.sequence,
                    newest: heartbeats.sequence,
                })
            }
            _ if row.info.address != heartbeat.address => Ok(Admission::Register),
            _ => Ok(Admission::Known),
        }
    }

    /// Takes an admitted heartbeat. True when it says anything new about a target.
    pub(crate) fn record_heartbeat(&mut self, heartbeat: Heartbeat, now: Millis) -> bool {
        let Heartbeat { node, sequence, targets, capacity_bytes, .. } = heartbeat;
        let said = |targets: &[TargetReport]| -> Vec<(TargetId, LocalReport)> {
            targets.iter().map(|line| (line.target, line.report)).collect()
        };
        let new = said(&targets);
        let before = self
            .heartbeats
            .insert(node, LastHeartbeat { at: now, sequence, targets, capacity_bytes });
        before.is_none_or(|before| said(&before.targets) != new)
    }

    /// A new life of a node has spoken.
    pub(crate) fn restarts(&mut self, node: NodeId, now: Millis) {
        self.restarting.entry(node).or_insert(now);
    }

    /// Whether a target of the node is still SERVING or SYNCING.
    pub(crate) fn is_in_chains(&self, node: NodeId) -> bool {
        let active = |state| matches!(state, PublicState::Serving | PublicState::Syncing);
        self.routing.targets_of_node(node).any(|(_, place)| active(place.state))
    }

    /// A former life's reports say nothing any more.
    pub(crate) fn forget_node(&mut self, node: NodeId) {
        self.heartbeats.remove(&node);
        self.restarting.remove(&node);
    }

    pub(crate) fn is_alive(&self, node: NodeId, timers: &Timers, now: Millis) -> bool {
        self.heartbeats
            .get(&node)
            .is_some_and(|heartbeats| now.since(heartbeats.at) < timers.node_failure_ms)
    }

    fn report_of(&self, node: NodeId, target: TargetId) -> Option<TargetReport> {
        let heartbeats = self.heartbeats.get(&node)?;
        heartbeats.targets.iter().find(|line| line.target == target).copied()
    }

    pub(crate) fn status(
        &self,
        timers: &Timers,
        now: Millis,
        primary: &str,
        nodes_expected: u32,
    ) -> ClusterStatus {
        let nodes = self.nodes.values().map(|row| {
            let node = row.info.id;
            let heartbeats = self.heartbeats.get(&node);
            NodeStatus {
                node,
                address: row.info.address.clone(),
                alive: self.is_alive(node, timers, now),
                heartbeat_age_ms: heartbeats.map(|heartbeats| now.since(heartbeats.at)),
                used_bytes: heartbeats.map_or(0, LastHeartbeat::used_bytes),
                capacity_bytes: heartbeats.map_or(0, |heartbeats| heartbeats.capacity_bytes),
            }
        });
        let chains = &self.routing.chains;
        ClusterStatus {
            epoch: self.fence.epoch,
            primary: primary.into(),
            routing_version: self.routing.version,
            nodes_expected,
            nodes: nodes.collect(),
            chains: chains.len() as u32,
            chains_whole: chains.values().filter(|chain| chain.is_whole()).count() as u32,
            foreign_stores: self.foreign().collect(),
            chains_down: chains.values().filter(|chain| chain.head().is_none()).count() as u32,
        }
    }
}

fn is_offline(line: &TargetReport) -> bool {
    line.report.state == LocalState::Offline
}

fn is_closed(line: &TargetReport) -> bool {
    is_offline(line) && line.store.is_none()
}
