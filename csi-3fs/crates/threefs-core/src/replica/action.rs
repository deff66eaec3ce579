//! Events and actions of a replica.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::checksum::Checksum;
use crate::chunk::{ChunkState, StoreUpdate, Which};
use crate::error::{StorageError, StoreError};
use crate::fence::FenceTable;
use crate::forgotten::InodeRange;
use crate::ids::{ChainVersion, ChunkId, ChunkVersion, NodeId, TargetId};
use crate::message::{
    ForwardRequest, ReadDone, ReadRequest, RepairRequest, StorageReply, StorageRequest,
};
use crate::routing::Chain;
use crate::scrub::Difference;
use crate::time::Millis;

/// Identifies an inbound request until its reply. Assigned by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Identifies an operation of the replica in store actions and their results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// Identifies a call to another replica until its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerFailure {
    /// Connection failure or timeout: the effect is unknown.
    Unreachable,
    /// The other replica refused the request.
    Refused(StorageError),
}

/// Input of a replica.
#[derive(Clone, Debug)]
pub enum Event {
    /// A newly published chain. Older versions are ignored.
    Routing(Chain),
    /// The node's lease was renewed: see [`crate::heartbeat::ServingLease`].
    Lease {
        /// End of the lease.
        valid_until: Millis,
    },
    /// A request for this target that passed [`crate::message::check_payload`]. It gets exactly one
    /// [`Action::Reply`], [`Action::ServeRead`] or [`Action::ServeRepair`] (unless the service stops
    /// before).
    Request {
        /// Assigned by the driver.
        token: Token,
        /// The request.
        request: StorageRequest,
        /// Its payload.
        payload: Bytes,
        /// Expiry of an update: it must not be started at or after this instant, because its sender
        /// may have lost its lease. `None` = no expiry.
        expires: Option<Millis>,
    },
    /// Result of an [`Action::Call`].
    Answer {
        /// The call.
        call: CallId,
        /// The reply, or the failure.
        result: Result<StorageReply, PeerFailure>,
        /// Payload of the reply.
        payload: Bytes,
    },
    /// Result of an [`Action::Apply`].
    Applied {
        /// As in the action.
        op: OpId,
        /// The pending state.
        result: Result<ChunkState, StoreError>,
        /// The action had a [`Prepare`] that was not sent, because the update failed before, or
        /// because it is optional.
        unsent: bool,
    },
    /// An [`Action::Apply`] is waiting: other updates have reserved the space on the disk.
    RoomAwaited {
        /// As in the action.
        op: OpId,
    },
    /// A waiting [`Action::Apply`] starts now.
    RoomGiven {
        /// As in the action.
        op: OpId,
    },
    /// Result of an [`Action::Commit`].
    Committed {
        /// As in the action.
        op: OpId,
        /// The committed state.
        result: Result<ChunkState, StoreError>,
    },
    /// Result of an [`Action::Forget`], an [`Action::Purge`] or an [`Action::Drop`].
    Forgotten {
        /// As in the action.
        op: OpId,
        /// Success or failure.
        result: Result<(), StoreError>,
    },
    /// Result of an [`Action::ForgetInodes`].
    InodesForgotten {
        /// As in the action.
        op: OpId,
        /// Success or failure.
        result: Result<(), StoreError>,
    },
    /// Result of an [`Action::ReadContent`].
    Content {
        /// As in the action.
        op: OpId,
        /// The whole content and its state.
        result: Result<(ChunkState, Bytes), StoreError>,
    },
    /// A read by the driver, for a request or a scrub, has detected that a chunk is damaged.
    DamageFound {
        /// The chunk.
        chunk: ChunkId,
    },
    /// A scrub has confirmed that a chunk differs from the predecessor's (`crate::scrub`).
    Differs {
        /// The chunk and its states.
        difference: Difference,
        /// The chain version at the comparison.
        chain_version: ChainVersion,
    },
    /// The fences that this service knows, see [`crate::fence`]. Without a list of shown epochs, all
    /// versions of the chunks of a volume are kept.
    Fences(Arc<FenceTable>),
    /// The driver could not write what must be durable before a chain takes effect.
    Failed {
        /// The error of the disk.
        reason: String,
    },
    /// Another target has replaced this one (`crate::moves`): it must stop serving before mgmtd
    /// removes it from the chain.
    Retire,
    /// Its disk or its service ends: this replica permanently stops serving and reports OFFLINE.
    Leave,
    /// Time has passed: [`super::Replica::next_wakeup`] is due.
    Tick,
}

/// Output of a replica, to be executed by the driver.
#[derive(Clone, Debug)]
pub enum Action {
    /// Make a pending state durable in the store, if the payload has this checksum; then
    /// [`Event::Applied`].
    Apply {
        /// Identifies the result.
        op: OpId,
        /// The update.
        update: StoreUpdate,
        /// Its payload, not verified yet.
        payload: Bytes,
        /// The sender's checksum of the payload.
        payload_checksum: Checksum,
        /// The class of requests that it reserves disk space for (`crate::message::class`).
        class: u8,
        /// If other updates have reserved the space, it waits instead of failing at once.
        waits: bool,
        /// To be sent once only the disk can fail: the update is verified, and has its space.
        prepare: Option<Prepare>,
    },
    /// Commit a pending state; then [`Event::Committed`].
    Commit {
        /// Identifies the result.
        op: OpId,
        /// The chunk.
        chunk: ChunkId,
        /// The pending version.
        version: ChunkVersion,
        /// Chain version of the commit.
        chain_version: ChainVersion,
    },
    /// Drop all state of a chunk, durably; then [`Event::Forgotten`].
    Forget {
        /// Identifies the result.
        op: OpId,
        /// The chunk.
        chunk: ChunkId,
    },
    /// Drop all state of a removed chunk, and raise the store's version floor to its version; then
    /// [`Event::Forgotten`].
    Purge {
        /// Identifies the result.
        op: OpId,
        /// The chunk.
        chunk: ChunkId,
        /// The version that removed it.
        version: ChunkVersion,
    },
    /// Drop a version of a chunk that a newer one follows, not durably; then [`Event::Forgotten`].
    Drop {
        /// Identifies the result.
        op: OpId,
        /// The version.
        chunk: ChunkId,
    },
    /// Drop all chunks of these inodes, refuse updates of them from then on, and raise the store's
    /// version floor, durably; then [`Event::InodesForgotten`].
    ForgetInodes {
        /// Identifies the result.
        op: OpId,
        /// The inodes.
        inodes: Vec<InodeRange>,
        /// The new version floor.
        version_floor: ChunkVersion,
    },
    /// Read a whole chunk from the store; then [`Event::Content`].
    ReadContent {
        /// Identifies the result.
        op: OpId,
        /// The chunk.
        chunk: ChunkId,
        /// The state to read.
        which: Which,
    },
    /// Send a request to another replica; then [`Event::Answer`].
    Call {
        /// Identifies the result.
        call: CallId,
        /// Its node.
        node: NodeId,
        /// The request.
        request: StorageRequest,
        /// Its payload.
        payload: Bytes,
        /// The replica ignores the reply after this time.
        timeout_ms: u64,
    },
    /// Reply to a request, without a payload. The driver serves reads itself.
    Reply {
        /// The request.
        token: Token,
        /// The reply.
        result: Result<StorageReply, StorageError>,
    },
    /// Serve a read from the committed state of the store, at any later time. On [`StoreError::Corrupt`]
    /// reply with the error and send [`Event::DamageFound`].
    ServeRead {
        /// The request.
        token: Token,
        /// The read.
        request: ReadRequest,
        /// Chain version for the reply.
        chain_version: ChainVersion,
    },
    /// As `ServeRead`, for several reads with one reply.
    ServeReads {
        /// The request.
        token: Token,
        /// Each read.
        reads: Vec<PlannedRead>,
        /// Chain version for the reply.
        chain_version: ChainVersion,
    },
    /// Serve the repair of another replica: read the whole chunk and reply. `which` has the
    /// requested version.
    ServeRepair {
        /// The request.
        token: Token,
        /// The repair.
        request: RepairRequest,
        /// The state with the requested version.
        which: Which,
    },
    /// A peer has newer routing than this node: fetch it.
    RefreshRouting,
    /// Report an alert to the operator.
    Alert(Alert),
}

/// A request that prepares the successor, with the payload of its [`Action::Apply`]; its reply is an
/// [`Event::Answer`].
#[derive(Clone, Debug)]
pub struct Prepare {
    /// Identifies the reply.
    pub call: CallId,
    /// The node of the successor.
    pub node: NodeId,
    /// The request.
    pub request: ForwardRequest,
    /// The replica ignores the reply after this time.
    pub timeout_ms: u64,
    /// Without it the update is forwarded once it is durable here. Not optional after a prepare of
    /// the predecessor, which would have to send the payload again.
    pub is_optional: bool,
}

/// One of several reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlannedRead {
    /// Read the committed state of the store.
    Serve(ReadRequest),
    /// The result is known.
    Done(Result<ReadDone, StorageError>),
}

/// Conditions to report to operators. The chain continues without intervention in all cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alert {
    /// This replica disagrees with its predecessor and will be synced.
    Disagreement {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
        /// The disagreement.
        reason: StorageError,
    },
    /// This replica cannot apply an update that its successor may have: it will be synced.
    Outdated {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
        /// Why it cannot.
        reason: StorageError,
    },
    /// This head has no space for an update that its successor may have: later ones of the chunk
    /// wait.
    Full {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
    },
    /// A damaged chunk was found; its repair has started.
    Damaged {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
    },
    /// A damaged chunk was repaired.
    Repaired {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
    },
    /// No other replica could provide the content. Each later read or sync retries; a write of the
    /// whole chunk repairs it.
    NotRepaired {
        /// This target.
        target: TargetId,
        /// The chunk.
        chunk: ChunkId,
    },
    /// The store failed; the target is not used until the store is opened again.
    StoreFailed {
        /// This target.
        target: TargetId,
        /// The error of the store.
        reason: String,
    },
    /// The store has not responded for too long: the target is not used until it does.
    StoreStalled {
        /// This target.
        target: TargetId,
    },
    /// Another target has replaced it: it stops serving.
    Retired {
        /// This target.
        target: TargetId,
    },
    /// Its disk or its service ends: it stops serving.
    Left {
        /// This target.
        target: TargetId,
    },
    /// The successor has no space: updates wait.
    SuccessorFull {
        /// This target.
        target: TargetId,
        /// The successor.
        successor: TargetId,
    },
    /// A successor was synced.
    SyncEnded {
        /// This target.
        target: TargetId,
        /// The successor.
        successor: TargetId,
        /// Chunks sent.
        sent_chunks: u64,
    },
}

impl fmt::Display for Alert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disagreement { target, chunk, reason } => {
                write!(
                    f,
                    "{target} disagrees with its predecessor about {chunk} and will be synced: {reason}"
                )
            }
            Self::Outdated { target, chunk, reason } => {
                write!(
                    f,
                    "{target} cannot apply an update of {chunk} that its successor may have, and will \
                     be synced: {reason}"
                )
            }
            Self::Full { target, chunk } => {
                write!(f, "{target} has no space left: updates of {chunk} wait")
            }
            Self::Damaged { target, chunk } => {
                write!(f, "{chunk} is damaged on {target}; repair started")
            }
            Self::Repaired { target, chunk } => write!(f, "{chunk} is repaired on {target}"),
            Self::NotRepaired { target, chunk } => {
                write!(f, "{chunk} is damaged on {target} and no other replica could provide it")
            }
            Self::StoreFailed { target, reason } => {
                write!(f, "{target} is not used until its store is opened again: {reason}")
            }
            Self::StoreStalled { target } => {
                write!(f, "the store of {target} does not respond: it is not used until it does")
            }
            Self::Retired { target } => {
                write!(f, "{target} was replaced by another target and stops serving")
            }
            Self::Left { target } => {
                write!(f, "{target} stops serving: its disk or its service ends")
            }
            Self::SuccessorFull { target, successor } => {
                write!(f, "{successor} has no space left: updates wait on {target}")
            }
            Self::SyncEnded { target, successor, sent_chunks } => {
                write!(f, "{target} has synced {successor}, {sent_chunks} chunks sent")
            }
        }
    }
}
