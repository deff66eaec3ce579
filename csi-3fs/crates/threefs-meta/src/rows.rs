//! Rows of the metadata store.
//!
//! | key | value | content |
//! |---|---|---|
//! | `INOD` inode | `InodeRow` | a file, directory or symbolic link |
//! | `DENT` parent name | `DentryRow` | a name in a directory |
//! | `DTIM` inode | i64 | last change of a directory's entries; written without a read, so that creations in one directory do not conflict |
//! | `DSUB` inode | i64 | number of subdirectories; added to without a read |
//! | `INOS` inode session | `SessionRow` | a write session |
//! | `TRIM` inode | `TrimRow` | a truncation whose chunks are not cut yet |
//! | `RCNT` inode | `RecountRow` | a file that is charged for more than its length and reservation, to be recounted |
//! | `GCQU` round inode | `RemovalRow` | a removed inode that may still be open |
//! | `GCDE` round inode | `RemovalRow` | a dead file: unreadable, its chunks are dropped next |
//! | `GCLA` round inode | `RemovalRow` | tombstone: a dead file without chunks, for which a capability may still be valid |
//! | `IDEM` client sequence | `AnswerRow` | an executed change and its answer |
//! | `FINI` client | i64 | changes of the client with a lower sequence are finished: refused if they have no answer; written by bounded additions only |
//! | `ABYT` directory | i64 | bytes of the answers kept for tickets of a directory; directory 0: the total |
//! | `QUOT` directory | `QuotaRow` | limits of a directory, and how long its removed files are kept |
//! | `QBYT`, `QEXC`, `QINO`, `QMET` directory | i64 | usage of these limits; written by bounded additions only |
//! | `TRSH` volume time inode | `TrashRow` | a removed file or directory that can be restored |
//! | `TRDI` inode | `TrashedDirectoryRow` | where a removed directory is in a trash |
//! | `WRIT` inode level page | `Page` | written chunks beyond the ranges in the inode |
//! | `XATT` inode name | bytes | an extended attribute |
//! | `HOLD` inode run | `HoldRow` | a removed file that clients of a service have open |
//! | `SERV` run | `ServiceRow` | a running service |
//! | `SFUN` run | – | a running service that knows snapshots |
//! | `SEEN` client | `Uptime` | the last published activity of a client |
//! | `LOCK` inode | `FileLocks` | the locks of a file, held and waited for |
//! | `LAPP` inode | `FileLocks` | the append lease of a file, held and waited for |
//! | `LREC` client inode | – | an append lease that others wait for |
//! | `LSES` client | `LockSessionRow` | the lock session of a client |
//! | `LOWN` client kind owner inode | – | a file in which an owner holds or waits for locks |
//! | `LCNT` directory | i64 | rows `LSES` and `LOWN` of a volume's clients; directory 0: of holders of the cluster key |
//! | `SN…`, `SNAP`, `H…` | see [`history`] | snapshots and their history |
//! | `METAcollector` | `CollectorRow` | the service that collects garbage |
//! | `OWNR` | see `threefs_kv::Owner` | the keys of the cluster that owns the store |
//! | `META` name | u64 | the next free inode, the schema version, the generation of the store, the round of the removal queues |
//! | `METAtree`, `METAcluster`, `METAprocess` | u128 | ids of the tree, of its cluster, and of the service that started last |
//! | `METArepair` | `RepairRow` | the repair of counters that started last |
//! | `METAclaim` | `Claim` | why the store may differ from the one registered with mgmtd |
//!
//! Numbers in keys are big endian, so that files created together are adjacent. Values are
//! postcard.

mod floors;
pub(crate) mod history;
mod keys;
mod locks;
mod names;
mod quota_row;
mod services;
mod trash;

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};
pub(crate) use threefs_kv::rows::{decode, read, write};
use threefs_kv::{KvError, Transaction};

pub(crate) use floors::{raise_floor, require_floor};
pub(crate) use keys::*;
pub(crate) use locks::LockSessionRow;
pub(crate) use names::DentryRow;
pub(crate) use quota_row::{QuotaRow, read_quota};
pub(crate) use services::*;
pub(crate) use trash::*;

use crate::protocol::{EntryKind, Inode, InodeKind, Nanoseconds};

pub(crate) const INODES: &[u8] = b"INOD";
pub(crate) const NAMES: &[u8] = b"DENT";
pub(crate) const REMOVALS: &[u8] = b"GCQU";
pub(crate) const DEAD: &[u8] = b"GCDE";
pub(crate) const TOMBSTONES: &[u8] = b"GCLA";
pub(crate) const ANSWERS: &[u8] = b"IDEM";
pub(crate) const FLOORS: &[u8] = b"FINI";
pub(crate) const SESSIONS: &[u8] = b"INOS";
pub(crate) const TRIMS: &[u8] = b"TRIM";
pub(crate) const RECOUNTS: &[u8] = b"RCNT";
pub(crate) const LOCK_SESSIONS: &[u8] = b"LSES";
pub(crate) const LOCKED: &[u8] = b"LOWN";
pub(crate) const LOCKS: &[u8] = b"LOCK";
pub(crate) const APPENDS: &[u8] = b"LAPP";
pub(crate) const RECALLS: &[u8] = b"LREC";
pub(crate) const LOCK_COUNTS: &[u8] = b"LCNT";
pub(crate) const TRASH: &[u8] = b"TRSH";
pub(crate) const NEXT_INODE: &[u8] = b"METAnext-inode";
pub(crate) const TREE: &[u8] = b"METAtree";
pub(crate) const GENERATION: &[u8] = b"METAgeneration";
pub(crate) const PROCESS: &[u8] = b"METAprocess";
/// The id of the cluster.
pub const CLUSTER: &[u8] = b"METAcluster";
pub(crate) const CLAIM: &[u8] = b"METAclaim";
pub(crate) const REPAIR: &[u8] = b"METArepair";
pub(crate) const SCHEMA: &[u8] = b"METAschema";
pub(crate) const QUOTA_EXCESS: &[u8] = b"QEXC";
pub(crate) const QUOTA_INODES: &[u8] = b"QINO";
pub(crate) const QUOTA_METADATA: &[u8] = b"QMET";
/// Stands for all volumes together.
pub(crate) const ALL_VOLUMES: InodeId = InodeId(0);
pub(crate) const ANSWER_BYTES: &[u8] = b"ABYT";
/// Size of an answer row without its reply.
const ANSWER_ROW_BYTES: usize = 128;
/// The schema that this code reads and writes.
pub(crate) const SCHEMA_VERSION: u64 = 7;
/// The schema once a snapshot was created: services of earlier releases would lose the epochs of rows.
pub(crate) const SCHEMA_WITH_SNAPSHOTS: u64 = 8;
/// The previous schemas, whose rows this code reads: inodes without `charged_end` and `excess` (5),
/// removals with a version in place of the round (6).
pub(crate) const SCHEMAS_PREVIOUS: RangeInclusive<u64> = 5..=6;

/// Parent of a removed directory that is being emptied.
pub(crate) const REMOVED: InodeId = InodeId(0);

/// A stored inode. For a directory, its `DTIM` row overrides `inode.modified`, and `inode.links`
/// lacks the count in its `DSUB` row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InodeRow {
    pub inode: Inode,
    /// The name of a directory in its parent, for its path; otherwise empty.
    pub name: String,
    /// Whether it counts for its quota. An inode that was closed when it lost its last name does
    /// not.
    pub charged: bool,
    /// Set before the chunks of a removed file are dropped: from then on the file cannot be read,
    /// so a dropped chunk cannot be mistaken for a hole.
    pub dead: bool,
    /// Bytes of its names, extended attributes, link target and write sessions, as charged to the
    /// quota.
    pub metadata_bytes: u64,
    /// The file has no chunk at or beyond this byte; `u64::MAX` if writers need not reserve.
    pub end_max: u64,
    /// Bytes of a file below this one are charged to its quota. At least `needed_end`, and at least
    /// the end of every capability that may still be valid; see `ops::volume::recount`.
    pub charged_end: u64,
    /// Charged bytes that count as excess rather than as used.
    pub excess: u64,
    /// The epoch of the volume in which it got this state.
    #[serde(skip)]
    pub since: u32,
    /// It has no name, and is not queued for garbage collection because snapshots show it.
    #[serde(skip)]
    pub parked: bool,
}

/// A file that is charged for more than its length and reservation, because older capabilities may
/// still be valid. It is recounted when they have expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecountRow {
    /// The last decrease of its length or reservation, in the run of the service that made it.
    pub since: Uptime,
}

/// A time in one run of the service. Times of different runs cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Uptime {
    pub run_id: u64,
    pub ms: u64,
}

/// The repair of counters that started last; see `ops::repair`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RepairRow {
    pub repair: u64,
    pub next_step: u64,
}

fn encode<T: Serialize>(key: &[u8], row: &T) -> Result<Vec<u8>, KvError> {
    postcard::to_allocvec(row)
        .map_err(|error| KvError::bad_row(key, format!("cannot be encoded: {error}")))
}

fn take<'a, T: Deserialize<'a>>(key: &[u8], value: &'a [u8]) -> Result<(T, &'a [u8]), KvError> {
    postcard::take_from_bytes(value).map_err(|error| KvError::bad_row(key, error.to_string()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRow {
    pub client: ClientId,
    /// Whether it is charged to its file's quota: rows of earlier releases are not.
    pub charged: bool,
}

impl SessionRow {
    /// Decodes a row of this release or of an earlier one, which ends after the client.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| Ok(Self { client: decode(key, value)?, charged: false }))
    }
}

/// A pending truncation: no byte at or beyond `length` may stay. Until it is complete the file
/// cannot be opened for writing, because the new bytes would be cut as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrimRow {
    pub length: u64,
    pub truncate_version: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemovalRow {
    pub inode: InodeId,
    pub kind: EntryKind,
    /// The run of the service that removed it.
    pub run_id: u64,
    /// Its clients that had it open at that time. If the service is gone before it has checked the
    /// removal, another one stores a hold for them.
    pub opened_by: Vec<ClientId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AnswerRow {
    pub answered_at: Nanoseconds,
    /// The encoded `MetaReply`; for a batch, the files that it changed.
    pub reply: Vec<u8>,
    /// The volume of the caller's ticket, which the row counts for; `None` for the cluster key.
    pub volume: Option<InodeId>,
    pub batch: bool,
}

impl AnswerRow {
    /// Decodes a row of this release or of an earlier one, which ends after the reply.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        decode(key, value).or_else(|_| {
            let (answered_at, reply) = decode(key, value)?;
            Ok(Self { answered_at, reply, volume: None, batch: false })
        })
    }

    /// The charge of the row.
    pub(crate) fn bytes(&self) -> i64 {
        // An answer is not longer than a value of the store.
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
        Self {
            inode,
            name,
            charged,
            dead,
            metadata_bytes,
            end_max,
            charged_end: 0,
            excess: 0,
            since: 0,
            parked: false,
        }
    }

    /// Decodes a row of this release or of an earlier one, which ends after `end_max`: there a file
    /// was charged for its length or reservation.
    pub(crate) fn decode(key: &[u8], value: &[u8]) -> Result<Self, KvError> {
        let Ok((mut row, rest)) = take::<Self>(key, value) else {
            let (inode, name, charged, dead, metadata_bytes, end_max) = decode(key, value)?;
            let mut row = Self { name, charged, dead, metadata_bytes, end_max, ..Self::new(inode) };
            row.charged_end = row.needed_end();
            return Ok(row);
        };
        if !rest.is_empty() {
            (row.since, row.parked) = decode(key, rest)?;
        }
        Ok(row)
    }

    /// Writes the row. Without an epoch it is as in releases without snapshots.
    pub(crate) fn write(&self, txn: &mut Transaction) -> Result<(), KvError> {
        let key = inode(self.inode.id);
        let value = match (self.since, self.parked) {
            (0, false) => encode(&key, self),
            epoch => encode(&key, &(self, epoch)),
        };
        txn.set(&key, value?);
        Ok(())
    }

    /// End of the bytes that the file needs: its length or its reservation, whichever is greater.
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

    /// The parent of a directory.
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
    fn answers_of_earlier_releases_are_decoded_and_not_charged() {
        for reply in [vec![], vec![7; 300]] {
            let answered_at = Nanoseconds(-5);
            let before = postcard::to_allocvec(&(answered_at, reply.clone())).unwrap();
            let row = AnswerRow { answered_at, reply, volume: None, batch: false };
            assert_eq!(AnswerRow::decode(b"IDEM", &before).unwrap(), row);
            let row = AnswerRow { volume: Some(InodeId(u64::MAX)), batch: true, ..row };
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(AnswerRow::decode(b"IDEM", &now).unwrap(), row);
        }
    }

    #[test]
    fn inodes_of_earlier_releases_are_decoded_with_their_charge() {
        let layout = threefs_core::layout::Layout {
            table: threefs_core::ids::TableId(1),
            table_version: threefs_core::ids::TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 1,
            chains: threefs_core::layout::ChainChoice::Range { base: 0, seed: 0 },
        };
        for (length, reserved, needed_end) in [(0, 0, 0), (300, 0, 300), (300, u64::MAX, u64::MAX)]
        {
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
            let row = InodeRow { charged_end: needed_end, ..row };
            assert_eq!(InodeRow::decode(b"INOD", &before).unwrap(), row);
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(InodeRow::decode(b"INOD", &now).unwrap(), row);
        }
    }

    #[test]
    fn sessions_of_earlier_releases_are_decoded_and_not_charged() {
        for client in [ClientId(0), ClientId(7), ClientId(u128::MAX)] {
            let before = postcard::to_allocvec(&client).unwrap();
            let row = SessionRow::decode(b"INOS", &before).unwrap();
            assert_eq!(row, SessionRow { client, charged: false });
            let row = SessionRow { client, charged: true };
            let now = postcard::to_allocvec(&row).unwrap();
            assert_eq!(SessionRow::decode(b"INOS", &now).unwrap(), row);
        }
    }
}
