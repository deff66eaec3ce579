//! Appends: writes to files opened with O_APPEND. The kernel places them at the length that it knows.
//! Another mount may have changed it: the daemon places them at the end of the file.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{ClientError, FileHandle};
use threefs_core::ids::InodeId;
use threefs_meta::{
    LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaChange, MetaReply,
};

use super::data::now;
use super::locks::RETRY;
use crate::appends::AppendLease;
use crate::daemon::{Call, Daemon, unexpected};
use crate::files::OpenFile;
use crate::journal::APPENDED_MAX;
use crate::locks::LockSession;

/// Number of the wait for a lease: a mount waits once for each file.
const WAIT: u64 = 1;
/// Time for which an append waits for its turn, in addition to the timeout: longer than the lease of
/// a holder that is cut off.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Pause between attempts while too many files have leases.
const ROOM_PAUSE: Duration = Duration::from_millis(20);
/// Number of sessions that end before an append gives up.
const SESSIONS_MAX: usize = 4;

pub(super) fn append_lease(inode: InodeId) -> LockRequest {
    let (kind, exclusive, last) = (LockKind::Append, true, u64::MAX);
    LockRequest { inode, kind, owner: 0, first: 0, last, exclusive, pid: 0 }
}

impl Daemon {
    /// Whether other mounts may append to the files of this one.
    pub(crate) fn shares_appends(&self) -> bool {
        self.locks.enabled
    }

    /// Writes bytes to the end of a file. `offset` is where the kernel has placed them.
    pub(super) async fn append(
        &self,
        call: &mut Call<'_>,
        open: &Arc<OpenFile>,
        offset: u64,
        payload: Bytes,
    ) -> Result<(), Errno> {
        let id = self.inode(call.request.node);
        let lease = self.append_lease(id, call.deadline).await?;
        let turn = tokio::time::timeout_at(call.deadline.instant().into(), lease.turn.lock()).await;
        let _turn = turn.map_err(|_| Errno::TIMEDOUT)?;
        let (unique, resent) = call.number();
        let placed = if resent { self.journal.placed(id, unique) } else { None };
        let former = lease.former();
        let session = self.hold_append_lease(call, &lease, open).await?;
        // If the session has ended meanwhile, others may have written there.
        if placed.is_some() && (former.is_none() || session.as_ref().map(|it| it.number) != former)
        {
            return Err(Errno::IO);
        }
        let end = placed.unwrap_or_else(|| open.state().length);
        self.journal.place(id, unique, end);
        call.drops_pages |= end != offset;
        let chunk_bytes = u64::from(open.state().file.layout.chunk_bytes);
        let pieces = pieces(end, payload, chunk_bytes);
        let written = self.write_pieces(id, open, end, pieces, session.as_deref(), call.deadline);
        written.await?;
        lease.note_use();
        Ok(())
    }

    /// The append lease of a file, which may not be held yet.
    async fn append_lease(
        &self,
        id: InodeId,
        deadline: Deadline,
    ) -> Result<Arc<AppendLease>, Errno> {
        loop {
            if let Some(lease) = self.appends.add(&self.journal, id) {
                return Ok(lease);
            }
            if deadline.passed() {
                let max = APPENDED_MAX;
                tracing::warn!(inode = id.0, max, "too many files of this mount are appended to");
                return Err(Errno::NOLCK);
            }
            self.appends.request_room();
            tokio::time::sleep(ROOM_PAUSE).await;
        }
    }

    /// Holds the lease of a file, and knows its end, when it returns. `None`: the metadata service
    /// does not know append leases.
    async fn hold_append_lease(
        &self,
        call: &mut Call<'_>,
        lease: &AppendLease,
        open: &Arc<OpenFile>,
    ) -> Result<Option<Arc<LockSession>>, Errno> {
        if let Some(session) = lease.session() {
            match session.wait_valid(call.deadline).await {
                // The session has ended.
                Err(Errno::IO) => {}
                waited => return waited.map(|()| Some(session)),
            }
        }
        tokio::time::sleep_until(lease.request_after().into()).await;
        for _ in 0..SESSIONS_MAX {
            let session = match self.lock_session(call.deadline).await {
                // The service does not know locks.
                Err(Errno::NOLCK) if self.locks.refusal_logged.load(SeqCst) => return Ok(None),
                session => session?,
            };
            let lost = match self.request_append_lease(call, &session).await? {
                LockAnswer::Granted => false,
                LockAnswer::GrantedAfterLoss => true,
                LockAnswer::Conflict { .. } => return Ok(None),
                _ => continue,
            };
            match session.wait_valid(call.deadline).await {
                Err(Errno::IO) => continue,
                valid => valid?,
            }
            self.find_append_end(call, open, lost).await?;
            lease.hold(&session);
            return Ok(Some(session));
        }
        Err(Errno::IO)
    }

    /// Requests the lease of a file and waits for it. `Conflict`: the service does not know leases.
    async fn request_append_lease(
        &self,
        call: &mut Call<'_>,
        session: &Arc<LockSession>,
    ) -> Result<LockAnswer, Errno> {
        let lock = append_lease(self.inode(call.request.node));
        let change = LockChange::Set { session: session.number, lock, wait: Some(WAIT) };
        let operation = "take the append lease";
        let answer = match self.notify(operation, MetaChange::Lock(change), call.deadline).await {
            Ok(MetaReply::Lock(answer)) => answer,
            Ok(other) => return Err(unexpected(&other)),
            Err(error @ ClientError::Protocol { .. }) => {
                if !self.appends.refusal_logged.swap(true, SeqCst) {
                    tracing::error!(
                        %error,
                        "the metadata service does not know append leases: appends of several \
                         mounts to one file can overwrite each other; upgrade it"
                    );
                }
                let (first, last, exclusive, pid) = (0, u64::MAX, true, 0);
                return Ok(LockAnswer::Conflict { first, last, exclusive, pid });
            }
            Err(error) => return Err(self.errno_of(operation, &error, true)),
        };
        match answer {
            LockAnswer::Waiting => {
                // Waits hold no permit: the writes before it must get one.
                call.permit = None;
                let answer = self.wait_for_append_lease(lock).await;
                call.deadline = Deadline::after(self.timeout);
                answer
            }
            LockAnswer::Lost => {
                self.lose_locks(session).await;
                Ok(LockAnswer::Lost)
            }
            answer => Ok(answer),
        }
    }

    /// At the deadline the request continues to wait: once it is granted, the service asks for the
    /// lease if others wait for it.
    async fn wait_for_append_lease(&self, lock: LockRequest) -> Result<LockAnswer, Errno> {
        let deadline = Deadline::after(self.timeout + WAIT_MAX);
        let query = LockQuery::Await { client: self.journal.client(), lock, wait: WAIT };
        loop {
            let (asked, limit) = (Instant::now(), Deadline::after(self.timeout));
            match self.query_lock(query.clone(), limit).await {
                Ok(LockAnswer::Waiting) if asked.elapsed() >= RETRY => {}
                // Too many wait there.
                Ok(LockAnswer::Waiting) => tokio::time::sleep(RETRY).await,
                answer => return answer,
            }
            if deadline.passed() {
                tracing::warn!(
                    inode = lock.inode.0,
                    "another mount did not release the append lease in time"
                );
                return Err(Errno::TIMEDOUT);
            }
        }
    }

    /// Finds the end of a file whose lease was just granted.
    async fn find_append_end(
        &self,
        call: &mut Call<'_>,
        open: &Arc<OpenFile>,
        lost: bool,
    ) -> Result<(), Errno> {
        let id = self.inode(call.request.node);
        let inode = self.stat(call, id).await?;
        let handle = FileHandle::of(&id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        call.drops_pages |= !self.files.open(handle.clone(), &inode, 0).1;
        if !lost {
            return Ok(());
        }
        let end = self.client.stored_end(&handle, inode.length(), call.deadline).await;
        let end = end.map_err(|error| self.errno_of(&format!("append to {id}"), &error, true))?;
        let mut state = open.state();
        if end > state.length {
            (state.length, state.dirty, state.written) = (end, true, now());
        }
        Ok(())
    }
}

/// Divides bytes at the bounds of chunks: they are written in order, so that a crash leaves no hole
/// before a part that was written.
fn pieces(mut offset: u64, mut payload: Bytes, chunk_bytes: u64) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    while !payload.is_empty() {
        let room = chunk_bytes - offset % chunk_bytes;
        // At most the size of a request.
        let piece = payload.split_to(payload.len().min(room as usize));
        offset += piece.len() as u64;
        pieces.push(piece);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_are_divided_at_the_bounds_of_chunks() {
        let lengths = |offset, length: usize| {
            let pieces = pieces(offset, Bytes::from(vec![0; length]), 100);
            pieces.iter().map(Bytes::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(0, 100), [100]);
        assert_eq!(lengths(30, 70), [70]);
        assert_eq!(lengths(30, 71), [70, 1]);
        assert_eq!(lengths(199, 202), [1, 100, 100, 1]);
        assert!(lengths(5, 0).is_empty());
    }
}
