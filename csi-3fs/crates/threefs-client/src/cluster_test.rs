//! Tests of mgmtd, three storage services and a client in one process, with real sockets and files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId, TableId, TableVersion};
use threefs_core::layout::{ChainChoice, Layout};
use threefs_meta::ChunkTrimmer;
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdConfig, Timers};
use threefs_storage::StorageConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::*;
use crate::error::OperationName;
use crate::routing::ChunkLocation;
use crate::write::ChunkWrite;

const CHUNK_BYTES: u32 = 1 << 20;
/// Far longer than any operation: disks of shared machines can stall for seconds.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    pub(crate) mgmtd: String,
    _mgmtd_alive: ShutdownHandle,
    storage: Vec<(ShutdownHandle, JoinHandle<()>)>,
    /// Memory of each storage service for requests and replies.
    memory_bytes: usize,
}

impl Cluster {
    /// As many nodes as replicas.
    async fn start(nodes: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("key"), [7; 32]).unwrap();
        let (handle, shutdown) = Shutdown::new();
        let mgmtd = Mgmtd::open(MgmtdConfig {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            key: key(folder.path()).into(),
            tls: fabric::tls::ServiceTls::default(),
            store: threefs_mgmtd::StoreConfig::folder(folder.path().join("mgmtd")),
            bootstrap: Bootstrap { nodes, replicas: nodes, chains_per_node: 1 },
            rebalance: true,
            timers: Timers { node_failure_ms: 600, primary_lease_ms: 2000, scan_ms: 10 },
        })
        .await
        .unwrap();
        let address = mgmtd.address().to_string();
        tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
        let memory_bytes = 64 << 20;
        Self { folder, mgmtd: address, _mgmtd_alive: handle, storage: Vec::new(), memory_bytes }
    }

    pub(crate) async fn of_three(memory_bytes: usize) -> Self {
        let mut cluster = Self { memory_bytes, ..Self::start(3).await };
        for node in 1..=3 {
            let storage = cluster.start_storage(node);
            cluster.storage.push(storage);
        }
        cluster
    }

    fn start_storage(&self, node: u32) -> (ShutdownHandle, JoinHandle<()>) {
        self.start_storage_at(node, "127.0.0.1:0", None)
    }

    fn start_storage_at(
        &self,
        node: u32,
        listen: &str,
        advertise: Option<&str>,
    ) -> (ShutdownHandle, JoinHandle<()>) {
        let (handle, shutdown) = Shutdown::new();
        let advertise = advertise.map_or_else(|| "null".into(), |it| format!("\"{it}\""));
        let json = format!(
            r#"{{"node_id": {node}, "listen": "{listen}", "mgmtd": ["{}"],
                "advertise": {advertise},
                "key_file": "{}", "data": "{}", "call_timeout_ms": 300, "memory_bytes": {}}}"#,
            self.mgmtd,
            self.folder.path().join("key").display(),
            self.data(node).display(),
            self.memory_bytes,
        );
        let config: StorageConfig = serde_json::from_str(&json).unwrap();
        (handle, tokio::spawn(async move { threefs_storage::run(config, shutdown).await.unwrap() }))
    }

    /// Aborts a storage service with its handlers, as a kill does.
    pub(crate) async fn abort_storage(&mut self) {
        let (handle, task) = self.storage.remove(0);
        task.abort();
        drop((handle, task.await));
    }

    fn data(&self, node: u32) -> PathBuf {
        self.folder.path().join(format!("storage-{node}"))
    }

    /// Starts the first node again, after [`Self::abort_storage`].
    pub(crate) async fn restart_first(&mut self) {
        let storage = self.start_storage(1);
        self.storage.push(storage);
    }

    pub(crate) fn keys(&self) -> fabric::auth::keys::Keys {
        key(self.folder.path()).into()
    }

    pub(crate) fn client(&self) -> Client {
        self.client_of("127.0.0.1:1")
    }

    /// A client of a metadata service.
    pub(crate) fn client_of(&self, meta: &str) -> Client {
        let key = key(self.folder.path());
        let mut config = ClientConfig::new(vec![self.mgmtd.clone()], vec![meta.into()], key);
        config.timeout = LONG;
        Client::start(config)
    }
}

fn key(folder: &Path) -> Key {
    Key::read(&folder.join("key")).unwrap()
}

pub(crate) fn location(chain: u32, index: u32) -> ChunkLocation {
    let chunk = ChunkId::new(InodeId(42), index);
    ChunkLocation { chain: ChainId(chain), chunk, chunk_bytes: CHUNK_BYTES }
}

pub(crate) async fn whole(client: &Client) {
    let all = |it: &threefs_core::routing::RoutingInfo| {
        !it.chains.is_empty() && it.chains.values().all(|chain| chain.is_whole())
    };
    tokio::time::timeout(LONG, client.0.routing.until(all)).await.unwrap();
}

pub(crate) async fn chains(client: &Client) -> Vec<ChainId> {
    let mut attempts = crate::error::Attempts::of("test");
    let deadline = Deadline::after(LONG);
    let routing = client.0.routing.current(&mut attempts, deadline).await.unwrap().unwrap();
    routing.chains.keys().copied().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_survive_the_loss_and_return_of_a_storage_service() {
    let mut cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let what: OperationName = "test".into();
    let chains = chains(&client).await;
    let deadline = Deadline::after(LONG);
    let content = |index: u32| Bytes::from(vec![index as u8; 300_000]);
    let write = |client: Client, chain: u32, index: u32| {
        let what = Arc::clone(&what);
        async move {
            let change = ContentChange::Write { offset: 0 };
            client.update(&what, location(chain, index), change, content(index), deadline).await
        }
    };
    for index in 0..6 {
        let chain = chains[index as usize % chains.len()].0;
        write(client.clone(), chain, index).await.unwrap();
    }
    // Restarted on another port.
    cluster.abort_storage().await;
    for index in 6..12 {
        let chain = chains[index as usize % chains.len()].0;
        write(client.clone(), chain, index).await.unwrap();
    }
    let storage = cluster.start_storage(1);
    cluster.storage.push(storage);
    whole(&client).await;
    for index in 0..12 {
        let chain = chains[index as usize % chains.len()].0;
        for _replica in 0..3 {
            let read = client.read(&what, location(chain, index), 0, CHUNK_BYTES, deadline).await;
            assert_eq!(read.unwrap().unwrap(), content(index));
        }
    }
}

/// A file with more chunks than can be listed in time does not make a chain unavailable to other
/// volumes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_file_does_not_open_the_breaker_of_a_chain() {
    let cluster = Cluster::of_three(64 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let (what, change): (OperationName, _) = ("test".into(), ContentChange::Write { offset: 0 });
    let (location, content) = (location(1, 3), Bytes::from_static(&[1; 100]));
    client.update(&what, location, change, content, Deadline::after(LONG)).await.unwrap();
    let layout = Layout {
        table: TableId(1),
        table_version: TableVersion(1),
        chunk_bytes: CHUNK_BYTES,
        stripe: 1,
        chains: ChainChoice::Explicit(vec![ChainId(1)]),
    };
    let end = async |wait: Duration| {
        let range = 0..u64::from(CHUNK_BYTES) * 9;
        ChunkTrimmer::stored_end(&client, InodeId(42), &layout, range, Deadline::after(wait)).await
    };
    end(Duration::ZERO).await.unwrap_err();
    assert_eq!(end(LONG).await, Ok(u64::from(CHUNK_BYTES) * 3 + 100));
}

/// A network that can delay data of its current connections, as a partition does: the kernels
/// deliver it when the partition ends. Later connections are not delayed.
struct Network {
    address: String,
    blocked_up_to: watch::Sender<u64>,
}

impl Network {
    async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let blocked_up_to = watch::Sender::new(0);
        let gate = blocked_up_to.subscribe();
        tokio::spawn(async move {
            for number in 1.. {
                let Ok((client, _)) = listener.accept().await else { return };
                tokio::spawn(relay(client, server.clone(), number, gate.clone()));
            }
        });
        Self { address, blocked_up_to }
    }
}

async fn relay(
    client: TcpStream,
    server: String,
    number: u64,
    mut blocked_up_to: watch::Receiver<u64>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from_client.read(&mut buffer).await.unwrap_or(0);
        let passes = blocked_up_to.wait_for(|up_to| number > *up_to).await.is_ok();
        if read == 0 || !passes || to_server.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_delayed_by_a_partition_do_not_overwrite_those_of_the_next_holder() {
    let mut cluster = Cluster::start(1).await;
    // A separate address, so that the port is free when the service starts.
    let port = TcpListener::bind("127.93.7.1:0").await.unwrap().local_addr().unwrap();
    let network = Network::to(port.to_string()).await;
    let storage = cluster.start_storage_at(1, &port.to_string(), Some(&network.address));
    cluster.storage.push(storage);
    let what: OperationName = "test".into();
    let deadline = Deadline::after(LONG);
    let write = async |client: &Client, content: &'static [u8]| {
        let change = ContentChange::Write { offset: 0 };
        let content = Bytes::from_static(content);
        client.update(&what, location(1, 0), change, content, deadline).await
    };
    let former = cluster.client();
    whole(&former).await;
    former.lease().renew_until(BootInstant::now().after(Duration::from_secs(60)));
    // One write over each of its connections.
    for _ in 0..2 {
        write(&former, b"first").await.unwrap();
    }
    network.blocked_up_to.send_replace(u64::MAX);
    let end = BootInstant::now().after(Duration::from_millis(500));
    former.lease().renew_until(end);
    let result = tokio::time::timeout(Duration::from_millis(250), write(&former, b"FORMER")).await;
    assert!(result.is_err(), "the write was delayed");
    // A node that wants the claim waits at least this long.
    tokio::time::sleep(end.remaining()).await;
    network.blocked_up_to.send_replace(2);
    let next = cluster.client();
    write(&next, b"next").await.unwrap();
    network.blocked_up_to.send_replace(0);
    // Answered after the delayed data, over the same connections.
    for client in [&former, &former, &next] {
        let read = client.read(&what, location(1, 0), 0, CHUNK_BYTES, deadline).await;
        assert_eq!(read.unwrap().unwrap(), &b"nextt"[..]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_write_of_a_killed_daemon_does_not_overwrite_that_of_its_successor() {
    let mut cluster = Cluster::start(1).await;
    let port = TcpListener::bind("127.93.7.2:0").await.unwrap().local_addr().unwrap();
    let network = Network::to(port.to_string()).await;
    let storage = cluster.start_storage_at(1, &port.to_string(), Some(&network.address));
    cluster.storage.push(storage);
    let what: OperationName = "test".into();
    let deadline = Deadline::after(LONG);
    let write = async |client: &Client, content: &'static [u8]| {
        let change = ContentChange::Write { offset: 0 };
        let content = Bytes::from_static(content);
        client.update(&what, location(1, 0), change, content, deadline).await
    };
    let mount = ClientId(0xfeed << 32);
    let former = cluster.client();
    former.tag_as_mount(mount, 1);
    whole(&former).await;
    // One write over each of its connections.
    for _ in 0..2 {
        write(&former, b"first").await.unwrap();
    }
    network.blocked_up_to.send_replace(u64::MAX);
    let result = tokio::time::timeout(Duration::from_millis(250), write(&former, b"XXXXX")).await;
    assert!(result.is_err(), "the write was delayed");
    network.blocked_up_to.send_replace(2);
    // The kernel resends the request to the next daemon; then the program writes again.
    let next = cluster.client();
    next.tag_as_mount(mount, 2);
    write(&next, b"XXXXX").await.unwrap();
    write(&next, b"YYYYY").await.unwrap();
    network.blocked_up_to.send_replace(0);
    // Answered after the delayed data, over the same connections.
    for client in [&former, &former, &next] {
        let read = client.read(&what, location(1, 0), 0, CHUNK_BYTES, deadline).await;
        assert_eq!(read.unwrap().unwrap(), &b"YYYYY"[..]);
    }
    let error = write(&former, b"XXXXX").await.unwrap_err();
    assert!(error.to_string().contains("has replaced it"), "{error}");
}

/// All budgets of the storage services are filled by client updates that need forwards to each
/// other's nodes: with one budget for both, they would deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_over_small_budgets_do_not_deadlock_the_chains() {
    const WRITERS: u32 = 12;
    const CHUNKS: u32 = 8;
    // Each class has space for one chunk or less, granted one at a time.
    let cluster = Cluster::of_three(8 << 20).await;
    let client = cluster.client();
    whole(&client).await;
    let what: OperationName = "test".into();
    let chains = chains(&client).await;
    let deadline = Deadline::after(Duration::from_secs(60));
    let content = |index: u32| Bytes::from(vec![index as u8; CHUNK_BYTES as usize]);
    let chain = |index: u32| chains[index as usize % chains.len()].0;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let (client, what) = (cluster.client(), Arc::clone(&what));
        let writes = (0..CHUNKS).map(|it| writer * CHUNKS + it).map(|index| ChunkWrite {
            what: Arc::clone(&what),
            location: location(chain(index), index),
            offset: 0,
            payload: content(index),
        });
        let writes = writes.collect();
        writers.spawn(async move { client.write_chunks(writes, &deadline.into()).await });
    }
    while let Some(written) = writers.join_next().await {
        written.unwrap().unwrap();
    }
    for index in 0..WRITERS * CHUNKS {
        let read =
            client.read(&what, location(chain(index), index), 0, CHUNK_BYTES, deadline).await;
        assert_eq!(read.unwrap().unwrap(), content(index));
    }
}
