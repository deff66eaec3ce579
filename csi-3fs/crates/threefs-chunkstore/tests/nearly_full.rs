//! On a disk that rejects growth, overwrites of existing chunks never fail.
//!
//! `THREEFS_FULL_SEED` runs one seed, `THREEFS_FULL_ROUNDS` sets the number of seeds.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::MemoryDisk;
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

type Store = FileChunkStore<MemoryDisk>;

const CAPACITY: u64 = 5_600_000;
const THREADS: u64 = 4;
/// Overwrites per thread and round.
const OVERWRITES: u32 = 150;

/// A chunk as expected by its only writer.
struct Expected {
    store: usize,
    id: ChunkId,
    version: u64,
    content: Vec<u8>,
}

struct Round {
    stores: Vec<Arc<Store>>,
    disks: Vec<MemoryDisk>,
    longest: usize,
}

impl Round {
    fn open(random: &mut ChaCha8Rng) -> Self {
        let budget = DiskBudget::new(CAPACITY, 0);
        let disks: Vec<MemoryDisk> =
            (0..random.random_range(1..=3)).map(|_| MemoryDisk::default()).collect();
        let open = |disk: &MemoryDisk| Self::store(disk, &budget);
        let stores = disks.iter().map(open).collect();
        let longest = *[6_000, 20_000, 70_000, 200_000].get(random.random_range(0..4)).unwrap();
        Self { stores, disks, longest }
    }

    fn store(disk: &MemoryDisk, budget: &Arc<DiskBudget>) -> Arc<Store> {
        let config = StoreConfig {
            budget: Arc::clone(budget),
            grow_bytes: 1 << 20,
            log_bytes: 512 << 10,
            ..StoreConfig::default()
        };
        Store::open_on(disk.clone(), config).unwrap().shared()
    }

    /// Reopens the same disks.
    fn reopen(&mut self) {
        self.stores.clear();
        let budget = DiskBudget::new(CAPACITY, 0);
        self.stores = self.disks.iter().map(|disk| Self::store(disk, &budget)).collect();
    }

    fn update(
        &self,
        chunk: &mut Expected,
        change: ContentChange,
        bytes: &[u8],
    ) -> Option<StoreError> {
        let update = StoreUpdate {
            chunk: chunk.id,
            version: ChunkVersion(chunk.version + 1),
            chain_version: ChainVersion(1),
            tags: TagWindow::default(),
            change,
        };
        let store = &self.stores[chunk.store];
        if let Err(error) = store.apply(&update, bytes) {
            return Some(error);
        }
        store.commit(chunk.id, update.version, update.chain_version).unwrap();
        chunk.version += 1;
        None
    }

    /// Creates a chunk, if there is space for it.
    fn grow(
        &self,
        random: &mut ChaCha8Rng,
        inode: u64,
        index: u32,
        longest: usize,
    ) -> Result<Expected, StoreError> {
        let mut content = vec![0; random.random_range(1..=longest)];
        random.fill(&mut content[..]);
        let store = random.random_range(0..self.stores.len());
        let id = ChunkId::new(InodeId(inode), index);
        let mut chunk = Expected { store, id, version: 0, content: Vec::new() };
        match self.update(&mut chunk, ContentChange::Replace, &content) {
            None => Ok(Expected { content, ..chunk }),
            Some(error) => Err(error),
        }
    }

    /// Overwrites all or some bytes of a chunk, within its length.
    fn overwrite(&self, random: &mut ChaCha8Rng, chunk: &mut Expected) -> Option<StoreError> {
        let length = chunk.content.len();
        let (from, to) = match random.random_range(0..3) {
            0 => (0, length),
            1 => {
                let from = random.random_range(0..length);
                (from, random.random_range(from..length) + 1)
            }
            // A block or two of a long chunk: such writes fragment it.
            _ => {
                let from = random.random_range(0..length);
                (from, (from + random.random_range(1..5_000)).min(length))
            }
        };
        let mut bytes = vec![0; to - from];
        random.fill(&mut bytes[..]);
        let whole = (from, to) == (0, length) && random.random_bool(0.5);
        let change = match whole {
            true => ContentChange::Replace,
            false => ContentChange::Write { offset: from as u32 },
        };
        let error = self.update(chunk, change, &bytes);
        if error.is_none() {
            chunk.content[from..to].copy_from_slice(&bytes);
        }
        error
    }
}

/// Extends a chunk in small pieces, as far as there is space.
fn extend(round: &Round, random: &mut ChaCha8Rng, chunk: &mut Expected) {
    while chunk.content.len() + 9_000 < round.longest {
        let mut bytes = vec![0; random.random_range(1..9_000)];
        random.fill(&mut bytes[..]);
        let offset = chunk.content.len() as u32;
        if round.update(chunk, ContentChange::Write { offset }, &bytes).is_some() {
            return;
        }
        chunk.content.extend(bytes);
    }
}

fn write(
    round: &Round,
    seed: u64,
    inode: u64,
    full: &AtomicU32,
    failed: &AtomicBool,
) -> Vec<Expected> {
    let mut random = ChaCha8Rng::seed_from_u64(seed * 100 + inode);
    let mut chunks = Vec::new();
    let mut index = 0;
    // Until not even the smallest growth is possible.
    for refusals in 0..20 {
        while let Ok(mut chunk) = round.grow(&mut random, inode, index, round.longest) {
            if random.random_bool(0.3) {
                extend(round, &mut random, &mut chunk);
            }
            chunks.push(chunk);
            index += 1;
        }
        index += refusals + 1;
    }
    full.fetch_add(1, SeqCst);
    for round_number in 0..OVERWRITES {
        if failed.load(SeqCst) || chunks.is_empty() {
            break;
        }
        let at = random.random_range(0..chunks.len());
        if let Some(error) = round.overwrite(&mut random, &mut chunks[at]) {
            failed.store(true, SeqCst);
            let (length, of) = (chunks[at].content.len(), round.longest);
            panic!(
                "seed {seed}: overwrite {round_number} of a chunk of {length} of {of} bytes: {error}"
            );
        }
        // Other writers try to take the space that overwrites need.
        if random.random_bool(0.2)
            && let Ok(chunk) = round.grow(&mut random, inode, index, round.longest)
        {
            chunks.push(chunk);
        }
        index += 1;
    }
    chunks
}

fn run_round(seed: u64) {
    println!("THREEFS_FULL_SEED={seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut round = Round::open(&mut random);
    let (full, failed) = (AtomicU32::new(0), AtomicBool::new(false));
    let mut chunks: Vec<Expected> = std::thread::scope(|scope| {
        let (round, full, failed) = (&round, &full, &failed);
        let writer = |inode| scope.spawn(move || write(round, seed, inode, full, failed));
        let writers: Vec<_> = (1..=THREADS).map(writer).collect();
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    assert_eq!(u64::from(full.load(SeqCst)), THREADS);
    round.reopen();
    // After reopening, existing chunks can still be overwritten.
    let small = (0..).map_while(|index| round.grow(&mut random, THREADS + 1, index, 4_096).ok());
    chunks.extend(small.collect::<Vec<_>>());
    for chunk in &mut chunks {
        let store = &round.stores[chunk.store];
        let read = store.read(chunk.id, Which::Committed, 0, u32::MAX).unwrap();
        assert!(read.bytes == chunk.content, "seed {seed}: {:?}", chunk.id);
        let error = round.overwrite(&mut random, chunk);
        assert_eq!(error, None, "seed {seed}: after reopening");
    }
}

#[test]
fn no_overwrite_is_rejected_on_a_full_disk() {
    let number = |name: &str| std::env::var(name).ok().map(|it| it.parse::<u64>().unwrap());
    let rounds = number("THREEFS_FULL_ROUNDS").unwrap_or(12);
    match number("THREEFS_FULL_SEED") {
        Some(seed) => run_round(seed),
        None => (0..rounds).for_each(run_round),
    }
}
