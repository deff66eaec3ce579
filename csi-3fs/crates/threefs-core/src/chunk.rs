//! What a replica knows about one chunk: a committed state and at most one pending update.
//!
//! Versions: an update of committed version v makes a pending v + 1, its commit flips v to v + 1.
//! A removed chunk keeps its version (a tombstone) until it is purged, and what is written there
//! later gets a version above the floor of its store: versions never go back.

use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::forgotten::InodeRange;
use crate::ids::{ChainVersion, ChunkId, ChunkVersion, ClientId, InodeId, RequestTag};

/// Bytes that share one checksum on disk: the unit of verification of a partial read.
pub const BLOCK_BYTES: usize = 4096;

/// How many recent updates a chunk remembers by their tag: one per (client, channel). An update
/// is recognised as a retry as long as at most 15 other channels wrote the chunk since.
pub const TAGS_PER_CHUNK_MAX: usize = 16;

/// The tag of an update and the version it made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AppliedTag {
    /// The update.
    pub tag: RequestTag,
    /// What it made of the chunk.
    pub version: ChunkVersion,
}

/// The newest update of each of the last channels that wrote a chunk, oldest first. Travels with
/// the chunk wherever it goes, so any replica that becomes head recognises retries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TagWindow(Vec<AppliedTag>);

impl TagWindow {
    /// What is known of the channel of `tag`.
    #[must_use]
    pub fn of_channel(&self, tag: &RequestTag) -> Option<&AppliedTag> {
        self.0
            .iter()
            .rev()
            .find(|known| known.tag.client == tag.client && known.tag.channel == tag.channel)
    }

    /// A later life of the client of `tag` that has updated the chunk.
    #[must_use]
    pub fn successor_of(&self, tag: &RequestTag) -> Option<ClientId> {
        self.0.iter().map(|known| known.tag.client).find(|known| known.supersedes(tag.client))
    }

    /// The window after one more update.
    #[must_use]
    pub fn with(&self, tag: RequestTag, version: ChunkVersion) -> Self {
        let mut tags: Vec<AppliedTag> = Vec::with_capacity(self.0.len() + 1);
        tags.extend(
            self.0
                .iter()
                .filter(|known| known.tag.client != tag.client || known.tag.channel != tag.channel),
        );
        tags.push(AppliedTag { tag, version });
        if tags.len() > TAGS_PER_CHUNK_MAX {
            let oldest = Self::least_needed(&tags);
            tags.remove(oldest);
        }
        Self(tags)
    }

    /// The oldest entry of the client with the most: a client with many channels loses its own
    /// and not the only one of another.
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
    /// Is there content to read (possibly of length 0)?
    #[must_use]
    pub fn exists(&self) -> bool {
        self.version > ChunkVersion(0) && !self.removed
    }
}

/// A chunk as its store knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkMeta {
    /// Which.
    pub chunk: ChunkId,
    /// v. Version 0 where the chunk has only its first pending update.
    pub committed: ChunkState,
    /// u = v + 1, durable but not yet visible.
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

/// How an update changes the content. The payload travels beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContentChange {
    /// Payload goes to `offset`; a gap before it is filled with zeros.
    Write {
        /// Where in the chunk.
        offset: u32,
    },
    /// The content becomes exactly `length` bytes, cut or extended with zeros. No payload.
    Truncate {
        /// The new length.
        length: u32,
    },
    /// The content goes, the version stays. No payload.
    Remove,
    /// Payload is the whole new content, whatever was there before.
    Replace,
}

/// A pending update as the replica hands it to its chunk store. Length and checksum of the new
/// state are the store's to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreUpdate {
    /// Which chunk.
    pub chunk: ChunkId,
    /// Version of the new state. The store takes any: what it may be is the replica's business.
    pub version: ChunkVersion,
    /// Chain version of the new state.
    pub chain_version: ChainVersion,
    /// Tags of the new state.
    pub tags: TagWindow,
    /// What happens to the content.
    pub change: ContentChange,
}

/// Which state of a chunk to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Which {
    /// The committed one.
    Committed,
    /// The pending one if there is one, otherwise the committed one.
    Newest,
}

/// What a replica sees of its chunk store without waiting. The store changes only by the
/// replica's own actions, so between them the view stands still.
pub trait ChunkMetas {
    /// One chunk; `None` where nothing is known of it. A removed chunk is known.
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta>;

    /// Known chunks greater than `after` (from the first for `None`) up to `last` inclusive, in
    /// order, at most `limit`.
    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta>;

    /// Chunks with a pending update, in order, greater than `after`, at most `limit`.
    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId>;

    /// Was this inode forgotten? Its chunks are not known and no update may make one.
    fn is_forgotten(&self, inode: InodeId) -> bool;

    /// Forgotten inodes as ranges that begin after `after`, in order, at most `limit`.
    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange>;

    /// No chunk that was purged here had a version above this.
    fn version_floor(&self) -> ChunkVersion;

    /// The greatest chunk of a file whose committed state exists.
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
    fn a_channel_has_one_entry_and_the_oldest_channel_goes_first() {
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
    fn a_client_with_many_channels_does_not_push_out_the_tag_of_another() {
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
