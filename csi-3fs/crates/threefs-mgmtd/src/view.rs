//! In-memory state of a primary, and the decisions made from it. Pure: time is passed in as
//! [`Millis`].

mod capacity;
mod fences;
mod growth;
mod held;
mod promotion;
mod report;
mod scan;
mod stalls;

pub(crate) use growth::DEAD_DESTINATION_MS;
pub(crate) use report::Report;

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::heartbeat::{
    DataFolder, FenceReport, Heartbeat, LocalReport, LocalState, TargetReport,
};
use threefs_core::ids::{ChainId, InodeId, NodeId, RoutingVersion, StoreId, TargetId};
use threefs_core::location::Location;
use threefs_core::membership::MembershipRecord;
use threefs_core::routing::{Chain, ChainTarget, PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::ops::{Fence, Loaded};
use crate::pace::Pace;
use crate::protocol::{ClusterStatus, MgmtdError, NodeStatus};
use crate::rows::{FenceRow, NodeRow, PlacementGoal};

/// State of a primary. The routing is exactly what is stored; heartbeats are in memory only.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub fence: Fence,
    /// A time at which no former primary could renew its lease any more.
    pub since: Millis,
    /// Time after `since` until all leases that former primaries granted have ended.
    settles_ms: u64,
    /// Time at which the last successful renewal started.
    pub renewed_at: Millis,
    pub routing: RoutingInfo,
    pub nodes: BTreeMap<NodeId, NodeRow>,
    pub goal: PlacementGoal,
    /// The store that each target has served with.
    pub stores: BTreeMap<TargetId, StoreId>,
    /// The last known capacity of each node.
    pub capacities: BTreeMap<NodeId, u64>,
    pub pace: Pace,
    /// The newest known state of each chain that is held after a restore.
    pub held: BTreeMap<ChainId, Chain>,
    /// The last logged reason of each of them.
    pub logged_waits: BTreeMap<ChainId, String>,
    /// Inputs of the last growth decision, if it changed nothing.
    pub settled_inputs: Option<GrowthInputs>,
    /// The fence of each volume that has one.
    pub fences: BTreeMap<InodeId, FenceRow>,
    /// The cluster has snapshots: earlier releases are refused.
    pub snapshots: bool,
    /// Fences may be missing since a restore: no lease counts until they are published.
    pub unpublished: bool,
    /// Nodes of earlier releases that were refused, for the log.
    outdated: BTreeSet<NodeId>,
    heartbeats: BTreeMap<NodeId, LastHeartbeat>,
    /// Nodes with a new incarnation, and since when: the former one counts as dead.
    restarting: BTreeMap<NodeId, Millis>,
    /// How often the destination of a move has stopped while its node was alive.
    failed_syncs: BTreeMap<TargetId, u32>,
    /// Nodes on which a move has failed, and until when they receive none.
    refusing_moves: BTreeMap<NodeId, Millis>,
    ticked_at: Option<Millis>,
    /// Last refusal of a node with data of another cluster, or of lost chains.
    refused_data_at: Option<Millis>,
}

/// All inputs of growth decisions. The same inputs give the same decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrowthInputs {
    routing: RoutingVersion,
    goal: PlacementGoal,
    alive: BTreeSet<NodeId>,
    full: BTreeSet<NodeId>,
    weights: BTreeMap<NodeId, u32>,
    /// Nodes of known capacity.
    measured: BTreeSet<NodeId>,
    sizes: BTreeMap<ChainId, u32>,
    /// Whether moves wait for their rate limit.
    moves_wait: bool,
    doomed_moves: Vec<ChainId>,
}

/// The newest heartbeat of a node's current incarnation.
#[derive(Clone, Debug)]
struct LastHeartbeat {
    at: Millis,
    sequence: u64,
    targets: Vec<TargetReport>,
    /// Capacity of all targets together.
    capacity_bytes: u64,
    /// The membership records of its disk.
    records: Vec<MembershipRecord>,
    /// The fences that it knows and confirms; `None`: an earlier release.
    fences: Option<FenceReport>,
}

impl LastHeartbeat {
    fn used_bytes(&self) -> u64 {
        self.targets.iter().map(|line| line.used_bytes).sum()
    }
}

/// What is required before a heartbeat is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Nothing.
    Known,
    /// It was accepted before: reply again.
    Repeated,
    /// Write the node, its address or its location first.
    Register,
    /// A new incarnation: the targets of the former one must leave SERVING and SYNCING first.
    Restarted,
}

impl View {
    /// `settles_ms`: see [`Self::former_leases_ms`].
    pub(crate) fn new(fence: Fence, loaded: Loaded, settles_ms: u64, now: Millis) -> Self {
        Self {
            fence,
            since: now,
            settles_ms,
            renewed_at: now,
            routing: loaded.routing,
            nodes: loaded.nodes,
            goal: loaded.goal,
            stores: loaded.stores,
            capacities: loaded.capacities,
            pace: Pace::new(loaded.move_rate),
            held: loaded.held,
            logged_waits: BTreeMap::new(),
            settled_inputs: None,
            fences: loaded.fences,
            snapshots: loaded.snapshots,
            unpublished: loaded.unpublished,
            outdated: BTreeSet::new(),
            heartbeats: BTreeMap::new(),
            restarting: BTreeMap::new(),
            failed_syncs: BTreeMap::new(),
            refusing_moves: BTreeMap::new(),
            ticked_at: None,
            refused_data_at: None,
        }
    }

    /// Refuses a node with data of another cluster.
    pub(crate) fn check_data(
        &mut self,
        node: NodeId,
        data: DataFolder,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let own_id = self.routing.cluster;
        let refusal = match data {
            DataFolder::Of(foreign_id) if foreign_id != own_id => {
                MgmtdError::OtherCluster { node, foreign_id, own_id }
            }
            DataFolder::Unmarked if self.routing.chains.is_empty() => {
                MgmtdError::ChainsLost { node }
            }
            _ => return Ok(()),
        };
        self.refused_data_at = Some(now);
        Err(refusal)
    }

    /// Whether the initial chains may be created: not while nodes with data of other chains report,
    /// which means that this store is not the one of the cluster.
    pub(crate) fn may_make_chains(&self, timers: &Timers, now: Millis) -> bool {
        // Refused processes exit and are restarted: longer intervals than heartbeats.
        let quiet_ms = timers.node_failure_ms.saturating_mul(30);
        self.refused_data_at.is_none_or(|at| now.since(at) >= quiet_ms)
            && self.unknown_targets().next().is_none()
    }

    /// Records a tick. Time in which mgmtd itself did not run (a starved or stopped process) does
    /// not count against the nodes: their heartbeats wait in its sockets. Detecting a death late is
    /// always safe.
    pub(crate) fn tick(&mut self, timers: &Timers, now: Millis) {
        if self.ticked_at.is_none() {
            // The takeover is committed by now; a former primary may have renewed until then.
            self.since = now;
        }
        let ticked_at = self.ticked_at.replace(now).unwrap_or(now);
        let slept_ms = now.since(ticked_at).saturating_sub(timers.scan_ms * 2);
        if slept_ms > 0 {
            self.heartbeats.values_mut().for_each(|last| last.at = last.at.after(slept_ms));
        }
    }

    /// Whether the lease is certainly still valid.
    pub(crate) fn holds_lease(&self, timers: &Timers, now: Millis) -> bool {
        now.since(self.renewed_at) < timers.primary_lease_ms
    }

    /// Time until the leases that former primaries granted have ended; `None` once they have. A former
    /// primary answers heartbeats until its own lease has ended, also to nodes that this one has heard.
    pub(crate) fn former_leases_ms(&self, now: Millis) -> Option<u64> {
        if self.ticked_at.is_none() {
            // `since` is before the takeover was committed.
            return Some(self.settles_ms);
        }
        self.settles_ms.checked_sub(now.since(self.since)).filter(|remaining| *remaining > 0)
    }

    /// Time until liveness is known: every node with targets has sent a heartbeat or has restarted, or
    /// has no lease of a former primary any more. `None` = known.
    pub(crate) fn startup_remaining_ms(&self, now: Millis) -> Option<u64> {
        let remaining = self.former_leases_ms(now)?;
        let is_heard = |place: &ChainTarget| {
            self.heartbeats.contains_key(&place.node) || self.restarting.contains_key(&place.node)
        };
        let mut holders = self.routing.chains.values().flat_map(|chain| &chain.targets);
        let all_heard = holders.all(is_heard);
        (!all_heard).then_some(remaining)
    }

    /// What a heartbeat requires, or why it is refused.
    pub(crate) fn admit(
        &self,
        heartbeat: &Heartbeat,
        location: Option<&Location>,
    ) -> Result<Admission, MgmtdError> {
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
            // A repetition does not extend the time at which the node was alive.
            Some(last) if heartbeat.sequence == last.sequence => Ok(Admission::Repeated),
            Some(last) if heartbeat.sequence < last.sequence => {
                Err(MgmtdError::Stale { node, sequence: heartbeat.sequence, newest: last.sequence })
            }
            _ if row.info.address != heartbeat.address => Ok(Admission::Register),
            _ if location.is_some_and(|it| *it != row.info.location) => Ok(Admission::Register),
            _ => Ok(Admission::Known),
        }
    }

    /// Records an accepted heartbeat. Returns true if it changes the report or record of a target.
    pub(crate) fn record_heartbeat(&mut self, report: &Report, now: Millis) -> bool {
        let Report { heartbeat, seen, fences, .. } = report.clone();
        let Heartbeat { node, sequence, targets, capacity_bytes, .. } = heartbeat;
        let states_of = |targets: &[TargetReport]| -> Vec<(TargetId, LocalReport)> {
            targets.iter().map(|line| (line.target, line.report)).collect()
        };
        let records = seen.map(|seen| seen.records).unwrap_or_default();
        let (new, new_records) = (states_of(&targets), records.clone());
        let last = LastHeartbeat { at: now, sequence, targets, capacity_bytes, records, fences };
        let before = self.heartbeats.insert(node, last);
        before
            .is_none_or(|before| states_of(&before.targets) != new || before.records != new_records)
    }

    /// Records a new incarnation of a node.
    pub(crate) fn restarts(&mut self, node: NodeId, now: Millis) {
        self.restarting.entry(node).or_insert(now);
    }

    /// Whether a target of the node is still SERVING or SYNCING.
    pub(crate) fn is_in_chains(&self, node: NodeId) -> bool {
        let active = |state| matches!(state, PublicState::Serving | PublicState::Syncing);
        self.routing.targets_of_node(node).any(|(_, place)| active(place.state))
    }

    /// Drops the reports of a former incarnation.
    pub(crate) fn forget_node(&mut self, node: NodeId) {
        self.heartbeats.remove(&node);
        self.restarting.remove(&node);
    }

    /// Whether a node that has sent a heartbeat may have a lease, of this primary or of a former one.
    pub(crate) fn is_alive(&self, node: NodeId, timers: &Timers, now: Millis) -> bool {
        let is_silent = |last: &LastHeartbeat| now.since(last.at) >= timers.node_failure_ms;
        let last = self.heartbeats.get(&node);
        last.is_some_and(|last| !is_silent(last) || self.former_leases_ms(now).is_some())
    }

    fn report_of(&self, node: NodeId, target: TargetId) -> Option<TargetReport> {
        let last = self.heartbeats.get(&node)?;
        last.targets.iter().find(|line| line.target == target).copied()
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
            let last = self.heartbeats.get(&node);
            NodeStatus {
                node,
                address: row.info.address.clone(),
                alive: self.is_alive(node, timers, now),
                heartbeat_age_ms: last.map(|last| now.since(last.at)),
                used_bytes: last.map_or(0, LastHeartbeat::used_bytes),
                capacity_bytes: last.map_or(0, |last| last.capacity_bytes),
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
