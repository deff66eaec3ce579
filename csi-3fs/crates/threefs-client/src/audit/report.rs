//! Result of an audit, with bounded memory.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use threefs_core::ids::{ChainId, InodeId};

use super::Compared;
use super::expected::LocatedFile;
use crate::error::ClientError;

/// Leaked inodes that are kept; further ones are counted. About 200 bytes each.
const LEAKS_MAX: usize = 1_000_000;
/// Files with missing chunks that are listed.
const FILES_MAX: usize = 1000;
/// Missing chunks that are listed for each of them.
const INDEXES_MAX: usize = 16;

/// Chunks of an inode that does not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Leak {
    /// Number of chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Where they are.
    pub chains: BTreeSet<ChainId>,
}

/// Chunks of a file that must exist and do not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MissingChunks {
    /// The file; of a snapshot, its number there.
    pub inode: InodeId,
    /// A path of it, once it was searched for. Of a file of a snapshot it is not known.
    pub path: Option<String>,
    /// The path of the snapshot that shows it, once it was searched for.
    pub snapshot: Option<String>,
    /// The root of this snapshot.
    #[serde(skip)]
    pub(super) root: Option<InodeId>,
    /// Number of its missing chunks.
    pub chunks: u64,
    /// Bytes of a chunk of the file.
    pub chunk_bytes: u32,
    /// The first ones.
    pub indexes: Vec<u32>,
}

/// Leaked chunks that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Number of inodes.
    pub inodes: u64,
    /// Number of their chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Removed {
    /// Adds an inode.
    pub(super) fn add(&mut self, chunks: u64, bytes: u64) {
        self.inodes += 1;
        self.chunks += chunks;
        self.bytes += bytes;
    }
}

/// Result of an audit. Chunks count once for each chain, not for each replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditReport {
    /// Inodes.
    pub inodes: u64,
    /// Chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Leaked inodes, with their chunks and bytes. Inodes that are not kept count once for each chain.
    pub leaked: Removed,
    /// Missing chunks.
    pub missing_chunks: u64,
    /// Files with missing chunks; at most 1000 are listed. Those that are not listed count once for
    /// each chain and page.
    pub missing_files: u64,
    /// The files with missing chunks.
    pub missing: Vec<MissingChunks>,
    /// Missing chunks that were not confirmed, because a chain lacks too many.
    pub unconfirmed_chunks: u64,
    /// Chains that were not read to their end, with the reason.
    pub not_read: BTreeMap<ChainId, String>,
    /// Leaked chunks that were removed.
    pub removed: Removed,
    /// The leaked inodes that can be removed, at most 1,000,000.
    #[serde(skip)]
    pub(super) leaks: BTreeMap<InodeId, Leak>,
}

impl AuditReport {
    /// The first leaked inodes.
    pub fn leaks(&self) -> impl Iterator<Item = (InodeId, &Leak)> {
        self.leaks.iter().map(|(inode, leak)| (*inode, leak))
    }

    /// Adds what a chain has for a page.
    pub(super) fn add(&mut self, chain: ChainId, compared: &Compared) {
        self.chunks += compared.chunks;
        self.bytes += compared.bytes;
        self.unconfirmed_chunks += compared.missing_more;
        for (inode, chunks, bytes) in &compared.leaked {
            self.leaked(*inode, chain, *chunks, *bytes);
        }
        self.leaked.inodes += compared.leaked_more.inodes;
        self.leaked.chunks += compared.leaked_more.chunks;
        self.leaked.bytes += compared.leaked_more.bytes;
    }

    pub(super) fn not_read(&mut self, chain: ChainId, error: &ClientError) {
        self.not_read.insert(chain, error.to_string());
    }

    /// Adds chunks of a leaked inode on one chain.
    fn leaked(&mut self, inode: InodeId, chain: ChainId, chunks: u64, bytes: u64) {
        self.leaked.chunks += chunks;
        self.leaked.bytes += bytes;
        if self.leaks.len() >= LEAKS_MAX && !self.leaks.contains_key(&inode) {
            self.leaked.inodes += 1;
            return;
        }
        let leak = self.leaks.entry(inode).or_insert_with(|| {
            self.leaked.inodes += 1;
            Leak::default()
        });
        leak.chunks += chunks;
        leak.bytes += bytes;
        leak.chains.insert(chain);
    }

    /// Adds missing chunks of a file on one chain.
    pub(super) fn add_missing(&mut self, file: &LocatedFile, chunk_bytes: u32, indexes: &[u32]) {
        let (inode, root) = (file.file.inode, file.snapshot);
        self.missing_chunks += indexes.len() as u64;
        let listed = self.missing.iter().position(|it| it.inode == inode);
        let place = listed.unwrap_or_else(|| {
            self.missing_files += 1;
            self.missing.len()
        });
        if place == self.missing.len() {
            if place >= FILES_MAX {
                return;
            }
            let (chunks, indexes) = (0, Vec::new());
            let (path, snapshot) = (None, None);
            let file = MissingChunks { inode, path, snapshot, root, chunks, chunk_bytes, indexes };
            self.missing.push(file);
        }
        if let Some(file) = self.missing.get_mut(place) {
            file.chunks += indexes.len() as u64;
            file.indexes.extend(indexes);
            file.indexes.sort_unstable();
            file.indexes.truncate(INDEXES_MAX);
        }
    }
}
