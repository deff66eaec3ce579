//! The manager over a store that was restored from a backup.

use threefs_core::ids::RoutingVersion;
use threefs_core::membership::is_held;
use threefs_kv::{KeyRange, Operation, Transaction};

use super::*;
use crate::ops::MarkRestored;

/// All rows of a store.
struct Rows;

impl Operation for Rows {
    type Output = Vec<threefs_kv::Row>;
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, KvError> {
        txn.range(&KeyRange::prefix(b"M"), 100_000).await
    }
}

struct Write<'a>(&'a [threefs_kv::Row]);

impl Operation for Write<'_> {
    type Output = ();
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), KvError> {
        for (key, value) in self.0 {
            txn.set(key, value.clone());
        }
        Ok(())
    }
}

async fn dump(cluster: &Cluster) -> Vec<threefs_kv::Row> {
    cluster.store.transact(deadline(), &Rows).await.unwrap()
}

/// mgmtd loses its store and starts with an earlier one.
async fn replace_store(cluster: &mut Cluster, dump: &[threefs_kv::Row], marked: bool) {
    let store = Store::memory();
    store.transact(deadline(), &Write(dump)).await.unwrap();
    if marked {
        let mark = MarkRestored { seen: RoutingVersion(0), fence: None };
        store.transact(deadline(), &mark).await.unwrap();
    }
    cluster.manager = Manager::new(store.clone(), 9, "m9", BOOTSTRAP, TIMERS);
    cluster.store = store;
    cluster.now = cluster.now.after(10_000);
}

async fn waits(cluster: &mut Cluster) -> Vec<String> {
    for _ in 0..150 {
        cluster.step().await;
    }
    let report = cluster.manager.unconfirmed(cluster.now).await.unwrap();
    assert!(report.chains.iter().all(|it| is_held(&cluster.routing().chains[&it.chain])));
    report.chains.into_iter().map(|it| it.reason).collect()
}

/// A dump of a whole cluster; then node 2 leaves, and later node 1: node 3 alone has the newest data.
async fn outdated() -> (Cluster, Vec<threefs_kv::Row>) {
    let mut cluster = Cluster::whole().await;
    let dump = dump(&cluster).await;
    for node in [1, 0] {
        cluster.nodes[node].dead = true;
        cluster.steps_until("left", |routing| !serves(routing, node as u32 + 1)).await;
    }
    cluster.step().await;
    cluster.nodes[2].dead = true;
    (cluster, dump)
}

fn led_by(routing: &RoutingInfo, node: u32) -> bool {
    routing.chains.values().all(|chain| chain.head().is_some_and(|it| it.node == NodeId(node)))
}

#[tokio::test]
async fn a_stale_replica_that_registers_first_does_not_lead() {
    for marked in [true, false] {
        let (mut cluster, dump) = outdated().await;
        let before = cluster.routing();
        replace_store(&mut cluster, &dump, marked).await;
        if !marked {
            // The copied table is recognized as old before a decision: all nodes are heard first.
            cluster.nodes[2].restart();
        }
        cluster.nodes[0].restart();
        if marked {
            let reasons = waits(&mut cluster).await;
            assert_eq!(reasons.len(), 6);
            assert!(reasons[0].contains("no membership record of target-"), "{reasons:?}");
            assert!(reasons[0].contains("on node-3"), "{reasons:?}");
            cluster.nodes[1].restart();
            assert!(!waits(&mut cluster).await[0].contains("node-2"));
            cluster.nodes[2].restart();
        } else {
            cluster.nodes[1].restart();
        }
        cluster.steps_until("newer", |routing| routing.version > before.version).await;
        cluster.steps_until("led by node 3", |routing| led_by(routing, 3)).await;
        cluster.steps_until("whole", is_whole).await;
        let after = cluster.routing();
        assert!(
            before.chains.values().all(|chain| after.chains[&chain.id].version > chain.version)
        );
    }
}

#[tokio::test]
async fn services_that_never_stopped_accept_the_restored_routing() {
    let mut cluster = Cluster::whole().await;
    let dump = dump(&cluster).await;
    cluster.nodes[1].dead = true;
    cluster.steps_until("node 2 left", |routing| !serves(routing, 2)).await;
    cluster.step().await;
    replace_store(&mut cluster, &dump, true).await;
    cluster.steps_until("held", |routing| routing.chains.values().all(is_held)).await;
    cluster.nodes[1].restart();
    cluster.steps_until("whole", is_whole).await;
}

#[tokio::test]
async fn a_dump_of_the_newest_state_needs_no_decision() {
    let mut cluster = Cluster::whole().await;
    cluster.step().await;
    let dump = dump(&cluster).await;
    replace_store(&mut cluster, &dump, true).await;
    cluster.nodes.iter_mut().for_each(FakeNode::restart);
    cluster.steps_until("whole", is_whole).await;
    assert_eq!(cluster.manager.unconfirmed(cluster.now).await.unwrap().chains, []);
}

#[tokio::test]
async fn a_wiped_replica_and_an_earlier_release_count_as_unknown_until_a_promotion() {
    for wiped in [true, false] {
        let (mut cluster, dump) = outdated().await;
        replace_store(&mut cluster, &dump, true).await;
        if wiped {
            cluster.nodes[2].wipe(77);
        } else {
            cluster.nodes[2].restart();
            cluster.nodes[2].records = None;
        }
        cluster.nodes[0].restart();
        cluster.nodes[1].restart();
        let reasons = waits(&mut cluster).await;
        assert!(reasons.iter().all(|it| it.ends_with("on node-3")), "{reasons:?}");
        let of_node = |routing: &RoutingInfo, node| -> Vec<TargetId> {
            routing.targets_of_node(NodeId(node)).map(|(_, place)| place.target).collect()
        };
        let targets = of_node(&cluster.routing(), 1);
        for target in targets {
            let planned = cluster.manager.promote(target, false, cluster.now).await.unwrap();
            assert!(planned.served_last.iter().any(|(_, node)| *node == NodeId(3)), "{planned:?}");
            cluster.manager.promote(target, true, cluster.now).await.unwrap();
        }
        cluster.steps_until("led by node 1", |routing| led_by(routing, 1)).await;
        cluster.steps_until("whole", is_whole).await;
    }
}

#[tokio::test]
async fn a_confirmation_continues_after_a_death_of_mgmtd() {
    let (mut cluster, dump) = outdated().await;
    replace_store(&mut cluster, &dump, true).await;
    cluster.nodes[0].restart();
    let before = waits(&mut cluster).await;
    cluster.manager = Manager::new(cluster.store.clone(), 10, "m10", BOOTSTRAP, TIMERS);
    cluster.now = cluster.now.after(10_000);
    assert_eq!(waits(&mut cluster).await, before);
    cluster.nodes[1].restart();
    cluster.nodes[2].restart();
    cluster.steps_until("led by node 3", |routing| led_by(routing, 3)).await;
}

/// A node with a wrong address of mgmtd.
#[tokio::test]
async fn versions_of_another_cluster_prove_nothing() {
    let mut cluster = Cluster::whole().await;
    let before = cluster.routing();
    let mut foreign_node = FakeNode::new(7);
    foreign_node.data = DataFolder::Of(ClusterId(99));
    foreign_node.received = RoutingVersion(u64::MAX >> 1);
    let refused = cluster.manager.heartbeat_with(foreign_node.report(), cluster.now).await;
    assert!(matches!(refused, Err(MgmtdError::OtherCluster { .. })), "{refused:?}");
    cluster.step().await;
    assert_eq!(cluster.routing(), before);
}

/// The same dump is loaded twice: the versions of the first restore are exceeded.
#[tokio::test]
async fn a_second_restore_exceeds_the_versions_of_the_first() {
    let mut cluster = Cluster::whole().await;
    let dump = dump(&cluster).await;
    for _ in 0..2 {
        let before = cluster.routing();
        replace_store(&mut cluster, &dump, true).await;
        cluster
            .steps_until("held", |routing| {
                routing.version > before.version && routing.chains.values().all(is_held)
            })
            .await;
        cluster.steps_until("whole", is_whole).await;
        let after = cluster.routing();
        assert!(
            before.chains.values().all(|chain| after.chains[&chain.id].version > chain.version)
        );
        cluster.step().await;
    }
    assert_eq!(cluster.routing().version.era(), 2);
}

/// Chains that were created after the dump are named, and neither replaced nor dropped.
#[tokio::test]
async fn targets_that_the_table_does_not_list_are_reported_and_their_ids_not_reused() {
    let mut cluster = Cluster::new();
    for _ in 0..20 {
        cluster.nodes[2].dead = true;
        cluster.step().await;
    }
    let dump = dump(&cluster).await;
    cluster.nodes[2].dead = false;
    cluster.steps_until("whole", is_whole).await;
    cluster.step().await;
    replace_store(&mut cluster, &dump, true).await;
    for _ in 0..60 {
        cluster.step().await;
    }
    assert!(cluster.routing().chains.is_empty(), "no new chains over their data");
    let report = cluster.manager.unconfirmed(cluster.now).await.unwrap();
    assert_eq!((report.chains.len(), report.unknown_targets.len()), (0, 18));
    assert!(cluster.routing().retired.is_empty());
    // They are given up, with their disks.
    for node in 0..3 {
        cluster.nodes[node].wipe(70 + node as u128);
    }
    cluster.steps_until("whole", is_whole).await;
    let routing = cluster.routing();
    assert!(routing.chains.keys().all(|id| id.0 > 1 << 16), "{:?}", routing.chains.keys());
    let table = routing.newest_table(crate::FIRST_TABLE).unwrap();
    assert!(table.version.0 > 1 << 16);
}
