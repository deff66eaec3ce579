//! Execution of lock requests; waits for locks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use tokio::sync::{Notify, Semaphore};

use crate::ops::OpError;
use crate::ops::locks::{
    ClearFile, ClearLock, DropLocks, EndLockSession, ReadWait, RenewLockSession, SetLock,
    StartLockSession, TestLock,
};
use crate::protocol::{LockAnswer, LockChange, LockQuery, LockRequest, MetaReply};
use crate::tree::Tree;
use crate::tree::change::ChangeCall;

/// Maximum time of a query that waits; its client sends another one.
const AWAIT_MAX: Duration = Duration::from_secs(3);
/// Interval at which a wait reads the row if other services may grant the lock.
const POLL: Duration = Duration::from_millis(100);
/// Maximum number of queries that wait. Further ones are answered immediately.
const WAITS_MAX: usize = 4096;

/// Queries that wait for locks, by file.
#[derive(Debug)]
pub(crate) struct LockWaits {
    files: Mutex<HashMap<InodeId, (usize, Arc<Notify>)>>,
    room: Semaphore,
}

impl Default for LockWaits {
    fn default() -> Self {
        Self { files: Mutex::default(), room: Semaphore::new(WAITS_MAX) }
    }
}

/// A query that waits.
struct Wait<'a> {
    waits: &'a LockWaits,
    inode: InodeId,
    changed: Arc<Notify>,
}

impl LockWaits {
    fn start(&self, inode: InodeId) -> Wait<'_> {
        let mut files = self.files();
        let (count, changed) = files.entry(inode).or_default();
        *count += 1;
        Wait { waits: self, inode, changed: Arc::clone(changed) }
    }

    /// Requests may have been granted.
    fn notify(&self, inode: InodeId) {
        if let Some((_, changed)) = self.files().get(&inode) {
            changed.notify_waiters();
        }
    }

    fn files(&self) -> MutexGuard<'_, HashMap<InodeId, (usize, Arc<Notify>)>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let mut files = self.waits.files();
        if let Some((count, _)) = files.get_mut(&self.inode) {
            *count -= 1;
            if *count == 0 {
                files.remove(&self.inode);
            }
        }
    }
}

impl Tree {
    pub(super) async fn change_locks(
        &self,
        call: &ChangeCall<'_>,
        change: &LockChange,
    ) -> Result<MetaReply, OpError> {
        let client = call.id.client;
        match change {
            LockChange::Start { session } => {
                let (session, volume) = (*session, call.caller.scope);
                let lease_ms = self.config.lock_lease_ms;
                self.run_once(call, StartLockSession { client, session, volume, lease_ms }).await
            }
            LockChange::Set { session, lock, wait } => {
                let set = SetLock { client, session: *session, lock, wait: *wait };
                let reply = self.run_once(call, set).await;
                // A weaker lock makes room for others.
                self.lock_waits.notify(lock.inode);
                reply
            }
            LockChange::Clear { session, lock } => {
                let clear = ClearLock { client, session: *session, lock, wait: None };
                let reply = self.run_once(call, clear).await;
                self.lock_waits.notify(lock.inode);
                reply
            }
            LockChange::ClearFile { session, inode } => {
                let clear = ClearFile { client, session: *session, inode: *inode };
                let reply = self.run_once(call, clear).await;
                self.lock_waits.notify(*inode);
                reply
            }
            LockChange::Cancel { session, lock, wait } => {
                let cancel = ClearLock { client, session: *session, lock, wait: Some(*wait) };
                self.run_once(call, cancel).await
            }
            LockChange::End { session } => {
                self.end_lock_session(client, *session, None, call.deadline).await?;
                Ok(MetaReply::Lock(LockAnswer::Released { in_use: false }))
            }
        }
    }

    pub(super) async fn query_locks(
        &self,
        query: &LockQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, OpError> {
        match query {
            LockQuery::Renew { client, session } => {
                let (client, session) = (*client, *session);
                let lease_ms = self.config.lock_lease_ms;
                let renew = RenewLockSession { client, session, lease_ms };
                self.store.transact(deadline, &renew).await
            }
            LockQuery::Test { client, lock } => {
                self.store.transact(deadline, &TestLock { client: *client, lock }).await
            }
            LockQuery::Await { client, lock, wait } => {
                let answer = self.await_lock(*client, lock, *wait, deadline).await?;
                Ok(MetaReply::Lock(answer))
            }
        }
    }

    /// Waits until a request does not wait any more, or for a short time.
    async fn await_lock(
        &self,
        client: ClientId,
        lock: &LockRequest,
        wait: u64,
        deadline: Deadline,
    ) -> Result<LockAnswer, OpError> {
        let room = self.lock_waits.room.try_acquire();
        let until = match room {
            // The reply must arrive before the deadline.
            Ok(_) => {
                tokio::time::Instant::now()
                    + deadline.remaining().unwrap_or_default().div_f64(2.0).min(AWAIT_MAX)
            }
            Err(_) => tokio::time::Instant::now(),
        };
        let waiting = self.lock_waits.start(lock.inode);
        loop {
            let changed = waiting.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let read = ReadWait { client, lock, wait };
            let answer = self.store.transact(deadline, &read).await?;
            if answer != LockAnswer::Waiting || tokio::time::Instant::now() >= until {
                return Ok(answer);
            }
            let pause = match self.services.alone {
                true => until,
                false => until.min(tokio::time::Instant::now() + POLL),
            };
            let _ = tokio::time::timeout_at(pause, changed).await;
        }
    }

    /// Ends a lock session and releases its locks; with `renewal` only if it has not been renewed
    /// since. Returns whether it was ended.
    pub(crate) async fn end_lock_session(
        &self,
        client: ClientId,
        session: u64,
        renewal: Option<u64>,
        deadline: Deadline,
    ) -> Result<bool, OpError> {
        let end = EndLockSession { client, session, renewal };
        if !self.store.transact(deadline, &end).await? {
            return Ok(false);
        }
        loop {
            let drop_some = DropLocks { client, session };
            let (granted, complete) = self.store.transact(deadline, &drop_some).await?;
            granted.into_iter().for_each(|inode| self.lock_waits.notify(inode));
            if complete {
                return Ok(true);
            }
        }
    }
}
