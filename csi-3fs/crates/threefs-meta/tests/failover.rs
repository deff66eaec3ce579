//! Two metadata services over one store: clients continue through the other one while one is killed,
//! and each change is executed once.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod calls;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Call, CallOptions, ConnectionConfig, Fault, Payload, Pool, PoolConfig, Reply, Server,
    ServerConfig, Shutdown, ShutdownHandle,
};
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClientId, Incarnation, NodeId};
use threefs_kv::Store;
use threefs_meta::protocol::CONTEXT;
use threefs_meta::{
    At, Meta, MetaChange, MetaClient, MetaClientError, MetaConfig, MetaError, NoChunks, TreeConfig,
};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, Timers};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use calls::Calls;

const CLIENTS: u128 = 4;
const KILLS: usize = 6;
/// Changes of all clients between two kills.
const CHANGES_PER_KILL: usize = 60;

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

struct Service {
    address: String,
    task: JoinHandle<()>,
    _alive: ShutdownHandle,
}

impl Service {
    /// Retries until the port of its predecessor is free.
    async fn start(store: &Store, listen: &str, mgmtd: &str) -> Self {
        let deadline = Instant::now() + Duration::from_secs(60);
        let meta = loop {
            let config = MetaConfig {
                listen: listen.into(),
                key: key().into(),
                tls: fabric::tls::ServiceTls::default(),
                store: threefs_meta::StoreConfig::folder("unused"),
                mgmtd: vec![mgmtd.into()],
                tree: TreeConfig { service_lease_ms: 500, ..TreeConfig::default() },
            };
            match Meta::open_on(store.clone(), config, Arc::new(NoChunks)).await {
                Ok(meta) => break meta,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let address = meta.address().to_string();
        let (handle, shutdown) = Shutdown::new();
        let task = tokio::spawn(async move { meta.serve(shutdown).await.unwrap() });
        Self { address, task, _alive: handle }
    }
}

/// A manager with one node, whose chains files need.
async fn start_mgmtd(folder: &Path) -> (String, ShutdownHandle) {
    let mgmtd = Mgmtd::open(MgmtdConfig {
        listen: "127.0.0.1:0".into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_meta::StoreConfig::folder(folder.join("mgmtd")),
        bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 },
        rebalance: true,
        timers: Timers { scan_ms: 5, ..Timers::one_machine() },
    })
    .await
    .unwrap();
    let address = mgmtd.address().to_string();
    let (handle, shutdown) = Shutdown::new();
    tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
    let client = MgmtdClient::new(std::slice::from_ref(&address), &key());
    let heartbeat = Heartbeat {
        node: NodeId(1),
        address: "127.0.0.1:1".into(),
        incarnation: Incarnation(1),
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    };
    client.heartbeat(heartbeat, soon()).await.unwrap();
    (address, handle)
}

/// Creates, moves and checks files under separate names until it is stopped. A change that was
/// executed twice would fail: the file would exist already, or would have moved already. Returns the
/// files and the longest time of a call.
async fn work(client: MetaClient, name: u128, stop: Arc<AtomicBool>) -> (Vec<String>, Duration) {
    let (mut files, mut longest) = (Vec::new(), Duration::ZERO);
    for number in 0.. {
        if stop.load(SeqCst) {
            break;
        }
        let (from, to) = (format!("/d/{name}-{number}"), format!("/d/{name}-{number}-moved"));
        let started = Instant::now();
        client.create(At::path(&from), true, soon()).await.unwrap();
        longest = longest.max(started.elapsed());
        let started = Instant::now();
        client.rename(At::path(&from), At::path(&to), soon()).await.unwrap();
        longest = longest.max(started.elapsed());
        client.stat(At::path(&to), soon()).await.unwrap();
        files.push(to);
    }
    (files, longest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_service_loses_and_repeats_no_change() {
    let folder = tempfile::tempdir().unwrap();
    let (mgmtd, _mgmtd) = start_mgmtd(folder.path()).await;
    let store = Store::shared_memory();
    // Both register their store at the same time.
    let (a, b) = tokio::join!(
        Service::start(&store, "127.0.0.1:0", &mgmtd),
        Service::start(&store, "127.0.0.1:0", &mgmtd)
    );
    let mut services = [a, b];
    let addresses: Vec<String> = services.iter().map(|it| it.address.clone()).collect();
    let client = |id| MetaClient::new(&addresses, &key(), ClientId(id << 32));
    client(100).make_directory(At::path("/d"), false, soon()).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> =
        (0..CLIENTS).map(|id| tokio::spawn(work(client(id), id, Arc::clone(&stop)))).collect();
    let observer = client(101);
    let mut count = 0;
    for kill in 0..KILLS {
        count += CHANGES_PER_KILL;
        while observer.list(At::path("/d"), soon()).await.unwrap().len() < count {}
        let service = &mut services[kill % 2];
        service.task.abort();
        let _ = (&mut service.task).await;
        *service = Service::start(&store, &addresses[kill % 2], &mgmtd).await;
    }
    stop.store(true, SeqCst);
    let (mut files, mut longest) = (BTreeSet::new(), Duration::ZERO);
    for client in clients {
        let (of_client, longest_call) = client.await.unwrap();
        files.extend(of_client.into_iter().map(|path| path.replace("/d/", "")));
        longest = longest.max(longest_call);
    }
    println!("{} files, {KILLS} kills, longest call {longest:?}", files.len());
    let entries = observer.list(At::path("/d"), soon()).await.unwrap();
    let names: BTreeSet<String> = entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, files);
}

/// A service that is stopped: it forwards calls to another one when it is continued.
struct Stopped {
    to: Pool,
    continued: Arc<Notify>,
    forwarded: Arc<Notify>,
}

impl fabric::rpc::Service for Stopped {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        self.continued.notified().await;
        let (payload, options) = (Payload::empty(), CallOptions::default());
        let reply = self.to.call_with(call.message, payload, soon(), options).await.unwrap();
        self.forwarded.notify_one();
        Ok(reply)
    }
}

/// A change that was refused is not executed later by a service that was stopped when it was sent
/// there first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_change_is_not_executed_by_a_late_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let (mgmtd, _mgmtd) = start_mgmtd(folder.path()).await;
    let meta = Service::start(&Store::shared_memory(), "127.0.0.1:0", &mgmtd).await;
    let (continued, forwarded) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let connection = ConnectionConfig::new(CONTEXT, key());
    let stopped = Stopped {
        to: Pool::new(&meta.address, PoolConfig::new(connection)),
        continued: Arc::clone(&continued),
        forwarded: Arc::clone(&forwarded),
    };
    let server = Server::bind("127.0.0.1:0", ServerConfig::new(CONTEXT, key())).await.unwrap();
    let addresses = [server.address().to_string(), meta.address.clone()];
    let (_alive, shutdown) = Shutdown::new();
    tokio::spawn(server.serve(stopped, shutdown));
    let other = MetaClient::new(&addresses[1..], &key(), ClientId(1));
    other.create(At::path("/file"), true, soon()).await.unwrap();

    // The first service is tried first.
    let client = MetaClient::new(&addresses, &key(), ClientId(2 << 32));
    let error = client.create(At::path("/file"), true, soon()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Refused(MetaError::Exists { .. })), "{error}");
    other.change(MetaChange::Unlink { at: At::path("/file") }, soon()).await.unwrap();
    continued.notify_one();
    forwarded.notified().await;
    let error = other.stat(At::path("/file"), soon()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Refused(MetaError::NotFound { .. })), "{error}");
}
