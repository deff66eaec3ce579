//! Append leases. A client holds the append lease of a file until others wait for it: their requests
//! recall it. A truncation by another client recalls it as well, and is repeated once it is free.

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::locks::{FileLocks, Wanted};
use crate::ops::OpError;
use crate::ops::locks::{locks_of, session};
use crate::protocol::{LockAnswer, LockKind, RECALLS_MAX};
use crate::rows;

/// Asks the holder of a lease for it.
pub(super) fn recall(txn: &mut Transaction, inode: InodeId, locks: &FileLocks) {
    if let Some(holder) = locks.append_holder() {
        txn.set(&rows::recall(holder.client, inode), []);
    }
}

/// Ends the recall of a lease that its holder releases; an `exclusive` one has reported all that it
/// and earlier holders have appended.
pub(super) fn release(
    txn: &mut Transaction,
    released: &Wanted,
    inode: InodeId,
    locks: &mut FileLocks,
) {
    txn.clear(&rows::recall(released.owner.client, inode));
    if released.exclusive && locks.holds(released.owner) {
        locks.clear_lost();
    }
}

/// Refuses a truncation while another client may append at the end that it knows.
pub(crate) async fn check_truncation(
    txn: &mut Transaction,
    inode: InodeId,
    client: ClientId,
) -> Result<(), OpError> {
    let holder = locks_of(txn, inode, LockKind::Append).await?.append_holder();
    match holder.is_some_and(|holder| holder.client != client) {
        true => Err(OpError::AppendLease(inode)),
        false => Ok(()),
    }
}

/// Removes the row of a removed file's lease that a lost holder has left. The clients that hold it or
/// wait for it release it, with their rows, as those of other locks.
pub(crate) async fn drop_append_lease(
    txn: &mut Transaction,
    inode: InodeId,
) -> Result<(), KvError> {
    let locks = locks_of(txn, inode, LockKind::Append).await?;
    if locks.append_holder().is_none() && !locks.has_waiting() {
        txn.clear(&rows::locks(inode, LockKind::Append));
    }
    Ok(())
}

/// The client that holds the append lease of a file for which others wait.
pub(crate) struct AppendHolder(pub InodeId);

impl Operation for AppendHolder {
    type Output = Option<ClientId>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let locks = locks_of(txn, self.0, LockKind::Append).await?;
        let holder = locks.append_holder().filter(|_| locks.has_waiting());
        Ok(holder.map(|holder| holder.client))
    }
}

/// Asks another client for the append lease of a file. Returns that client.
pub(crate) struct RecallAppends {
    pub inode: InodeId,
    pub client: ClientId,
}

impl Operation for RecallAppends {
    type Output = Option<ClientId>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let locks = locks_of(txn, self.inode, LockKind::Append).await?;
        let holder = locks.append_holder().map(|holder| holder.client);
        let holder = holder.filter(|holder| *holder != self.client);
        if holder.is_some() {
            recall(txn, self.inode, &locks);
        }
        Ok(holder)
    }
}

/// `LockQuery::Recalls`, as of now.
pub(crate) struct ReadRecall<'a> {
    pub client: ClientId,
    pub session: u64,
    pub releasing: &'a [InodeId],
}

impl Operation for ReadRecall<'_> {
    type Output = LockAnswer;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<LockAnswer, OpError> {
        if session(txn, self.client, self.session).await?.is_none() {
            return Ok(LockAnswer::Lost);
        }
        let range = KeyRange::prefix(&rows::recalls(self.client));
        let recalls = txn.range(&range, RECALLS_MAX + 1).await?;
        let inodes = recalls.iter().map(|(key, _)| rows::recalled_of_key(key));
        for inode in inodes.collect::<Result<Vec<_>, KvError>>()? {
            if !self.releasing.contains(&inode) {
                return Ok(LockAnswer::Recalled { inode });
            }
        }
        Ok(LockAnswer::Waiting)
    }
}
