//! Growth and rebalancing of the manager, with fake storage nodes.

use std::collections::{BTreeMap, BTreeSet};

use super::tests::{BOOTSTRAP, Cluster, FakeNode, TIMERS, is_whole, states_of};
use super::*;
use threefs_core::ids::{ChainId, NodeId};
use threefs_core::routing::PublicState;

/// Number of targets on each node.
fn loads(routing: &RoutingInfo) -> BTreeMap<u32, usize> {
    let count = |node: &NodeId| routing.targets_of_node(*node).count();
    routing.nodes.keys().map(|node| (node.0, count(node))).collect()
}

fn balanced(routing: &RoutingInfo) -> bool {
    let loads = loads(routing);
    let (most, least) = (loads.values().max().unwrap(), loads.values().min().unwrap());
    routing.moves.is_empty() && is_whole(routing) && most - least <= 1
}

/// Invariants of every published routing.
fn check(routing: &RoutingInfo) {
    assert!(routing.moves.len() <= 2, "too many moves at once: {:?}", routing.moves);
    for chain in routing.chains.values() {
        let mut nodes: Vec<NodeId> = chain.targets.iter().map(|place| place.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        assert_eq!(nodes.len(), chain.targets.len(), "two replicas on one node: {chain:?}");
        assert!(chain.targets.iter().all(|place| !routing.retired.contains(&place.target)));
    }
}

async fn steps_until(
    cluster: &mut Cluster,
    goal_name: &str,
    serving_min: usize,
    goal: impl Fn(&RoutingInfo) -> bool,
) {
    let mut whole = BTreeSet::new();
    for _ in 0..2000 {
        let routing = cluster.routing();
        check(&routing);
        for chain in routing.chains.values() {
            let serving = chain.serving().count();
            if serving >= 3 {
                whole.insert(chain.id);
            }
            let enough = serving >= serving_min || !whole.contains(&chain.id);
            assert!(enough, "{} has {serving} replicas that serve", chain.id);
        }
        if goal(&routing) {
            return;
        }
        cluster.step().await;
    }
    let routing = cluster.routing();
    let (loads, moves, chains) = (loads(&routing), &routing.moves, &routing.chains);
    panic!("never: {goal_name}; {loads:?} {moves:?} {chains:?}");
}

#[tokio::test]
async fn new_nodes_get_an_equal_share_and_no_chain_loses_a_replica() {
    let mut cluster = Cluster::whole().await;
    let before = cluster.routing();
    for id in 4..=5 {
        cluster.nodes.push(FakeNode::new(id));
        steps_until(&mut cluster, "the node is known", 3, |it| it.nodes.len() == id as usize).await;
        steps_until(&mut cluster, "balance", 3, |it| {
            let chains = it.newest_table(crate::FIRST_TABLE).unwrap().chains.len();
            chains == 2 * id as usize && balanced(it)
        })
        .await;
    }
    let after = cluster.routing();
    assert_eq!(loads(&after).values().copied().collect::<Vec<_>>(), [6, 6, 6, 6, 6]);
    // Old files keep their version of the table and find their chains in it.
    let table = before.newest_table(crate::FIRST_TABLE).unwrap();
    assert_eq!(after.table(table.id, table.version), Some(table));
    assert!(table.chains.iter().all(|id| after.chains.contains_key(id)));
    assert_eq!(after.newest_table(table.id).unwrap().chains.len(), 10);
    // No other change follows.
    for _ in 0..20 {
        cluster.step().await;
    }
    assert_eq!(cluster.routing().version, after.version);
}

#[tokio::test]
async fn a_successor_of_the_manager_continues_the_moves() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "a move starts", 3, |it| !it.moves.is_empty()).await;
    let manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.manager = manager;
    // Liveness is known only after the new manager has acquired the lease.
    cluster.steps_until("it leads", |it| !it.chains.is_empty()).await;
    steps_until(&mut cluster, "balance", 3, balanced).await;
    assert!(!cluster.routing().retired.is_empty());
}

#[tokio::test]
async fn a_node_that_dies_while_it_is_filled_delays_only_its_moves() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "a move starts", 3, |it| !it.moves.is_empty()).await;
    cluster.nodes[3].dead = true;
    for _ in 0..60 {
        cluster.step().await;
        check(&cluster.routing());
    }
    // Chains added for it have no files yet: they are in no table.
    let routing = cluster.routing();
    let chain_ids = &routing.newest_table(crate::FIRST_TABLE).unwrap().chains;
    assert!(chain_ids.iter().all(|id| routing.chains[id].serving().count() >= 2));
    cluster.nodes[3].dead = false;
    steps_until(&mut cluster, "balance", 2, balanced).await;
}

#[tokio::test]
async fn a_lost_node_does_not_delay_moves_once_it_is_draining() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "new files use it, and a move is under way", 3, |it| {
        it.newest_table(crate::FIRST_TABLE).unwrap().chains.len() == 8 && !it.moves.is_empty()
    })
    .await;
    cluster.nodes[3].dead = true;
    for _ in 0..60 {
        cluster.step().await;
    }
    let stuck = cluster.routing().moves.clone();
    assert!(!stuck.is_empty());
    cluster.manager.rebalance(true, Some(vec![NodeId(4)]), cluster.now).await.unwrap();
    steps_until(&mut cluster, "the others hold everything", 2, |it| {
        states_of(it, 4).is_empty() && it.moves.is_empty() && is_whole(it)
    })
    .await;
    let retired = &cluster.routing().retired;
    assert!(stuck.values().all(|this| retired.contains(&this.destination)));
}

/// The node of a chain that was just added dies before the chain has started: no other node can start it.
#[tokio::test]
async fn a_node_that_dies_before_its_chains_start_does_not_delay_others() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "chains are added", 0, |it| it.chains.len() == 8).await;
    cluster.nodes[3].dead = true;
    let has_head = |it: &RoutingInfo, id: &ChainId| it.chains[id].head().is_some();
    let waits: Vec<ChainId> = {
        let routing = cluster.routing();
        let first = |id: &ChainId| routing.chains[id].targets[0].node;
        let waits = |id: &ChainId| !has_head(&routing, id) && first(id) == NodeId(4);
        routing.chains.keys().copied().filter(waits).collect()
    };
    assert!(!waits.is_empty(), "the added node must start them");
    cluster.nodes.push(FakeNode::new(5));
    steps_until(&mut cluster, "new files use chains of the next node", 0, |it| {
        it.newest_table(crate::FIRST_TABLE).unwrap().chains.len() > 6
    })
    .await;
    let routing = cluster.routing();
    let table = routing.newest_table(crate::FIRST_TABLE).unwrap();
    assert!(waits.iter().all(|id| !table.chains.contains(id)));
    assert!(table.chains.iter().all(|id| has_head(&routing, id)));
    // Node 4 will not return: its chains and moves are dropped, so that others proceed.
    cluster.manager.rebalance(true, Some(vec![NodeId(4)]), cluster.now).await.unwrap();
    steps_until(&mut cluster, "all of the others' chains are used", 0, |it| {
        let table = it.newest_table(crate::FIRST_TABLE).unwrap();
        states_of(it, 4).is_empty() && is_whole(it) && table.chains.len() == 8
    })
    .await;
}

#[tokio::test]
async fn a_move_to_a_full_disk_is_cancelled_and_not_restarted_at_once() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    cluster.nodes[3].full = true;
    let mut destinations = BTreeSet::new();
    for _ in 0..400 {
        cluster.step().await;
        let routing = cluster.routing();
        check(&routing);
        destinations.extend(routing.moves.values().map(|this| this.destination));
    }
    let routing = cluster.routing();
    assert!(!destinations.is_empty() && routing.moves.is_empty());
    assert!(destinations.iter().all(|target| routing.retired.contains(target)));
    assert!(destinations.len() <= 2, "what was under way, no more: {destinations:?}");
    assert!(routing.newest_table(crate::FIRST_TABLE).unwrap().chains.len() >= 6);
    // There is space again: after a while the move is retried.
    cluster.nodes[3].full = false;
    cluster.now = cluster.now.after(600_000);
    steps_until(&mut cluster, "balance", 2, balanced).await;
}

#[tokio::test]
async fn a_node_with_little_space_gets_no_more_targets() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes[0].used_bytes = 10;
    let before = states_of(&cluster.routing(), 1).len();
    for id in 4..=5 {
        cluster.nodes.push(FakeNode::new(id));
    }
    steps_until(&mut cluster, "chains for the others", 3, |it| {
        it.newest_table(crate::FIRST_TABLE).unwrap().chains.len() == 10 && it.moves.is_empty()
    })
    .await;
    for _ in 0..60 {
        cluster.step().await;
        assert!(states_of(&cluster.routing(), 1).len() <= before);
    }
}

#[tokio::test]
async fn with_manual_rebalancing_targets_move_only_on_request() {
    let mut cluster = Cluster::whole().await;
    let manager = Manager::new(cluster.store.clone(), 1, "m1", BOOTSTRAP, TIMERS).on_demand();
    cluster.manager = manager;
    cluster.steps_until("it leads", |it| !it.chains.is_empty()).await;
    cluster.nodes.push(FakeNode::new(4));
    cluster.steps_until("the node is known", |it| it.nodes.len() == 4).await;
    for _ in 0..40 {
        cluster.step().await;
    }
    assert!(states_of(&cluster.routing(), 4).is_empty());
    let plan = cluster.manager.rebalance(false, None, cluster.now).await.unwrap();
    assert_eq!((plan.automatic, plan.new_chains), (false, 2));
    assert!(!plan.moves.is_empty());
    assert!(states_of(&cluster.routing(), 4).is_empty());
    cluster.manager.rebalance(true, None, cluster.now).await.unwrap();
    steps_until(&mut cluster, "balance", 3, |it| it.chains.len() == 8 && balanced(it)).await;
    let plan = cluster.manager.rebalance(false, None, cluster.now).await.unwrap();
    assert!(plan.moves.is_empty() && plan.under_way.is_empty() && plan.new_chains == 0);
}

#[tokio::test]
async fn a_drain_moves_only_its_replicas_if_rebalancing_is_manual() {
    let mut cluster = Cluster::whole().await;
    let manager = Manager::new(cluster.store.clone(), 1, "m1", BOOTSTRAP, TIMERS).on_demand();
    cluster.manager = manager;
    cluster.nodes.extend([4, 5].map(FakeNode::new));
    cluster.steps_until("the nodes are known", |it| it.nodes.len() == 5).await;
    let before = cluster.routing();
    cluster.manager.rebalance(true, Some(vec![NodeId(1)]), cluster.now).await.unwrap();
    let is_empty = |it: &RoutingInfo| states_of(it, 1).is_empty() && it.moves.is_empty();
    steps_until(&mut cluster, "node 1 is empty", 3, is_empty).await;
    for _ in 0..40 {
        cluster.step().await;
    }
    let after = cluster.routing();
    assert_eq!(after.chains.len(), before.chains.len(), "no chains are added");
    assert_eq!((loads(&after)[&2], loads(&after)[&3]), (6, 6), "the others keep theirs");
    assert_eq!(after.retired.len(), 6);
    // A cancelled drain does not start moves either.
    cluster.manager.rebalance(true, Some(Vec::new()), cluster.now).await.unwrap();
    for _ in 0..40 {
        cluster.step().await;
    }
    assert_eq!(cluster.routing().version, after.version);
}

/// Also if nothing has to move, so that the request ends while the chains are being started.
#[tokio::test]
async fn new_files_use_the_chains_of_a_manual_request() {
    let mut cluster = Cluster::whole().await;
    let manager = Manager::new(cluster.store.clone(), 1, "m1", BOOTSTRAP, TIMERS).on_demand();
    cluster.manager = manager;
    cluster.nodes.extend([4, 5, 6].map(FakeNode::new));
    cluster.steps_until("the nodes are known", |it| it.nodes.len() == 6).await;
    cluster.manager.rebalance(true, None, cluster.now).await.unwrap();
    steps_until(&mut cluster, "new files use 12 chains", 3, |it| {
        it.newest_table(crate::FIRST_TABLE).unwrap().chains.len() == 12
    })
    .await;
}

#[tokio::test]
async fn a_drained_node_becomes_empty() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "balance", 3, |it| it.chains.len() == 8 && balanced(it)).await;
    let result = cluster.manager.rebalance(true, Some(vec![NodeId(9)]), cluster.now).await;
    assert_eq!(result.unwrap_err(), MgmtdError::UnknownNode { node: NodeId(9) });
    let too_many = Some(vec![NodeId(1), NodeId(2)]);
    let result = cluster.manager.rebalance(true, too_many, cluster.now).await;
    assert_eq!(result.unwrap_err(), MgmtdError::TooFewNodes { staying: 2, replicas: 3 });
    cluster.manager.rebalance(true, Some(vec![NodeId(1)]), cluster.now).await.unwrap();
    steps_until(&mut cluster, "node 1 is empty", 3, |it| {
        states_of(it, 1).is_empty() && it.moves.is_empty()
    })
    .await;
    // From now on its permanent loss is harmless.
    cluster.nodes[0].dead = true;
    steps_until(&mut cluster, "whole without it", 3, is_whole).await;
}

#[tokio::test]
async fn a_drain_is_shown_and_cancelled_after_another_node_has_failed() {
    let mut cluster = Cluster::whole().await;
    cluster.nodes.push(FakeNode::new(4));
    steps_until(&mut cluster, "balance", 3, |it| it.chains.len() == 8 && balanced(it)).await;
    let drained = vec![NodeId(1)];
    cluster.manager.rebalance(true, Some(drained.clone()), cluster.now).await.unwrap();
    cluster.nodes[1].dead = true;
    cluster.steps_until("it is dead", |it| !states_of(it, 2).contains(&PublicState::Serving)).await;
    let plan = cluster.manager.rebalance(false, None, cluster.now).await.unwrap();
    assert_eq!(plan.leaving, drained);
    let more = Some(vec![NodeId(1), NodeId(3)]);
    let result = cluster.manager.rebalance(true, more, cluster.now).await;
    assert_eq!(result.unwrap_err(), MgmtdError::TooFewNodes { staying: 1, replicas: 3 });
    let plan = cluster.manager.rebalance(true, Some(Vec::new()), cluster.now).await.unwrap();
    assert_eq!(plan.leaving, []);
}

#[tokio::test]
async fn targets_that_cannot_move_are_reported_and_move_when_there_is_space() {
    let mut cluster = Cluster::whole().await;
    let manager = Manager::new(cluster.store.clone(), 1, "m1", BOOTSTRAP, TIMERS).on_demand();
    cluster.manager = manager;
    cluster.nodes.push(FakeNode::new(4));
    cluster.steps_until("the node is known", |it| it.nodes.len() == 4).await;
    cluster.manager.rebalance(true, None, cluster.now).await.unwrap();
    steps_until(&mut cluster, "balance", 3, |it| it.chains.len() == 8 && balanced(it)).await;
    cluster.nodes.iter_mut().for_each(|node| node.used_bytes = 10);
    for _ in 0..10 {
        cluster.step().await;
    }
    let targets = loads(&cluster.routing())[&1];
    let leaving = Some(vec![NodeId(1)]);
    let plan = cluster.manager.rebalance(true, leaving, cluster.now).await.unwrap();
    assert_eq!((plan.stuck as usize, plan.moves.len()), (targets, 0), "all are full: {plan:?}");
    for _ in 0..40 {
        cluster.step().await;
    }
    assert_eq!(loads(&cluster.routing())[&1], targets);
    // Space becomes available: the request is completed without repeating it.
    cluster.nodes.iter_mut().for_each(|node| node.used_bytes = 1);
    let is_drained =
        |it: &RoutingInfo| it.targets_of_node(NodeId(1)).count() == 0 && it.moves.is_empty();
    steps_until(&mut cluster, "node 1 is empty", 3, is_drained).await;
}

#[tokio::test]
async fn moves_keep_to_their_rate_and_copies_that_restore_a_replica_do_not() {
    let mut cluster = Cluster::whole().await;
    // Each target holds 12 to 16 bytes: one move in 3 to 4 s.
    cluster.manager.move_rate(Some(4), cluster.now).await.unwrap();
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    cluster.steps_until("another manager leads", is_whole).await;
    assert_eq!(cluster.manager.move_rate(None, cluster.now).await, Ok(4));
    cluster.nodes.push(FakeNode::new(4));
    let mut starts: BTreeMap<threefs_core::ids::TargetId, Millis> = BTreeMap::new();
    for _ in 0..600 {
        cluster.step().await;
        let now = cluster.now;
        for this in cluster.routing().moves.values() {
            starts.entry(this.destination).or_insert(now);
        }
    }
    assert!(balanced(&cluster.routing()), "{starts:?}");
    let mut times: Vec<Millis> = starts.into_values().collect();
    times.sort_unstable();
    assert!(times.len() >= 3, "{times:?}");
    assert!(times.windows(2).all(|pair| pair[1].since(pair[0]) >= 3_000), "{times:?}");
    // The lost replicas of a dead node are not delayed.
    cluster.nodes[0].dead = true;
    let replicas = cluster.routing().targets_of_node(NodeId(1)).count() as u64;
    cluster.steps_until("it is dead", |it| !states_of(it, 1).contains(&PublicState::Serving)).await;
    let since = cluster.now;
    cluster.manager.rebalance(true, Some(vec![NodeId(1)]), cluster.now).await.unwrap();
    steps_until(&mut cluster, "node 1 is empty", 2, |it| states_of(it, 1).is_empty()).await;
    assert!(cluster.now.since(since) < replicas * 2_000, "{} ms", cluster.now.since(since));
}
