//! Execution of lock requests; waits for locks and for recalls of append leases.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::Operation;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::ops::OpError;
use crate::ops::locks::{
    AppendHolder, ClearFile, ClearLock, DropLocks, EndLockSession, ReadRecall, ReadWait,
    RecallAppends, RenewLockSession, SetLock, StartLockSession, TestLock,
};
use crate::protocol::{LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaReply};
use crate::tree::Tree;
use crate::tree::change::ChangeCall;
use crate::tree::checks::check_batch;

/// Maximum time of a query that waits; its client sends another one.
const AWAIT_MAX: Duration = Duration::from_secs(3);
/// Interval at which a wait reads the row if other services may grant the lock.
const POLL: Duration = Duration::from_millis(100);
/// Maximum number of queries that wait. Further ones are answered immediately.
const WAITS_MAX: usize = 4096;

/// Queries that wait, by what they wait for: a file's locks, or recalls of a client's leases.
#[derive(Debug)]
pub(crate) struct Waits<K> {
    keys: Mutex<HashMap<K, (usize, Arc<Notify>)>>,
    room: Semaphore,
}

impl<K> Default for Waits<K> {
    fn default() -> Self {
        Self { keys: Mutex::default(), room: Semaphore::new(WAITS_MAX) }
    }
}

/// A query that waits.
struct Wait<'a, K: Hash + Eq> {
    waits: &'a Waits<K>,
    key: K,
    changed: Arc<Notify>,
}

impl<K: Hash + Eq + Copy> Waits<K> {
    fn start(&self, key: K) -> Wait<'_, K> {
        let mut keys = self.keys();
        let (count, changed) = keys.entry(key).or_default();
        *count += 1;
        Wait { waits: self, key, changed: Arc::clone(changed) }
    }
}

impl<K: Hash + Eq> Waits<K> {
    /// What the queries read may have changed.
    fn notify(&self, key: K) {
        if let Some((_, changed)) = self.keys().get(&key) {
            changed.notify_waiters();
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<K, (usize, Arc<Notify>)>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq> Drop for Wait<'_, K> {
    fn drop(&mut self) {
        let mut keys = self.waits.keys();
        if let Some((count, _)) = keys.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                keys.remove(&self.key);
            }
        }
    }
}

/// The reply must arrive before the deadline.
fn await_end(deadline: Deadline) -> Instant {
    Instant::now() + deadline.remaining().unwrap_or_default().div_f64(2.0).min(AWAIT_MAX)
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
                crate::ops::refuse_snapshot(lock.inode, "")?;
                let set = SetLock { client, session: *session, lock, wait: *wait };
                let reply = self.run_once(call, set).await;
                // A weaker lock makes room for others.
                self.lock_waits.notify(lock.inode);
                self.notify_recall(lock, call.deadline).await?;
                reply
            }
            LockChange::Clear { session, lock } => {
                let clear = ClearLock { client, session: *session, lock, wait: None };
                let reply = self.run_once(call, clear).await;
                self.lock_waits.notify(lock.inode);
                self.notify_recall(lock, call.deadline).await?;
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
            LockQuery::Recalls { client, session, releasing } => {
                check_batch("releasing", releasing.len())?;
                let read = ReadRecall { client: *client, session: *session, releasing };
                let waits = &self.recall_waits;
                let answer = self.wait_until_changed(waits, *client, &read, deadline).await?;
                Ok(MetaReply::Lock(answer))
            }
        }
    }

    /// Notifies the holder of an append lease for which others wait.
    async fn notify_recall(&self, lock: &LockRequest, deadline: Deadline) -> Result<(), OpError> {
        if lock.kind == LockKind::Append
            && let Some(holder) = self.store.transact(deadline, &AppendHolder(lock.inode)).await?
        {
            self.recall_waits.notify(holder);
        }
        Ok(())
    }

    /// Asks for the append lease of a file and waits until its holder has released it, or for a short
    /// time.
    pub(super) async fn recall_append_lease(
        &self,
        inode: InodeId,
        client: ClientId,
        deadline: Deadline,
    ) -> Result<(), OpError> {
        let released = self.lock_waits.start(inode);
        let changed = released.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let recall = RecallAppends { inode, client };
        if let Some(holder) = self.store.transact(deadline, &recall).await? {
            self.recall_waits.notify(holder);
            let _ = tokio::time::timeout_at(self.next_read(await_end(deadline)), changed).await;
        }
        Ok(())
    }

    /// Waits until a request does not wait any more, or for a short time.
    async fn await_lock(
        &self,
        client: ClientId,
        lock: &LockRequest,
        wait: u64,
        deadline: Deadline,
    ) -> Result<LockAnswer, OpError> {
        let read = ReadWait { client, lock, wait };
        self.wait_until_changed(&self.lock_waits, lock.inode, &read, deadline).await
    }

    /// Reads an answer until it is not `Waiting` any more, or for a short time.
    async fn wait_until_changed<K: Hash + Eq + Copy>(
        &self,
        waits: &Waits<K>,
        key: K,
        read: &impl Operation<Output = LockAnswer, Error = OpError>,
        deadline: Deadline,
    ) -> Result<LockAnswer, OpError> {
        let room = waits.room.try_acquire();
        let until = match room {
            Ok(_) => await_end(deadline),
            Err(_) => Instant::now(),
        };
        let waiting = waits.start(key);
        loop {
            let changed = waiting.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let answer = self.store.transact(deadline, read).await?;
            if answer != LockAnswer::Waiting || Instant::now() >= until {
                return Ok(answer);
            }
            let _ = tokio::time::timeout_at(self.next_read(until), changed).await;
        }
    }

    /// When a row that has not changed here is read again: other services may have changed it.
    fn next_read(&self, until: Instant) -> Instant {
        match self.services.alone {
            true => until,
            false => until.min(Instant::now() + POLL),
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
            let (released, complete) = self.store.transact(deadline, &drop_some).await?;
            released.into_iter().for_each(|inode| self.lock_waits.notify(inode));
            if complete {
                return Ok(true);
            }
        }
    }
}
