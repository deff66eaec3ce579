//! Recounts of files that are charged for more than their length and reservation.
//!
//! A capability permits writes below an end until it expires, even if the reservation behind it has
//! been released. So a file whose length or reservation decreases stays charged, and gets an `RCNT`
//! row. New capabilities get the lower end. Once all older ones have expired, storage returns the
//! end of the file's chunks: written but unreported bytes stay charged, the rest is released.
//! Nothing is truncated: the bytes may still be reported.

use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::ops::quota::{self, Charge};
use crate::ops::{OpError, RecountContext, store};
use crate::protocol::InodeKind;
use crate::rows::{self, InodeRow, RecountRow, Uptime};

/// Queues a file for a recount if it is charged for more than it needs, and moves as much of the
/// difference to excess as fits. The caller stores the inode.
pub(crate) async fn queue_recount(
    txn: &mut Transaction,
    row: &mut InodeRow,
    context: &RecountContext,
) -> Result<(), OpError> {
    let needed_end = row.needed_end();
    if row.charged_end <= needed_end {
        return Ok(());
    }
    rows::write(txn, &rows::recount(row.inode.id), &RecountRow { since: context.now })?;
    if context.excess_allowed && row.charged {
        let unneeded = row.charged_end - needed_end - row.excess;
        row.excess += quota::make_excess(txn, row.inode.quota, unneeded).await?;
    }
    Ok(())
}

/// A file that is charged for more than it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecountEntry {
    pub inode: InodeId,
    pub since: Uptime,
    pub layout: Layout,
    /// The file needs the bytes below this one, and is charged for those below `charged_end`.
    pub needed_end: u64,
    pub charged_end: u64,
}

/// One page of files whose wait is over or that an earlier run of the service queued, and the key
/// to continue after.
pub(crate) struct ListRecounts<'a> {
    pub after: &'a [u8],
    pub limit: usize,
    pub now: Uptime,
    pub wait_ms: u64,
}

impl Operation for ListRecounts<'_> {
    type Output = (Vec<RecountEntry>, Option<Vec<u8>>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut range = KeyRange::prefix(rows::RECOUNTS);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        let page = txn.snapshot_range(&range, self.limit).await?;
        let last = page.last().filter(|_| page.len() == self.limit).map(|(key, _)| key.clone());
        let mut entries = Vec::new();
        for (key, value) in page {
            let RecountRow { since } = rows::decode(&key, &value)?;
            // Most files are still waiting: nothing else is read for them.
            let waited_ms = self.now.ms.saturating_sub(since.ms);
            if since.run_id == self.now.run_id && waited_ms < self.wait_ms {
                continue;
            }
            let inode = rows::inode_of_key(&key)?;
            // Garbage collection removes all rows of a dead file.
            let row = rows::read_inode(txn, inode).await?.filter(|row| !row.dead);
            let Some(row) = row else { continue };
            if txn.get(&rows::trim(inode)).await?.is_some() {
                // A truncation is not complete yet.
                continue;
            }
            let (needed_end, charged_end) = (row.needed_end(), row.charged_end);
            if let InodeKind::File { layout, .. } = row.inode.kind {
                entries.push(RecountEntry { inode, since, layout, needed_end, charged_end });
            }
        }
        Ok((entries, last))
    }
}

/// Restarts the wait of files that an earlier run of the service queued: the time since then is
/// unknown.
pub(crate) struct RestartRecountWait<'a> {
    pub files: &'a [RecountEntry],
    pub now: Uptime,
}

impl Operation for RestartRecountWait<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for file in self.files {
            let key = rows::recount(file.inode);
            let queued: Option<RecountRow> = rows::read(txn, &key).await?;
            if queued.is_some_and(|queued| queued.since == file.since) {
                rows::write(txn, &key, &RecountRow { since: self.now })?;
            }
        }
        Ok(())
    }
}

/// Recounts a file. Storage has no byte of it at or beyond `stored_end`, and since the query only
/// bytes below the current reservation can have been written.
pub(crate) struct Recount<'a> {
    pub file: &'a RecountEntry,
    pub stored_end: u64,
}

impl Operation for Recount<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let key = rows::recount(self.file.inode);
        let queued: Option<RecountRow> = rows::read(txn, &key).await?;
        // The file was queued again since it was listed: later capabilities may be valid.
        if queued.is_none_or(|queued| queued.since != self.file.since) {
            return Ok(());
        }
        // A dead file may be revived and keeps waiting; garbage collection removes all its rows.
        let row = rows::read_inode(txn, self.file.inode).await?.filter(|row| !row.dead);
        let Some(mut row) = row else { return Ok(()) };
        txn.clear(&key);
        let end = row.needed_end().max(self.stored_end).min(row.charged_end);
        let before = Charge::of(&row);
        (row.charged_end, row.excess) = (end, 0);
        if row.charged {
            quota::charge_unbounded(txn, row.inode.quota, Charge::of(&row).since(before)).await?;
        }
        store(txn, &mut row).await
    }
}
