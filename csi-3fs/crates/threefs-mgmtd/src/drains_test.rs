//! Drains, and moves that cannot complete, with fake storage nodes.

use threefs_core::ids::NodeId;
use threefs_core::routing::PublicState;

use super::tests::{BOOTSTRAP, Cluster, FakeNode, TIMERS, is_whole, states_of};
use super::*;
use crate::drain_change::DrainChange;
use crate::move_report::{MoveReport, WaitCause};
use crate::view::DEAD_DESTINATION_MS;

/// Six nodes with whole chains.
async fn six_nodes() -> Cluster {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.extend((4..=6).map(FakeNode::new));
    for _ in 0..400 {
        cluster.step().await;
    }
    let routing = cluster.routing();
    assert!(routing.moves.is_empty() && is_whole(&routing) && routing.nodes.len() == 6);
    cluster
}

async fn drain(cluster: &Cluster, change: DrainChange) -> Vec<u32> {
    let plan = cluster.manager.drain(true, &change, cluster.now).await.unwrap();
    plan.leaving.iter().map(|node| node.0).collect()
}

#[tokio::test]
async fn concurrent_drains_compose_and_are_cancelled_apart() {
    let mut cluster = six_nodes().await;
    let add = |node| DrainChange::Add(vec![NodeId(node)]);
    // Each operator knows only of the own one.
    assert_eq!(drain(&cluster, add(1)).await, [1]);
    assert_eq!(drain(&cluster, add(2)).await, [1, 2]);
    assert_eq!(drain(&cluster, add(3)).await, [1, 2, 3]);
    assert_eq!(drain(&cluster, DrainChange::Remove(vec![NodeId(2)])).await, [1, 3]);
    cluster
        .steps_until("the others are empty", |it| {
            states_of(it, 1).is_empty() && states_of(it, 3).is_empty() && it.moves.is_empty()
        })
        .await;
    assert!(!states_of(&cluster.routing(), 2).is_empty());
    assert_eq!(drain(&cluster, DrainChange::RemoveAll).await, [] as [u32; 0]);
}

#[tokio::test]
async fn a_drain_is_checked_with_the_nodes_that_others_drain() {
    let cluster = six_nodes().await;
    drain(&cluster, DrainChange::Add(vec![NodeId(1), NodeId(2)])).await;
    let more = DrainChange::Add(vec![NodeId(3), NodeId(4)]);
    let error = cluster.manager.drain(true, &more, cluster.now).await.unwrap_err();
    assert_eq!(error, MgmtdError::TooFewNodes { staying: 2, replicas: 3 });
    let unknown = DrainChange::Add(vec![NodeId(9)]);
    let error = cluster.manager.drain(true, &unknown, cluster.now).await.unwrap_err();
    assert_eq!(error, MgmtdError::UnknownNode { node: NodeId(9) });
    // A plan without `apply` changes nothing, and neither does an empty change.
    let plan = cluster.manager.drain(false, &DrainChange::RemoveAll, cluster.now).await.unwrap();
    assert_eq!(plan.leaving, []);
    assert_eq!(drain(&cluster, DrainChange::Add(Vec::new())).await, [1, 2]);
}

/// A cluster whose moves to node 4 have started when it dies.
async fn moves_to_a_dead_node() -> Cluster {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    cluster.steps_until("two moves", |it| it.moves.len() == 2).await;
    cluster.nodes[3].dead = true;
    cluster
}

/// Advances the clock; the steps are as long as possible without a pause of mgmtd.
async fn wait_ms(cluster: &mut Cluster, ms: u64) {
    let end = cluster.now.after(ms);
    while cluster.now < end {
        cluster.now = cluster.now.after(50);
        cluster.step().await;
    }
}

#[tokio::test]
async fn moves_to_a_node_that_is_dead_for_long_are_abandoned() {
    let mut cluster = moves_to_a_dead_node().await;
    wait_ms(&mut cluster, DEAD_DESTINATION_MS / 2).await;
    let report = cluster.manager.moves(false, cluster.now).await.unwrap();
    for it in &report.under_way {
        let stalled = it.stalled.as_ref().unwrap();
        assert_eq!((it.to, stalled.cause), (NodeId(4), WaitCause::DeadNode));
        assert!(stalled.detail.starts_with("node-4 has been dead for 300 s"), "{report:?}");
    }
    assert_eq!(cluster.routing().moves.len(), 2, "it may return");
    // A successor of mgmtd does not know since when it is dead.
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    wait_ms(&mut cluster, DEAD_DESTINATION_MS - 10_000).await;
    let moves = cluster.routing().moves.clone();
    assert_eq!(moves.len(), 2);
    // They block others: another node gets nothing until then.
    cluster.nodes.push(FakeNode::new(5));
    wait_ms(&mut cluster, 20_000).await;
    let routing = cluster.routing();
    assert!(moves.values().all(|this| routing.retired.contains(&this.destination)));
    assert!(states_of(&routing, 5).len() > 4, "{routing:?}");
    assert!(routing.moves.is_empty());
    // The node returns, and gets its share.
    cluster.nodes[3].dead = false;
    wait_ms(&mut cluster, DEAD_DESTINATION_MS + 30_000).await;
    let routing = cluster.routing();
    assert!(states_of(&routing, 4).len() > 4 && is_whole(&routing), "{routing:?}");
}

async fn moves(cluster: &Cluster) -> MoveReport {
    cluster.manager.moves(true, cluster.now).await.unwrap()
}

/// The causes of the waiting moves off a node, without repetitions.
fn causes(report: &MoveReport, from: u32) -> Vec<WaitCause> {
    let waiting = report.waiting.iter().filter(|it| it.from == NodeId(from));
    let mut causes: Vec<WaitCause> = waiting.map(|it| it.wait.cause).collect();
    causes.dedup();
    causes
}

#[tokio::test]
async fn a_report_names_what_each_move_waits_for() {
    let mut cluster = six_nodes().await;
    assert_eq!(
        moves(&cluster).await,
        MoveReport {
            leaving: Vec::new(),
            under_way: Vec::new(),
            waiting: Vec::new(),
            waiting_total: 0,
        }
    );
    // A replica of another node does not serve.
    cluster.nodes[1].dead = true;
    cluster
        .steps_until("node 2 is dead", |it| !states_of(it, 2).contains(&PublicState::Serving))
        .await;
    drain(&cluster, DrainChange::Add(vec![NodeId(1)])).await;
    let report = moves(&cluster).await;
    assert_eq!(report.leaving, [NodeId(1)]);
    let on_dead = report.waiting.iter().find(|it| it.wait.cause == WaitCause::Replica).unwrap();
    assert!(on_dead.wait.detail.contains("on node-2 is OFFLINE: "), "{on_dead:?}");
    cluster.nodes[1].dead = false;
    let mut report = moves(&cluster).await;
    for _ in 0..200 {
        if causes(&report, 1).contains(&WaitCause::Others) {
            break;
        }
        cluster.step().await;
        report = moves(&cluster).await;
    }
    assert!(causes(&report, 1).contains(&WaitCause::Others), "{report:?}");
    assert_eq!(report.under_way.len(), 2);
    assert!(report.under_way.iter().all(|it| it.stalled.is_none()), "{report:?}");
    cluster.nodes[1].dead = true;
    // Nothing may take the replicas of node 1: the others are full, dead or drained.
    cluster.nodes.iter_mut().for_each(|node| node.used_bytes = 10);
    wait_ms(&mut cluster, 5_000).await;
    let report = moves(&cluster).await;
    assert_eq!(causes(&report, 1), [WaitCause::NoPlace], "{report:?}");
    let detail = &report.waiting[0].wait.detail;
    assert!(
        detail.starts_with("of the nodes without a replica of the chain, 3 are full"),
        "{detail}"
    );
    assert_eq!(report.waiting_total as usize, states_of(&cluster.routing(), 1).len());
}

#[tokio::test]
async fn a_report_names_the_limits_of_the_operator() {
    let mut cluster = six_nodes().await;
    cluster.manager.move_rate(Some(1), cluster.now).await.unwrap();
    drain(&cluster, DrainChange::Add(vec![NodeId(1)])).await;
    cluster.steps_until("the first move ends", |it| !it.retired.is_empty()).await;
    wait_ms(&mut cluster, 1_000).await;
    assert!(causes(&moves(&cluster).await, 1).contains(&WaitCause::Rate));
    // Balancing on request only.
    drain(&cluster, DrainChange::RemoveAll).await;
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS).on_demand();
    cluster.steps_until("it leads", is_whole).await;
    cluster.nodes.push(FakeNode::new(7));
    wait_ms(&mut cluster, 5_000).await;
    let report = moves(&cluster).await;
    assert!(report.waiting.iter().all(|it| it.wait.cause == WaitCause::Request), "{report:?}");
    assert!(report.waiting_total > 0);
    cluster.nodes[6].restart();
    cluster.nodes.push(FakeNode::new(8));
    cluster.nodes[7].capacity_bytes = 0;
    cluster.manager = Manager::new(cluster.store.clone(), 3, "m3", BOOTSTRAP, TIMERS);
    cluster.steps_until("node 8 is known", |it| it.nodes.len() == 8).await;
    wait_ms(&mut cluster, 5_000).await;
    let report = moves(&cluster).await;
    let wait = &report.waiting.first().unwrap().wait;
    assert_eq!(wait.cause, WaitCause::Capacity);
    assert!(wait.detail.starts_with("1 nodes have never reported"), "{report:?}");
}
