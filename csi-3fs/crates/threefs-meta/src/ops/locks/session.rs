//! Lock sessions: start, renewal, and the end with all locks.

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::ops::OpError;
use crate::ops::locks::{answer, count, exists, locks_of, session, write_locks};
use crate::protocol::{LockAnswer, LockKind, MetaReply};
use crate::rows::{self, LockSessionRow};

/// Files whose locks one transaction releases.
const FILES_PER_TRANSACTION: usize = 16;

/// `LockChange::Start`.
pub(crate) struct StartLockSession {
    pub client: ClientId,
    pub session: u64,
    pub volume: Option<InodeId>,
    pub lease_ms: u64,
}

impl Operation for StartLockSession {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let key = rows::lock_session(self.client);
        match rows::read::<LockSessionRow>(txn, &key).await? {
            Some(row) if row.session == self.session && !row.ended => {}
            Some(row) => return Err(OpError::LockSession(self.client, row.session)),
            None => {
                let volume = self.volume.unwrap_or(rows::ALL_VOLUMES);
                let (session, renewal, ended) = (self.session, 0, false);
                rows::write(txn, &key, &LockSessionRow { session, renewal, ended, volume })?;
                count(txn, volume, 1);
            }
        }
        Ok(answer(LockAnswer::Renewed { lease_ms: self.lease_ms }))
    }
}

/// `LockQuery::Renew`.
pub(crate) struct RenewLockSession {
    pub client: ClientId,
    pub session: u64,
    pub lease_ms: u64,
}

impl Operation for RenewLockSession {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let Some(row) = session(txn, self.client, self.session).await? else {
            return Ok(answer(LockAnswer::Lost));
        };
        let row = LockSessionRow { renewal: row.renewal.wrapping_add(1), ..row };
        rows::write(txn, &rows::lock_session(self.client), &row)?;
        Ok(answer(LockAnswer::Renewed { lease_ms: self.lease_ms }))
    }
}

/// Ends a session: no lock is granted in it from now on. With `renewal` only if it has not been
/// renewed since. Returns whether its locks are to be released.
pub(crate) struct EndLockSession {
    pub client: ClientId,
    pub session: u64,
    pub renewal: Option<u64>,
}

impl Operation for EndLockSession {
    type Output = bool;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<bool, OpError> {
        let key = rows::lock_session(self.client);
        let Some(row) = rows::read::<LockSessionRow>(txn, &key).await? else { return Ok(false) };
        let renewed = self.renewal.is_some_and(|renewal| renewal != row.renewal);
        if row.session != self.session || renewed {
            return Ok(false);
        }
        if !row.ended {
            rows::write(txn, &key, &LockSessionRow { ended: true, ..row })?;
        }
        Ok(true)
    }
}

/// Releases some locks of a session that has ended; removes its row with the last ones. Returns
/// their files, and whether it is complete.
pub(crate) struct DropLocks {
    pub client: ClientId,
    pub session: u64,
}

impl Operation for DropLocks {
    type Output = (Vec<InodeId>, bool);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let key = rows::lock_session(self.client);
        let row = rows::read::<LockSessionRow>(txn, &key).await?;
        let Some(row) = row.filter(|row| row.session == self.session && row.ended) else {
            return Ok((Vec::new(), true));
        };
        let range = KeyRange::prefix(&rows::locked_by_client(self.client));
        let page = txn.range(&range, FILES_PER_TRANSACTION).await?;
        let mut released = Vec::new();
        for (key, _) in &page {
            let (owner, inode) = rows::locked_of_key(key)?;
            let mut locks = locks_of(txn, inode, owner.kind).await?;
            let appended = owner.kind == LockKind::Append && locks.holds(owner);
            if appended && exists(txn, inode).await? {
                locks.mark_lost();
            }
            locks.remove(owner);
            write_locks(txn, inode, owner.kind, locks)?;
            released.push(inode);
            txn.clear(key);
        }
        count(txn, row.volume, -(page.len() as i64));
        let complete = page.len() < FILES_PER_TRANSACTION;
        if complete {
            txn.clear_range(KeyRange::prefix(&rows::recalls(self.client)));
            txn.clear(&key);
            count(txn, row.volume, -1);
        }
        Ok((released, complete))
    }
}

/// Removes all locks and lock sessions.
pub(crate) struct ForgetLocks;

impl Operation for ForgetLocks {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        for prefix in [
            rows::LOCK_SESSIONS,
            rows::LOCKED,
            rows::LOCKS,
            rows::APPENDS,
            rows::RECALLS,
            rows::LOCK_COUNTS,
        ] {
            txn.clear_range(KeyRange::prefix(prefix));
        }
        Ok(())
    }
}
