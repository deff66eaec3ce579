//! State of one chunk in a replica: a committed state and at most one pending update.
//!
//! Versions: an update of committed version v makes a pending v + 1; its commit changes v to v + 1.
//! A removed chunk keeps its version (a tombstone) until it is purged. Later writes get a version
//! above the floor of the store: versions never decrease.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::forgotten::InodeRange;
use crate::ids::{ChainVersion, ChunkId, ChunkVersion, ClientId, InodeId, RequestTag};

/// Bytes that share one checksum on disk: the unit of verification of a partial read.
pub const BLOCK_BYTES: usize = 4096;

/// Recent updates that a chunk records by their tag: one per (client, channel). An update is
/// recognised as a retry as long as at most 15 other channels have written the chunk since.
pub const TAGS_PER_CHUNK_MAX: usize = 16;

/// The tag of an update and the version it made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AppliedTag {
    /// The update.
    pub tag: RequestTag,
    /// The version that it made.
    pub version: ChunkVersion,
}

/// The newest update of each of the last channels that wrote a chunk, oldest first. It is copied
/// with the chunk, so every replica that becomes head recognises retries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TagWindow(Vec<AppliedTag>);

impl TagWindow {
    /// The entry of the channel of `tag`.
    #[must_use]
    pub fn of_channel(&self, tag: &RequestTag) -> Option<&AppliedTag> {
        self.0
            .iter()
            .rev()
            .find(|entry| entry.tag.client == tag.client && entry.tag.channel == tag.channel)
    }

    /// A later incarnation of the client of `tag` that has updated the chunk.
    #[must_use]
    pub fn successor_of(&self, tag: &RequestTag) -> Option<ClientId> {
        self.0.iter().map(|client| client.tag.client).find(|client| client.supersedes(tag.client))
    }

    /// The window after one more update.
    #[must_use]
    pub fn with(&self, tag: RequestTag, version: ChunkVersion) -> Self {
        let mut tags: Vec<AppliedTag> = Vec::with_capacity(self.0.len() + 1);
        tags.extend(
            self.0
                .iter()
                .filter(|entry| entry.tag.client != tag.client || entry.tag.channel != tag.channel),
        );
        tags.push(AppliedTag { tag, version });
        if tags.len() > TAGS_PER_CHUNK_MAX {
            let oldest = Self::least_needed(&tags);
            tags.remove(oldest);
        }
        Self(tags)
    }

    /// The oldest entry of the client with the most entries: a client with many channels loses its
    /// own entry, not the only one of another client.
    fn least_needed(tags: &[AppliedTag]) -> usize {
        let of_client =
            |it: &AppliedTag| tags.iter().filter(|other| other.tag.client == it.tag.client).count();
        let most = tags.iter().map(of_client).max();
        tags.iter().position(|it| Some(of_client(it)) == most).unwrap_or(0)
    }

    /// The newest update.
    #[must_use]
    pub fn newest(&self) -> Option<&AppliedTag> {
        self.0.last()
    }

    /// All entries, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &AppliedTag> {
        self.0.iter()
    }
}

/// One state of a chunk: the committed one or the pending one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChunkState {
    /// Its version; 0 = never written.
    pub version: ChunkVersion,
    /// Chain version under which this state was made or committed.
    pub chain_version: ChainVersion,
    /// Bytes of content.
    pub length: u32,
    /// Checksum over all of the content.
    pub checksum: Checksum,
    /// The chunk was removed by this version; length is 0.
    pub removed: bool,
    /// Recent updates by tag, this one included.
    pub tags: TagWindow,
}

impl ChunkState {
    /// Whether there is content to read (possibly of length 0).
    #[must_use]
    pub fn exists(&self) -> bool {
        self.version > ChunkVersion(0) && !self.removed
    }
}

/// A chunk in its store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkMeta {
    /// The chunk.
    pub chunk: ChunkId,
    /// Version v; 0 if the chunk has only its first pending update.
    pub committed: ChunkState,
    /// Version u = v + 1, durable but not yet visible.
    pub pending: Option<ChunkState>,
}

impl ChunkMeta {
    /// A chunk that was never written.
    #[must_use]
    pub fn absent(chunk: ChunkId) -> Self {
        Self { chunk, committed: ChunkState::default(), pending: None }
    }

    /// The newest state, pending or not.
    #[must_use]
    pub fn newest(&self) -> &ChunkState {
        self.pending.as_ref().unwrap_or(&self.committed)
    }
}

/// How an update changes the content. The payload is transferred separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContentChange {
    /// Write the payload at `offset`; a gap before it is filled with zeros.
    Write {
        /// Offset in the chunk.
        offset: u32,
    },
    /// Truncate or zero-extend the content to `length` bytes. No payload.
    Truncate {
        /// The new length.
        length: u32,
    },
    /// Remove the content, keep the version. No payload.
    Remove,
    /// The payload is the whole new content.
    Replace,
}

impl ContentChange {
    /// `content` after this change with `payload`.
    #[must_use]
    pub fn applied_to(self, content: &[u8], payload: &Bytes) -> Bytes {
        match self {
            Self::Replace => payload.clone(),
            Self::Remove => Bytes::new(),
            Self::Truncate { length } => {
                let mut bytes = content.to_vec();
                bytes.resize(length as usize, 0);
                bytes.into()
            }
            Self::Write { offset } => {
                let (offset, end) = (offset as usize, offset as usize + payload.len());
                let mut bytes = content.to_vec();
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset..end].copy_from_slice(payload);
                bytes.into()
            }
        }
    }
}

/// A pending update as passed to the chunk store, which computes length and checksum of the new
/// state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreUpdate {
    /// The chunk.
    pub chunk: ChunkId,
    /// Version of the new state. The store accepts any; the replica is responsible for it.
    pub version: ChunkVersion,
    /// Chain version of the new state.
    pub chain_version: ChainVersion,
    /// Tags of the new state.
    pub tags: TagWindow,
    /// Change of the content.
    pub change: ContentChange,
}

/// The state of a chunk to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Which {
    /// The committed state.
    Committed,
    /// The pending state if there is one, otherwise the committed state.
    Newest,
}

/// Synchronous view of the chunk store for a replica. The store changes only by the replica's own
/// actions, so the view is stable between them.
pub trait ChunkMetas {
    /// The state of a chunk; `None` if it is unknown. A removed chunk is known.
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta>;

    /// The newest known version of this chunk up to the epoch of `chunk`.
    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta>;

    /// Known chunks greater than `after` (from the first for `None`) up to `last` inclusive, in
    /// order, at most `limit`.
    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta>;

    /// Chunks with a pending update, in order, greater than `after`, at most `limit`.
    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId>;

    /// Whether this inode was forgotten: its chunks are unknown and updates must not create any.
    fn is_forgotten(&self, inode: InodeId) -> bool;

    /// Forgotten inodes as ranges that start after `after`, in order, at most `limit`.
    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange>;

    /// Upper bound of the versions of all chunks that were purged here.
    fn version_floor(&self) -> ChunkVersion;

    /// The last chunk of a file whose newest committed version has content.
    fn last_existing(&self, inode: InodeId) -> Option<ChunkMeta>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ChannelId;

    fn tag(channel: u32, sequence: u64) -> RequestTag {
        RequestTag { client: ClientId(1), channel: ChannelId(channel), sequence }
    }

    #[test]
    fn a_channel_has_one_entry_and_the_oldest_is_evicted_first() {
        let mut window = TagWindow::default();
        for channel in 0..TAGS_PER_CHUNK_MAX as u32 {
            window = window.with(tag(channel, 1), ChunkVersion(u64::from(channel) + 1));
        }
        window = window.with(tag(0, 2), ChunkVersion(17));
        assert_eq!(window.iter().count(), TAGS_PER_CHUNK_MAX);
        assert_eq!(window.of_channel(&tag(0, 9)).unwrap().tag.sequence, 2);
        window = window.with(tag(99, 1), ChunkVersion(18));
        assert_eq!(window.of_channel(&tag(1, 1)), None, "channel 1 was the oldest");
        assert_eq!(window.newest().unwrap().tag, tag(99, 1));
    }

    #[test]
    fn a_client_with_many_channels_does_not_evict_the_tag_of_another() {
        let other = RequestTag { client: ClientId(2), channel: ChannelId(0), sequence: 1 };
        let mut window = TagWindow::default().with(other, ChunkVersion(1));
        for channel in 0..100 {
            window = window.with(tag(channel, 1), ChunkVersion(u64::from(channel) + 2));
        }
        assert_eq!(window.of_channel(&other).unwrap().version, ChunkVersion(1));
        assert_eq!(window.newest().unwrap().tag, tag(99, 1));
        assert_eq!(window.iter().count(), TAGS_PER_CHUNK_MAX);
    }
}
