//! The lock session of the mount: renewal, loss and end; I/O of files with locks.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{BootInstant, Client};
use threefs_core::ids::InodeId;
use threefs_meta::{LockAnswer, LockChange, LockQuery, MetaChange};

use crate::daemon::Daemon;
use crate::locks::LockSession;

/// Timeout of a renewal, and pause between attempts while the metadata service does not answer.
const RENEW_TIMEOUT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(500);
/// Renewals while a renewal is valid.
const RENEWALS: u32 = 4;
/// A session without locks ends after this time.
const UNUSED: Duration = Duration::from_secs(60);

/// End of what a renewal grants. The service waits for the whole lease: the rest covers differences
/// of the clocks' rates.
pub(super) fn valid_until(requested: BootInstant, lease_ms: u64) -> BootInstant {
    requested.after(Duration::from_millis(lease_ms / 3 * 2))
}

impl Daemon {
    /// Renews the lock session of the mount, if it has one, until it is cancelled.
    pub(crate) async fn keep_locks(self: &Arc<Self>) {
        let mut failing = false;
        loop {
            let Some(session) = self.locks.session() else {
                self.locks.started.notified().await;
                continue;
            };
            if self.appends.is_empty()
                && let Some(unused) = self.locks.take_unused(&self.journal, UNUSED)
            {
                self.end_locks(&unused, RENEW_TIMEOUT).await;
                continue;
            }
            let requested = BootInstant::now();
            let (client, number) = (self.journal.client(), session.number);
            let renew = LockQuery::Renew { client, session: number };
            let pause = match self.query_lock(renew, Deadline::after(RENEW_TIMEOUT)).await {
                Ok(LockAnswer::Renewed { lease_ms }) => {
                    let until = valid_until(requested, lease_ms);
                    session.renew(until);
                    failing = false;
                    until.remaining() / RENEWALS
                }
                Ok(_) => {
                    self.lose_locks(&session).await;
                    continue;
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(
                            %error,
                            "could not renew the locks of this mount: I/O of files with locks \
                             waits, and the locks are lost after the lease unless a metadata \
                             service answers (check `threefs status`)"
                        );
                    }
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// The session has ended at the metadata service.
    pub(super) async fn lose_locks(&self, session: &LockSession) {
        let lost = self.locks.lose(&self.journal, session);
        self.appends.lose(session.number);
        if !lost.is_empty() {
            tracing::error!(
                files = lost.len(),
                "this mount has lost its locks, because it did not renew them in time: I/O of the \
                 files fails with EIO until they are closed"
            );
        }
        for inode in lost {
            // Reads must not find what others may have changed since.
            self.drop_pages(inode, 0, 0, Deadline::after(self.timeout)).await;
        }
    }

    /// Ends the session when the mount is removed.
    pub(crate) async fn end_all_locks(&self, timeout: Duration) {
        if let Some(session) = self.locks.session() {
            self.end_locks(&session, timeout).await;
        }
    }

    async fn end_locks(&self, session: &LockSession, timeout: Duration) {
        let change = MetaChange::Lock(LockChange::End { session: session.number });
        let deadline = Deadline::after(timeout);
        if let Err(error) = self.notify("end the lock session", change, deadline).await {
            tracing::warn!(%error, "the locks of this mount end with its lease");
        }
    }

    /// The client for updates of a file: with locks, they require the lease of the session.
    pub(crate) fn client_for(&self, id: InodeId) -> Result<Client, Errno> {
        let session = self.locks.required(id)?;
        Ok(session.map_or_else(|| self.client.clone(), |it| self.client.under(&it.lease)))
    }

    /// Waits until the locks of a file, if it has any, are certainly held. To be called before a read
    /// is sent and before its result is returned.
    pub(super) async fn wait_locks(&self, id: InodeId, deadline: Deadline) -> Result<(), Errno> {
        match self.locks.required(id)? {
            Some(session) => session.wait_valid(deadline).await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rest of the lease covers differences of the clocks' rates.
    #[test]
    fn a_mount_relies_on_a_renewal_for_two_thirds_of_the_lease_from_its_request() {
        let requested = BootInstant::now();
        let until = valid_until(requested, 30_000);
        assert_eq!(until, requested.after(Duration::from_secs(20)));
    }
}
