//! No file system call is made under the store's lock, and changes between the slices of a
//! compaction are in the new log once.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{Luck, MemoryDisk, after_kill, after_power_loss, log_name};
use threefs_chunkstore::disk::{Disk, DiskFile};
use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

/// Far more than the entries of one slice.
const CHUNKS: u32 = 2_000;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

fn config() -> StoreConfig {
    StoreConfig { grow_bytes: 128 << 10, log_bytes: 128 << 10, ..StoreConfig::default() }
}

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(u64::from(index / 8) + 1), index % 8)
}

fn update(chunk: ChunkId, version: u64, change: ContentChange) -> StoreUpdate {
    StoreUpdate {
        chunk,
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change,
    }
}

fn put<D: Disk>(store: &FileChunkStore<D>, chunk: ChunkId, version: u64, change: ContentChange) {
    let payload = [version as u8; 100];
    let bytes: &[u8] = if matches!(change, ContentChange::Remove) { &[] } else { &payload };
    let update = update(chunk, version, change);
    store.apply(&update, bytes).unwrap();
    store.commit(chunk, ChunkVersion(version), ChainVersion(1)).unwrap();
}

/// A disk that queries the store in the middle of each call.
#[derive(Clone, Default)]
struct AskingDisk {
    disk: MemoryDisk,
    asks: Arc<Asks>,
}

#[derive(Default)]
struct Asks {
    store: OnceLock<Weak<FileChunkStore<AskingDisk>>>,
    count: AtomicU64,
}

impl Asks {
    fn ask(&self, call: &str) {
        let Some(store) = self.store.get().and_then(Weak::upgrade) else { return };
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || {
            store.meta(chunk(0));
            store.used_bytes();
            answer.send(()).unwrap();
        });
        assert!(answers.recv_timeout(ANSWER_TIMEOUT).is_ok(), "{call} is called under the lock");
        self.count.fetch_add(1, SeqCst);
    }
}

struct AskingFile(<MemoryDisk as Disk>::File, Arc<Asks>);

impl DiskFile for AskingFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.1.ask("read");
        self.0.read_at(buffer, offset)
    }
    fn read_ahead(&self, offset: u64, length: u64) {
        self.1.ask("read_ahead");
        self.0.read_ahead(offset, length);
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.1.ask("write");
        self.0.write_at(bytes, offset)
    }
    fn write_to_device(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.1.ask("write to the device");
        self.0.write_to_device(bytes, offset)
    }
    fn start_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.1.ask("start_writing");
        self.0.start_writing(bytes, offset)
    }
    fn finish_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.1.ask("finish_writing");
        self.0.finish_writing(bytes, offset)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.1.ask("sync_data");
        self.0.sync_data()
    }
    fn drop_cache_of(&self, offset: u64, length: u64) -> io::Result<()> {
        self.0.drop_cache_of(offset, length)
    }
    fn drop_cache(&self) -> io::Result<()> {
        self.0.drop_cache()
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.1.ask("allocate");
        self.0.allocate(length)
    }
    fn fill(&self, offset: u64, length: u64) -> io::Result<()> {
        self.1.ask("fill");
        self.0.fill(offset, length)
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.1.ask("punch");
        self.0.punch(offset, length)
    }
    fn has_holes(&self) -> io::Result<bool> {
        self.1.ask("has_holes");
        self.0.has_holes()
    }
    fn zero(&self) -> io::Result<()> {
        self.1.ask("zero");
        self.0.zero()
    }
    fn cut(&self, length: u64) -> io::Result<()> {
        self.1.ask("cut");
        self.0.cut(length)
    }
    fn length(&self) -> io::Result<u64> {
        self.1.ask("length");
        self.0.length()
    }
}

impl Disk for AskingDisk {
    type File = AskingFile;

    fn open(&self, name: &str) -> io::Result<AskingFile> {
        self.asks.ask("open");
        Ok(AskingFile(self.disk.open(name)?, Arc::clone(&self.asks)))
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.asks.ask("rename");
        self.disk.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.asks.ask("remove");
        self.disk.remove(name)
    }
    fn sync_names(&self) -> io::Result<()> {
        self.asks.ask("sync_names");
        self.disk.sync_names()
    }
    fn shares_flushes(&self, data: &Self::File, log: &Self::File) -> bool {
        self.disk.shares_flushes(&data.0, &log.0)
    }
    fn device(&self, file: &Self::File) -> Option<u64> {
        self.disk.device(&file.0)
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.asks.ask("free_bytes");
        self.disk.free_bytes()
    }
}

#[test]
fn no_file_system_call_is_made_under_the_lock() {
    let disk = AskingDisk::default();
    let asks = Arc::clone(&disk.asks);
    let memory = disk.disk.clone();
    let store = Arc::new(FileChunkStore::open_on(disk, config()).unwrap());
    asks.store.set(Arc::downgrade(&store)).unwrap_or_else(|_| panic!("asked already"));
    let before = log_name(&memory);
    for index in 0..600 {
        put(&store, chunk(index), 1, ContentChange::Replace);
    }
    assert_ne!(log_name(&memory), before, "the log was not compacted");
    let used = store.used_bytes();
    store
        .forget_inodes(
            &[InodeRange { first: InodeId(2), last: InodeId(u64::MAX) }],
            ChunkVersion(0),
        )
        .unwrap();
    assert!(store.used_bytes() < used, "the free tail of the file was not removed");
    // Without space for another log, everything but the switch happens.
    let bytes: usize = memory.list().unwrap().iter().map(|name| length(&memory, name)).sum();
    memory.0.lock().unwrap().quota = Some(bytes as u64);
    for version in 2..400 {
        put(&store, chunk(0), version, ContentChange::Replace);
    }
    assert!(asks.count.load(SeqCst) > 1_000);
}

fn length(disk: &MemoryDisk, name: &str) -> usize {
    disk.open(name).unwrap().length().unwrap() as usize
}

type Picture = (ChunkVersion, BTreeMap<ChunkId, (u64, Option<u64>)>);

fn picture<D: Disk>(store: &FileChunkStore<D>) -> Picture {
    let metas = store.metas(None, ChunkId::MAX, usize::MAX).into_iter();
    let versions = metas
        .map(|meta| {
            let pending = meta.pending.as_ref().map(|pending| pending.version.0);
            if meta.newest().exists() {
                store.read(meta.chunk, Which::Newest, 0, 100).unwrap();
            }
            (meta.chunk, (meta.committed.version.0, pending))
        })
        .collect();
    (store.version_floor(), versions)
}

/// All changes of a chunk, before and after it is copied, with kills and losses of power in
/// between: the reopened store must equal the previous one.
#[test]
fn changes_during_a_compaction_are_in_the_new_log_once() {
    for seed in 0..4 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let disk = MemoryDisk::default();
        let mut store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        for index in 0..CHUNKS {
            put(&store, chunk(index), 1, ContentChange::Replace);
        }
        let (mut versions, mut forgotten, mut switches) = (BTreeMap::new(), Vec::new(), 0);
        let mut name = log_name(&disk);
        for step in 0..3_000_u32 {
            let at = chunk(rng.random_range(0..CHUNKS));
            let version = versions.entry(at).or_insert(1_u64);
            let pending = store.meta(at).is_some_and(|meta| meta.pending.is_some());
            if forgotten.contains(&at.inode) {
                assert!(store.meta(at).is_none());
            } else {
                match rng.random_range(0..100) {
                    0..40 if !pending => {
                        *version += 1;
                        put(&store, at, *version, ContentChange::Replace);
                    }
                    40..55 if !pending => {
                        *version += 1;
                        put(&store, at, *version, ContentChange::Remove);
                    }
                    55..70 => {
                        // A pending state, or one that replaces it.
                        *version += 1;
                        let bytes = [step as u8; 100];
                        let update = update(at, *version, ContentChange::Replace);
                        store.apply(&update, &bytes).unwrap();
                    }
                    70..85 if pending => {
                        let newest = store.meta(at).unwrap().newest().version;
                        store.commit(at, newest, ChainVersion(1)).unwrap();
                    }
                    85..90 => {
                        store.purge(at, ChunkVersion(*version)).unwrap();
                        *version = 0;
                    }
                    90..95 => {
                        store.forget(at).unwrap();
                        *version = 0;
                    }
                    99 => {
                        store.forget_inodes(&[InodeRange::one(at.inode)], ChunkVersion(0)).unwrap();
                        forgotten.push(at.inode);
                    }
                    _ => {}
                }
            }
            if log_name(&disk) != name {
                (name, switches) = (log_name(&disk), switches + 1);
            }
            if step % 150 == 149 {
                store.flush().unwrap();
                let (expected, operations) =
                    (picture(&store), disk.0.lock().unwrap().operations.clone());
                let crashed = if step % 300 == 299 {
                    after_power_loss(&operations, usize::MAX, Luck::Random(&mut rng))
                } else {
                    after_kill(&operations, usize::MAX)
                };
                let reopened = FileChunkStore::open_on(crashed.clone(), config()).unwrap();
                assert_eq!(picture(&reopened), expected, "seed {seed}, step {step}");
                drop(reopened);
                if step % 900 == 899 {
                    drop(store);
                    store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
                    name = log_name(&disk);
                }
            }
        }
        assert!(switches > 3, "the log was compacted {switches} times");
    }
}
