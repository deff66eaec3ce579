//! Files that count for more than their length and reservation, and when they do no longer.
//!
//! A capability lets its holder write below an end until it expires, whatever became of the
//! reservation that the end came from. So a file whose length or reservation becomes less counts for
//! as much as before, and gets an `EXCS` row. New capabilities end at the lesser one. When all older
//! ones have expired, storage says where the chunks of the file end: what was written and never
//! reported counts on, and the rest is given back. Nothing is cut: it may still be reported.

use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, Operation, Transaction};

use super::quota::{self, Charge};
use super::{GivingBack, OpError, store};
use crate::protocol::InodeKind;
use crate::rows::{self, ExcessRow, InodeRow, Uptime};

/// What a file needs, or has in storage, has become less. The caller stores the inode.
pub(crate) async fn give_back(
    txn: &mut Transaction,
    row: &mut InodeRow,
    giving: &GivingBack,
) -> Result<(), OpError> {
    let needed = row.needed_end();
    if row.reach <= needed {
        return Ok(());
    }
    rows::write(txn, &rows::excess(row.inode.id), &ExcessRow { since: giving.now })?;
    if giving.excess && row.charged {
        let unneeded = row.reach - needed - row.excess;
        row.excess += quota::make_excess(txn, row.inode.quota, unneeded).await?;
    }
    Ok(())
}

/// A file that counts for more than it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Excess {
    pub inode: InodeId,
    pub since: Uptime,
    pub layout: Layout,
    /// It needs the bytes below, and counts for those below `reach`.
    pub needed_end: u64,
    pub reach: u64,
}

/// One page of those that have waited for long enough or waited in a former life, and the key to go on
/// after if there may be more.
pub(crate) struct ListExcess<'a> {
    pub after: &'a [u8],
    pub limit: usize,
    pub now: Uptime,
    pub wait_ms: u64,
}

impl Operation for ListExcess<'_> {
    type Output = (Vec<Excess>, Option<Vec<u8>>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let mut range = KeyRange::prefix(rows::EXCESS);
        if !self.after.is_empty() {
            range = range.after(self.after);
        }
        let page = txn.snapshot_range(&range, self.limit).await?;
        let last = page.last().filter(|_| page.len() == self.limit).map(|(key, _)| key.clone());
        let mut listed = Vec::new();
        for (key, value) in page {
            let ExcessRow { since } = rows::decode(&key, &value)?;
            // Most wait: nothing else is read of them.
            let waited_ms = self.now.ms.saturating_sub(since.ms);
            if since.life == self.now.life && waited_ms < self.wait_ms {
                continue;
            }
            let inode = rows::inode_of_key(&key)?;
            // Of a dead file the collector takes all rows.
            let row = rows::read_inode(txn, inode).await?.filter(|row| !row.dead);
            let Some(row) = row else { continue };
            if txn.get(&rows::trim(inode)).await?.is_some() {
                // Storage still has what is being cut.
                continue;
            }
            let (needed_end, reach) = (row.needed_end(), row.reach);
            if let InodeKind::File { layout, .. } = row.inode.kind {
                listed.push(Excess { inode, since, layout, needed_end, reach });
            }
        }
        Ok((listed, last))
    }
}

/// Nobody knows how long ago a moment of a former life was: these files wait from now on.
pub(crate) struct WaitAnew<'a> {
    pub files: &'a [Excess],
    pub now: Uptime,
}

impl Operation for WaitAnew<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for file in self.files {
            let key = rows::excess(file.inode);
            let noted: Option<ExcessRow> = rows::read(txn, &key).await?;
            if noted.is_some_and(|noted| noted.since == file.since) {
                rows::write(txn, &key, &ExcessRow { since: self.now })?;
            }
        }
        Ok(())
    }
}

/// Counts a file again. Storage has no byte of it at or beyond `stored_end`, and nobody can have
/// written there since it was asked, but by what is reserved now.
pub(crate) struct Recount<'a> {
    pub file: &'a Excess,
    pub stored_end: u64,
}

impl Operation for Recount<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let key = rows::excess(self.file.inode);
        let noted: Option<ExcessRow> = rows::read(txn, &key).await?;
        // It needs less since it was listed: capabilities that end later may be good.
        if noted.is_none_or(|noted| noted.since != self.file.since) {
            return Ok(());
        }
        // A dead file may be revived, and waits on; the collector takes all its rows.
        let row = rows::read_inode(txn, self.file.inode).await?.filter(|row| !row.dead);
        let Some(mut row) = row else { return Ok(()) };
        txn.clear(&key);
        let end = row.needed_end().max(self.stored_end).min(row.reach);
        let before = Charge::of(&row);
        (row.reach, row.excess) = (end, 0);
        if row.charged {
            quota::recount(txn, row.inode.quota, Charge::of(&row).since(before)).await?;
        }
        Ok(store(txn, &mut row)?)
    }
}
