//! Releases of locks, also after their requests were answered.

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::ClientError;
use threefs_core::ids::InodeId;
use threefs_meta::{LockAnswer, LockChange, LockKind, LockRequest, MetaChange, MetaReply};

use super::locks::RETRY;
use crate::daemon::{Call, Daemon};
use crate::wire::opcode;

impl Daemon {
    /// Releases a range of an owner.
    pub(super) async fn release_lock<'a>(
        &'a self,
        call: &mut Call<'a>,
        lock: LockRequest,
    ) -> Result<(), Errno> {
        let inode = lock.inode;
        let Some(session) = self.locks.session().filter(|_| self.locks.is_locked(inode)) else {
            return Ok(());
        };
        let granted = self.locks.granted(inode);
        let change = LockChange::Clear { session: session.number, lock };
        // A close must not wait for a timeout for each file of its process.
        let closes = matches!(call.request.opcode, opcode::FLUSH | opcode::RELEASE);
        if closes && !self.locks.deferred.is_empty() {
            self.defer(inode, change);
            return Ok(());
        }
        match self.change_lock(call, &session, change.clone()).await {
            Ok(LockAnswer::Released { in_use: false }) => {
                self.locks.released(&self.journal, inode, granted);
                Ok(())
            }
            // The session has ended: nothing is held.
            Ok(_) | Err(Errno::IO) => Ok(()),
            Err(error) => {
                if matches!(error, Errno::TIMEDOUT | Errno::BUSY) {
                    self.defer(inode, change);
                }
                Err(error)
            }
        }
    }

    /// A descriptor of a process was closed (POSIX locks), or an open description (flock).
    pub(super) async fn release_owner<'a>(
        &'a self,
        call: &mut Call<'a>,
        kind: LockKind,
        owner: u64,
    ) {
        let inode = self.inode(call.request.node);
        let (first, last) = (0, u64::MAX);
        let lock = LockRequest { inode, kind, owner, first, last, exclusive: false, pid: 0 };
        if let Err(error) = self.release_lock(call, lock).await {
            tracing::warn!(%inode, %error, "locks of a closed file were not released: they end when this mount has closed the file, or is unmounted");
        }
    }

    /// The last handle of a file was closed. The kernel does not send releases of locks of open
    /// descriptions (F_OFD_SETLK).
    pub(super) async fn release_file_locks<'a>(&'a self, call: &mut Call<'a>, inode: InodeId) {
        self.locks.closed(&self.journal, inode);
        // Handles of previous daemons are not counted.
        if self.resumed || !self.locks.is_locked(inode) {
            return;
        }
        let Some(session) = self.locks.session() else { return };
        let granted = self.locks.granted(inode);
        call.ticket = None;
        let change = LockChange::ClearFile { session: session.number, inode };
        if !self.locks.deferred.is_empty() {
            return self.defer(inode, change);
        }
        match self.change_lock(call, &session, change.clone()).await {
            Ok(_) => self.locks.released(&self.journal, inode, granted),
            Err(Errno::TIMEDOUT | Errno::BUSY) => self.defer(inode, change),
            Err(error) => tracing::warn!(
                %inode,
                %error,
                "locks of a closed file were not released: they end when this mount has closed the file, or is unmounted"
            ),
        }
    }

    /// Makes a release once a metadata service answers.
    pub(super) fn defer(&self, inode: InodeId, change: LockChange) {
        if !self.locks.deferred.push(inode, change) {
            tracing::warn!(%inode, "a lock is held until all processes have closed the file");
        }
    }

    /// Makes deferred releases until it is cancelled.
    pub(crate) async fn release_deferred(&self) {
        loop {
            let release = self.locks.deferred.first().await;
            let (inode, change) = release.clone();
            let granted = self.locks.granted(inode);
            let deadline = Deadline::after(self.timeout);
            let operation = "release a lock";
            match self.notify(operation, MetaChange::Lock(change), deadline).await {
                Ok(MetaReply::Lock(LockAnswer::Released { in_use: false })) => {
                    self.locks.released(&self.journal, inode, granted);
                }
                // `Lost` too: the session of this release has ended, which `keep_locks` notices.
                Ok(_) => {}
                Err(error @ (ClientError::Meta(_) | ClientError::Protocol { .. })) => {
                    tracing::warn!(%inode, %error, "a lock was not released: it ends when this mount has closed the file, or is unmounted");
                }
                Err(_) => {
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            }
            self.locks.deferred.remove(&release);
        }
    }
}
