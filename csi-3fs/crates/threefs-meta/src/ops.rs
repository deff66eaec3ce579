//! Operations on the tree, one per file. Each is a pure function of one transaction and its inputs
//! (time, new ids, layouts), without other effects, so it can be repeated.
//!
//! Rules that keep the tree consistent under concurrency:
//! - Adding a name reads the directory's inode. Removing a directory reads that it is empty and
//!   clears its inode. Two such transactions conflict.
//! - Moving a directory reads every ancestor of its new location and writes the moved directory's
//!   inode. Two moves that would form a cycle conflict.
//! - Entries of one directory do not conflict with each other: its change time and its count of
//!   subdirectories have separate rows that are written without being read.

mod attributes;
mod audit;
mod dedup;
mod detach;
mod epoch;
mod file;
mod gc;
mod history;
mod holds;
mod init;
pub(crate) mod locks;
mod lookup;
mod names;
mod namespace;
mod quota;
mod registration;
mod repair;
mod scope;
mod services;
mod snapshots;
mod trash;
pub(crate) mod view;
mod volume;

pub(crate) use attributes::set_attributes::SetAttributes;
pub(crate) use attributes::xattr::{GetAttribute, ListAttributes, SetAttribute};
pub(crate) use audit::{AuditFiles, AuditNames, AuditShown, AuditUnknown, AuditWritten, NAMES_MAX};
pub(crate) use dedup::Dedup;
pub(crate) use dedup::answers::AnswerBudget;
pub(crate) use epoch::{Epochs, HasSnapshots};
pub(crate) use file::length::{ReportLengths, Reserve};
pub(crate) use file::session::{Close, EndSession};
pub(crate) use file::trim::{FinishTrim, ReadTrim, StartTrim};
pub(crate) use gc::{
    ChargeOpen, ClearRows, DirectoryState, DropTombstones, EmptyDirectory, FinishRemovals,
    ForgetAnswers, ListRemovals, ListRows, ListedRemoval, MarkDead, PublishActivity, ReadActivity,
    RemovalState, Revive,
};
pub(crate) use history::refuse_snapshot;
pub(crate) use holds::{ClearHolds, ListHolds, ListRemoved, ReleaseFormer, Removed, SetHolds};
pub(crate) use init::{InitTree, ReserveInodes};
pub(crate) use namespace::create::{Create, Layouts, Open, SessionRequest, Symlink};
pub(crate) use namespace::directory::{MakeDirectory, count_names};
pub(crate) use namespace::link::Link;
pub(crate) use namespace::query::{CountRows, List, OpenInode, PathOf, Stat, StatChunks, StatMany};
pub(crate) use namespace::remove::{RemoveDirectory, RemoveTree, Unlink};
pub(crate) use namespace::rename::Rename;
pub(crate) use namespace::special::MakeSpecial;
pub(crate) use registration::{
    FinishRegistration, LatestRegistration, StartRegistration, WriteClaim,
};
pub(crate) use repair::{Repair, StartRepair};
pub(crate) use scope::{PartitionByScope, ScopePartition, Terms, outside};
pub(crate) use services::{
    CheckService, EndRound, EndedRound, Fenced, Join, Lead, ListServices, RemoveService, Renew,
    Renewed,
};
pub(crate) use snapshots::{
    AbortSnapshot, CurrentFence, DropHistory, ListCreations, ListFences, ListSnapshots,
    MakeSnapshot, NextRemoved, RaiseEpochs, RemoveSnapshot, StartSnapshot, Started,
};
pub(crate) use trash::{
    Expire as ExpireTrash, KeepRemoved, ListTrash, NextTrash, Purge as PurgeRemoved,
    Restore as RestoreRemoved,
};
pub(crate) use volume::recount::{ListRecounts, Recount, RecountEntry, RestartRecountWait};
pub(crate) use volume::set_quota::{Quotas, SetQuota};

use dedup::answers;

use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, KvError, Retry, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::identity::Identity;
use crate::permission::SET_GROUP;
use crate::protocol::{Inode, InodeKind, MetaError, Nanoseconds, Written};
use crate::rows::history as keys;
use crate::rows::{self, DentryRow, InodeRow, RemovalRow, Uptime};

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OpError {
    /// Refused; the caller gets the error.
    #[error(transparent)]
    Refused(#[from] MetaError),
    /// The store failed.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A truncation of this file must be completed first.
    #[error("{0} is being truncated")]
    TrimPending(InodeId),
    /// This lock session of the client must end first.
    #[error("lock session {1} of client {0} has not ended yet")]
    LockSession(ClientId, u64),
    /// Another client holds the append lease of this file.
    #[error("another client appends to {0}")]
    AppendLease(InodeId),
    /// Another service is the collector.
    #[error("another metadata service collects garbage")]
    NotCollector,
}

impl Retry for OpError {
    fn retryable_conflict(&self) -> bool {
        match self {
            // A snapshot was made meanwhile.
            Self::Kv(KvError::OverBound { key, .. }) if key.starts_with(keys::EPOCHS) => true,
            Self::Kv(error) => error.retryable(),
            _ => false,
        }
    }

    fn describe(&self) -> String {
        self.to_string()
    }
}

impl From<OpError> for MetaError {
    fn from(error: OpError) -> Self {
        match error {
            OpError::Refused(error) => error,
            OpError::TrimPending(_)
            | OpError::LockSession(..)
            | OpError::AppendLease(_)
            | OpError::NotCollector => Self::Unavailable { detail: error.to_string() },
            OpError::Kv(error) => match error {
                KvError::NoSpace { .. } => Self::NoSpace { detail: error.to_string() },
                KvError::OverBound { key, value, delta, max } => match key.get(..4) {
                    Some(rows::FLOORS) => dedup::finished(max.unsigned_abs()),
                    Some(rows::ANSWER_BYTES) => answers::full(&key, value, delta, max),
                    Some(rows::LOCK_COUNTS) => locks::over_bound(max),
                    Some(keys::EPOCHS) => Self::Unavailable {
                        detail: "snapshots of the volume are made too often".into(),
                    },
                    _ => quota::exceeded(&key, value, delta, max),
                },
                KvError::BadRow { .. } => Self::Damaged { detail: error.to_string() },
                KvError::TooLarge { what, size, .. } => Self::Invalid {
                    field: what.into(),
                    value: size.to_string(),
                    reason: error.to_string(),
                },
                _ => Self::Unavailable { detail: error.to_string() },
            },
        }
    }
}

/// Inputs of an operation that are not in the store. They are drawn before the transaction, so that
/// a repetition gives the same result.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// The wall-clock time.
    pub now: Nanoseconds,
    /// The same time on the boot-time clock.
    pub uptime: Uptime,
    /// Whether bytes that are no longer needed may become excess.
    pub excess_allowed: bool,
    /// The first of the unused inode numbers that are reserved for the operation.
    pub first_inode: InodeId,
    /// Set if the store is too full for further rows of sessions and written chunks.
    pub full: Option<MetaError>,
}

/// Inputs of operations that queue files for a recount.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecountContext {
    pub now: Uptime,
    /// Whether bytes that are no longer needed may become excess.
    pub excess_allowed: bool,
}

impl Inputs {
    pub(crate) fn recount_context(&self) -> RecountContext {
        RecountContext { now: self.uptime, excess_allowed: self.excess_allowed }
    }
}

impl OpError {
    /// Concurrent changes used up the room for excess: repeat with `excess_allowed` = false.
    pub(crate) fn is_over_excess(&self) -> bool {
        matches!(self, Self::Kv(KvError::OverBound { key, .. })
            if key.starts_with(rows::QUOTA_EXCESS))
    }
}

/// The inode, or `NotFound` with the path that the caller used.
pub(crate) async fn load(
    txn: &mut Transaction,
    id: InodeId,
    path: &str,
) -> Result<InodeRow, OpError> {
    let row = view::inode(txn, id).await?;
    row.filter(|row| !row.dead).ok_or_else(|| not_found(path, id))
}

/// The inode that an entry refers to; the tree is damaged without it.
pub(crate) async fn load_named(
    txn: &mut Transaction,
    entry: DentryRow,
    path: &str,
) -> Result<InodeRow, OpError> {
    let row = view::inode(txn, entry.inode).await?;
    row.ok_or_else(|| {
        let detail = format!("`{path}` names {}, which does not exist", entry.inode);
        MetaError::Damaged { detail }.into()
    })
}

/// Writes an inode with a new version.
pub(crate) async fn store(txn: &mut Transaction, row: &mut InodeRow) -> Result<(), OpError> {
    history::keep_inode(txn, row).await?;
    row.inode.version += 1;
    Ok(row.write(txn)?)
}

/// Sets the change time of a directory's entries.
pub(crate) async fn touch(
    txn: &mut Transaction,
    directory: InodeId,
    now: Nanoseconds,
) -> Result<(), OpError> {
    history::keep_directory(txn, directory).await?;
    txn.set(&rows::directory_time(directory), now.0.to_le_bytes());
    Ok(())
}

/// Adds to the count of subdirectories: each has a `..` that links to the directory. Added without
/// a read, like the change time, so that creations do not conflict.
pub(crate) async fn count_subdirectories(
    txn: &mut Transaction,
    directory: InodeId,
    more: i64,
) -> Result<(), OpError> {
    history::keep_directory(txn, directory).await?;
    txn.atomic_add(&rows::subdirectories(directory), more);
    Ok(())
}

/// An inode as callers see it, with the directory's change time and link count.
pub(crate) async fn visible(txn: &mut Transaction, row: InodeRow) -> Result<Inode, OpError> {
    let mut inode = row.inode;
    if inode.is_directory() && view::split(inode.id).is_none() {
        let key = rows::directory_time(inode.id);
        if let Some(bytes) = txn.snapshot_get(&key).await? {
            let bytes = bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a time"))?;
            let entries_changed = Nanoseconds(i64::from_le_bytes(bytes));
            inode.modified = inode.modified.max(entries_changed);
            inode.changed = inode.changed.max(entries_changed);
        }
        if inode.links != 0 {
            let key = rows::subdirectories(inode.id);
            if let Some(bytes) = txn.snapshot_get(&key).await? {
                let bytes = bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a count"))?;
                let count = u32::try_from(i64::from_le_bytes(bytes)).unwrap_or_default();
                inode.links = inode.links.saturating_add(count);
            }
        }
    }
    Ok(inode)
}

/// Removes one name of a file or symbolic link; the last one queues it for garbage collection. An
/// open file counts for its quota until it is collected.
pub(crate) async fn drop_link(
    txn: &mut Transaction,
    mut row: InodeRow,
    name: &str,
    now: Nanoseconds,
    open_files: &OpenFiles,
) -> Result<(), OpError> {
    row.inode.links = row.inode.links.saturating_sub(1);
    row.inode.changed = now;
    if row.inode.links == 0 {
        history::keep_inode(txn, &mut row).await?;
        row.parked = history::has_formers(txn, row.inode.id).await?;
        if !row.parked {
            queue_removed(txn, &mut row, open_files).await?;
        }
    }
    // Part of what has been released.
    quota::charge_metadata(txn, &mut row, -quota::name_bytes(name)).await?;
    store(txn, &mut row).await
}

/// Queues a file, symbolic link or special file without a name for garbage collection. The caller
/// stores it.
pub(crate) async fn queue_removed(
    txn: &mut Transaction,
    row: &mut InodeRow,
    open_files: &OpenFiles,
) -> Result<(), OpError> {
    let sessions = KeyRange::prefix(&rows::sessions(row.inode.id));
    let opened_by = open_files.clients_with_open(row.inode.id);
    let open = !opened_by.is_empty() || !txn.range(&sessions, 1).await?.is_empty();
    if row.charged && !open {
        quota::release(txn, row).await?;
        row.charged = false;
    }
    let removal = RemovalRow {
        inode: row.inode.id,
        kind: row.kind(),
        run_id: open_files.run_id(),
        opened_by,
    };
    queue(txn, rows::REMOVALS, &removal).await
}

/// Adds a removal to the current round of a garbage collection queue. It conflicts with the end of
/// the round: after that, nothing is added to it.
pub(crate) async fn queue(
    txn: &mut Transaction,
    queue: &[u8],
    row: &RemovalRow,
) -> Result<(), OpError> {
    let round = rows::round(txn).await?;
    let key = [queue, &round.to_be_bytes(), &row.inode.0.to_be_bytes()].concat();
    Ok(rows::write(txn, &key, row)?)
}

pub(crate) fn not_found(path: &str, id: InodeId) -> OpError {
    let path = if path.is_empty() { id.to_string() } else { path.into() };
    MetaError::NotFound { path }.into()
}

/// The creator and the location of a new inode, which determine its attributes.
pub(crate) struct NewInode<'a> {
    pub caller: &'a Identity,
    pub parent: &'a Inode,
    pub inputs: &'a Inputs,
    pub mode: u32,
}

impl NewInode<'_> {
    pub(crate) fn file(&self, id: InodeId, layout: Layout) -> InodeRow {
        let kind = InodeKind::File {
            layout,
            length: 0,
            reserved: 0,
            truncate_version: 0,
            content: 0,
            written: Written::default(),
        };
        self.inode(id, 1, kind)
    }

    /// As on Linux: in a directory with the set-group bit the inode gets the directory's group, and
    /// a new directory gets the bit as well.
    pub(crate) fn inode(&self, id: InodeId, links: u32, kind: InodeKind) -> InodeRow {
        let now = self.inputs.now;
        let inherits = self.parent.mode & SET_GROUP != 0;
        let mut mode = self.mode & 0o7777;
        if inherits && matches!(kind, InodeKind::Directory { .. }) {
            mode |= SET_GROUP;
        }
        let inode = Inode {
            id,
            version: 0,
            kind,
            mode,
            uid: self.caller.uid,
            gid: if inherits { self.parent.gid } else { self.caller.gid },
            links,
            accessed: now,
            modified: now,
            changed: now,
            quota: self.parent.quota,
        };
        // Writers of a file without a quota need not reserve.
        let end_max = if inode.quota.is_some() { 0 } else { u64::MAX };
        let mut row = InodeRow::new(inode);
        row.end_max = end_max;
        row
    }
}
