//! Several reads with one request.

use serde::{Deserialize, Serialize};

use super::{Address, ReadRequest};
use crate::error::StorageError;
use crate::ids::{ChunkId, InodeId};

/// Several reads of one file from one SERVING replica. Only clients send it. The reply's payload: the
/// bytes of the reads that succeeded, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadMany {
    /// The replica.
    pub to: Address,
    /// The file.
    pub inode: InodeId,
    /// At most [`ReadMany::PARTS_MAX`], of at most [`ReadMany::BYTES_MAX`] together.
    pub parts: Vec<ReadPart>,
}

/// A read of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadPart {
    /// Index of the chunk in its file.
    pub index: u32,
    /// As in [`ReadRequest`].
    pub offset: u32,
    /// As in [`ReadRequest`].
    pub length: u32,
}

impl ReadMany {
    /// Maximum number of reads.
    pub const PARTS_MAX: usize = 64;
    /// Maximum bytes of all reads.
    pub const BYTES_MAX: u64 = 1 << 20;
    /// A shorter read counts as one of this size: it costs the disk as much.
    const PART_BYTES_MIN: u32 = 4096;

    /// Bytes of all reads.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.length)).sum()
    }

    /// Bytes that the reads count for: the store reads whole blocks.
    #[must_use]
    pub fn charged_bytes(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.length.max(Self::PART_BYTES_MIN))).sum()
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// There are too many reads, or they are too large.
    pub fn check(&self) -> Result<(), StorageError> {
        let (parts, bytes) = (self.parts.len(), self.bytes());
        if parts <= Self::PARTS_MAX && bytes <= Self::BYTES_MAX {
            return Ok(());
        }
        let (parts_max, bytes_max) = (Self::PARTS_MAX, Self::BYTES_MAX);
        Err(StorageError::InvalidRequest {
            reason: format!(
                "{parts} reads of {bytes} bytes in one request: at most {parts_max} of \
                 {bytes_max} bytes"
            ),
        })
    }

    /// The reads one by one.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn requests(&self) -> Result<Vec<ReadRequest>, StorageError> {
        self.check()?;
        let request = |part: &ReadPart| ReadRequest {
            to: self.to,
            chunk: ChunkId::new(self.inode, part.index),
            offset: part.offset,
            length: part.length,
        };
        Ok(self.parts.iter().map(request).collect())
    }
}
