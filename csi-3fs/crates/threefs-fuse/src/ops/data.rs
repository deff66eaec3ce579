//! File data operations: read, write, seek.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{ClientError, FileHandle};
use threefs_core::ids::InodeId;
use threefs_meta::{At, MetaChange, Written};

use super::TRUNCATIONS_MAX;
use super::handles::leaves_pages;
use crate::daemon::{Call, Daemon};
use crate::files::OpenFile;
use crate::locks::LockSession;
use crate::wire::{Body, Fields, WRITE_KILL_SUIDGID, is_append, is_of_page};

/// Maximum number of unreported ranges of a file; a write that finds more reports them first. A
/// report has room for these and for what all running requests may add.
const UNREPORTED_MAX: usize = 64;
/// Longest wait of a direct write for the kernel to drop pages.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Daemon {
    pub(crate) async fn read(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)?;
        let open = self.file_of(call, handle).await?;
        let id = self.inode(call.request.node);
        self.drain(id, call.deadline).await?;
        self.wait_locks(id, call.deadline).await?;
        let (file, length) = {
            let state = open.state();
            (state.file.clone(), state.length)
        };
        let size = length.saturating_sub(offset).min(u64::from(size));
        if size > 0 {
            let pieces = self.client.read_range(&file, offset, size, call.deadline).await;
            let failed = |error| self.errno_of(&format!("read {}", file.inode), &error, true);
            call.data = pieces.map_err(failed)?;
        }
        self.wait_locks(id, call.deadline).await?;
        Ok(Body::default())
    }

    pub(crate) async fn write(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)? as usize;
        let flags = fields.u32().ok_or(Errno::INVAL)?;
        let payload =
            call.request.body.slice_ref(call.request.body.get(40..40 + size).ok_or(Errno::INVAL)?);
        let id = self.inode(call.request.node);
        let open = self.file_of(call, handle).await?;
        if flags & WRITE_KILL_SUIDGID != 0 {
            self.clear_set_id(call, id).await?;
        }
        if self.shares_appends() && is_append(call.request) {
            self.drain(id, call.deadline).await?;
            self.append(call, &open, offset, payload).await?;
        } else if self.is_deferrable(call, handle, &open) {
            self.write_later(id, &open, offset, payload, call.deadline).await?;
        } else {
            self.drain(id, call.deadline).await?;
            self.write_payload(id, &open, offset, payload, call.deadline).await?;
            // The page of a mapping is locked until its write is answered.
            if leaves_pages(handle) && !is_of_page(call.request) {
                // A page may have been read during the write, through another open file. Linux 6.18
                // drops it; earlier kernels may not.
                let deadline = Deadline::after(DROP_TIMEOUT);
                self.drop_pages(id, offset, size as u64, deadline).await;
            }
        }
        Ok(Body::default().u32(size as u32).u32(0))
    }

    /// Clears the set-user-ID and set-group-ID bits of a file that its caller is about to write. The
    /// kernel requests it for files with direct I/O only, and clears the bits of others itself.
    async fn clear_set_id(&self, call: &Call<'_>, id: InodeId) -> Result<(), Errno> {
        let mode = self.stat(call, id).await?.mode;
        let group_bit = if mode & 0o010 == 0 { 0 } else { 0o2000 };
        let kept = mode & !(0o4000 | group_bit);
        if kept == mode {
            return Ok(());
        }
        let change = MetaChange::SetAttributes {
            at: At::inode(id),
            follow: false,
            mode: Some(kept),
            uid: None,
            gid: None,
            accessed: None,
            modified: None,
        };
        // Without the number of the request: it may be repeated.
        let operation = format!("clear the set-id bits of {id}");
        let cleared = self.notify(&operation, change, call.deadline).await;
        cleared.map(drop).map_err(|error| self.errno_of(&operation, &error, true))
    }

    /// Writes bytes of an open file: durable when it returns, except for the length, which is
    /// recorded in the journal.
    pub(super) async fn write_payload(
        &self,
        id: InodeId,
        open: &OpenFile,
        offset: u64,
        payload: Bytes,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        self.write_pieces(id, open, offset, vec![payload], None, deadline).await
    }

    /// Writes adjacent pieces, in order; with a lock session under its lease. The length includes
    /// them once all are written.
    pub(super) async fn write_pieces(
        &self,
        id: InodeId,
        open: &OpenFile,
        offset: u64,
        pieces: Vec<Bytes>,
        session: Option<&LockSession>,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let length = pieces.iter().map(|piece| piece.len() as u64).sum();
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        self.reserve(open, end, deadline).await?;
        let unreported = open.state().unreported.ranges();
        if unreported >= UNREPORTED_MAX {
            self.report_length(id, open, false, deadline).await?;
        }
        let (mut at, mut file) = (offset, open.state().file.clone());
        for piece in pieces {
            let next = at + piece.len() as u64;
            file = self.write_reserved(open, at, piece, session, deadline).await?;
            at = next;
        }
        let mut chunks = Written::of_bytes(offset, end, file.layout.chunk_bytes);
        let recorded = {
            let mut state = open.state();
            state.length = state.length.max(end);
            if state.file.truncate_version != file.truncate_version {
                // A truncation may have removed some of them.
                chunks = Written::default();
            }
            state.unreported.merge(&chunks);
            state.dirty = true;
            state.written = now();
            // Under the lock: a report that ended in between would never remove the journal entry.
            self.journal.add_written(file.inode, file.truncate_version, &chunks)
                && self.journal.mark_dirty(file.inode)
        };
        if !recorded {
            self.report_length(file.inode, open, false, deadline).await?;
        }
        Ok(())
    }

    /// Writes a reserved range, and reserves it again if another client's truncation or a long
    /// silence of this client dropped the reservation. Returns the file as of the write.
    async fn write_reserved(
        &self,
        open: &OpenFile,
        offset: u64,
        payload: Bytes,
        session: Option<&LockSession>,
        deadline: Deadline,
    ) -> Result<FileHandle, Errno> {
        let end = offset + payload.len() as u64;
        let mut truncations = 0;
        loop {
            let file = open.state().file.clone();
            let client = self.client_for(file.inode)?;
            let client = session.map_or(client, |session| self.client.under(&session.lease));
            match client.write_range(&file, offset, payload.clone(), deadline).await {
                Ok(()) => return Ok(file),
                Err(ClientError::NotReserved { .. }) if truncations < TRUNCATIONS_MAX => {
                    truncations += 1;
                    open.state().reserved = 0;
                    self.reserve(open, end, deadline).await?;
                }
                Err(ClientError::InvalidArgument { .. }) => return Err(Errno::FBIG),
                Err(error) => {
                    return Err(self.errno_of(&format!("write {}", file.inode), &error, true));
                }
            }
        }
    }

    /// Makes the kernel drop its pages of a range of a file; of the whole file if both are 0. Returns
    /// whether they are dropped by the deadline; otherwise they are later.
    pub(crate) async fn drop_pages(
        &self,
        id: InodeId,
        offset: u64,
        length: u64,
        deadline: Deadline,
    ) -> bool {
        let device = Arc::clone(&self.device);
        // Waits for the kernel's own requests, which this daemon answers meanwhile, unless it already
        // processes as many as it can.
        let drop_pages = move || device.invalidate_range(id.0, offset, length);
        let dropping = tokio::task::spawn_blocking(drop_pages);
        let dropped = tokio::time::timeout_at(deadline.instant().into(), dropping).await.is_ok();
        if !dropped {
            tracing::warn!(inode = id.0, "the kernel still uses pages of a file that has changed");
        }
        dropped
    }

    /// SEEK_DATA and SEEK_HOLE: everything before the end counts as data, as POSIX allows.
    pub(crate) async fn seek(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let whence = fields.u32().ok_or(Errno::INVAL)?;
        let open = self.file_of(call, handle).await?;
        self.drain(self.inode(call.request.node), call.deadline).await?;
        let length = open.state().length;
        match whence {
            SEEK_DATA | SEEK_HOLE if offset >= length => Err(Errno::NXIO),
            SEEK_DATA => Ok(Body::default().u64(offset)),
            SEEK_HOLE => Ok(Body::default().u64(length)),
            _ => Err(Errno::INVAL),
        }
    }
}

/// The time of the local clock, in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
