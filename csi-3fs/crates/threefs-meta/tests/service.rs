//! Services as real processes: clients continue while they are killed; behaviour without chains.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod calls;

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Connection, ConnectionConfig, Payload, Shutdown, encode};
use rand::Rng;
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClientId, Incarnation, NodeId};
use threefs_kv::StoreConfig;
use threefs_meta::protocol::{ATTRIBUTE_BYTES_MAX, CONTEXT, VERSION, Versioned};
use threefs_meta::{
    At, Identity, Meta, MetaChange, MetaClient, MetaClientError, MetaConfig, MetaError, MetaQuery,
    MetaRequest, MetaRunError, NoChunks, SetMode, TreeConfig,
};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, MgmtdError, Timers};

use calls::Calls;

/// Makes a copy of this program run as a service: kind, its address, mgmtd's, folder.
const CHILD: &str = "THREEFS_META_TEST_CHILD";
/// Bytes that this process has allocated. Resident memory would also count mapped pages of stores,
/// and freed memory of concurrent tests that the allocator keeps.
struct Counting;
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all of it is the system's allocator; the counter changes no pointer and no layout.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of times that services are killed.
const KILLS: usize = 8;

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Runs as a service until killed. It never shuts down: the handle is kept.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn be_service(kind: &str, listen: &str, mgmtd: &str, folder: &Path) {
    // The services end with the test.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let (_handle, shutdown) = Shutdown::new();
    if kind == "mgmtd" {
        return threefs_mgmtd::run(self::mgmtd(listen, folder), shutdown).await.unwrap();
    }
    threefs_meta::run(meta(listen, mgmtd, folder), Arc::new(NoChunks), shutdown).await.unwrap();
}

fn mgmtd(listen: &str, folder: &Path) -> MgmtdConfig {
    MgmtdConfig {
        listen: listen.into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_meta::StoreConfig::folder(folder.join("mgmtd")),
        bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 },
        rebalance: true,
        timers: Timers { scan_ms: 5, ..Timers::one_machine() },
    }
}

fn meta(listen: &str, mgmtd: &str, folder: &Path) -> MetaConfig {
    MetaConfig {
        listen: listen.into(),
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_meta::StoreConfig::folder(folder.join("meta")),
        mgmtd: vec![mgmtd.into()],
        tree: TreeConfig::default(),
    }
}

/// A service in a separate process, killed when dropped.
struct Service {
    arguments: String,
    child: Child,
}

impl Service {
    fn start(kind: &str, listen: &str, mgmtd: &str, folder: &Path) -> Self {
        let arguments = format!("{kind} {listen} {mgmtd} {}", folder.display());
        let child = Self::spawn(&arguments);
        Self { arguments, child }
    }

    fn spawn(arguments: &str) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed_services_neither_lose_nor_repeat_changes"])
            .env(CHILD, arguments)
            .spawn()
            .unwrap()
    }

    fn kill_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(&self.arguments);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn killed_services_neither_lose_nor_repeat_changes() {
    match std::env::var(CHILD) {
        Err(_) => {
            tokio::runtime::Runtime::new().unwrap().block_on(work_while_services_are_killed());
        }
        Ok(arguments) => {
            let words: Vec<&str> = arguments.splitn(4, ' ').collect();
            let [kind, listen, mgmtd, folder] = words[..] else { panic!("{arguments}") };
            be_service(kind, listen, mgmtd, Path::new(folder));
        }
    }
}

async fn work_while_services_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (mgmtd_address, meta_address) = (free_address(), free_address());
    let start =
        |kind: &str, listen: &str| Service::start(kind, listen, &mgmtd_address, folder.path());
    let mut services = [start("mgmtd", &mgmtd_address), start("meta", &meta_address)];
    let mgmtd = MgmtdClient::new(std::slice::from_ref(&mgmtd_address), &key());
    let heartbeat = Heartbeat {
        node: NodeId(1),
        address: "127.0.0.1:1".into(),
        incarnation: Incarnation(1),
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    };
    mgmtd.heartbeat(heartbeat, soon()).await.unwrap();
    let client = MetaClient::new(std::slice::from_ref(&meta_address), &key(), ClientId(7));
    client.make_directory(At::path("/d"), false, soon()).await.unwrap();
    let (sender, mut renames) = tokio::sync::mpsc::unbounded_channel();
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (client, sender) = (client.clone(), sender.clone());
            tokio::spawn(async move {
                let mut number = 0;
                while client.stat(At::path("/stop"), soon()).await.is_err() {
                    let file = format!("/d/{worker}-{number}");
                    let part = format!("{file}.part");
                    // Exclusive: a change that is executed twice fails with `Exists` or `NotFound`.
                    client.create(At::path(&part), true, soon()).await.unwrap();
                    client.rename(At::path(part), At::path(file), soon()).await.unwrap();
                    number += 1;
                    sender.send(()).unwrap();
                }
                number
            })
        })
        .collect();
    drop(sender); // workers that all failed end the wait below
    for kill in 0..KILLS {
        // After this many files, at some time during the next one.
        for _ in 0..rand::rng().random_range(15..60) {
            renames.recv().await.unwrap();
        }
        tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..5_000))).await;
        services[usize::from(kill % 4 != 0)].kill_and_restart();
    }
    client.make_directory(At::path("/stop"), false, soon()).await.unwrap();
    let mut files = 0;
    for worker in workers {
        files += worker.await.unwrap();
    }
    let names = client.list(At::path("/d"), soon()).await.unwrap();
    assert_eq!(names.len(), files);
    assert!(names.iter().all(|entry| !entry.name.ends_with(".part")));
    assert!(files > 100, "only {files} files: too little to say anything");
    assert_eq!(mgmtd.status(soon()).await.unwrap().epoch, 3);
}

/// An mgmtd of one node that never registers, in this process.
async fn start_mgmtd(
    folder: &Path,
) -> (tokio::task::JoinHandle<()>, fabric::rpc::ShutdownHandle, String) {
    let (handle, shutdown) = Shutdown::new();
    let mgmtd = Mgmtd::open(mgmtd("127.0.0.1:0", folder)).await.unwrap();
    let address = mgmtd.address().to_string();
    let task = tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
    (task, handle, address)
}

/// Connections of a stopped service may keep its store open for a moment.
async fn until_free<T, E: std::fmt::Display>(
    mut open: impl AsyncFnMut() -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..600 {
        match open().await {
            Err(error) if error.to_string().contains("another process holds the folder") => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            opened => return opened,
        }
    }
    open().await
}

/// Runs a metadata service until it has answered a client or has stopped.
async fn try_meta(folder: &Path, mgmtd: &str, name: &str) -> Result<(), MetaRunError> {
    let (handle, shutdown) = Shutdown::new();
    let config = || MetaConfig {
        store: threefs_meta::StoreConfig::folder(folder.join(name)),
        ..meta("127.0.0.1:0", mgmtd, folder)
    };
    let meta = until_free(async || Meta::open(config(), Arc::new(NoChunks)).await).await?;
    let client = MetaClient::new(&[meta.address().to_string()], &key(), ClientId(1));
    let serving = meta.serve(shutdown);
    tokio::pin!(serving);
    let request = client.make_directory(At::path("/d"), true, soon());
    tokio::select! {
        ended = &mut serving => return ended,
        request = request => request.unwrap(),
    };
    handle.request();
    serving.await
}

#[tokio::test]
async fn a_store_of_another_cluster_is_refused_until_it_is_adopted() {
    let folder = tempfile::tempdir().unwrap();
    let (_mgmtd, _keep, mgmtd) = start_mgmtd(&folder.path().join("a")).await;
    let (_other, _keep_other, other) = start_mgmtd(&folder.path().join("b")).await;
    let path = folder.path();
    for _ in 0..2 {
        try_meta(path, &mgmtd, "meta").await.unwrap();
    }
    let refusal = |result: Result<(), MetaRunError>| match result {
        Err(MetaRunError::Refused(error)) => error,
        other => panic!("{other:?}"),
    };
    let error = refusal(try_meta(path, &other, "meta").await);
    assert!(matches!(error, MgmtdError::TreeOfOtherCluster { .. }), "{error}");
    let error = refusal(try_meta(path, &mgmtd, "empty").await);
    assert!(matches!(error, MgmtdError::ForeignTree { .. }), "{error}");
    assert!(error.to_string().contains("threefs meta adopt"), "{error}");
    until_free(async || threefs_meta::adopt(StoreConfig::folder(path.join("empty"))).await)
        .await
        .unwrap();
    for _ in 0..2 {
        try_meta(path, &mgmtd, "empty").await.unwrap();
    }
    let error = refusal(try_meta(path, &mgmtd, "meta").await);
    assert!(matches!(error, MgmtdError::ForeignTree { .. }), "{error}");
}

#[tokio::test]
async fn an_old_copy_of_the_store_is_refused_and_a_dump_of_it_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let (_mgmtd, _keep, mgmtd) = start_mgmtd(path).await;
    try_meta(path, &mgmtd, "meta").await.unwrap();
    let dump = path.join("dump");
    let meta = StoreConfig::folder(path.join("meta"));
    threefs_kv::dump(&meta, threefs_meta::DUMP_KIND, &dump, &|_, _| true).await.unwrap();
    std::fs::create_dir(path.join("copy")).unwrap();
    std::fs::copy(path.join("meta/data.mdb"), path.join("copy/data.mdb")).unwrap();
    try_meta(path, &mgmtd, "meta").await.unwrap();
    match try_meta(path, &mgmtd, "copy").await {
        Err(MetaRunError::Refused(MgmtdError::OldTree { generation: 2, newest: 2, .. })) => {}
        other => panic!("{other:?}"),
    }
    let restored = StoreConfig::folder(path.join("restored"));
    threefs_meta::restore(&restored, &dump, &|_, _| true).await.unwrap();
    for _ in 0..2 {
        try_meta(path, &mgmtd, "restored").await.unwrap();
    }
    match try_meta(path, &mgmtd, "meta").await {
        Err(MetaRunError::Refused(MgmtdError::OldTree { generation: 3, newest: 4, .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn without_chains_directories_work_and_files_wait_until_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let (_mgmtd, _keep, mgmtd) = start_mgmtd(folder.path()).await;
    let config = meta("127.0.0.1:0", &mgmtd, folder.path());
    let meta = Meta::open(config, Arc::new(NoChunks)).await.unwrap();
    let (_handle, shutdown) = Shutdown::new();
    let address = meta.address().to_string();
    tokio::spawn(meta.serve(shutdown));
    let client = MetaClient::new(std::slice::from_ref(&address), &key(), ClientId(1));
    client.make_directory(At::path("/d/e"), true, soon()).await.unwrap();
    // A deadline before the first reply does not report chains: retry with a longer one.
    for seconds in [1, 4, 16, 64] {
        let started = Instant::now();
        let deadline = Deadline::after(Duration::from_secs(seconds));
        let error = client.create(At::path("/d/file"), true, deadline).await.unwrap_err();
        if let MetaClientError::Refused(MetaError::Unavailable { detail }) = &error {
            assert!(detail.contains("no chains yet"), "{error}");
            let waited = started.elapsed() + Duration::from_millis(100);
            assert!(waited >= Duration::from_secs(seconds), "gave up after {waited:?}");
            return;
        }
    }
    panic!("no answer in a minute");
}

/// Messages of older releases have no version; those of later ones have another.
#[tokio::test]
async fn clients_of_other_versions_are_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let (_mgmtd, _keep, mgmtd) = start_mgmtd(folder.path()).await;
    let meta = Meta::open(meta("127.0.0.1:0", &mgmtd, folder.path()), Arc::new(NoChunks));
    let meta = meta.await.unwrap();
    let (_handle, shutdown) = Shutdown::new();
    let address = meta.address().to_string();
    tokio::spawn(meta.serve(shutdown));
    MetaClient::new(std::slice::from_ref(&address), &key(), ClientId(1))
        .stat(At::path("/"), soon())
        .await
        .unwrap();
    let config = ConnectionConfig::new(CONTEXT, key());
    let connection = Connection::open(&address, config, soon()).await.unwrap();
    let caller = Identity::ROOT;
    let query = MetaRequest::Query { caller: caller.clone(), query: MetaQuery::Status };
    let id = threefs_meta::RequestId { client: ClientId(2), sequence: 1, finished_below: 0 };
    let change = MetaChange::RemoveTree { at: At::path("/") };
    let change = MetaRequest::Change { id, caller, change };
    let later = [&[VERSION + 1], &encode(&query).unwrap()[..]].concat().into();
    for message in [encode(&query).unwrap(), encode(&change).unwrap(), later] {
        let error = connection.call(message, Payload::empty(), soon()).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("BadRequest") && text.contains("of the messages of threefs/meta"),
            "{text}"
        );
        assert!(text.contains("upgrade"), "{text}");
    }
}

/// Forwards what clients send, and no replies once `stop` is set.
async fn relay_that_stops(server: String, stop: tokio::sync::watch::Receiver<bool>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = tokio::net::TcpStream::connect(&server).await else { return };
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let mut stop = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => {}
                    _ = tokio::io::copy(&mut from_server, &mut to_client) => return,
                }
                // The connection stays open, and the relay reads nothing.
                std::future::pending::<()>().await;
            });
        }
    });
    address
}

/// Clients that request long replies and do not receive them: their connections end, the memory
/// stays bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_replies_do_not_fill_the_memory() {
    const CONNECTIONS: usize = 20;
    const CALLS: usize = 400;
    let folder = tempfile::tempdir().unwrap();
    let (_mgmtd, _keep, mgmtd) = start_mgmtd(folder.path()).await;
    let config = meta("127.0.0.1:0", &mgmtd, folder.path());
    let meta = Meta::open(config, Arc::new(NoChunks)).await.unwrap();
    let (_handle, shutdown) = Shutdown::new();
    let address = meta.address().to_string();
    tokio::spawn(meta.serve(shutdown));
    let client = MetaClient::new(std::slice::from_ref(&address), &key(), ClientId(1));
    let (at, name) = (At::path("/"), "user.long".to_owned());
    let value = Some(vec![7; ATTRIBUTE_BYTES_MAX]);
    let set =
        MetaChange::SetAttribute { at: at.clone(), name: name.clone(), value, mode: SetMode::Any };
    client.change(set, soon()).await.unwrap();

    let (stop, stop_signal) = tokio::sync::watch::channel(false);
    let relay = relay_that_stops(address, stop_signal).await;
    let query = MetaQuery::GetAttribute { at, name };
    let request = MetaRequest::Query { caller: Identity::ROOT, query };
    let request = encode(&Versioned::of(&request)).unwrap();
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let config = ConnectionConfig::new(CONTEXT, key());
        let connection = Arc::new(Connection::open(&relay, config, soon()).await.unwrap());
        connection.call(request.clone(), Payload::empty(), soon()).await.unwrap();
        connections.push(connection);
    }
    stop.send_replace(true);
    let before = ALLOCATED.load(Relaxed);
    let mut calls = tokio::task::JoinSet::new();
    for connection in &connections {
        for _ in 0..CALLS {
            let (connection, request) = (Arc::clone(connection), request.clone());
            calls.spawn(async move {
                let deadline = Deadline::after(Duration::from_secs(8));
                connection.call(request, Payload::empty(), deadline).await
            });
        }
    }
    // Until the callers time out: the relay does not notify them that the service closes the
    // connections with the replies that hold the memory.
    loop {
        let ended = tokio::time::timeout(Duration::from_millis(20), calls.join_next()).await;
        let growth_bytes = ALLOCATED.load(Relaxed).saturating_sub(before);
        // 64 MiB of replies, each in encoded and in sent form, and 8,000 calls. Without a bound:
        // 512 MiB.
        assert!(growth_bytes < 256 << 20, "{growth_bytes} bytes of replies are kept");
        if ended.is_ok() {
            break;
        }
    }
    client.stat(At::path("/"), soon()).await.unwrap();
}
