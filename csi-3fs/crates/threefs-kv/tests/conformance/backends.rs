//! The backends under test, each with an empty store.

use std::time::Duration;

use fabric::deadline::Deadline;
use tempfile::TempDir;
use threefs_kv::{EmbeddedConfig, Store, Transaction};

/// What a store needs while it is used.
pub(crate) struct Resources(
    #[expect(dead_code, reason = "dropped after the test")] Option<TempDir>,
);

/// An empty store of each backend.
pub(crate) async fn stores() -> Vec<(Store, Resources)> {
    let folder = tempfile::tempdir().unwrap();
    let embedded = Store::embedded(EmbeddedConfig::new(folder.path().join("kv"))).unwrap();
    vec![(Store::memory(), Resources(None)), (embedded, Resources(Some(folder)))]
}

/// A transaction.
pub(crate) async fn start(store: &Store) -> Transaction {
    store.begin().await.unwrap()
}

pub(crate) async fn put(store: &Store, key: &[u8], value: &[u8]) {
    let mut txn = start(store).await;
    txn.set(key, value);
    txn.commit().await.unwrap();
}

pub(crate) async fn clear(store: &Store, key: &[u8]) {
    let mut txn = start(store).await;
    txn.clear(key);
    txn.commit().await.unwrap();
}

pub(crate) async fn get(store: &Store, key: &[u8]) -> Option<Vec<u8>> {
    start(store).await.get(key).await.unwrap()
}

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}
