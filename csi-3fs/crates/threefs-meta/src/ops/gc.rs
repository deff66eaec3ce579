//! What the collector does to the store: gives back what was removed.

use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Row, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::ops::dedup::answers;
use crate::ops::file::written_rows;
use crate::ops::namespace::remove::{clear_directory, detach_tree};
use crate::ops::volume::quota;
use crate::ops::volume::quota::Charge;
use crate::ops::{OpError, drop_link, load_named, queue, store};
use crate::protocol::{EntryKind, InodeKind, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow, RemovalRow};
use crate::written::Written;

/// Names that one transaction takes out of a removed directory.
const NAMES_PER_TRANSACTION: usize = 256;

/// One entry of a queue.
#[derive(Clone, Debug)]
pub(crate) struct ListedRemoval {
    pub key: Vec<u8>,
    pub row: RemovalRow,
    pub state: RemovalState,
}

/// What stands in the way of a removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RemovalState {
    /// The chunks of a file that nobody has open, none at or beyond `end`.
    Chunks { layout: Layout, end: u64 },
    /// Somebody has it open; whether it counts for its quota.
    InUse { charged: bool },
    /// Only rows.
    Rows,
}

/// One page of a queue, oldest first: what was queued by the commits up to a version.
pub(crate) struct ListRemovals<'a> {
    pub queue: &'static [u8],
    pub until: u64,
    pub open_files: &'a OpenFiles,
    pub after: &'a [u8],
    pub limit: usize,
}

impl Operation for ListRemovals<'_> {
    type Output = Vec<ListedRemoval>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let end = [self.queue, &self.until.saturating_add(1).to_be_bytes()].concat();
        let mut range = KeyRange::new(self.queue, end);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        let mut listed = Vec::new();
        for (key, value) in txn.snapshot_range(&range, self.limit).await? {
            let row: RemovalRow = rows::decode(&key, &value)?;
            let state = state_of(txn, self.queue, &row, self.open_files).await?;
            listed.push(ListedRemoval { key, row, state });
        }
        Ok(listed)
    }
}

async fn state_of(
    txn: &mut Transaction,
    queue: &[u8],
    removal: &RemovalRow,
    open_files: &OpenFiles,
) -> Result<RemovalState, OpError> {
    let id = removal.inode;
    let Some(row) = rows::read_inode(txn, id).await? else {
        return Ok(RemovalState::Rows);
    };
    let InodeKind::File { layout, .. } = row.inode.kind else { return Ok(RemovalState::Rows) };
    if queue == rows::TOMBSTONES {
        return Ok(RemovalState::Chunks { layout, end: row.end_max });
    }
    if open_files.is_open(id) || open_files.may_be_open(removal) {
        return Ok(RemovalState::InUse { charged: row.charged });
    }
    let sessions = txn.range(&KeyRange::prefix(&rows::sessions(id)), 1).await?;
    if !sessions.is_empty() {
        return Ok(RemovalState::InUse { charged: row.charged });
    }
    Ok(RemovalState::Chunks { layout, end: row.end_max })
}

/// The newest version that a transaction sees.
pub(crate) struct NewestVersion;

impl Operation for NewestVersion {
    type Output = u64;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<u64, OpError> {
        Ok(txn.read_version())
    }
}

/// Ends the life of removed files that nobody has open, before any of their chunks goes: from this
/// commit on a read of one of them finds no inode, so it cannot take what is gone for a hole.
/// Returns how many there were.
pub(crate) struct MarkDead<'a> {
    pub removals: &'a [&'a ListedRemoval],
    pub open_files: &'a OpenFiles,
}

impl Operation for MarkDead<'_> {
    type Output = usize;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<usize, OpError> {
        let mut marked = 0;
        for removal in self.removals {
            let state = state_of(txn, rows::REMOVALS, &removal.row, self.open_files).await?;
            if !matches!(state, RemovalState::Chunks { .. }) {
                continue;
            }
            let id = removal.row.inode;
            let Some(mut row) = rows::read_inode(txn, id).await? else { continue };
            row.dead = true;
            store(txn, &mut row)?;
            txn.clear(&removal.key);
            queue(txn, rows::DEAD, &removal.row)?;
            marked += 1;
        }
        Ok(marked)
    }
}

/// Charges removed files again that a client reported as open only after their last name was removed.
/// Limits are not checked: the chunks exist.
pub(crate) struct ChargeOpen<'a>(pub &'a [&'a ListedRemoval]);

impl Operation for ChargeOpen<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for removal in self.0 {
            let row = rows::read_inode(txn, removal.row.inode).await?;
            if let Some(mut row) = row.filter(|row| !row.charged && !row.dead) {
                row.charged = true;
                row.excess = 0;
                quota::charge_unbounded(txn, row.inode.quota, Charge::of(&row)).await?;
                store(txn, &mut row)?;
            }
        }
        Ok(())
    }
}

/// Takes back [`MarkDead`]: somebody who may have it open was heard meanwhile.
pub(crate) struct Revive<'a>(pub &'a ListedRemoval);

impl Operation for Revive<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        txn.clear(&self.0.key);
        if let Some(mut row) = rows::read_inode(txn, self.0.row.inode).await? {
            row.dead = false;
            store(txn, &mut row)?;
            queue(txn, rows::REMOVALS, &self.0.row)?;
        }
        Ok(())
    }
}

/// The chunks are gone: takes the last rows of files, symbolic links and special files. No session
/// can have begun since: what is dead or never was a file cannot be opened. A file in a quota keeps
/// its inode: holders of tickets may have capabilities for it, and storage bounds how many forgotten
/// files it remembers, so it is asked to forget the file once more after their life. These rows count
/// for nothing, so they are as few and as short as they can be.
pub(crate) struct FinishRemovals<'a>(pub &'a [ListedRemoval]);

impl Operation for FinishRemovals<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for removal in self.0 {
            let id = removal.row.inode;
            let row = rows::read_inode(txn, id).await?;
            if let Some(row) = row.as_ref().filter(|row| row.charged) {
                quota::release(txn, row).await?;
            }
            // No capability was ever good for a byte of a file that never had one.
            let late = |row: &InodeRow| row.dead && row.inode.quota.is_some() && row.end_max > 0;
            match row.filter(late) {
                Some(mut row) => {
                    if let InodeKind::File { written, .. } = &mut row.inode.kind {
                        *written = Written::default();
                    }
                    row.charged = false;
                    row.metadata_bytes = 0;
                    store(txn, &mut row)?;
                    queue(txn, rows::TOMBSTONES, &removal.row)?;
                }
                None => txn.clear(&rows::inode(id)),
            }
            txn.clear_range(KeyRange::prefix(&rows::attributes(id)));
            txn.clear(&rows::trim(id));
            txn.clear(&rows::recount(id));
            written_rows::clear(txn, id);
            txn.clear(&removal.key);
        }
        Ok(())
    }
}

/// Storage has forgotten files twice: takes their inodes.
pub(crate) struct DropTombstones<'a>(pub &'a [ListedRemoval]);

impl Operation for DropTombstones<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for removal in self.0 {
            txn.clear(&rows::inode(removal.row.inode));
            txn.clear(&removal.key);
        }
        Ok(())
    }
}

/// Takes some names out of a removed directory; true once the directory itself is gone.
pub(crate) struct EmptyDirectory<'a> {
    pub removal: &'a ListedRemoval,
    pub open_files: &'a OpenFiles,
    pub now: Nanoseconds,
}

impl Operation for EmptyDirectory<'_> {
    type Output = bool;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<bool, OpError> {
        let directory = self.removal.row.inode;
        let names = KeyRange::prefix(&rows::dentries(directory));
        let page = txn.range(&names, NAMES_PER_TRANSACTION).await?;
        for (key, value) in &page {
            let entry: DentryRow = rows::decode(key, value)?;
            let row = load_named(txn, entry, "(removed)").await?;
            match entry.kind {
                EntryKind::Directory => detach_tree(txn, row, self.now).await?,
                _ => {
                    let name = key.get(names.start.len()..).unwrap_or_default();
                    let name = String::from_utf8_lossy(name).into_owned();
                    drop_link(txn, row, &name, self.now, self.open_files).await?;
                }
            }
            txn.clear(key);
        }
        if page.len() < NAMES_PER_TRANSACTION {
            clear_directory(txn, directory);
            txn.clear(&self.removal.key);
            return Ok(true);
        }
        Ok(false)
    }
}

/// Rows under a prefix, page by page, for the sweeps.
pub(crate) struct ListRows<'a> {
    pub prefix: &'a [u8],
    pub after: &'a [u8],
    pub limit: usize,
}

impl Operation for ListRows<'_> {
    type Output = Vec<Row>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Vec<Row>, OpError> {
        let mut range = KeyRange::prefix(self.prefix);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        Ok(txn.snapshot_range(&range, self.limit).await?)
    }
}

/// Forgets answers that nobody will ask for.
pub(crate) struct ForgetAnswers<'a>(pub &'a [Vec<u8>]);

impl Operation for ForgetAnswers<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for key in self.0 {
            answers::forget(txn, key).await?;
        }
        Ok(())
    }
}
