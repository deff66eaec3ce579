//! After a loss of power the store opens in every possible state of the disk, and its content is that of some
//! point between the last acknowledged update and the last call.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{Luck, MemoryDisk, after_kill, after_power_loss};
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ChunkMetas, ChunkState, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

/// Small steps, so that the files grow and the log is compacted within one run.
fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(1 << 20, 0),
        grow_bytes: 32 << 10,
        log_bytes: 24 << 10,
        ..StoreConfig::default()
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
        let chunk = ChunkId::new(InodeId(1), self.rng.random_range(0..3));
        let meta = self.store.meta(chunk);
        let pending = meta.as_ref().and_then(|meta| meta.pending.clone());
        match (self.rng.random_range(0..12), pending) {
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
                        (ContentChange::Write { offset }, self.rng.random_range(1..6_000))
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
    let mut compacted = false;
    let mut states = 0;
    for seed in 0..6 {
        let mut run = Run::new(seed);
        for _ in 0..45 {
            run.step();
        }
        let operations = run.disk.0.lock().unwrap().operations.len();
        compacted |= run.disk.0.lock().unwrap().operations.iter().any(
            |operation| matches!(operation, support::Operation::Rename(_, to) if to.starts_with("log-")),
        );
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
    println!("{states} states");
}
