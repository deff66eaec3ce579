//! Fences: stored, sent with heartbeats, and confirmed.

use threefs_core::fence::VolumeFence;
use threefs_core::ids::{Epoch, InodeId};
use threefs_core::shown::ShownEpochs;

use super::*;
use crate::protocol::MgmtdReply;

const VOLUME: InodeId = InodeId(40);

fn fence(number: u32, count: u32) -> VolumeFence {
    let shown = ShownEpochs { volume: number, below: count, counts: (0..count).collect() };
    VolumeFence { volume: VOLUME, epoch: Epoch::new(number, count), shown }
}

impl Cluster {
    /// Whole, with an mgmtd that is the only one that has given leases.
    async fn ready() -> Self {
        let mut cluster = Self::whole().await;
        for _ in 0..30 {
            cluster.step().await;
        }
        cluster
    }

    async fn raise(&self, fence: &VolumeFence) -> Result<FencesVersion, MgmtdError> {
        self.manager.raise_fence(fence, self.now).await
    }

    async fn waits_for(&self, version: FencesVersion) -> Option<String> {
        self.manager.fences_wait_for(version, self.now).await.unwrap()
    }

    /// The version that the lease of a node requires.
    async fn required(&mut self, node: usize) -> FencesVersion {
        let report = self.nodes[node].report();
        match self.manager.fenced_heartbeat(report, self.now).await.unwrap() {
            MgmtdReply::FencedHeartbeat(_, version) => version,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_fence_is_stored_once_and_never_lowered() {
    let mut cluster = Cluster::ready().await;
    assert_eq!(cluster.required(0).await, FencesVersion(0));
    let first = cluster.raise(&fence(3, 1)).await.unwrap();
    assert_eq!(cluster.raise(&fence(3, 1)).await.unwrap(), first);
    let second = cluster.raise(&fence(3, 4)).await.unwrap();
    assert!(second > first);
    assert_eq!(cluster.raise(&fence(3, 2)).await.unwrap(), second);
    assert_eq!(cluster.required(0).await, second);
    let stored = cluster.manager.fences_after(first, cluster.now).await.unwrap().unwrap();
    assert_eq!((stored.version, stored.volumes), (second, vec![fence(3, 4)]));
    assert_eq!(cluster.manager.fences_after(second, cluster.now).await.unwrap(), None);
    // Another mgmtd takes over.
    let other = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    for _ in 0..100 {
        cluster.now = cluster.now.after(50);
        other.tick(cluster.now).await.unwrap();
    }
    let stored = other.fences_after(FencesVersion(0), cluster.now).await.unwrap().unwrap();
    assert_eq!((stored.version, stored.volumes), (second, vec![fence(3, 4)]));
}

#[tokio::test]
async fn a_number_belongs_to_one_volume() {
    let cluster = Cluster::ready().await;
    cluster.raise(&fence(3, 1)).await.unwrap();
    let other = VolumeFence { volume: InodeId(41), ..fence(3, 1) };
    for invalid in [fence(4, 2), other, fence(0, 1)] {
        let error = cluster.raise(&invalid).await.unwrap_err();
        assert!(matches!(error, MgmtdError::InvalidFence { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_fence_is_confirmed_once_all_live_nodes_know_it_and_all_serving_targets_have_drained() {
    let mut cluster = Cluster::ready().await;
    let version = cluster.raise(&fence(3, 1)).await.unwrap();
    let nothing = FencesVersion(0);
    for (known, drained) in [(nothing, nothing), (version, nothing)] {
        for node in &mut cluster.nodes {
            node.fences = (known, drained);
        }
        cluster.step().await;
        assert!(cluster.waits_for(version).await.is_some());
    }
    for node in 0..3 {
        assert!(cluster.waits_for(version).await.is_some());
        cluster.nodes[node].fences = (version, version);
        cluster.step().await;
    }
    assert_eq!(cluster.waits_for(version).await, None);
}

#[tokio::test]
async fn a_node_that_does_not_confirm_is_waited_for_until_its_lease_has_ended() {
    let mut cluster = Cluster::ready().await;
    cluster.nodes[1].dead = true;
    let died = cluster.now;
    let version = cluster.raise(&fence(3, 1)).await.unwrap();
    for node in [0, 2] {
        cluster.nodes[node].fences = (version, version);
    }
    for _ in 0..40 {
        cluster.step().await;
        // Its targets have left the chains, and the others confirm in the new versions.
        let ended = cluster.now.since(died) > TIMERS.node_lease_ms();
        let left = !serves(&cluster.routing(), 2);
        let confirmed = cluster.waits_for(version).await.is_none();
        assert!(!confirmed || (ended && left));
    }
    assert_eq!(cluster.waits_for(version).await, None);
}

#[tokio::test]
async fn a_confirmation_is_of_one_version_of_the_chain() {
    let mut cluster = Cluster::ready().await;
    let version = cluster.raise(&fence(3, 1)).await.unwrap();
    for node in &mut cluster.nodes {
        node.fences = (version, version);
    }
    cluster.step().await;
    assert_eq!(cluster.waits_for(version).await, None);
    // It leaves: mgmtd changes the chains with its heartbeat, and the others have not seen that yet.
    cluster.nodes[0].opening = true;
    cluster.now = cluster.now.after(50);
    let report = cluster.nodes[0].report();
    cluster.manager.heartbeat_with(report, cluster.now).await.unwrap();
    assert!(!serves(&cluster.routing(), 1));
    assert!(cluster.waits_for(version).await.is_some());
    cluster.step().await;
    cluster.step().await;
    assert_eq!(cluster.waits_for(version).await, None);
}

#[tokio::test]
async fn a_new_primary_waits_for_the_leases_of_the_former_one() {
    let mut cluster = Cluster::ready().await;
    let version = cluster.raise(&fence(3, 1)).await.unwrap();
    for node in &mut cluster.nodes {
        node.fences = (version, version);
    }
    cluster.step().await;
    assert_eq!(cluster.waits_for(version).await, None);
    cluster.manager = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    let mut primary_since = None;
    for _ in 0..200 {
        cluster.step().await;
        match cluster.manager.fences_wait_for(version, cluster.now).await {
            Err(_) => {}
            Ok(Some(_)) => drop(primary_since.get_or_insert(cluster.now)),
            Ok(None) => break,
        }
    }
    let since = primary_since.expect("it did not wait");
    assert!(cluster.now.since(since) >= TIMERS.node_failure_ms);
    assert_eq!(cluster.waits_for(version).await, None);
}

#[tokio::test]
async fn fences_that_a_node_knows_show_that_the_store_is_an_old_copy() {
    let mut cluster = Cluster::ready().await;
    let era = cluster.routing().version.era();
    cluster.nodes[0].fences = (FencesVersion(7), FencesVersion(7));
    cluster.step().await;
    cluster.steps_until("a new era", |routing| routing.version.era() > era).await;
    cluster.steps_until("whole", is_whole).await;
    for _ in 0..30 {
        cluster.step().await;
    }
    let era = cluster.routing().version.era();
    cluster.manager.publish_fences(era, &[], true, cluster.now).await.unwrap();
    let version = cluster.raise(&fence(3, 1)).await.unwrap();
    assert!(version > FencesVersion(7));
    let stored = cluster.manager.fences_after(FencesVersion(7), cluster.now).await.unwrap();
    assert_eq!(stored.unwrap().volumes, [fence(3, 1)]);
}
