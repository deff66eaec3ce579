//! Comparison of a replica's chunks with those of its predecessor, by version and checksum.
//!
//! It reads no content, and no lock spans two replicas: the states of the replica are read before
//! and after those of the predecessor. A chunk whose state is the same both times, without a pending
//! update on either side, was not being updated in between. Its states are then equal, because an
//! update is pending on the predecessor before it reaches the replica and is committed on the
//! replica before it is committed on the predecessor. Removed chunks are purged from the tail, so a
//! removed chunk and an unknown chunk are equal. A purge is a minute later than the removal, so no
//! chunk is created, removed and purged between the two reads, which are a call's timeout apart.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::chunk::ChunkMeta;
use crate::ids::{ChunkId, ChunkVersion};

/// What is compared of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkSummary {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its committed version.
    pub version: ChunkVersion,
    /// Committed bytes.
    pub length: u32,
    /// Checksum of the committed content.
    pub checksum: Checksum,
    /// Whether the committed state has content.
    pub exists: bool,
    /// Whether an update is pending.
    pub pending: bool,
}

impl From<&ChunkMeta> for ChunkSummary {
    fn from(meta: &ChunkMeta) -> Self {
        Self {
            chunk: meta.chunk,
            version: meta.committed.version,
            length: meta.committed.length,
            checksum: meta.committed.checksum,
            exists: meta.committed.exists(),
            pending: meta.pending.is_some(),
        }
    }
}

/// Query of a successor for the states of chunks, to compare them with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryStates {
    /// Chunks after this one; `None` = from the first.
    pub after: Option<ChunkId>,
    /// The last chunk.
    pub last: ChunkId,
    /// Maximum number of chunks; a reply that reaches it may be incomplete.
    pub limit: u32,
}

/// How a chunk differs from that of the predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The replica lacks the chunk or has an earlier version.
    Older,
    /// The same version with other content.
    Content,
    /// The predecessor lacks the chunk or has an earlier version. A sync would destroy the newer
    /// content, so an operator must decide.
    Newer,
}

/// A chunk that differs from that of the predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The chunk.
    pub chunk: ChunkId,
    /// How it differs.
    pub kind: DifferenceKind,
    /// The replica's state; `None` = it has no content.
    pub own: Option<ChunkSummary>,
    /// The predecessor's state; `None` = it has no content.
    pub predecessor: Option<ChunkSummary>,
}

/// Differences between a replica's states of a range of chunks, read `before` and `after` those of
/// the `predecessor`.
#[must_use]
pub fn compare(
    before: &[ChunkSummary],
    predecessor: &[ChunkSummary],
    after: &[ChunkSummary],
) -> Vec<Difference> {
    let index = |states: &[ChunkSummary]| -> BTreeMap<ChunkId, ChunkSummary> {
        states.iter().map(|state| (state.chunk, *state)).collect()
    };
    let (before, after, predecessor) = (index(before), index(after), index(predecessor));
    let mut chunks: Vec<ChunkId> = after.keys().chain(predecessor.keys()).copied().collect();
    chunks.sort_unstable();
    chunks.dedup();
    let differs = |chunk: ChunkId| {
        let (own, theirs) = (after.get(&chunk), predecessor.get(&chunk));
        let pending = |state: Option<&ChunkSummary>| state.is_some_and(|state| state.pending);
        if before.get(&chunk) != own || pending(own) || pending(theirs) {
            return None;
        }
        let own = own.filter(|state| state.exists).copied();
        let theirs = theirs.filter(|state| state.exists).copied();
        let kind = match (own, theirs) {
            (None, None) => return None,
            (None, Some(_)) => DifferenceKind::Older,
            (Some(_), None) => DifferenceKind::Newer,
            (Some(own), Some(theirs)) if own == theirs => return None,
            (Some(own), Some(theirs)) if own.version < theirs.version => DifferenceKind::Older,
            (Some(own), Some(theirs)) if own.version > theirs.version => DifferenceKind::Newer,
            (Some(_), Some(_)) => DifferenceKind::Content,
        };
        Some(Difference { chunk, kind, own, predecessor: theirs })
    };
    chunks.into_iter().filter_map(differs).collect()
}
