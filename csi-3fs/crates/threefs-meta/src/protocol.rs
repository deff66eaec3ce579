//! What the metadata service is asked and answers.
//!
//! Places are named by a directory and a path below it ([`At`]), so the same calls serve a client
//! that thinks in whole paths (directory = [`ROOT`]) and one that thinks in inodes and names.
//!
//! Changes carry a [`RequestId`]. A change that was executed is remembered with its answer in the
//! same transaction, so a retry after a lost answer, even over a restart of the service, gets the
//! answer of the first execution and changes nothing.

mod change;
pub(crate) mod inode;
pub(crate) mod limits;
mod query;
mod reply;

use fabric::rpc::{Fault, decode};
use serde::{Deserialize, Serialize};

pub use crate::error::MetaError;
use crate::identity::Identity;
pub use crate::written::{REPORT_RANGES_MAX, Written};
pub use change::{
    LengthReport, MetaChange, RenameMode, RequestId, Reservation, SessionId, SetMode, SetTime,
};
pub use inode::{At, Entry, EntryKind, Inode, InodeKind, LayoutDefaults, Nanoseconds, SpecialKind};
pub use limits::{
    ATTRIBUTE_BYTES_MAX, ATTRIBUTES_BYTES_MAX, BATCH_MAX, LIST_LIMIT_MAX, METADATA_BYTES_MIN,
    METADATA_BYTES_PER_INODE, NAME_BYTES_MAX, NAME_ROW_BYTES, PATH_BYTES_MAX, RESERVED_ATTRIBUTES,
    ROOT, SESSION_ROW_BYTES, SYMLINKS_MAX,
};
pub use query::MetaQuery;
pub use reply::{MetaReply, MetaResult, MetaStatus, QuotaUse};

/// Name of the service; both sides of a connection sign it.
pub const CONTEXT: &str = "threefs/meta";
/// Version of the messages between clients and the service. Raise it with every change of a request,
/// a reply or anything within. Requests of releases before it had one start with 0 or 1.
pub const VERSION: u8 = 3;
/// A request as it is sent: the version comes first, in one byte.
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

/// The request in a message. The version is looked at before anything else is decoded: a message of
/// another one could be read as a different request.
///
/// # Errors
/// [`Fault`] with what to upgrade.
pub fn decode_request(message: &[u8]) -> Result<MetaRequest, Fault> {
    let version = message.first().copied().unwrap_or_default();
    if version != VERSION {
        let (theirs, side) = match version {
            0 | 1 => ("no version".to_owned(), "the client"),
            older if older < VERSION => (format!("version {older}"), "the client"),
            newer => (format!("version {newer}"), "the metadata service"),
        };
        return Err(Fault::bad_request(format!(
            "the client sends {theirs}, this service takes version {VERSION} of the messages of \
             {CONTEXT}; upgrade {side} so that both are of one release"
        )));
    }
    let request: Versioned<MetaRequest> =
        decode(message).map_err(|error| Fault::bad_request(error.to_string()))?;
    Ok(request.message)
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRequest {
    /// Reads; may be repeated.
    Query {
        /// For whom.
        caller: Identity,
        /// What.
        query: MetaQuery,
    },
    /// Changes; executed once for each id.
    Change {
        /// Its identity.
        id: RequestId,
        /// For whom.
        caller: Identity,
        /// What to do.
        change: MetaChange,
    },
}
