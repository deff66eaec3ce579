//! Capacities of nodes, with fake storage nodes.

use threefs_core::ids::NodeId;

use super::tests::{BOOTSTRAP, Cluster, FakeNode, TIMERS, is_whole, states_of};
use super::*;

/// Node 4 has a quarter of the capacity of each other one.
async fn unequal() -> Cluster {
    let mut cluster = Cluster::whole().await;
    let mut small = FakeNode::new(4);
    small.capacity_bytes = 250;
    cluster.nodes.push(small);
    settle(&mut cluster).await;
    assert!((1..=2).contains(&replicas(&cluster, 4)));
    cluster
}

/// Runs until nothing changes any more.
async fn settle(cluster: &mut Cluster) {
    let mut unchanged = 0;
    for _ in 0..2000 {
        let before = cluster.routing().version;
        cluster.step().await;
        unchanged = if cluster.routing().version == before { unchanged + 1 } else { 0 };
        if unchanged > 40 && is_whole(&cluster.routing()) {
            return;
        }
    }
    panic!("it never settles: {:?}", cluster.routing());
}

fn replicas(cluster: &Cluster, node: u32) -> usize {
    states_of(&cluster.routing(), node).len()
}

async fn steps_without_moves(cluster: &mut Cluster, steps: usize) {
    for _ in 0..steps {
        cluster.step().await;
        let moves = &cluster.routing().moves;
        assert!(moves.is_empty(), "{moves:?}");
    }
}

#[tokio::test]
async fn a_restart_of_all_services_starts_no_move() {
    let mut cluster = unequal().await;
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    for node in &mut cluster.nodes {
        node.restart();
    }
    cluster.nodes[3].capacity_bytes = 0;
    steps_without_moves(&mut cluster, 100).await;
    assert!(is_whole(&cluster.routing()), "the others serve meanwhile");
    // The space of targets that are not open is not part of the capacity.
    for node in &mut cluster.nodes {
        node.restart();
    }
    cluster.nodes[0].opening = true;
    (cluster.nodes[0].capacity_bytes, cluster.nodes[3].capacity_bytes) = (300, 250);
    steps_without_moves(&mut cluster, 100).await;
    (cluster.nodes[0].opening, cluster.nodes[0].capacity_bytes) = (false, 1000);
    steps_without_moves(&mut cluster, 100).await;
    assert!(is_whole(&cluster.routing()));
}

#[tokio::test]
async fn a_new_node_gets_replicas_once_its_capacity_is_known() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    cluster.nodes[3].capacity_bytes = 0;
    steps_without_moves(&mut cluster, 100).await;
    assert_eq!(cluster.routing().nodes.len(), 4);
    assert_eq!((replicas(&cluster, 4), cluster.routing().chains.len()), (0, 6));
    // It can take no drained replica either.
    let drained = Some(vec![NodeId(1)]);
    let plan = cluster.manager.rebalance(false, drained, cluster.now).await.unwrap();
    assert_eq!((plan.moves.len(), plan.stuck), (0, 6));
    cluster.nodes[3].capacity_bytes = 250;
    settle(&mut cluster).await;
    assert!((1..=2).contains(&replicas(&cluster, 4)));
}

#[tokio::test]
async fn the_capacity_of_a_dead_node_is_known_to_a_successor() {
    let mut cluster = unequal().await;
    cluster.nodes[3].dead = true;
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.nodes.push(FakeNode::new(5));
    for _ in 0..400 {
        cluster.step().await;
    }
    assert!(replicas(&cluster, 5) > 4, "{:?}", cluster.routing());
    assert!((1..=2).contains(&replicas(&cluster, 4)));
}

#[tokio::test]
async fn a_changed_capacity_moves_replicas() {
    let mut cluster = unequal().await;
    cluster.nodes[3].capacity_bytes = 1000;
    settle(&mut cluster).await;
    assert!(replicas(&cluster, 4) >= 5);
}
