//! The manager with fake storage nodes, an injected clock and the memory store.

use std::collections::BTreeMap;

use threefs_core::heartbeat::{DataFolder, LocalReport, LocalState, TargetReport};
use threefs_core::ids::{ChainVersion, ClusterId, Incarnation, StoreId, TargetId};
use threefs_core::routing::PublicState;

use super::*;

pub(super) const TIMERS: Timers =
    Timers { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 };
pub(super) const BOOTSTRAP: Bootstrap = Bootstrap { nodes: 3, replicas: 3, chains_per_node: 2 };

/// A storage service that syncs at once and reports correctly.
pub(super) struct FakeNode {
    id: NodeId,
    incarnation: u64,
    sequence: u64,
    /// Targets that this incarnation knows to be up to date, with the chain version of that
    /// knowledge.
    known: BTreeMap<TargetId, (LocalState, ChainVersion)>,
    pub dead: bool,
    /// It has no space for syncs.
    pub full: bool,
    /// Bytes used of the 10 of each target.
    pub used_bytes: u64,
    /// Capacity of all its targets.
    pub store: StoreId,
    pub chunks: u64,
    pub data: DataFolder,
}

impl FakeNode {
    pub fn new(id: u32) -> Self {
        let known = BTreeMap::new();
        Self {
            id: NodeId(id),
            incarnation: 100,
            sequence: 0,
            known,
            dead: false,
            full: false,
            used_bytes: 1,
            store: StoreId(u128::from(id)),
            chunks: 5,
            data: DataFolder::Empty,
        }
    }

    fn restart(&mut self) {
        self.incarnation += 1;
        self.sequence = 0;
        self.known.clear();
        self.dead = false;
    }

    fn beat(&mut self) -> Heartbeat {
        self.sequence += 1;
        let targets = self.known.iter().map(|(target, (state, chain_version))| TargetReport {
            target: *target,
            chain: Default::default(),
            report: LocalReport { state: *state, chain_version: *chain_version },
            used_bytes: self.used_bytes,
            store: Some(self.store),
            chunks: self.chunks,
        });
        Heartbeat {
            node: self.id,
            address: format!("127.0.0.1:{}", 9000 + self.id.0),
            incarnation: Incarnation(self.incarnation),
            sequence: self.sequence,
            capacity_bytes: 10 * self.known.len() as u64,
            targets: targets.collect(),
            data: self.data,
        }
    }

    fn learn(&mut self, routing: &RoutingInfo) {
        for (chain, place) in routing.targets_of_node(self.id) {
            let before = self.known.get(&place.target).map(|(state, _)| *state);
            let state = match (place.state, before) {
                (PublicState::Syncing, Some(_)) if self.full => LocalState::Offline,
                (PublicState::Serving | PublicState::Syncing, Some(_)) => LocalState::UpToDate,
                _ => LocalState::Online,
            };
            let state =
                if routing.retires(chain, place.target) { LocalState::Online } else { state };
            self.known.insert(place.target, (state, chain.version));
        }
        self.known.retain(|target, _| !routing.retired.contains(target));
    }
}

pub(super) struct Cluster {
    pub store: Store,
    pub manager: Manager,
    pub nodes: Vec<FakeNode>,
    pub now: Millis,
}

impl Cluster {
    fn new() -> Self {
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
            let _ = self.manager.heartbeat(node.beat(), self.now).await;
            node.learn(&self.manager.published.borrow());
        }
    }

    pub async fn steps_until(&mut self, what: &str, goal: impl Fn(&RoutingInfo) -> bool) {
        for _ in 0..200 {
            if goal(&self.routing()) {
                return;
            }
            self.step().await;
        }
        panic!("never: {what}; {:#?}", self.routing().chains);
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
async fn a_new_cluster_makes_its_chains_and_becomes_whole() {
    let cluster = Cluster::whole().await;
    let routing = cluster.routing();
    assert_eq!(routing.chains.len(), 6);
    assert_eq!(routing.newest_table(crate::FIRST_TABLE).unwrap().chains.len(), 6);
    assert_eq!(routing.address(NodeId(2)), Some("127.0.0.1:9002"));
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert_eq!((status.chains, status.chains_whole, status.chains_down), (6, 6, 0));
    assert_eq!(status.nodes[0].used_bytes, 6);
}

#[tokio::test]
async fn nothing_is_made_before_all_nodes_are_there() {
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
async fn a_dead_node_leaves_and_comes_back_through_syncing() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[1].dead = true;
    let died = cluster.now;
    cluster.steps_until("node 2 left", |routing| !serves(routing, 2)).await;
    let waited = cluster.now.since(died);
    assert!((1000..=1100).contains(&waited), "left after {waited} ms");
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
async fn a_former_life_is_told_to_end_and_changes_nothing() {
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
async fn a_heartbeat_whose_answer_was_lost_is_answered_again_and_keeps_nobody_alive() {
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
async fn a_pause_of_mgmtd_itself_is_not_taken_for_silence_of_the_nodes() {
    let mut cluster = Cluster::whole().await;
    let before = cluster.routing();
    // Shorter than the primary's lease, longer than it takes to be dead.
    cluster.now = cluster.now.after(1900);
    for _ in 0..30 {
        cluster.step().await;
    }
    assert_eq!(*cluster.routing(), *before);
    cluster.nodes[0].dead = true;
    cluster.steps_until("node 1 left", |routing| !serves(routing, 1)).await;
}

#[tokio::test]
async fn the_whole_cluster_dies_and_comes_back_by_the_last_one_that_served() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.iter_mut().for_each(|node| node.dead = true);
    cluster
        .steps_until("all down", |routing| {
            routing.chains.values().all(|chain| chain.head().is_none())
        })
        .await;
    cluster.nodes.iter_mut().for_each(FakeNode::restart);
    cluster.steps_until("whole", is_whole).await;
}

#[tokio::test]
async fn a_restarted_mgmtd_continues_without_disturbing_anybody() {
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
async fn a_node_that_restarts_while_mgmtd_begins_is_not_taken_for_its_former_life() {
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
async fn the_cluster_keeps_its_id_over_managers_and_publishes_it() {
    let mut cluster = Cluster::whole().await;
    assert_eq!(cluster.manager.routing(cluster.now).await.unwrap().cluster, ClusterId(1));
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.steps_until("whole", is_whole).await;
    assert_eq!(cluster.manager.routing(cluster.now).await.unwrap().cluster, ClusterId(1));
}

#[tokio::test]
async fn a_manager_that_lost_its_store_makes_no_chains_over_the_old_ones() {
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
    let (theirs, ours) = (ClusterId(77), ClusterId(1));
    assert_eq!(error, MgmtdError::OtherCluster { node: NodeId(1), theirs, ours });
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
    // Its last renewal was up to a third of a lease before the pause; until a lease after that
    // renewal it would still have replied.
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
async fn a_primary_that_cannot_renew_says_so_before_another_may_take_over() {
    let cluster = Cluster::whole().await;
    let late = cluster.now.after(TIMERS.primary_lease_ms);
    let error = cluster.manager.routing(late).await.unwrap_err();
    assert!(matches!(error, MgmtdError::NotPrimary { .. }));
}

#[tokio::test]
async fn a_store_that_only_one_process_can_open_is_taken_over_at_once() {
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
fn a_bootstrap_that_cannot_be_is_refused_with_the_field_and_the_value() {
    let bad = Bootstrap { nodes: 2, replicas: 3, chains_per_node: 1 };
    assert!(bad.check().unwrap_err().contains("replicas is 3"));
    let bad = Bootstrap { nodes: 2, replicas: 1, chains_per_node: 0 };
    assert!(bad.check().unwrap_err().contains("chains_per_node is 0"));
}

/// All nodes die and the first one comes back with another disk.
#[tokio::test]
async fn a_disk_that_did_not_serve_never_leads_and_is_named() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.iter_mut().for_each(|node| node.dead = true);
    cluster
        .steps_until("all down", |routing| {
            routing
                .chains
                .values()
                .all(|chain| chain.targets.iter().all(|place| place.state == PublicState::LastSrv))
        })
        .await;
    let node = &mut cluster.nodes[0];
    node.restart();
    (node.store, node.chunks) = (StoreId(77), 0);
    for _ in 0..60 {
        cluster.step().await;
    }
    let routing = cluster.routing();
    assert!(routing.chains.values().all(|chain| chain.head().is_none()), "{:#?}", routing.chains);
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert_eq!(status.foreign_stores.len(), 6);
    let named = &status.foreign_stores[0];
    assert_eq!(
        (named.node, named.served_with, named.reported),
        (NodeId(1), StoreId(1), StoreId(77))
    );
    // Another one of the last serving targets leads, and the new disk is synced from it.
    cluster.nodes[2].restart();
    cluster
        .steps_until("served by node 3", |routing| {
            routing.chains.values().all(|chain| chain.head().is_some_and(|it| it.node == NodeId(3)))
        })
        .await;
    cluster.steps_until("node 1 synced", |routing| serves(routing, 1)).await;
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert_eq!(status.foreign_stores, []);
}

#[tokio::test]
async fn an_operator_may_promote_a_copy_that_holds_chunks() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[1].dead = true;
    cluster.steps_until("without node 2", |routing| !serves(routing, 2)).await;
    for node in [0, 2] {
        cluster.nodes[node].dead = true;
    }
    cluster
        .steps_until("all down", |routing| {
            routing.chains.values().all(|chain| chain.head().is_none())
        })
        .await;
    cluster.nodes[1].restart();
    for _ in 0..40 {
        cluster.step().await;
    }
    let routing = cluster.routing();
    let chain = routing.chains.values().next().unwrap();
    let place = chain.targets.iter().find(|place| place.node == NodeId(2)).unwrap();
    assert_eq!(place.state, PublicState::Waiting, "it may have missed updates");
    let target = place.target;
    let now = cluster.now;
    cluster.nodes[1].chunks = 0;
    cluster.step().await;
    let refused = cluster.manager.promote(target, true, cluster.now).await.unwrap_err();
    assert!(refused.to_string().contains("its store is empty"), "{refused}");
    cluster.nodes[1].chunks = 5;
    cluster.step().await;
    let meaning = cluster.manager.promote(target, false, cluster.now).await.unwrap();
    assert_eq!((meaning.chunks, meaning.was_complete), (5, true));
    assert_eq!(meaning.served_last.len(), 2);
    assert_eq!(cluster.routing().chains[&chain.id], *chain, "so far only asked");
    cluster.manager.promote(target, true, cluster.now).await.unwrap();
    let id = chain.id;
    cluster
        .steps_until("led by it", |routing| {
            routing.chains[&id].head().is_some_and(|head| head.target == target)
        })
        .await;
    let refused = cluster.manager.promote(target, true, now).await.unwrap_err();
    assert!(refused.to_string().contains("has a serving target"), "{refused}");
    // The last serving targets are synced from it.
    for node in [0, 2] {
        cluster.nodes[node].restart();
    }
    cluster.steps_until("whole", is_whole).await;
}

/// Power failure: the last heartbeats are from different times.
#[tokio::test]
async fn nodes_that_die_shortly_after_each_other_are_equals() {
    let mut cluster = Cluster::whole().await;
    for node in 0..3 {
        cluster.nodes[node].dead = true;
        for _ in 0..3 {
            cluster.step().await;
        }
    }
    cluster
        .steps_until("all down", |routing| {
            routing
                .chains
                .values()
                .all(|chain| chain.targets.iter().all(|place| place.state == PublicState::LastSrv))
        })
        .await;
}

/// All processes are killed; two restart before they are declared dead, the third has lost its disk
/// and never returns.
#[tokio::test]
async fn nodes_that_restart_at_once_do_not_leave_a_dead_one_as_the_only_authority() {
    for first in 0..3 {
        let mut cluster = Cluster::whole().await;
        let (second, lost) = ((first + 1) % 3, (first + 2) % 3);
        // A sync from a dead node does not complete.
        cluster.nodes.iter_mut().for_each(|node| (node.dead, node.full) = (true, true));
        cluster.step().await;
        cluster.nodes[first].restart();
        cluster.step().await;
        cluster.step().await;
        cluster.nodes[second].restart();
        cluster
            .steps_until("served", |routing| {
                routing.chains.values().all(|chain| {
                    let gone =
                        chain.targets.iter().find(|place| place.node == NodeId(lost as u32 + 1));
                    chain.head().is_some()
                        && gone.is_some_and(|place| place.state == PublicState::Offline)
                })
            })
            .await;
    }
}

/// One node restarts while the others are alive: it is demoted at their next heartbeat.
#[tokio::test]
async fn a_restart_next_to_living_nodes_is_not_held_up() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[1].restart();
    for _ in 0..3 {
        cluster.step().await;
    }
    assert!(cluster.routing().chains.values().all(|chain| chain.head().is_some()));
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert!(status.nodes.iter().all(|node| node.alive), "{:?}", status.nodes);
}
