//! An mgmtd of another cluster over the same store is neither primary nor standby.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use fabric::auth::Key;
use fabric::auth::keys::Keys;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClusterId, Incarnation, NodeId, RoutingVersion};
use threefs_core::time::Millis;
use threefs_kv::{KeyRange, KvError, OWNER_ROW, OwnerError, Row, Store, StoreConfig, Transaction};
use threefs_mgmtd::{
    Bootstrap, Manager, Mgmtd, MgmtdClient, MgmtdClientError, MgmtdConfig, MgmtdError,
    MgmtdRunError, Timers, owner,
};
use tokio::task::JoinHandle;

const BOOTSTRAP: Bootstrap = Bootstrap { nodes: 2, replicas: 1, chains_per_node: 4 };
const TIMERS: Timers = Timers { node_failure_ms: 60_000, primary_lease_ms: 300, scan_ms: 10 };
const PATIENCE: Duration = Duration::from_secs(60);

fn key(cluster: u8) -> Key {
    Key::from_bytes(&[b'0' + cluster; 32]).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

fn heartbeat(data: DataFolder, sequence: u64) -> Heartbeat {
    Heartbeat {
        node: NodeId(1),
        address: "127.0.0.1:1".into(),
        incarnation: Incarnation(1),
        sequence,
        targets: Vec::new(),
        capacity_bytes: 0,
        data,
    }
}

fn config(keys: Keys) -> MgmtdConfig {
    MgmtdConfig {
        listen: "127.0.0.1:0".into(),
        advertise: None,
        key: keys,
        tls: fabric::tls::ServiceTls::default(),
        store: StoreConfig::folder("/the/store"),
        bootstrap: BOOTSTRAP,
        rebalance: true,
        timers: TIMERS,
    }
}

async fn open(store: &Store, cluster: u8) -> Result<Mgmtd, MgmtdRunError> {
    Mgmtd::open_on(store.clone(), config(key(cluster).into())).await
}

struct Service {
    client: MgmtdClient,
    task: JoinHandle<Result<(), MgmtdRunError>>,
    _alive: ShutdownHandle,
}

impl Service {
    async fn start(store: &Store, cluster: u8) -> Self {
        let mgmtd = open(store, cluster).await.unwrap();
        let client = MgmtdClient::new(&[mgmtd.address().to_string()], &key(cluster));
        let (handle, shutdown) = Shutdown::new();
        let task = tokio::spawn(async move { mgmtd.serve(shutdown).await });
        Self { client, task, _alive: handle }
    }

    /// Ends it as `kill -9` does.
    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }

    /// Why it has exited.
    async fn error(self) -> OwnerError {
        match tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap() {
            Err(MgmtdRunError::Store(KvError::Owner(error))) => *error,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// One attempt of a node; mgmtd does not lead.
    async fn refused_heartbeat(&self, data: DataFolder, sequence: u64) {
        let deadline = Deadline::after(Duration::from_millis(500));
        let error = self.client.heartbeat(heartbeat(data, sequence), deadline).await.unwrap_err();
        let led = matches!(
            &error,
            MgmtdClientError::Refused(error) if !matches!(error, MgmtdError::NotPrimary { .. })
        );
        assert!(!led, "{error}");
    }
}

async fn start(store: &Store) -> Transaction {
    store.begin().await.unwrap()
}

async fn rows(store: &Store) -> Vec<Row> {
    let mut txn = start(store).await;
    txn.range(&KeyRange::new([1], [0xff]), usize::MAX).await.unwrap()
}

/// Makes another cluster the owner, as `rekey` does.
async fn give_to(store: &Store, cluster: u8) {
    let other = Store::memory();
    let keys = key(cluster).into();
    owner(&keys, &StoreConfig::folder("/other")).enter(&other).await.unwrap();
    let row = start(&other).await.get(OWNER_ROW).await.unwrap().unwrap();
    let mut txn = start(store).await;
    txn.set(OWNER_ROW, row);
    txn.commit().await.unwrap();
}

/// The store of cluster 1 with a node, as an earlier version has written it; its id.
async fn store_without_owner() -> (Store, ClusterId) {
    let store = Store::shared_memory();
    let first = Service::start(&store, 1).await;
    first.client.heartbeat(heartbeat(DataFolder::Empty, 1), soon()).await.unwrap();
    let routing = first.client.routing(RoutingVersion(0), Duration::ZERO, soon()).await;
    first.kill().await;
    let mut txn = start(&store).await;
    txn.clear(OWNER_ROW);
    txn.commit().await.unwrap();
    (store, routing.unwrap().unwrap().cluster)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_mgmtd_of_another_cluster_is_refused_while_the_first_one_runs_and_after_its_death() {
    let store = Store::shared_memory();
    let first = Service::start(&store, 1).await;
    first.client.heartbeat(heartbeat(DataFolder::Empty, 1), soon()).await.unwrap();
    let refused = |result: Result<Mgmtd, MgmtdRunError>| match result {
        Err(MgmtdRunError::Store(KvError::Owner(error))) => error.to_string(),
        other => panic!("not refused: {:?}", other.map(|_| "opened")),
    };
    let text = refused(open(&store, 2).await);
    let routing = first.client.routing(RoutingVersion(0), Duration::ZERO, soon()).await;
    let cluster = routing.unwrap().unwrap().cluster.to_string();
    for part in ["`/the/store`", &cluster, "--etcd-prefix", "threefs mgmtd rekey --yes"] {
        assert!(text.contains(part), "{text}");
    }
    first.kill().await;
    let before = rows(&store).await;
    refused(open(&store, 2).await);
    assert_eq!(rows(&store).await, before);
    let again = Service::start(&store, 1).await;
    again.client.heartbeat(heartbeat(DataFolder::Empty, 2), soon()).await.unwrap();
}

/// An operator changes the owner while a standby of the former one runs.
#[tokio::test]
async fn a_standby_does_not_take_over_a_store_that_another_cluster_owns_by_now() {
    let store = Store::shared_memory();
    let keys: Keys = key(1).into();
    let manager = |id, address| {
        Manager::new(store.clone(), id, address, BOOTSTRAP, TIMERS)
            .owned_by(owner(&keys, &StoreConfig::folder("/the/store")))
    };
    let first = owner(&keys, &StoreConfig::folder("/the/store"));
    first.enter(&store).await.unwrap();
    let (primary, standby) = (manager(1, "m1"), manager(2, "m2"));
    primary.tick(Millis(0)).await.unwrap();
    standby.tick(Millis(0)).await.unwrap();
    give_to(&store, 2).await;
    let before = rows(&store).await;
    let mut now = Millis(0);
    let error = loop {
        now = now.after(TIMERS.scan_ms);
        assert!(now < Millis(10 * TIMERS.primary_lease_ms), "it does not try to take over");
        if let Err(error) = standby.tick(now).await {
            break error;
        }
    };
    assert!(matches!(error, KvError::Owner(_)), "{error}");
    assert!(standby.status(now).await.is_err());
    assert_eq!(rows(&store).await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_and_a_standby_exit_when_another_cluster_owns_their_store() {
    let store = Store::shared_memory();
    let primary = Service::start(&store, 1).await;
    primary.client.status(soon()).await.unwrap();
    let standby = Service::start(&store, 1).await;
    give_to(&store, 2).await;
    for service in [primary, standby] {
        let error = service.error().await;
        assert!(matches!(error, OwnerError::OtherKey { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_an_earlier_version_is_adopted_by_the_cluster_whose_node_has_its_data() {
    let (store, cluster) = store_without_owner().await;
    let before = rows(&store).await;
    // Another cluster, with a node without data: its mgmtd waits, whatever it is asked.
    let other = Service::start(&store, 2).await;
    other.refused_heartbeat(DataFolder::Empty, 1).await;
    other.refused_heartbeat(DataFolder::Unmarked, 2).await;
    assert_eq!(rows(&store).await, before);
    // Two of this cluster: the report reaches one of them.
    let (first, second) = (Service::start(&store, 1).await, Service::start(&store, 1).await);
    let beat = heartbeat(DataFolder::Of(cluster), 3);
    first.client.heartbeat(beat, soon()).await.unwrap();
    let error = other.error().await;
    assert!(matches!(error, OwnerError::OtherKey { .. }), "{error}");
    // The second one is a standby now.
    first.kill().await;
    second.client.heartbeat(heartbeat(DataFolder::Of(cluster), 4), soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_data_of_another_cluster_refuses_the_adoption() {
    let (store, cluster) = store_without_owner().await;
    let before = rows(&store).await;
    let other = Service::start(&store, 2).await;
    let mut sequence = 0;
    while !other.task.is_finished() {
        sequence += 1;
        other.refused_heartbeat(DataFolder::Of(ClusterId(9)), sequence).await;
    }
    let error = other.error().await;
    let text = error.to_string();
    let OwnerError::OtherCluster { peer, peer_cluster, .. } = error else { panic!("{text}") };
    assert_eq!((peer, peer_cluster), (NodeId(1).to_string(), 9));
    for part in ["`/the/store`", &cluster.to_string(), "threefs mgmtd rekey --yes"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(rows(&store).await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_an_earlier_version_without_nodes_is_adopted_at_once() {
    let store = Store::shared_memory();
    let first = Service::start(&store, 1).await;
    first.client.status(soon()).await.unwrap();
    first.kill().await;
    let mut txn = start(&store).await;
    txn.clear(OWNER_ROW);
    txn.commit().await.unwrap();
    let again = Service::start(&store, 1).await;
    again.client.status(soon()).await.unwrap();
    assert!(open(&store, 2).await.is_err());
}

/// The primary lets the row follow a rotation; the former key is refused at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotation_of_the_key_of_a_running_mgmtd_reaches_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let line = |id: u8| format!("{id}:{}\n", String::from_utf8(vec![b'0' + id; 32]).unwrap());
    std::fs::write(&path, line(1)).unwrap();
    let store = Store::shared_memory();
    let mgmtd = Mgmtd::open_on(store.clone(), config(Keys::read(&path).unwrap())).await.unwrap();
    let client = MgmtdClient::new(&[mgmtd.address().to_string()], &Keys::read(&path).unwrap());
    let (_alive, shutdown) = Shutdown::new();
    let task = tokio::spawn(async move { mgmtd.serve(shutdown).await });
    client.status(soon()).await.unwrap();
    let owned_by = |cluster: u8| {
        let keys: Keys = key(cluster).into();
        let (owner, store) = (owner(&keys, &StoreConfig::folder("/the/store")), store.clone());
        async move { owner.enter(&store).await.is_ok() }
    };
    assert!(!owned_by(2).await);
    let steps = [(line(1) + &line(2), true, true), (line(2) + &line(1), true, true)];
    for (content, first, second) in steps.into_iter().chain([(line(2), false, true)]) {
        std::fs::write(&path, content).unwrap();
        let reached = async {
            while (owned_by(1).await, owned_by(2).await) != (first, second) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.unwrap();
        assert!(!task.is_finished());
    }
    client.status(soon()).await.unwrap();
}
