//! Tests of a target whose store hangs or runs out of space.

use std::io;
use std::sync::Condvar;

use fabric::auth::Key;
use threefs_chunkstore::flush::{LogFlush, Started};
use threefs_chunkstore::{Reservation, ReserveCallback, ReserveWait, Space, Staged};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMeta, ChunkMetas, ChunkState, ContentChange, StoreUpdate, Which};
use threefs_core::error::{StorageError, StoreError};
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, Incarnation, InodeId, NodeId, RequestTag,
    TargetId,
};
use threefs_core::message::{Address, ReadRequest, StorageReply, UpdateRequest};
use threefs_core::routing::{Chain, ChainTarget, PublicState};

use super::*;
use crate::peers::Peers;

const LONG: Duration = Duration::from_secs(60);

/// A gate that blocks threads while it is shut.
#[derive(Default)]
pub(crate) struct Gate {
    shut: Mutex<bool>,
    reopened: Condvar,
}

impl Gate {
    pub(crate) fn set(&self, shut: bool) {
        *self.shut.lock().unwrap() = shut;
        self.reopened.notify_all();
    }

    fn pass(&self) {
        let shut = self.shut.lock().unwrap();
        drop(self.reopened.wait_while(shut, |shut| *shut).unwrap());
    }
}

/// Counts of a store's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Log {
    pub(crate) staged: u64,
    pub(crate) durable: u64,
    /// Flushes that have started, and those of them that were of the log or of the device.
    pub(crate) started: u64,
    pub(crate) flushed: u64,
}

/// A store without chunks that blocks while the gate is shut.
#[derive(Default)]
pub(crate) struct Hanging {
    gate: Gate,
    /// Reservations wait until the test grants them.
    full: Mutex<bool>,
    waiting: Mutex<Vec<ReserveCallback>>,
    /// Flushes block while it is shut.
    pub(crate) flushes: Gate,
    pub(crate) log: Mutex<Log>,
    /// Another thread flushes.
    pub(crate) busy: AtomicBool,
    /// The next flush panics.
    pub(crate) panics: AtomicBool,
}

impl Hanging {
    fn set(&self, shut: bool) {
        self.gate.set(shut);
    }

    fn pass(&self) {
        self.gate.pass();
    }

    pub(crate) fn log(&self) -> Log {
        *self.log.lock().unwrap()
    }
}

struct HangingFlush<'a>(&'a Hanging, u64);

impl LogFlush for HangingFlush<'_> {
    fn device(&self) -> Option<u64> {
        Some(1)
    }
    fn write(&self) -> io::Result<()> {
        self.flush_device()
    }
    fn start_writing(&self) -> io::Result<()> {
        Ok(())
    }
    fn finish_writing(&self) -> io::Result<()> {
        self.0.flushes.pass();
        Ok(())
    }
    fn flush_device(&self) -> io::Result<()> {
        assert!(!self.0.panics.swap(false, SeqCst), "expected panic");
        self.0.flushes.pass();
        self.0.log.lock().unwrap().flushed += 1;
        Ok(())
    }
    fn end(self: Box<Self>, written: io::Result<()>) -> Result<(), StoreError> {
        assert!(written.is_ok());
        self.0.log.lock().unwrap().durable = self.1;
        Ok(())
    }
}

impl ChunkMetas for Hanging {
    fn meta(&self, _: ChunkId) -> Option<ChunkMeta> {
        self.pass();
        None
    }
    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.meta(chunk)
    }
    fn metas(&self, _: Option<ChunkId>, _: ChunkId, _: usize) -> Vec<ChunkMeta> {
        Vec::new()
    }
    fn pending(&self, _: Option<ChunkId>, _: usize) -> Vec<ChunkId> {
        Vec::new()
    }
    fn is_forgotten(&self, _: InodeId) -> bool {
        false
    }
    fn forgotten(&self, _: Option<InodeId>, _: usize) -> Vec<InodeRange> {
        Vec::new()
    }
    fn version_floor(&self) -> ChunkVersion {
        ChunkVersion(0)
    }
    fn last_existing(&self, _: InodeId) -> Option<ChunkMeta> {
        None
    }
}

impl ChunkStore for Hanging {
    fn read(
        &self,
        chunk: ChunkId,
        _: Which,
        _: u32,
        _: u32,
    ) -> Result<threefs_chunkstore::ReadOutcome, StoreError> {
        Err(StoreError::NotFound { chunk })
    }
    fn reserve(
        &self,
        _: &StoreUpdate,
        _: usize,
        _: u8,
        ready: ReserveCallback,
    ) -> Option<ReserveWait> {
        if *self.full.lock().unwrap() {
            self.waiting.lock().unwrap().push(ready);
        } else {
            ready(Ok(Reservation::default()));
        }
        None
    }
    fn apply_in(
        &self,
        update: &StoreUpdate,
        _: &[u8],
        _: Checksum,
        _: Reservation,
        _: &mut dyn FnMut(),
    ) -> Result<ChunkState, StoreError> {
        Ok(chunk_state(update.version))
    }
    fn stage(
        &self,
        update: &StoreUpdate,
        _: &[u8],
        _: Checksum,
        _: Reservation,
        _: &mut dyn FnMut(),
    ) -> Result<Staged, StoreError> {
        let mut log = self.log.lock().unwrap();
        log.staged += 1;
        Ok(Staged { state: chunk_state(update.version), number: log.staged })
    }
    fn start_flush(&self, number: u64) -> Started<'_> {
        let mut log = self.log.lock().unwrap();
        if log.durable >= number {
            return Started::Ended(Ok(()));
        }
        if self.busy.load(SeqCst) {
            return Started::Busy;
        }
        log.started += 1;
        Started::Flush(Box::new(HangingFlush(self, log.staged)))
    }
    fn settle(&self, number: u64) -> Result<(), StoreError> {
        self.flushes.pass();
        self.log.lock().unwrap().durable = number;
        Ok(())
    }
    fn commit(
        &self,
        _: ChunkId,
        version: ChunkVersion,
        _: ChainVersion,
    ) -> Result<ChunkState, StoreError> {
        Ok(chunk_state(version))
    }
    fn forget(&self, _: ChunkId) -> Result<(), StoreError> {
        Ok(())
    }
    fn purge(&self, _: ChunkId, _: ChunkVersion) -> Result<(), StoreError> {
        Ok(())
    }
    fn forget_inodes(&self, _: &[InodeRange], _: ChunkVersion) -> Result<(), StoreError> {
        Ok(())
    }
    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }
    fn id(&self) -> StoreId {
        self.pass();
        StoreId(5)
    }
    fn chunks(&self) -> u64 {
        self.pass();
        3
    }
    fn used_bytes(&self) -> u64 {
        self.pass();
        7
    }
    fn space(&self) -> Space {
        self.pass();
        Space { used_bytes: 7, capacity_bytes: 70 }
    }
}

fn chunk_state(version: ChunkVersion) -> ChunkState {
    ChunkState { version, ..ChunkState::default() }
}

fn place(id: u64) -> Chain {
    let target = ChainTarget { target: TargetId(id), node: NodeId(1), state: PublicState::Serving };
    let (id, version) = (ChainId(id as u32), ChainVersion(2));
    Chain { id, version, targets: vec![target] }
}

fn scrub() -> Scrub {
    Scrub::open(std::path::Path::new("/nonexistent"), 0, StoreId(5))
}

/// A serving target, the only one of its chain, and its store.
pub(crate) fn serving(context: &Arc<NodeContext>, id: u64) -> (Arc<Target>, Arc<Hanging>) {
    let store = Arc::new(Hanging::default());
    (serving_from(context, id, Arc::clone(&store) as Arc<dyn ChunkStore>), store)
}

fn serving_from(context: &Arc<NodeContext>, id: u64, store: Arc<dyn ChunkStore>) -> Arc<Target> {
    let mut config = Config::new(TargetId(id), ChainId(id as u32), Incarnation(1));
    config.store_stall_ms = 50;
    let usage = StoreUsage { id: StoreId(5), used_bytes: 1, chunks: 0 };
    let folder = tempfile::tempdir().unwrap().keep();
    let target = Target::new(config, store, usage, scrub(), folder, Arc::clone(context));
    let mut last = place(id);
    (last.version, last.targets[0].state) = (ChainVersion(1), PublicState::LastSrv);
    target.handle(Event::Routing(last));
    target.handle(Event::Routing(place(id)));
    target.handle(Event::Lease { valid_until: Millis(u64::MAX) });
    target
}

async fn read(target: &Arc<Target>) -> StorageResult {
    let id = target.config.target;
    let (chain, chain_version) = (target.config.chain, ChainVersion(2));
    let to = Address { chain, chain_version, target: id };
    let chunk = ChunkId::new(InodeId(1), 0);
    let request = StorageRequest::Read(ReadRequest { to, chunk, offset: 0, length: 1 });
    target.request(request, Bytes::new(), None).await.0
}

pub(crate) fn context() -> Arc<NodeContext> {
    let key = Key::from_bytes(b"a key of sixteen bytes or more").unwrap();
    Arc::new(NodeContext::new(Arc::new(Peers::new(&key.into(), LONG))))
}

pub(crate) async fn until(mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.unwrap();
}

/// One runtime thread, because heartbeats and all other targets share it.
#[tokio::test]
async fn a_hanging_store_stalls_only_its_target_and_an_offline_target_does_not_serve() {
    let context = context();
    let ((hung, store), (healthy, _)) = (serving(&context, 1), serving(&context, 2));
    assert!(read(&hung).await.is_ok() && read(&healthy).await.is_ok());
    store.set(true);
    let mut stuck: Vec<_> = (0..200)
        .map(|_| {
            let hung = Arc::clone(&hung);
            tokio::spawn(async move { read(&hung).await })
        })
        .collect();
    until(|| hung.report().0.report.state == LocalState::Offline).await;
    assert!(read(&healthy).await.is_ok());
    assert_eq!(healthy.report().0.report.state, LocalState::UpToDate);
    assert!(stuck.iter().all(|it| !it.is_finished()));
    store.set(false);
    // The first was being processed and the others follow it: none is served.
    for read in stuck.drain(1..) {
        assert!(read.await.unwrap().is_err());
    }
    assert!(read(&hung).await.is_err());
    until(|| hung.report().0.report.state == LocalState::Online).await;
    until(|| hung.report().0.used_bytes == 7).await;
    assert_eq!((hung.report().0.chunks, hung.report().0.store), (3, Some(StoreId(5))));
}

#[tokio::test]
async fn a_leaving_target_reports_offline_only_after_it_stops_serving() {
    let context = context();
    let (target, store) = serving(&context, 1);
    assert!(read(&target).await.is_ok());
    store.set(true);
    let stuck = tokio::spawn({
        let target = Arc::clone(&target);
        async move { read(&target).await }
    });
    until(|| target.busy_since.load(SeqCst) != IDLE).await;
    target.handle(Event::Leave);
    assert_eq!(target.snapshot().report.state, LocalState::UpToDate, "it may still be serving");
    store.set(false);
    until(|| target.report().0.report.state == LocalState::Offline).await;
    assert!(read(&target).await.is_err());
    drop(stuck.await);
}

pub(crate) async fn write(target: &Arc<Target>, index: u32) -> StorageResult {
    let id = target.config.target;
    let to = Address { chain: target.config.chain, chain_version: ChainVersion(2), target: id };
    let payload = Bytes::from_static(b"data");
    let request = StorageRequest::Update(UpdateRequest {
        to,
        chunk: ChunkId::new(InodeId(1), index),
        tag: RequestTag { sequence: u64::from(index) + 1, ..RequestTag::default() },
        change: ContentChange::Replace,
        payload_checksum: Checksum::of(&payload),
        chunk_bytes: 4_096,
    });
    target.request(request, payload, None).await.0
}

/// More than the target has threads: the commits that free space need threads.
#[tokio::test]
async fn updates_waiting_for_space_block_no_thread() {
    const UPDATES: u32 = 200;
    let context = context();
    let (target, store) = serving(&context, 1);
    *store.full.lock().unwrap() = true;
    let waiting: Vec<_> = (0..UPDATES)
        .map(|index| {
            let target = Arc::clone(&target);
            tokio::spawn(async move { write(&target, index).await })
        })
        .collect();
    until(|| store.waiting.lock().unwrap().len() == UPDATES as usize).await;
    let since = target.context.clock.now();
    until(|| target.context.clock.now().since(since) > 2 * target.config.store_stall_ms).await;
    assert_eq!(target.report().0.report.state, LocalState::UpToDate);
    *store.full.lock().unwrap() = false;
    assert!(write(&target, UPDATES).await.is_ok(), "other updates continue");
    let callback = store.waiting.lock().unwrap().pop().unwrap();
    callback(Err(StoreError::NoSpace { needed_bytes: 4 }));
    for ready in std::mem::take(&mut *store.waiting.lock().unwrap()) {
        ready(Ok(Reservation::default()));
    }
    let mut full = 0;
    for update in waiting {
        match update.await.unwrap() {
            Ok(_) => {}
            Err(StorageError::NoSpace { .. }) => full += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(full, 1);
}

#[tokio::test]
async fn a_damaged_payload_is_refused_and_its_repetition_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let store = crate::store::open(folder.path(), Arc::default()).unwrap();
    let target = serving_from(&context(), 1, store);
    // Whole blocks, and a part of one.
    for (index, offset) in [(0, 0), (1, 100)] {
        let intact = Bytes::from(vec![7; 20_000]);
        let update = UpdateRequest {
            to: Address { chain: ChainId(1), chain_version: ChainVersion(2), target: TargetId(1) },
            chunk: ChunkId::new(InodeId(1), index),
            tag: RequestTag { sequence: u64::from(index) + 1, ..RequestTag::default() },
            change: ContentChange::Write { offset },
            payload_checksum: Checksum::of(&intact),
            chunk_bytes: 65_536,
        };
        let mut damaged = intact.to_vec();
        damaged[11_111] ^= 4;
        let request = StorageRequest::Update(update);
        let (result, _) = target.request(request.clone(), damaged.into(), None).await;
        assert!(matches!(result, Err(StorageError::ChecksumMismatch { .. })), "{result:?}");
        let (result, _) = target.request(request, intact.clone(), None).await;
        let Ok(StorageReply::Updated(made)) = result else { panic!("{result:?}") };
        assert_eq!((made.version, made.length), (ChunkVersion(1), 20_000 + offset));
        let read = ReadRequest { to: update.to, chunk: update.chunk, offset, length: 20_000 };
        let (result, bytes) = target.request(StorageRequest::Read(read), Bytes::new(), None).await;
        assert!(result.is_ok() && bytes == intact, "{result:?}");
    }
}
