//! Removed files cost neither memory, log nor blocks once their inodes are forgotten.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::path::Path;

use support::{Luck, MemoryDisk, after_power_loss, log_name};
use threefs_chunkstore::disk::Disk;
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow};
use threefs_core::error::StoreError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

fn update(chunk: ChunkId, version: u64, change: ContentChange) -> StoreUpdate {
    StoreUpdate {
        chunk,
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change,
    }
}

fn put<D: Disk>(
    store: &FileChunkStore<D>,
    chunk: ChunkId,
    version: u64,
    change: ContentChange,
) -> Result<(), StoreError> {
    let payload: &[u8] = if change == ContentChange::Remove { &[] } else { &[7; 5_000] };
    store.apply(&update(chunk, version, change), payload)?;
    store.commit(chunk, ChunkVersion(version), ChainVersion(1)).map(drop)
}

fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(1 << 20, 0),
        grow_bytes: 64 << 10,
        log_bytes: 64 << 10,
        ..StoreConfig::default()
    }
}

#[test]
fn a_forgotten_inode_has_no_chunks_and_rejects_updates_even_after_a_restart() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    let chunk = |inode, index| ChunkId::new(InodeId(inode), index);
    for (inode, index) in [(4, 0), (5, 0), (5, 9), (6, 0)] {
        put(&store, chunk(inode, index), 1, ContentChange::Replace).unwrap();
    }
    put(&store, chunk(5, 0), 2, ContentChange::Remove).unwrap();
    // A pending state is removed as well.
    store.apply(&update(chunk(5, 9), 2, ContentChange::Replace), &[1; 9_000]).unwrap();
    store.forget_inodes(&[InodeRange::one(InodeId(5))], ChunkVersion(0)).unwrap();
    let check = |store: &FileChunkStore<MemoryDisk>| {
        let present: Vec<u64> =
            store.metas(None, ChunkId::MAX, 99).iter().map(|meta| meta.chunk.inode.0).collect();
        assert_eq!(present, [4, 6]);
        assert_eq!(store.pending(None, 9), []);
        assert!(store.is_forgotten(InodeId(5)));
        assert_eq!(store.space().used_bytes, 2 * 8_192);
        let late = store.apply(&update(chunk(5, 1), 1, ContentChange::Replace), b"late");
        assert_eq!(late, Err(StoreError::NotFound { chunk: chunk(5, 1) }));
    };
    check(&store);
    drop(store);
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    check(&store);
    // The fence is in a compacted log too.
    let before = log_name(&disk);
    for version in 2..60 {
        put(&store, chunk(6, 0), version, ContentChange::Replace).unwrap();
    }
    assert_ne!(log_name(&disk), before, "the log was compacted");
    drop(store);
    check(&FileChunkStore::open_on(disk, config()).unwrap());
}

#[test]
fn a_purged_chunk_leaves_only_the_version_of_its_removal_also_in_a_compacted_log() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    let chunk = |index| ChunkId::new(InodeId(4), index);
    for index in 0..3 {
        put(&store, chunk(index), 1, ContentChange::Replace).unwrap();
    }
    put(&store, chunk(1), 7, ContentChange::Remove).unwrap();
    store.purge(chunk(1), ChunkVersion(7)).unwrap();
    let check = |store: &FileChunkStore<MemoryDisk>| {
        let metas = store.metas(None, ChunkId::MAX, 99);
        let present: Vec<u32> = metas.iter().map(|meta| meta.chunk.index).collect();
        assert_eq!(present, [0, 2]);
        assert_eq!(store.version_floor(), ChunkVersion(7));
        assert_eq!(store.space().used_bytes, 2 * 8_192);
    };
    store.flush().unwrap();
    check(&store);
    drop(store);
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    check(&store);
    let before = log_name(&disk);
    for version in 2..60 {
        put(&store, chunk(0), version, ContentChange::Replace).unwrap();
    }
    assert_ne!(log_name(&disk), before, "the log was compacted");
    drop(store);
    let store = FileChunkStore::open_on(disk, config()).unwrap();
    check(&store);
    // Purged again, and a synced store that receives another's floor.
    store.purge(chunk(1), ChunkVersion(7)).unwrap();
    store.forget_inodes(&[], ChunkVersion(9)).unwrap();
    assert_eq!(store.version_floor(), ChunkVersion(9));
}

/// A chunk that a sync removed from a replica must not reappear.
#[test]
fn a_forgotten_chunk_does_not_reappear_after_a_loss_of_power() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    let chunk = ChunkId::new(InodeId(4), 0);
    put(&store, chunk, 1, ContentChange::Replace).unwrap();
    store.flush().unwrap();
    store.forget(chunk).unwrap();
    let operations = disk.0.lock().unwrap().operations.clone();
    let disk = after_power_loss(&operations, usize::MAX, Luck::Nothing);
    let store = FileChunkStore::open_on(disk, config()).unwrap();
    assert!(store.meta(chunk).is_none());
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn log_bytes(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let logs = files.filter(|file| file.file_name().to_string_lossy().starts_with("log-"));
    logs.map(|log| log.metadata().unwrap().len()).sum()
}

/// Creates, removes and forgets files of eight chunks; returns (memory, log) after every tenth.
fn create_and_remove(chunks: u64) -> Vec<(u64, u64)> {
    const CHUNKS_PER_FILE: u64 = 8;
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let config = StoreConfig { log_bytes: 4 << 20, ..StoreConfig::default() };
    let store = FileChunkStore::open(folder.path(), config).unwrap();
    let files = chunks / CHUNKS_PER_FILE;
    let mut forgotten = Vec::new();
    let mut figures = Vec::new();
    for file in 0..files {
        let inode = InodeId(file + 1);
        for index in 0..CHUNKS_PER_FILE as u32 {
            put(&store, ChunkId::new(inode, index), 1, ContentChange::Replace).unwrap();
            put(&store, ChunkId::new(inode, index), 2, ContentChange::Remove).unwrap();
        }
        // Every hundredth file is kept, so that the forgotten ones are not one range. Its removed
        // chunks are purged.
        if file % 100 != 0 {
            forgotten.push(InodeRange::one(inode));
        } else {
            for index in 1..CHUNKS_PER_FILE as u32 {
                store.purge(ChunkId::new(inode, index), ChunkVersion(2)).unwrap();
            }
            put(&store, ChunkId::new(inode, 0), 3, ContentChange::Replace).unwrap();
        }
        if forgotten.len() == 64 {
            store.forget_inodes(&forgotten, ChunkVersion(0)).unwrap();
            forgotten.clear();
        }
        if (file + 1) % (files / 10) == 0 {
            figures.push((resident_bytes(), log_bytes(folder.path())));
        }
    }
    let chunks_known = store.metas(None, ChunkId::MAX, usize::MAX).len() as u64;
    assert!(chunks_known <= files / 100 + 65 * CHUNKS_PER_FILE, "{chunks_known} entries");
    figures
}

fn check(figures: &[(u64, u64)], lasting_bytes_max: u64) {
    println!("(memory, log) in bytes after each tenth: {figures:?}");
    let (after_one, after_all) = (figures[0], figures[figures.len() - 1]);
    // Within 5 %, apart from the kept files.
    assert!(
        after_all.0 <= after_one.0 + after_one.0 / 20 + lasting_bytes_max,
        "memory grew from {} to {} bytes",
        after_one.0,
        after_all.0
    );
    assert!(after_all.1 <= 16 << 20, "the log has {} bytes", after_all.1);
}

#[test]
fn two_hundred_thousand_removed_chunks_cost_neither_memory_nor_log() {
    check(&create_and_remove(200_000), 1 << 20);
}

/// The long variant: `cargo test --release -p threefs-chunkstore --test forget -- --ignored`.
#[test]
#[ignore = "ten minutes"]
fn ten_million_removed_chunks_cost_neither_memory_nor_log() {
    check(&create_and_remove(10_000_000), 12 << 20);
}
