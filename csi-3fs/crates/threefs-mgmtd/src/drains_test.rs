//! Drains, with fake storage nodes.

use threefs_core::ids::NodeId;

use super::tests::{Cluster, FakeNode, is_whole, states_of};
use super::*;
use crate::drain_change::DrainChange;

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
