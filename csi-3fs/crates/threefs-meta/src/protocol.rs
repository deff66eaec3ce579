//! Protocol of the metadata service: requests, replies and their types.
//!
//! A location is a directory and a path below it ([`At`]), so the same calls serve clients that use
//! whole paths (directory = [`ROOT`]) and clients that use inodes and names.
//!
//! A change has a [`RequestId`]. Its answer is stored by the transaction that makes the change, so
//! a retry after a lost reply, even after a restart of the service, gets the first answer and
//! changes nothing.

mod audit;
mod change;
mod correction;
pub(crate) mod inode;
pub(crate) mod limits;
mod lock;
mod query;
mod reply;
mod snapshot;
mod trash;

use fabric::rpc::{Fault, decode};
use serde::{Deserialize, Serialize};

pub use crate::error::MetaError;
use crate::identity::Identity;
pub use crate::written::{REPORT_RANGES_MAX, Written};
pub use audit::{
    AUDIT_RANGES_MAX, AuditAnswer, AuditQuery, AuditedFile, SHOWN_FILES_MAX, ShownFile,
    WrittenCursor,
};
pub use change::{
    LengthReport, MetaChange, RenameMode, RequestId, Reservation, SessionId, SetMode, SetTime,
};
pub use correction::{CORRECTIONS_PER_STEP, Correction};
pub use inode::{At, Entry, EntryKind, Inode, InodeKind, LayoutDefaults, Nanoseconds, SpecialKind};
pub use limits::{
    ATTRIBUTE_BYTES_MAX, ATTRIBUTES_BYTES_MAX, BATCH_MAX, LIST_LIMIT_MAX, METADATA_BYTES_MIN,
    METADATA_BYTES_PER_INODE, NAME_BYTES_MAX, NAME_ROW_BYTES, PATH_BYTES_MAX, RESERVED_ATTRIBUTES,
    ROOT, SESSION_ROW_BYTES, SYMLINKS_MAX,
};
pub use lock::{LockAnswer, LockChange, LockKind, LockQuery, LockRequest, RECALLS_MAX};
pub use query::MetaQuery;
pub use reply::{MetaReply, MetaResult, MetaStatus, QuotaUse, ServiceRole};
pub use snapshot::{
    SNAPSHOTS_MAX, SNAPSHOTS_NAME, SnapshotAnswer, SnapshotChange, SnapshotEntry, SnapshotQuery,
};
pub use trash::{
    TRASH_PAGE_MAX, TRASH_SECONDS_MAX, TrashAnswer, TrashChange, TrashEntry, TrashId, TrashQuery,
};

/// Name of the service; both sides of a connection authenticate it.
pub const CONTEXT: &str = "threefs/meta";
/// Version of the protocol. Increase it with every change of requests, replies or their types, except
/// for new variants at the end, which services of earlier releases refuse as such.
/// Requests of older releases start with 0 or 1.
pub const VERSION: u8 = 3;
/// A request on the wire: the version is the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versioned<T> {
    version: u8,
    message: T,
}

impl<'a> Versioned<&'a MetaRequest> {
    /// A request of this release.
    pub fn of(message: &'a MetaRequest) -> Self {
        Self { version: VERSION, message }
    }
}

/// Decodes a request. The version is checked first: a message of another version could decode as a
/// different request.
///
/// # Errors
/// [`Fault`] with the side to upgrade.
pub fn decode_request(message: &[u8]) -> Result<MetaRequest, Fault> {
    let version = message.first().copied().unwrap_or_default();
    if version != VERSION {
        let (client_version, side) = match version {
            0 | 1 => ("no version".to_owned(), "the client"),
            older if older < VERSION => (format!("version {older}"), "the client"),
            newer => (format!("version {newer}"), "the metadata service"),
        };
        return Err(Fault::bad_request(format!(
            "the client sends {client_version}, this service takes version {VERSION} of the messages \
             of {CONTEXT}; upgrade {side} so that both are of one release"
        )));
    }
    let request: Versioned<MetaRequest> =
        decode(message).map_err(|error| Fault::bad_request(error.to_string()))?;
    Ok(request.message)
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRequest {
    /// A read; may be repeated.
    Query {
        /// The caller.
        caller: Identity,
        /// The query.
        query: MetaQuery,
    },
    /// A change; executed once for each id.
    Change {
        /// Its id.
        id: RequestId,
        /// The caller.
        caller: Identity,
        /// The change.
        change: MetaChange,
    },
}
