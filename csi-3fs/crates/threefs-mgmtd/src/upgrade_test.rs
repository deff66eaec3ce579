//! The first snapshot, and restores: services of earlier releases, and leases without fences.

use threefs_core::fence::VolumeFence;
use threefs_core::heartbeat::SeenRouting;
use threefs_core::ids::{Epoch, FencesVersion, InodeId, RoutingVersion, TreeId};
use threefs_core::shown::ShownEpochs;

use super::tests::{BOOTSTRAP, Cluster, TIMERS};
use super::*;
use crate::ops::MarkRestored;
use crate::protocol::{Claim, MetaRegistration, MgmtdReply};
use crate::view::Report;

fn fence(volume: u64, number: u32, count: u32) -> VolumeFence {
    let shown = ShownEpochs { volume: number, below: count, counts: (0..count).collect() };
    VolumeFence { volume: InodeId(volume), epoch: Epoch::new(number, count), shown }
}

impl Cluster {
    /// Whole, with an mgmtd that is the only one that has given leases.
    async fn quiet() -> Self {
        let mut cluster = Self::whole().await;
        for _ in 0..30 {
            cluster.step().await;
        }
        cluster
    }

    fn report_of_earlier_release(&mut self, node: usize) -> Report {
        Report { fences: None, ..self.nodes[node].report() }
    }

    /// The version that the lease of a node requires.
    async fn lease_needs(&mut self, node: usize) -> FencesVersion {
        let report = self.nodes[node].report();
        match self.manager.fenced_heartbeat(report, self.now).await.unwrap() {
            MgmtdReply::FencedHeartbeat(_, version) => version,
            other => panic!("{other:?}"),
        }
    }

    async fn another_primary(&mut self) {
        self.manager = Manager::new(self.store.clone(), 9, "m9", BOOTSTRAP, TIMERS);
        // It takes over, and the leases of the former one end.
        for _ in 0..(2 * TIMERS.settles_ms() / 50) {
            self.now = self.now.after(50);
            self.manager.tick(self.now).await.unwrap();
        }
    }

    async fn restore(&mut self) {
        let mark = MarkRestored { seen: RoutingVersion(0), fence: None };
        self.store.transact(deadline(), &mark).await.unwrap();
        self.another_primary().await;
    }

    async fn publish(&self, fences: &[VolumeFence], is_last: bool) -> Result<(), MgmtdError> {
        let era = self.routing().version.era();
        self.manager.publish_fences(era, fences, is_last, self.now).await
    }
}

fn registration() -> MetaRegistration {
    let (tree, claim) = (TreeId(5), Claim::Continues);
    MetaRegistration { tree, generation: 1, process: 1, cluster: None, claim }
}

#[tokio::test]
async fn a_storage_service_of_an_earlier_release_prevents_the_first_snapshot_and_is_named() {
    let mut cluster = Cluster::quiet().await;
    let report = cluster.report_of_earlier_release(1);
    cluster.manager.heartbeat_with(report, cluster.now).await.unwrap();
    let refused = [
        cluster.manager.enable_snapshots(cluster.now).await,
        cluster.manager.raise_fence(&fence(40, 3, 1), cluster.now).await.map(drop),
    ];
    for refusal in refused {
        let refusal = refusal.unwrap_err().to_string();
        assert!(refusal.contains("node-2 at 127.0.0.1:9002"), "{refusal}");
        assert!(refusal.ends_with("upgrade it"), "{refusal}");
    }
    assert!(cluster.manager.fences_after(FencesVersion(0), cluster.now).await.unwrap().is_none());
    // Upgraded.
    cluster.step().await;
    cluster.manager.enable_snapshots(cluster.now).await.unwrap();
}

#[tokio::test]
async fn a_new_primary_enables_snapshots_only_once_it_knows_all_live_nodes() {
    let mut cluster = Cluster::quiet().await;
    cluster.another_primary().await;
    cluster.manager = Manager::new(cluster.store.clone(), 10, "m10", BOOTSTRAP, TIMERS);
    while cluster.manager.routing(cluster.now).await.is_err() {
        cluster.now = cluster.now.after(50);
        cluster.manager.tick(cluster.now).await.unwrap();
    }
    let early = cluster.manager.enable_snapshots(cluster.now).await;
    assert!(matches!(early, Err(MgmtdError::Starting { .. })), "{early:?}");
    for _ in 0..=TIMERS.settles_ms() / 50 {
        cluster.step().await;
    }
    cluster.manager.enable_snapshots(cluster.now).await.unwrap();
}

#[tokio::test]
async fn services_of_earlier_releases_are_refused_from_then_on() {
    let mut cluster = Cluster::quiet().await;
    let register = |knows| {
        let (manager, now) = (&cluster.manager, cluster.now);
        async move { manager.register_meta(&registration(), knows, now).await.map(drop) }
    };
    register(false).await.unwrap();
    cluster.manager.enable_snapshots(cluster.now).await.unwrap();
    for _ in 0..2 {
        let report = cluster.report_of_earlier_release(1);
        let refused = cluster.manager.heartbeat_with(report, cluster.now).await;
        assert!(matches!(refused, Err(MgmtdError::Outdated { .. })), "{refused:?}");
        let refused = cluster.manager.register_meta(&registration(), false, cluster.now).await;
        assert!(matches!(refused, Err(MgmtdError::Outdated { .. })), "{refused:?}");
        cluster.manager.register_meta(&registration(), true, cluster.now).await.unwrap();
        // The next primary refuses them as well.
        cluster.another_primary().await;
    }
}

/// Earlier releases read each row of this prefix as the capacity of a node.
#[tokio::test]
async fn an_earlier_mgmtd_cannot_read_the_store_of_a_cluster_with_snapshots() {
    let node_of = |key: &[u8]| <[u8; 4]>::try_from(&key[crate::rows::CAPACITIES.len()..]).is_ok();
    assert!(crate::rows::SNAPSHOTS.starts_with(crate::rows::CAPACITIES));
    assert!(!node_of(crate::rows::SNAPSHOTS));
    assert!(node_of(&crate::rows::capacity(threefs_core::ids::NodeId(7))));
}

#[tokio::test]
async fn after_a_restore_no_lease_counts_until_all_fences_are_published() {
    let mut cluster = Cluster::quiet().await;
    let first = cluster.manager.raise_fence(&fence(40, 3, 1), cluster.now).await.unwrap();
    assert_eq!(cluster.lease_needs(0).await, first);
    // A restart alone needs nothing.
    cluster.another_primary().await;
    assert_eq!(cluster.lease_needs(0).await, first);
    cluster.restore().await;
    for _ in 0..40 {
        cluster.step().await;
        assert_eq!(cluster.lease_needs(0).await, FencesVersion(u64::MAX));
    }
    let early = cluster.manager.raise_fence(&fence(40, 3, 5), cluster.now).await;
    assert!(matches!(early, Err(MgmtdError::Starting { .. })), "{early:?}");
    let old = cluster.manager.publish_fences(0, &[], true, cluster.now).await;
    assert_eq!(old, Err(MgmtdError::OtherEra { era: 0, newest: 1 }));
    cluster.publish(&[fence(40, 3, 4)], false).await.unwrap();
    assert_eq!(cluster.lease_needs(0).await, FencesVersion(u64::MAX));
    // A primary that dies in between.
    cluster.another_primary().await;
    assert_eq!(cluster.lease_needs(0).await, FencesVersion(u64::MAX));
    // A volume whose number is of another one does not delay the others.
    cluster.publish(&[fence(41, 3, 4), fence(42, 4, 1)], true).await.unwrap();
    let required = cluster.lease_needs(0).await;
    let fences = cluster.manager.fences_after(FencesVersion(0), cluster.now).await.unwrap();
    let fences = fences.unwrap();
    assert_eq!(
        (fences.version, fences.volumes),
        (required, vec![fence(40, 3, 4), fence(42, 4, 1)])
    );
    cluster.another_primary().await;
    assert_eq!(cluster.lease_needs(0).await, required);
}

/// The dump was made before the first snapshot: the fences of the publication show it.
#[tokio::test]
async fn a_flag_that_the_dump_does_not_have_is_set_by_the_publication() {
    let mut cluster = Cluster::quiet().await;
    cluster.restore().await;
    for _ in 0..30 {
        cluster.step().await;
    }
    let report = cluster.report_of_earlier_release(1);
    let refused = cluster.manager.heartbeat_with(report, cluster.now).await;
    assert!(matches!(refused, Err(MgmtdError::Outdated { .. })), "{refused:?}");
    cluster.publish(&[fence(40, 3, 4)], true).await.unwrap();
    let report = cluster.report_of_earlier_release(1);
    let refused = cluster.manager.heartbeat_with(report, cluster.now).await;
    assert!(matches!(refused, Err(MgmtdError::Outdated { .. })), "{refused:?}");
}

/// A cluster without snapshots, in the middle of an upgrade.
#[tokio::test]
async fn an_earlier_metadata_service_that_registers_has_nothing_to_publish() {
    let mut cluster = Cluster::quiet().await;
    cluster.restore().await;
    cluster.manager.register_meta(&registration(), false, cluster.now).await.unwrap();
    assert!(cluster.lease_needs(0).await < FencesVersion(u64::MAX));
    let mut report = cluster.report_of_earlier_release(1);
    report.seen = None::<SeenRouting>;
    cluster.manager.heartbeat_with(report, cluster.now).await.unwrap();
}
