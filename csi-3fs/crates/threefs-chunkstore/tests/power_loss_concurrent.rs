//! After a loss of power, each update that was acknowledged while others shared its flush is there,
//! and each other one is there as a whole or not at all.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::sync::{Barrier, Mutex};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use support::{Luck, MemoryDisk, Operation, after_power_loss};
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

const WRITERS: u32 = 4;
const ROUNDS: u64 = 12;
const RUNS: u64 = 3;

/// A change of a chunk, and the number of disk operations when it was acknowledged.
struct Acknowledged {
    content: Option<Vec<u8>>,
    operations: usize,
}

type Histories = Vec<Mutex<Vec<Acknowledged>>>;

fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(2 << 20, 0),
        grow_bytes: 32 << 10,
        log_bytes: 512 << 10,
        ..StoreConfig::default()
    }
}

fn chunk(writer: u32) -> ChunkId {
    ChunkId::new(InodeId(1), writer)
}

fn content(writer: u32, round: u64) -> Vec<u8> {
    let length = 9_000 + (round * 7_919 + u64::from(writer) * 1_117) % 20_000;
    (0..length).map(|at| (at * 17 + round * 101 + u64::from(writer) * 31 + 1) as u8).collect()
}

fn operations(disk: &MemoryDisk) -> usize {
    disk.0.lock().unwrap().operations.len()
}

/// Makes one change in each round, together with the other writers.
fn write(
    store: &FileChunkStore<MemoryDisk>,
    disk: &MemoryDisk,
    writer: u32,
    start: &Barrier,
    history: &Mutex<Vec<Acknowledged>>,
) {
    let chunk = chunk(writer);
    let mut version = 1;
    for round in 1..=ROUNDS {
        start.wait();
        let changed = if (round + u64::from(writer)).is_multiple_of(7) {
            store.forget(chunk).unwrap();
            version = 1;
            None
        } else {
            let update = StoreUpdate {
                chunk,
                version: ChunkVersion(version),
                chain_version: ChainVersion(1),
                tags: TagWindow::default(),
                change: ContentChange::Replace,
            };
            let bytes = content(writer, round);
            store.apply(&update, &bytes).unwrap();
            Some(bytes)
        };
        let operations = operations(disk);
        // Otherwise the next update replaces this one.
        if changed.is_some() && !round.is_multiple_of(3) {
            store.commit(chunk, ChunkVersion(version), ChainVersion(1)).unwrap();
            version += 1;
        }
        history.lock().unwrap().push(Acknowledged { content: changed, operations });
    }
}

fn check(store: &FileChunkStore<MemoryDisk>, at: usize, histories: &Histories, run: u64) {
    for (writer, history) in (0..).zip(histories) {
        let content = match store.read(chunk(writer), Which::Newest, 0, u32::MAX) {
            Ok(outcome) => Some(outcome.bytes),
            Err(StoreError::NotFound { .. }) => None,
            Err(error) => panic!("run {run}, before operation {at}, writer {writer}: {error}"),
        };
        let history = history.lock().unwrap();
        let acknowledged = history.iter().take_while(|it| it.operations <= at).count();
        let last = acknowledged.checked_sub(1).and_then(|last| history[last].content.as_ref());
        let next = history.get(acknowledged);
        assert!(
            content.as_ref() == last || next.is_some_and(|next| content == next.content),
            "run {run}, before operation {at}, writer {writer}: {acknowledged} changes are \
             acknowledged, and the content is of none that is allowed",
        );
    }
}

#[test]
fn updates_that_share_a_flush_survive_a_loss_of_power() {
    let (mut changes, mut flushes, mut in_place) = (0, 0, 0);
    for run in 0..RUNS {
        let disk = MemoryDisk::default();
        disk.0.lock().unwrap().flush_yields = 2;
        let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        let start = Barrier::new(WRITERS as usize);
        let histories: Histories = (0..WRITERS).map(|_| Mutex::default()).collect();
        std::thread::scope(|scope| {
            for (writer, history) in (0..).zip(&histories) {
                let (store, disk, start) = (&store, &disk, &start);
                scope.spawn(move || write(store, disk, writer, start, history));
            }
        });
        let operations = disk.0.lock().unwrap().operations.clone();
        let is_in_place =
            |it: &&Operation| matches!(it, Operation::WriteToDevice { in_place: true, .. });
        // All but the data file, number 0; the log is not compacted.
        let is_flush = |it: &&Operation| matches!(it, Operation::Sync(file) if *file != 0);
        in_place += operations.iter().filter(is_in_place).count();
        flushes += operations.iter().filter(is_flush).count();
        changes += histories.iter().map(|history| history.lock().unwrap().len()).sum::<usize>();
        let mut rng = ChaCha8Rng::seed_from_u64(run);
        for at in 0..=operations.len() {
            check_all(&operations, at, Luck::Nothing, &histories, run);
            for _ in 0..2 {
                check_all(&operations, at, Luck::Random(&mut rng), &histories, run);
            }
        }
    }
    assert!(flushes < changes, "{flushes} flushes of {changes} changes: none was shared");
    assert!(in_place > 20, "{in_place} writes in place: the runs must reuse blocks");
}

fn check_all(operations: &[Operation], at: usize, luck: Luck<'_>, histories: &Histories, run: u64) {
    let disk = after_power_loss(operations, at, luck);
    let store = FileChunkStore::open_on(disk, config())
        .unwrap_or_else(|error| panic!("run {run}, before operation {at}: {error}"));
    check(&store, at, histories, run);
}
