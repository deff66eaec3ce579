//! Invariants of the rows of a store: they form one tree, and every counter matches what it counts.

use threefs_kv::{KeyRange, Row, Store};

use crate::check::{Checked, Checker};

/// Checks all rows of one snapshot.
pub(crate) async fn check_rows(store: &Store) -> Checked {
    let mut checker = Checker::default();
    for (key, value) in all_rows(store).await {
        checker.row(&key, &value);
    }
    checker.finish()
}

/// All rows of one snapshot.
pub(crate) async fn all_rows(store: &Store) -> Vec<Row> {
    let mut txn = store.begin().await.unwrap();
    txn.range(&KeyRange::new("", "~"), usize::MAX).await.unwrap()
}

/// Panics unless all rows of one snapshot are consistent.
pub(crate) async fn check_tree(store: &Store) {
    let checked = check_rows(store).await;
    assert!(checked.inodes > 0);
    assert_eq!(checked.findings, []);
}
