//! The backends under test, each with an empty store.

use std::sync::OnceLock;
use std::time::Duration;

use fabric::deadline::Deadline;
use tempfile::TempDir;
use threefs_kv::{EmbeddedConfig, KvError, Store, Transaction};

use crate::cluster::{BOUNDS, Cluster};
use crate::postgres::Servers;
use crate::two_processes::InTurn;

/// What a store needs while it is used.
pub(crate) struct Resources(
    #[expect(dead_code, reason = "dropped after the test")] Option<TempDir>,
);

/// An empty store of each backend.
pub(crate) async fn stores() -> Vec<(Store, Resources)> {
    // Three members, shared by the tests; a killed process does not lose what it has not synced.
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(|| Cluster::start(3, &with_bounds(&["--unsafe-no-fsync"])));
    let folder = tempfile::tempdir().unwrap();
    let embedded = Store::embedded(EmbeddedConfig::new(folder.path().join("kv"))).unwrap();
    let mut stores = vec![(Store::memory(), Resources(None)), (embedded, Resources(Some(folder)))];
    if let Some(cluster) = cluster {
        stores.push((Store::etcd(cluster.config()).await.unwrap(), Resources(None)));
        let config = cluster.config();
        let openings = [Store::etcd(config.clone()).await, Store::etcd(config).await];
        let in_turn = InTurn::new(openings.map(Result::unwrap));
        stores.push((Store::new(in_turn), Resources(None)));
    }
    static SERVERS: OnceLock<Option<Servers>> = OnceLock::new();
    if let Some(servers) = SERVERS.get_or_init(|| Servers::start(1)) {
        stores.push((Store::postgres(servers.config()).await.unwrap(), Resources(None)));
        let config = servers.config();
        let openings = [Store::postgres(config.clone()).await, Store::postgres(config).await];
        let in_turn = InTurn::new(openings.map(Result::unwrap));
        stores.push((Store::new(in_turn), Resources(None)));
    }
    stores
}

/// Options of a member that the backend accepts.
pub(crate) fn with_bounds<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&BOUNDS[..], options].concat()
}

/// A transaction, if the store is available.
pub(crate) async fn try_start(store: &Store) -> Result<Transaction, KvError> {
    store.begin().await
}

/// A transaction.
pub(crate) async fn start(store: &Store) -> Transaction {
    try_start(store).await.unwrap()
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
