//! Node: the targets of one disk, their routing and serving lease.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use threefs_core::fence::FenceTable;
use threefs_core::heartbeat::{
    DataFolder, FenceReport, HeartbeatReply, LocalReport, LocalState, ServingLease, TargetReport,
};
use threefs_core::ids::{ChainId, ChainVersion, FencesVersion, Incarnation, NodeId, TargetId};
use threefs_core::replica::Event;
use threefs_core::routing::{Chain, ChainTarget, RoutingInfo};
use threefs_core::time::Millis;
use tokio::sync::Notify;

use crate::config::StorageConfig;
use crate::context::NodeContext;
use crate::membership::folder_name;
use crate::scrubber::Limits;
use crate::store::Disk;
use crate::target::Target;

mod lifecycle;

/// One storage node: a disk of this process.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) context: Arc<NodeContext>,
    disk: Disk,
    capacity: Arc<Capacity>,
    config: StorageConfig,
    pub(crate) scrub_limits: Arc<Limits>,
    targets: RwLock<BTreeMap<TargetId, TargetSlot>>,
    lease: Mutex<ServingLease>,
    /// Given to each target before its lease.
    fences: Mutex<NodeFences>,
    /// Retired targets whose folders are removed or being removed.
    removed_targets: Mutex<BTreeSet<TargetId>>,
    /// Set once this node shuts down: every target leaves its chain.
    draining: AtomicBool,
    /// Notified when mgmtd has accepted a heartbeat that reports this.
    drained: Notify,
    /// Cluster that the data folder belongs to.
    data: Mutex<DataFolder>,
}

/// Fences of volumes.
#[derive(Default)]
struct NodeFences {
    table: Arc<FenceTable>,
    /// All targets have received this version.
    given: FencesVersion,
}

/// Capacity of the disk, as last measured.
#[derive(Default)]
struct Capacity {
    bytes: AtomicU64,
    /// A thread is measuring the disk.
    refreshing: AtomicBool,
}

/// A target that the routing assigns to this node.
#[derive(Clone)]
enum TargetSlot {
    /// The store is being opened: not reported yet.
    Opening,
    /// The target is running.
    Open(Arc<Target>),
    /// The store cannot be used: reported as OFFLINE until it can be reopened.
    Broken(ChainId),
}

impl Node {
    /// `config`: of the service, with the id and the folder of the disk.
    pub(crate) fn new(
        config: StorageConfig,
        incarnation: Incarnation,
        context: NodeContext,
        disk: Disk,
        data: DataFolder,
    ) -> Self {
        Self {
            id: NodeId(config.node_id),
            incarnation,
            context: Arc::new(context),
            disk,
            capacity: Arc::default(),
            scrub_limits: Arc::new(Limits::new(config.scrub_bytes_per_second)),
            config,
            targets: RwLock::default(),
            lease: Mutex::default(),
            fences: Mutex::default(),
            removed_targets: Mutex::default(),
            draining: AtomicBool::new(false),
            drained: Notify::new(),
            data: Mutex::new(data),
        }
    }

    /// Makes every target stop serving, then report OFFLINE, so that the chains continue without
    /// this node at once rather than after a failure timeout. Returns when mgmtd has accepted the
    /// reports, or after `timeout`.
    pub(crate) async fn drain(&self, timeout: Duration) {
        {
            // Under the lock, so that a target being opened leaves too.
            let targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
            self.draining.store(true, Relaxed);
            for slot in targets.values() {
                if let TargetSlot::Open(target) = slot {
                    target.handle(Event::Leave);
                }
            }
        }
        self.context.report_changed.notify_one();
        let _ = tokio::time::timeout(timeout, self.drained.notified()).await;
    }

    /// Drops all targets. Each store is closed once its operations in flight have ended; the last of
    /// them drops the context.
    pub(crate) fn close(&self) {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        self.draining.store(true, Relaxed);
        targets.clear();
    }

    /// mgmtd has accepted a heartbeat with these reports.
    pub(crate) fn heartbeat_accepted(&self, reports: &[TargetReport]) {
        let offline = |entry: &TargetReport| entry.report.state == LocalState::Offline;
        if self.draining.load(Relaxed) && reports.iter().all(offline) {
            self.drained.notify_one();
        }
    }

    /// The target `id`, if it is running on this node.
    pub(crate) fn target(&self, id: TargetId) -> Option<Arc<Target>> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        match targets.get(&id) {
            Some(TargetSlot::Open(target)) => Some(Arc::clone(target)),
            _ => None,
        }
    }

    /// Bytes that all targets may hold together, as of the last heartbeat; 0 until the disk was
    /// measured. Starts the next measurement. Never waits for the disk.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        if !self.capacity.refreshing.swap(true, SeqCst) {
            let (budget, capacity) = (Arc::clone(&self.disk.budget), Arc::clone(&self.capacity));
            let folder = self.config.data.clone();
            self.context.runtime.spawn_blocking(move || {
                capacity.bytes.store(budget.capacity_of(&folder).unwrap_or(0), SeqCst);
                capacity.refreshing.store(false, SeqCst);
            });
        }
        self.capacity.bytes.load(SeqCst)
    }

    /// Reports of all targets for the next heartbeat. Never waits for a disk.
    pub(crate) fn reports(&self) -> (Vec<TargetReport>, FenceReport) {
        let known = self.fences.lock().unwrap_or_else(PoisonError::into_inner).given;
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        let mut drained = Vec::new();
        let report = |(&target, slot): (&TargetId, &TargetSlot)| match slot {
            TargetSlot::Opening => None,
            TargetSlot::Open(open) => {
                let (line, fences) = open.report();
                drained.push((target, fences));
                Some(line)
            }
            TargetSlot::Broken(chain) => Some(TargetReport {
                target,
                chain: *chain,
                report: LocalReport { state: LocalState::Offline, chain_version: ChainVersion(0) },
                used_bytes: 0,
                store: None,
                chunks: 0,
            }),
        };
        let lines = targets.iter().filter_map(report).collect();
        (lines, FenceReport { known, drained })
    }

    /// Cluster of the data folder, for heartbeats.
    pub(crate) fn data(&self) -> DataFolder {
        *self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this routing is of the data folder's cluster; marks the folder once mgmtd has
    /// registered the node. Routing of another cluster must not be applied, because it would remove
    /// targets; heartbeats to that cluster are rejected too.
    pub(crate) async fn belongs_to(&self, routing: &RoutingInfo) -> bool {
        if let DataFolder::Of(cluster) = self.data() {
            return cluster == routing.cluster;
        }
        if !routing.nodes.contains_key(&self.id) {
            return true;
        }
        let (folder, cluster) = (self.config.data.clone(), routing.cluster);
        let context = Arc::clone(&self.context);
        // In a separate thread: a hanging disk must not delay the runtime.
        let written = tokio::task::spawn_blocking(move || {
            let written = crate::identity::write(&folder, cluster);
            drop(context);
            written
        });
        if let Err(error) = written.await.map_err(io::Error::other).and_then(|written| written) {
            tracing::error!("cannot write the cluster id to {:?}: {error}", self.config.data);
            return false;
        }
        *self.data.lock().unwrap_or_else(PoisonError::into_inner) = DataFolder::Of(cluster);
        true
    }

    /// Applies newer routing of this node's cluster: opens new targets, passes the routing to all
    /// targets, then applies the lease that waited for it.
    pub(crate) fn update_routing(self: &Arc<Self>, routing: &Arc<RoutingInfo>) {
        {
            let context = &self.context.routing;
            *context.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(routing);
        }
        self.remove_retired(routing);
        for (chain, &ChainTarget { target: id, .. }) in routing.targets_of_node(self.id) {
            let slot = {
                let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
                let current = targets.get(&id).cloned();
                if current.is_none() {
                    targets.insert(id, TargetSlot::Opening);
                }
                current
            };
            match slot {
                // In a separate task: a hanging disk must not delay the other targets.
                None => {
                    drop(tokio::spawn(lifecycle::run_target(Arc::downgrade(self), id, chain.id)))
                }
                Some(TargetSlot::Open(target)) => notify(&target, routing, chain, id),
                Some(TargetSlot::Opening | TargetSlot::Broken(_)) => {}
            }
        }
        let valid_until = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.routing_known(routing.version);
            lease.valid_until()
        };
        self.update_lease(valid_until);
    }

    /// Passes newer fences to all targets, then applies the lease that waited for them.
    pub(crate) fn update_fences(&self, newest: &Arc<FenceTable>) {
        let version = newest.version();
        {
            let mut fences = self.fences.lock().unwrap_or_else(PoisonError::into_inner);
            // A target that is opened from now on receives them.
            fences.table = Arc::clone(newest);
        }
        {
            let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
            for slot in targets.values() {
                if let TargetSlot::Open(target) = slot {
                    target.handle(Event::Fences(Arc::clone(newest)));
                }
            }
        }
        self.fences.lock().unwrap_or_else(PoisonError::into_inner).given = version;
        let valid_until = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.fences_known(version);
            lease.valid_until()
        };
        self.update_lease(valid_until);
        // mgmtd waits for this.
        self.context.report_changed.notify_one();
    }

    /// Opens the stores of all targets with a membership record. mgmtd must learn of those that a
    /// restored chain table does not list.
    pub(crate) fn open_recorded(self: &Arc<Self>) {
        for (id, chain) in self.context.memberships.chains() {
            let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
            targets.insert(id, TargetSlot::Opening);
            drop(tokio::spawn(lifecycle::run_target(Arc::downgrade(self), id, chain.id)));
        }
    }

    /// Removes targets that mgmtd has retired, and their data. A target that is merely missing from
    /// the routing is not removed.
    fn remove_retired(&self, routing: &RoutingInfo) {
        let mut removed_targets =
            self.removed_targets.lock().unwrap_or_else(PoisonError::into_inner);
        for &target in &routing.retired {
            if !removed_targets.insert(target) {
                continue;
            }
            self.targets.write().unwrap_or_else(PoisonError::into_inner).remove(&target);
            self.context.memberships.remove(target);
            let folder = self.folder(target);
            let context = Arc::clone(&self.context);
            // Operations in flight finish on unlinked files.
            tokio::task::spawn_blocking(move || {
                for folder in [lifecycle::quarantine_folder(&folder), folder] {
                    match std::fs::remove_dir_all(&folder) {
                        Ok(()) => tracing::info!("{target} is retired; removed {folder:?}"),
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(error) => {
                            tracing::warn!(
                                "{target} is retired; cannot remove {folder:?}: {error}"
                            );
                        }
                    }
                }
                drop(context);
            });
        }
    }

    fn folder(&self, target: TargetId) -> PathBuf {
        self.config.data.join(folder_name(target))
    }

    /// mgmtd has answered the heartbeat that was sent at `sent_at`.
    pub(crate) fn heartbeat_answered(
        &self,
        sent_at: Millis,
        reply: HeartbeatReply,
        fences: FencesVersion,
    ) {
        let valid_until = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.heartbeat_answered(sent_at, reply, fences);
            lease.valid_until()
        };
        self.update_lease(valid_until);
    }

    fn update_lease(&self, valid_until: Option<Millis>) {
        let Some(valid_until) = valid_until else { return };
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        for slot in targets.values() {
            if let TargetSlot::Open(target) = slot {
                target.handle_inline(Event::Lease { valid_until });
            }
        }
    }
}

/// Passes the routing to one target.
fn notify(target: &Arc<Target>, routing: &RoutingInfo, chain: &Chain, id: TargetId) {
    target.handle(Event::Routing(chain.clone()));
    if routing.retires(chain, id) {
        target.handle(Event::Retire);
    }
}
