//! Operations of a node's disk.

use bytes::Bytes;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkState, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::ids::{ChainVersion, ChunkId};
use threefs_core::message::{ReadRequest, RepairRequest};
use threefs_core::replica::{OpId, PlannedRead, Token};

/// A disk operation, completed when it is due.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    Apply {
        op: OpId,
        update: StoreUpdate,
        payload: Bytes,
        payload_checksum: Checksum,
        early_result: Option<ChunkState>,
        /// The disk was full at the start.
        full: bool,
        /// The successor was not sent the update.
        unsent: bool,
    },
    Commit {
        op: OpId,
        result: Result<ChunkState, StoreError>,
    },
    Forgotten {
        op: OpId,
    },
    Purged {
        op: OpId,
    },
    InodesForgotten {
        op: OpId,
    },
    Content {
        op: OpId,
        chunk: ChunkId,
        which: Which,
    },
    Read {
        token: Token,
        request: ReadRequest,
        chain_version: ChainVersion,
    },
    Reads {
        token: Token,
        reads: Vec<PlannedRead>,
        chain_version: ChainVersion,
    },
    Repair {
        token: Token,
        request: RepairRequest,
        which: Which,
    },
}
