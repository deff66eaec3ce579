//! After a loss of power the store opens in every possible state of the disk, and its content is that of some
//! point between the last acknowledged update and the last call.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{Luck, MemoryDisk, Operation, after_kill, after_power_loss};
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ChunkState, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, Epoch, InodeId};

/// Small steps, so that the files grow and the log is compacted within one run.
fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(1 << 20, 0),
        grow_bytes: 32 << 10,
        log_bytes: 24 << 10,
        ..StoreConfig::default()
    }
}

/// Three chunks, of which two are versions of one.
fn chunk(number: u32) -> ChunkId {
    match number {
        2 => ChunkId::new(InodeId(1), 1).in_epoch(Epoch::new(3, 7)),
        index => ChunkId::new(InodeId(1), index),
    }
}

type Picture = BTreeMap<ChunkId, (ChunkState, Vec<u8>, Option<(ChunkState, Vec<u8>)>)>;

fn picture(store: &FileChunkStore<MemoryDisk>) -> Picture {
    let content = |chunk, which| match store.read(chunk, which, 0, u32::MAX) {
        Ok(read) => read.bytes,
        Err(StoreError::NotFound { .. }) => Vec::new(),
        Err(error) => panic!("{chunk}: {error}"),
    };
    store
        .metas(None, ChunkId::MAX, 1_000)
        .into_iter()
        .map(|meta| {
            let committed = content(meta.chunk, Which::Committed);
            let pending = meta.pending.map(|state| (state, content(meta.chunk, Which::Newest)));
            (meta.chunk, (meta.committed, committed, pending))
        })
        .collect()
}

struct Run {
    disk: MemoryDisk,
    store: FileChunkStore<MemoryDisk>,
    rng: ChaCha8Rng,
    /// After each call: disk operations so far, content of the store, whether it was acknowledged
    /// as durable.
    moments: Vec<(usize, Picture, bool)>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let disk = MemoryDisk::default();
        // A store that cannot rely on a shared flush needs the same tests.
        disk.0.lock().unwrap().separate_flushes = seed % 3 == 2;
        let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        let mut run =
            Self { disk, store, rng: ChaCha8Rng::seed_from_u64(seed), moments: Vec::new() };
        run.moment(true);
        run
    }

    fn moment(&mut self, promise: bool) {
        let operations = self.disk.0.lock().unwrap().operations.len();
        self.moments.push((operations, picture(&self.store), promise));
    }

    fn step(&mut self) {
        let chunk = chunk(self.rng.random_range(0..3));
        let meta = self.store.meta(chunk);
        let pending = meta.as_ref().and_then(|meta| meta.pending.clone());
        match (self.rng.random_range(0..12), pending) {
            (0, _) if chunk.index == 1 => {
                self.store.purge(chunk, ChunkVersion(0)).unwrap();
                self.moment(false);
            }
            (0, _) => {
                self.store.forget(chunk).unwrap();
                self.moment(false);
            }
            (1, _) => {
                self.store.flush().unwrap();
                self.moment(true);
            }
            (2..=7, Some(pending)) => {
                self.store.commit(chunk, pending.version, ChainVersion(2)).unwrap();
                self.moment(false);
            }
            _ => {
                let version = meta.map_or(0, |meta| meta.committed.version.0) + 1;
                let (change, length) = match self.rng.random_range(0..8) {
                    0 => (ContentChange::Remove, 0),
                    1 => {
                        let length = self.rng.random_range(0..30_000);
                        (ContentChange::Truncate { length }, 0)
                    }
                    2 => (ContentChange::Replace, self.rng.random_range(0..30_000)),
                    _ => {
                        let offset = self.rng.random_range(0..9_000);
                        (ContentChange::Write { offset }, self.rng.random_range(1..16_000))
                    }
                };
                let mut payload: Vec<u8> = (0..length).map(|_| self.rng.random()).collect();
                if self.rng.random_bool(0.3) {
                    let zeros = self.rng.random_range(0..=length) as usize;
                    payload[..zeros].fill(0);
                }
                let update = StoreUpdate {
                    chunk,
                    version: ChunkVersion(version),
                    chain_version: ChainVersion(1),
                    tags: TagWindow::default(),
                    change,
                };
                self.store.apply(&update, &payload).unwrap();
                self.moment(true);
            }
        }
    }

    /// States that a loss of power before operation `at` may leave: from the last acknowledged
    /// update to the first call that had not returned.
    fn allowed_moments(&self, at: usize) -> &[(usize, Picture, bool)] {
        let last_acked = self.moments.iter().rposition(|(end, _, promise)| *promise && *end <= at);
        let first_open = self.moments.iter().position(|(end, ..)| *end > at);
        let end = first_open.map_or(self.moments.len(), |first_open| first_open + 1);
        &self.moments[last_acked.unwrap_or(0)..end]
    }
}

fn check(run: &Run, at: usize, luck: Luck<'_>, seed: u64) {
    let operations = run.disk.0.lock().unwrap().operations.clone();
    let disk = after_power_loss(&operations, at, luck);
    let store = FileChunkStore::open_on(disk.clone(), config())
        .unwrap_or_else(|error| panic!("seed {seed}, before operation {at}: {error}"));
    let recovered = picture(&store);
    // Before the first acknowledged update there may be nothing.
    let allowed_moments = run.allowed_moments(at);
    assert!(
        allowed_moments.iter().any(|(_, picture, _)| *picture == recovered),
        "seed {seed}, before operation {at} of {}: none of {} allowed pictures",
        operations.len(),
        allowed_moments.len(),
    );
    // The store continues from there, and later acknowledged updates survive as well.
    let update = StoreUpdate {
        chunk: ChunkId::new(InodeId(9), 0),
        version: ChunkVersion(1),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change: ContentChange::Replace,
    };
    store.apply(&update, &[7; 5_000]).unwrap();
    let continued = picture(&store);
    drop(store);
    let again = FileChunkStore::open_on(disk, config()).unwrap();
    assert_eq!(picture(&again), continued, "seed {seed}, before operation {at}, second opening");
}

/// The process is killed before operation `at`; a new one opens the store and serves from it; then
/// the power fails. State that was served must not be lost.
fn check_kill(run: &Run, at: usize, luck: Luck<'_>, seed: u64) {
    let operations = run.disk.0.lock().unwrap().operations.clone();
    let disk = after_kill(&operations, at);
    let store = FileChunkStore::open_on(disk.clone(), config())
        .unwrap_or_else(|error| panic!("seed {seed}, killed before operation {at}: {error}"));
    let before_loss = picture(&store);
    let operations = disk.0.lock().unwrap().operations.clone();
    let disk = after_power_loss(&operations, operations.len(), luck);
    drop(store);
    let store = FileChunkStore::open_on(disk, config())
        .unwrap_or_else(|error| panic!("seed {seed}, killed before operation {at}: {error}"));
    assert!(
        picture(&store) == before_loss,
        "seed {seed}: killed before operation {at}, opened, then the power failed: state that \
         the store served is lost"
    );
}

#[test]
fn state_served_by_an_opened_store_is_durable() {
    for seed in 0..6 {
        let mut run = Run::new(seed);
        for _ in 0..45 {
            run.step();
        }
        let operations = run.disk.0.lock().unwrap().operations.len();
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0xd1e);
        for at in 0..=operations {
            check_kill(&run, at, Luck::Nothing, seed);
            check_kill(&run, at, Luck::Random(&mut rng), seed);
        }
    }
}

#[test]
fn every_state_after_a_loss_of_power_is_a_past_state() {
    let (mut compacted, mut in_place) = (false, 0);
    let mut states = 0;
    for seed in 0..6 {
        let mut run = Run::new(seed);
        for _ in 0..45 {
            run.step();
        }
        let operations = run.disk.0.lock().unwrap().operations.len();
        compacted |= run.disk.0.lock().unwrap().operations.iter().any(
            |operation| matches!(operation, Operation::Rename(_, to) if to.starts_with("log-")),
        );
        in_place += run.disk.0.lock().unwrap().operations.iter().filter(is_in_place).count();
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0xbad);
        for at in 0..=operations {
            check(&run, at, Luck::Nothing, seed);
            check(&run, at, Luck::Everything, seed);
            for _ in 0..4 {
                check(&run, at, Luck::Random(&mut rng), seed);
            }
            states += 6;
        }
    }
    assert!(compacted, "the runs must be long enough to compact the log");
    assert!(in_place > 10, "{in_place} writes in place: the runs must reuse blocks");
    println!("{states} states");
}

fn is_in_place(operation: &&Operation) -> bool {
    matches!(operation, Operation::WriteToDevice { in_place: true, .. })
}

/// Power fails again while the store that was opened after a loss of power makes the same update.
#[test]
fn a_second_loss_of_power_leaves_a_past_state_too() {
    let mut void = 0;
    for seed in 0..6 {
        let mut run = Run::new(seed);
        for _ in 0..30 {
            run.step();
        }
        let operations = run.disk.0.lock().unwrap().operations.clone();
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x2d);
        for at in 0..=operations.len() {
            let disk = after_power_loss(&operations, at, Luck::Random(&mut rng));
            disk.record_content();
            let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
            let recovered = picture(&store);
            // As the store does with the header of a frame without data.
            let cleared = |operation: &Operation| matches!(operation, Operation::Write { bytes, .. } if bytes == &[0; 4096]);
            void += usize::from(disk.0.lock().unwrap().operations.iter().any(cleared));
            let pending = run.moments.iter().find(|(end, ..)| *end > at);
            let Some((chunk, state, bytes)) = pending.and_then(|(_, next, _)| {
                let changed =
                    next.iter().find(|(chunk, value)| recovered.get(chunk) != Some(value));
                let (chunk, (_, _, pending)) = changed?;
                let (state, bytes) = pending.clone()?;
                Some((*chunk, state, bytes))
            }) else {
                continue;
            };
            let update = StoreUpdate {
                chunk,
                version: state.version,
                chain_version: state.chain_version,
                tags: state.tags.clone(),
                change: ContentChange::Replace,
            };
            let before = disk.0.lock().unwrap().operations.len();
            store.apply(&update, &bytes).unwrap();
            let after = picture(&store);
            let operations = disk.0.lock().unwrap().operations.clone();
            drop(store);
            for again in before..=operations.len() {
                let disk = after_power_loss(&operations, again, Luck::Random(&mut rng));
                let store = FileChunkStore::open_on(disk, config()).unwrap();
                let found = picture(&store);
                assert!(
                    found == after || (found == recovered && again < operations.len()),
                    "seed {seed}, before operation {at}, then before {again}",
                );
            }
        }
    }
    assert!(void > 0, "no last frame was without its data");
}

/// Flushes of the data file and of the log for one update.
fn flushes(disk: &MemoryDisk, update: impl FnOnce()) -> usize {
    let syncs = |disk: &MemoryDisk| {
        let operations = &disk.0.lock().unwrap().operations;
        operations.iter().filter(|operation| matches!(operation, Operation::Sync(_))).count()
    };
    let before = syncs(disk);
    update();
    syncs(disk) - before
}

#[test]
fn an_update_of_reused_blocks_is_durable_after_one_flush() {
    for separate_flushes in [false, true] {
        let disk = MemoryDisk::default();
        disk.0.lock().unwrap().separate_flushes = separate_flushes;
        let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        let chunk = ChunkId::new(InodeId(1), 0);
        let mut counts = Vec::new();
        for version in 1..=8 {
            let update = StoreUpdate {
                chunk,
                version: ChunkVersion(version),
                chain_version: ChainVersion(1),
                tags: TagWindow::default(),
                change: ContentChange::Replace,
            };
            let bytes = vec![version as u8; 20_000];
            counts.push(flushes(&disk, || drop(store.apply(&update, &bytes).unwrap())));
            store.commit(chunk, update.version, update.chain_version).unwrap();
        }
        // Blocks of the first versions are used for the first time.
        let expected = if separate_flushes { 2 } else { 1 };
        assert_eq!((counts[0], counts[6], counts[7]), (2, expected, expected), "{counts:?}");
    }
}

#[test]
fn the_data_of_new_blocks_is_on_the_device_before_the_flush() {
    for separate_flushes in [false, true] {
        let disk = MemoryDisk::default();
        disk.0.lock().unwrap().separate_flushes = separate_flushes;
        let store = FileChunkStore::open_on(disk.clone(), config()).unwrap();
        let update = StoreUpdate {
            chunk: ChunkId::new(InodeId(1), 0),
            version: ChunkVersion(1),
            chain_version: ChainVersion(1),
            tags: TagWindow::default(),
            change: ContentChange::Replace,
        };
        store.apply(&update, &[7; 20_000]).unwrap();
        let operations = disk.0.lock().unwrap().operations.clone();
        let written = operations.iter().rposition(|operation| {
            let cached = matches!(operation, Operation::Write { file: 0, .. });
            let on_device = matches!(operation, Operation::WriteToDevice { file: 0, .. });
            if separate_flushes { cached } else { on_device }
        });
        let flushed = operations.iter().rposition(|it| matches!(it, Operation::Sync(0)));
        assert!(written.is_some() && written < flushed, "{operations:?}");
    }
}
