//! What the collector does to the store: gives back what was removed.

use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Row, Transaction};

use super::remove::{clear_directory, detach_tree};
use super::{OpError, drop_link, load_named, quota};
use crate::holds::Holds;
use crate::protocol::{EntryKind, InodeKind, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow, REMOVALS, RemovalRow};

/// Names that one transaction takes out of a removed directory.
const NAMES_PER_TRANSACTION: usize = 256;

/// One entry of the queue.
#[derive(Clone, Debug)]
pub(crate) struct ListedRemoval {
    pub key: Vec<u8>,
    pub row: RemovalRow,
    pub state: RemovalState,
}

/// What stands in the way of a removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RemovalState {
    /// The chunks of a file without sessions.
    Chunks(Layout),
    /// Somebody still writes.
    InUse,
    /// Only rows.
    Rows,
}

/// One page of the queue, oldest first.
pub(crate) struct ListRemovals<'a> {
    pub holds: &'a Holds,
    pub after: &'a [u8],
    pub limit: usize,
}

impl Operation for ListRemovals<'_> {
    type Output = Vec<ListedRemoval>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut range = KeyRange::prefix(REMOVALS);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        let mut listed = Vec::new();
        for (key, value) in txn.snapshot_range(&range, self.limit).await? {
            let row: RemovalRow = rows::decode(&key, &value)?;
            let state = state_of(txn, row.inode, self.holds).await?;
            listed.push(ListedRemoval { key, row, state });
        }
        Ok(listed)
    }
}

async fn state_of(
    txn: &mut Transaction,
    id: InodeId,
    holds: &Holds,
) -> Result<RemovalState, OpError> {
    let Some(row) = rows::read::<InodeRow>(txn, &rows::inode(id)).await? else {
        return Ok(RemovalState::Rows);
    };
    let InodeKind::File { layout, .. } = row.inode.kind else { return Ok(RemovalState::Rows) };
    if holds.is_held(id) {
        return Ok(RemovalState::InUse);
    }
    let sessions = txn.range(&KeyRange::prefix(&rows::sessions(id)), 1).await?;
    Ok(if sessions.is_empty() { RemovalState::Chunks(layout) } else { RemovalState::InUse })
}

/// The chunks are gone: takes the last rows of a file or symbolic link. No session can have begun
/// since: a file without a name cannot be opened.
pub(crate) struct FinishRemoval<'a>(pub &'a ListedRemoval);

impl Operation for FinishRemoval<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let key = rows::inode(self.0.row.inode);
        if let Some(row) = rows::read::<InodeRow>(txn, &key).await?
            && row.charged
        {
            quota::release(txn, &row).await?;
        }
        txn.clear(&key);
        txn.clear_range(KeyRange::prefix(&rows::attributes(self.0.row.inode)));
        txn.clear(&rows::trim(self.0.row.inode));
        txn.clear(&self.0.key);
        Ok(())
    }
}

/// Takes some names out of a removed directory; true once the directory itself is gone.
pub(crate) struct CollectDirectory<'a> {
    pub removal: &'a ListedRemoval,
    pub holds: &'a Holds,
    pub now: Nanoseconds,
}

impl Operation for CollectDirectory<'_> {
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
                EntryKind::File | EntryKind::Symlink => {
                    drop_link(txn, row, self.now, self.holds).await?;
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

/// Forgets rows that are due: sessions of clients that are gone, answers nobody will ask for.
pub(crate) struct ForgetRows<'a>(pub &'a [Vec<u8>]);

impl Operation for ForgetRows<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        self.0.iter().for_each(|key| txn.clear(key));
        Ok(())
    }
}
