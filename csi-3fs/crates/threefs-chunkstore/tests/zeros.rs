//! Zeros use no blocks, and most updates flush only the log.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::{Luck, MemoryDisk, Operation, after_power_loss};
use threefs_chunkstore::{ChunkStore, FileChunkStore, StoreConfig};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const BLOCK_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 1 << 20;

fn chunk() -> ChunkId {
    ChunkId::new(InodeId(7), 0)
}

/// A store with one chunk, and its expected content.
struct Fixture {
    disk: MemoryDisk,
    store: FileChunkStore<MemoryDisk>,
    content: Vec<u8>,
    version: u64,
}

impl Fixture {
    fn new() -> Self {
        let disk = MemoryDisk::default();
        let store = FileChunkStore::open_on(disk.clone(), StoreConfig::default()).unwrap();
        Self { disk, store, content: Vec::new(), version: 0 }
    }

    fn update(&mut self, change: ContentChange, payload: &[u8]) {
        self.version += 1;
        match change {
            ContentChange::Write { offset } => {
                let (offset, end) = (offset as usize, offset as usize + payload.len());
                self.content.resize(self.content.len().max(end), 0);
                self.content[offset..end].copy_from_slice(payload);
            }
            ContentChange::Truncate { length } => self.content.resize(length as usize, 0),
            ContentChange::Replace => self.content = payload.to_vec(),
            ContentChange::Remove => self.content.clear(),
        }
        let version = ChunkVersion(self.version);
        let tags = TagWindow::default();
        let update =
            StoreUpdate { chunk: chunk(), version, chain_version: ChainVersion(1), tags, change };
        let state = self.store.apply(&update, payload).unwrap();
        assert_eq!(state.checksum, Checksum::of(&self.content));
        self.store.commit(chunk(), version, ChainVersion(1)).unwrap();
    }

    fn write(&mut self, offset: usize, payload: &[u8]) {
        self.update(ContentChange::Write { offset: offset as u32 }, payload);
    }

    /// Blocks in use once the last commit is durable; checks the content.
    fn blocks(&self) -> usize {
        self.store.flush().unwrap();
        let read = self.store.read(chunk(), Which::Committed, 0, u32::MAX).unwrap();
        assert!(read.bytes == self.content);
        self.store.used_bytes() as usize / BLOCK_BYTES
    }

    fn reopen(&mut self) {
        self.disk.0.lock().unwrap().quota = None;
        self.store = FileChunkStore::open_on(self.disk.clone(), StoreConfig::default()).unwrap();
    }

    fn operations(&self) -> Vec<Operation> {
        self.disk.0.lock().unwrap().operations.clone()
    }
}

/// The data file is opened first, so its number is 0.
fn data_flushes(operations: &[Operation]) -> usize {
    operations.iter().filter(|op| matches!(op, Operation::Sync(0))).count()
}

fn data_bytes(operations: &[Operation]) -> usize {
    let bytes = |op: &Operation| match op {
        Operation::Write { file: 0, bytes, .. }
        | Operation::WriteToDevice { file: 0, bytes, .. } => bytes.len(),
        _ => 0,
    };
    operations.iter().map(bytes).sum()
}

#[test]
fn zeros_use_no_blocks_and_free_existing_ones() {
    let mut fixture = Fixture::new();
    fixture.write(0, &[5; CHUNK_BYTES]);
    assert_eq!(fixture.blocks(), 256);
    fixture.write(CHUNK_BYTES / 4, &[0; CHUNK_BYTES / 2]);
    assert_eq!(fixture.blocks(), 128, "a hole in the middle");
    fixture.reopen();
    assert_eq!(fixture.blocks(), 128, "after an opening");
    fixture.write(CHUNK_BYTES / 2 + 1, &[7; 10]);
    assert_eq!(fixture.blocks(), 129, "a write within the hole");
    fixture.update(ContentChange::Truncate { length: 100 }, &[]);
    assert_eq!(fixture.blocks(), 1);
    let before = data_bytes(&fixture.operations());
    fixture.write(CHUNK_BYTES - BLOCK_BYTES, &[9; BLOCK_BYTES]);
    assert_eq!(fixture.blocks(), 2, "the gap after the old end");
    assert!(data_bytes(&fixture.operations()) - before <= 3 * BLOCK_BYTES);
    fixture.update(ContentChange::Truncate { length: CHUNK_BYTES as u32 * 4 }, &[]);
    assert_eq!(fixture.blocks(), 2, "an extended chunk");
    fixture.update(ContentChange::Replace, &[0; CHUNK_BYTES]);
    assert_eq!(fixture.blocks(), 0);
    fixture.reopen();
    assert_eq!(fixture.blocks(), 0);
}

/// Zeros between data would make more runs than a chunk may have: they are stored then, and the
/// next write is small again.
#[test]
fn a_chunk_of_many_runs_is_defragmented_once() {
    let mut fixture = Fixture::new();
    let bytes = 4 * CHUNK_BYTES;
    let stripes: Vec<u8> = (0..bytes).map(|at| (at / (4 * BLOCK_BYTES) % 2) as u8).collect();
    fixture.update(ContentChange::Replace, &stripes);
    fixture.write(1, &[3; 100]);
    let before = data_bytes(&fixture.operations());
    for number in 0..8 {
        fixture.write(number * 8 * BLOCK_BYTES, &[4; 100]);
    }
    assert!(data_bytes(&fixture.operations()) - before <= 8 * BLOCK_BYTES);
    fixture.blocks();
}

#[test]
fn updates_with_little_or_no_data_flush_only_the_log() {
    let mut fixture = Fixture::new();
    fixture.disk.0.lock().unwrap().separate_flushes = true;
    fixture.reopen();
    fixture.write(0, &[5; 100_000]);
    for (change, payload, flushes) in [
        (ContentChange::Truncate { length: 50_000 }, Vec::new(), 0),
        (ContentChange::Write { offset: 8192 }, vec![0; 20_480], 0),
        (ContentChange::Write { offset: 8191 }, vec![1; 2], 0),
        (ContentChange::Write { offset: 8191 }, vec![1; 8192], 1),
        (ContentChange::Replace, vec![0; 65_536], 0),
        (ContentChange::Remove, Vec::new(), 0),
        (ContentChange::Replace, vec![1; 65_536], 1),
    ] {
        let before = data_flushes(&fixture.operations());
        fixture.update(change, &payload);
        assert_eq!(data_flushes(&fixture.operations()) - before, flushes, "{change:?}");
    }
}

/// Flushing blocks that were written before does not change file system metadata.
#[test]
fn the_log_is_written_ahead() {
    let mut fixture = Fixture::new();
    for _ in 0..100 {
        fixture.write(0, &[5; 100]);
    }
    let operations = fixture.operations();
    let of_log = |op: &Operation| match op {
        Operation::Write { file, offset, bytes } if *file != 0 => Some((*offset, bytes.len())),
        _ => None,
    };
    let frames: Vec<(u64, usize)> = operations.iter().filter_map(of_log).collect();
    let mut written = 0;
    let mut steps = 0;
    for (offset, length) in &frames {
        let end = offset + *length as u64;
        steps += u64::from(end > written);
        written = written.max(end);
    }
    assert!(frames.len() > 100 && steps <= 6, "{} frames, {steps} steps", frames.len());
    fixture.reopen();
    fixture.blocks();
}

/// Data that only the log has would be lost with it.
#[test]
fn a_log_is_kept_when_its_data_cannot_be_flushed() {
    let disk = MemoryDisk::default();
    let config = StoreConfig { log_bytes: 64 << 10, ..StoreConfig::default() };
    let store = FileChunkStore::open_on(disk.clone(), config.clone()).unwrap();
    disk.0.lock().unwrap().fail_sync_of = Some(0);
    let (chain_version, change) = (ChainVersion(1), ContentChange::Replace);
    let mut written = 0;
    for number in 1..200 {
        let (version, tags) = (ChunkVersion(number), TagWindow::default());
        let update = StoreUpdate { chunk: chunk(), version, chain_version, tags, change };
        match store.apply(&update, &[number as u8; 100]) {
            Ok(_) => drop(store.commit(chunk(), version, chain_version)),
            Err(StoreError::Io { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        written = number;
    }
    assert!((2..199).contains(&written), "after {written} updates");
    drop(store);
    let operations = disk.0.lock().unwrap().operations.clone();
    let disk = after_power_loss(&operations, operations.len(), Luck::Nothing);
    let store = FileChunkStore::open_on(disk, config).unwrap();
    let read = store.read(chunk(), Which::Newest, 0, 100).unwrap();
    assert_eq!(read.bytes, [written as u8; 100]);
}

#[test]
fn commit_at_once_makes_no_file_system_call() {
    let mut fixture = Fixture::new();
    fixture.write(0, &[5; 100]);
    let version = ChunkVersion(2);
    let change = ContentChange::Write { offset: 0 };
    let tags = TagWindow::default();
    let update =
        StoreUpdate { chunk: chunk(), version, chain_version: ChainVersion(1), tags, change };
    fixture.store.apply(&update, &[6; 100]).unwrap();
    let before = fixture.operations().len();
    let committed =
        fixture.store.commit_at_once(chunk(), version, ChainVersion(3)).unwrap().unwrap();
    assert_eq!((committed.version, committed.chain_version), (version, ChainVersion(3)));
    let again = fixture.store.commit_at_once(chunk(), version, ChainVersion(3)).unwrap();
    assert_eq!(again, Ok(committed));
    let unknown = fixture.store.commit_at_once(chunk(), ChunkVersion(9), ChainVersion(3)).unwrap();
    assert_eq!(unknown, Err(StoreError::NotFound { chunk: chunk() }));
    assert_eq!(fixture.operations().len(), before);
}

/// If the log must be compacted first, the commit is left to a thread that may wait.
#[test]
fn commit_at_once_does_not_touch_a_full_log() {
    let disk = MemoryDisk::default();
    let config = StoreConfig { log_bytes: 64 << 10, ..StoreConfig::default() };
    let store = FileChunkStore::open_on(disk.clone(), config).unwrap();
    let mut open_commits = 0;
    for number in 1..40_000 {
        let chunk = ChunkId::new(InodeId(number), 0);
        let version = ChunkVersion(1);
        let (chain_version, tags) = (ChainVersion(1), TagWindow::default());
        let change = ContentChange::Remove;
        store.apply(&StoreUpdate { chunk, version, chain_version, tags, change }, &[]).unwrap();
        if store.commit_at_once(chunk, version, chain_version).is_none() {
            open_commits += 1;
            store.commit(chunk, version, chain_version).unwrap();
        }
        if open_commits > 0 {
            return;
        }
    }
    assert!(open_commits > 0, "the log was never full");
}
