//! A metadata service serves only the store of its cluster.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod calls;

use std::sync::Arc;
use std::time::Duration;

use fabric::auth::Key;
use fabric::auth::keys::Keys;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClientId, Incarnation, NodeId, RoutingVersion};
use threefs_kv::{KeyRange, KvError, OWNER_ROW, OwnerError, Row, Store, StoreConfig, Transaction};
use threefs_meta::{
    At, Meta, MetaClient, MetaConfig, MetaRunError, NoChunks, TreeConfig, adopt, owner,
};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, Timers};
use tokio::task::JoinHandle;

use calls::Calls;

const PATIENCE: Duration = Duration::from_secs(60);

/// Of a key file. A key without an id has the id 0.
fn line(cluster: u8) -> String {
    let id = cluster - 1;
    format!("{id}:{}\n", String::from_utf8(vec![b'0' + cluster; 32]).unwrap())
}

fn key(cluster: u8) -> Key {
    Key::from_bytes(&[b'0' + cluster; 32]).unwrap()
}

fn soon() -> Deadline {
    Deadline::after(PATIENCE)
}

/// The mgmtd of a cluster.
struct Manager {
    address: String,
    client: MgmtdClient,
    _alive: ShutdownHandle,
}

impl Manager {
    async fn start(cluster: u8) -> Self {
        let config = MgmtdConfig {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            key: key(cluster).into(),
            tls: fabric::tls::ServiceTls::default(),
            store: StoreConfig::folder("unused"),
            bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 },
            rebalance: true,
            timers: Timers { scan_ms: 5, ..Timers::one_machine() },
        };
        let mgmtd = Mgmtd::open_on(Store::memory(), config).await.unwrap();
        let address = mgmtd.address().to_string();
        let (alive, shutdown) = Shutdown::new();
        tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
        let client = MgmtdClient::new(std::slice::from_ref(&address), &key(cluster));
        Self { address, client, _alive: alive }
    }

    async fn with_node(cluster: u8) -> Self {
        let manager = Self::start(cluster).await;
        manager.register_node().await;
        manager
    }

    async fn register_node(&self) {
        let heartbeat = Heartbeat {
            node: NodeId(1),
            address: "127.0.0.1:1".into(),
            incarnation: Incarnation(1),
            sequence: 1,
            targets: Vec::new(),
            capacity_bytes: 0,
            data: DataFolder::Empty,
        };
        self.client.heartbeat(heartbeat, soon()).await.unwrap();
    }

    async fn cluster(&self) -> String {
        let routing = self.client.routing(RoutingVersion(0), Duration::ZERO, soon()).await;
        routing.unwrap().unwrap().cluster.to_string()
    }
}

fn config(keys: Keys, mgmtd: &Manager, store: StoreConfig) -> MetaConfig {
    MetaConfig {
        listen: "127.0.0.1:0".into(),
        key: keys,
        tls: fabric::tls::ServiceTls::default(),
        store,
        mgmtd: vec![mgmtd.address.clone()],
        tree: TreeConfig { service_lease_ms: 500, gc_interval_ms: 20, ..TreeConfig::default() },
    }
}

async fn open(store: &Store, keys: impl Into<Keys>, mgmtd: &Manager) -> Result<Meta, MetaRunError> {
    let config = config(keys.into(), mgmtd, StoreConfig::folder("/the/store"));
    Meta::open_on(store.clone(), config, Arc::new(NoChunks)).await
}

struct Service {
    client: MetaClient,
    task: JoinHandle<Result<(), MetaRunError>>,
    _alive: ShutdownHandle,
}

impl Service {
    fn start(meta: Meta, keys: impl Into<Keys>) -> Self {
        let client =
            MetaClient::new(&[meta.address().to_string()], &keys.into(), ClientId(1 << 32));
        let (alive, shutdown) = Shutdown::new();
        let task = tokio::spawn(async move { meta.serve(shutdown).await });
        Self { client, task, _alive: alive }
    }

    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

fn refused<T>(result: Result<T, MetaRunError>) -> OwnerError {
    match result {
        Err(MetaRunError::Store(KvError::Owner(error))) => *error,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("not refused"),
    }
}

async fn start(store: &Store) -> Transaction {
    store.begin().await.unwrap()
}

async fn rows(store: &Store) -> Vec<Row> {
    let mut txn = start(store).await;
    txn.range(&KeyRange::new([1], [0xff]), usize::MAX).await.unwrap()
}

async fn change_owner(store: &Store, row: Option<Vec<u8>>) {
    let mut txn = start(store).await;
    match row {
        Some(row) => txn.set(OWNER_ROW, row),
        None => txn.clear(OWNER_ROW),
    }
    txn.commit().await.unwrap();
}

/// Opens a folder once its former process is gone.
async fn open_free(config: &StoreConfig) -> Store {
    let opening = async {
        loop {
            match Store::open(config.clone()).await {
                Ok(store) => return store,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, opening).await.unwrap()
}

/// A store that cluster 1 has served, with a directory `/d`.
async fn used_store(mgmtd: &Manager) -> Store {
    let store = Store::shared_memory();
    let service = Service::start(open(&store, key(1), mgmtd).await.unwrap(), key(1));
    service.client.make_directory(At::path("/d"), false, soon()).await.unwrap();
    service.kill().await;
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_of_another_cluster_is_refused_and_stays_as_it_is() {
    let (first, other) = (Manager::with_node(1).await, Manager::with_node(2).await);
    let store = used_store(&first).await;
    let before = rows(&store).await;
    let text = refused(open(&store, key(2), &other).await).to_string();
    let cluster = first.cluster().await;
    for part in ["`/the/store`", &cluster, "--etcd-prefix", "threefs meta rekey --yes"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(rows(&store).await, before);
    let again = Service::start(open(&store, key(1), &first).await.unwrap(), key(1));
    again.client.stat(At::path("/d"), soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_an_earlier_version_is_adopted_by_the_cluster_of_its_mgmtd_only() {
    let (first, other) = (Manager::with_node(1).await, Manager::with_node(2).await);
    let store = used_store(&first).await;
    change_owner(&store, None).await;
    let before = rows(&store).await;
    let error = refused(open(&store, key(2), &other).await);
    let text = error.to_string();
    let OwnerError::OtherCluster { peer, .. } = error else { panic!("{text}") };
    assert_eq!(peer, "mgmtd");
    for part in [first.cluster().await, other.cluster().await, "threefs meta rekey --yes".into()] {
        assert!(text.contains(&part), "{text}");
    }
    assert_eq!(rows(&store).await, before);
    let again = Service::start(open(&store, key(1), &first).await.unwrap(), key(1));
    again.client.stat(At::path("/d"), soon()).await.unwrap();
    let error = refused(open(&store, key(2), &other).await);
    assert!(matches!(error, OwnerError::OtherKey { .. }), "{error}");
}

/// The mgmtd of a new cluster has no routing, and a missing one none either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_an_earlier_version_is_not_adopted_while_mgmtd_has_no_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let (first, empty) = (Manager::with_node(1).await, Manager::start(2).await);
    let store = StoreConfig::folder(folder.path());
    let opened = Meta::open(config(key(1).into(), &first, store.clone()), Arc::new(NoChunks)).await;
    let service = Service::start(opened.unwrap(), key(1));
    service.client.make_directory(At::path("/d"), false, soon()).await.unwrap();
    service.kill().await;
    let opened = open_free(&store).await;
    change_owner(&opened, None).await;
    let before = rows(&opened).await;
    drop(opened);
    let run = || {
        let (alive, shutdown) = Shutdown::new();
        let config = config(key(2).into(), &empty, store.clone());
        (alive, tokio::spawn(threefs_meta::run(config, Arc::new(NoChunks), shutdown)))
    };
    // It can be stopped while it waits.
    let (alive, waiting) = run();
    alive.request();
    tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    let (_alive, waiting) = run();
    empty.register_node().await;
    let error = refused(tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap());
    assert!(matches!(error, OwnerError::OtherCluster { .. }), "{error}");
    let opened = open_free(&store).await;
    assert_eq!(rows(&opened).await, before);
    drop(opened);
    // An operator decides.
    adopt(store.clone()).await.unwrap();
    let opened = Meta::open(config(key(2).into(), &empty, store), Arc::new(NoChunks)).await;
    let service = Service::start(opened.unwrap(), key(2));
    service.client.stat(At::path("/d"), soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_row_follows_the_key_of_a_running_service_which_exits_when_another_cluster_owns_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    std::fs::write(&path, line(1)).unwrap();
    let mgmtd = Manager::with_node(1).await;
    let store = Store::shared_memory();
    let keys = Keys::read(&path).unwrap();
    let service = Service::start(open(&store, keys.clone(), &mgmtd).await.unwrap(), keys);
    service.client.make_directory(At::path("/d"), false, soon()).await.unwrap();
    let enters = |cluster: u8| {
        let keys: Keys = key(cluster).into();
        let (owner, store) = (owner(&keys, &StoreConfig::folder("/the/store")), store.clone());
        async move { owner.enter(&store).await.is_ok() }
    };
    assert!(!enters(2).await);
    std::fs::write(&path, line(1) + &line(2)).unwrap();
    let reached = async {
        while !enters(2).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.unwrap();
    assert!(enters(1).await);
    let other = Store::memory();
    let keys: Keys = key(3).into();
    owner(&keys, &StoreConfig::folder("/other")).enter(&other).await.unwrap();
    let row = start(&other).await.get(OWNER_ROW).await.unwrap();
    change_owner(&store, row).await;
    let ended = tokio::time::timeout(PATIENCE, service.task).await.unwrap().unwrap();
    let error = refused(ended);
    assert!(matches!(error, OwnerError::OtherKey { .. }), "{error}");
}
