//! Directories without a name: those that garbage collection empties, and the end of one.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Transaction};

use crate::ops::quota;
use crate::ops::{OpError, history, queue, store};
use crate::protocol::{EntryKind, InodeKind, Nanoseconds};
use crate::rows::history as keys;
use crate::rows::{self, InodeRow, REMOVED, RemovalRow};

/// Queues a directory without a name, with its contents, for garbage collection.
pub(crate) async fn detach_tree(
    txn: &mut Transaction,
    mut row: InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    remove_name(txn, &mut row, now).await?;
    queue_directory(txn, &mut row, now).await
}

/// Removes the place of a directory in the tree from its row.
async fn remove_name(
    txn: &mut Transaction,
    row: &mut InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    history::keep_inode(txn, row).await?;
    if let InodeKind::Directory { parent, .. } = &mut row.inode.kind {
        *parent = REMOVED;
    }
    row.inode.links = 0;
    row.name.clear();
    row.inode.changed = now;
    Ok(())
}

/// Queues a directory without a name for garbage collection. It stays charged while snapshots show
/// it.
pub(crate) async fn queue_directory(
    txn: &mut Transaction,
    row: &mut InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    if row.charged && !history::has_formers(txn, row.inode.id).await? {
        quota::detach(txn, row).await?;
        row.charged = false;
    }
    let (inode, kind, opened_by) = (row.inode.id, EntryKind::Directory, Vec::new());
    row.inode.changed = now;
    queue(txn, rows::REMOVALS, &RemovalRow { inode, kind, run_id: 0, opened_by }).await?;
    store(txn, row).await
}

/// Removes an empty directory, which may have a name, for good. While snapshots show it, its rows
/// are kept.
pub(crate) async fn drop_directory(
    txn: &mut Transaction,
    mut row: InodeRow,
    now: Nanoseconds,
) -> Result<(), OpError> {
    remove_name(txn, &mut row, now).await?;
    let id = row.inode.id;
    if history::has_formers(txn, id).await? {
        row.parked = true;
        return store(txn, &mut row).await;
    }
    if row.charged {
        quota::detach(txn, &row).await?;
    }
    clear_directory(txn, id);
    Ok(())
}

/// Clears the rows of an empty directory.
fn clear_directory(txn: &mut Transaction, directory: InodeId) {
    txn.clear(&rows::inode(directory));
    txn.clear(&rows::directory_time(directory));
    txn.clear(&rows::subdirectories(directory));
    txn.clear_range(KeyRange::prefix(&rows::attributes(directory)));
    txn.clear(&keys::epoch(directory));
    txn.clear(&keys::volume_snapshots(directory));
    txn.clear(&keys::joined(directory));
    quota::clear(txn, directory);
}
