//! Requests and replies of the storage service. Payloads never pass through here: they travel as
//! raw bytes beside the encoded message, in the place that each type names.

use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::chunk::{ChunkMeta, ContentChange, TagWindow};
use crate::error::StorageError;
use crate::forgotten::InodeRange;
use crate::ids::{
    ChainId, ChainVersion, ChunkId, ChunkVersion, Incarnation, InodeId, RequestTag, TargetId,
};

/// Whom a message is for, and what its sender believes about the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The chain.
    pub chain: ChainId,
    /// Its version as the sender knows it.
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
    /// Makes it exactly-once.
    pub tag: RequestTag,
    /// What to do.
    pub change: ContentChange,
    /// Checksum of the payload.
    pub payload_checksum: Checksum,
    /// Chunk size of the file: no update may make the chunk larger.
    pub chunk_bytes: u32,
}

/// An update on its way down the chain. Payload: as in the client's request.
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
    /// What to do.
    pub change: ContentChange,
    /// Checksum of the payload.
    pub payload_checksum: Checksum,
    /// Checksum of the whole chunk after the update, as the predecessor has it.
    pub chunk_checksum: Checksum,
    /// The predecessor has no content that the update builds on: the chunk is removed or unknown
    /// there. So it may be unknown here, whatever its version.
    pub fresh: bool,
    /// The number of the predecessor's last purge, see [`PurgeRequest::number`].
    pub purges: u64,
    /// Above the hop of everything that waits for this update: a client's update is at hop 0, its
    /// first forward at hop 1 …, see [`StorageRequest::class`].
    pub hop: u8,
}

/// One sync of a target, from its start to its end. Named by the receiver, never twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SyncSession {
    /// The receiver's life.
    pub incarnation: Incarnation,
    /// Counts the sessions of that life.
    pub number: u64,
}

/// A whole chunk for a SYNCING successor, in place of whatever it has. Payload: the content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplaceRequest {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// The sync it belongs to.
    pub session: SyncSession,
    /// Grows with each message of the session; the receiver refuses an older one for a chunk.
    pub sequence: u64,
    /// Which chunk.
    pub chunk: ChunkId,
    /// Version that the chunk has then; 0 = the predecessor knows no such chunk, forget it.
    pub version: ChunkVersion,
    /// The chunk was removed by this version.
    pub removed: bool,
    /// Its recent tags.
    pub tags: TagWindow,
    /// Checksum of payload and chunk: they are the same.
    pub checksum: Checksum,
}

/// A read from any SERVING replica. The reply's payload: the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadRequest {
    /// The replica.
    pub to: Address,
    /// Which chunk.
    pub chunk: ChunkId,
    /// From where in the chunk.
    pub offset: u32,
    /// How many bytes; fewer come back where the chunk ends earlier.
    pub length: u32,
}

/// A replica asks another one for a whole chunk, because its own copy is damaged. The reply's
/// payload: the content of the committed version, if it is still `version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairRequest {
    /// The other replica.
    pub to: Address,
    /// Who asks.
    pub from: TargetId,
    /// Which chunk.
    pub chunk: ChunkId,
    /// The version that is damaged.
    pub version: ChunkVersion,
}

/// The predecessor begins to bring a SYNCING successor up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncStart {
    /// The successor.
    pub to: Address,
    /// The predecessor.
    pub from: TargetId,
    /// Counts the predecessor's attempts: the answer to an older one is of no use.
    pub round: u64,
}

/// The predecessor asks what its successor has, a page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncMetas {
    /// The successor.
    pub to: Address,
    /// The session.
    pub session: SyncSession,
    /// Chunks after this one; `None` = from the beginning.
    pub after: Option<ChunkId>,
    /// At most so many.
    pub limit: u32,
}

/// Everything is the same: the successor may call itself up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncDone {
    /// The successor.
    pub to: Address,
    /// The session.
    pub session: SyncSession,
}

/// Which chunks of a file are on this chain? Sent to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryChunks {
    /// The head.
    pub to: Address,
    /// The file.
    pub inode: InodeId,
    /// Chunks after this index; `None` = from the first.
    pub after: Option<u32>,
    /// At most so many.
    pub limit: u32,
}

/// Which is the last chunk of a file on this chain? Sent to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryLastChunk {
    /// The head.
    pub to: Address,
    /// The file.
    pub inode: InodeId,
}

/// Drop everything that is known of these inodes' chunks, on every replica, and refuse updates of
/// them from then on. Sent to the head by the metadata service once the inodes are gone and every
/// update of them has expired; passed down the chain. May be repeated: `Busy`, `Timeout` and all
/// answers that ask for newer routing mean "again, later".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetInodes {
    /// The head, or the successor.
    pub to: Address,
    /// The predecessor that passes it on; `None` from the metadata service.
    pub from: Option<TargetId>,
    /// Inode numbers, none of which is ever used again. At most
    /// [`FORGET_INODES_MAX`](crate::forgotten::FORGET_INODES_MAX) ranges.
    pub inodes: Vec<InodeRange>,
    /// No chunk that the predecessor has purged had a version above this; 0 from the metadata
    /// service. Versions that this replica gives as a head are above it.
    pub version_floor: ChunkVersion,
    /// 0 from the metadata service, one more at each replica: a replica answers when its successor
    /// has, so the request that it waits for must be of a higher class.
    pub hop: u8,
}

impl ForgetInodes {
    /// As the metadata service asks the head.
    #[must_use]
    pub fn of_head(to: Address, inodes: Vec<InodeRange>) -> Self {
        Self { to, from: None, inodes, version_floor: ChunkVersion(0), hop: 0 }
    }
}

/// A removed chunk of a file that lives is known to no replica any more. Sent by the head once
/// every update from before the removal has expired, and passed down the chain; each replica drops
/// what it knows of the chunk when its successor has. Answered with the version of the request.
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
    /// Counts what the predecessor purges. A forward that was sent before, and comes late, names a
    /// lower number and is refused.
    pub number: u64,
    /// As in a forward.
    pub hop: u8,
}

/// Anything that a storage service can be asked.
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
}

/// Classes of requests, each with separate budgets at the service that is asked.
///
/// A request may wait, in its chunk's lane or for an answer, only for requests of higher classes:
/// an update for forwards, a forward for forwards at a higher hop and for replaces, all of them for
/// repairs; a purge and a request to forget inodes for the same at a higher hop; queries, repairs and
/// reads wait for the local disk alone. So whatever is full, the requests of the highest class in flight anywhere can end, then those of the class below, and so
/// on: no cycle of full budgets can form between nodes.
pub mod class {
    /// Clients' updates, and inodes that the metadata service wants forgotten.
    pub const UPDATE: u8 = 0;
    /// The highest hop with a class of its own. A hop above the length of the chain needs a change
    /// of the chain's head during one update; further ones share this class.
    pub const HOP_MAX: u8 = 5;
    /// Whole chunks for a SYNCING successor, which forwards nothing.
    pub const REPLACE: u8 = HOP_MAX + 1;
    /// Questions that the replica answers from its store: syncs, repairs, lists of chunks.
    pub const QUERY: u8 = REPLACE + 1;
    /// Clients' reads.
    pub const READ: u8 = QUERY + 1;
    /// How many there are.
    pub const COUNT: u8 = READ + 1;
}

impl StorageRequest {
    /// Its class, see [`class`].
    #[must_use]
    pub fn class(&self) -> u8 {
        match self {
            Self::Update(_) => class::UPDATE,
            Self::Forward(request) => request.hop.clamp(1, class::HOP_MAX),
            Self::Purge(request) => request.hop.clamp(1, class::HOP_MAX),
            // Waits for none but the same at the next hop: no lane and no update waits for it.
            Self::ForgetInodes(request) => request.hop.min(class::HOP_MAX),
            Self::Replace(_) => class::REPLACE,
            Self::Read(_) => class::READ,
            Self::Repair(_)
            | Self::SyncStart(_)
            | Self::SyncMetas(_)
            | Self::SyncDone(_)
            | Self::QueryChunks(_)
            | Self::QueryLastChunk(_) => class::QUERY,
        }
    }

    /// Whom it is for.
    #[must_use]
    pub fn to(&self) -> Address {
        match self {
            Self::Update(request) => request.to,
            Self::Forward(request) => request.to,
            Self::Replace(request) => request.to,
            Self::Read(request) => request.to,
            Self::Repair(request) => request.to,
            Self::SyncStart(request) => request.to,
            Self::SyncMetas(request) => request.to,
            Self::SyncDone(request) => request.to,
            Self::QueryChunks(request) => request.to,
            Self::QueryLastChunk(request) => request.to,
            Self::ForgetInodes(request) => request.to,
            Self::Purge(request) => request.to,
        }
    }
}

impl Updated {
    /// The answer about a chunk that does not exist.
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

/// An update is in force on every replica of the chain from the answering one on, durably.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Updated {
    /// Version that the update made.
    pub version: ChunkVersion,
    /// Length of the chunk at that version; 0 in the answer to a repeated request whose version
    /// is no longer the newest.
    pub length: u32,
    /// Checksum of the whole chunk at that version; see `length`.
    pub checksum: Checksum,
    /// Chain version of the commit.
    pub chain_version: ChainVersion,
}

/// What a read found. Payload: `length` bytes. A chunk that was never written (version 0) or was
/// removed reads as one of length 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDone {
    /// The committed version that was read.
    pub version: ChunkVersion,
    /// Bytes read: fewer than asked where the chunk ends.
    pub length: u32,
    /// Length of the whole chunk.
    pub chunk_length: u32,
    /// Checksum of the payload.
    pub checksum: Checksum,
    /// Chain version of the replica.
    pub chain_version: ChainVersion,
}

/// A whole committed chunk, for a replica that repairs itself. Payload: the content.
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

/// Any answer of a storage service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StorageReply {
    /// To Update, Forward, Replace.
    Updated(Updated),
    /// To Read.
    Read(ReadDone),
    /// To Repair.
    Content(Content),
    /// To SyncStart.
    SyncStarted {
        /// The session that all further messages of this sync name.
        session: SyncSession,
        /// As in the request.
        round: u64,
    },
    /// To SyncMetas: in order of chunk ids.
    Metas {
        /// This page.
        metas: Vec<ChunkMeta>,
        /// Nothing follows.
        last: bool,
    },
    /// To SyncDone.
    SyncEnded,
    /// To QueryChunks: existing chunks in order, with their committed lengths. A last one of length
    /// 0 does not exist: the query has come so far and looks at no more at once.
    Chunks {
        /// (index, length).
        chunks: Vec<LastChunk>,
        /// Nothing follows.
        last: bool,
    },
    /// To QueryLastChunk: `None` = the file has no chunk on this chain.
    LastChunk(Option<LastChunk>),
    /// To ForgetInodes: durable on this replica and all after it.
    InodesForgotten,
}

/// What goes over the wire as an answer.
pub type StorageResult = Result<StorageReply, StorageError>;

/// Checks what came with a request against what the request says of it. The driver does this
/// before the replica sees the request: it costs time in proportion to the payload.
///
/// # Errors
/// The bytes are not those that were sent, or there are bytes where none belong.
pub fn verify_payload(request: &StorageRequest, payload: &[u8]) -> Result<(), StorageError> {
    let (chunk, expected) = match request {
        StorageRequest::Update(request) => (request.chunk, request.payload_checksum),
        StorageRequest::Forward(request) => (request.chunk, request.payload_checksum),
        StorageRequest::Replace(request) => (request.chunk, request.checksum),
        _ if payload.is_empty() => return Ok(()),
        _ => {
            return Err(StorageError::InvalidRequest {
                reason: format!(
                    "a payload of {} bytes where none belongs: send it empty",
                    payload.len()
                ),
            });
        }
    };
    let got = Checksum::of(payload);
    if got == expected {
        Ok(())
    } else {
        Err(StorageError::ChecksumMismatch { chunk, expected, got })
    }
}
