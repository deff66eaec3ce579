//! Guarantees of both stores, one per test.

use std::time::Duration;

use fabric::deadline::Deadline;
use tempfile::TempDir;

use crate::{
    COMMIT_BYTES_MAX, EmbeddedConfig, KEY_BYTES_MAX, KeyRange, KvError, Operation, Store,
    Transaction, VALUE_BYTES_MAX,
};

fn stores() -> Vec<(Store, Option<TempDir>)> {
    let folder = tempfile::tempdir().unwrap();
    let embedded = Store::embedded(EmbeddedConfig::new(folder.path().join("kv"))).unwrap();
    vec![(Store::memory(), None), (embedded, Some(folder))]
}

async fn put(store: &Store, key: &[u8], value: &[u8]) {
    let mut txn = store.begin().await.unwrap();
    txn.set(key, value);
    txn.commit().await.unwrap();
}

async fn get(store: &Store, key: &[u8]) -> Option<Vec<u8>> {
    store.begin().await.unwrap().get(key).await.unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

#[tokio::test]
async fn a_snapshot_does_not_see_later_commits() {
    for (store, _folder) in stores() {
        put(&store, b"a", b"1").await;
        let mut before = store.begin().await.unwrap();
        put(&store, b"a", b"2").await;
        put(&store, b"b", b"2").await;
        assert_eq!(before.get(b"a").await.unwrap().unwrap(), b"1");
        assert_eq!(before.get(b"b").await.unwrap(), None);
        assert_eq!(before.range(&KeyRange::new("a", "z"), 10).await.unwrap().len(), 1);
        assert_eq!(get(&store, b"a").await.unwrap(), b"2");
    }
}

#[tokio::test]
async fn write_skew_conflicts() {
    for (store, _folder) in stores() {
        let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
        first.get(b"a").await.unwrap();
        second.get(b"b").await.unwrap();
        first.set(b"b", b"1");
        second.set(b"a", b"1");
        first.commit().await.unwrap();
        assert_eq!(second.commit().await, Err(KvError::Conflict));
        assert_eq!(get(&store, b"a").await, None);
    }
}

#[tokio::test]
async fn a_new_row_in_a_range_that_was_read_conflicts() {
    for (store, _folder) in stores() {
        let mut counts = store.begin().await.unwrap();
        assert!(counts.range(&KeyRange::prefix(b"d/"), 10).await.unwrap().is_empty());
        counts.set(b"empty", b"yes");
        put(&store, b"d/new", b"1").await;
        assert_eq!(counts.commit().await, Err(KvError::Conflict));
    }
}

#[tokio::test]
async fn rows_after_the_limit_of_a_range_read_do_not_conflict() {
    for (store, _folder) in stores() {
        put(&store, b"d/1", b"").await;
        put(&store, b"d/2", b"").await;
        let mut txn = store.begin().await.unwrap();
        assert_eq!(txn.range(&KeyRange::prefix(b"d/"), 1).await.unwrap().len(), 1);
        txn.set(b"x", b"");
        put(&store, b"d/2", b"new").await;
        txn.commit().await.unwrap();
    }
}

#[tokio::test]
async fn snapshot_reads_additions_and_blind_writes_do_not_conflict() {
    for (store, _folder) in stores() {
        let mut txn = store.begin().await.unwrap();
        txn.snapshot_get(b"a").await.unwrap();
        txn.snapshot_range(&KeyRange::prefix(b"a"), 9).await.unwrap();
        txn.atomic_add(b"count", 2);
        txn.set(b"blind", b"1");
        let mut other = store.begin().await.unwrap();
        other.set(b"a", b"1");
        other.set(b"blind", b"2");
        other.atomic_add(b"count", 3);
        other.commit().await.unwrap();
        txn.commit().await.unwrap();
        assert_eq!(get(&store, b"count").await.unwrap(), 5i64.to_le_bytes());
        assert_eq!(get(&store, b"blind").await.unwrap(), b"1");
    }
}

#[tokio::test]
async fn named_conflicts_count_as_reads_and_writes() {
    for (store, _folder) in stores() {
        let mut reader = store.begin().await.unwrap();
        reader.add_read_conflict(b"guard");
        reader.set(b"r", b"1");
        let mut writer = store.begin().await.unwrap();
        writer.add_write_conflict(b"guard");
        assert!(!writer.is_read_only());
        writer.commit().await.unwrap();
        assert_eq!(reader.commit().await, Err(KvError::Conflict));
        // A commit without changes must not cause later ones to conflict.
        let mut again = store.begin().await.unwrap();
        again.get(b"guard").await.unwrap();
        again.set(b"r", b"1");
        again.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_transaction_sees_its_own_writes() {
    for (store, _folder) in stores() {
        for key in [b"k1", b"k2", b"k3", b"k4"] {
            put(&store, key, b"old").await;
        }
        let mut txn = store.begin().await.unwrap();
        txn.clear(b"k1");
        txn.set(b"k2", b"new");
        txn.set(b"k25", b"new");
        txn.clear_range(KeyRange::new("k3", "k4"));
        txn.atomic_add(b"k5", 4);
        txn.atomic_add(b"k5", 3);
        let rows = txn.range(&KeyRange::prefix(b"k"), 2).await.unwrap();
        let keys: Vec<_> = rows.iter().map(|(key, _)| key.as_slice()).collect();
        assert_eq!(keys, [&b"k2"[..], b"k25"]);
        let rows = txn.range(&KeyRange::prefix(b"k"), 9).await.unwrap();
        let keys: Vec<_> = rows.iter().map(|(key, _)| key.as_slice()).collect();
        assert_eq!(keys, [&b"k2"[..], b"k25", b"k4", b"k5"]);
        assert_eq!(txn.get(b"k5").await.unwrap().unwrap(), 7i64.to_le_bytes());
        assert_eq!(txn.get(b"k3").await.unwrap(), None);
        txn.commit().await.unwrap();
        assert_eq!(get(&store, b"k3").await, None);
        assert_eq!(get(&store, b"k5").await.unwrap(), 7i64.to_le_bytes());
    }
}

#[tokio::test]
async fn stamps_grow_with_every_commit_and_name_rows() {
    for (store, _folder) in stores() {
        let mut stamps = Vec::new();
        for number in 0..5u8 {
            let mut txn = store.begin().await.unwrap();
            txn.set_stamped(b"log/", b"", [number]);
            stamps.push(txn.commit().await.unwrap());
        }
        assert!(stamps.is_sorted() && stamps.windows(2).all(|pair| pair[0] != pair[1]));
        let mut txn = store.begin().await.unwrap();
        let rows = txn.range(&KeyRange::prefix(b"log/"), 9).await.unwrap();
        let values: Vec<u8> = rows.iter().map(|(_, value)| value[0]).collect();
        assert_eq!(values, [0, 1, 2, 3, 4]);
        assert_eq!(rows[2].0[4..], stamps[2].0);
    }
}

#[tokio::test]
async fn a_watch_wakes_only_for_its_key() {
    for (store, _folder) in stores() {
        let mut watch = store.watch(b"w/1");
        put(&store, b"w/2", b"").await;
        let early = tokio::time::timeout(Duration::from_millis(20), watch.changed()).await;
        assert!(early.is_err());
        let mut txn = store.begin().await.unwrap();
        txn.set(b"w/1", b"");
        txn.commit().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
        let mut txn = store.begin().await.unwrap();
        txn.clear_range(KeyRange::prefix(b"w/"));
        txn.commit().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
    }
}

#[tokio::test]
async fn a_transaction_over_a_bound_is_refused_completely() {
    for (store, _folder) in stores() {
        type Write = fn(&mut Transaction);
        let writes: [(&str, Write); 4] = [
            ("key", |txn| txn.set(&[7; KEY_BYTES_MAX + 1], b"")),
            ("value", |txn| txn.set(b"a", vec![0; VALUE_BYTES_MAX + 1])),
            ("transaction", |txn| {
                for number in 0..=COMMIT_BYTES_MAX / VALUE_BYTES_MAX {
                    txn.set(&[b'a', number as u8], vec![0; VALUE_BYTES_MAX]);
                }
            }),
            ("mutations", |txn| (0..20_000u32).for_each(|n| txn.clear(&n.to_be_bytes()))),
        ];
        for (what, write) in writes {
            let mut txn = store.begin().await.unwrap();
            txn.set(b"half", b"done");
            write(&mut txn);
            let error = txn.commit().await.unwrap_err();
            assert!(matches!(&error, KvError::TooLarge { what: w, .. } if *w == what), "{error}");
        }
        assert_eq!(get(&store, b"half").await, None);
    }
}

#[tokio::test]
async fn a_row_that_is_not_a_counter_fails_only_its_transaction() {
    for (store, _folder) in stores() {
        put(&store, b"text", b"text").await;
        let mut bad = store.begin().await.unwrap();
        bad.atomic_add(b"text", 1);
        let mut good = store.begin().await.unwrap();
        good.set(b"good", b"1");
        let (bad, good) = tokio::join!(bad.commit(), good.commit());
        assert!(matches!(bad, Err(KvError::BadRow { .. })), "{bad:?}");
        good.unwrap();
    }
}

struct Increment;

impl Operation for Increment {
    type Output = u64;
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<u64, KvError> {
        let value = txn.get(b"n").await?.map_or(0, |value| value[0].into());
        tokio::task::yield_now().await;
        txn.set(b"n", [value as u8 + 1]);
        Ok(value + 1)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_operations_are_retried_until_they_succeed() {
    for (store, _folder) in stores() {
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move { store.transact(soon(), &Increment).await.unwrap() })
            })
            .collect();
        let mut values = Vec::new();
        for task in tasks {
            values.push(task.await.unwrap());
        }
        values.sort_unstable();
        assert_eq!(values, (1..=20).collect::<Vec<u64>>());
    }
}

#[tokio::test]
async fn the_embedded_store_survives_a_restart_and_has_one_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/kv");
    let config = EmbeddedConfig::new(&path);
    let store = Store::embedded(config.clone()).unwrap();
    put(&store, b"a", b"1").await;
    let version = store.begin().await.unwrap().read_version();
    let error = Store::embedded(config.clone()).err().unwrap().to_string();
    assert!(error.contains("another process holds the folder"), "{error}");
    let opening = store.exclusive_opening();
    drop(store);
    let store = Store::embedded(config).unwrap();
    assert_eq!(get(&store, b"a").await.unwrap(), b"1");
    assert!(store.begin().await.unwrap().read_version() >= version, "versions do not decrease");
    assert_ne!(store.exclusive_opening(), opening);
    assert_eq!(get(&store, b"\0version").await, None, "internal rows are hidden");
}

#[tokio::test]
async fn a_full_store_reports_it_and_resumes_when_space_is_freed() {
    let folder = tempfile::tempdir().unwrap();
    let map_bytes_max = 1 << 20;
    let path = folder.path().to_owned();
    let store = Store::embedded(EmbeddedConfig { path, map_bytes_max }).unwrap();
    let mut count = 0u32;
    let error = loop {
        let mut txn = store.begin().await.unwrap();
        txn.get(b"guard").await.unwrap();
        txn.set(&count.to_be_bytes().map(|byte| byte | 0x40), vec![1; 50_000]);
        match txn.commit().await {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, KvError::NoSpace { .. }), "{error}");
    assert!(count > 5);
    // Everything acknowledged is there, and small rows still fit after some are removed.
    let mut txn = store.begin().await.unwrap();
    assert_eq!(txn.range(&KeyRange::new([0x40], [0xff]), 100).await.unwrap().len(), count as usize);
    txn.clear_range(KeyRange::new([0x40], [0xff]));
    txn.commit().await.unwrap();
    let mut txn = store.begin().await.unwrap();
    assert_eq!(txn.get(b"guard").await.unwrap(), None);
    txn.set(b"guard", b"1");
    txn.commit().await.unwrap();
}

#[test]
fn a_prefix_covers_exactly_its_keys() {
    let range = KeyRange::prefix(&[1, 0xff, 0xff]);
    assert_eq!(range.end, [2]);
    assert!(range.contains(&[1, 0xff, 0xff, 9]) && !range.contains(&[2]));
    assert!(KeyRange::new("b", "a").is_empty());
}
