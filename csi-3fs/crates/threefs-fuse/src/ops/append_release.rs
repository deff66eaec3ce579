//! Release of append leases: when others wait for them, and when they are unused.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::ClientError;
use threefs_core::ids::InodeId;
use threefs_meta::{LockAnswer, LockChange, LockQuery, LockRequest, MetaChange, RECALLS_MAX};

use super::append::append_lease;
use super::locks::RETRY;
use crate::daemon::Daemon;

/// Longest pause between two checks for unused leases.
const CHECK: Duration = Duration::from_secs(1);

impl Daemon {
    /// Releases append leases that others wait for, and unused ones, until it is cancelled.
    pub(crate) async fn release_append_leases(self: &Arc<Self>) {
        loop {
            let surplus = self.appends.take_surplus();
            for inode in self.appends.unused().into_iter().chain(surplus) {
                self.start_append_release(inode);
            }
            let session = self.locks.session().filter(|_| !self.appends.is_empty());
            let releasing = self.appends.releasing();
            let Some(session) = session.filter(|_| releasing.len() < RECALLS_MAX) else {
                let _ = tokio::time::timeout(CHECK, self.appends.changed.notified()).await;
                continue;
            };
            let (client, session) = (self.journal.client(), session.number);
            let query = LockQuery::Recalls { client, session, releasing };
            let answer = tokio::select! {
                answer = self.query_lock(query, Deadline::after(self.timeout)) => answer,
                // A lease that is being released can be recalled again once it is released.
                () = self.appends.changed.notified() => continue,
            };
            match answer {
                Ok(LockAnswer::Recalled { inode }) => self.start_append_release(inode),
                Ok(LockAnswer::Waiting) => {}
                // The session has ended, which `keep_locks` notices; or no service answers.
                _ => tokio::time::sleep(RETRY).await,
            }
        }
    }

    fn start_append_release(self: &Arc<Self>, inode: InodeId) {
        if self.appends.start_release(inode) {
            let daemon = Arc::clone(self);
            drop(tokio::spawn(async move {
                daemon.release_append_lease(inode).await;
                daemon.appends.end_release(inode);
            }));
        }
    }

    /// Releases the append lease of a file once its length is reported.
    async fn release_append_lease(&self, inode: InodeId) {
        // Also for a lease that was granted after its request had ended: the turn keeps an append from
        // relying on it meanwhile.
        let lease = loop {
            match self.appends.add(&self.journal, inode) {
                Some(lease) => break lease,
                None => {
                    self.appends.request_room();
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        tokio::time::sleep_until(lease.release_after().into()).await;
        let turn = lease.turn.lock().await;
        // The next holder reads the length; a report after that could undo a truncation.
        while let Err(error) = self.report_appends(inode).await {
            tracing::debug!(inode = inode.0, %error, "the append lease is kept until the length is reported");
            tokio::time::sleep(RETRY).await;
        }
        // Otherwise it was granted after its request had ended, or to a previous daemon.
        let exclusive = lease.session().is_some();
        lease.give_up();
        let lock = LockRequest { exclusive, ..append_lease(inode) };
        while let Some(session) = self.locks.session() {
            let change = LockChange::Clear { session: session.number, lock };
            let deadline = Deadline::after(self.timeout);
            match self.notify("release the append lease", MetaChange::Lock(change), deadline).await
            {
                // Also if the session has ended.
                Ok(_) | Err(ClientError::Meta(_)) => break,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
        drop(turn);
        drop(lease);
        self.appends.remove_free(&self.journal, inode);
    }

    async fn report_appends(&self, inode: InodeId) -> Result<(), Errno> {
        let deadline = Deadline::after(self.timeout);
        match self.files.get(inode) {
            Some(open) => match self.report_length(inode, &open, false, deadline).await {
                // The file is gone.
                Err(Errno::STALE | Errno::NOENT) => Ok(()),
                reported => reported,
            },
            None if self.journal.is_dirty(inode) && !self.read_only => {
                match self.report_former_length(inode, deadline).await {
                    Ok(()) => self.journal.mark_clean(inode),
                    Err(ClientError::Meta(threefs_meta::MetaError::NotFound { .. })) => {}
                    Err(error) => {
                        return Err(self.errno_of("report appends", &error, true));
                    }
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Waits until no append by this mount is in progress, and excludes them.
    pub(super) async fn exclude_appends<'a>(
        &self,
        lease: Option<&'a crate::appends::AppendLease>,
        deadline: Deadline,
    ) -> Result<Option<tokio::sync::MutexGuard<'a, ()>>, Errno> {
        let Some(lease) = lease else { return Ok(None) };
        let turn = tokio::time::timeout_at(deadline.instant().into(), lease.turn.lock()).await;
        turn.map(Some).map_err(|_| Errno::TIMEDOUT)
    }
}
