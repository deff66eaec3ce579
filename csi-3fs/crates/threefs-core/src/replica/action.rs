//! What goes into a replica and what comes out of it.

use std::fmt;

use bytes::Bytes;

use crate::chunk::{ChunkState, StoreUpdate, Which};
use crate::error::{StorageError, StoreError};
use crate::forgotten::InodeRange;
use crate::ids::{ChainVersion, ChunkId, ChunkVersion, NodeId, TargetId};
use crate::message::{ReadRequest, RepairRequest, StorageReply, StorageRequest};
use crate::routing::Chain;
use crate::time::Millis;

/// Names an inbound request until it is answered. The driver gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Names an operation of the replica in store actions and their outcomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// Names a call to another replica until its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Why a call brought no reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerFailure {
    /// No connection, or it broke, or the deadline passed: the effect is unknown.
    Unreachable,
    /// The other replica said no.
    Refused(StorageError),
}

/// Something has happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The chain as newly published. An older one than known is ignored.
    Routing(Chain),
    /// The node's lease was renewed: see [`crate::heartbeat::ServingLease`].
    Lease {
        /// Until when.
        valid_until: Millis,
    },
    /// A request for this target; its payload was checked by
    /// [`crate::message::verify_payload`]. It gets exactly one [`Action::Reply`],
    /// [`Action::ServeRead`] or [`Action::ServeRepair`] (unless the service stops before).
    Request {
        /// The driver's name for it.
        token: Token,
        /// The request.
        request: StorageRequest,
        /// What came with it.
        payload: Bytes,
        /// An update may not be begun at this moment or later: whoever sent it may have lost the
        /// right to it. `None` if it may be begun at any time.
        expires: Option<Millis>,
    },
    /// The outcome of an [`Action::Call`].
    Answer {
        /// Which call.
        call: CallId,
        /// What came back.
        result: Result<StorageReply, PeerFailure>,
        /// Payload of the reply.
        payload: Bytes,
    },
    /// The outcome of an [`Action::Apply`].
    Applied {
        /// As in the action.
        op: OpId,
        /// The pending state.
        result: Result<ChunkState, StoreError>,
    },
    /// An [`Action::Apply`] has not started yet: other updates hold the room on the disk.
    RoomAwaited {
        /// As in the action.
        op: OpId,
    },
    /// It starts now.
    RoomGiven {
        /// As in the action.
        op: OpId,
    },
    /// The outcome of an [`Action::Commit`].
    Committed {
        /// As in the action.
        op: OpId,
        /// The committed state.
        result: Result<ChunkState, StoreError>,
    },
    /// The outcome of an [`Action::Forget`] or an [`Action::Purge`].
    Forgotten {
        /// As in the action.
        op: OpId,
        /// Done, or why not.
        result: Result<(), StoreError>,
    },
    /// The outcome of an [`Action::ForgetInodes`].
    InodesForgotten {
        /// As in the action.
        op: OpId,
        /// Done, or why not.
        result: Result<(), StoreError>,
    },
    /// The outcome of an [`Action::ReadContent`].
    Content {
        /// As in the action.
        op: OpId,
        /// The whole content and what it is.
        result: Result<(ChunkState, Bytes), StoreError>,
    },
    /// A read that the driver served met [`StoreError::Corrupt`].
    DamageFound {
        /// Which chunk.
        chunk: ChunkId,
    },
    /// Another target has taken this one's place (`crate::moves`): it must stop serving before
    /// mgmtd leaves it out of the chain.
    Retire,
    /// The service ends on purpose: this replica serves nothing from now on, for good, and its
    /// reports say OFFLINE.
    Leave,
    /// Time has passed: [`super::Replica::next_wakeup`] is due.
    Tick,
}

/// Something is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Make a pending state in the store, durably; then [`Event::Applied`].
    Apply {
        /// Names the outcome.
        op: OpId,
        /// What.
        update: StoreUpdate,
        /// Its bytes.
        payload: Bytes,
        /// As which class of requests it takes room on the disk (`crate::message::class`).
        class: u8,
    },
    /// Flip a pending state to committed; then [`Event::Committed`].
    Commit {
        /// Names the outcome.
        op: OpId,
        /// Which chunk.
        chunk: ChunkId,
        /// The pending version.
        version: ChunkVersion,
        /// Under which chain version.
        chain_version: ChainVersion,
    },
    /// Drop all that is known of a chunk, durably; then [`Event::Forgotten`].
    Forget {
        /// Names the outcome.
        op: OpId,
        /// Which chunk.
        chunk: ChunkId,
    },
    /// Drop all that is known of a removed chunk, and raise the store's version floor to its
    /// version; then [`Event::Forgotten`].
    Purge {
        /// Names the outcome.
        op: OpId,
        /// Which chunk.
        chunk: ChunkId,
        /// The version that removed it.
        version: ChunkVersion,
    },
    /// Drop all that is known of these inodes' chunks and fence them, and raise the store's version
    /// floor, durably; then [`Event::InodesForgotten`].
    ForgetInodes {
        /// Names the outcome.
        op: OpId,
        /// Which inodes.
        inodes: Vec<InodeRange>,
        /// To what.
        version_floor: ChunkVersion,
    },
    /// Read a whole chunk from the store; then [`Event::Content`].
    ReadContent {
        /// Names the outcome.
        op: OpId,
        /// Which chunk.
        chunk: ChunkId,
        /// Which of its states.
        which: Which,
    },
    /// Ask another replica; then [`Event::Answer`].
    Call {
        /// Names the outcome.
        call: CallId,
        /// Where it is.
        node: NodeId,
        /// What to ask.
        request: StorageRequest,
        /// What goes with it.
        payload: Bytes,
        /// After this time the replica no longer waits for the answer.
        timeout_ms: u64,
    },
    /// Answer a request. No reply of a replica has a payload; reads are the driver's to answer.
    Reply {
        /// Which request.
        token: Token,
        /// The answer.
        result: Result<StorageReply, StorageError>,
    },
    /// A read may be answered from the committed state of the store, now or later: read, then
    /// reply. On [`StoreError::Corrupt`] reply with the error and send [`Event::DamageFound`].
    ServeRead {
        /// Which request.
        token: Token,
        /// What to read.
        request: ReadRequest,
        /// For the reply.
        chain_version: ChainVersion,
    },
    /// Another replica repairs itself: read the whole chunk (`which` has the version it asked
    /// for), then reply.
    ServeRepair {
        /// Which request.
        token: Token,
        /// What to read.
        request: RepairRequest,
        /// Where that version is.
        which: Which,
    },
    /// Somebody knows newer routing than this node: fetch it.
    RefreshRouting,
    /// Tell the operator.
    Alert(Alert),
}

/// Something that an operator should know. None needs the operator's hand for the chain to go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Alert {
    /// This replica disagrees with its predecessor and will be synced.
    Disagreement {
        /// This target.
        target: TargetId,
        /// About which chunk.
        chunk: ChunkId,
        /// In which way.
        reason: StorageError,
    },
    /// A damaged chunk was found; repair has begun.
    Damaged {
        /// This target.
        target: TargetId,
        /// Which chunk.
        chunk: ChunkId,
    },
    /// A damaged chunk has its content back.
    Repaired {
        /// This target.
        target: TargetId,
        /// Which chunk.
        chunk: ChunkId,
    },
    /// No other replica could give the content now. Each later read or sync tries again; a write
    /// of the whole chunk heals it.
    NotRepaired {
        /// This target.
        target: TargetId,
        /// Which chunk.
        chunk: ChunkId,
    },
    /// The store failed; the target is given up until the service restarts.
    StoreFailed {
        /// This target.
        target: TargetId,
        /// What it said.
        reason: String,
    },
    /// The store has not answered for too long: the target is left out until it does.
    StoreStalled {
        /// This target.
        target: TargetId,
    },
    /// Another target has taken its place: it stops serving.
    Retired {
        /// This target.
        target: TargetId,
    },
    /// Its service ends on purpose: it stops serving.
    Left {
        /// This target.
        target: TargetId,
    },
    /// The successor has no space: updates wait.
    SuccessorFull {
        /// This target.
        target: TargetId,
        /// The full one.
        successor: TargetId,
    },
    /// A successor was brought up to date.
    SyncEnded {
        /// This target.
        target: TargetId,
        /// The other one.
        successor: TargetId,
        /// Chunks that had to be sent.
        sent: u64,
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
            Self::Damaged { target, chunk } => {
                write!(f, "{chunk} is damaged on {target}; repair has begun")
            }
            Self::Repaired { target, chunk } => write!(f, "{chunk} is repaired on {target}"),
            Self::NotRepaired { target, chunk } => {
                write!(f, "{chunk} is damaged on {target} and no other replica could give it now")
            }
            Self::StoreFailed { target, reason } => {
                write!(f, "{target} is given up until its service restarts: {reason}")
            }
            Self::StoreStalled { target } => {
                write!(f, "the store of {target} does not answer: it is left out until it does")
            }
            Self::Retired { target } => {
                write!(f, "another target has taken the place of {target}: it stops serving")
            }
            Self::Left { target } => {
                write!(f, "{target} stops serving: its service shuts down")
            }
            Self::SuccessorFull { target, successor } => {
                write!(f, "{successor} has no space left: updates wait on {target}")
            }
            Self::SyncEnded { target, successor, sent } => {
                write!(f, "{target} has brought {successor} up to date, {sent} chunks sent")
            }
        }
    }
}
