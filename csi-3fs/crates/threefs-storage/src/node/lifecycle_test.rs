//! Tests of stores that fail at open or later, and of damaged stores.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use bytes::Bytes;
use fabric::auth::Key;
use tempfile::TempDir;
use threefs_chunkstore::{ChunkStore, DiskBudget, ReadOutcome, Reservation, Space};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMeta, ChunkMetas, ChunkState, StoreUpdate, Which};
use threefs_core::forgotten::InodeRange;
use threefs_core::heartbeat::{DataFolder, HeartbeatReply, LocalState, TargetReport};
use threefs_core::ids::{
    ChainVersion, ChunkId, ChunkVersion, ClusterId, FencesVersion, Incarnation, InodeId, NodeId,
    RoutingVersion, StoreId,
};
use threefs_core::message::{Address, ForgetInodes, StorageReply, StorageRequest};
use threefs_core::routing::{Chain, ChainTarget, NodeInfo, PublicState, RoutingInfo};

use super::*;
use crate::node::{Disk, NodeContext};
use crate::peers::Peers;

const LONG: Duration = Duration::from_secs(60);
const TARGET: TargetId = TargetId(1);
const CHAIN: ChainId = ChainId(1);

/// A real store that fails on demand.
struct Failing {
    store: Arc<dyn ChunkStore>,
    fails: Arc<AtomicBool>,
}

impl ChunkMetas for Failing {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.store.meta(chunk)
    }
    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.store.version_up_to(chunk)
    }
    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta> {
        self.store.metas(after, last, limit)
    }
    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId> {
        self.store.pending(after, limit)
    }
    fn is_forgotten(&self, inode: InodeId) -> bool {
        self.store.is_forgotten(inode)
    }
    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange> {
        self.store.forgotten(after, limit)
    }
    fn version_floor(&self) -> ChunkVersion {
        self.store.version_floor()
    }
    fn last_existing(&self, inode: InodeId) -> Option<ChunkMeta> {
        self.store.last_existing(inode)
    }
}

impl ChunkStore for Failing {
    fn read(
        &self,
        chunk: ChunkId,
        which: Which,
        at: u32,
        n: u32,
    ) -> Result<ReadOutcome, StoreError> {
        self.store.read(chunk, which, at, n)
    }
    fn apply_in(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        checksum: Checksum,
        reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<ChunkState, StoreError> {
        self.store.apply_in(update, payload, checksum, reservation, accepted)
    }
    fn commit(
        &self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain: ChainVersion,
    ) -> Result<ChunkState, StoreError> {
        self.store.commit(chunk, version, chain)
    }
    fn forget(&self, chunk: ChunkId) -> Result<(), StoreError> {
        self.store.forget(chunk)
    }
    fn purge(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), StoreError> {
        if self.fails.load(SeqCst) { Err(no()) } else { self.store.purge(chunk, version) }
    }
    fn forget_inodes(
        &self,
        inodes: &[InodeRange],
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError> {
        if self.fails.load(SeqCst) {
            return Err(no());
        }
        self.store.forget_inodes(inodes, version_floor)
    }
    fn flush(&self) -> Result<(), StoreError> {
        self.store.flush()
    }
    fn id(&self) -> StoreId {
        self.store.id()
    }
    fn chunks(&self) -> u64 {
        self.store.chunks()
    }
    fn used_bytes(&self) -> u64 {
        self.store.used_bytes()
    }
    fn space(&self) -> Space {
        self.store.space()
    }
}

fn no() -> StoreError {
    StoreError::Io { operation: "flush".into(), reason: "injected failure".into() }
}

/// A node whose stores open as the test specifies.
struct Fixture {
    node: Arc<Node>,
    folder: TempDir,
    /// Number of further openings that fail.
    failing_opens: Arc<AtomicU32>,
    open_count: Arc<AtomicU32>,
    /// Makes open stores fail.
    fails: Arc<AtomicBool>,
    version: u32,
    lease_ms: u64,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [failing_opens, open_count] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        let fails = Arc::new(AtomicBool::new(false));
        let open = {
            let (failing_opens, open_count, fails) =
                (failing_opens.clone(), open_count.clone(), fails.clone());
            move |folder: &Path, budget| -> Result<Arc<dyn ChunkStore>, StoreError> {
                open_count.fetch_add(1, SeqCst);
                if failing_opens
                    .fetch_update(SeqCst, SeqCst, |drained| drained.checked_sub(1))
                    .is_ok()
                {
                    return Err(no());
                }
                let store = crate::store::open(folder, budget)?;
                Ok(Arc::new(Failing { store, fails: fails.clone() }))
            }
        };
        let config = serde_json::json!({
            "node_id": 1, "listen": "127.0.0.1:0", "mgmtd": [], "key_file": "",
            "data": folder.path(),
        });
        let key = Key::from_bytes(b"a key of sixteen bytes or more").unwrap();
        let disk = Disk { budget: Arc::new(DiskBudget::default()), open: Arc::new(open) };
        let node = Arc::new(Node::new(
            serde_json::from_value(config).unwrap(),
            Incarnation(1),
            NodeContext::new(Arc::new(Peers::new(&key.into(), LONG))),
            disk,
            DataFolder::Empty,
        ));
        Self {
            node,
            folder,
            failing_opens,
            open_count,
            fails,
            version: 0,
            lease_ms: u64::from(u32::MAX),
        }
    }

    /// mgmtd publishes a chain of this target and of one on another node, and grants a lease.
    fn routing(&mut self, own: PublicState, other: PublicState) {
        self.version += 1;
        let place = |target, node, state| ChainTarget { target, node: NodeId(node), state };
        let mut targets = vec![place(TARGET, 1, own), place(TargetId(2), 2, other)];
        targets.sort_by_key(|place| place.state);
        let version = ChainVersion(self.version);
        let info = |id| NodeInfo { id, address: String::new(), location: Default::default() };
        let routing = RoutingInfo {
            cluster: ClusterId(5),
            version: RoutingVersion(self.version.into()),
            nodes: [1, 2].map(|id| (NodeId(id), info(NodeId(id)))).into(),
            chains: [(CHAIN, Chain { id: CHAIN, version, targets })].into(),
            ..RoutingInfo::default()
        };
        let (routing_version, lease_ms) = (routing.version, self.lease_ms);
        self.node.update_routing(&Arc::new(routing));
        let reply = HeartbeatReply { routing_version, lease_ms };
        self.node.heartbeat_answered(self.node.context.clock.now(), reply, FencesVersion(0));
    }

    fn report(&self) -> Option<TargetReport> {
        self.node.reports().0.into_iter().next()
    }

    async fn until(&self, state: LocalState) -> TargetReport {
        self.until_report(|line| line.report.state == state).await
    }

    async fn until_report(&self, is_awaited: impl Fn(&TargetReport) -> bool) -> TargetReport {
        let wait = async {
            loop {
                if let Some(line) = self.report().filter(&is_awaited) {
                    return line;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.unwrap()
    }

    /// Number of openings that have started.
    async fn until_opened(&self, count: u32) {
        let wait = async {
            while self.open_count.load(SeqCst) < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.unwrap();
    }

    /// Writes something to the store.
    async fn forget(&self, inode: u64) -> Result<StorageReply, threefs_core::error::StorageError> {
        let to =
            Address { chain: CHAIN, chain_version: ChainVersion(self.version), target: TARGET };
        let inodes = vec![InodeRange::one(InodeId(inode))];
        let request = StorageRequest::ForgetInodes(ForgetInodes::of_head(to, inodes));
        self.node.target(TARGET).unwrap().request(request, Bytes::new(), None).await.0
    }

    fn target_folder(&self) -> PathBuf {
        self.folder.path().join("target-1")
    }

    /// Flips a bit in the checksum of the log's first frame, so that later frames are orphaned.
    fn damage(&self) {
        let log =
            std::fs::read_dir(self.target_folder()).unwrap().map(|entry| entry.unwrap().path());
        let log = log.into_iter().find(|path| path.to_string_lossy().contains("log")).unwrap();
        let mut bytes = std::fs::read(&log).unwrap();
        bytes[16] ^= 1;
        std::fs::write(&log, bytes).unwrap();
    }

    /// A sole serving target that has written, whose store has failed and is damaged when it is
    /// reopened.
    async fn damaged_at_work(&mut self) -> StoreId {
        self.routing(PublicState::LastSrv, PublicState::Offline);
        self.until(LocalState::UpToDate).await;
        self.routing(PublicState::Serving, PublicState::Offline);
        for inode in 1..4 {
            self.forget(inode).await.unwrap();
        }
        let id = self.report().unwrap().store.unwrap();
        self.damage();
        self.fails.store(true, SeqCst);
        self.forget(9).await.unwrap_err();
        self.until(LocalState::Offline).await;
        self.fails.store(false, SeqCst);
        id
    }
}

#[tokio::test]
async fn opening_a_store_is_retried() {
    let mut fixture = Fixture::new();
    fixture.failing_opens.store(2, SeqCst);
    fixture.routing(PublicState::Offline, PublicState::Serving);
    let away = fixture.until(LocalState::Offline).await;
    assert_eq!(away.store, None);
    let back = fixture.until(LocalState::Online).await;
    assert_eq!(fixture.open_count.load(SeqCst), 3);
    assert!(back.store.is_some());
    // It has the routing once its threads have processed the event.
    fixture.until_report(|line| line.report.chain_version == ChainVersion(1)).await;
}

#[tokio::test]
async fn a_store_that_fails_is_reopened_without_cached_state() {
    let mut fixture = Fixture::new();
    fixture.routing(PublicState::LastSrv, PublicState::Offline);
    fixture.until(LocalState::UpToDate).await;
    fixture.routing(PublicState::Serving, PublicState::Offline);
    fixture.forget(1).await.unwrap();
    let id = fixture.report().unwrap().store;
    fixture.fails.store(true, SeqCst);
    fixture.forget(2).await.unwrap_err();
    fixture.until(LocalState::Offline).await;
    fixture.fails.store(false, SeqCst);
    let back = fixture.until(LocalState::Online).await;
    assert_eq!(back.store, id, "the same store");
    // The folder is locked while a store is open, so the old one was closed.
    assert_eq!(fixture.open_count.load(SeqCst), 2);
    // It does not serve by its old routing.
    fixture.forget(3).await.unwrap_err();
    fixture.routing(PublicState::LastSrv, PublicState::Offline);
    fixture.routing(PublicState::Serving, PublicState::Offline);
    fixture.until(LocalState::UpToDate).await;
    fixture.forget(3).await.unwrap();
    assert!(fixture.node.target(TARGET).is_some());
}

#[tokio::test]
async fn a_damaged_store_is_quarantined_if_the_chain_is_served_without_it() {
    let mut fixture = Fixture::new();
    let old = fixture.damaged_at_work().await;
    fixture.routing(PublicState::Offline, PublicState::Serving);
    let back = fixture.until(LocalState::Online).await;
    assert_ne!(back.store, Some(old));
    let damaged_folder = fixture.folder.path().join("target-1.damaged");
    assert!(damaged_folder.join("data").exists(), "kept for inspection");
    // A second quarantined store replaces it.
    let new = fixture.damaged_at_work().await;
    fixture.routing(PublicState::Offline, PublicState::Serving);
    let back = fixture.until(LocalState::Online).await;
    assert_ne!(back.store, Some(new));
    let folders = std::fs::read_dir(fixture.folder.path()).unwrap();
    assert_eq!(folders.filter(|it| it.as_ref().unwrap().path().is_dir()).count(), 2);
}

#[tokio::test]
async fn a_damaged_store_that_may_be_the_last_one_is_kept() {
    // (routing, whether there is a lease): none of these is sufficient.
    for (own, other, lease) in [
        (PublicState::LastSrv, PublicState::Offline, true),
        (PublicState::LastSrv, PublicState::LastSrv, true),
        (PublicState::Serving, PublicState::Serving, true),
        (PublicState::Offline, PublicState::LastSrv, true),
        (PublicState::Offline, PublicState::Waiting, true),
        (PublicState::Offline, PublicState::Serving, false),
    ] {
        let mut fixture = Fixture::new();
        fixture.damaged_at_work().await;
        if !lease {
            *fixture.node.lease.lock().unwrap() = Default::default();
            fixture.lease_ms = 0;
        }
        fixture.routing(own, other);
        let so_far = fixture.open_count.load(SeqCst);
        fixture.until_opened(so_far + 2).await;
        assert_eq!(fixture.until(LocalState::Offline).await.store, None);
        assert!(fixture.target_folder().exists(), "{own:?} {other:?}");
        assert!(!fixture.folder.path().join("target-1.damaged").exists(), "{own:?} {other:?}");
    }
}

#[tokio::test]
async fn a_retired_target_or_one_of_a_stopped_node_is_not_reopened() {
    for retires in [true, false] {
        let mut fixture = Fixture::new();
        fixture.failing_opens.store(1_000_000, SeqCst);
        fixture.routing(PublicState::Offline, PublicState::Serving);
        fixture.until(LocalState::Offline).await;
        if retires {
            let mut routing = RoutingInfo::clone(&fixture.node.context.routing());
            routing.chains.clear();
            routing.retired.insert(TARGET);
            routing.version = RoutingVersion(9);
            fixture.node.update_routing(&Arc::new(routing));
            assert!(fixture.report().is_none());
            assert!(!fixture.node.is_hosted(TARGET));
        } else {
            fixture.node.drain(Duration::ZERO).await;
            assert!(!fixture.node.is_hosted(TARGET));
        }
        let node = Arc::downgrade(&fixture.node);
        drop(fixture);
        // The opening task does not keep the node alive.
        let shutdown = async {
            while node.upgrade().is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, shutdown).await.unwrap();
    }
}

#[test]
fn a_pause_is_up_to_a_quarter_shorter() {
    for longest_ms in [500, 60_000] {
        let actual_ms = pause(longest_ms).as_millis() as u64;
        assert!(
            actual_ms <= longest_ms && actual_ms * 4 >= longest_ms * 3,
            "{longest_ms}: {actual_ms}"
        );
    }
}
