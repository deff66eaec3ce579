//! Chunk metadata of the index, in the order of chunk ids.

use std::ops::Bound;

use threefs_core::chunk::{ChunkMeta, ChunkMetas};
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChunkId, ChunkVersion, InodeId};

use super::FileChunkStore;
use crate::disk::Disk;
use crate::index::Entry;

impl<D: Disk> ChunkMetas for FileChunkStore<D> {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.lock().entry(chunk).map(|entry| meta(chunk, entry))
    }

    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        let inner = self.lock();
        let mut versions = inner.index.range(chunk.first_version()..=chunk);
        let newest = versions.next_back().filter(|(chunk, _)| !inner.is_dropping(chunk.inode));
        newest.map(|(chunk, entry)| meta(*chunk, entry))
    }

    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta> {
        let lower = after.map_or(Bound::Unbounded, Bound::Excluded);
        if after.is_some_and(|after| after >= last) {
            return Vec::new();
        }
        let inner = self.lock();
        let range = inner.index.range((lower, Bound::Included(last)));
        let range = range.filter(|(chunk, _)| !inner.is_dropping(chunk.inode));
        range.take(limit).map(|(chunk, entry)| meta(*chunk, entry)).collect()
    }

    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId> {
        let lower = after.map_or(Bound::Unbounded, Bound::Excluded);
        let inner = self.lock();
        let range = inner.with_pending.range((lower, Bound::Unbounded));
        range.filter(|chunk| !inner.is_dropping(chunk.inode)).take(limit).copied().collect()
    }

    fn is_forgotten(&self, inode: InodeId) -> bool {
        self.lock().forgotten.contains(inode)
    }

    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange> {
        self.lock().forgotten.ranges(after, limit)
    }

    fn version_floor(&self) -> ChunkVersion {
        self.lock().version_floor
    }

    fn last_existing(&self, inode: InodeId) -> Option<ChunkMeta> {
        let inner = self.lock();
        if inner.is_dropping(inode) {
            return None;
        }
        let mut newer: Option<ChunkId> = None;
        let range = inner.index.range(ChunkId::first_of(inode)..=ChunkId::last_of(inode));
        for (chunk, entry) in range.rev() {
            if entry.committed.state.version == ChunkVersion(0) {
                continue;
            }
            let is_newest = newer.replace(*chunk).is_none_or(|newer| !newer.is_version_of(*chunk));
            if is_newest && entry.committed.state.exists() {
                return Some(meta(*chunk, entry));
            }
        }
        None
    }
}

fn meta(chunk: ChunkId, entry: &Entry) -> ChunkMeta {
    ChunkMeta {
        chunk,
        committed: entry.committed.state.clone(),
        pending: entry.pending.as_ref().map(|pending| pending.state.clone()),
    }
}
