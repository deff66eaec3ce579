//! Managers over a store that several processes share, while its commits fail.

use std::sync::Mutex as StdMutex;

use fabric::BoxFuture;
use threefs_kv::{Backend, Commit, Snapshot, Versionstamp, Watch};

use super::*;

/// A shared store whose commits fail while an error is set. An unknown one is committed.
struct Failing(Store, Arc<StdMutex<Option<KvError>>>);

impl Backend for Failing {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(&self.0)
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            let error = self.1.lock().unwrap().clone();
            match error {
                None => self.0.commit(commit).await,
                Some(error @ KvError::CommitUnknown { .. }) => {
                    self.0.commit(commit).await?;
                    Err(error)
                }
                Some(error) => Err(error),
            }
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        None
    }
}

/// A whole cluster whose store is shared, and the error of its commits.
async fn cluster() -> (Cluster, Arc<StdMutex<Option<KvError>>>) {
    let error = Arc::new(StdMutex::default());
    let store = Store::new(Failing(Store::memory(), Arc::clone(&error)));
    let manager = Manager::new(store.clone(), 1, "m1", BOOTSTRAP, TIMERS);
    let mut cluster = Cluster { store, manager, ..Cluster::new() };
    cluster.steps_until("whole", is_whole).await;
    (cluster, error)
}

/// The store elects another leader: no write is made for a while.
#[tokio::test]
async fn a_write_that_was_not_made_ends_the_lease_only_with_its_time() {
    let (mut cluster, error) = cluster().await;
    let standby = Manager::new(cluster.store.clone(), 2, "m2", BOOTSTRAP, TIMERS);
    standby.tick(cluster.now).await.unwrap();
    let epoch = cluster.manager.status(cluster.now).await.unwrap().epoch;
    let unavailable = KvError::DeadlinePassed { attempts: 1, last: "no leader".into() };
    *error.lock().unwrap() = Some(unavailable);
    let since = cluster.now;
    cluster.nodes[0].restart();
    while cluster.now.since(since) < TIMERS.primary_lease_ms / 2 {
        cluster.step().await;
        standby.tick(cluster.now).await.unwrap();
        let refused = cluster.manager.heartbeat(cluster.nodes[0].beat(), cluster.now).await;
        assert!(matches!(refused, Err(MgmtdError::Store { .. })), "{refused:?}");
    }
    *error.lock().unwrap() = None;
    for _ in 0..TIMERS.primary_lease_ms / 50 {
        cluster.step().await;
        standby.tick(cluster.now).await.unwrap();
    }
    assert_eq!(cluster.manager.status(cluster.now).await.unwrap().epoch, epoch);
    assert!(standby.status(cluster.now).await.is_err());
    cluster.steps_until("whole", is_whole).await;

    // Without the store for a whole lease, it stops to answer.
    let unavailable = KvError::DeadlinePassed { attempts: 1, last: "no leader".into() };
    *error.lock().unwrap() = Some(unavailable);
    for _ in 0..=TIMERS.primary_lease_ms / 50 {
        cluster.step().await;
    }
    assert!(cluster.manager.status(cluster.now).await.is_err());
    *error.lock().unwrap() = None;
    standby.tick(cluster.now).await.unwrap();
    cluster.step().await;
    standby.tick(cluster.now).await.unwrap();
    let primaries = [&cluster.manager, &standby].map(|manager| manager.status(cluster.now));
    let [first, second] = primaries;
    assert!(first.await.is_ok() != second.await.is_ok(), "one of them is the primary");
}

#[tokio::test]
async fn an_unknown_outcome_makes_a_manager_read_the_store_again() {
    let (mut cluster, error) = cluster().await;
    let epoch = cluster.manager.status(cluster.now).await.unwrap().epoch;
    let unknown = KvError::CommitUnknown { detail: "the leader did not reply".into() };
    *error.lock().unwrap() = Some(unknown);
    cluster.nodes[0].restart();
    let refused = cluster.manager.heartbeat(cluster.nodes[0].beat(), cluster.now).await;
    assert!(matches!(refused, Err(MgmtdError::Store { .. })), "{refused:?}");
    assert!(cluster.manager.status(cluster.now).await.is_err(), "it has stepped down");
    // The process continues.
    cluster.manager.tick(cluster.now).await.unwrap();
    *error.lock().unwrap() = None;
    cluster.step().await;
    assert!(cluster.manager.status(cluster.now).await.unwrap().epoch > epoch);
    cluster.steps_until("whole", is_whole).await;
}
