//! Several stores of one device share a flush: after a loss of power, each update whose flush has
//! ended is there, and each other one is there as a whole or not at all.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use support::{Luck, MemoryDisk, MemoryFile, Operation, after_power_loss};
use threefs_chunkstore::disk::Disk;
use threefs_chunkstore::flush::{Started, flush_together};
use threefs_chunkstore::{ChunkStore, FileChunkStore, Reservation, Staged, StoreConfig};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const STORES: usize = 3;
const ROUNDS: u64 = 10;

/// A folder of a disk that others share.
struct Folder {
    disk: MemoryDisk,
    number: usize,
}

impl Folder {
    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.number)
    }
}

impl Disk for Folder {
    type File = MemoryFile;

    fn open(&self, name: &str) -> io::Result<MemoryFile> {
        self.disk.open(&self.path(name))
    }
    fn list(&self) -> io::Result<Vec<String>> {
        let names = self.disk.list()?;
        let own = names.iter().filter_map(|name| name.strip_prefix(&self.path("")));
        Ok(own.map(str::to_owned).collect())
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(&self.path(from), &self.path(to))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(&self.path(name))
    }
    fn sync_names(&self) -> io::Result<()> {
        self.disk.sync_names()
    }
    fn shares_flushes(&self, data: &MemoryFile, log: &MemoryFile) -> bool {
        self.disk.shares_flushes(data, log)
    }
    fn device(&self, file: &MemoryFile) -> Option<u64> {
        self.disk.device(file)
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.disk.free_bytes()
    }
}

type Store = FileChunkStore<Folder>;

fn open(disk: &MemoryDisk) -> Result<Vec<Store>, StoreError> {
    let open = |number| {
        let folder = Folder { disk: disk.clone(), number };
        let config =
            StoreConfig { grow_bytes: 32 << 10, log_bytes: 1 << 20, ..StoreConfig::default() };
        FileChunkStore::open_on(folder, config)
    };
    (0..STORES).map(open).collect()
}

/// A staged change of a chunk, and the number of disk operations once it was durable.
struct Change {
    content: Vec<u8>,
    operations: usize,
}

fn content(store: usize, round: u64) -> Vec<u8> {
    // Most are in the log, some are not.
    let length = if round % 4 == 3 { 21_000 } else { 3_000 + round * 100 + store as u64 };
    (0..length).map(|at| (at * 17 + round * 101 + store as u64 * 31 + 1) as u8).collect()
}

fn chunk(round: u64) -> ChunkId {
    ChunkId::new(InodeId(1), (round % 2) as u32)
}

fn stage(store: &Store, round: u64, bytes: &[u8]) -> Staged {
    let update = StoreUpdate {
        chunk: chunk(round),
        version: ChunkVersion(round / 2 + 1),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.stage(&update, bytes, Checksum::of(bytes), Reservation::default(), &mut || ()).unwrap()
}

fn flush(stores: &[Store], staged: &[Staged]) -> Vec<Option<Result<(), StoreError>>> {
    let stores: Vec<(&dyn ChunkStore, u64)> =
        stores.iter().zip(staged).map(|(store, staged)| (store as _, staged.number)).collect();
    flush_together(&stores).results
}

/// All changes of each store.
fn run(disk: &MemoryDisk, stores: &[Store]) -> Vec<Vec<Change>> {
    let mut histories: Vec<Vec<Change>> = stores.iter().map(|_| Vec::new()).collect();
    for round in 0..ROUNDS {
        let contents: Vec<_> = (0..STORES).map(|number| content(number, round)).collect();
        let staged: Vec<Staged> =
            stores.iter().zip(&contents).map(|(store, it)| stage(store, round, it)).collect();
        assert!(flush(stores, &staged).into_iter().all(|result| result == Some(Ok(()))));
        let operations = disk.0.lock().unwrap().operations.len();
        for ((store, history), content) in stores.iter().zip(&mut histories).zip(contents) {
            history.push(Change { content, operations });
            store.commit(chunk(round), ChunkVersion(round / 2 + 1), ChainVersion(1)).unwrap();
        }
    }
    histories
}

fn check(disk: &MemoryDisk, at: usize, histories: &[Vec<Change>]) {
    let stores = open(disk).unwrap_or_else(|error| panic!("before operation {at}: {error}"));
    for (number, (store, history)) in stores.iter().zip(histories).enumerate() {
        for of_chunk in 0..2 {
            let read = store.read(chunk(of_chunk), Which::Newest, 0, u32::MAX);
            let found = read.ok().map(|outcome| outcome.bytes);
            let changes: Vec<&Change> = history.iter().skip(of_chunk as usize).step_by(2).collect();
            let durable = changes.iter().filter(|change| change.operations <= at).count();
            let allowed = [durable.checked_sub(1), Some(durable)].into_iter();
            let allowed = allowed.map(|it| it.and_then(|it| changes.get(it)).map(|it| &it.content));
            assert!(
                allowed.into_iter().any(|allowed| allowed == found.as_ref()),
                "before operation {at}, store {number}, chunk {of_chunk}: {durable} changes are \
                 durable, and the content is of none that is allowed",
            );
        }
    }
}

#[test]
fn updates_of_stores_that_share_a_flush_survive_a_loss_of_power() {
    let disk = MemoryDisk::default();
    let stores = open(&disk).unwrap();
    let opened = disk.0.lock().unwrap().operations.len();
    let histories = run(&disk, &stores);
    let operations = disk.0.lock().unwrap().operations.clone();
    let flushes = operations[opened..].iter().filter(|it| matches!(it, Operation::Sync(_))).count();
    let frames = STORES * ROUNDS as usize;
    assert!(flushes < frames, "{flushes} flushes of {frames} frames");
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for at in opened..=operations.len() {
        check(&after_power_loss(&operations, at, Luck::Nothing), at, &histories);
        for _ in 0..3 {
            check(&after_power_loss(&operations, at, Luck::Random(&mut rng)), at, &histories);
        }
    }
}

#[test]
fn without_a_common_device_each_store_flushes() {
    let disk = MemoryDisk::default();
    disk.0.lock().unwrap().separate_flushes = true;
    let stores = open(&disk).unwrap();
    run(&disk, &stores);
    let before = disk.0.lock().unwrap().operations.len();
    let staged: Vec<_> = stores.iter().map(|store| stage(store, ROUNDS, b"small")).collect();
    assert!(flush(&stores, &staged).into_iter().all(|result| result == Some(Ok(()))));
    let operations = disk.0.lock().unwrap().operations.clone();
    let flushes = operations[before..].iter().filter(|it| matches!(it, Operation::Sync(_))).count();
    assert_eq!(flushes, STORES);
}

#[test]
fn a_failed_flush_fails_every_store_that_shares_it() {
    let disk = MemoryDisk::default();
    let stores = open(&disk).unwrap();
    run(&disk, &stores);
    let staged: Vec<_> = stores.iter().map(|store| stage(store, ROUNDS, b"small")).collect();
    disk.0.lock().unwrap().fail_sync = true;
    let results = flush(&stores, &staged);
    assert!(results.iter().all(|result| matches!(result, Some(Err(StoreError::Io { .. })))));
    for (store, staged) in stores.iter().zip(&staged) {
        assert!(store.settle(staged.number).is_err());
    }
}

#[test]
fn a_store_that_another_thread_flushes_is_left_to_it() {
    let disk = MemoryDisk::default();
    let stores = open(&disk).unwrap();
    let staged: Vec<_> = stores.iter().map(|store| stage(store, 0, b"small")).collect();
    let Started::Flush(other) = stores[1].start_flush(staged[1].number) else { panic!() };
    let results = flush(&stores, &staged);
    assert_eq!(results, [Some(Ok(())), None, Some(Ok(()))]);
    let written = other.write();
    other.end(written).unwrap();
    stores[1].settle(staged[1].number).unwrap();
    assert_eq!(flush(&stores, &staged), [Some(Ok(())), Some(Ok(())), Some(Ok(()))]);

    let next = stage(&stores[1], 1, b"small");
    let Started::Flush(abandoned) = stores[1].start_flush(next.number) else { panic!() };
    drop(abandoned);
    assert!(stores[1].settle(next.number).is_err(), "whether it is durable is unknown");
}
