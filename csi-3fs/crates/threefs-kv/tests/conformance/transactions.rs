//! Isolation, own writes, counters, stamps, watches, bounds and retries.

use std::time::Duration;

use threefs_kv::{
    COMMIT_BYTES_MAX, KEY_BYTES_MAX, KeyRange, KvError, Operation, Transaction, VALUE_BYTES_MAX,
};

use crate::backends::{get, put, soon, start, stores};

#[tokio::test]
async fn a_snapshot_does_not_see_later_commits() {
    for (store, _resources) in stores().await {
        put(&store, b"a", b"1").await;
        let mut before = start(&store).await;
        put(&store, b"a", b"2").await;
        put(&store, b"b", b"2").await;
        assert_eq!(before.get(b"a").await.unwrap().unwrap(), b"1");
        assert_eq!(before.get(b"b").await.unwrap(), None);
        assert_eq!(before.range(&KeyRange::new("a", "z"), 10).await.unwrap().len(), 1);
        assert_eq!(get(&store, b"a").await.unwrap(), b"2");
    }
}

#[tokio::test]
async fn snapshot_reads_additions_and_blind_writes_do_not_conflict() {
    for (store, _resources) in stores().await {
        let mut txn = start(&store).await;
        txn.snapshot_get(b"a").await.unwrap();
        txn.snapshot_range(&KeyRange::prefix(b"a"), 9).await.unwrap();
        txn.atomic_add(b"count", 2);
        txn.set(b"blind", b"1");
        let mut other = start(&store).await;
        other.set(b"a", b"1");
        other.set(b"blind", b"2");
        other.atomic_add(b"count", 3);
        other.commit().await.unwrap();
        txn.commit().await.unwrap();
        assert_eq!(get(&store, b"count").await.unwrap(), 5i64.to_le_bytes());
        assert_eq!(get(&store, b"blind").await.unwrap(), b"1");
    }
}

/// A row that was written and removed since is as absent as before; a counter tells.
#[tokio::test]
async fn a_bound_holds_when_the_transaction_commits() {
    for (store, _resources) in stores().await {
        let mut late = start(&store).await;
        assert_eq!(late.get(b"answer").await.unwrap(), None);
        late.require_at_most(b"floor", 5);
        late.set(b"late", b"1");
        put(&store, b"answer", b"1").await;
        let mut raise = start(&store).await;
        raise.clear(b"answer");
        raise.bounded_add(b"floor", 6, i64::MAX);
        raise.commit().await.unwrap();
        let error = late.commit().await.unwrap_err();
        let refused = matches!(error, KvError::OverBound { .. } | KvError::Conflict);
        assert!(refused, "{error}");
        assert_eq!(get(&store, b"late").await, None);

        let mut within = start(&store).await;
        within.require_at_most(b"floor", 7);
        within.require_at_most(b"absent", 0);
        within.set(b"within", b"1");
        let mut raise = start(&store).await;
        raise.bounded_add(b"floor", 1, i64::MAX);
        raise.commit().await.unwrap();
        within.commit().await.unwrap();
        assert_eq!(get(&store, b"floor").await.unwrap(), 7i64.to_le_bytes());
        assert_eq!(get(&store, b"absent").await, None, "a bound writes nothing");
    }
}

/// Such as a second attempt at a change, whose first attempt was executed: it is not refused because
/// of the space that the first one has used.
#[tokio::test]
async fn a_commit_over_a_bound_conflicts_if_what_it_has_read_has_changed() {
    for (store, _resources) in stores().await {
        for round in 0..2 {
            let (answer, used) = (format!("answer-{round}"), format!("used-{round}"));
            let mut attempts = Vec::new();
            for _ in 0..2 {
                let mut txn = start(&store).await;
                assert_eq!(txn.get(answer.as_bytes()).await.unwrap(), None);
                txn.set(answer.as_bytes(), b"1");
                txn.bounded_add(used.as_bytes(), 7, 7);
                attempts.push(txn);
            }
            if round == 1 {
                // Of two processes, the other one commits first.
                get(&store, b"other").await;
            }
            let mut results = Vec::new();
            for txn in attempts {
                results.push(txn.commit().await.map(drop));
            }
            assert_eq!(results, [Ok(()), Err(KvError::Conflict)]);
            let mut txn = start(&store).await;
            assert!(txn.get(answer.as_bytes()).await.unwrap().is_some());
            txn.bounded_add(used.as_bytes(), 1, 7);
            let error = txn.commit().await.unwrap_err();
            assert!(matches!(error, KvError::OverBound { value: 7, .. }), "{error}");
        }
    }
}

#[tokio::test]
async fn a_transaction_sees_its_own_writes() {
    for (store, _resources) in stores().await {
        for key in [b"k1", b"k2", b"k3", b"k4"] {
            put(&store, key, b"old").await;
        }
        let mut txn = start(&store).await;
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
    for (store, _resources) in stores().await {
        let mut stamps = Vec::new();
        for number in 0..5u8 {
            let mut txn = start(&store).await;
            txn.set_stamped(b"log/", b"", [number]);
            stamps.push(txn.commit().await.unwrap());
        }
        assert!(stamps.is_sorted() && stamps.windows(2).all(|pair| pair[0] != pair[1]));
        let mut txn = start(&store).await;
        let rows = txn.range(&KeyRange::prefix(b"log/"), 9).await.unwrap();
        let values: Vec<u8> = rows.iter().map(|(_, value)| value[0]).collect();
        assert_eq!(values, [0, 1, 2, 3, 4]);
        for ((key, _), stamp) in rows.iter().zip(&stamps) {
            assert!(key[4..] <= stamp.0[..], "the stamp of a key is above that of its commit");
        }
    }
}

#[tokio::test]
async fn a_watch_wakes_only_for_its_key() {
    for (store, _resources) in stores().await {
        let mut watch = store.watch(b"w/1");
        put(&store, b"w/2", b"").await;
        let early = tokio::time::timeout(Duration::from_millis(20), watch.changed()).await;
        assert!(early.is_err());
        let mut txn = start(&store).await;
        txn.set(b"w/1", b"");
        txn.commit().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
        let mut txn = start(&store).await;
        txn.clear_range(KeyRange::prefix(b"w/"));
        txn.commit().await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
    }
}

#[tokio::test]
async fn a_transaction_over_a_bound_is_refused_completely() {
    for (store, _resources) in stores().await {
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
            let mut txn = start(&store).await;
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
    for (store, _resources) in stores().await {
        put(&store, b"text", b"text").await;
        let mut bad = start(&store).await;
        bad.atomic_add(b"text", 1);
        let mut good = start(&store).await;
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
    for (store, _resources) in stores().await {
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
