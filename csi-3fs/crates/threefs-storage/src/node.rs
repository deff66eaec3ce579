//! All targets of this node: who they are, what they know of the routing, until when they may
//! serve.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use threefs_chunkstore::DiskBudget;
use threefs_core::heartbeat::{
    HeartbeatReply, LocalReport, LocalState, ServingLease, TargetReport,
};
use threefs_core::ids::{ChainId, ChainVersion, Incarnation, NodeId, TargetId};
use threefs_core::replica::{Config, Event};
use threefs_core::routing::RoutingInfo;
use threefs_core::time::Millis;
use tokio::sync::Notify;

use crate::config::StorageConfig;
use crate::peers::Peers;
use crate::target::{Clock, Target};

/// What the targets of a node have in common.
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) peers: Peers,
    /// A target's report has changed: mgmtd should know before the next heartbeat is due.
    pub(crate) report_changed: Notify,
    routing: RwLock<Arc<RoutingInfo>>,
}

impl Shared {
    pub(crate) fn new(peers: Peers) -> Self {
        Self {
            clock: Clock::start(),
            peers,
            report_changed: Notify::new(),
            routing: RwLock::default(),
        }
    }

    /// Where a node listens, as far as known; an empty address is reached by nobody.
    pub(crate) fn address_of(&self, node: NodeId) -> String {
        let routing = self.routing.read().unwrap_or_else(PoisonError::into_inner);
        routing.address(node).unwrap_or_default().to_owned()
    }
}

/// One storage node.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) shared: Arc<Shared>,
    /// What all its targets may take of their disk.
    budget: Arc<DiskBudget>,
    config: StorageConfig,
    targets: RwLock<BTreeMap<TargetId, Hosted>>,
    lease: Mutex<ServingLease>,
    /// Set once this node ends on purpose: every report says OFFLINE from then on.
    leaving: AtomicBool,
    /// mgmtd has taken a heartbeat that said so.
    left: Notify,
}

/// A target that routing says is here.
#[derive(Clone)]
enum Hosted {
    /// It works.
    Open(Arc<Target>),
    /// Its store cannot be opened: reported as OFFLINE until a restart.
    Broken(ChainId),
}

impl Node {
    /// `budget` is that of the disk with the data folder.
    pub(crate) fn new(
        config: StorageConfig,
        incarnation: Incarnation,
        shared: Shared,
        budget: Arc<DiskBudget>,
    ) -> Self {
        Self {
            id: NodeId(config.node_id),
            incarnation,
            shared: Arc::new(shared),
            budget,
            config,
            targets: RwLock::default(),
            lease: Mutex::default(),
            leaving: AtomicBool::new(false),
            left: Notify::new(),
        }
    }

    /// Says OFFLINE for every target, so that the chains go on without this node at once instead
    /// of after a silence; ends when mgmtd has heard it, or after `patience`.
    pub(crate) async fn leave(&self, patience: Duration) {
        self.leaving.store(true, Relaxed);
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

    /// Bytes that all targets may hold together; 0 where the disk does not say.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.budget.capacity_of(&self.config.data).unwrap_or(0)
    }

    /// Every target's line of the next heartbeat.
    pub(crate) fn reports(&self) -> Vec<TargetReport> {
        let mut lines = self.lines();
        if self.leaving.load(Relaxed) {
            lines.iter_mut().for_each(|line| line.report.state = LocalState::Offline);
        }
        lines
    }

    fn lines(&self) -> Vec<TargetReport> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets
            .iter()
            .map(|(&target, hosted)| match hosted {
                Hosted::Open(open) => open.report(),
                Hosted::Broken(chain) => TargetReport {
                    target,
                    chain: *chain,
                    report: LocalReport {
                        state: LocalState::Offline,
                        chain_version: ChainVersion(0),
                    },
                    used_bytes: 0,
                    store: None,
                    chunks: 0,
                },
            })
            .collect()
    }

    /// Newer routing: opens targets that are new here, tells all of them, then counts the lease
    /// that waited for it.
    pub(crate) async fn routing_arrived(self: &Arc<Self>, routing: Arc<RoutingInfo>) {
        {
            let shared = &self.shared.routing;
            *shared.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&routing);
        }
        self.remove_retired(&routing);
        for (chain, place) in routing.targets_of_node(self.id) {
            if !self.hosts(place.target) {
                let hosted = self.open(place.target, chain.id).await;
                let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
                targets.insert(place.target, hosted);
                self.shared.report_changed.notify_one();
            }
            if let Some(target) = self.target(place.target) {
                target.handle(Event::Routing(chain.clone()));
                if routing.retires(chain, place.target) {
                    target.handle(Event::Retire);
                }
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
        for &target in &routing.retired {
            let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
            targets.remove(&target);
            drop(targets);
            let folder = self.folder(target);
            if folder.exists() {
                // Its operations under way end on files that nobody sees any more.
                tokio::task::spawn_blocking(move || match std::fs::remove_dir_all(&folder) {
                    Ok(()) => tracing::info!("{target} was moved away; its data is removed"),
                    Err(error) => tracing::warn!("{target} was moved away, {folder:?}: {error}"),
                });
            }
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

    fn hosts(&self, target: TargetId) -> bool {
        self.targets.read().unwrap_or_else(PoisonError::into_inner).contains_key(&target)
    }

    async fn open(&self, id: TargetId, chain: ChainId) -> Hosted {
        let folder = self.folder(id);
        let budget = Arc::clone(&self.budget);
        let opened = tokio::task::spawn_blocking(move || crate::store::open(&folder, budget));
        let store = match opened.await {
            Ok(Ok(store)) => store,
            Ok(Err(error)) => {
                tracing::error!("{id} of {chain} cannot be used until a restart: {error}");
                return Hosted::Broken(chain);
            }
            Err(error) => {
                tracing::error!("{id} of {chain} cannot be used until a restart: {error}");
                return Hosted::Broken(chain);
            }
        };
        let mut config = Config::new(id, chain, self.incarnation);
        config.call_timeout_ms = self.config.call_timeout_ms;
        config.store_stall_ms = self.config.store_stall_ms;
        config.full_wait_ms = self.config.full_wait_ms;
        let target = Target::new(config, store, Arc::clone(&self.shared));
        let rearmed = Arc::clone(&target.rearmed);
        tokio::spawn(Target::keep_time(Arc::downgrade(&target), rearmed));
        Hosted::Open(target)
    }
}
