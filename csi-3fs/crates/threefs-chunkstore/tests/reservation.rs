//! Reservations on a nearly full disk: updates wait for the space of others in flight, and finish.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use support::{Luck, MemoryDisk, Operation, after_power_loss};
use threefs_chunkstore::disk::{Disk, DiskFile};
use threefs_chunkstore::{
    ChunkStore, DiskBudget, FileChunkStore, Reservation, ReserveWait, StoreConfig,
};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ContentChange, StoreUpdate, TagWindow, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};
use threefs_core::message::class;

type Store = FileChunkStore<MemoryDisk>;

const CAPACITY: u64 = 8 << 20;
const CHUNK: usize = 16 << 10;
/// 95 % of the capacity, in chunks.
const CHUNKS: u32 = (CAPACITY as usize * 95 / 100 / CHUNK) as u32;
/// Timeout of the waits of a test.
const LONG: Duration = Duration::from_secs(60);

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(1), index)
}

fn update(index: u32, version: u64, change: ContentChange) -> StoreUpdate {
    StoreUpdate {
        chunk: chunk(index),
        version: ChunkVersion(version),
        chain_version: ChainVersion(1),
        tags: TagWindow::default(),
        change,
    }
}

fn content(index: u32, version: u64) -> Vec<u8> {
    let mut bytes = vec![version as u8; CHUNK];
    bytes[..4].copy_from_slice(&index.to_le_bytes());
    bytes
}

fn budget() -> Arc<DiskBudget> {
    DiskBudget::new(CAPACITY, 0)
}

fn config(budget: &Arc<DiskBudget>) -> StoreConfig {
    StoreConfig {
        budget: Arc::clone(budget),
        grow_bytes: 2 << 20,
        log_bytes: 256 << 10,
        ..StoreConfig::default()
    }
}

fn stores(budget: &Arc<DiskBudget>) -> Vec<Arc<Store>> {
    let open = || Store::open_on(MemoryDisk::default(), config(budget)).unwrap().shared();
    (0..3).map(|_| open()).collect()
}

type Answer = mpsc::Receiver<Result<Reservation, StoreError>>;

fn reserve(store: &Store, index: u32, class: u8) -> Answer {
    let (ready, room) = mpsc::channel();
    let update = update(index, 2, ContentChange::Replace);
    // If the test no longer waits, the reservation is released.
    store.reserve(&update, CHUNK, class, Box::new(move |room| drop(ready.send(room))));
    room
}

fn make(store: &Store, index: u32, version: u64, class: u8) -> Result<(), StoreError> {
    let room = reserve(store, index, class).recv_timeout(LONG).unwrap()?;
    let update = update(index, version, ContentChange::Replace);
    let payload = content(index, version);
    store.apply_in(&update, &payload, Checksum::of(&payload), room, &mut || ())?;
    Ok(())
}

fn commit(store: &Store, index: u32, version: u64) {
    store.commit(chunk(index), ChunkVersion(version), ChainVersion(1)).unwrap();
}

fn put(store: &Store, index: u32, version: u64) -> Result<(), StoreError> {
    make(store, index, version, class::UPDATE)?;
    commit(store, index, version);
    Ok(())
}

fn remove(store: &Store, index: u32, version: u64) {
    store.apply(&update(index, version, ContentChange::Remove), &[]).unwrap();
    commit(store, index, version);
}

fn read<D: Disk>(store: &FileChunkStore<D>, index: u32) -> Vec<u8> {
    store.read(chunk(index), Which::Committed, 0, u32::MAX).unwrap().bytes
}

/// Distributes the chunks over the stores of the disk.
fn fill(stores: &[Arc<Store>]) {
    for index in 0..CHUNKS {
        put(&stores[index as usize % stores.len()], index, 1).unwrap();
    }
}

/// Returns when the other threads have stopped making progress: they wait for space, or in this
/// function.
fn until_quiet(progress: &AtomicU32) {
    let mut before = None;
    while before.replace(progress.load(SeqCst)) != Some(progress.load(SeqCst)) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn overwrites_on_three_stores_of_one_nearly_full_disk_all_succeed() {
    const WRITERS: u32 = 48;
    const ROUNDS: u32 = 6;
    let stores = stores(&budget());
    fill(&stores);
    let progress = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (stores, progress) = (&stores, &progress);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // All updates on one store, then all on the next: each store needs all the
                    // space.
                    let index = writer * 3 + round * 3 / ROUNDS;
                    let store = &stores[index as usize % 3];
                    let version = u64::from(round % (ROUNDS / 3)) + 2;
                    make(store, index, version, class::UPDATE).unwrap();
                    progress.fetch_add(1, SeqCst);
                    // As many copies as there is space for are in flight now.
                    until_quiet(progress);
                    commit(store, index, version);
                }
            });
        }
    });
    for index in 0..WRITERS * 3 {
        assert_eq!(read(&*stores[index as usize % 3], index), content(index, 3), "{index}");
    }
}

/// Each node's copies in flight wait for the next node's; three nodes in a cycle.
#[test]
fn chains_over_three_nearly_full_nodes_do_not_deadlock() {
    const WRITERS: u32 = 96;
    let nodes: Vec<_> = (0..3).map(|_| stores(&budget())).collect();
    for node in &nodes {
        fill(node);
    }
    let progress = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (nodes, progress) = (&nodes, &progress);
            scope.spawn(move || {
                let chain = writer as usize % 3;
                let replicas: Vec<&Store> =
                    (0..3).map(|hop| &*nodes[(chain + hop) % 3][chain]).collect();
                for version in 2..4 {
                    for (hop, replica) in (0..).zip(&replicas) {
                        make(replica, writer, version, hop).unwrap();
                        progress.fetch_add(1, SeqCst);
                        // Each hop takes all the space that it may.
                        until_quiet(progress);
                    }
                    for replica in replicas.iter().rev() {
                        commit(replica, writer, version);
                    }
                }
            });
        }
    });
    for writer in 0..WRITERS {
        let chain = writer as usize % 3;
        for node in &nodes {
            assert_eq!(read(&*node[chain], writer), content(writer, 3), "{writer}");
        }
    }
}

#[test]
fn updates_leave_space_for_forwards_and_wait_for_commits() {
    let stores = stores(&budget());
    fill(&stores);
    let mut pending = Vec::new();
    let mut index = 0;
    let waiting = loop {
        let answer = reserve(&stores[0], index, class::UPDATE);
        let Ok(room) = answer.try_recv() else { break answer };
        let update = update(index, 2, ContentChange::Replace);
        let payload = content(index, 2);
        stores[0]
            .apply_in(&update, &payload, Checksum::of(&payload), room.unwrap(), &mut || ())
            .unwrap();
        pending.push(index);
        index += 3;
    };
    assert!(pending.len() > 4, "{}", pending.len());
    let mut rooms = Vec::new();
    for hop in 1..=class::REPLACE {
        let before = rooms.len();
        while let Ok(room) = reserve(&stores[1], 1, hop).try_recv() {
            rooms.push(room.unwrap());
        }
        assert!(rooms.len() > before, "hop {hop} got no separate space");
    }
    assert!(waiting.try_recv().is_err(), "nothing was committed");
    // Removals need no space.
    remove(&stores[2], 2, 2);
    drop(rooms);
    assert!(waiting.try_recv().is_err(), "the updates hold the space");
    for index in pending {
        commit(&stores[0], index, 2);
    }
    drop(waiting.try_recv().unwrap().unwrap());
}

#[test]
fn growth_is_rejected_immediately_and_leaves_space_for_overwrites() {
    let stores = stores(&budget());
    let mut written = 0;
    let error = loop {
        let store = &stores[written as usize % 3];
        let room = reserve(store, written, class::UPDATE).try_recv().unwrap();
        if let Err(error) = room.map(drop) {
            break error;
        }
        put(store, written, 1).unwrap();
        written += 1;
    };
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert!(written > CHUNKS, "{written}");
    for version in 2..6 {
        for index in 0..written {
            put(&stores[index as usize % 3], index, version).unwrap();
        }
    }
    // An update in flight does not make growth wait: it frees as much as it takes.
    make(&stores[0], 0, 6, class::UPDATE).unwrap();
    let answer = reserve(&stores[0], written, class::UPDATE).try_recv().unwrap();
    assert!(matches!(answer, Err(StoreError::NoSpace { .. })), "{answer:?}");
}

#[test]
fn a_wait_ends_at_its_deadline() {
    let stores = stores(&budget());
    fill(&stores);
    let mut rooms = Vec::new();
    loop {
        let (ready, room) = mpsc::channel();
        let update = update(0, 2, ContentChange::Replace);
        let ready = Box::new(move |room| ready.send(room).unwrap());
        match stores[0].reserve(&update, CHUNK, class::UPDATE, ready) {
            None => rooms.push(room.try_recv().unwrap().unwrap()),
            Some(wait) => {
                stores[0].expire(wait);
                let answer = room.try_recv().unwrap();
                assert!(matches!(answer, Err(StoreError::NoSpace { .. })), "{answer:?}");
                stores[0].expire(wait);
                break;
            }
        }
    }
    rooms.clear();
    put(&stores[0], 0, 2).unwrap();
}

/// On a nearly full disk, an update of eight chunks waits for two in flight, and a small update of
/// another store waits behind it.
fn large_before_small() -> (Vec<Arc<Store>>, (ReserveWait, Answer), Answer) {
    let stores = stores(&budget());
    fill(&stores);
    let large = update(0, 2, ContentChange::Replace);
    stores[0].apply(&large, &[1; 8 * CHUNK]).unwrap();
    commit(&stores[0], 0, 2);
    for index in [1, 4] {
        make(&stores[1], index, 2, class::UPDATE).unwrap();
    }
    let ask = |store: &Store, index, change, bytes| {
        let (ready, room) = mpsc::channel();
        let update = update(index, 3, change);
        let ready = Box::new(move |room| drop(ready.send(room)));
        (store.reserve(&update, bytes, class::UPDATE, ready), room)
    };
    let (wait, first) = ask(&stores[0], 0, ContentChange::Replace, 8 * CHUNK);
    let (_, second) = ask(&stores[1], 7, ContentChange::Write { offset: 0 }, 1);
    assert!(first.try_recv().is_err() && second.try_recv().is_err());
    (stores, (wait.unwrap(), first), second)
}

#[test]
fn a_request_behind_an_expired_one_is_granted_immediately() {
    let (stores, (wait, first), second) = large_before_small();
    stores[0].expire(wait);
    assert!(matches!(first.try_recv().unwrap(), Err(StoreError::NoSpace { .. })));
    drop(second.try_recv().unwrap().unwrap());
}

/// Callbacks whose target no longer exists release their reservation immediately, from within the
/// call that granted it.
#[test]
fn thousands_of_waits_end_without_recursion() {
    const WAITS: usize = 4_096;
    let (stores, (wait, _), _second) = large_before_small();
    let finished = Arc::new(AtomicU32::new(0));
    for _ in 0..WAITS {
        let finished = Arc::clone(&finished);
        let ready = move |room: Result<Reservation, StoreError>| {
            drop(room.unwrap());
            finished.fetch_add(1, SeqCst);
        };
        let update = update(10, 2, ContentChange::Replace);
        assert!(stores[1].reserve(&update, CHUNK, class::UPDATE, Box::new(ready)).is_some());
    }
    stores[0].expire(wait);
    assert_eq!(finished.load(SeqCst) as usize, WAITS);
}

#[test]
fn waits_of_a_closed_store_end() {
    let (mut stores, (_, first), second) = large_before_small();
    drop(stores.remove(0));
    assert!(matches!(first.try_recv().unwrap(), Err(StoreError::NoSpace { .. })));
    drop(second.try_recv().unwrap().unwrap());
}

#[test]
fn a_store_that_cannot_be_opened_uses_no_budget() {
    let budget = DiskBudget::new(0, 0);
    let disk = MemoryDisk::default();
    let open = || Store::open_on(disk.clone(), config(&budget));
    put(&open().unwrap(), 0, 1).unwrap();
    assert_eq!(budget.capacity(0), 0, "no store is open");
    // The first of several frames.
    disk.open("log-00000001").unwrap().write_at(&[1; 512], 0).unwrap();
    assert!(matches!(open(), Err(StoreError::Damaged { .. })));
    assert_eq!(budget.capacity(0), 0);
}

/// A small update is acknowledged when it is in the log: the data file may not have its length yet.
#[test]
fn a_data_file_extended_at_opening_counts_for_the_budget() {
    let disk = MemoryDisk::default();
    let store = Store::open_on(disk.clone(), config(&DiskBudget::new(0, 0))).unwrap();
    store.apply(&update(0, 1, ContentChange::Replace), &[1; 8_000]).unwrap();
    let operations = disk.0.lock().unwrap().operations.clone();
    let disk = after_power_loss(&operations, operations.len(), Luck::Nothing);
    let budget = DiskBudget::new(0, 0);
    let store = Store::open_on(disk, config(&budget)).unwrap();
    assert_eq!(budget.capacity(0), 2 * 4_096);
    drop(store);
    assert_eq!(budget.capacity(0), 0);
}

/// Space freed anywhere in the file of one store can be used by another one, also after both were
/// reopened.
#[test]
fn free_blocks_of_one_store_are_available_to_another() {
    let budget = budget();
    let disks = [MemoryDisk::default(), MemoryDisk::default()];
    let open = |disk: &MemoryDisk| Store::open_on(disk.clone(), config(&budget)).unwrap().shared();
    let (giver, taker) = (open(&disks[0]), open(&disks[1]));
    let count = CHUNKS - 2;
    for index in 0..count {
        put(&giver, index, 1).unwrap();
    }
    // Every second chunk, so that the free blocks are scattered over the file.
    let mut count_of_taker = 0;
    for index in (0..count).step_by(2).chain((1..count / 2).step_by(2)) {
        remove(&giver, index, 2);
        put(&taker, 10_000 + count_of_taker, 1).unwrap();
        count_of_taker += 1;
    }
    drop((giver, taker));
    let (giver, taker) = (open(&disks[0]), open(&disks[1]));
    for index in 0..count_of_taker {
        assert_eq!(read(&*taker, 10_000 + index), content(10_000 + index, 1));
    }
    let room = disks.map(|disk| disk.0.lock().unwrap().used() as u64).iter().sum::<u64>();
    let logs = 2 * 2 * (256 << 10) * 2;
    assert!(room < CAPACITY + logs, "{room} bytes of the disks");
    put(&giver, count - 1, 2).unwrap();
    put(&taker, 10_000, 2).unwrap();
}

#[test]
fn a_loss_of_power_while_blocks_are_reclaimed_loses_no_chunk() {
    let config = |budget: &Arc<DiskBudget>| StoreConfig {
        log_bytes: 64 << 10,
        grow_bytes: 256 << 10,
        ..config(budget)
    };
    let budget = DiskBudget::new(1 << 20, 0);
    let disk = MemoryDisk::default();
    let open = |disk: MemoryDisk| Store::open_on(disk, config(&budget)).unwrap().shared();
    let (giver, taker) = (open(disk.clone()), open(MemoryDisk::default()));
    const CHUNKS: u32 = 56;
    for index in 0..CHUNKS {
        put(&giver, index, 1).unwrap();
    }
    giver.flush().unwrap();
    let start = disk.0.lock().unwrap().operations.len();
    for index in (0..CHUNKS).step_by(2) {
        remove(&giver, index, 2);
        put(&taker, 1_000 + index, 1).unwrap();
    }
    for index in (1..CHUNKS / 2).step_by(2) {
        put(&giver, index, 2).unwrap();
        remove(&taker, 1_001 + index, 2);
        put(&giver, 2_000 + index, 1).unwrap();
    }
    let operations = disk.0.lock().unwrap().operations.clone();
    let count = |is: fn(&Operation) -> bool| operations.iter().filter(|it| is(it)).count();
    assert!(count(|it| matches!(it, Operation::Punch { .. })) > 4);
    assert!(count(|it| matches!(it, Operation::Fill { .. })) > 2);
    for at in start..=operations.len() {
        for luck in [Luck::Nothing, Luck::Everything] {
            let disk = after_power_loss(&operations, at, luck);
            let budget = DiskBudget::new(1 << 20, 0);
            let store = Store::open_on(disk, config(&budget)).unwrap();
            for index in (1..CHUNKS).step_by(2) {
                let bytes = read(&store, index);
                let old = index > CHUNKS / 2 || bytes[4] == 1;
                assert_eq!(bytes, content(index, if old { 1 } else { 2 }), "{index} at {at}");
            }
        }
    }
}
