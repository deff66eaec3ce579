//! Garbage collection: the transactions that free removed files and directories.

use std::collections::BTreeMap;

use threefs_core::ids::ClientId;
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Row, Transaction};

use crate::clients::open_files::OpenFiles;
use crate::ops::dedup::answers;
use crate::ops::detach::{detach_tree, drop_directory};
use crate::ops::file::written_rows;
use crate::ops::locks::drop_append_lease;
use crate::ops::quota;
use crate::ops::quota::Charge;
use crate::ops::snapshots::hide_all;
use crate::ops::trash::purge_before;
use crate::ops::{OpError, drop_link, load_named, names, queue, store};
use crate::protocol::{EntryKind, InodeKind, Nanoseconds};
use crate::rows::{self, DentryRow, InodeRow, RemovalRow, Uptime};
use crate::written::Written;

/// Entries removed from a directory per transaction.
const NAMES_PER_TRANSACTION: usize = 256;

/// One entry of a queue.
#[derive(Clone, Debug)]
pub(crate) struct ListedRemoval {
    pub key: Vec<u8>,
    pub row: RemovalRow,
    pub state: RemovalState,
}

/// What a removal needs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RemovalState {
    /// Drop the chunks of a closed file, which has none at or beyond `end`.
    Chunks { layout: Layout, end: u64 },
    /// Wait: a client has it open. The flag is true if it counts for its quota.
    InUse { charged: bool },
    /// Remove rows only.
    Rows,
}

/// One page of a queue, oldest first, up to a round.
pub(crate) struct ListRemovals<'a> {
    pub queue: &'static [u8],
    pub until: u64,
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
        let mut removals = Vec::new();
        for (key, value) in txn.snapshot_range(&range, self.limit).await? {
            let row: RemovalRow = rows::decode(&key, &value)?;
            let state = state_of(txn, self.queue, &row).await?;
            removals.push(ListedRemoval { key, row, state });
        }
        Ok(removals)
    }
}

async fn state_of(
    txn: &mut Transaction,
    queue: &[u8],
    removal: &RemovalRow,
) -> Result<RemovalState, OpError> {
    let id = removal.inode;
    let Some(row) = rows::read_inode(txn, id).await? else {
        return Ok(RemovalState::Rows);
    };
    let InodeKind::File { layout, .. } = row.inode.kind else { return Ok(RemovalState::Rows) };
    if queue == rows::TOMBSTONES {
        return Ok(RemovalState::Chunks { layout, end: row.end_max });
    }
    for users in [rows::holds(id), rows::sessions(id)] {
        if !txn.range(&KeyRange::prefix(&users), 1).await?.is_empty() {
            return Ok(RemovalState::InUse { charged: row.charged });
        }
    }
    Ok(RemovalState::Chunks { layout, end: row.end_max })
}

/// Marks removed files that no client has open as dead, before any of their chunks is dropped. From
/// this commit on, reads do not find the inode, so a dropped chunk cannot be mistaken for a hole.
/// Returns the number of files marked.
pub(crate) struct MarkDead<'a> {
    pub removals: &'a [&'a ListedRemoval],
}

impl Operation for MarkDead<'_> {
    type Output = usize;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<usize, OpError> {
        let mut marked_count = 0;
        for removal in self.removals {
            let state = state_of(txn, rows::REMOVALS, &removal.row).await?;
            if !matches!(state, RemovalState::Chunks { .. }) {
                continue;
            }
            let id = removal.row.inode;
            let Some(mut row) = rows::read_inode(txn, id).await? else { continue };
            row.dead = true;
            store(txn, &mut row).await?;
            txn.clear(&removal.key);
            queue(txn, rows::DEAD, &removal.row).await?;
            marked_count += 1;
        }
        Ok(marked_count)
    }
}

/// Charges removed files again that a client reported as open after their last name was removed.
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
                store(txn, &mut row).await?;
            }
        }
        Ok(())
    }
}

/// Reverts [`MarkDead`]: a client that may have the file open has reported in the meantime.
pub(crate) struct Revive<'a>(pub &'a ListedRemoval);

impl Operation for Revive<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        txn.clear(&self.0.key);
        if let Some(mut row) = rows::read_inode(txn, self.0.row.inode).await? {
            row.dead = false;
            store(txn, &mut row).await?;
            queue(txn, rows::REMOVALS, &self.0.row).await?;
        }
        Ok(())
    }
}

/// Removes the remaining rows of files, symbolic links and special files whose chunks are gone. No
/// session can have started since: a dead inode, or one that is not a file, cannot be opened. A
/// file in a quota keeps its inode as a tombstone: ticket holders may have capabilities for it, and
/// storage bounds how many forgotten files it remembers, so it is asked to forget the file again
/// after their expiry. Tombstones count for no quota, so they are as few and as short as possible.
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
            // A file without bytes never had a valid capability.
            let late = |row: &InodeRow| row.dead && row.inode.quota.is_some() && row.end_max > 0;
            match row.filter(late) {
                Some(mut row) => {
                    if let InodeKind::File { written, .. } = &mut row.inode.kind {
                        *written = Written::default();
                    }
                    row.charged = false;
                    row.metadata_bytes = 0;
                    store(txn, &mut row).await?;
                    queue(txn, rows::TOMBSTONES, &removal.row).await?;
                }
                None => txn.clear(&rows::inode(id)),
            }
            txn.clear_range(KeyRange::prefix(&rows::attributes(id)));
            txn.clear_range(KeyRange::prefix(&rows::holds(id)));
            txn.clear(&rows::trim(id));
            txn.clear(&rows::recount(id));
            drop_append_lease(txn, id).await?;
            written_rows::clear(txn, id);
            txn.clear(&removal.key);
        }
        Ok(())
    }
}

/// Removes tombstones: storage has forgotten their files twice.
pub(crate) struct DropTombstones<'a>(pub &'a [ListedRemoval]);

impl Operation for DropTombstones<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for removal in self.0 {
            txn.clear(&rows::inode(removal.row.inode));
            txn.clear_range(KeyRange::prefix(&rows::holds(removal.row.inode)));
            txn.clear(&removal.key);
        }
        Ok(())
    }
}

/// What is left of a removed directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectoryState {
    /// Nothing, or only what snapshots show.
    Gone,
    /// Entries, or an entry in the trash of a volume.
    HasEntries,
    /// Snapshots of a volume: their rows are dropped first.
    HasSnapshots,
}

/// Removes some entries of a removed directory, at last the directory itself.
pub(crate) struct EmptyDirectory<'a> {
    pub removal: &'a ListedRemoval,
    pub open_files: &'a OpenFiles,
    pub now: Nanoseconds,
}

impl Operation for EmptyDirectory<'_> {
    type Output = DirectoryState;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<DirectoryState, OpError> {
        let directory = self.removal.row.inode;
        if hide_all(txn, directory).await? {
            return Ok(DirectoryState::HasSnapshots);
        }
        let range = KeyRange::prefix(&rows::dentries(directory));
        let page = txn.range(&range, NAMES_PER_TRANSACTION).await?;
        for (key, value) in &page {
            let entry = DentryRow::decode(key, value)?;
            let name = key.get(range.start.len()..).unwrap_or_default();
            let row = load_named(txn, entry, "(removed)").await?;
            match entry.kind {
                EntryKind::Directory => detach_tree(txn, row, self.now).await?,
                _ => {
                    let name = String::from_utf8_lossy(name);
                    drop_link(txn, row, &name, self.now, self.open_files).await?;
                }
            }
            names::set(txn, directory, name, None).await?;
        }
        if page.len() < NAMES_PER_TRANSACTION {
            // A volume is removed with its trash.
            let context = (self.open_files, self.now);
            if purge_before(txn, directory, u64::MAX, context).await? > 0 {
                return Ok(DirectoryState::HasEntries);
            }
            if let Some(row) = rows::read_inode(txn, directory).await? {
                drop_directory(txn, row, self.now).await?;
            }
            txn.clear(&self.removal.key);
            return Ok(DirectoryState::Gone);
        }
        Ok(DirectoryState::HasEntries)
    }
}

/// Rows with a prefix, page by page, for the sweeps.
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

/// Drops answers that can no longer be requested: of each client, its oldest ones.
pub(crate) struct ForgetAnswers<'a>(pub &'a BTreeMap<ClientId, Vec<u64>>);

impl Operation for ForgetAnswers<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for (client, sequences) in self.0 {
            answers::forget(txn, *client, sequences.iter().copied()).await?;
        }
        Ok(())
    }
}

/// Removes rows that are written without a read.
pub(crate) struct ClearRows<'a>(pub &'a [Vec<u8>]);

impl Operation for ClearRows<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        self.0.iter().for_each(|key| txn.clear(key));
        Ok(())
    }
}

/// Publishes that clients are active.
pub(crate) struct PublishActivity<'a> {
    pub clients: &'a [ClientId],
    pub now: Uptime,
}

impl Operation for PublishActivity<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for client in self.clients {
            rows::write(txn, &rows::seen(*client), &self.now)?;
        }
        Ok(())
    }
}

/// The last published activity of each client.
pub(crate) struct ReadActivity<'a>(pub &'a [ClientId]);

impl Operation for ReadActivity<'_> {
    type Output = Vec<Option<Uptime>>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut published = Vec::with_capacity(self.0.len());
        for client in self.0 {
            let key = rows::seen(*client);
            let value = txn.snapshot_get(&key).await?;
            published.push(value.map(|value| rows::decode(&key, &value)).transpose()?);
        }
        Ok(published)
    }
}
