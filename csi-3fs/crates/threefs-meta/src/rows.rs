//! The rows of the metadata service.
//!
//! | key | value | what |
//! |---|---|---|
//! | `INOD` inode | `InodeRow` | a file, directory or symbolic link |
//! | `DENT` parent name | `DentryRow` | a name in a directory |
//! | `DTIM` inode | i64 | when the entries of a directory changed last; written blindly, so that creations in one directory do not conflict |
//! | `DSUB` inode | i64 | how many directories are in a directory; only added to, without a read |
//! | `INOS` inode session | `SessionRow` | a write session |
//! | `TRIM` inode | `TrimRow` | a truncation whose chunks are not cut yet |
//! | `RCNT` inode | `RecountRow` | a file that counts for more than its length and reservation, to be counted again |
//! | `GCQU` versionstamp inode | `RemovalRow` | something removed that may still be open |
//! | `GCDE` versionstamp inode | `RemovalRow` | a dead file: nobody can read it, its chunks go next |
//! | `GCLA` versionstamp inode | `RemovalRow` | a dead file without chunks, which a capability may still be good for |
//! | `IDEM` client sequence | `AnswerRow` | an executed change and its answer |
//! | `ABYT` directory | i64 | bytes of the answers that are kept for tickets of a directory; of directory 0 for all of them |
//! | `QUOT` directory | `QuotaRow` | limits of a directory |
//! | `QBYT`, `QEXC`, `QINO`, `QMET` directory | i64 | what counts for them; only bounded additions write it |
//! | `WRIT` inode level page | `Page` | chunks that were written and that the inode has no place for |
//! | `XATT` inode name | bytes | an extended attribute |
//! | `META` name | u64 | the next free inode, the version of this schema, how often the store was opened |
//! | `METAtree`, `METAcluster` | u128 | which tree it is, and of which cluster |
//! | `METAclaim` | `Claim` | why mgmtd may find another store than it knows |
//!
//! Numbers in keys are big endian, so that files made together lie together. Values are postcard.

mod keys;

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};
pub(crate) use threefs_kv::rows::{decode, read, write};
use threefs_kv::{KvError, Transaction};

pub(crate) use keys::*;

use crate::ops::UNLIMITED_BYTES_MAX;
use crate::protocol::{EntryKind, Inode, InodeKind, Nanoseconds};

pub(crate) const REMOVALS: &[u8] = b"GCQU";
pub(crate) const DEAD: &[u8] = b"GCDE";
pub(crate) const TOMBSTONES: &[u8] = b"GCLA";
pub(crate) const ANSWERS: &[u8] = b"IDEM";
pub(crate) const SESSIONS: &[u8] = b"INOS";
pub(crate) const TRIMS: &[u8] = b"TRIM";
pub(crate) const RECOUNTS: &[u8] = b"RCNT";
pub(crate) const NEXT_INODE: &[u8] = b"METAnext-inode";
pub(crate) const TREE: &[u8] = b"METAtree";
pub(crate) const GENERATION: &[u8] = b"METAgeneration";
pub(crate) const CLUSTER: &[u8] = b"METAcluster";
pub(crate) const CLAIM: &[u8] = b"METAclaim";
pub(crate) const SCHEMA: &[u8] = b"METAschema";
pub(crate) const QUOTA_EXCESS: &[u8] = b"QEXC";
pub(crate) const QUOTA_INODES: &[u8] = b"QINO";
pub(crate) const QUOTA_METADATA: &[u8] = b"QMET";
/// Instead of a volume: all of them together.
pub(crate) const ALL_VOLUMES: InodeId = InodeId(0);
pub(crate) const ANSWER_BYTES: &[u8] = b"ABYT";
/// What an answer takes beside its bytes.
const ANSWER_ROW_BYTES: usize = 128;
/// The schema that this code reads and writes.
pub(crate) const SCHEMA_VERSION: u64 = 6;
/// The previous one, whose rows this code reads: of inodes without `charged_end` and `excess`.
pub(crate) const SCHEMA_PREVIOUS: u64 = 5;

/// Parent of a directory that was removed and is being emptied.
pub(crate) const REMOVED: InodeId = InodeId(0);

/// An inode as it is stored. Of a directory, `inode.modified` is overlaid by its `DTIM` row and
/// `inode.links` lacks what its `DSUB` row counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InodeRow {
    pub inode: Inode,
    /// The name of a directory in its parent, for finding its path; empty for everything else.
    pub name: String,
    /// Whether it counts for its quota. An inode without a name that nobody had open when it lost
    /// the last one does not.
    pub charged: bool,
    /// Set before the chunks of a removed file go: from then on nobody can read it, so nobody can
    /// mistake a chunk that is gone for a hole.
    pub dead: bool,
    /// Bytes of its names, extended attributes, link target and write sessions, as they count for a
    /// quota.
    pub metadata_bytes: u64,
    /// No chunk of a file exists at or beyond this many bytes; `u64::MAX` where writers need not
    /// reserve before they write.
    pub end_max: u64,
    /// The bytes of a file below this one count for its quota. At least `needed_end`, and at least the
    /// end of every capability that may still be valid; see `ops::recount`.
    pub charged_end: u64,
    /// Those of them that count as excess and not as used.
    pub excess: u64,
}

/// A file that counts for more than its length and reservation, because older capabilities may still
/// be valid. It is counted again when they have expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecountRow {
    /// When length or reservation became less the last time, in the life of the service in which
    /// that was.
    pub since: Uptime,
}

/// A time in one run of the service. Times of different runs cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Uptime {
    pub run_id: u64,
    pub ms: u64,
}

/// Limits of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct QuotaRow {
    pub bytes_max: Option<u64>,
    pub inodes_max: Option<u64>,
    /// The next directory with a quota above it.
    pub above: Option<InodeId>,
}

impl QuotaRow {
    /// The bytes that may count for it.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.bytes_max.or(self.above.map(|_| UNLIMITED_BYTES_MAX))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DentryRow {
    pub inode: InodeId,
    pub kind: EntryKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRow {
    pub client: ClientId,
    /// Whether it counts for its file's quota: those of earlier releases do not.
    pub counted: bool,
}

impl SessionRow {
    /// A row of this release or of an earlier one, which ends after the client.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| Ok(Self { client: decode(key, value)?, counted: false }))
    }
}

/// "Nothing of this file at or beyond `length` may stay." Until it is done nobody may open the file
/// for writing, or what he writes would be cut too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrimRow {
    pub length: u64,
    pub truncate_version: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemovalRow {
    pub inode: InodeId,
    pub kind: EntryKind,
    /// The life of the service in which it was removed.
    pub run_id: u64,
    /// Clients that had it open then. In a later life of the service it waits until each of them
    /// has announced what it holds, or is gone.
    pub opened_by: Vec<ClientId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AnswerRow {
    pub answered: Nanoseconds,
    /// The encoded `MetaReply`; of a batch which files it changed.
    pub reply: Vec<u8>,
    /// Whose ticket asked; it counts for this volume. `None` for the cluster's key.
    pub volume: Option<InodeId>,
    pub batch: bool,
}

impl AnswerRow {
    /// A row of this release or of an earlier one, which ends after the reply.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| {
            let (answered, reply) = decode(key, value)?;
            Ok(Self { answered, reply, volume: None, batch: false })
        })
    }

    /// What it counts for.
    pub(crate) fn bytes(&self) -> i64 {
        // An answer is no longer than a value of the store.
        (self.reply.len() + ANSWER_ROW_BYTES) as i64
    }
}

impl InodeRow {
    /// A new inode that counts for its quota.
    pub(crate) fn new(inode: Inode) -> Self {
        let metadata_bytes = match &inode.kind {
            InodeKind::Symlink { target } => target.len() as u64,
            _ => 0,
        };
        let (name, charged, dead, end_max) = (String::new(), true, false, 0);
        Self { inode, name, charged, dead, metadata_bytes, end_max, charged_end: 0, excess: 0 }
    }

    /// A row of this release or of an earlier one, which ends after `end_max`: there a file counted
    /// for its length or its reservation.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| {
            let (inode, name, charged, dead, metadata_bytes, end_max) = decode(key, value)?;
            let (charged_end, excess) = (0, 0);
            let mut row =
                Self { inode, name, charged, dead, metadata_bytes, end_max, charged_end, excess };
            row.charged_end = row.needed_end();
            Ok(row)
        })
    }

    /// Bytes of a file that its length or its reservation needs, whichever is longer.
    pub(crate) fn needed_end(&self) -> u64 {
        match self.inode.kind {
            InodeKind::File { length, reserved, .. } => length.max(reserved),
            _ => 0,
        }
    }

    pub(crate) fn kind(&self) -> EntryKind {
        match self.inode.kind {
            InodeKind::File { .. } => EntryKind::File,
            InodeKind::Directory { .. } => EntryKind::Directory,
            InodeKind::Symlink { .. } => EntryKind::Symlink,
            InodeKind::Special { kind, .. } => EntryKind::Special(kind),
        }
    }

    /// Of a directory.
    pub(crate) fn parent(&self) -> Option<InodeId> {
        match self.inode.kind {
            InodeKind::Directory { parent, .. } => Some(parent),
            _ => None,
        }
    }
}

pub(crate) async fn read_inode(
    txn: &mut Transaction,
    id: InodeId,
) -> Result<Option<InodeRow>, KvError> {
    let key = inode(id);
    let value = txn.get(&key).await?;
    value.map(|value| InodeRow::decode(&key, &value)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_earlier_releases_are_read_and_count_for_nothing() {
        for reply in [vec![], vec![7; 300]] {
            let answered = Nanoseconds(-5);
            let before = postcard::to_allocvec(&(answered, reply.clone())).unwrap();
            let row = AnswerRow { answered, reply, volume: None, batch: false };
            assert_eq!(AnswerRow::decode(b"IDEM", &before).unwrap(), row);
            let row = AnswerRow { volume: Some(InodeId(u64::MAX)), batch: true, ..row };
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(AnswerRow::decode(b"IDEM", &now).unwrap(), row);
        }
    }

    #[test]
    fn inodes_of_earlier_releases_are_read_and_count_as_they_did() {
        let layout = threefs_core::layout::Layout {
            table: threefs_core::ids::TableId(1),
            table_version: threefs_core::ids::TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 1,
            chains: threefs_core::layout::ChainChoice::Range { base: 0, seed: 0 },
        };
        for (length, reserved, counted) in [(0, 0, 0), (300, 0, 300), (300, u64::MAX, u64::MAX)] {
            let time = Nanoseconds(-3);
            let kind = InodeKind::File {
                layout: layout.clone(),
                length,
                reserved,
                truncate_version: 7,
                content: 8,
                written: crate::protocol::Written::default(),
            };
            let inode = Inode {
                id: InodeId(9),
                version: 1,
                kind,
                mode: 0o644,
                uid: 0,
                gid: 0,
                links: 1,
                accessed: time,
                modified: time,
                changed: time,
                quota: None,
            };
            let row = InodeRow { end_max: u64::MAX, ..InodeRow::new(inode) };
            let before = (&row.inode, &row.name, true, false, row.metadata_bytes, row.end_max);
            let before = postcard::to_allocvec(&before).unwrap();
            let row = InodeRow { charged_end: counted, ..row };
            assert_eq!(InodeRow::decode(b"INOD", &before).unwrap(), row);
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(InodeRow::decode(b"INOD", &now).unwrap(), row);
        }
    }

    #[test]
    fn sessions_of_earlier_releases_are_read_and_count_for_nothing() {
        for client in [ClientId(0), ClientId(7), ClientId(u128::MAX)] {
            let before = postcard::to_allocvec(&client).unwrap();
            let row = SessionRow::decode(b"INOS", &before).unwrap();
            assert_eq!(row, SessionRow { client, counted: false });
            let row = SessionRow { client, counted: true };
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(SessionRow::decode(b"INOS", &now).unwrap(), row);
        }
    }
}
