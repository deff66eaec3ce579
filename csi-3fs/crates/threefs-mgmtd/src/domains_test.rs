//! Failure domains in the manager, with fake storage nodes.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::ids::NodeId;
use threefs_core::location::Level;

use super::tests::{Cluster, FakeNode, TIMERS, is_whole};
use threefs_core::location::Location;

use super::*;

fn located(id: u32, location: &str) -> FakeNode {
    let location = Location::try_from(location.to_owned()).unwrap();
    let mut node = FakeNode::new(id);
    node.location = Some(location);
    node
}

/// Two nodes in each of three zones.
async fn three_zones() -> Cluster {
    let bootstrap = Bootstrap { nodes: 6, replicas: 3, chains_per_node: 2 };
    let mut cluster = Cluster::new();
    cluster.manager = Manager::new(cluster.store.clone(), 1, "m1", bootstrap, TIMERS);
    cluster.nodes = (1..=6).map(|id| located(id, &format!("z{}//h{id}", id % 3))).collect();
    cluster.steps_until("whole", is_whole).await;
    cluster
}

/// The largest number of replicas of a chain in one zone, not counting those that are replaced.
fn replicas_in_a_zone(routing: &RoutingInfo) -> usize {
    let in_chain = |chain: &Chain| {
        let source = routing.moves.get(&chain.id).map(|this| this.source);
        let stays = chain.targets.iter().filter(|place| Some(place.target) != source);
        let mut zones: Vec<&str> =
            stays.map(|place| routing.nodes[&place.node].location.part(Level::Zone)).collect();
        zones.sort_unstable();
        zones.chunk_by(|one, other| one == other).map(<[&str]>::len).max().unwrap_or(0)
    };
    routing.chains.values().map(in_chain).max().unwrap_or(0)
}

#[tokio::test]
async fn replicas_are_in_different_zones_from_the_start() {
    let mut cluster = three_zones().await;
    assert_eq!(replicas_in_a_zone(&cluster.routing()), 1);
    let report = cluster.manager.domains(cluster.now).await.unwrap();
    assert_eq!((report.level, report.violations_total), (Some(Level::Zone), 0));
    assert!(report.failover_share <= 1.3, "{report:?}");
    // A drained node is replaced within its zone.
    cluster.manager.rebalance(true, Some(vec![NodeId(1)]), cluster.now).await.unwrap();
    for _ in 0..400 {
        cluster.step().await;
        assert_eq!(replicas_in_a_zone(&cluster.routing()), 1);
    }
    let routing = cluster.routing();
    assert_eq!(routing.targets_of_node(NodeId(1)).count(), 0);
    assert!(routing.moves.is_empty() && is_whole(&routing));
}

#[tokio::test]
async fn a_location_is_stored_and_a_change_moves_replicas() {
    let mut cluster = three_zones().await;
    let location = |cluster: &Cluster| cluster.routing().nodes[&NodeId(1)].location.to_string();
    assert_eq!(location(&cluster), "z1//h1");
    // A service of an older version does not send one; the stored one stays.
    cluster.nodes[0].location = None;
    cluster.nodes[0].restart();
    cluster.steps_until("whole again", is_whole).await;
    assert_eq!(location(&cluster), "z1//h1");
    cluster.manager =
        Manager::new(cluster.store.clone(), 2, "m2", cluster.manager.bootstrap, TIMERS);
    cluster.steps_until("another manager leads", is_whole).await;
    assert_eq!(location(&cluster), "z1//h1");
    // Node 1 is carried to another zone: its chains have two replicas there, until some move.
    cluster.nodes[0].location = Some(Location::try_from("z2//h1".to_owned()).unwrap());
    cluster.steps_until("two replicas in a zone", |it| replicas_in_a_zone(it) == 2).await;
    let report = cluster.manager.domains(cluster.now).await.unwrap();
    assert!(report.violations_total > 0, "{report:?}");
    for _ in 0..400 {
        cluster.step().await;
    }
    let routing = cluster.routing();
    assert_eq!(replicas_in_a_zone(&routing), 1);
    assert!(routing.moves.is_empty() && is_whole(&routing));
}

/// Nodes join, drain, fail and return, in random order. No step leaves a chain with more replicas in
/// a domain than before, unless the rule itself has changed; in the end no chain violates it.
#[tokio::test]
async fn random_changes_of_the_cluster_never_violate_the_rule() {
    for seed in 0..12 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut cluster = three_zones().await;
        let mut leaving: Vec<NodeId> = Vec::new();
        for _ in 0..6 {
            let count = cluster.nodes.len() as u32;
            match rng.random_range(0..3) {
                0 if count < 12 => {
                    let zone = rng.random_range(0..3);
                    let id = count + 1;
                    cluster.nodes.push(located(id, &format!("z{zone}//h{id}")));
                }
                1 => {
                    let node = NodeId(rng.random_range(1..=count));
                    let mut next = leaving.clone();
                    next.push(node);
                    if cluster
                        .manager
                        .rebalance(true, Some(next.clone()), cluster.now)
                        .await
                        .is_ok()
                    {
                        leaving = next;
                    }
                }
                _ => {
                    let node = rng.random_range(0..count as usize);
                    cluster.nodes[node].dead = !cluster.nodes[node].dead;
                }
            }
            let mut before = None;
            for _ in 0..30 {
                cluster.step().await;
                let Ok(report) = cluster.manager.domains(cluster.now).await else { continue };
                let now = (report.level, report.reasons.clone());
                if let Some((rule, violations)) = &before
                    && *rule == now
                {
                    assert!(report.violations_total <= *violations, "seed {seed}: {report:?}");
                }
                before = Some((now, report.violations_total));
            }
        }
        cluster.nodes.iter_mut().for_each(|node| node.dead = false);
        let mut report = None;
        for _ in 0..3000 {
            cluster.step().await;
            let routing = cluster.routing();
            let drained = |node: &NodeId| routing.targets_of_node(*node).count() == 0;
            if routing.moves.is_empty() && is_whole(&routing) && leaving.iter().all(drained) {
                report = cluster.manager.domains(cluster.now).await.ok();
                if report.as_ref().is_some_and(|report| report.violations_total == 0) {
                    break;
                }
            }
        }
        let report = report.unwrap_or_else(|| panic!("seed {seed}: {:?}", cluster.routing()));
        assert_eq!(report.violations_total, 0, "seed {seed}: {report:?}");
    }
}
