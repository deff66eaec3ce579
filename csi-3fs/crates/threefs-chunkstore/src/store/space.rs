//! Blocks of the data file: taken, written, given back; and how the file grows.

use std::sync::{MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use threefs_core::chunk::{BLOCK_BYTES, StoreUpdate};
use threefs_core::error::StoreError;
use threefs_core::message::class;

use super::{FileChunkStore, RUNS_MAX, failed};
use crate::blocks::{Extent, blocks_in};
use crate::budget::Lender;
use crate::disk::{Disk, DiskFile};
use crate::index::Inner;
use crate::room::{Need, Room, RoomReady, RoomWait};
use crate::{ChunkStore, plan};

/// A store that needs room grows by at most this part of what the disk has left.
const STEP_PARTS: u64 = 16;
/// [`ChunkStore::apply`] waits so long for room.
const ROOM_WAIT: Duration = Duration::from_secs(8);
/// Attempts to take blocks; each but the last makes some free.
const TAKE_STEPS_MAX: usize = 64;

impl<D: Disk> FileChunkStore<D> {
    /// Asks for the room of an update's copy.
    pub(super) fn ask_room(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: RoomReady,
    ) -> Option<RoomWait> {
        let base = self.committed(update.chunk);
        let (written, freed) = plan::blocks_needed(update, &base, payload_bytes);
        let whole = plan::blocks_after(update, &base, payload_bytes);
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        let need =
            Need { class, bytes: bytes(written), returns: bytes(freed), whole: bytes(whole) };
        if need.bytes == 0 {
            ready(Ok(Room::default()));
            return None;
        }
        let free_bytes = self.disk.free_bytes().unwrap_or(0);
        self.config.budget.ask(self.name, need, free_bytes, ready)
    }

    /// Waits, boundedly, for the room of a client's update.
    pub(super) fn await_room(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
    ) -> Result<Room, StoreError> {
        let (ready, room) = mpsc::channel();
        // The receiver lives until the end of this call.
        let ready: RoomReady = Box::new(move |room| drop(ready.send(room)));
        let wait = self.ask_room(update, payload_bytes, class::UPDATE, ready);
        let room = room.recv_timeout(ROOM_WAIT).or_else(|_| {
            wait.into_iter().for_each(|wait| self.expire(wait));
            room.recv()
        });
        let needed_bytes = payload_bytes as u64;
        room.unwrap_or(Err(StoreError::NoSpace { needed_bytes }))
    }

    /// Takes `blocks` free blocks: of the file, of room that the file system has, of blocks that are
    /// about to be free, of room that other stores of the disk do not use.
    pub(super) fn take_blocks(
        &self,
        blocks: u32,
        room: &mut Room,
    ) -> Result<Vec<Extent>, StoreError> {
        let needed_bytes = u64::from(blocks) * BLOCK_BYTES as u64;
        // Others may take what one step has made free.
        let (mut steps, mut lent_nothing) = (0, false);
        while steps < TAKE_STEPS_MAX {
            let mut inner = self.lock();
            inner.check()?;
            // Fragments are worth putting together once they are a quarter of the file.
            let runs_max = if inner.free.free() * 4 > inner.data_blocks { RUNS_MAX / 4 } else { 1 };
            if let Some(runs) = self.take_free(&mut inner, blocks, runs_max, room) {
                return Ok(runs);
            }
            if inner.resizing {
                drop(self.resized.wait(inner).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            steps += 1;
            inner.resizing = true;
            let (before, missing) = (inner.data_blocks, u64::from(blocks));
            let holes = inner.holes.take_largest(missing);
            drop(inner);
            let filled = self.fill(holes);
            let more = if filled >= missing { None } else { self.grow(before, blocks) };
            let mut inner = self.end_resize();
            if let Some(more) = more {
                inner.free.release(before, more);
                inner.data_blocks = before + more;
            }
            let progress = filled > 0 || more.is_some();
            let runs_max = if progress { RUNS_MAX } else { usize::MAX };
            if let Some(runs) = self.take_free(&mut inner, blocks, runs_max, room) {
                return Ok(runs);
            }
            let leaving = !inner.leaving.is_empty();
            drop(inner);
            if progress {
                continue;
            }
            if leaving {
                self.flush()?;
            } else if self.config.budget.borrow_for(self.name, needed_bytes) > 0 {
                lent_nothing = false;
            } else if std::mem::replace(&mut lent_nothing, true) {
                // Not even once more: until then, blocks may have been on their way.
                break;
            }
        }
        Err(StoreError::NoSpace { needed_bytes })
    }

    fn take_free(
        &self,
        inner: &mut Inner<D::File>,
        blocks: u32,
        runs_max: usize,
        room: &mut Room,
    ) -> Option<Vec<Extent>> {
        let runs = inner.free.take(blocks, runs_max)?;
        inner.held_blocks += u64::from(blocks);
        self.config.budget.holds_copy(self.name, inner.holding(), room);
        Some(runs)
    }

    /// Takes room for holes, as far as there is any; for how many blocks.
    fn fill(&self, holes: Vec<Extent>) -> u64 {
        let block_bytes = BLOCK_BYTES as u64;
        let mut filled = 0;
        for hole in holes {
            let bytes = u64::from(hole.blocks) * block_bytes;
            let free_bytes = self.disk.free_bytes().unwrap_or(0);
            let room = self.config.budget.room(bytes, free_bytes) / block_bytes;
            let (offset, length) = (hole.start * block_bytes, room * block_bytes);
            let taken = if room > 0 && self.data.fill(offset, length).is_ok() { room } else { 0 };
            self.config.budget.take(taken * block_bytes);
            let mut inner = self.lock();
            inner.free.release(hole.start, taken);
            inner.holes.release(hole.start + taken, u64::from(hole.blocks) - taken);
            filled += taken;
        }
        filled
    }

    /// Gives the room of free runs back; they are holes from then on. How many bytes that is.
    fn punch(&self, runs: Vec<Extent>) -> u64 {
        let block_bytes = BLOCK_BYTES as u64;
        let mut given = 0;
        for run in runs {
            let (start, blocks) = (run.start, u64::from(run.blocks));
            let punched = self.data.punch(start * block_bytes, blocks * block_bytes);
            let mut inner = self.lock();
            if let Err(error) = punched {
                tracing::debug!(%error, "free blocks could not be given back");
                inner.free.release(start, blocks);
                continue;
            }
            inner.holes.release(start, blocks);
            drop(inner);
            self.config.budget.give(blocks * block_bytes);
            given += blocks * block_bytes;
        }
        given
    }

    /// A file with holes is opened: which of its free blocks are holes is not known, so all become
    /// holes.
    pub(super) fn find_holes(&self) {
        if self.data.has_holes().unwrap_or(false) {
            let free = self.lock().free.take_largest(u64::MAX);
            self.punch(free);
        }
    }

    fn end_resize(&self) -> MutexGuard<'_, Inner<D::File>> {
        let mut inner = self.lock();
        inner.resizing = false;
        self.resized.notify_all();
        inner
    }

    /// Makes the data file longer than `before`, for `blocks` at least; by how many blocks.
    fn grow(&self, before: u64, blocks: u32) -> Option<u64> {
        let block_bytes = BLOCK_BYTES as u64;
        let free_bytes = self.disk.free_bytes().unwrap_or(0);
        let room = self.config.budget.room(u64::MAX, free_bytes);
        // Small steps where little is left: the other stores of the disk need it as well.
        let step_bytes = self.config.grow_bytes.min(room / STEP_PARTS);
        let step = (step_bytes / block_bytes).max(u64::from(blocks));
        let room = (room / block_bytes).min(step);
        for more in [room, u64::from(blocks)] {
            let fits = more > 0 && more <= room;
            if fits && self.data.allocate((before + more) * block_bytes).is_ok() {
                self.config.budget.take(more * block_bytes);
                return Some(more);
            }
        }
        None
    }

    /// A long free end of the file goes back to the file system, where other stores find it. Free
    /// are only blocks that no durable record holds.
    pub(super) fn give_tail_back(&self) {
        let block_bytes = BLOCK_BYTES as u64;
        let keep = self.config.grow_bytes / block_bytes;
        let mut inner = self.lock();
        if inner.resizing {
            return;
        }
        let before = inner.data_blocks;
        let Some(blocks) = inner.free.cut_tail(before, keep) else { return };
        inner.resizing = true;
        drop(inner);
        let cut = self.data.cut(blocks * block_bytes);
        let mut inner = self.end_resize();
        match cut {
            Ok(()) => {
                inner.data_blocks = blocks;
                self.config.budget.give((before - blocks) * block_bytes);
            }
            Err(error) => {
                tracing::warn!(%error, "free blocks could not be given back");
                inner.free.release(blocks, before - blocks);
            }
        }
    }

    /// An update has failed: its blocks and its room are free.
    pub(super) fn release_blocks(&self, runs: &[Extent], mut room: Room) {
        let mut inner = self.lock();
        for run in runs {
            inner.free.release(run.start, u64::from(run.blocks));
        }
        inner.held_blocks -= blocks_in(runs);
        self.config.budget.holds_all(self.name, inner.holding(), &mut room);
        drop(inner);
        self.config.budget.settle();
    }

    /// Writes `bytes` where `runs` says, holes left out.
    pub(super) fn write_runs(&self, runs: &[Extent], bytes: &[u8]) -> Result<(), StoreError> {
        let mut at = 0;
        for run in runs {
            let take = (run.blocks as usize * BLOCK_BYTES).min(bytes.len() - at);
            if run.is_hole() {
                at += take;
                continue;
            }
            self.data.write_at(&bytes[at..at + take], run.start * BLOCK_BYTES as u64).map_err(
                |error| {
                    if is_full(&error) {
                        StoreError::NoSpace { needed_bytes: bytes.len() as u64 }
                    } else {
                        failed("write data", &error)
                    }
                },
            )?;
            at += take;
        }
        Ok(())
    }
}

impl<D: Disk> Lender for FileChunkStore<D> {
    fn lend(&self, bytes: u64) -> u64 {
        // Blocks that a commit has left are free once its record is durable.
        let flush = {
            let mut inner = self.lock();
            while inner.resizing {
                inner = self.resized.wait(inner).unwrap_or_else(PoisonError::into_inner);
            }
            !inner.leaving.is_empty() && inner.free.free() * (BLOCK_BYTES as u64) < bytes
        };
        if flush && let Err(error) = self.flush() {
            tracing::warn!(%error, "no free blocks for other stores of the disk");
        }
        let runs = self.lock().free.take_largest(bytes.div_ceil(BLOCK_BYTES as u64));
        self.punch(runs)
    }
}

/// No room, for whichever reason the system names.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use threefs_core::chunk::{ContentChange, TagWindow};
    use threefs_core::forgotten::InodeRange;
    use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId};

    use super::*;
    use crate::log::Record;
    use crate::store::SLICE_ENTRIES;
    use crate::{DiskBudget, StoreConfig};

    fn put(
        store: &FileChunkStore,
        chunk: ChunkId,
        version: u64,
        payload: &[u8],
    ) -> Result<(), StoreError> {
        let update = StoreUpdate {
            chunk,
            version: ChunkVersion(version),
            chain_version: ChainVersion(1),
            tags: TagWindow::default(),
            change: ContentChange::Replace,
        };
        store.apply(&update, payload)?;
        store.commit(chunk, update.version, update.chain_version).map(drop)
    }

    /// What is judged by it must not see half a step: an overwrite would be refused, or growth get
    /// the room that overwrites need.
    #[test]
    fn overwrites_in_flight_change_no_room_at_any_moment() {
        const WRITERS: u32 = 3;
        const UPDATES: u64 = 500;
        let budget = DiskBudget::new(64 * BLOCK_BYTES as u64, 0);
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig { budget: Arc::clone(&budget), ..StoreConfig::default() };
        let store = FileChunkStore::open(folder.path(), config).unwrap();
        let content = [1; 8 * BLOCK_BYTES];
        for index in 0..WRITERS {
            put(&store, ChunkId::new(InodeId(7), index), 1, &content).unwrap();
        }
        let alone = || budget.ledger().room().1;
        let expected = alone();
        let write = |index| {
            for version in 2..UPDATES {
                put(&store, ChunkId::new(InodeId(7), index), version, &content).unwrap();
            }
        };
        let write = &write;
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..WRITERS).map(|index| scope.spawn(move || write(index))).collect();
            while !writers.iter().all(|writer| writer.is_finished()) {
                assert_eq!(alone(), expected, "bytes of room");
            }
        });
    }

    /// The record is durable, and the thread that drops the chunks has not come to its end.
    #[test]
    fn blocks_of_forgotten_chunks_are_taken_while_others_are_dropped() {
        const CHUNKS: u32 = SLICE_ENTRIES as u32 + 30;
        let capacity_bytes = u64::from(CHUNKS + 20) * BLOCK_BYTES as u64;
        let budget = DiskBudget::new(capacity_bytes, 0);
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig { budget, ..StoreConfig::default() };
        let store = FileChunkStore::open(folder.path(), config).unwrap();
        for index in 0..CHUNKS {
            put(&store, ChunkId::new(InodeId(7), index), 1, b"x").unwrap();
        }
        let inodes = vec![InodeRange::one(InodeId(7))];
        store.append(&mut store.lock(), Record::Gone { inodes }, true).unwrap();
        store.flush().unwrap();
        assert!(store.lock().drop_forgotten(SLICE_ENTRIES));
        store.publish_holding(&store.lock());
        put(&store, ChunkId::new(InodeId(8), 0), 1, &[1; 80 * BLOCK_BYTES]).unwrap();
    }
}
