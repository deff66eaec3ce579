//! Advisory locks of files: requests and answers.
//!
//! Added after version 3 of the protocol was in use: a service of an earlier release refuses them
//! as requests that it cannot decode.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};

/// Kind of a lock. Locks of different kinds are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockKind {
    /// fcntl: byte ranges of a process.
    Posix,
    /// flock: a whole file, of an open description.
    Flock,
    /// Append lease: its client alone appends to the file, and knows its end. The service refuses
    /// truncations by others meanwhile, and asks for it back: see [`LockQuery::Recalls`].
    Append,
}

/// A lock, held or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRequest {
    /// The file.
    pub inode: InodeId,
    /// Kind of the lock.
    pub kind: LockKind,
    /// The owner among those of its client.
    pub owner: u64,
    /// First byte.
    pub first: u64,
    /// Last byte; `u64::MAX` if the lock has no end.
    pub last: u64,
    /// Whether it excludes all other locks, as for writing.
    pub exclusive: bool,
    /// The process, for display.
    pub pid: u32,
}

/// Changes of locks. A client has at most one lock session; its locks end with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockChange {
    /// Starts a lock session; an earlier one of the client ends with all its locks. Answered with
    /// [`LockAnswer::Renewed`].
    Start {
        /// Its number, chosen by the client.
        session: u64,
    },
    /// Takes a lock. Answered with `Granted`, `Waiting`, `Conflict`, `Deadlock` or `Lost`.
    Set {
        /// The session.
        session: u64,
        /// The lock.
        lock: LockRequest,
        /// Number of the wait, unique for its client, if the request waits for other locks.
        wait: Option<u64>,
    },
    /// Releases what an owner holds of a range. Answered with `Released` or `Lost`. `exclusive` of an
    /// append lease says that the holder knew the end of the file, and has reported it.
    Clear {
        /// The session.
        session: u64,
        /// The range and its owner.
        lock: LockRequest,
    },
    /// Releases all that a client holds of a file, and ends its waits. Answered with `Released` or
    /// `Lost`.
    ClearFile {
        /// The session.
        session: u64,
        /// The file.
        inode: InodeId,
    },
    /// Ends a wait. Answered with `Granted` if the lock was granted before, otherwise with
    /// `Released` or `Lost`.
    Cancel {
        /// The session.
        session: u64,
        /// The lock that it waits for.
        lock: LockRequest,
        /// Number of the wait.
        wait: u64,
    },
    /// Ends a lock session and releases all its locks. Answered with `Released`.
    End {
        /// The session.
        session: u64,
    },
}

/// Queries of locks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockQuery {
    /// Renews a lock session. Answered with `Renewed` or `Lost`.
    Renew {
        /// The client.
        client: ClientId,
        /// Its session.
        session: u64,
    },
    /// A lock that conflicts with this one. Answered with `Conflict` or `Granted`.
    Test {
        /// The client.
        client: ClientId,
        /// The lock.
        lock: LockRequest,
    },
    /// The state of a wait; the answer may take some seconds while it waits. Answered with `Granted`,
    /// `Waiting` or `Lost`, which also means that the lock was granted and released again.
    Await {
        /// The client.
        client: ClientId,
        /// The lock that it waits for.
        lock: LockRequest,
        /// Number of the wait.
        wait: u64,
    },
    /// An append lease of the client that others wait for; the answer may take some seconds while
    /// there is none. Answered with `Recalled`, `Waiting` or `Lost`.
    Recalls {
        /// The client.
        client: ClientId,
        /// Its session.
        session: u64,
        /// Files whose leases it is releasing, at most [`RECALLS_MAX`].
        releasing: Vec<InodeId>,
    },
}

/// Maximum number of append leases that a client releases at once.
pub const RECALLS_MAX: usize = 64;

/// Answers about locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LockAnswer {
    /// The lock is held, or could be.
    Granted,
    /// The request waits for locks of other owners.
    Waiting,
    /// Another owner holds this lock.
    Conflict {
        /// First byte.
        first: u64,
        /// Last byte.
        last: u64,
        /// Whether it excludes all others.
        exclusive: bool,
        /// Its process if it is of the same client; otherwise 0.
        pid: u32,
    },
    /// The owner would wait for an owner that waits for it.
    Deadlock,
    /// Nothing of the range is held by the owner any more.
    Released {
        /// Whether the client still holds or waits for locks of the file.
        in_use: bool,
    },
    /// The lock session is valid.
    Renewed {
        /// Time without renewal after which it ends.
        lease_ms: u64,
    },
    /// The lock session has ended, and with it all its locks.
    Lost,
    /// The append lease is held. An earlier holder has lost it: its last appends may not be in the
    /// file's length.
    GrantedAfterLoss,
    /// Others wait for the append lease of this file.
    Recalled {
        /// The file.
        inode: InodeId,
    },
}
