//! Names in directories: the only code that reads, writes and clears their rows one by one.

use threefs_core::ids::InodeId;
use threefs_kv::{KvError, Transaction};

use crate::rows::{self, DentryRow};

/// The entry with a name. Conflicts with changes of it.
pub(crate) async fn get(
    txn: &mut Transaction,
    directory: InodeId,
    name: &str,
) -> Result<Option<DentryRow>, KvError> {
    rows::read(txn, &rows::dentry(directory, name)).await
}

/// Gives a name to an inode, or removes the name.
pub(crate) fn set(
    txn: &mut Transaction,
    directory: InodeId,
    name: impl AsRef<[u8]>,
    entry: Option<&DentryRow>,
) -> Result<(), KvError> {
    let key = rows::dentry(directory, name);
    match entry {
        Some(entry) => rows::write(txn, &key, entry),
        None => {
            txn.clear(&key);
            Ok(())
        }
    }
}
