//! One owner per store: its first service, adoption, key rotation, and a change by an operator.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use fabric::BoxFuture;
use fabric::auth::keys::{KeyRing, Keys};
use threefs_kv::{
    Backend, Commit, Entry, KeyRange, KvError, Limits, OWNER_ROW, Owner, OwnerError, Row, Snapshot,
    Store, StoreConfig, Versionstamp, Watch,
};

use crate::backends::{get, put, start, stores};

/// Row with the id of the cluster.
pub(crate) const CLUSTER: &[u8] = b"MSNGcluster";
/// The id 7, encoded.
pub(crate) const CLUSTER_SEVEN: &[u8] = &[7];

/// A cluster with these keys, the first of which signs.
pub(crate) fn cluster(numbers: &[u32]) -> Keys {
    Keys::from(KeyRing::parse(Path::new("key"), key_file(numbers).as_bytes()).unwrap())
}

pub(crate) fn key_file(numbers: &[u32]) -> String {
    numbers.iter().map(|number| format!("{number}:a-key-of-a-cluster-{number}\n")).collect()
}

pub(crate) fn owner(keys: &Keys, store: &StoreConfig) -> Owner {
    Owner::new("mgmtd", CLUSTER, keys.clone(), store.name())
}

/// A new process of a cluster over a store without a name.
fn process(numbers: &[u32]) -> Owner {
    owner(&cluster(numbers), &StoreConfig::folder("/the/store"))
}

pub(crate) async fn all_rows(store: &Store) -> Vec<Row> {
    start(store).await.range(&KeyRange::new([1], [0xff]), usize::MAX).await.unwrap()
}

/// The message of a refusal.
pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T, KvError>) -> String {
    match result {
        Err(error @ KvError::Owner(_)) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn an_empty_store_belongs_to_its_first_cluster_and_others_write_nothing() {
    for (store, _resources) in stores().await {
        let first = process(&[1]);
        assert_eq!(first.enter(&store).await.unwrap(), Entry::Owned);
        put(&store, CLUSTER, CLUSTER_SEVEN).await;
        put(&store, b"a", b"1").await;
        let before = all_rows(&store).await;
        let other = process(&[2]);
        for refusal in [
            other.enter(&store).await.map(drop),
            other.adopt(&store).await,
            other.keep(&store, false).await,
            other.keep(&store, true).await,
            other.check(&mut start(&store).await).await,
        ] {
            let text = refused(refusal);
            let cluster = format!("cluster-{:032x}", 7);
            for part in ["`/the/store`", &cluster, "--etcd-prefix", "threefs mgmtd rekey --yes"] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert_eq!(all_rows(&store).await, before);
        // A restarted process, with the key under another id.
        let path = Path::new("key");
        let ring = KeyRing::parse(path, b"a-key-of-a-cluster-1").unwrap();
        let restarted = owner(&ring.into(), &StoreConfig::folder("/the/store"));
        assert_eq!(restarted.enter(&store).await.unwrap(), Entry::Owned);
        first.keep(&store, true).await.unwrap();
        assert_eq!(all_rows(&store).await, before);
    }
}

#[tokio::test]
async fn a_refusal_names_the_fingerprints_and_no_key() {
    let store = Store::memory();
    process(&[1, 2]).enter(&store).await.unwrap();
    let Err(KvError::Owner(error)) = process(&[3]).enter(&store).await else { panic!("entered") };
    let OwnerError::OtherKey { cluster, owners, ours, .. } = &*error else { panic!("{error}") };
    assert_eq!((*cluster, owners.len(), ours.len()), (None, 2, 1));
    let text = error.to_string();
    for key in owners.iter().chain(ours) {
        assert!(text.contains(&key.to_string()), "{text}");
    }
    assert!(!text.contains("a-key-of-a-cluster"), "{text}");
}

#[tokio::test]
async fn of_two_clusters_that_start_over_an_empty_store_one_is_refused() {
    for (store, _resources) in stores().await {
        for _ in 0..20 {
            let (one, two) = (process(&[1]), process(&[2]));
            let (one, two) = tokio::join!(one.enter(&store), two.enter(&store));
            let entered = [one, two].into_iter().filter(|it| matches!(it, Ok(Entry::Owned)));
            assert_eq!(entered.count(), 1);
            let mut txn = start(&store).await;
            txn.clear(OWNER_ROW);
            txn.commit().await.unwrap();
        }
    }
}

/// A store into which a service of an earlier version writes a row before the first commit.
struct Overtaken(Store, AtomicBool);

impl Backend for Overtaken {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(&self.0)
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            if !self.1.swap(true, SeqCst) {
                put(&self.0, b"a", b"1").await;
            }
            self.0.commit(commit).await
        })
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

#[tokio::test]
async fn a_store_that_has_rows_at_the_commit_is_not_empty() {
    for (store, _resources) in stores().await {
        let overtaken = Store::new(Overtaken(store.clone(), AtomicBool::new(false)));
        assert_eq!(process(&[1]).enter(&overtaken).await.unwrap(), Entry::Unowned(None));
        assert_eq!(get(&store, OWNER_ROW).await, None);
    }
}

#[tokio::test]
async fn a_store_of_an_earlier_version_is_not_used_before_it_is_adopted() {
    for (store, _resources) in stores().await {
        put(&store, b"a", b"1").await;
        let (first, other) = (process(&[1]), process(&[2]));
        assert_eq!(first.enter(&store).await.unwrap(), Entry::Unowned(None));
        put(&store, CLUSTER, CLUSTER_SEVEN).await;
        for process in [&first, &other] {
            assert_eq!(process.enter(&store).await.unwrap(), Entry::Unowned(Some(7)));
        }
        assert_eq!(get(&store, OWNER_ROW).await, None);
        first.adopt(&store).await.unwrap();
        first.adopt(&store).await.unwrap();
        assert_eq!(first.enter(&store).await.unwrap(), Entry::Owned);
        refused(other.adopt(&store).await);
        refused(other.enter(&store).await);
    }
}

/// Each step of a rotation, with a service that has not read the next key file yet.
#[tokio::test]
async fn the_row_follows_a_rotation_and_no_service_of_the_cluster_is_refused() {
    for (store, _resources) in stores().await {
        let steps: [&[u32]; 4] = [&[0], &[0, 1], &[1, 0], &[1]];
        process(steps[0]).enter(&store).await.unwrap();
        for (before, after) in steps.iter().zip(&steps[1..]) {
            let (late, early) = (process(before), process(after));
            for process in [&late, &early] {
                assert_eq!(process.enter(&store).await.unwrap(), Entry::Owned);
                process.keep(&store, false).await.unwrap();
            }
            for writer in [&early, &late, &early] {
                writer.keep(&store, true).await.unwrap();
                early.keep(&store, false).await.unwrap();
                late.keep(&store, false).await.unwrap();
                assert_eq!(process(before).enter(&store).await.unwrap(), Entry::Owned);
                assert_eq!(process(after).enter(&store).await.unwrap(), Entry::Owned);
            }
        }
        refused(process(&[0]).enter(&store).await);
        let row = get(&store, OWNER_ROW).await.unwrap();
        process(&[1]).keep(&store, true).await.unwrap();
        assert_eq!(get(&store, OWNER_ROW).await.unwrap(), row, "the former key is removed");
    }
}

/// The steps of a rotation can be faster than a service reads its key file.
#[tokio::test]
async fn a_running_service_keeps_its_store_when_its_key_file_is_replaced_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, key_file(&[0])).unwrap();
    let store = Store::shared_memory();
    let process_of_file = || owner(&Keys::read(&path).unwrap(), &StoreConfig::folder("/the/store"));
    let (primary, standby) = (process_of_file(), process_of_file());
    for process in [&primary, &standby] {
        process.enter(&store).await.unwrap();
    }
    let row = get(&store, OWNER_ROW).await;
    std::fs::write(&path, key_file(&[1])).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while get(&store, OWNER_ROW).await == row {
        assert!(std::time::Instant::now() < deadline, "the key file is not read");
        standby.keep(&store, false).await.unwrap();
        primary.keep(&store, true).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    standby.keep(&store, false).await.unwrap();
    assert_eq!(process(&[1]).enter(&store).await.unwrap(), Entry::Owned);
    refused(process(&[0]).enter(&store).await);
}

#[tokio::test]
async fn a_change_of_the_owner_conflicts_with_a_transaction_that_checked_it() {
    for (store, _resources) in stores().await {
        let first = process(&[1]);
        first.enter(&store).await.unwrap();
        let mut txn = start(&store).await;
        first.check(&mut txn).await.unwrap();
        let other = Store::memory();
        process(&[2]).enter(&other).await.unwrap();
        put(&store, OWNER_ROW, &get(&other, OWNER_ROW).await.unwrap()).await;
        txn.set(b"a", *b"1");
        assert_eq!(txn.commit().await.unwrap_err(), KvError::Conflict);
        refused(first.check(&mut start(&store).await).await);
        // A primary of the former owner does not take the row back.
        refused(first.keep(&store, true).await);
    }
}

#[tokio::test]
async fn an_invalid_row_is_refused_by_name() {
    for (store, _resources) in stores().await {
        process(&[1]).enter(&store).await.unwrap();
        let row = get(&store, OWNER_ROW).await.unwrap();
        for invalid in [&b""[..], b"garbage", &row[..row.len() - 1], &[&row[..], b"x"].concat()] {
            put(&store, OWNER_ROW, invalid).await;
            let text = refused(process(&[1]).enter(&store).await);
            for part in ["`/the/store`", "invalid row OWNR", "threefs mgmtd rekey --yes"] {
                assert!(text.contains(part), "{text}");
            }
        }
    }
}
