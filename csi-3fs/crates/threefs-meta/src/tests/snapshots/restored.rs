//! Services of earlier releases at the first snapshot; publication of fences; trees that were restored.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::fence::VolumeFence;
use threefs_core::ids::{Epoch, InodeId};
use threefs_core::shown::ShownEpochs;
use threefs_kv::{KvError, Operation, Store, Transaction};

use super::TestFences;
use crate::ops::{self, OpError};
use crate::protocol::{MetaError, RequestId};
use crate::rows::{self, history as keys};
use crate::tests::fixture::{Fixture, config, soon};
use crate::tests::invariants::check_tree;

async fn fixture() -> (Fixture, Arc<TestFences>) {
    let fences = Arc::new(TestFences::default());
    (Fixture::memory().await.with_fences(Arc::clone(&fences) as Arc<_>), fences)
}

impl Fixture {
    async fn list_fences(&self, limit: usize) -> Vec<VolumeFence> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let list = ops::ListFences { after, limit };
            let (fences, last) = self.tree.store.transact(soon(), &list).await.unwrap();
            all.extend(fences);
            after = last;
            if after.is_none() {
                return all;
            }
        }
    }

    async fn raise(&self, fences: &[VolumeFence]) {
        self.tree.store.transact(soon(), &ops::RaiseEpochs(fences)).await.unwrap();
    }

    async fn shown_names(&self, path: &str) -> Vec<String> {
        self.snapshots(path).await.into_iter().map(|entry| entry.name).collect()
    }
}

fn fence(volume: InodeId, number: u32, count: u32, below: u32, counts: &[u32]) -> VolumeFence {
    let counts: BTreeSet<u32> = counts.iter().copied().collect();
    let shown = ShownEpochs { volume: number, below, counts };
    VolumeFence { volume, epoch: Epoch::new(number, count), shown }
}

/// A service of an earlier release: it has a row, and does not say what it knows.
struct EarlierService(u64);

impl Operation for EarlierService {
    type Output = ();
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), KvError> {
        txn.clear(&rows::knowing(self.0));
        let row = rows::ServiceRow { renewal: 0, checked: 0, departures: 0 };
        rows::write(txn, &rows::service(self.0), &row)
    }
}

#[tokio::test]
async fn a_metadata_service_of_an_earlier_release_prevents_the_first_snapshot() {
    let store = Store::shared_memory();
    let fences = Arc::new(TestFences::default());
    let fixture = Fixture::open(store.clone(), config()).await;
    let fixture = fixture.with_fences(Arc::clone(&fences) as Arc<_>);
    fixture.volume("/v").await;
    store.transact(soon(), &EarlierService(77)).await.unwrap();
    let refused = fixture.snapshot("/v", "s").await.unwrap_err();
    assert!(matches!(refused, MetaError::Unavailable { .. }));
    let refused = refused.to_string();
    assert!(refused.contains("1 of 2 metadata services"), "{refused}");
    assert!(!fences.enabled.load(SeqCst), "nothing was stored at mgmtd");
    // It is gone.
    let remove = ops::RemoveService { run_id: 77, renewal: 0 };
    assert!(store.transact(soon(), &remove).await.unwrap());
    fixture.snapshot("/v", "s").await.unwrap();
    assert!(fences.enabled.load(SeqCst));
}

#[tokio::test]
async fn all_volumes_are_published_with_creations_in_progress() {
    let (fixture, _) = fixture().await;
    let mut expected = Vec::new();
    for (path, snapshots) in [("/a", 1), ("/b", 0), ("/c", 3)] {
        let volume = fixture.volume(path).await;
        for number in 0..snapshots {
            fixture.snapshot(path, &format!("s{number}")).await.unwrap();
        }
        if snapshots > 0 {
            expected.push(volume);
        }
    }
    for limit in [1, 2, 3, 10] {
        let fences = fixture.list_fences(limit).await;
        assert_eq!(fences.iter().map(|it| it.volume).collect::<Vec<_>>(), expected);
        assert_eq!(fences[1], fence(expected[1], 2, 3, 3, &[0, 1, 2]));
        assert!(fences.iter().all(|fence| fence.check().is_ok()));
    }
    // A first snapshot, and another one, whose fences a lost mgmtd has confirmed.
    for path in ["/b", "/c"] {
        let start = ops::StartSnapshot {
            floor: &0.into(),
            caller: &crate::Identity::ROOT,
            at: &crate::protocol::At::path(path),
            name: "late",
            id: RequestId {
                client: threefs_core::ids::ClientId(9),
                sequence: 1,
                finished_below: 0,
            },
            now: crate::protocol::Nanoseconds(1),
            wait_ms: 0,
            enabled: true,
        };
        fixture.tree.store.transact(soon(), &start).await.unwrap();
    }
    let fences = fixture.list_fences(10).await;
    let epochs: Vec<Epoch> = fences.iter().map(|it| it.epoch).collect();
    assert_eq!(epochs, [Epoch::new(1, 1), Epoch::new(3, 1), Epoch::new(2, 4)]);
    assert!(fences.iter().all(|fence| fence.check().is_ok()));
}

/// Since the dump: `/a` got a snapshot and lost one, `/b` its first one, and another volume was made
/// with one.
#[tokio::test]
async fn a_restored_tree_continues_above_the_epochs_of_the_lost_one() {
    let (fixture, _) = fixture().await;
    let (a, b) = (fixture.volume("/a").await, fixture.volume("/b").await);
    for name in ["kept", "removed", "newest"] {
        fixture.snapshot("/a", name).await.unwrap();
    }
    let fences = [
        fence(a, 1, 7, 6, &[0, 2, 5]),
        fence(b, 2, 1, 0, &[]),
        fence(InodeId(1 << 30), 9, 4, 4, &[3]),
    ];
    for _ in 0..2 {
        fixture.raise(&fences).await;
    }
    assert_eq!(fixture.shown_names("/a").await, ["kept", "newest"]);
    check_tree(&fixture.tree.store).await;
    let published = fixture.list_fences(10).await;
    assert_eq!(published, [fence(a, 1, 7, 7, &[0, 2]), fence(b, 2, 1, 1, &[])]);
    // The next ones are above: of the same volume, and of a volume that has none.
    fixture.snapshot("/a", "next").await.unwrap();
    fixture.volume("/c").await;
    fixture.snapshot("/c", "first").await.unwrap();
    let published = fixture.list_fences(10).await;
    assert_eq!(published[0], fence(a, 1, 8, 8, &[0, 2, 7]));
    assert_eq!(published[2].epoch, Epoch::new(10, 1));
    assert_eq!(fixture.shown_names("/a").await, ["kept", "newest", "next"]);
    check_tree(&fixture.tree.store).await;
}

/// The dump was made in the middle of a creation.
#[tokio::test]
async fn a_creation_of_the_dump_is_given_up() {
    let (fixture, fences) = fixture().await;
    let a = fixture.volume("/a").await;
    fixture.snapshot("/a", "first").await.unwrap();
    fences.fail.store(true, SeqCst);
    let creation = keys::Creation {
        request: RequestId {
            client: threefs_core::ids::ClientId(9),
            sequence: 1,
            finished_below: 0,
        },
        next: Epoch::new(1, 2),
    };
    fixture.tree.store.transact(soon(), &StartedAt(a, creation)).await.unwrap();
    fixture.raise(&[fence(a, 1, 2, 1, &[0])]).await;
    let listed: Result<_, OpError> = fixture.tree.store.transact(soon(), &ops::ListCreations).await;
    assert_eq!(listed.unwrap(), []);
    fences.fail.store(false, SeqCst);
    fixture.snapshot("/a", "second").await.unwrap();
    assert_eq!(fixture.list_fences(10).await, [fence(a, 1, 3, 3, &[0, 2])]);
}

struct StartedAt(InodeId, keys::Creation);

impl Operation for StartedAt {
    type Output = ();
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), KvError> {
        let key = keys::volume_snapshots(self.0);
        let row: keys::VolumeRow = rows::read(txn, &key).await?.unwrap_or_default();
        rows::write(txn, &key, &keys::VolumeRow { creating: Some(self.1.clone()), ..row })
    }
}
