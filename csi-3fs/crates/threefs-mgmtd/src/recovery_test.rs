//! The manager after the death of all replicas of a chain: which of them may lead it again.

use super::*;

#[tokio::test]
async fn after_an_outage_of_all_nodes_chains_restart_from_the_last_serving_replica() {
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

/// All nodes die and the first one comes back with another disk.
#[tokio::test]
async fn a_disk_that_did_not_serve_never_leads_and_is_reported() {
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
    let store = &status.foreign_stores[0];
    assert_eq!(
        (store.node, store.served_with, store.reported),
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
    let error = cluster.manager.promote(target, true, cluster.now).await.unwrap_err();
    assert!(error.to_string().contains("its store is empty"), "{error}");
    cluster.nodes[1].chunks = 5;
    cluster.step().await;
    let meaning = cluster.manager.promote(target, false, cluster.now).await.unwrap();
    assert_eq!((meaning.chunks, meaning.was_complete), (5, true));
    assert_eq!(meaning.served_last.len(), 2);
    assert_eq!(cluster.routing().chains[&chain.id], *chain, "so far only queried");
    cluster.manager.promote(target, true, cluster.now).await.unwrap();
    let id = chain.id;
    cluster
        .steps_until("led by it", |routing| {
            routing.chains[&id].head().is_some_and(|head| head.target == target)
        })
        .await;
    let error = cluster.manager.promote(target, true, now).await.unwrap_err();
    assert!(error.to_string().contains("has a serving target"), "{error}");
    // The last serving targets are synced from it.
    for node in [0, 2] {
        cluster.nodes[node].restart();
    }
    cluster.steps_until("whole", is_whole).await;
}

/// Power failure: the last heartbeats are from different times.
#[tokio::test]
async fn nodes_that_die_within_a_short_time_are_treated_equally() {
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
async fn nodes_that_restart_together_do_not_make_a_dead_node_the_only_authority() {
    for first in 0..3 {
        let mut cluster = Cluster::whole().await;
        let (second, emptied) = ((first + 1) % 3, (first + 2) % 3);
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
                    let offline_target =
                        chain.targets.iter().find(|place| place.node == NodeId(emptied as u32 + 1));
                    chain.head().is_some()
                        && offline_target.is_some_and(|place| place.state == PublicState::Offline)
                })
            })
            .await;
    }
}

/// One node restarts while the others are alive: it is demoted at their next heartbeat.
#[tokio::test]
async fn a_restart_beside_live_nodes_is_not_delayed() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[1].restart();
    for _ in 0..3 {
        cluster.step().await;
    }
    assert!(cluster.routing().chains.values().all(|chain| chain.head().is_some()));
    let status = cluster.manager.status(cluster.now).await.unwrap();
    assert!(status.nodes.iter().all(|node| node.alive), "{:?}", status.nodes);
}
