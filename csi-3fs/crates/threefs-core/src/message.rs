//! Requests and replies of the storage service. Payloads are transferred as raw bytes next to the
//! encoded message; each type documents its payload.

use serde::{Deserialize, Serialize};

pub mod class;
mod conditions;
mod read_many;

pub use conditions::{NamedVolume, UpdateConditions};
pub use read_many::{ReadMany, ReadPart};

use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, ContentChange, TagWindow};
use crate::error::StorageError;
use crate::forgotten::InodeRange;
use crate::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, Incarnation, InodeId, RequestTag, TargetId,
};
use crate::scrub::{ChunkSummary, QueryStates, ScrubRequest, ScrubStatus};

/// Address of a message, and the chain version of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The chain.
    pub chain: ChainId,
    /// Its version according to the sender.
    pub chain_version: ChainVersion,
    /// The target on the receiving node.
    pub target: TargetId,
}

/// A client's update, sent to the head. Payload: the bytes of a write (or replace).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRequest {
    /// The head of the chain.
    pub to: Address,
    /// Which chunk.
    pub chunk: ChunkId,
    /// Makes the update exactly-once.
    pub tag: RequestTag,
    /// Change of the content.
    pub change: ContentChange,
    /// Checksum of the payload.
    pub payload_checksum: Checksum,
    /// Chunk size of the file: no update may make the chunk larger.
    pub chunk_bytes: u32,
}

/// An update forwarded down the chain. Payload: as in the client's request; a `Confirm` has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardRequest {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// Which chunk.
    pub chunk: ChunkId,
    /// Version that it makes.
    pub version: ChunkVersion,
    /// The client's tag.
    pub tag: RequestTag,
    /// Change of the content.
    pub change: ContentChange,
    /// Checksum of the payload.
    pub payload_checksum: Checksum,
    /// Checksum of the whole chunk after the update, computed by the predecessor; not yet known in a
    /// `Prepare`.
    pub chunk_checksum: Checksum,
    /// The predecessor has no earlier content: the chunk is removed or unknown there. So it may be
    /// unknown here, whatever its version.
    pub fresh: bool,
    /// The number of the predecessor's last purge, see [`PurgeRequest::number`].
    pub purges: u64,
    /// Above the hop of every request that waits for this update: a client's update has hop 0, its
    /// first forward hop 1, and so on; see [`StorageRequest::class`].
    pub hop: u8,
}

/// One sync session of a target. Named by the receiver; never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SyncSession {
    /// Incarnation of the receiver.
    pub incarnation: Incarnation,
    /// Counts the sessions of the incarnation.
    pub number: u64,
}

/// A whole chunk for a SYNCING successor, replacing its copy. Payload: the content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplaceRequest {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// The sync session.
    pub session: SyncSession,
    /// Increases with each message of the session; the receiver refuses older ones for a chunk.
    pub sequence: u64,
    /// Which chunk.
    pub chunk: ChunkId,
    /// Version of the chunk; 0 = the predecessor does not have the chunk: forget it.
    pub version: ChunkVersion,
    /// The chunk was removed by this version.
    pub removed: bool,
    /// Its recent tags.
    pub tags: TagWindow,
    /// Checksum of payload and chunk, which are equal.
    pub checksum: Checksum,
}

/// A read from any SERVING replica. The reply's payload: the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadRequest {
    /// The replica.
    pub to: Address,
    /// Which chunk.
    pub chunk: ChunkId,
    /// Offset in the chunk.
    pub offset: u32,
    /// Number of bytes; the reply has fewer if the chunk ends earlier.
    pub length: u32,
}

/// Request for a whole chunk from another replica, because the local copy is damaged. The reply's
/// payload: the content of the committed version, if it is still `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairRequest {
    /// The other replica.
    pub to: Address,
    /// The requesting replica.
    pub from: TargetId,
    /// Which chunk.
    pub chunk: ChunkId,
    /// The damaged version.
    pub version: ChunkVersion,
}

/// Start of a sync of a SYNCING successor by its predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncStart {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// Counts the predecessor's attempts; replies to older ones are ignored.
    pub round: u64,
}

/// Request for the successor's chunks, page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncMetas {
    /// The successor.
    pub to: Address,
    /// The session.
    pub session: SyncSession,
    /// Chunks after this one; `None` = from the first.
    pub after: Option<ChunkId>,
    /// Maximum number of chunks.
    pub limit: u32,
}

/// End of a sync: the successor has everything and may report itself up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncDone {
    /// The successor.
    pub to: Address,
    /// The session.
    pub session: SyncSession,
}

/// Query for the chunks of a file on this chain. Sent to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryChunks {
    /// The head.
    pub to: Address,
    /// The file.
    pub inode: InodeId,
    /// Chunks after this index; `None` = from the first.
    pub after: Option<u32>,
    /// Maximum number of chunks.
    pub limit: u32,
}

/// Query for the last chunk of a file on this chain. Sent to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryLastChunk {
    /// The head.
    pub to: Address,
    /// The file.
    pub inode: InodeId,
}

/// Request to drop all chunks of these inodes on every replica, and to refuse updates of them from
/// then on. The metadata service sends it to the head once the inodes are removed and all updates
/// of them have expired; it is passed down the chain. May be repeated: `Busy`, `Timeout` and all
/// errors that ask for newer routing mean "retry later".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetInodes {
    /// The head, or the successor.
    pub to: Address,
    /// The predecessor; `None` for the metadata service.
    pub from: Option<TargetId>,
    /// Inode numbers, which are never reused. At most
    /// [`FORGET_INODES_MAX`](crate::forgotten::FORGET_INODES_MAX) ranges.
    pub inodes: Vec<InodeRange>,
    /// Upper bound of the versions of chunks that the predecessor has purged; 0 from the metadata
    /// service. Versions that this replica assigns as a head are above it.
    pub version_floor: ChunkVersion,
    /// 0 from the metadata service, plus one at each replica: a replica replies after its
    /// successor, so the request that it waits for must have a higher class.
    pub hop: u8,
}

impl ForgetInodes {
    /// The request of the metadata service to the head.
    #[must_use]
    pub fn of_head(to: Address, inodes: Vec<InodeRange>) -> Self {
        Self { to, from: None, inodes, version_floor: ChunkVersion(0), hop: 0 }
    }
}

/// Request to drop a removed chunk of an existing file. Sent by the head once every update from
/// before the removal has expired, and passed down the chain; each replica drops the chunk after
/// its successor. Answered with the version of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PurgeRequest {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// Which chunk.
    pub chunk: ChunkId,
    /// The version that removed it.
    pub version: ChunkVersion,
    /// Counts the purges of the predecessor. A delayed forward from before has a lower number and
    /// is refused.
    pub number: u64,
    /// As in [`ForwardRequest::hop`].
    pub hop: u8,
}

/// Any request to a storage service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StorageRequest {
    /// See [`UpdateRequest`]. Answered by [`StorageReply::Updated`].
    Update(UpdateRequest),
    /// See [`ForwardRequest`]. Answered by [`StorageReply::Updated`].
    Forward(ForwardRequest),
    /// See [`ReplaceRequest`]. Answered by [`StorageReply::Updated`].
    Replace(ReplaceRequest),
    /// See [`ReadRequest`]. Answered by [`StorageReply::Read`].
    Read(ReadRequest),
    /// See [`RepairRequest`]. Answered by [`StorageReply::Content`].
    Repair(RepairRequest),
    /// See [`SyncStart`]. Answered by [`StorageReply::SyncStarted`].
    SyncStart(SyncStart),
    /// See [`SyncMetas`]. Answered by [`StorageReply::Metas`].
    SyncMetas(SyncMetas),
    /// See [`SyncDone`]. Answered by [`StorageReply::SyncEnded`].
    SyncDone(SyncDone),
    /// See [`QueryChunks`]. Answered by [`StorageReply::Chunks`].
    QueryChunks(QueryChunks),
    /// See [`QueryLastChunk`]. Answered by [`StorageReply::LastChunk`].
    QueryLastChunk(QueryLastChunk),
    /// See [`ForgetInodes`]. Answered by [`StorageReply::InodesForgotten`].
    ForgetInodes(ForgetInodes),
    /// See [`PurgeRequest`]. Answered by [`StorageReply::Updated`].
    Purge(PurgeRequest),
    /// An update that is made only if this is the committed version of its chunk. Answered by
    /// [`StorageReply::Updated`]. (New variants go last: older versions decode by position.)
    UpdateAt(UpdateRequest, ChunkVersion),
    /// As `QueryChunks`, for services. Answered by [`StorageReply::ChunkVersions`].
    QueryVersions(QueryChunks),
    /// See [`ReadMany`]. Answered by [`StorageReply::ReadMany`].
    ReadMany(ReadMany),
    /// See [`QueryStates`]. Answered by [`StorageReply::States`].
    QueryStates(Address, QueryStates),
    /// See [`ScrubRequest`]. Answered by [`StorageReply::Scrub`].
    Scrub(Address, ScrubRequest),
    /// As `Read`, which reads the newest version of a chunk: this reads the newest one up to the
    /// epoch in its id. The inode may be that of the file in a snapshot
    /// ([`snapshot_inode`](crate::snapshot_inode)), as clients name it. Answered by
    /// [`StorageReply::Read`].
    ReadUpTo(ReadRequest),
    /// An update with its conditions. Answered by [`StorageReply::Updated`].
    UpdateIf(UpdateRequest, UpdateConditions),
    /// As `Forward`, before the update is durable on the sender: make it pending, and wait for a
    /// `Confirm` or `Forward` of it. Answered by [`StorageReply::Prepared`].
    Prepare(ForwardRequest),
    /// A prepared update is durable on the sender. Answered by [`StorageReply::Updated`], or refused
    /// as [`StorageError::NotPrepared`].
    Confirm(ForwardRequest),
}

impl StorageRequest {
    /// The class of the request, see [`class`].
    #[must_use]
    pub fn class(&self) -> u8 {
        match self {
            Self::Update(_) | Self::UpdateAt(..) | Self::UpdateIf(..) => class::UPDATE,
            Self::Forward(request) | Self::Prepare(request) | Self::Confirm(request) => {
                request.hop.clamp(1, class::HOP_MAX)
            }
            Self::Purge(request) => request.hop.clamp(1, class::HOP_MAX),
            // Waits only for the same at the next hop; no queue and no update waits for it.
            Self::ForgetInodes(request) => request.hop.min(class::HOP_MAX),
            Self::Replace(_) => class::REPLACE,
            Self::Read(_) | Self::ReadUpTo(_) | Self::ReadMany(_) => class::READ,
            Self::Repair(_)
            | Self::SyncStart(_)
            | Self::SyncMetas(_)
            | Self::SyncDone(_)
            | Self::QueryChunks(_)
            | Self::QueryVersions(_)
            | Self::QueryLastChunk(_)
            | Self::QueryStates(..)
            | Self::Scrub(..) => class::QUERY,
        }
    }

    /// Whether it is a client's update.
    #[must_use]
    pub fn is_update(&self) -> bool {
        self.update().is_some()
    }

    /// A client's update, with its conditions.
    #[must_use]
    pub fn update(&self) -> Option<(&UpdateRequest, UpdateConditions)> {
        match self {
            Self::Update(request) => Some((request, UpdateConditions::default())),
            Self::UpdateAt(request, version) => Some((request, UpdateConditions::at(*version))),
            Self::UpdateIf(request, conditions) => Some((request, *conditions)),
            _ => None,
        }
    }

    /// The address of the request.
    #[must_use]
    pub fn to(&self) -> Address {
        match self {
            Self::Update(request) | Self::UpdateAt(request, _) | Self::UpdateIf(request, _) => {
                request.to
            }
            Self::Forward(request) | Self::Prepare(request) | Self::Confirm(request) => request.to,
            Self::Replace(request) => request.to,
            Self::Read(request) | Self::ReadUpTo(request) => request.to,
            Self::Repair(request) => request.to,
            Self::SyncStart(request) => request.to,
            Self::SyncMetas(request) => request.to,
            Self::SyncDone(request) => request.to,
            Self::QueryChunks(request) | Self::QueryVersions(request) => request.to,
            Self::QueryLastChunk(request) => request.to,
            Self::ForgetInodes(request) => request.to,
            Self::Purge(request) => request.to,
            Self::ReadMany(request) => request.to,
            Self::QueryStates(to, _) => *to,
            Self::Scrub(to, _) => *to,
        }
    }
}

impl Updated {
    /// The reply for a chunk that does not exist.
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            version: ChunkVersion(0),
            length: 0,
            checksum: Checksum(0),
            chain_version: ChainVersion(0),
        }
    }
}

/// The update is durable and committed on the replying replica and all its successors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Updated {
    /// Version that the update made.
    pub version: ChunkVersion,
    /// Length of the chunk at that version; 0 in the reply to a repeated request whose version is
    /// no longer the newest.
    pub length: u32,
    /// Checksum of the whole chunk at that version; see `length`.
    pub checksum: Checksum,
    /// Chain version of the commit.
    pub chain_version: ChainVersion,
}

/// Result of a read. Payload: `length` bytes. A chunk that was never written (version 0) or was
/// removed reads as one of length 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDone {
    /// The committed version that was read.
    pub version: ChunkVersion,
    /// Bytes read: fewer than requested at the end of the chunk.
    pub length: u32,
    /// Length of the whole chunk.
    pub chunk_length: u32,
    /// Checksum of the payload.
    pub checksum: Checksum,
    /// Chain version of the replica.
    pub chain_version: ChainVersion,
}

/// A whole committed chunk, for the repair of another replica. Payload: the content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// Its version.
    pub version: ChunkVersion,
    /// Its checksum.
    pub checksum: Checksum,
}

/// Answer to a query for the last chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastChunk {
    /// Its index.
    pub index: u32,
    /// Its length.
    pub length: u32,
}

/// Any reply of a storage service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StorageReply {
    /// To Update, Forward, Confirm, Replace.
    Updated(Updated),
    /// To Read.
    Read(ReadDone),
    /// To Repair.
    Content(Content),
    /// To SyncStart.
    SyncStarted {
        /// The session for all further messages of this sync.
        session: SyncSession,
        /// As in the request.
        round: u64,
    },
    /// To SyncMetas: in order of chunk ids.
    Metas {
        /// This page.
        metas: Vec<ChunkMeta>,
        /// No more follow.
        last: bool,
    },
    /// To SyncDone.
    SyncEnded,
    /// To QueryChunks: existing chunks in order, with their committed lengths. A last entry of
    /// length 0 is not a chunk: it marks where the query stopped.
    Chunks {
        /// (index, length).
        chunks: Vec<LastChunk>,
        /// No more follow.
        last: bool,
    },
    /// To QueryLastChunk: `None` = the file has no chunk on this chain.
    LastChunk(Option<LastChunk>),
    /// To ForgetInodes: durable on this replica and all its successors.
    InodesForgotten,
    /// To QueryVersions: as `Chunks`, with committed versions.
    ChunkVersions {
        /// Chunks and their versions.
        chunks: Vec<(LastChunk, ChunkVersion)>,
        /// No more follow.
        last: bool,
    },
    /// To ReadMany: the result of each read.
    ReadMany(Vec<Result<ReadDone, StorageError>>),
    /// To QueryStates: the known chunks of the range, in order, removed ones too.
    States(Vec<ChunkSummary>),
    /// To Scrub.
    Scrub(Box<ScrubStatus>),
    /// To Prepare: the update is pending and durable here.
    Prepared,
}

/// Result of a request.
pub type StorageResult = Result<StorageReply, StorageError>;

/// Checks that a request without a change of content has no payload. The store verifies the
/// payload of the others with the checksums that it computes anyway.
///
/// # Errors
/// `InvalidRequest`.
pub fn check_payload(request: &StorageRequest, payload: &[u8]) -> Result<(), StorageError> {
    match request {
        StorageRequest::Update(_)
        | StorageRequest::UpdateAt(..)
        | StorageRequest::UpdateIf(..)
        | StorageRequest::Forward(_)
        | StorageRequest::Prepare(_)
        | StorageRequest::Replace(_) => Ok(()),
        _ if payload.is_empty() => Ok(()),
        _ => Err(StorageError::InvalidRequest {
            reason: format!("unexpected payload of {} bytes: this request has none", payload.len()),
        }),
    }
}
