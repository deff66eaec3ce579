//! The manager with fake storage nodes, an injected clock and the memory store.

use std::collections::BTreeMap;

use threefs_core::heartbeat::{DataFolder, LocalReport, LocalState, TargetReport};
use threefs_core::heartbeat::{FenceReport, SeenRouting};
use threefs_core::ids::{
    ChainId, ChainVersion, ClusterId, FencesVersion, Incarnation, NodeId, StoreId, TargetId,
};
use threefs_core::location::Location;
use threefs_core::membership::MembershipRecord;
use threefs_core::routing::PublicState;

use super::*;

#[path = "failover_test.rs"]
mod failover;
#[path = "fences_test.rs"]
mod fences;
#[path = "recovery_test.rs"]
mod recovery;
#[path = "restore_test.rs"]
mod restore;
#[path = "shared_store_test.rs"]
mod shared_store;

pub(super) const TIMERS: Timers =
    Timers { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 };
pub(super) const BOOTSTRAP: Bootstrap = Bootstrap { nodes: 3, replicas: 3, chains_per_node: 2 };

const CAPACITY_BYTES: u64 = 1000;

/// A storage service that syncs at once and reports correctly.
pub(super) struct FakeNode {
    id: NodeId,
    incarnation: u64,
    sequence: u64,
    /// Targets that this incarnation knows to be up to date, with the chain version of that
    /// knowledge.
    last_reports: BTreeMap<TargetId, (ChainId, LocalState, ChainVersion)>,
    pub dead: bool,
    /// It has no space for syncs.
    pub full: bool,
    /// Tenths of its capacity in use.
    pub used_bytes: u64,
    /// 0 = not measured yet.
    pub capacity_bytes: u64,
    /// It has not opened its targets yet.
    pub opening: bool,
    pub store: StoreId,
    pub chunks: u64,
    pub data: DataFolder,
    pub location: Option<Location>,
    /// Its durable membership records; `None`: an earlier release.
    pub records: Option<BTreeMap<TargetId, MembershipRecord>>,
    /// The routing that this incarnation has received.
    received: RoutingVersion,
    /// The fences that it knows, and those that all its targets confirm.
    pub fences: (FencesVersion, FencesVersion),
}

impl FakeNode {
    pub fn new(id: u32) -> Self {
        let last_reports = BTreeMap::new();
        Self {
            id: NodeId(id),
            incarnation: 100,
            sequence: 0,
            last_reports,
            dead: false,
            full: false,
            used_bytes: 1,
            capacity_bytes: CAPACITY_BYTES,
            opening: false,
            store: StoreId(u128::from(id)),
            chunks: 5,
            data: DataFolder::Empty,
            location: None,
            records: Some(BTreeMap::new()),
            received: RoutingVersion(0),
            fences: Default::default(),
        }
    }

    pub fn restart(&mut self) {
        self.incarnation += 1;
        self.sequence = 0;
        self.last_reports.clear();
        self.received = RoutingVersion(0);
        self.fences = Default::default();
        self.dead = false;
    }

    fn beat(&mut self) -> Heartbeat {
        self.sequence += 1;
        let parts = self.last_reports.len().max(1) as u64;
        let targets =
            self.last_reports.iter().map(|(target, (chain, state, chain_version))| TargetReport {
                target: *target,
                chain: *chain,
                report: LocalReport { state: *state, chain_version: *chain_version },
                used_bytes: self.used_bytes * (CAPACITY_BYTES / 10) / parts,
                store: Some(self.store),
                chunks: self.chunks,
            });
        Heartbeat {
            node: self.id,
            address: format!("127.0.0.1:{}", 9000 + self.id.0),
            incarnation: Incarnation(self.incarnation),
            sequence: self.sequence,
            capacity_bytes: self.capacity_bytes,
            targets: targets.filter(|_| !self.opening).collect(),
            data: self.data,
        }
    }

    /// It returns with another, empty disk.
    pub fn wipe(&mut self, store: u128) {
        self.restart();
        (self.store, self.chunks) = (StoreId(store), 0);
        self.records = Some(BTreeMap::new());
    }

    pub fn report(&mut self) -> Report {
        let heartbeat = self.beat();
        let records = self.records.as_ref();
        let seen = records.map(|records| SeenRouting {
            version: self.received,
            records: records.values().cloned().collect(),
        });
        let (known, drained) = self.fences;
        let drained = self.last_reports.keys().map(|target| (*target, drained)).collect();
        let fences = Some(FenceReport { known, drained });
        Report { heartbeat, location: self.location.clone(), seen, fences }
    }

    fn learn(&mut self, routing: &RoutingInfo) {
        if routing.version <= self.received {
            return;
        }
        self.received = routing.version;
        for (chain, place) in routing.targets_of_node(self.id) {
            let before = self.last_reports.get(&place.target).map(|(_, state, _)| *state);
            if let Some(records) = &mut self.records {
                let recorded = records.get(&place.target);
                if recorded.is_some_and(|record| record.supersedes(chain)) {
                    continue;
                }
                let up_to_date = before == Some(LocalState::UpToDate);
                let next =
                    MembershipRecord::next(recorded, place.target, self.store, chain, up_to_date);
                records.extend(next.map(|next| (place.target, next)));
            }
            let state = match (place.state, before) {
                (PublicState::Syncing, Some(_)) if self.full => LocalState::Offline,
                (PublicState::Serving | PublicState::Syncing, Some(_))
                | (PublicState::LastSrv, _) => LocalState::UpToDate,
                _ => LocalState::Online,
            };
            let state =
                if routing.retires(chain, place.target) { LocalState::Online } else { state };
            self.last_reports.insert(place.target, (chain.id, state, chain.version));
        }
        self.last_reports.retain(|target, _| !routing.retired.contains(target));
        if let Some(records) = &mut self.records {
            records.retain(|target, _| !routing.retired.contains(target));
        }
    }
}

pub(super) struct Cluster {
    pub store: Store,
    pub manager: Manager,
    pub nodes: Vec<FakeNode>,
    pub now: Millis,
}

impl Cluster {
    pub fn new() -> Self {
        let store = Store::memory();
        let manager = Manager::new(store.clone(), 1, "m1", BOOTSTRAP, TIMERS);
        let nodes = (1..=3).map(FakeNode::new).collect();
        Self { store, manager, nodes, now: Millis(10_000) }
    }

    /// Advances the clock by 50 ms: mgmtd ticks, live nodes send heartbeats and fetch the routing.
    pub async fn step(&mut self) {
        self.now = self.now.after(50);
        self.manager.tick(self.now).await.unwrap();
        for node in self.nodes.iter_mut().filter(|node| !node.dead) {
            // Refusals are normal: "starting", "not primary".
            let _ = self.manager.heartbeat_with(node.report(), self.now).await;
            node.learn(&self.manager.published.borrow());
        }
    }

    pub async fn steps_until(&mut self, goal_name: &str, goal: impl Fn(&RoutingInfo) -> bool) {
        for _ in 0..200 {
            if goal(&self.routing()) {
                return;
            }
            self.step().await;
        }
        panic!("never: {goal_name}; {:#?}", self.routing().chains);
    }

    pub fn routing(&self) -> Arc<RoutingInfo> {
        Arc::clone(&self.manager.published.borrow())
    }

    pub async fn whole() -> Self {
        let mut cluster = Self::new();
        cluster.steps_until("whole", is_whole).await;
        cluster
    }
}

pub(super) fn is_whole(routing: &RoutingInfo) -> bool {
    !routing.chains.is_empty() && routing.chains.values().all(Chain::is_whole)
}

pub(super) fn states_of(routing: &RoutingInfo, node: u32) -> Vec<PublicState> {
    routing.targets_of_node(NodeId(node)).map(|(_, place)| place.state).collect()
}

fn serves(routing: &RoutingInfo, node: u32) -> bool {
    states_of(routing, node).contains(&PublicState::Serving)
}

#[tokio::test]
async fn a_new_cluster_creates_its_chains_and_becomes_healthy() {
    let cluster = Cluster::whole().await;
    let routing = cluster.routing();
    assert_eq!(routing.chains.len(), 6);
    assert_eq!(routing.newest_table(crate::FIRST_TABLE).unwrap().chains.len(), 6);
    assert_eq!(routing.address(NodeId(2)), Some("127.0.0.1:9002"));
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert_eq!((status.chains, status.chains_whole, status.chains_down), (6, 6, 0));
    assert_eq!(status.nodes[0].used_bytes, 16 * 6);
}

#[tokio::test]
async fn chains_are_created_only_once_all_nodes_are_registered() {
    let mut cluster = Cluster::new();
    cluster.nodes[2].dead = true;
    for _ in 0..40 {
        cluster.step().await;
    }
    assert!(cluster.routing().chains.is_empty());
    cluster.nodes[2].dead = false;
    cluster.steps_until("whole", is_whole).await;
}

#[tokio::test]
async fn a_dead_node_leaves_its_chains_and_returns_through_syncing() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[1].dead = true;
    let died = cluster.now;
    cluster.steps_until("node 2 left", |routing| !serves(routing, 2)).await;
    let wait_ms = cluster.now.since(died);
    assert!((1000..=1100).contains(&wait_ms), "left after {wait_ms} ms");
    let routing = cluster.routing();
    assert!(routing.chains.values().all(|chain| chain.head().is_some()));
    cluster.nodes[1].restart();
    cluster
        .steps_until("syncing", |routing| states_of(routing, 2).contains(&PublicState::Syncing))
        .await;
    cluster.steps_until("whole", is_whole).await;
    let versions_grew = routing
        .chains
        .values()
        .all(|before| cluster.routing().chains[&before.id].version > before.version);
    assert!(versions_grew);
}

#[tokio::test]
async fn a_restart_quicker_than_any_timeout_stops_serving_before_the_first_answer() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[0].restart();
    let heartbeat = cluster.nodes[0].beat();
    let reply = cluster.manager.heartbeat(heartbeat, cluster.now).await.unwrap();
    let routing = cluster.routing();
    assert!(!serves(&routing, 1), "{:?}", states_of(&routing, 1));
    assert!(!states_of(&routing, 1).contains(&PublicState::Syncing));
    assert_eq!(reply.routing_version, routing.version);
    cluster.steps_until("whole", is_whole).await;
}

#[tokio::test]
async fn a_former_process_is_told_to_exit_and_changes_no_state() {
    let mut cluster = Cluster::whole().await;
    let straggler = cluster.nodes[0].beat();
    cluster.nodes[0].restart();
    cluster.steps_until("whole again", |routing| !is_whole(routing)).await;
    cluster.steps_until("whole", is_whole).await;
    let before = cluster.routing();
    let error = cluster.manager.heartbeat(straggler, cluster.now).await.unwrap_err();
    assert!(matches!(error, MgmtdError::Replaced { node: NodeId(1), .. }), "{error}");
    assert_eq!(cluster.routing(), before);
}

#[tokio::test]
async fn an_old_heartbeat_is_stale() {
    let mut cluster = Cluster::whole().await;
    let old = cluster.nodes[0].beat();
    cluster.step().await;
    let error = cluster.manager.heartbeat(old, cluster.now).await.unwrap_err();
    assert!(matches!(error, MgmtdError::Stale { .. }), "{error}");
}

#[tokio::test]
async fn a_repeated_heartbeat_is_answered_again_without_extending_the_lease() {
    let mut cluster = Cluster::whole().await;
    let beat = cluster.nodes[0].beat();
    let first = cluster.manager.heartbeat(beat.clone(), cluster.now).await.unwrap();
    let again = cluster.manager.heartbeat(beat.clone(), cluster.now).await.unwrap();
    assert_eq!((again.routing_version, again.lease_ms), (first.routing_version, first.lease_ms));
    cluster.nodes[0].dead = true;
    for _ in 0..30 {
        cluster.manager.heartbeat(beat.clone(), cluster.now).await.unwrap();
        cluster.step().await;
    }
    assert!(!serves(&cluster.routing(), 1), "{:?}", states_of(&cluster.routing(), 1));
}

#[tokio::test]
async fn a_pause_of_mgmtd_does_not_count_as_silence_of_the_nodes() {
    let mut cluster = Cluster::whole().await;
    let before = cluster.routing();
    // Shorter than the primary's lease, longer than the failure timeout of a node.
    cluster.now = cluster.now.after(1900);
    for _ in 0..30 {
        cluster.step().await;
    }
    assert_eq!(*cluster.routing(), *before);
    cluster.nodes[0].dead = true;
    cluster.steps_until("node 1 left", |routing| !serves(routing, 1)).await;
}

#[tokio::test]
async fn a_restarted_mgmtd_continues_without_disturbing_nodes() {
    let mut cluster = Cluster::whole().await;
    let before = cluster.routing();
    // The same store through another manager, whose predecessor no longer renews its lease.
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.now = cluster.now.after(1);
    cluster.manager.tick(cluster.now).await.unwrap();
    for _ in 0..70 {
        cluster.step().await;
    }
    assert_eq!(cluster.manager.status(cluster.now).await.unwrap().epoch, 2);
    assert_eq!(*cluster.routing(), *before, "the chains were disturbed");
    cluster.nodes[2].dead = true;
    cluster.steps_until("node 3 left", |routing| !serves(routing, 3)).await;
}

#[tokio::test]
async fn a_node_that_restarts_during_a_start_of_mgmtd_is_distinguished_from_its_former_process() {
    let mut cluster = Cluster::whole().await;
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    while cluster.manager.status(cluster.now).await.is_err() {
        cluster.now = cluster.now.after(50);
        cluster.manager.tick(cluster.now).await.unwrap();
    }
    cluster.nodes[0].restart();
    let heartbeat = cluster.nodes[0].beat();
    let error = cluster.manager.heartbeat(heartbeat, cluster.now).await.unwrap_err();
    assert!(matches!(error, MgmtdError::Starting { .. }), "{error}");
    cluster.steps_until("node 1 left", |routing| !serves(routing, 1)).await;
    cluster.steps_until("whole", is_whole).await;
}

#[tokio::test]
async fn the_cluster_id_survives_a_change_of_manager_and_is_published() {
    let mut cluster = Cluster::whole().await;
    assert_eq!(cluster.manager.routing(cluster.now).await.unwrap().cluster, ClusterId(1));
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.steps_until("whole", is_whole).await;
    assert_eq!(cluster.manager.routing(cluster.now).await.unwrap().cluster, ClusterId(1));
}

#[tokio::test]
async fn a_manager_without_its_store_does_not_create_chains_over_existing_ones() {
    for data in [DataFolder::Of(ClusterId(1)), DataFolder::Unmarked] {
        let mut cluster = Cluster::whole().await;
        cluster.store = Store::memory();
        cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
        for node in &mut cluster.nodes {
            node.restart();
        }
        // One disk has data; as many empty ones as a new cluster needs report as well.
        cluster.nodes[0].data = data;
        cluster.nodes.push(FakeNode::new(9));
        for _ in 0..100 {
            cluster.step().await;
        }
        let error = cluster.manager.heartbeat(cluster.nodes[0].beat(), cluster.now).await;
        let error = error.unwrap_err();
        assert!(error.ends_node(), "{error}");
        assert!(error.to_string().contains("threefs mgmtd load"), "{error}");
        assert!(cluster.manager.routing(cluster.now).await.unwrap().chains.is_empty());
    }
}

#[tokio::test]
async fn a_node_of_another_cluster_is_refused_and_changes_nothing() {
    let cluster = Cluster::whole().await;
    let before = cluster.manager.routing(cluster.now).await.unwrap();
    let mut foreign_node = FakeNode::new(1);
    foreign_node.restart();
    foreign_node.data = DataFolder::Of(ClusterId(77));
    let error = cluster.manager.heartbeat(foreign_node.beat(), cluster.now).await.unwrap_err();
    let (foreign_id, own_id) = (ClusterId(77), ClusterId(1));
    assert_eq!(error, MgmtdError::OtherCluster { node: NodeId(1), foreign_id, own_id });
    assert_eq!(cluster.manager.routing(cluster.now).await.unwrap(), before);
}

#[tokio::test]
async fn of_two_managers_the_one_without_the_lease_is_fenced() {
    let mut cluster = Cluster::whole().await;
    let second = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    // While the first renews, the second waits.
    for _ in 0..100 {
        cluster.step().await;
        second.tick(cluster.now).await.unwrap();
        let error = second.heartbeat(cluster.nodes[0].beat(), cluster.now).await.unwrap_err();
        assert_eq!(error, MgmtdError::NotPrimary { holder: "m1".into() });
    }
    // The first is paused; the second takes over after a whole lease, not before.
    let paused = cluster.now;
    while second.status(cluster.now).await.is_err() {
        cluster.now = cluster.now.after(50);
        second.tick(cluster.now).await.unwrap();
    }
    // In a store that only one process can open a manager waits for the whole lease. The last renewal
    // was up to a third of it before the pause.
    assert!(cluster.now.since(paused) >= TIMERS.primary_lease_ms * 2 / 3 - 50);
    assert!(cluster.manager.status(cluster.now).await.is_err());
    // The first continues with its old clock and still considers itself primary: its write is
    // refused.
    let version_before = second.routing(cluster.now).await.unwrap().version;
    cluster.nodes[0].restart();
    let heartbeat = cluster.nodes[0].beat();
    let error = cluster.manager.heartbeat(heartbeat, paused).await.unwrap_err();
    assert!(matches!(&error, MgmtdError::Store { detail } if detail.contains("m2")), "{error}");
    assert_eq!(second.routing(cluster.now).await.unwrap().version, version_before);
    let error = cluster.manager.status(paused).await.unwrap_err();
    assert!(matches!(error, MgmtdError::NotPrimary { .. }), "{error}");
}

#[tokio::test]
async fn a_primary_that_cannot_renew_its_lease_steps_down_before_a_takeover() {
    let cluster = Cluster::whole().await;
    let late = cluster.now.after(TIMERS.primary_lease_ms);
    let error = cluster.manager.routing(late).await.unwrap_err();
    assert!(matches!(error, MgmtdError::NotPrimary { .. }));
}

#[tokio::test]
async fn the_lease_in_an_exclusively_opened_store_is_taken_over_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for epoch in 1..4 {
        let store =
            Store::embedded(threefs_kv::EmbeddedConfig::new(folder.path().join("kv"))).unwrap();
        let manager = Manager::new(store, rand::random(), "m", BOOTSTRAP, TIMERS);
        manager.tick(Millis(5)).await.unwrap();
        assert_eq!(manager.status(Millis(5)).await.unwrap().epoch, epoch);
    }
}

#[test]
fn an_invalid_bootstrap_is_refused_with_the_field_and_the_value() {
    let bad = Bootstrap { nodes: 2, replicas: 3, chains_per_node: 1 };
    assert!(bad.check().unwrap_err().contains("replicas is 3"));
    let bad = Bootstrap { nodes: 2, replicas: 1, chains_per_node: 0 };
    assert!(bad.check().unwrap_err().contains("chains_per_node is 0"));
}
