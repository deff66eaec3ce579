//! What the log's records add up to: which blocks hold which state of which chunk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use threefs_core::chunk::{BLOCK_BYTES, ChunkState};
use threefs_core::error::StoreError;
use threefs_core::forgotten::{ForgottenInodes, InodeRange};
use threefs_core::ids::{ChunkId, ChunkVersion, InodeId, StoreId};

use crate::blocks::{Extent, FreeBlocks, blocks_in, difference};
use crate::log::{Content, Record};
use crate::room::Holding;

#[derive(Clone, Debug, Default)]
pub(crate) struct Version {
    pub(crate) state: ChunkState,
    pub(crate) content: Arc<Content>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) committed: Version,
    pub(crate) pending: Option<Version>,
}

/// The part of a compaction that appending a record has to know.
#[derive(Debug, Default)]
pub(crate) struct Copying {
    /// Chunks up to this one are in the new log.
    pub(crate) upto: Option<ChunkId>,
    /// Records about those chunks that the new log does not have yet.
    pub(crate) tail: Vec<u8>,
    /// While the logs are switched: the bytes that `tail` may have, with the header of its frame.
    pub(crate) tail_bytes_max: Option<u64>,
}

impl Copying {
    /// Takes a record along if the new log would not have what it changes.
    pub(crate) fn appended(&mut self, record: &Record, bytes: &[u8]) {
        if record.chunk().is_none_or(|chunk| Some(chunk) <= self.upto) {
            self.tail.extend_from_slice(bytes);
        }
    }
}

/// Everything behind the one lock. While it is held there is no call of the file system, and no
/// work that grows with the store.
pub(crate) struct Inner<F> {
    pub(crate) index: BTreeMap<ChunkId, Entry>,
    pub(crate) with_pending: BTreeSet<ChunkId>,
    pub(crate) forgotten: ForgottenInodes,
    // No purged chunk had a version above it.
    pub(crate) version_floor: ChunkVersion,
    // Forgotten, by the record with this number, and possibly still in the index.
    pub(crate) dropping: VecDeque<(u64, InodeRange)>,
    pub(crate) id: Option<StoreId>,
    pub(crate) free: FreeBlocks,
    // Free blocks that the file system has back: they take room again before they are used.
    pub(crate) holes: FreeBlocks,
    pub(crate) data_blocks: u64,
    // Blocks of committed and pending content, and those that the pending states' commits free.
    pub(crate) held_blocks: u64,
    pub(crate) returning_blocks: u64,
    // Somebody changes the length of the data file, without the lock.
    pub(crate) resizing: bool,
    // Runs that become free when the record with this number is durable.
    pub(crate) leaving: Vec<(u64, Vec<Extent>)>,
    pub(crate) log: Arc<F>,
    pub(crate) log_name: u64,
    pub(crate) log_end: u64,
    pub(crate) log_room: u64,
    // Up to here the blocks of the log have been written before, if only with zeros.
    pub(crate) log_written: u64,
    pub(crate) compact_at: u64,
    pub(crate) next_frame: u64,
    pub(crate) body: Vec<u8>,
    // A record of `body` is about blocks that were written: they are flushed before it.
    pub(crate) data_written: bool,
    pub(crate) appended: u64,
    pub(crate) durable: u64,
    // Somebody flushes, or switches the logs, without the lock.
    pub(crate) flushing: bool,
    pub(crate) copying: Option<Copying>,
    pub(crate) failed: Option<String>,
}

impl<F> Inner<F> {
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(reason) => Err(StoreError::Io {
                operation: "store is closed after a failed flush".to_owned(),
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn became_durable(&mut self, upto: u64) {
        self.durable = upto;
        let (free, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.leaving).into_iter().partition(|(number, _)| *number <= upto);
        self.leaving = left;
        for run in free.iter().flat_map(|(_, runs)| runs) {
            self.free.release(run.start, u64::from(run.blocks));
        }
    }

    /// Brings the index up to a record that was just appended, or replayed.
    pub(crate) fn install(&mut self, record: Record) {
        let number = self.appended;
        let mut left = Vec::new();
        let chunk = record.chunk();
        let returned = self.returning_of(chunk);
        match record {
            Record::Pending { chunk, state, content }
            | Record::Written { chunk, state, content, .. } => {
                let entry = self.index.entry(chunk).or_default();
                let content = Arc::new(content);
                if let Some(dropped) = entry.pending.replace(Version { state, content }) {
                    left = difference(&dropped.content.extents, &entry.committed.content.extents);
                    // A repeated partial update may have been built on the dropped one's blocks.
                    if let Some(pending) = &entry.pending {
                        left = difference(&left, &pending.content.extents);
                    }
                }
                self.with_pending.insert(chunk);
            }
            Record::Commit { chunk, version, chain_version } => {
                if let Some(entry) = self.index.get_mut(&chunk)
                    && entry.pending.as_ref().is_some_and(|p| p.state.version == version)
                    && let Some(mut pending) = entry.pending.take()
                {
                    pending.state.chain_version = chain_version;
                    let before = std::mem::replace(&mut entry.committed, pending);
                    left = difference(&before.content.extents, &entry.committed.content.extents);
                    self.with_pending.remove(&chunk);
                }
            }
            Record::Forget { chunk } => self.drop_chunk(chunk, &mut left),
            Record::Floor { version } => self.version_floor = self.version_floor.max(version),
            Record::Gone { inodes } => {
                for range in inodes {
                    self.dropping.push_back((number, range));
                    self.forgotten.insert(range);
                }
            }
            Record::Store { id } => self.id = Some(id),
            Record::Committed { chunk, state, content } => {
                let committed = Version { state, content: Arc::new(content) };
                self.index.insert(chunk, Entry { committed, pending: None });
            }
        }
        self.returning_blocks = self.returning_blocks + self.returning_of(chunk) - returned;
        self.leave(number, left);
    }

    /// These runs are free for others once record `number` is durable.
    fn leave(&mut self, number: u64, runs: Vec<Extent>) {
        if !runs.is_empty() {
            // During a replay nothing is held yet.
            self.held_blocks = self.held_blocks.saturating_sub(blocks_in(&runs));
            self.leaving.push((number, runs));
        }
    }

    /// Blocks that the commit of the chunk's pending state frees.
    fn returning_of(&self, chunk: Option<ChunkId>) -> u64 {
        let Some(entry) = chunk.and_then(|chunk| self.index.get(&chunk)) else { return 0 };
        let Some(pending) = &entry.pending else { return 0 };
        blocks_in(&difference(&entry.committed.content.extents, &pending.content.extents))
    }

    /// What this store holds of its disk.
    pub(crate) fn holding(&self) -> Holding {
        let block_bytes = BLOCK_BYTES as u64;
        Holding {
            held: self.held_blocks * block_bytes,
            returning: self.returning_blocks * block_bytes,
            pending: self.with_pending.len() as u64,
        }
    }

    /// Drops at most `limit` chunks of forgotten inodes; whether there may be more.
    pub(crate) fn drop_forgotten(&mut self, limit: usize) -> bool {
        let Some(&(number, range)) = self.dropping.front() else { return false };
        let chunks = ChunkId::first_of(range.first)..=ChunkId::last_of(range.last);
        let known: Vec<ChunkId> =
            self.index.range(chunks).take(limit).map(|(chunk, _)| *chunk).collect();
        if known.len() < limit {
            self.dropping.pop_front();
        }
        let mut left = Vec::new();
        for chunk in known {
            self.returning_blocks -= self.returning_of(Some(chunk));
            self.drop_chunk(chunk, &mut left);
        }
        self.leave(number, left);
        !self.dropping.is_empty()
    }

    /// The entry of a chunk. What was forgotten has none, even before it is dropped.
    pub(crate) fn entry(&self, chunk: ChunkId) -> Option<&Entry> {
        self.index.get(&chunk).filter(|_| !self.is_dropping(chunk.inode))
    }

    /// Is `inode` forgotten, and possibly still in the index?
    pub(crate) fn is_dropping(&self, inode: InodeId) -> bool {
        self.dropping.iter().any(|(_, range)| range.first <= inode && inode <= range.last)
    }

    fn drop_chunk(&mut self, chunk: ChunkId, left: &mut Vec<Extent>) {
        self.with_pending.remove(&chunk);
        let Some(entry) = self.index.remove(&chunk) else { return };
        left.extend(difference(&entry.committed.content.extents, &[]));
        if let Some(pending) = entry.pending {
            left.extend(difference(&pending.content.extents, &entry.committed.content.extents));
        }
    }

    /// Bytes of the largest chunk, in whole blocks.
    pub(crate) fn largest_chunk(&self) -> u64 {
        let states = |entry: &Entry| {
            let pending = entry.pending.as_ref().map_or(0, |pending| pending.state.length);
            entry.committed.state.length.max(pending)
        };
        let length = self.index.values().map(states).max().unwrap_or(0);
        u64::from(length).next_multiple_of(BLOCK_BYTES as u64)
    }

    /// After a replay: every block that a state holds is used, all others are free.
    pub(crate) fn claim_blocks(&mut self) -> Result<(), StoreError> {
        let held = |entry: &Entry| {
            let mut held = difference(&entry.committed.content.extents, &[]);
            if let Some(pending) = &entry.pending {
                held.extend(difference(&pending.content.extents, &entry.committed.content.extents));
            }
            held
        };
        // A data file that was cut short loses chunks, not the store: what lies beyond its end
        // reads as zeros, fails its checksums and is repaired from another replica.
        let end = self.index.values().flat_map(held).map(Extent::end).max().unwrap_or(0);
        self.data_blocks = self.data_blocks.max(end);
        self.free.release(0, self.data_blocks);
        for (chunk, entry) in &self.index {
            for run in held(entry) {
                if !self.free.claim(run) {
                    let reason = format!("{chunk}: blocks {run:?} are held twice");
                    return Err(StoreError::Damaged { reason });
                }
            }
        }
        self.held_blocks = self.data_blocks - self.free.free();
        Ok(())
    }
}
