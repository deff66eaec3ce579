//! The store verifies payloads: a damaged one changes nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::sync::{Arc, mpsc};

use proptest::prelude::*;
use support::MemoryDisk;
use threefs_chunkstore::{ChunkStore, DiskBudget, FileChunkStore, Reservation, StoreConfig};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMetas, ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};
use threefs_core::message::class;

const CHUNK: ChunkId = ChunkId::new(InodeId(1), 0);

type Store = FileChunkStore<MemoryDisk>;

fn open(budget: &Arc<DiskBudget>) -> Store {
    let config = StoreConfig { budget: Arc::clone(budget), ..StoreConfig::default() };
    FileChunkStore::open_on(MemoryDisk::default(), config).unwrap()
}

fn update(version: u64, change: ContentChange) -> StoreUpdate {
    StoreUpdate {
        chunk: CHUNK,
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change,
    }
}

fn reserve(store: &Store, update: &StoreUpdate, payload: &[u8]) -> Reservation {
    let (ready, reservation) = mpsc::channel();
    let ready = Box::new(move |reservation| ready.send(reservation).unwrap());
    assert!(store.reserve(update, payload.len(), class::UPDATE, ready).is_none());
    reservation.recv().unwrap().unwrap()
}

fn bytes(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 251 + seed) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whole blocks, parts of blocks, zeros, and data that is small enough for the log.
    #[test]
    fn a_damaged_payload_changes_nothing_and_the_intact_one_is_stored(
        old in 0_usize..40_000,
        offset in prop_oneof![Just(0_usize), Just(4_096), 0_usize..30_000],
        length in prop_oneof![Just(4_096_usize), Just(16_384), 1_usize..40_000],
        zeros in any::<bool>(),
        damaged_at in any::<prop::sample::Index>(),
        bit in 0_u32..8,
    ) {
        let budget = DiskBudget::new(1 << 20, 0);
        let store = open(&budget);
        let content = bytes(old, 1);
        let first = update(1, ContentChange::Replace);
        store.apply(&first, &content).unwrap();
        store.commit(CHUNK, first.version, first.chain_version).unwrap();
        let (before, space) = (store.meta(CHUNK), store.space());

        let payload = if zeros { vec![0; length] } else { bytes(length, 7) };
        let mut damaged = payload.clone();
        damaged[damaged_at.index(length)] ^= 1 << bit;
        let update = update(2, ContentChange::Write { offset: offset as u32 });
        let expected = Checksum::of(&payload);
        let reservation = reserve(&store, &update, &damaged);
        let mut accepted = 0;
        let error = store
            .apply_in(&update, &damaged, expected, reservation, &mut || accepted += 1)
            .unwrap_err();
        prop_assert_eq!(accepted, 0);
        let computed = Checksum::of(&damaged);
        prop_assert_eq!(error, StoreError::PayloadDamaged { chunk: CHUNK, expected, computed });
        prop_assert_eq!((store.meta(CHUNK), store.space()), (before, space));
        prop_assert_eq!(&store.read(CHUNK, Which::Newest, 0, u32::MAX).unwrap().bytes, &content);

        let reservation = reserve(&store, &update, &payload);
        let state = store
            .apply_in(&update, &payload, expected, reservation, &mut || accepted += 1)
            .unwrap();
        prop_assert_eq!(accepted, 1);
        let mut after = content;
        after.resize(after.len().max(offset + length), 0);
        after[offset..offset + length].copy_from_slice(&payload);
        prop_assert_eq!(state.checksum, Checksum::of(&after));
        prop_assert_eq!(store.read(CHUNK, Which::Newest, 0, u32::MAX).unwrap().bytes, after);
    }
}

#[test]
fn a_damaged_payload_releases_its_reservation() {
    const BYTES: usize = 64 << 10;
    let budget = DiskBudget::new(16 * BYTES as u64, 0);
    let store = open(&budget);
    let payload = bytes(BYTES, 3);
    for _ in 0..64 {
        let update = update(1, ContentChange::Replace);
        let reservation = reserve(&store, &update, &payload);
        let error =
            store.apply_in(&update, &payload, Checksum(1), reservation, &mut || ()).unwrap_err();
        assert!(matches!(error, StoreError::PayloadDamaged { .. }), "{error}");
    }
    store.apply(&update(1, ContentChange::Replace), &payload).unwrap();
}

/// No data is written for them, but a checksum that does not belong to the payload is an error.
#[test]
fn the_payload_of_a_truncation_and_of_a_removal_is_verified_as_well() {
    let store = open(&DiskBudget::new(1 << 20, 0));
    store.apply(&update(1, ContentChange::Replace), &bytes(9_000, 1)).unwrap();
    store.commit(CHUNK, ChunkVersion(1), ChainVersion(1)).unwrap();
    for change in [ContentChange::Truncate { length: 5_000 }, ContentChange::Remove] {
        let update = update(2, change);
        let error = store
            .apply_in(&update, b"x", Checksum(0), Reservation::default(), &mut || ())
            .unwrap_err();
        assert!(matches!(error, StoreError::PayloadDamaged { .. }), "{change:?}: {error}");
        assert_eq!(store.meta(CHUNK).unwrap().pending, None);
        store.apply_in(&update, b"", Checksum(0), Reservation::default(), &mut || ()).unwrap();
        store.apply(&self::update(2, ContentChange::Replace), &bytes(9_000, 1)).unwrap();
        store.commit(CHUNK, ChunkVersion(2), ChainVersion(1)).unwrap();
        store.forget(CHUNK).unwrap();
        store.apply(&self::update(1, ContentChange::Replace), &bytes(9_000, 1)).unwrap();
        store.commit(CHUNK, ChunkVersion(1), ChainVersion(1)).unwrap();
    }
}
