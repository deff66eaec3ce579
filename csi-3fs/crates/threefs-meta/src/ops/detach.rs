//! Directories without a name: those that garbage collection empties, and the end of one.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Transaction};

use crate::ops::volume::quota;
use crate::ops::{OpError, queue, store};
use crate::protocol::{EntryKind, InodeKind, Nanoseconds};
use crate::rows::{self, InodeRow, REMOVED, RemovalRow};

/// Queues a directory without a name, with its contents, for garbage collection.
pub(crate) async fn detach_tree(
    txn: &mut Transaction,
    mut row: InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    quota::detach(txn, &row).await?;
    row.charged = false;
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = REMOVED;
    }
    row.inode.links = 0;
    row.name.clear();
    let (inode, kind, opened_by) = (row.inode.id, EntryKind::Directory, Vec::new());
    row.inode.changed = now;
    queue(txn, rows::REMOVALS, &RemovalRow { inode, kind, run_id: 0, opened_by }).await?;
    Ok(store(txn, &mut row)?)
}

/// Clears the rows of an empty directory.
pub(crate) fn clear_directory(txn: &mut Transaction, directory: InodeId) {
    txn.clear(&rows::inode(directory));
    txn.clear(&rows::directory_time(directory));
    txn.clear(&rows::subdirectories(directory));
    txn.clear_range(KeyRange::prefix(&rows::attributes(directory)));
    quota::clear(txn, directory);
}
