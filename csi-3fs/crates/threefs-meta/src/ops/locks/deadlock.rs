//! Detection of owners that wait for each other.

use std::collections::BTreeSet;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Transaction};

use crate::locks::{FileLocks, Owner};
use crate::ops::OpError;
use crate::ops::locks::locks_of;
use crate::protocol::LockKind;
use crate::rows;

/// Maximum number of files that one search reads. A longer cycle is not detected.
const FILES_MAX: usize = 64;

/// Whether an owner that waits in a file, whose locks are not written yet, waits for itself through
/// others. As on Linux, an owner waits as long as one of its threads does, and the locks of flock
/// are not searched. The search reads what it follows: of two transactions that close a cycle
/// together, one conflicts. A client releases an append lease without waiting for another lock.
pub(super) async fn closes_cycle(
    txn: &mut Transaction,
    owner: Owner,
    inode: InodeId,
    locks: &FileLocks,
) -> Result<bool, OpError> {
    if owner.kind != LockKind::Posix {
        return Ok(false);
    }
    let (mut seen, mut files) = (BTreeSet::new(), 0);
    let mut next = locks.blockers(owner);
    while let Some(other) = next.pop() {
        if other == owner {
            return Ok(true);
        }
        if !seen.insert(other) {
            continue;
        }
        let range = KeyRange::prefix(&rows::locked_by(other));
        for (key, _) in txn.range(&range, FILES_MAX).await? {
            let (_, file) = rows::locked_of_key(&key)?;
            files += 1;
            if files > FILES_MAX {
                return Ok(false);
            }
            let blockers = match file == inode {
                true => locks.blockers(other),
                false => locks_of(txn, file, LockKind::Posix).await?.blockers(other),
            };
            next.extend(blockers);
        }
    }
    Ok(false)
}
