//! Compares any sequence of operations, including reopening, with a plain map.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, StoreConfig};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, Epoch, InodeId};

const CHUNKS: u32 = 7;

#[derive(Clone, Debug)]
enum Step {
    Write { chunk: u32, offset: u32, length: u32, fill: u8 },
    Truncate { chunk: u32, length: u32 },
    Replace { chunk: u32, length: u32, fill: u8 },
    Remove { chunk: u32 },
    Commit { chunk: u32 },
    Forget { chunk: u32 },
    Drop { chunk: u32 },
    Read { chunk: u32, offset: u32, length: u32, newest: bool },
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let chunk = 0..CHUNKS;
    let size = prop_oneof![0..300_u32, 4000..4200_u32, 0..40_000_u32];
    prop_oneof![
        6 => (chunk.clone(), size.clone(), 1..20_000_u32, any::<u8>())
            .prop_map(|(chunk, offset, length, fill)| Step::Write { chunk, offset, length, fill }),
        2 => (chunk.clone(), size.clone())
            .prop_map(|(chunk, length)| Step::Truncate { chunk, length }),
        2 => (chunk.clone(), size.clone(), any::<u8>())
            .prop_map(|(chunk, length, fill)| Step::Replace { chunk, length, fill }),
        1 => chunk.clone().prop_map(|chunk| Step::Remove { chunk }),
        8 => chunk.clone().prop_map(|chunk| Step::Commit { chunk }),
        1 => chunk.clone().prop_map(|chunk| Step::Forget { chunk }),
        1 => chunk.clone().prop_map(|chunk| Step::Drop { chunk }),
        6 => (chunk, size.clone(), size, any::<bool>()).prop_map(
            |(chunk, offset, length, newest)| Step::Read { chunk, offset, length, newest }
        ),
        1 => Just(Step::Reopen),
    ]
}

#[derive(Clone, Debug, Default, PartialEq)]
struct State {
    version: u64,
    removed: bool,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
struct Model {
    committed: State,
    pending: Option<State>,
}

/// Four chunks, three of them with a version of a later epoch.
fn id(chunk: u32) -> ChunkId {
    let (index, count) = (chunk % 4, chunk / 4);
    let chunk = ChunkId::new(InodeId(u64::from(index) / 2), index);
    chunk.in_epoch(Epoch::new(5 * count, count))
}

/// Every second payload has zeros in its middle.
fn payload(length: u32, fill: u8) -> Vec<u8> {
    let zeros = |i: u32| fill.is_multiple_of(2) && (length / 8..length - length / 8).contains(&i);
    (0..length).map(|i| if zeros(i) { 0 } else { fill.wrapping_add((i / 7) as u8) }).collect()
}

struct World {
    store: Option<FileChunkStore>,
    folder: tempfile::TempDir,
    model: BTreeMap<ChunkId, Model>,
}

fn config() -> StoreConfig {
    StoreConfig {
        budget: DiskBudget::new(8 << 20, 0),
        grow_bytes: 64 << 10,
        log_bytes: 96 << 10,
        ..StoreConfig::default()
    }
}

impl World {
    fn store(&self) -> &FileChunkStore {
        self.store.as_ref().unwrap()
    }

    fn update(&mut self, chunk: ChunkId, change: ContentChange, payload: &[u8]) {
        let entry = self.model.entry(chunk).or_default();
        let mut next = entry.committed.clone();
        next.version += 1;
        next.removed = change == ContentChange::Remove;
        match change {
            ContentChange::Write { offset } => {
                let (offset, end) = (offset as usize, offset as usize + payload.len());
                next.bytes.resize(next.bytes.len().max(end), 0);
                next.bytes[offset..end].copy_from_slice(payload);
            }
            ContentChange::Truncate { length } => next.bytes.resize(length as usize, 0),
            ContentChange::Replace => next.bytes = payload.to_vec(),
            ContentChange::Remove => next.bytes.clear(),
        }
        let update = StoreUpdate {
            chunk,
            version: ChunkVersion(next.version),
            chain_version: ChainVersion(3),
            tags: TagWindow::default(),
            change,
        };
        let state = self.store.as_ref().unwrap().apply(&update, payload).unwrap();
        assert_eq!(state.checksum, Checksum::of(&next.bytes), "{chunk} {change:?}");
        assert_eq!(state.length as usize, next.bytes.len());
        entry.pending = Some(next);
    }

    fn commit(&mut self, chunk: ChunkId) {
        let Some(entry) = self.model.get_mut(&chunk) else { return };
        let Some(pending) = entry.pending.take() else { return };
        let version = ChunkVersion(pending.version);
        self.store.as_ref().unwrap().commit(chunk, version, ChainVersion(4)).unwrap();
        entry.committed = pending;
    }

    fn check_read(&self, chunk: ChunkId, offset: u32, length: u32, newest: bool) {
        let which = if newest { Which::Newest } else { Which::Committed };
        let result = self.store().read(chunk, which, offset, length);
        let state = self.model.get(&chunk).map(|entry| match &entry.pending {
            Some(pending) if newest => pending,
            _ => &entry.committed,
        });
        match state.filter(|state| state.version > 0 && !state.removed) {
            None => assert_eq!(result, Err(StoreError::NotFound { chunk })),
            Some(state) => {
                let from = (offset as usize).min(state.bytes.len());
                let to = (from + length as usize).min(state.bytes.len());
                let read = result.unwrap();
                assert_eq!(read.bytes, state.bytes[from..to], "{chunk}");
                assert_eq!(read.checksum, Checksum::of(&read.bytes), "{chunk}");
                // Its checksum is derived from those of the blocks, also with a block that is cut.
                for offset in [0, offset & !4_095] {
                    for length in [4_096, 8_192, u32::MAX] {
                        let read = self.store().read(chunk, which, offset, length).unwrap();
                        assert_eq!(read.checksum, Checksum::of(&read.bytes), "{chunk}");
                    }
                }
            }
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Write { chunk, offset, length, fill } => {
                let bytes = payload(length, fill);
                self.update(id(chunk), ContentChange::Write { offset }, &bytes);
            }
            Step::Truncate { chunk, length } => {
                self.update(id(chunk), ContentChange::Truncate { length }, &[]);
            }
            Step::Replace { chunk, length, fill } => {
                self.update(id(chunk), ContentChange::Replace, &payload(length, fill));
            }
            Step::Remove { chunk } => self.update(id(chunk), ContentChange::Remove, &[]),
            Step::Commit { chunk } => self.commit(id(chunk)),
            Step::Forget { chunk } => {
                self.store().forget(id(chunk)).unwrap();
                self.model.remove(&id(chunk));
            }
            Step::Drop { chunk } => {
                self.store().purge(id(chunk), ChunkVersion(0)).unwrap();
                self.model.remove(&id(chunk));
            }
            Step::Read { chunk, offset, length, newest } => {
                self.check_read(id(chunk), offset, length, newest);
            }
            Step::Reopen => {
                self.store().flush().unwrap();
                self.store = None;
                self.store = Some(FileChunkStore::open(self.folder.path(), config()).unwrap());
            }
        }
    }

    fn check_last_existing(&self, inode: InodeId) {
        let mut newest: BTreeMap<ChunkId, &State> = BTreeMap::new();
        for (chunk, entry) in self.model.iter().filter(|(_, entry)| entry.committed.version > 0) {
            newest.insert(chunk.first_version(), &entry.committed);
        }
        let of_inode = newest.iter().filter(|(chunk, _)| chunk.inode == inode);
        let last =
            of_inode.filter(|(_, state)| !state.removed).map(|(chunk, _)| *chunk).next_back();
        let stored = self.store().last_existing(inode).map(|meta| meta.chunk.first_version());
        assert_eq!(stored, last);
    }

    fn check_all(&self) {
        let metas = self.store().metas(None, ChunkId::MAX, 100);
        let ids: Vec<ChunkId> = metas.iter().map(|meta| meta.chunk).collect();
        assert_eq!(ids, self.model.keys().copied().collect::<Vec<_>>());
        let mut used = 0;
        for (meta, (chunk, entry)) in metas.iter().zip(&self.model) {
            assert_eq!(meta.committed.version.0, entry.committed.version);
            assert_eq!(meta.committed.checksum, Checksum::of(&entry.committed.bytes));
            assert_eq!(meta.pending.is_some(), entry.pending.is_some());
            self.check_read(*chunk, 0, u32::MAX, true);
            self.check_read(*chunk, 0, u32::MAX, false);
            used += entry.committed.bytes.len().div_ceil(4096);
            used += entry.pending.as_ref().map_or(0, |p| p.bytes.len().div_ceil(4096));
        }
        // No block leaks: the number of blocks in use is at most that of the model, because blocks
        // can be shared.
        self.store().flush().unwrap();
        assert!(self.store().space().used_bytes <= used as u64 * 4096);
        for (chunk, last) in (0..CHUNKS).map(|it| (id(it), id(it).last_version())) {
            for up_to in [chunk, last] {
                let versions = self.model.range(chunk.first_version()..=up_to);
                let newest = self.store().version_up_to(up_to).map(|meta| meta.chunk);
                assert_eq!(newest, versions.map(|(version, _)| *version).next_back());
            }
            self.check_last_existing(chunk.inode);
        }
        let pending: Vec<ChunkId> = self
            .model
            .iter()
            .filter(|(_, entry)| entry.pending.is_some())
            .map(|(chunk, _)| *chunk)
            .collect();
        assert_eq!(self.store().pending(None, 100), pending);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn the_store_behaves_like_a_map(steps in prop::collection::vec(step(), 1..60)) {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let store = Some(FileChunkStore::open(folder.path(), config()).unwrap());
        let mut world = World { store, folder, model: BTreeMap::new() };
        for step in steps {
            world.run(step);
        }
        world.check_all();
        world.run(Step::Reopen);
        world.check_all();
    }
}
