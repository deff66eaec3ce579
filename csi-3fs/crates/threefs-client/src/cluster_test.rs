//! mgmtd, three storage services and a client in one process, over real sockets and files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::chunk::ContentChange;
use threefs_core::ids::{ChainId, ChunkId, InodeId};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdConfig, Timers};
use threefs_storage::StorageConfig;
use tokio::task::JoinHandle;

use super::*;
use crate::chunks::{Place, What};

const CHUNK_BYTES: u32 = 1 << 20;

struct Cluster {
    folder: tempfile::TempDir,
    mgmtd: String,
    _mgmtd_alive: ShutdownHandle,
    storage: Vec<(ShutdownHandle, JoinHandle<()>)>,
}

impl Cluster {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("key"), [7; 32]).unwrap();
        let (handle, shutdown) = Shutdown::new();
        let mgmtd = Mgmtd::open(MgmtdConfig {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            key: key(folder.path()),
            store_path: folder.path().join("mgmtd"),
            bootstrap: Bootstrap { nodes: 3, replicas: 3, chains_per_node: 1 },
            rebalance: true,
            timers: Timers { node_failure_ms: 600, primary_lease_ms: 2000, scan_ms: 10 },
        })
        .await
        .unwrap();
        let address = mgmtd.address().to_string();
        tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
        let mut cluster =
            Self { folder, mgmtd: address, _mgmtd_alive: handle, storage: Vec::new() };
        for node in 1..=3 {
            let started = cluster.start_storage(node);
            cluster.storage.push(started);
        }
        cluster
    }

    fn start_storage(&self, node: u32) -> (ShutdownHandle, JoinHandle<()>) {
        let (handle, shutdown) = Shutdown::new();
        let json = format!(
            r#"{{"node_id": {node}, "listen": "127.0.0.1:0", "mgmtd": ["{}"],
                "key_file": "{}", "data": "{}", "call_timeout_ms": 300}}"#,
            self.mgmtd,
            self.folder.path().join("key").display(),
            self.data(node).display(),
        );
        let config: StorageConfig = serde_json::from_str(&json).unwrap();
        (handle, tokio::spawn(async move { threefs_storage::run(config, shutdown).await.unwrap() }))
    }

    fn data(&self, node: u32) -> PathBuf {
        self.folder.path().join(format!("storage-{node}"))
    }

    fn client(&self) -> Client {
        let key = key(self.folder.path());
        let mut config = ClientConfig::new(vec![self.mgmtd.clone()], "127.0.0.1:1".into(), key);
        config.timeout = Duration::from_secs(20);
        Client::start(config)
    }
}

fn key(folder: &Path) -> Key {
    Key::read(&folder.join("key")).unwrap()
}

fn place(chain: u32, index: u32) -> Place {
    let chunk = ChunkId::new(InodeId(42), index);
    Place { chain: ChainId(chain), chunk, chunk_bytes: CHUNK_BYTES }
}

async fn whole(client: &Client) {
    let all = |it: &threefs_core::routing::RoutingInfo| {
        !it.chains.is_empty() && it.chains.values().all(|chain| chain.is_whole())
    };
    tokio::time::timeout(Duration::from_secs(20), client.0.routing.until(all)).await.unwrap();
}

async fn chains(client: &Client) -> Vec<ChainId> {
    let mut attempts = crate::error::Attempts::of("test");
    let deadline = Deadline::after(Duration::from_secs(5));
    let routing = client.0.routing.newest(&mut attempts, deadline).await.unwrap().unwrap();
    routing.chains.keys().copied().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_survive_the_loss_and_return_of_a_storage_service() {
    let mut cluster = Cluster::start().await;
    let client = cluster.client();
    whole(&client).await;
    let what: What = "test".into();
    let chains = chains(&client).await;
    let deadline = Deadline::after(Duration::from_secs(20));
    let content = |index: u32| Bytes::from(vec![index as u8; 300_000]);
    let write = |client: Client, chain: u32, index: u32| {
        let what = Arc::clone(&what);
        async move {
            let change = ContentChange::Write { offset: 0 };
            client.update(&what, place(chain, index), change, content(index), deadline).await
        }
    };
    for index in 0..6 {
        let chain = chains[index as usize % chains.len()].0;
        write(client.clone(), chain, index).await.unwrap();
    }
    // Its handlers are cut off as a kill would; it comes back on another port.
    let (handle, task) = cluster.storage.remove(0);
    task.abort();
    drop((handle, task.await));
    let begun = Instant::now();
    for index in 6..12 {
        let chain = chains[index as usize % chains.len()].0;
        write(client.clone(), chain, index).await.unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let started = cluster.start_storage(1);
    cluster.storage.push(started);
    whole(&client).await;
    for index in 0..12 {
        let chain = chains[index as usize % chains.len()].0;
        for _replica in 0..3 {
            let read = client.read(&what, place(chain, index), 0, CHUNK_BYTES, deadline).await;
            assert_eq!(read.unwrap().unwrap(), content(index));
        }
    }
}
