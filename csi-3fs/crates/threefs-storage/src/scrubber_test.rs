//! Tests of scrubs of two replicas in one process, with real sockets, stores and files.

use std::os::unix::fs::FileExt;
use std::path::Path;

use fabric::auth::Key;
use fabric::rpc::{Server, ServerConfig, Shutdown, ShutdownHandle};
use tempfile::TempDir;
use threefs_chunkstore::{ChunkStore, DiskBudget};
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::fence::{FenceTable, Fences, VolumeFence};
use threefs_core::heartbeat::{DataFolder, HeartbeatReply, LocalReport, LocalState};
use threefs_core::ids::{
    ChainId, ChainVersion, ChunkVersion, ClusterId, Epoch, FencesVersion, Incarnation, InodeId,
    NodeId, RoutingVersion, TargetId,
};
use threefs_core::routing::{Chain, ChainTarget, NodeInfo, PublicState, RoutingInfo};
use threefs_core::shown::ShownEpochs;

use threefs_core::ids::StoreId;
use threefs_core::scrub::ScrubStatus;

use super::*;
use crate::context::NodeContext;
use crate::node::Node;
use crate::nodes::Nodes;
use crate::peers::Peers;
use crate::port::Port;
use crate::store::Disk;

const LONG: Duration = Duration::from_secs(60);
const CHAIN: ChainId = ChainId(1);
const CHUNKS: u32 = 150;

/// One node with one target, and its port.
struct Replica {
    node: Arc<Node>,
    id: u32,
    address: String,
    _port: ShutdownHandle,
}

impl Replica {
    async fn start(folder: &Path, id: u32) -> Self {
        let config = serde_json::json!({
            "node_id": id, "listen": "127.0.0.1:0", "mgmtd": [], "key_file": "",
            "data": folder.join(id.to_string()), "scrub_interval_s": 0,
            "scrub_bytes_per_second": u32::MAX,
        });
        std::fs::create_dir_all(folder.join(id.to_string())).unwrap();
        let key = Key::from_bytes(b"a key of sixteen bytes or more").unwrap();
        let disk =
            Disk { budget: Arc::new(DiskBudget::default()), open: Arc::new(crate::store::open) };
        let context = NodeContext::new(Arc::new(Peers::new(&(&key).into(), LONG)));
        let mut node = Node::new(
            serde_json::from_value(config).unwrap(),
            Incarnation(1),
            context,
            disk,
            DataFolder::Empty,
        );
        let mut limits = Limits::new(u64::from(u32::MAX));
        limits.confirm_after = Duration::from_millis(20);
        node.scrub_limits = Arc::new(limits);
        let node = Arc::new(node);
        let mut server = ServerConfig::new(crate::CONTEXT, &key);
        server.budgets = crate::admission::budgets(64 << 20);
        let server = Server::bind("127.0.0.1:0", server).await.unwrap();
        let address = server.address().to_string();
        let (port, shutdown) = Shutdown::new();
        let nodes = Arc::new(Nodes::default());
        nodes.insert(Arc::clone(&node));
        let routing = tokio::sync::watch::channel(Arc::default()).1;
        let service = Port { nodes, routing, keys: (&key).into() };
        tokio::spawn(async move { server.serve(service, shutdown).await });
        Self { node, id, address, _port: port }
    }

    async fn target(&self) -> Arc<Target> {
        let id = TargetId(self.id.into());
        let wait = async {
            loop {
                if let Some(target) = self.node.target(id) {
                    return target;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.unwrap()
    }

    /// Runs a pass; returns the status after it.
    async fn scrub(&self) -> ScrubStatus {
        let target = self.target().await;
        let passes = |status: &ScrubStatus| (status.running, status.last);
        let before = target.scrub(true);
        let wait = async {
            loop {
                let status = target.scrub(false);
                if status.running.is_none() && passes(&status) != passes(&before) {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.unwrap()
    }

    async fn until(&self, state: LocalState, version: u32) {
        let expected = LocalReport { state, chain_version: ChainVersion(version) };
        let target = self.target().await;
        let wait = async {
            while target.report().0.report != expected {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let ended = tokio::time::timeout(LONG, wait).await;
        assert!(ended.is_ok(), "not {state:?}: {:?}", target.scrub(false));
    }
}

/// A chain of two replicas with the same chunks.
struct Fixture {
    replicas: [Replica; 2],
    folder: TempDir,
}

impl Fixture {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let replicas =
            [Replica::start(folder.path(), 1).await, Replica::start(folder.path(), 2).await];
        let fixture = Self { replicas, folder };
        fixture.publish(1, PublicState::LastSrv);
        for replica in &fixture.replicas {
            let store = Arc::clone(&replica.target().await.store);
            for index in 0..CHUNKS {
                put(&*store, index, 1, &content(index));
            }
        }
        fixture.publish(2, PublicState::Serving);
        for replica in &fixture.replicas {
            replica.until(LocalState::UpToDate, 2).await;
        }
        fixture
    }

    fn publish(&self, version: u32, state: PublicState) {
        let targets = self.replicas.iter().map(|replica| ChainTarget {
            target: TargetId(replica.id.into()),
            node: NodeId(replica.id),
            state,
        });
        let chain = Chain { id: CHAIN, version: ChainVersion(version), targets: targets.collect() };
        let nodes = self.replicas.iter().map(|replica| {
            let (id, address) = (NodeId(replica.id), replica.address.clone());
            (id, NodeInfo { id, address, location: Default::default() })
        });
        let routing = Arc::new(RoutingInfo {
            cluster: ClusterId(5),
            version: RoutingVersion(version.into()),
            nodes: nodes.collect(),
            chains: [(CHAIN, chain)].into(),
            ..RoutingInfo::default()
        });
        for replica in &self.replicas {
            let node = &replica.node;
            node.update_routing(&routing);
            let (routing_version, lease_ms) = (routing.version, u32::MAX.into());
            let reply = HeartbeatReply { routing_version, lease_ms };
            node.heartbeat_answered(node.context.clock.now(), reply, FencesVersion(0));
        }
    }

    /// Flips a bit of a chunk in the data file of a replica.
    fn damage(&self, replica: u32, index: u32) {
        let path = self.data_file(replica);
        let at = std::fs::read(&path).unwrap();
        let at = at.windows(4096).step_by(4096).position(|it| it == &content(index)[..4096]);
        let offset = at.unwrap() as u64 * 4096 + 7;
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[content(index)[7] ^ 1], offset).unwrap();
    }

    fn data_file(&self, replica: u32) -> std::path::PathBuf {
        self.folder.path().join(format!("{replica}/target-{replica}/data"))
    }
}

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(9), index)
}

fn content(index: u32) -> Vec<u8> {
    (0..8_192_u32).map(|at| (at / 3 + index * 7 + (at % 4096) * index) as u8 | 1).collect()
}

fn put(store: &dyn ChunkStore, index: u32, version: u64, content: &[u8]) {
    put_chunk(store, chunk(index), version, content);
}

fn put_chunk(store: &dyn ChunkStore, chunk: ChunkId, version: u64, content: &[u8]) {
    let update = StoreUpdate {
        chunk,
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.apply(&update, content).unwrap();
    store.commit(chunk, ChunkVersion(version), ChainVersion(1)).unwrap();
}

fn read(store: &dyn ChunkStore, index: u32) -> Option<Vec<u8>> {
    store.read(chunk(index), Which::Committed, 0, u32::MAX).map(|outcome| outcome.bytes).ok()
}

#[tokio::test]
async fn intact_replicas_are_read_and_nothing_changes() {
    let fixture = Fixture::start().await;
    for replica in &fixture.replicas {
        let status = replica.scrub().await;
        let pass = status.last.unwrap();
        assert_eq!((pass.chunks, pass.bytes), (CHUNKS.into(), u64::from(CHUNKS) * 8_192));
        assert_eq!((pass.damaged, pass.different, status.damaged, status.different), (0, 0, 0, 0));
        assert_eq!(replica.target().await.report().0.report.state, LocalState::UpToDate);
    }
}

#[tokio::test]
async fn damage_of_one_replica_is_repaired_and_damage_of_both_is_reported() {
    let fixture = Fixture::start().await;
    for index in [3, 70, 149] {
        fixture.damage(2, index);
    }
    fixture.damage(1, 20);
    fixture.damage(1, 70);
    let lost = std::fs::read(fixture.data_file(1)).unwrap();
    let status = fixture.replicas[1].scrub().await;
    let pass = status.last.unwrap();
    assert_eq!((pass.damaged, pass.repaired, pass.different), (3, 2, 0));
    assert_eq!((status.damaged, status.damaged_chunks), (1, vec![chunk(70)]));
    let status = fixture.replicas[0].scrub().await;
    assert_eq!(status.damaged_chunks, [chunk(70)]);
    assert_eq!(status.total.repaired, 1);
    // Neither replaced nor removed.
    let now = std::fs::read(fixture.data_file(1)).unwrap();
    let damaged = |data: &[u8]| {
        let flipped = content(70)[7] ^ 1;
        data.chunks(4096).any(|it| it.get(7) == Some(&flipped) && it[8..] == content(70)[8..4096])
    };
    assert!(damaged(&lost) && damaged(&now));
    for replica in &fixture.replicas {
        let store = Arc::clone(&replica.target().await.store);
        for index in (0..CHUNKS).filter(|index| *index != 70) {
            assert_eq!(read(&*store, index), Some(content(index)), "chunk {index}");
        }
        assert_eq!(read(&*store, 70), None);
        // A client writes the chunk again.
        put(&*store, 70, 2, &content(1_000));
    }
    for replica in &fixture.replicas {
        assert_eq!(replica.scrub().await.damaged, 0);
    }
}

#[tokio::test]
async fn the_report_of_a_removed_chunk_ends_with_the_next_pass() {
    let fixture = Fixture::start().await;
    for (replica, index) in [(1, 3), (2, 3), (1, 149), (2, 149)] {
        fixture.damage(replica, index);
    }
    for replica in &fixture.replicas {
        assert_eq!(replica.scrub().await.damaged_chunks, [chunk(3), chunk(149)]);
        let store = Arc::clone(&replica.target().await.store);
        store.forget(chunk(3)).unwrap();
        store.forget(chunk(149)).unwrap();
    }
    for replica in &fixture.replicas {
        let status = replica.scrub().await;
        assert_eq!((status.damaged_chunks, status.total.repaired), (vec![], 0));
    }
}

#[tokio::test]
async fn a_replica_with_other_content_stops_serving_and_is_synced() {
    for stale in [true, false] {
        let fixture = Fixture::start().await;
        if stale {
            put(&*fixture.replicas[0].target().await.store, 100, 2, &content(5));
        } else {
            // Damage that its checksums do not detect.
            put(&*fixture.replicas[1].target().await.store, 100, 1, &content(5));
        }
        let replica = &fixture.replicas[1];
        replica.target().await.scrub(true);
        replica.until(LocalState::Online, 2).await;
        assert_eq!(fixture.replicas[0].scrub().await.different, 0);
        let head = fixture.replicas[0].target().await;
        assert_eq!(head.report().0.report.state, LocalState::UpToDate);
    }
}

#[tokio::test]
async fn a_chunk_that_the_predecessor_lacks_is_reported_and_kept() {
    let fixture = Fixture::start().await;
    let head = Arc::clone(&fixture.replicas[0].target().await.store);
    head.forget(chunk(100)).unwrap();
    let store = Arc::clone(&fixture.replicas[1].target().await.store);
    put(&*store, 101, 5, &content(101));
    let status = fixture.replicas[1].scrub().await;
    assert_eq!(status.different_chunks, [chunk(100), chunk(101)]);
    assert_eq!(fixture.replicas[1].target().await.report().0.report.state, LocalState::UpToDate);
    assert_eq!(read(&*store, 100), Some(content(100)));
    put(&*head, 100, 1, &content(100));
    put(&*head, 101, 5, &content(101));
    assert_eq!(fixture.replicas[1].scrub().await.different, 0);
}

/// The version of a chunk of epoch `count` of the volume with a snapshot of epoch 1.
fn version(index: u32, count: u32) -> ChunkId {
    chunk(index).in_epoch(Epoch::new(u32::from(count > 0), count))
}

impl Fixture {
    /// All replicas learn that the volume has a snapshot of epoch 1 only, and drop the versions that it
    /// does not show.
    async fn give_list(&self) {
        let shown = ShownEpochs { volume: 1, below: 3, counts: [1].into() };
        let fence = VolumeFence { volume: InodeId(40), epoch: Epoch::new(1, 3), shown };
        let mut table = FenceTable::default();
        table.add(&Fences { version: FencesVersion(1), volumes: vec![fence] });
        let table = Arc::new(table);
        for replica in &self.replicas {
            let store = Arc::clone(&replica.target().await.store);
            for count in [0, 1] {
                put_chunk(&*store, version(CHUNKS, count), 1, &content(1));
            }
            replica.node.update_fences(&table);
            let dropped = async {
                while store.meta(version(CHUNKS, 0)).is_some() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(LONG, dropped).await.unwrap();
        }
    }

    /// Stores versions of a chunk on both replicas, and an earlier one on one of them, as if the other had
    /// dropped or lost it. No list is given after it, so it is not dropped.
    async fn differ(&self, index: u32, both: &[u32], one: (usize, u32)) {
        for (place, replica) in self.replicas.iter().enumerate() {
            let store = Arc::clone(&replica.target().await.store);
            if place == one.0 {
                put_chunk(&*store, version(index, one.1), 1, &content(index));
            }
            for count in both {
                put_chunk(&*store, version(index, *count), 2, &content(index + 1));
            }
        }
    }
}

#[tokio::test]
async fn versions_that_no_snapshot_shows_may_differ_and_others_may_not() {
    let fixture = Fixture::start().await;
    fixture.give_list().await;
    let tail = &fixture.replicas[1];
    for (number, place) in [(1, 0), (2, 1)] {
        fixture.differ(CHUNKS + number, &[1], (place, 0)).await;
    }
    assert_eq!(tail.scrub().await.different_chunks, []);
    assert_eq!(tail.target().await.report().0.report.state, LocalState::UpToDate);
    for (number, place) in [(1, 0), (2, 1)] {
        let store = Arc::clone(&fixture.replicas[place].target().await.store);
        assert!(store.meta(version(CHUNKS + number, 0)).is_some(), "it was not dropped meanwhile");
    }
    // The predecessor has lost a version that the snapshot shows.
    fixture.differ(CHUNKS + 3, &[3], (1, 1)).await;
    assert_eq!(tail.scrub().await.different_chunks, [version(CHUNKS + 3, 1)]);
    // The replica has lost one: it must be synced.
    fixture.differ(CHUNKS + 4, &[3], (0, 1)).await;
    tail.target().await.scrub(true);
    tail.until(LocalState::Online, 2).await;
}

#[tokio::test]
async fn a_reopened_store_continues_the_pass() {
    let folder = tempfile::tempdir().unwrap();
    let store = StoreId(77);
    let scrub = Scrub::open(folder.path(), 0, store);
    scrub.start();
    scrub.progress().advance(chunk(5));
    scrub.record().await;
    drop(scrub);
    assert_eq!(Scrub::open(folder.path(), 0, store).step(), Step::Verify(Some(chunk(5))));
    assert_eq!(Scrub::open(folder.path(), 0, StoreId(78)).step(), Step::Wait(u64::MAX));
    std::fs::write(folder.path().join("scrub.json"), "{\"store\":77,").unwrap();
    assert_eq!(Scrub::open(folder.path(), 0, store).step(), Step::Wait(u64::MAX));
}
