//! All targets of this node: who they are, what they know of the routing, until when they may
//! serve.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use threefs_chunkstore::{ChunkStore, DiskBudget};
use threefs_core::error::StoreError;
use threefs_core::heartbeat::{
    DataFolder, HeartbeatReply, LocalReport, LocalState, ServingLease, TargetReport,
};
use threefs_core::ids::{ChainId, ChainVersion, Incarnation, NodeId, TargetId};
use threefs_core::replica::Event;
use threefs_core::routing::{Chain, RoutingInfo};
use threefs_core::time::Millis;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::config::StorageConfig;
use crate::peers::Peers;
use crate::target::{Clock, Target};

mod hosting;

/// What the targets of a node have in common.
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) peers: Peers,
    /// A target's report has changed: mgmtd should know before the next heartbeat is due.
    pub(crate) report_changed: Notify,
    routing: RwLock<Arc<RoutingInfo>>,
    /// For the calls of the targets' threads.
    pub(crate) runtime: Handle,
}

impl Shared {
    /// Inside the runtime that makes the calls.
    pub(crate) fn new(peers: Peers) -> Self {
        Self {
            clock: Clock::start(),
            peers,
            report_changed: Notify::new(),
            routing: RwLock::default(),
            runtime: Handle::current(),
        }
    }

    /// As this node knows it.
    pub(crate) fn routing(&self) -> Arc<RoutingInfo> {
        Arc::clone(&self.routing.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where a node listens, as far as known; an empty address is reached by nobody.
    pub(crate) fn address_of(&self, node: NodeId) -> String {
        self.routing().address(node).unwrap_or_default().to_owned()
    }
}

/// Opens, or makes, the store of one target in a folder. Blocks.
type OpenStore =
    dyn Fn(&Path, Arc<DiskBudget>) -> Result<Arc<dyn ChunkStore>, StoreError> + Send + Sync;

/// The disk with a node's data folder.
#[derive(Clone)]
pub(crate) struct Disk {
    /// What all targets may take of it.
    pub(crate) budget: Arc<DiskBudget>,
    pub(crate) open: Arc<OpenStore>,
}

/// One storage node.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) shared: Arc<Shared>,
    disk: Disk,
    capacity: Arc<Capacity>,
    config: StorageConfig,
    targets: RwLock<BTreeMap<TargetId, Hosted>>,
    lease: Mutex<ServingLease>,
    /// Retired targets whose folders are removed, or being removed.
    removed: Mutex<BTreeSet<TargetId>>,
    /// Set once this node ends on purpose: every target leaves.
    leaving: AtomicBool,
    /// mgmtd has taken a heartbeat that said so.
    left: Notify,
    /// The cluster that the data folder belongs to.
    data: Mutex<DataFolder>,
}

/// What the disk has room for, as last seen.
#[derive(Default)]
struct Capacity {
    bytes: AtomicU64,
    /// A thread asks the disk.
    looking: AtomicBool,
}

/// A target that routing says is here.
#[derive(Clone)]
enum Hosted {
    /// Its store is being opened: not reported yet.
    Opening,
    /// It works.
    Open(Arc<Target>),
    /// Its store cannot be used: reported as OFFLINE until it can be opened again.
    Broken(ChainId),
}

impl Node {
    /// `disk` is that with the data folder.
    pub(crate) fn new(
        config: StorageConfig,
        incarnation: Incarnation,
        shared: Shared,
        disk: Disk,
        data: DataFolder,
    ) -> Self {
        Self {
            id: NodeId(config.node_id),
            incarnation,
            shared: Arc::new(shared),
            disk,
            capacity: Arc::default(),
            config,
            targets: RwLock::default(),
            lease: Mutex::default(),
            removed: Mutex::default(),
            leaving: AtomicBool::new(false),
            left: Notify::new(),
            data: Mutex::new(data),
        }
    }

    /// Makes every target stop serving and report OFFLINE, in this order, so that the chains continue
    /// without this node at once instead of after a silence; ends when mgmtd has taken the reports,
    /// or after `patience`.
    pub(crate) async fn leave(&self, patience: Duration) {
        {
            // Under the lock, so that a target that is opened now leaves too.
            let targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
            self.leaving.store(true, Relaxed);
            for hosted in targets.values() {
                if let Hosted::Open(target) = hosted {
                    target.handle(Event::Leave);
                }
            }
        }
        self.shared.report_changed.notify_one();
        let _ = tokio::time::timeout(patience, self.left.notified()).await;
    }

    /// mgmtd has taken a heartbeat with these lines.
    pub(crate) fn reported(&self, lines: &[TargetReport]) {
        let away = |line: &TargetReport| line.report.state == LocalState::Offline;
        if self.leaving.load(Relaxed) && lines.iter().all(away) {
            self.left.notify_one();
        }
    }

    /// The target `id`, if it is here and works.
    pub(crate) fn target(&self, id: TargetId) -> Option<Arc<Target>> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        match targets.get(&id) {
            Some(Hosted::Open(target)) => Some(Arc::clone(target)),
            _ => None,
        }
    }

    /// Bytes that all targets may hold together, as it was a heartbeat ago; 0 until the disk has
    /// answered. Starts the next look at the disk. Never waits for it.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        if !self.capacity.looking.swap(true, SeqCst) {
            let (budget, capacity) = (Arc::clone(&self.disk.budget), Arc::clone(&self.capacity));
            let folder = self.config.data.clone();
            self.shared.runtime.spawn_blocking(move || {
                capacity.bytes.store(budget.capacity_of(&folder).unwrap_or(0), SeqCst);
                capacity.looking.store(false, SeqCst);
            });
        }
        self.capacity.bytes.load(SeqCst)
    }

    /// Every target's line of the next heartbeat. Never waits for a disk.
    pub(crate) fn reports(&self) -> Vec<TargetReport> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        let line = |(&target, hosted): (&TargetId, &Hosted)| match hosted {
            Hosted::Opening => None,
            Hosted::Open(open) => Some(open.report()),
            Hosted::Broken(chain) => Some(TargetReport {
                target,
                chain: *chain,
                report: LocalReport { state: LocalState::Offline, chain_version: ChainVersion(0) },
                used_bytes: 0,
                store: None,
                chunks: 0,
            }),
        };
        targets.iter().filter_map(line).collect()
    }

    /// The cluster of the data folder, for heartbeats.
    pub(crate) fn data(&self) -> DataFolder {
        *self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this routing is of the cluster of the data folder, which is marked with it once mgmtd
    /// has registered the node. Routing of another cluster changes nothing here, above all removes
    /// nothing: its heartbeats are refused as well.
    fn belongs_to(&self, routing: &RoutingInfo) -> bool {
        let mut data = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        if let DataFolder::Of(cluster) = *data {
            return cluster == routing.cluster;
        }
        if !routing.nodes.contains_key(&self.id) {
            return true;
        }
        match crate::identity::write(&self.config.data, routing.cluster) {
            Ok(()) => *data = DataFolder::Of(routing.cluster),
            Err(error) => {
                tracing::error!("{:?} cannot be marked: {error}", self.config.data);
                return false;
            }
        }
        true
    }

    /// Newer routing: opens targets that are new here, tells all of them, then counts the lease
    /// that waited for it.
    pub(crate) fn routing_arrived(self: &Arc<Self>, routing: &Arc<RoutingInfo>) {
        if !self.belongs_to(routing) {
            return;
        }
        {
            let shared = &self.shared.routing;
            *shared.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(routing);
        }
        self.remove_retired(routing);
        for (chain, place) in routing.targets_of_node(self.id) {
            let hosted = {
                let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
                let known = targets.get(&place.target).cloned();
                if known.is_none() {
                    targets.insert(place.target, Hosted::Opening);
                }
                known
            };
            match hosted {
                // Aside: a disk that hangs must not keep the others from the news.
                None => {
                    drop(tokio::spawn(hosting::host(Arc::downgrade(self), place.target, chain.id)))
                }
                Some(Hosted::Open(target)) => inform(&target, routing, chain, place.target),
                Some(Hosted::Opening | Hosted::Broken(_)) => {}
            }
        }
        let valid_until = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.routing_known(routing.version);
            lease.valid_until()
        };
        self.lease_renewed(valid_until);
    }

    /// Forgets targets that have left their chains for good, and their data. mgmtd says which ones:
    /// that one is missing from the routing is no reason to remove anything.
    fn remove_retired(&self, routing: &RoutingInfo) {
        let mut removed = self.removed.lock().unwrap_or_else(PoisonError::into_inner);
        for &target in &routing.retired {
            if !removed.insert(target) {
                continue;
            }
            self.targets.write().unwrap_or_else(PoisonError::into_inner).remove(&target);
            let folder = self.folder(target);
            // Its operations under way end on files that have no name any more.
            tokio::task::spawn_blocking(move || {
                for folder in [hosting::aside(&folder), folder] {
                    match std::fs::remove_dir_all(&folder) {
                        Ok(()) => tracing::info!("{target} was moved away; {folder:?} is removed"),
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(error) => {
                            tracing::warn!("{target} was moved away, {folder:?}: {error}");
                        }
                    }
                }
            });
        }
    }

    fn folder(&self, target: TargetId) -> PathBuf {
        self.config.data.join(format!("target-{}", target.0))
    }

    /// mgmtd has answered the heartbeat that was sent at `sent_at`.
    pub(crate) fn heartbeat_answered(&self, sent_at: Millis, reply: HeartbeatReply) {
        let valid_until = {
            let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
            lease.heartbeat_answered(sent_at, reply);
            lease.valid_until()
        };
        self.lease_renewed(valid_until);
    }

    fn lease_renewed(&self, valid_until: Option<Millis>) {
        let Some(valid_until) = valid_until else { return };
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        for hosted in targets.values() {
            if let Hosted::Open(target) = hosted {
                target.handle(Event::Lease { valid_until });
            }
        }
    }
}

/// What the newest routing says to one target.
fn inform(target: &Arc<Target>, routing: &RoutingInfo, chain: &Chain, id: TargetId) {
    target.handle(Event::Routing(chain.clone()));
    if routing.retires(chain, id) {
        target.handle(Event::Retire);
    }
}
