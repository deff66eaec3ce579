//! Takeovers between managers over a shared store, with leases of the nodes.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use fabric::BoxFuture;
use threefs_kv::{Backend, Commit, Snapshot, Versionstamp, Watch};

use super::*;

const STEP_MS: u64 = 50;

/// A connection to a shared store that may be cut.
struct Link(Store, Arc<AtomicBool>);

impl Link {
    fn check(&self) -> Result<(), KvError> {
        match self.1.load(SeqCst) {
            true => Err(KvError::DeadlinePassed { attempts: 1, last: "cut off".into() }),
            false => Ok(()),
        }
    }
}

impl Backend for Link {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Box::pin(async {
            self.check()?;
            Backend::snapshot(&self.0).await
        })
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            self.check()?;
            self.0.commit(commit).await
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        None
    }
}

/// A whole cluster, whether its primary is cut off from the store, and a standby.
async fn with_standby() -> (Cluster, Arc<AtomicBool>, Manager) {
    let store = Store::shared_memory();
    let cut = Arc::new(AtomicBool::new(false));
    let of_primary = Store::new(Link(store.clone(), Arc::clone(&cut)));
    let manager = Manager::new(of_primary, 1, "m1", BOOTSTRAP, TIMERS);
    let mut cluster = Cluster { store: store.clone(), manager, ..Cluster::new() };
    cluster.steps_until("whole", is_whole).await;
    let standby = Manager::new(store, 2, "m2", BOOTSTRAP, TIMERS);
    standby.tick(cluster.now).await.unwrap();
    (cluster, cut, standby)
}

async fn leads(manager: &Manager, now: Millis) -> bool {
    manager.status(now).await.is_ok()
}

#[tokio::test]
async fn a_standby_takes_over_while_the_nodes_have_leases_and_changes_no_chain() {
    let (mut cluster, _, standby) = with_standby().await;
    cluster.step().await;
    standby.tick(cluster.now).await.unwrap();
    let (before, killed) = (cluster.routing(), cluster.now);
    cluster.manager = standby;
    while !leads(&cluster.manager, cluster.now).await {
        cluster.step().await;
    }
    let took_ms = cluster.now.since(killed);
    assert!(took_ms <= TIMERS.takeover_ms() + 2 * TIMERS.scan_ms, "{took_ms} ms");
    // A node sends six heartbeats in a lease, and tries again after a quarter of that interval.
    let interval_ms = TIMERS.node_lease_ms() / 6;
    assert!(took_ms + interval_ms + interval_ms / 4 < TIMERS.node_lease_ms(), "{took_ms} ms");
    for _ in 0..200 {
        cluster.step().await;
        assert_eq!(cluster.routing(), before);
    }
}

/// A primary without the store answers until its lease ends. A node that reaches only this one serves
/// as long as it gets leases, so the next primary must keep it in its chains.
#[tokio::test]
async fn the_next_primary_declares_no_node_dead_that_may_have_a_lease_of_the_former_one() {
    let (mut cluster, is_cut, standby) = with_standby().await;
    is_cut.store(true, SeqCst);
    let cut = cluster.now;
    let (mut serves_until, mut answered, mut led) = (cluster.now, 0, false);
    while serves(&standby.published.borrow(), 2) || !led {
        cluster.now = cluster.now.after(STEP_MS);
        let now = cluster.now;
        assert!(now.since(cut) < 60_000, "node 2 is never declared dead");
        cluster.manager.tick(now).await.unwrap();
        standby.tick(now).await.unwrap();
        led |= leads(&standby, now).await;
        for (number, node) in cluster.nodes.iter_mut().enumerate() {
            if number == 1 {
                if let Ok(reply) = cluster.manager.heartbeat_with(node.report(), now).await {
                    serves_until = now.after(reply.lease_ms);
                    answered += u32::from(led);
                }
            } else if standby.heartbeat_with(node.report(), now).await.is_ok() {
                node.learn(&standby.published.borrow());
            }
        }
        if led && !serves(&standby.published.borrow(), 2) {
            assert!(now >= serves_until, "it serves for {} ms more", serves_until.since(now));
        }
    }
    assert!(answered > 20, "the former primary has answered {answered} times");
    assert!(cluster.now.since(cut) <= TIMERS.takeover_ms() + TIMERS.settles_ms() + 500);
}

/// A scan at that moment would take nodes for dead that the new primary has not heard yet.
#[tokio::test]
async fn a_restart_of_a_node_without_targets_changes_no_chain_while_a_primary_starts() {
    let (mut cluster, _, standby) = with_standby().await;
    let mut spare = FakeNode::new(9);
    cluster.manager.heartbeat_with(spare.report(), cluster.now).await.unwrap();
    let before = cluster.routing();
    while !leads(&standby, cluster.now).await {
        cluster.now = cluster.now.after(STEP_MS);
        standby.tick(cluster.now).await.unwrap();
    }
    // Two of the three nodes with targets are heard.
    for node in &mut cluster.nodes[..2] {
        standby.heartbeat_with(node.report(), cluster.now).await.unwrap();
    }
    spare.restart();
    standby.heartbeat_with(spare.report(), cluster.now).await.unwrap();
    assert_eq!(standby.published.borrow().chains, before.chains);
}

/// It resumes with a lease by its clock; its renewal is refused.
#[tokio::test]
async fn a_stopped_primary_steps_down_when_it_resumes() {
    let (mut cluster, _, standby) = with_standby().await;
    let stopped = cluster.now;
    while !leads(&standby, cluster.now).await {
        cluster.now = cluster.now.after(STEP_MS);
        standby.tick(cluster.now).await.unwrap();
    }
    assert!(cluster.now.since(stopped) < TIMERS.primary_lease_ms);
    assert!(leads(&cluster.manager, cluster.now).await, "it may answer");
    cluster.manager.tick(cluster.now).await.unwrap();
    assert!(!leads(&cluster.manager, cluster.now).await);
    assert!(leads(&standby, cluster.now).await);
}

#[tokio::test]
async fn a_released_lease_is_taken_over_at_once() {
    let (mut cluster, _, standby) = with_standby().await;
    // Until its own start is settled.
    for _ in 0..=TIMERS.node_failure_ms / STEP_MS {
        cluster.step().await;
        standby.tick(cluster.now).await.unwrap();
    }
    cluster.manager.release(cluster.now).await;
    assert!(!leads(&cluster.manager, cluster.now).await);
    cluster.now = cluster.now.after(STEP_MS);
    standby.tick(cluster.now).await.unwrap();
    assert!(leads(&standby, cluster.now).await);
    // Its former term granted leases until its release only.
    let before = standby.status(cluster.now).await.unwrap().epoch;
    let released = cluster.now;
    cluster.manager = standby;
    cluster.nodes[1].dead = true;
    cluster.steps_until("node 2 left", |routing| !serves(routing, 2)).await;
    assert!(cluster.now.since(released) <= TIMERS.node_failure_ms + 3 * STEP_MS);
    assert_eq!(cluster.manager.status(cluster.now).await.unwrap().epoch, before);
}

/// The one before the last may still answer, and the next one must wait for its leases.
#[tokio::test]
async fn a_lease_is_not_released_while_a_former_primary_may_answer() {
    let (mut cluster, _, second) = with_standby().await;
    while !leads(&second, cluster.now).await {
        cluster.now = cluster.now.after(STEP_MS);
        second.tick(cluster.now).await.unwrap();
    }
    second.tick(cluster.now).await.unwrap();
    second.release(cluster.now).await;
    let third = Manager::new(cluster.store.clone(), 3, "m3", BOOTSTRAP, TIMERS);
    third.tick(cluster.now).await.unwrap();
    assert!(!leads(&third, cluster.now).await, "it was released");
    cluster.manager = third;
    while !leads(&cluster.manager, cluster.now).await {
        cluster.step().await;
    }
    let (took_over, dead) = (cluster.now, 1);
    cluster.step().await;
    cluster.nodes[dead].dead = true;
    cluster.steps_until("node 2 left", |routing| !serves(routing, 2)).await;
    assert!(cluster.now.since(took_over) >= TIMERS.settles_ms());
}

#[tokio::test]
async fn a_node_that_restarted_during_a_failover_is_admitted_once_the_others_are_heard() {
    let (mut cluster, _, standby) = with_standby().await;
    let killed = cluster.now;
    cluster.manager = standby;
    cluster.nodes[0].restart();
    cluster.steps_until("whole", |routing| !serves(routing, 1)).await;
    cluster.steps_until("whole", is_whole).await;
    assert!(cluster.now.since(killed) < TIMERS.settles_ms());
}

/// A reading of the lease and the takeover may take longer than T, and heartbeats wait meanwhile. The
/// former primary has answered until it released the lease.
#[tokio::test]
async fn a_heartbeat_before_the_first_tick_of_a_term_changes_no_chain() {
    let (mut cluster, _, standby) = with_standby().await;
    let before = cluster.routing();
    // Until its own start is settled.
    for _ in 0..=TIMERS.node_failure_ms / STEP_MS {
        cluster.step().await;
    }
    cluster.manager.release(cluster.now).await;
    standby.tick(cluster.now).await.unwrap();
    let now = cluster.now.after(TIMERS.node_failure_ms);
    assert!(leads(&standby, now).await);
    standby.heartbeat_with(cluster.nodes[0].report(), now).await.unwrap();
    assert_eq!(standby.published.borrow().chains, before.chains);
}
