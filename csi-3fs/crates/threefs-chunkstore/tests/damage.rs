//! Damage is reported, never returned as data; a full disk and a failed flush lose nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use support::{MemoryDisk, after_kill, log_name};
use threefs_chunkstore::disk::{Disk, DiskFile};
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig, Verified};
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(1), index)
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

fn content(index: u32, version: u64, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i as u64 * 31 + version * 7 + u64::from(index) * 13) as u8).collect()
}

fn put<D: Disk>(
    store: &FileChunkStore<D>,
    index: u32,
    version: u64,
    length: usize,
) -> Result<(), StoreError> {
    let bytes = content(index, version, length);
    store.apply(&update(chunk(index), version, ContentChange::Replace), &bytes)?;
    store.commit(chunk(index), ChunkVersion(version), ChainVersion(1))?;
    Ok(())
}

fn read<D: Disk>(store: &FileChunkStore<D>, index: u32) -> Result<Vec<u8>, StoreError> {
    store.read(chunk(index), Which::Committed, 0, u32::MAX).map(|read| read.bytes)
}

fn config() -> StoreConfig {
    StoreConfig { grow_bytes: 128 << 10, ..StoreConfig::default() }
}

/// Flips a bit of each block of the data file.
fn damage_data(disk: &MemoryDisk) {
    let data = disk.open("data").unwrap();
    for offset in (0..data.length().unwrap()).step_by(4096) {
        let mut byte = [0];
        data.read_at(&mut byte, offset).unwrap();
        data.write_at(&[byte[0] ^ 1], offset).unwrap();
    }
}

#[test]
fn damage_of_the_last_acknowledged_data_is_reported_after_an_opening_or_a_clean_stop() {
    for clean_stop in [true, false] {
        let mut disk = MemoryDisk::default();
        let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        for version in 1..=3 {
            put(&store, 0, version, 20_000).unwrap();
        }
        // Overwrites the blocks of the first version in place, and is the last frame.
        let bytes = content(0, 4, 20_000);
        store.apply(&update(chunk(0), 4, ContentChange::Replace), &bytes).unwrap();
        let kill = |disk: &MemoryDisk| {
            let operations = disk.0.lock().unwrap().operations.clone();
            after_kill(&operations, operations.len())
        };
        if !clean_stop {
            disk = kill(&disk);
            let opened = FileChunkStore::open_on(disk.clone(), config()).unwrap();
            let killed = kill(&disk);
            drop(opened);
            disk = killed;
        }
        drop(store);
        damage_data(&disk);
        let store = FileChunkStore::open_on(disk, config()).unwrap();
        let pending = store.meta(chunk(0)).unwrap().pending.expect("the update is lost");
        assert_eq!(pending.version, ChunkVersion(4), "clean stop: {clean_stop}");
        let error = store.read(chunk(0), Which::Newest, 0, u32::MAX).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    }
}

#[test]
fn a_flipped_bit_is_reported_by_chunk_and_block_and_a_new_write_repairs_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileChunkStore::open(folder.path(), config()).unwrap();
    for index in 0..4 {
        put(&store, index, 1, 20_000).unwrap();
    }
    let data = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(folder.path().join("data"))
        .unwrap();
    let used = 4 * 5 * 4096;
    let mut reported = 0;
    for position in (0..used).step_by(1_117) {
        let mut byte = [0];
        data.read_exact_at(&mut byte, position).unwrap();
        data.write_all_at(&[byte[0] ^ 0x10], position).unwrap();
        for index in 0..4 {
            match read(&store, index) {
                Ok(bytes) => assert_eq!(bytes, content(index, 1, 20_000)),
                Err(StoreError::Corrupt { chunk: damaged, block }) => {
                    assert_eq!(damaged, chunk(index));
                    assert!(block < 5);
                    reported += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        data.write_all_at(&byte, position).unwrap();
    }
    // The last block of each chunk is used only in part: flips behind its end are harmless.
    assert!(reported >= used / 1_117 - 4, "{reported}");
    data.write_all_at(&[0xff; 64], 100).unwrap();
    let hurt = (0..4).find(|index| read(&store, *index).is_err()).unwrap();
    let partial = store.apply(&update(chunk(hurt), 2, ContentChange::Write { offset: 9 }), b"x");
    assert_eq!(partial, Err(StoreError::Corrupt { chunk: chunk(hurt), block: 0 }));
    put(&store, hurt, 2, 20_000).unwrap();
    assert_eq!(read(&store, hurt).unwrap(), content(hurt, 2, 20_000));
}

#[test]
fn a_truncated_data_file_reports_the_chunks_behind_its_end_as_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileChunkStore::open(folder.path(), config()).unwrap();
    for index in 0..4 {
        put(&store, index, 1, 20_000).unwrap();
    }
    store.flush().unwrap();
    drop(store);
    let data = std::fs::OpenOptions::new().write(true).open(folder.path().join("data")).unwrap();
    data.set_len(10 * 4096).unwrap();
    let store = FileChunkStore::open(folder.path(), config()).unwrap();
    let readable: Vec<bool> = (0..4).map(|index| read(&store, index).is_ok()).collect();
    assert_eq!(readable.iter().filter(|ok| **ok).count(), 2, "{readable:?}");
    for (index, whole) in (0..).zip(readable) {
        if !whole {
            let error = read(&store, index).unwrap_err();
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
            put(&store, index, 2, 20_000).unwrap();
            assert_eq!(read(&store, index).unwrap(), content(index, 2, 20_000));
        }
    }
}

#[test]
fn damage_within_the_log_is_an_error_with_its_position() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileChunkStore::open(folder.path(), config()).unwrap();
    for index in 0..8 {
        put(&store, index, 1, 5_000).unwrap();
    }
    store.flush().unwrap();
    drop(store);
    let path = folder.path().join("log-00000001");
    let log = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    for position in [5_u64, 26, 3 * 4096 + 40, 5 * 4096 + 8] {
        let mut byte = [0];
        log.read_exact_at(&mut byte, position).unwrap();
        log.write_all_at(&[byte[0] ^ 1], position).unwrap();
        let error = FileChunkStore::open(folder.path(), config()).err().unwrap();
        assert!(error.to_string().contains("the log is damaged at byte"), "{error}");
        log.write_all_at(&byte, position).unwrap();
    }
    assert_eq!(
        FileChunkStore::open(folder.path(), config()).unwrap().metas(None, ChunkId::MAX, 99).len(),
        8
    );
}

#[test]
fn a_second_process_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let _first = FileChunkStore::open(folder.path(), config()).unwrap();
    let error = FileChunkStore::open(folder.path(), config()).err().unwrap();
    assert!(error.to_string().contains("another process has this store open"), "{error}");
}

#[test]
fn a_full_disk_is_reported_loses_nothing_and_is_usable_after_a_removal() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    put(&store, 0, 1, 20_000).unwrap();
    // Space for the log's steps and some chunks.
    disk.0.lock().unwrap().quota = Some(64 << 20);
    let mut written = 1;
    let error = loop {
        match put(&store, written, 1, 100_000) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(written > 10, "{written}");
    for index in 0..written {
        let length = if index == 0 { 20_000 } else { 100_000 };
        assert_eq!(read(&store, index).unwrap(), content(index, 1, length));
    }
    assert_eq!(store.meta(chunk(written)), None, "no partial change");
    // Removals work on a full disk, and the freed space is used.
    for index in 1..5 {
        store.apply(&update(chunk(index), 2, ContentChange::Remove), &[]).unwrap();
        store.commit(chunk(index), ChunkVersion(2), ChainVersion(1)).unwrap();
    }
    put(&store, written, 1, 100_000).unwrap();
    assert_eq!(read(&store, written).unwrap(), content(written, 1, 100_000));
    drop(store);
    let store = FileChunkStore::open_on(disk, config()).unwrap();
    assert_eq!(read(&store, written).unwrap(), content(written, 1, 100_000));
}

#[test]
fn the_capacity_is_a_limit() {
    let bounded = StoreConfig { budget: DiskBudget::new(64 << 10, 0), ..config() };
    let store = FileChunkStore::open_on(MemoryDisk::default(), bounded).unwrap();
    for index in 0..3 {
        put(&store, index, 1, 12_000).unwrap();
    }
    // Space for two copies of the largest chunk is kept for overwrites.
    assert!(matches!(put(&store, 3, 1, 12_000), Err(StoreError::NoSpace { .. })));
    put(&store, 3, 1, 4_000).unwrap();
    assert!(store.space().used_bytes <= 64 << 10);
    assert_eq!(store.space().capacity_bytes, 64 << 10);
}

#[test]
fn after_a_failed_flush_nothing_is_acknowledged_until_the_store_is_reopened() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    put(&store, 0, 1, 5_000).unwrap();
    store.flush().unwrap();
    disk.0.lock().unwrap().fail_sync = true;
    let error = put(&store, 1, 1, 5_000).unwrap_err();
    assert!(error.to_string().contains("closed after a failed flush"), "{error}");
    assert!(put(&store, 2, 1, 5_000).is_err(), "it stays closed");
    assert_eq!(read(&store, 0).unwrap(), content(0, 1, 5_000), "reads still work");
    drop(store);
    let store = FileChunkStore::open_on(disk, config()).unwrap();
    assert_eq!(read(&store, 0).unwrap(), content(0, 1, 5_000));
    put(&store, 2, 1, 5_000).unwrap();
}

fn small_log() -> StoreConfig {
    StoreConfig { grow_bytes: 128 << 10, log_bytes: 64 << 10, ..StoreConfig::default() }
}

/// It is unknown whether the new log's name is durable: acknowledged updates in either log may be
/// lost.
#[test]
fn a_failed_folder_flush_during_a_compaction_closes_the_store() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), small_log()).unwrap();
    disk.0.lock().unwrap().fail_sync_names = true;
    let mut acked_indices = Vec::new();
    for index in 0..60 {
        match put(&store, index, 1, 5_000) {
            Ok(()) => acked_indices.push(index),
            Err(error) => {
                assert!(error.to_string().contains("closed after a failed flush"), "{error}");
                break;
            }
        }
    }
    assert!(acked_indices.len() < 60, "the log was not compacted");
    drop(store);
    let store = FileChunkStore::open_on(disk, small_log()).unwrap();
    for index in acked_indices {
        assert!(store.meta(chunk(index)).is_some(), "chunk {index} was promised");
    }
}

/// Complete frames of a killed compaction, behind the end of the next one, would be replayed.
#[test]
fn leftovers_in_the_spare_log_are_not_replayed() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), small_log()).unwrap();
    for index in 0..10 {
        put(&store, index, 1, 5_000).unwrap();
    }
    drop(store);
    let old = disk.open(&log_name(&disk)).unwrap();
    let mut frames = vec![0; old.length().unwrap() as usize];
    old.read_at(&mut frames, 0).unwrap();
    disk.open("spare").unwrap().write_at(&frames, 0).unwrap();
    let store = FileChunkStore::open_on(disk.clone(), small_log()).unwrap();
    let mut newest = 1;
    while newest < 60 {
        newest += 1;
        put(&store, 5, newest, 5_000).unwrap();
        if log_name(&disk) == "log-00000002" {
            break;
        }
    }
    assert!(newest < 60, "the log was not compacted");
    let crashed = after_kill(&disk.0.lock().unwrap().operations, usize::MAX);
    let store = FileChunkStore::open_on(crashed, small_log()).unwrap();
    assert_eq!(store.metas(None, ChunkId::MAX, 99).len(), 10);
    assert_eq!(store.meta(chunk(5)).unwrap().newest().version, ChunkVersion(newest));
}

/// Writers get `NoSpace`; removals work, and then writes work again, regardless of the number of
/// preceding overwrites.
#[test]
fn a_full_disk_can_be_emptied_and_reused() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), small_log()).unwrap();
    disk.0.lock().unwrap().quota = Some(4 << 20);
    // Few updates fill the disk, so the log has not grown yet.
    let mut written = 0;
    while put(&store, written, 1, 400_000).is_ok() {
        written += 1;
    }
    assert!(written > 6, "{written}");
    let used = || -> usize { disk.list().unwrap().iter().map(|name| length(&disk, name)).sum() };
    disk.0.lock().unwrap().quota = Some(used() as u64);
    let remove = |index, version| {
        store.apply(&update(chunk(index), version, ContentChange::Remove), &[]).unwrap();
        store.commit(chunk(index), ChunkVersion(version), ChainVersion(1)).unwrap();
    };
    remove(0, 2);
    store.flush().unwrap();
    // Overwrites reuse blocks, and write many times the size of the log.
    put(&store, 1, 2, 100_000).unwrap();
    for version in 3..200 {
        put(&store, 1, version, 20_000).unwrap();
    }
    for index in 2..written {
        for version in 2..8 {
            remove(index, version);
        }
    }
    store.flush().unwrap();
    assert!(used() < 2 << 20, "{} bytes: free blocks must be returned to the file system", used());
    // Less than before: the disk has shrunk, and space for two copies is kept.
    for index in 2..written - 2 {
        put(&store, index, 8, 400_000).unwrap();
    }
    drop(store);
    let store = FileChunkStore::open_on(disk, small_log()).unwrap();
    for index in 2..written - 2 {
        assert_eq!(read(&store, index).unwrap(), content(index, 8, 400_000));
    }
}

#[test]
fn stores_of_one_disk_share_its_capacity() {
    let budget = DiskBudget::new(1 << 20, 0);
    let config = || StoreConfig { budget: Arc::clone(&budget), ..small_log() };
    let stores: Vec<_> =
        (0..3).map(|_| FileChunkStore::open_on(MemoryDisk::default(), config()).unwrap()).collect();
    let mut written = 0;
    while put(&stores[written as usize % 3], written, 1, 20_000).is_ok() {
        written += 1;
    }
    let used: u64 = stores.iter().map(|store| store.space().used_bytes).sum();
    assert!(used <= 1 << 20, "{used}");
    assert!(used > 700 << 10, "{used}");
    assert!(stores.iter().all(|store| store.space().capacity_bytes == 1 << 20));
    // Space that one store frees is available to another.
    let mut stores = stores.into_iter();
    let first = stores.next().unwrap();
    drop(stores);
    put(&first, 1_000, 1, 200_000).unwrap();
}

/// A compaction without space must not use up what is left.
#[test]
fn a_failed_compaction_uses_no_space_and_loses_nothing() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), small_log()).unwrap();
    for index in 0..10 {
        put(&store, index, 1, 5_000).unwrap();
    }
    for version in 2..60 {
        let used: usize = disk.list().unwrap().iter().map(|name| length(&disk, name)).sum();
        let mut state = disk.0.lock().unwrap();
        // Space for the step that triggers the compaction, but not for another log.
        if version == 5 {
            state.quota = Some(used as u64 + 20_000);
        }
        drop(state);
        if put(&store, 0, version, 5_000).is_err() {
            break;
        }
    }
    assert!(disk.list().unwrap().len() <= 3);
    drop(store);
    assert!(FileChunkStore::open_on(disk, small_log()).unwrap().meta(chunk(9)).is_some());
}

fn length(disk: &MemoryDisk, name: &str) -> usize {
    disk.open(name).unwrap().length().unwrap() as usize
}

#[test]
fn many_writers_and_readers_see_whole_versions_only() {
    const LENGTH: usize = 30_000;
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    // Little space: blocks are reused immediately, while readers read them.
    let tight = StoreConfig {
        budget: DiskBudget::new(1 << 20, 0),
        grow_bytes: 64 << 10,
        log_bytes: 256 << 10,
        ..StoreConfig::default()
    };
    let store = Arc::new(FileChunkStore::open(folder.path(), tight).unwrap());
    for index in 0..4 {
        put(&*store, index, 1, LENGTH).unwrap();
    }
    let writers = (0..4).map(|index| {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            for version in 2..120 {
                put(&*store, index, version, LENGTH).unwrap();
            }
        })
    });
    let readers = (0..4).map(|reader| {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            for round in 0..400 {
                let index = (reader + round) % 4;
                let content_read = store.read(chunk(index), Which::Committed, 0, u32::MAX).unwrap();
                let version = content_read.state.version.0;
                assert!(content_read.bytes == content(index, version, LENGTH), "chunk {index}");
            }
        })
    });
    let threads: Vec<_> = writers.chain(readers).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_chunk_is_verified_from_the_disk_and_without_its_zeros() {
    let disk = MemoryDisk::default();
    let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
    let mut bytes = content(0, 1, 64 << 10);
    bytes[16 << 10..48 << 10].fill(0);
    store.apply(&update(chunk(0), 1, ContentChange::Replace), &bytes).unwrap();
    store.commit(chunk(0), ChunkVersion(1), ChainVersion(1)).unwrap();
    disk.0.lock().unwrap().dropped.clear();
    let verified = Verified { bytes: 32 << 10, chunk_length: 64 << 10 };
    assert_eq!(store.verify(chunk(0), 0, 32 << 10), Ok(verified));
    let dropped = std::mem::take(&mut disk.0.lock().unwrap().dropped);
    assert_eq!(dropped.len(), 2, "before and after");
    assert!(dropped.iter().all(|(_, _, length)| *length == 16 << 10));
    assert_eq!(store.verify(chunk(0), 32 << 10, u32::MAX), Ok(verified));
    assert!(matches!(store.verify(chunk(1), 0, 1), Err(StoreError::NotFound { .. })));
    damage_data(&disk);
    let damaged = |offset| store.verify(chunk(0), offset, 4096);
    assert!(matches!(damaged(0), Err(StoreError::Corrupt { block: 0, .. })));
    assert!(damaged(20 << 10).is_ok(), "zeros are not stored");
    assert!(matches!(damaged(60 << 10), Err(StoreError::Corrupt { block: 15, .. })));
}
