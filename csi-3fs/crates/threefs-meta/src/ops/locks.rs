//! Locks of files and the lock sessions of clients.
//!
//! A client's locks last as long as its lock session, which it renews. The collector ends a session
//! whose row has not changed for a whole lease. A client relies on a renewal for a shorter time, and
//! everything that it sends under a lock carries that limit, so nothing of it is executed once its
//! locks may be granted to others.

mod append;
mod deadlock;
mod session;

pub(crate) use append::{
    AppendHolder, ReadRecall, RecallAppends, check_truncation, drop_append_lease,
};

pub(crate) use session::{
    DropLocks, EndLockSession, ForgetLocks, RenewLockSession, StartLockSession,
};

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KvError, Operation, Transaction};

use crate::locks::{FileLocks, Outcome, Owner, TooMany, Wanted};
use crate::ops::{OpError, not_found};
use crate::protocol::{LockAnswer, LockKind, LockRequest, MetaError, MetaReply};
use crate::rows::{self, InodeRow, LockSessionRow};

/// Maximum number of rows of lock sessions and locked files of one volume's clients.
const VOLUME_LOCKS_MAX: i64 = 16_384;
/// The same for all clients with the cluster key.
const CLUSTER_LOCKS_MAX: i64 = 262_144;

/// The error of a volume whose clients have too many locks.
pub(crate) fn over_bound(max: i64) -> MetaError {
    let what = "lock sessions and locked files (once for each owner)".into();
    MetaError::TooManyLocks { what, max: max.unsigned_abs() }
}

impl From<TooMany> for OpError {
    fn from(TooMany { what, max }: TooMany) -> Self {
        let what = format!("{what} in one file");
        MetaError::TooManyLocks { what, max: max as u64 }.into()
    }
}

/// Counts rows of a volume's clients.
fn count(txn: &mut Transaction, volume: InodeId, rows: i64) {
    let max = match volume {
        rows::ALL_VOLUMES => CLUSTER_LOCKS_MAX,
        _ => VOLUME_LOCKS_MAX,
    };
    // A release is never refused.
    let max = if rows > 0 { max } else { i64::MAX };
    txn.bounded_add(&rows::lock_count(volume), rows, max);
}

/// The row of a session that has not ended.
async fn session(
    txn: &mut Transaction,
    client: ClientId,
    session: u64,
) -> Result<Option<LockSessionRow>, KvError> {
    let row = rows::read::<LockSessionRow>(txn, &rows::lock_session(client)).await?;
    Ok(row.filter(|row| row.session == session && !row.ended))
}

pub(crate) async fn locks_of(
    txn: &mut Transaction,
    inode: InodeId,
    kind: LockKind,
) -> Result<FileLocks, KvError> {
    Ok(rows::read(txn, &rows::locks(inode, kind)).await?.unwrap_or_default())
}

/// Writes the locks of a file, and grants requests that wait as far as possible.
fn write_locks(
    txn: &mut Transaction,
    inode: InodeId,
    kind: LockKind,
    mut locks: FileLocks,
) -> Result<(), KvError> {
    locks.grant_waiting();
    if kind == LockKind::Append && locks.has_waiting() {
        append::recall(txn, inode, &locks);
    }
    let key = rows::locks(inode, kind);
    match locks.is_empty() {
        true => txn.clear(&key),
        false => rows::write(txn, &key, &locks)?,
    }
    Ok(())
}

/// Keeps the row of an owner's file as long as the owner holds or waits for a lock there.
fn index(
    txn: &mut Transaction,
    session: &LockSessionRow,
    lock: (Owner, InodeId),
    before: bool,
    after: bool,
) {
    let key = rows::locked(lock.0, lock.1);
    match (before, after) {
        (false, true) => {
            txn.set(&key, []);
            count(txn, session.volume, 1);
        }
        (true, false) => {
            txn.clear(&key);
            count(txn, session.volume, -1);
        }
        _ => {}
    }
}

fn answer(answer: LockAnswer) -> MetaReply {
    MetaReply::Lock(answer)
}

/// Whether a file was not removed. Without a conflict: each report of a length writes the inode.
async fn exists(txn: &mut Transaction, inode: InodeId) -> Result<bool, KvError> {
    let key = rows::inode(inode);
    Ok(match txn.snapshot_get(&key).await? {
        Some(value) => !InodeRow::decode(&key, &value)?.dead,
        None => false,
    })
}

/// `LockChange::Set`.
pub(crate) struct SetLock<'a> {
    pub client: ClientId,
    pub session: u64,
    pub lock: &'a LockRequest,
    pub wait: Option<u64>,
}

impl Operation for SetLock<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let LockRequest { inode, kind, first, last, .. } = *self.lock;
        if first > last {
            return Err(MetaError::Invalid {
                field: "lock".into(),
                value: format!("{first}-{last}"),
                reason: "the first byte is behind the last one".into(),
            }
            .into());
        }
        let Some(row) = session(txn, self.client, self.session).await? else {
            return Ok(answer(LockAnswer::Lost));
        };
        if !exists(txn, inode).await? {
            return Err(not_found("", inode));
        }
        let wanted = Wanted::of(self.client, self.lock);
        let (mut locks, owner) = (locks_of(txn, inode, kind).await?, wanted.owner);
        let before = locks.uses(owner);
        let outcome = locks.request(wanted, self.wait)?;
        if outcome == Outcome::Waiting
            && let Some(wait) = self.wait
            && deadlock::closes_cycle(txn, owner, inode, &locks).await?
        {
            locks.cancel(owner, wait);
            return Ok(answer(LockAnswer::Deadlock));
        }
        let (after, granted) = (locks.uses(owner), granted(&locks));
        write_locks(txn, inode, kind, locks)?;
        index(txn, &row, (owner, inode), before, after);
        Ok(answer(match outcome {
            Outcome::Granted => granted,
            Outcome::Waiting => LockAnswer::Waiting,
            Outcome::Conflict(other, held) => conflict(self.client, other, &held),
        }))
    }
}

/// The answer to a request that is granted.
fn granted(locks: &FileLocks) -> LockAnswer {
    match locks.is_marked_lost() {
        true => LockAnswer::GrantedAfterLoss,
        false => LockAnswer::Granted,
    }
}

fn conflict(client: ClientId, owner: Owner, held: &crate::locks::Held) -> LockAnswer {
    let pid = if owner.client == client { held.pid } else { 0 };
    LockAnswer::Conflict { first: held.first, last: held.last, exclusive: held.exclusive, pid }
}

/// `LockChange::Clear`, and with `wait` `LockChange::Cancel`.
pub(crate) struct ClearLock<'a> {
    pub client: ClientId,
    pub session: u64,
    pub lock: &'a LockRequest,
    pub wait: Option<u64>,
}

impl Operation for ClearLock<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let Some(row) = session(txn, self.client, self.session).await? else {
            return Ok(answer(LockAnswer::Lost));
        };
        let LockRequest { inode, kind, .. } = *self.lock;
        let wanted = Wanted::of(self.client, self.lock);
        let (mut locks, owner) = (locks_of(txn, inode, kind).await?, wanted.owner);
        let before = locks.uses(owner);
        match self.wait {
            None => {
                if kind == LockKind::Append {
                    append::release(txn, &wanted, inode, &mut locks);
                }
                locks.release(owner, wanted.first, wanted.last)?;
            }
            Some(wait) if !locks.cancel(owner, wait) && locks.covers(&wanted) => {
                return Ok(answer(LockAnswer::Granted));
            }
            Some(_) => {}
        }
        let (after, in_use) = (locks.uses(owner), locks.is_used_by(self.client));
        if before {
            write_locks(txn, inode, kind, locks)?;
        }
        index(txn, &row, (owner, inode), before, after);
        Ok(answer(LockAnswer::Released { in_use }))
    }
}

/// `LockChange::ClearFile`. The append lease is not released: it does not end with a close.
pub(crate) struct ClearFile {
    pub client: ClientId,
    pub session: u64,
    pub inode: InodeId,
}

impl Operation for ClearFile {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let Some(row) = session(txn, self.client, self.session).await? else {
            return Ok(answer(LockAnswer::Lost));
        };
        let mut locks = locks_of(txn, self.inode, LockKind::Posix).await?;
        let owners = locks.owners_of(self.client);
        for owner in &owners {
            locks.remove(*owner);
            index(txn, &row, (*owner, self.inode), true, false);
        }
        if !owners.is_empty() {
            write_locks(txn, self.inode, LockKind::Posix, locks)?;
        }
        Ok(answer(LockAnswer::Released { in_use: false }))
    }
}

/// `LockQuery::Test`.
pub(crate) struct TestLock<'a> {
    pub client: ClientId,
    pub lock: &'a LockRequest,
}

impl Operation for TestLock<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let locks = locks_of(txn, self.lock.inode, self.lock.kind).await?;
        let wanted = Wanted::of(self.client, self.lock);
        Ok(answer(match locks.conflict(&wanted) {
            None => LockAnswer::Granted,
            Some((owner, held)) => conflict(self.client, owner, &held),
        }))
    }
}

/// `LockQuery::Await`, as of now.
pub(crate) struct ReadWait<'a> {
    pub client: ClientId,
    pub lock: &'a LockRequest,
    pub wait: u64,
}

impl Operation for ReadWait<'_> {
    type Output = LockAnswer;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<LockAnswer, OpError> {
        let locks = locks_of(txn, self.lock.inode, self.lock.kind).await?;
        let wanted = Wanted::of(self.client, self.lock);
        Ok(if locks.waits(wanted.owner, Some(self.wait)) {
            LockAnswer::Waiting
        } else if locks.covers(&wanted) {
            granted(&locks)
        } else {
            LockAnswer::Lost
        })
    }
}
