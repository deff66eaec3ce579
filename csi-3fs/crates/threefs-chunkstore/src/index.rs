//! Index: the state and the blocks of each chunk, as accumulated from the log's records.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use threefs_core::chunk::{BLOCK_BYTES, ChunkState};
use threefs_core::error::StoreError;
use threefs_core::forgotten::{ForgottenInodes, InodeRange};
use threefs_core::ids::{ChunkId, ChunkVersion, InodeId, StoreId};

use crate::accounting::Usage;
use crate::block_set::BlockSet;
use crate::blocks::{Extent, FreeBlocks, blocks_in, difference};
use crate::log::{Content, Record};

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

/// State of a compaction that appends must maintain.
#[derive(Debug, Default)]
pub(crate) struct Copying {
    /// Chunks up to this one are in the new log.
    pub(crate) upto: Option<ChunkId>,
    /// Records about those chunks that are not in the new log yet.
    pub(crate) tail: Vec<u8>,
    /// While the logs are switched: maximum size of `tail`, including its frame header.
    pub(crate) tail_bytes_max: Option<u64>,
}

impl Copying {
    /// Adds a record to the tail if the new log would miss its change.
    pub(crate) fn appended(&mut self, record: &Record, bytes: &[u8]) {
        if record.chunk().is_none_or(|chunk| Some(chunk) <= self.upto) {
            self.tail.extend_from_slice(bytes);
        }
    }
}

/// State of a store, under one lock. While it is held, no file system call is made, and no work is
/// done that grows with the store.
pub(crate) struct Inner<F> {
    pub(crate) index: BTreeMap<ChunkId, Entry>,
    pub(crate) with_pending: BTreeSet<ChunkId>,
    pub(crate) forgotten: ForgottenInodes,
    // No purged chunk had a higher version.
    pub(crate) version_floor: ChunkVersion,
    // Inodes forgotten by the record with this number, possibly still in the index.
    pub(crate) dropping: VecDeque<(u64, InodeRange)>,
    pub(crate) id: Option<StoreId>,
    pub(crate) free: FreeBlocks,
    // Free blocks whose space was returned to the file system: they are allocated again before use.
    pub(crate) holes: FreeBlocks,
    // Blocks that may not have been written and flushed since the file system allocated them. The
    // first write of each requires a flush of the data file, which records the allocation as used.
    pub(crate) unwritten: BlockSet,
    pub(crate) data_blocks: u64,
    // Blocks of committed and pending content, and those freed by the commits of pending states.
    pub(crate) held_blocks: u64,
    pub(crate) returning_blocks: u64,
    // A thread is resizing the data file, without the lock.
    pub(crate) resizing: bool,
    // Runs that become free when the record with this number is durable.
    pub(crate) releasing: Vec<(u64, Vec<Extent>)>,
    pub(crate) log: Arc<F>,
    pub(crate) log_name: u64,
    pub(crate) log_end: u64,
    pub(crate) log_room: u64,
    // End of the log blocks that were written before, if only with zeros.
    pub(crate) log_written: u64,
    pub(crate) compact_at: u64,
    pub(crate) next_frame: u64,
    pub(crate) body: Vec<u8>,
    // Written data blocks to which a record in `body` refers, and which must be flushed first.
    pub(crate) unflushed: Vec<Extent>,
    pub(crate) appended: u64,
    pub(crate) durable: u64,
    /// The last record when the last frame was sealed.
    pub(crate) sealed: Option<u64>,
    // A thread is flushing or switching logs, without the lock.
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
        let (free, remaining): (Vec<_>, Vec<_>) = std::mem::take(&mut self.releasing)
            .into_iter()
            .partition(|(number, _)| *number <= upto);
        self.releasing = remaining;
        for run in free.iter().flat_map(|(_, runs)| runs) {
            self.free.release(run.start, u64::from(run.blocks));
        }
    }

    /// Applies a record that was just appended or replayed.
    pub(crate) fn install(&mut self, record: Record) {
        let number = self.appended;
        let mut released = Vec::new();
        let chunk = record.chunk();
        let returning_before = self.returning_of(chunk);
        match record {
            Record::Pending { chunk, state, content }
            | Record::Written { chunk, state, content, .. }
            | Record::Verified { chunk, state, content, .. } => {
                let entry = self.index.entry(chunk).or_default();
                let content = Arc::new(content);
                if let Some(replaced) = entry.pending.replace(Version { state, content }) {
                    released =
                        difference(&replaced.content.extents, &entry.committed.content.extents);
                    // A repeated partial update may use blocks of the dropped one.
                    if let Some(pending) = &entry.pending {
                        released = difference(&released, &pending.content.extents);
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
                    released =
                        difference(&before.content.extents, &entry.committed.content.extents);
                    self.with_pending.remove(&chunk);
                }
            }
            Record::Forget { chunk } => self.drop_chunk(chunk, &mut released),
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
        self.returning_blocks = self.returning_blocks + self.returning_of(chunk) - returning_before;
        self.release_after(number, released);
    }

    /// Frees these runs once record `number` is durable.
    fn release_after(&mut self, number: u64, runs: Vec<Extent>) {
        if !runs.is_empty() {
            // During a replay, `held_blocks` is not counted yet.
            self.held_blocks = self.held_blocks.saturating_sub(blocks_in(&runs));
            self.releasing.push((number, runs));
        }
    }

    /// Blocks freed by the commit of the chunk's pending state.
    fn returning_of(&self, chunk: Option<ChunkId>) -> u64 {
        let Some(entry) = chunk.and_then(|chunk| self.index.get(&chunk)) else { return 0 };
        let Some(pending) = &entry.pending else { return 0 };
        blocks_in(&difference(&entry.committed.content.extents, &pending.content.extents))
    }

    /// Space usage of this store.
    pub(crate) fn usage(&self) -> Usage {
        let block_bytes = BLOCK_BYTES as u64;
        Usage {
            content_bytes: self.held_blocks * block_bytes,
            returning: self.returning_blocks * block_bytes,
            pending: self.with_pending.len() as u64,
        }
    }

    /// Drops at most `limit` chunks of forgotten inodes; returns whether there may be more.
    pub(crate) fn drop_forgotten(&mut self, limit: usize) -> bool {
        let Some(&(number, inodes)) = self.dropping.front() else { return false };
        let range = ChunkId::first_of(inodes.first)..=ChunkId::last_of(inodes.last);
        let chunks: Vec<ChunkId> =
            self.index.range(range).take(limit).map(|(chunk, _)| *chunk).collect();
        if chunks.len() < limit {
            self.dropping.pop_front();
        }
        let mut released = Vec::new();
        for chunk in chunks {
            self.returning_blocks -= self.returning_of(Some(chunk));
            self.drop_chunk(chunk, &mut released);
        }
        self.release_after(number, released);
        !self.dropping.is_empty()
    }

    /// The entry of a chunk. A forgotten chunk has none, even before it is dropped.
    pub(crate) fn entry(&self, chunk: ChunkId) -> Option<&Entry> {
        self.index.get(&chunk).filter(|_| !self.is_dropping(chunk.inode))
    }

    /// Whether `inode` is forgotten and possibly still in the index.
    pub(crate) fn is_dropping(&self, inode: InodeId) -> bool {
        self.dropping.iter().any(|(_, range)| range.first <= inode && inode <= range.last)
    }

    fn drop_chunk(&mut self, chunk: ChunkId, released: &mut Vec<Extent>) {
        self.with_pending.remove(&chunk);
        let Some(entry) = self.index.remove(&chunk) else { return };
        released.extend(difference(&entry.committed.content.extents, &[]));
        if let Some(pending) = entry.pending {
            released.extend(difference(&pending.content.extents, &entry.committed.content.extents));
        }
    }

    /// Size of the largest chunk, in whole blocks.
    pub(crate) fn largest_chunk(&self) -> u64 {
        let states = |entry: &Entry| {
            let pending = entry.pending.as_ref().map_or(0, |pending| pending.state.length);
            entry.committed.state.length.max(pending)
        };
        let length = self.index.values().map(states).max().unwrap_or(0);
        u64::from(length).next_multiple_of(BLOCK_BYTES as u64)
    }

    /// After a replay: marks the blocks of all states as used, and all others as free.
    pub(crate) fn claim_blocks(&mut self) -> Result<(), StoreError> {
        let used_extents = |entry: &Entry| {
            let mut used_extents = difference(&entry.committed.content.extents, &[]);
            if let Some(pending) = &entry.pending {
                used_extents
                    .extend(difference(&pending.content.extents, &entry.committed.content.extents));
            }
            used_extents
        };
        // A truncated data file loses chunks, not the store: data beyond its end reads as zeros,
        // fails its checksums and is repaired from another replica.
        let end = self.index.values().flat_map(used_extents).map(Extent::end).max().unwrap_or(0);
        // Their space is not allocated.
        self.unwritten.insert(self.data_blocks, end.saturating_sub(self.data_blocks));
        self.data_blocks = self.data_blocks.max(end);
        self.free.release(0, self.data_blocks);
        for (chunk, entry) in &self.index {
            for run in used_extents(entry) {
                if !self.free.claim(run) {
                    let reason = format!("{chunk}: blocks {run:?} are used twice");
                    return Err(StoreError::Damaged { reason });
                }
            }
        }
        self.held_blocks = self.data_blocks - self.free.free();
        for (start, blocks) in self.free.runs() {
            self.unwritten.insert(start, blocks);
        }
        Ok(())
    }
}
