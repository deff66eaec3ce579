//! Write skew and phantoms: what a transaction has read must still hold when it commits.

use threefs_kv::{KeyRange, KvError};

use crate::backends::{clear, get, put, start, stores};

#[tokio::test]
async fn write_skew_conflicts() {
    for (store, _resources) in stores().await {
        let (mut first, mut second) = (start(&store).await, start(&store).await);
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
    for (store, _resources) in stores().await {
        let mut counts = start(&store).await;
        assert!(counts.range(&KeyRange::prefix(b"d/"), 10).await.unwrap().is_empty());
        counts.set(b"empty", b"yes");
        put(&store, b"d/new", b"1").await;
        assert_eq!(counts.commit().await, Err(KvError::Conflict));
    }
}

#[tokio::test]
async fn rows_after_the_limit_of_a_range_read_do_not_conflict() {
    for (store, _resources) in stores().await {
        put(&store, b"d/1", b"").await;
        put(&store, b"d/2", b"").await;
        let mut txn = start(&store).await;
        assert_eq!(txn.range(&KeyRange::prefix(b"d/"), 1).await.unwrap().len(), 1);
        txn.set(b"x", b"");
        put(&store, b"d/2", b"new").await;
        txn.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_removed_row_of_a_range_conflicts() {
    for (store, _resources) in stores().await {
        put(&store, b"d/1", b"1").await;
        put(&store, b"d/2", b"2").await;
        let mut txn = start(&store).await;
        assert_eq!(txn.range(&KeyRange::prefix(b"d/"), 10).await.unwrap().len(), 2);
        txn.set(b"count", b"2");
        clear(&store, b"d/1").await;
        assert_eq!(txn.commit().await, Err(KvError::Conflict));
    }
}

#[tokio::test]
async fn a_row_that_was_removed_and_created_again_conflicts() {
    for (store, _resources) in stores().await {
        put(&store, b"d/1", b"1").await;
        let mut range = start(&store).await;
        let mut key = start(&store).await;
        range.range(&KeyRange::prefix(b"d/"), 10).await.unwrap();
        key.get(b"d/1").await.unwrap();
        clear(&store, b"d/1").await;
        put(&store, b"d/1", b"1").await;
        range.set(b"x", b"");
        key.set(b"y", b"");
        assert_eq!(range.commit().await, Err(KvError::Conflict));
        assert_eq!(key.commit().await, Err(KvError::Conflict));
    }
}

#[tokio::test]
async fn a_removed_row_conflicts_with_its_reader() {
    for (store, _resources) in stores().await {
        put(&store, b"a", b"1").await;
        let mut cleared = start(&store).await;
        let mut range_cleared = start(&store).await;
        cleared.get(b"a").await.unwrap();
        range_cleared.get(b"a").await.unwrap();
        let mut txn = start(&store).await;
        txn.clear_range(KeyRange::new("a", "b"));
        txn.commit().await.unwrap();
        cleared.set(b"x", b"");
        range_cleared.set(b"y", b"");
        assert_eq!(cleared.commit().await, Err(KvError::Conflict));
        assert_eq!(range_cleared.commit().await, Err(KvError::Conflict));
    }
}

/// Two transactions that are committed at the same time may be in one batch of the store.
#[tokio::test]
async fn one_of_two_concurrent_commits_that_exclude_each_other_conflicts() {
    for (store, _resources) in stores().await {
        for round in 0..20u8 {
            let key = [b'k', round];
            let (mut first, mut second) = (start(&store).await, start(&store).await);
            assert_eq!(first.get(&key).await.unwrap(), None);
            assert!(second.range(&KeyRange::prefix(&key), 1).await.unwrap().is_empty());
            first.set(&key, b"first");
            second.set(&key, b"second");
            let (first, second) = tokio::join!(first.commit(), second.commit());
            let expected: &[u8] = match (&first, &second) {
                (Ok(_), Err(KvError::Conflict)) => b"first",
                (Err(KvError::Conflict), Ok(_)) => b"second",
                other => panic!("{other:?}"),
            };
            assert_eq!(get(&store, &key).await.unwrap(), expected);
        }
    }
}
