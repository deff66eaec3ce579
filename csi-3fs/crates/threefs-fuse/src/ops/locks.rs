//! Locks of files: fcntl and flock.
//!
//! A request that no metadata service answers in time ends with ETIMEDOUT. Its process may hold the
//! lock then, until it unlocks the range or closes the file.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{BootInstant, ClientError, FileHandle};
use threefs_core::ids::InodeId;
use threefs_meta::{
    Identity, LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaChange, MetaQuery,
    MetaReply,
};

use super::lock_session::valid_until;
use crate::daemon::{Call, Daemon, unexpected};
use crate::locks::{LockSession, Request};
use crate::wire::{Body, Fields, RESENT, opcode};

const READ_LOCK: u32 = 0;
const WRITE_LOCK: u32 = 1;
const UNLOCK: u32 = 2;
/// Flag of a request: of flock.
const FLOCK: u32 = 1 << 0;
/// The last byte of a lock without an end, as the kernel writes it.
const KERNEL_END: u64 = i64::MAX as u64;
/// Pause after a failed query of a wait, or release.
pub(super) const RETRY: Duration = Duration::from_millis(500);

/// A lock request of the kernel.
struct KernelRequest {
    handle: u64,
    lock: LockRequest,
    unlock: bool,
}

impl KernelRequest {
    fn parse(body: &[u8], inode: InodeId) -> Option<Self> {
        let mut fields = Fields(body);
        let (handle, owner) = (fields.u64()?, fields.u64()?);
        let (first, last) = (fields.u64()?, fields.u64()?);
        let (access, pid, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if access > UNLOCK {
            return None;
        }
        let kind = if flags & FLOCK != 0 { LockKind::Flock } else { LockKind::Posix };
        let last = if last >= KERNEL_END { u64::MAX } else { last };
        let exclusive = access == WRITE_LOCK;
        let lock = LockRequest { inode, kind, owner, first, last, exclusive, pid };
        Some(Self { handle, lock, unlock: access == UNLOCK })
    }
}

fn kernel_lock(first: u64, last: u64, access: u32, pid: u32) -> Body {
    Body::default().u64(first).u64(last.min(KERNEL_END)).u32(access).u32(pid)
}

impl Daemon {
    /// GETLK.
    pub(super) async fn test_lock(&self, call: &Call<'_>) -> Result<Body, Errno> {
        let inode = self.inode(call.request.node);
        let request = KernelRequest::parse(&call.request.body, inode).ok_or(Errno::INVAL)?;
        let LockRequest { first, last, pid, .. } = request.lock;
        let query = LockQuery::Test { client: self.journal.client(), lock: request.lock };
        match self.query_lock(query, call.deadline).await? {
            LockAnswer::Conflict { first, last, exclusive, pid } => {
                let access = if exclusive { WRITE_LOCK } else { READ_LOCK };
                Ok(kernel_lock(first, last, access, pid))
            }
            _ => Ok(kernel_lock(first, last, UNLOCK, pid)),
        }
    }

    /// SETLK and SETLKW.
    pub(super) async fn set_lock<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let inode = self.inode(call.request.node);
        let KernelRequest { handle, lock, unlock } =
            KernelRequest::parse(&call.request.body, inode).ok_or(Errno::INVAL)?;
        if unlock {
            // The next holder must see what was written under the lock.
            if self.locks.is_locked(inode)
                && let Some(open) = self.files.get(inode)
            {
                self.report_length(inode, &open, false, call.deadline).await?;
            }
            self.release_lock(call, lock).await?;
            return Ok(Body::default());
        }
        self.locks.required(inode)?;
        // First: a session without files may be ended.
        let Some(request) = self.locks.request(&self.journal, inode) else {
            tracing::warn!(%inode, max = crate::journal::LOCKED_MAX, "too many files of this mount have locks: release some, or close files");
            return Err(Errno::NOLCK);
        };
        let session = self.lock_session(call.deadline).await?;
        loop {
            let releases = self.locks.deferred.wait(inode, call.deadline).await?;
            self.take_lock(call, &session, &request, lock).await?;
            if self.locks.deferred.total() == releases {
                break;
            }
            // A close of another thread may have released it after it was granted.
            call.ticket = None;
        }
        // Another mount may hold the lock if the session was not renewed in time.
        session.wait_valid(call.deadline).await?;
        self.refresh_pages(call, handle).await?;
        Ok(Body::default())
    }

    async fn take_lock<'a>(
        &'a self,
        call: &mut Call<'a>,
        session: &Arc<LockSession>,
        request: &Request<'_>,
        lock: LockRequest,
    ) -> Result<(), Errno> {
        let wait = call.request.unique & !RESENT;
        let waits = call.request.opcode == opcode::SETLKW;
        let wait = waits.then_some(wait);
        let change = LockChange::Set { session: session.number, lock, wait };
        let answer = self.change_lock(call, session, change).await;
        if answer == Err(Errno::TIMEDOUT) {
            // It may have been granted, or wait.
            request.granted();
            if let Some(wait) = wait {
                call.ticket = None;
                self.defer(lock.inode, LockChange::Cancel { session: session.number, lock, wait });
            }
        }
        match answer? {
            LockAnswer::Granted => {
                request.granted();
                Ok(())
            }
            LockAnswer::Waiting => {
                request.granted();
                self.wait_for_lock(call, session, lock, wait.unwrap_or_default()).await
            }
            LockAnswer::Conflict { .. } => Err(Errno::AGAIN),
            LockAnswer::Deadlock => Err(Errno::DEADLK),
            // The answer to the cancellation by a previous daemon.
            LockAnswer::Released { .. } => Err(Errno::INTR),
            _ => Err(Errno::IO),
        }
    }

    /// Waits until a lock is granted, a signal arrives, or the session is lost. Waits hold no permit:
    /// the request that ends them must get one.
    async fn wait_for_lock<'a>(
        &'a self,
        call: &mut Call<'a>,
        session: &Arc<LockSession>,
        lock: LockRequest,
        wait: u64,
    ) -> Result<(), Errno> {
        // Answers of later changes are dropped only after this one has ended. If the kernel sends
        // the request to a later daemon, the wait continues under the same number.
        call.ticket = None;
        call.permit = None;
        let room = self.locks.waits.try_acquire();
        let interrupted = Arc::clone(&call.interrupted);
        let await_lock = LockQuery::Await { client: self.journal.client(), lock, wait };
        while room.is_ok() {
            let (asked, deadline) = (Instant::now(), Deadline::after(self.timeout));
            let answer = tokio::select! {
                answer = self.query_lock(await_lock.clone(), deadline) => answer,
                () = interrupted.notified() => break,
                () = session.lost() => return Err(Errno::IO),
            };
            match answer {
                Ok(LockAnswer::Waiting) if asked.elapsed() >= RETRY => {}
                Ok(LockAnswer::Granted) => {
                    self.end_wait(call);
                    return Ok(());
                }
                // Granted, and released by another thread; or the session has ended, which is
                // checked before the request is answered.
                Ok(LockAnswer::Lost) if call.request.unique & RESENT == 0 => {
                    self.end_wait(call);
                    return Ok(());
                }
                // Or cancelled by the previous daemon.
                Ok(answer) if answer != LockAnswer::Waiting => break,
                // The service does not know locks.
                Err(Errno::NOLCK) => break,
                // Too many wait there, or it does not answer.
                _ => tokio::time::sleep(RETRY).await,
            }
        }
        self.end_wait(call);
        let cancel = LockChange::Cancel { session: session.number, lock, wait };
        match (self.change_lock(call, session, cancel.clone()).await, room) {
            (Ok(LockAnswer::Granted), _) => return Ok(()),
            (Err(Errno::TIMEDOUT), _) => self.defer(lock.inode, cancel),
            (Err(error), _) => return Err(error),
            (Ok(_), Ok(_)) => return Err(Errno::INTR),
            (Ok(_), Err(_)) => return Err(Errno::NOLCK),
        }
        Err(Errno::INTR)
    }

    /// The rest of the request has a new deadline.
    fn end_wait(&self, call: &mut Call<'_>) {
        call.deadline = Deadline::after(self.timeout);
    }

    /// Drops the kernel's pages of a file that another mount has changed, as an open does.
    async fn refresh_pages(&self, call: &Call<'_>, handle: u64) -> Result<(), Errno> {
        let open = self.file_of(call, handle).await?;
        let id = self.inode(call.request.node);
        // What is written from now on is not deferred.
        self.drain(id, call.deadline).await?;
        self.report_length(id, &open, false, call.deadline).await?;
        let inode = self.stat(call, id).await?;
        let handle = FileHandle::of(&id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        let same = self.files.open(handle, &inode, 0).1;
        if same || self.drop_pages(id, 0, 0, call.deadline).await {
            return Ok(());
        }
        self.files.forget_content(id);
        Err(Errno::TIMEDOUT)
    }

    pub(super) async fn query_lock(
        &self,
        query: LockQuery,
        deadline: Deadline,
    ) -> Result<LockAnswer, Errno> {
        let (query, operation) = (MetaQuery::Lock(query), "query a lock");
        match self.client.query_for(&Identity::ROOT, operation, query, deadline).await {
            Ok(MetaReply::Lock(answer)) => Ok(answer),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(self.lock_errno(operation, &error)),
        }
    }

    /// Sends a change; ETIMEDOUT if it may have been made.
    pub(super) async fn change_lock<'a>(
        &'a self,
        call: &mut Call<'a>,
        session: &Arc<LockSession>,
        change: LockChange,
    ) -> Result<LockAnswer, Errno> {
        let operation = "change locks";
        let (unique, resent) = call.number();
        let ticket = match call.ticket.take() {
            Some(ticket) => ticket,
            None => self.journal.start(unique, resent).ok_or(Errno::BUSY)?,
        };
        let id = ticket.id();
        call.ticket = Some(ticket);
        let change = MetaChange::Lock(change);
        let sent =
            self.client.change_for(id, &Identity::ROOT, operation, change, call.deadline).await;
        match sent {
            Ok(MetaReply::Lock(LockAnswer::Lost)) => {
                self.lose_locks(session).await;
                Err(Errno::IO)
            }
            Ok(MetaReply::Lock(answer)) => Ok(answer),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(self.lock_errno(operation, &error)),
        }
    }

    pub(super) fn lock_errno(&self, operation: &str, error: &ClientError) -> Errno {
        if matches!(error, ClientError::Protocol { .. }) {
            if !self.locks.refusal_logged.swap(true, SeqCst) {
                tracing::error!(
                    %error,
                    "the metadata service does not know locks over several mounts: lock requests \
                     get ENOLCK; upgrade it"
                );
            }
            return Errno::NOLCK;
        }
        self.errno_of(operation, error, true)
    }

    /// The lock session of the mount; starts one if there is none.
    pub(super) async fn lock_session(&self, deadline: Deadline) -> Result<Arc<LockSession>, Errno> {
        if let Some(session) = self.locks.session() {
            return Ok(session);
        }
        let _one_at_a_time = self.locks.starting.lock().await;
        if let Some(session) = self.locks.session() {
            return Ok(session);
        }
        let (number, requested) = (rand::random(), BootInstant::now());
        let change = MetaChange::Lock(LockChange::Start { session: number });
        let operation = "start a lock session";
        match self.notify(operation, change, deadline).await {
            Ok(MetaReply::Lock(LockAnswer::Renewed { lease_ms })) => {
                let until = valid_until(requested, lease_ms);
                let session = Arc::new(LockSession::new(number, until));
                self.locks.start(&self.journal, &session);
                Ok(session)
            }
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(self.lock_errno(operation, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_the_kernel_are_parsed() {
        let body = |end: u64, access: u32, flags: u32| {
            let body = Body::default().u64(3).u64(9).u64(5).u64(end);
            body.u32(access).u32(77).u32(flags).u32(0).0
        };
        let parsed = KernelRequest::parse(&body(8, WRITE_LOCK, 0), InodeId(2)).unwrap();
        assert_eq!((parsed.handle, parsed.unlock), (3, false));
        let lock = LockRequest {
            inode: InodeId(2),
            kind: LockKind::Posix,
            owner: 9,
            first: 5,
            last: 8,
            exclusive: true,
            pid: 77,
        };
        assert_eq!(parsed.lock, lock);
        let parsed = KernelRequest::parse(&body(KERNEL_END, UNLOCK, FLOCK), InodeId(2)).unwrap();
        assert!(parsed.unlock && parsed.lock.kind == LockKind::Flock);
        assert_eq!(parsed.lock.last, u64::MAX, "no end");
        assert_eq!(kernel_lock(0, u64::MAX, 0, 0).0[8..16], KERNEL_END.to_le_bytes());
        assert!(KernelRequest::parse(&body(8, 3, 0), InodeId(2)).is_none());
        assert!(KernelRequest::parse(&[0; 20], InodeId(2)).is_none());
    }
}
