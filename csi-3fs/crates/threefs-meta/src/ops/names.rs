//! Names in directories: the only code that reads, writes and clears their rows one by one.

use threefs_core::ids::InodeId;
use threefs_kv::Transaction;

use crate::ops::{OpError, history, view};
use crate::rows::{self, DentryRow};

/// The entry with a name. Conflicts with changes of it.
pub(crate) async fn get(
    txn: &mut Transaction,
    directory: InodeId,
    name: &str,
) -> Result<Option<DentryRow>, OpError> {
    view::name(txn, directory, name).await
}

/// Gives a name to an inode, or removes the name.
pub(crate) async fn set(
    txn: &mut Transaction,
    directory: InodeId,
    name: impl AsRef<[u8]>,
    entry: Option<&DentryRow>,
) -> Result<(), OpError> {
    let name = name.as_ref();
    let since = history::keep_name(txn, directory, name).await?;
    let key = rows::dentry(directory, name);
    match entry {
        Some(entry) => {
            history::refuse_snapshot(entry.inode, &String::from_utf8_lossy(name))?;
            txn.set(&key, DentryRow { since, ..*entry }.encode(&key)?);
        }
        None => txn.clear(&key),
    }
    Ok(())
}
