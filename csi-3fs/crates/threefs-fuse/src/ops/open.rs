//! Open file operations: open, takeover of files of a previous daemon, release.

use std::sync::{Arc, PoisonError};

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::FileHandle;
use threefs_core::ids::InodeId;
use threefs_meta::permission::{READ, WRITE};
use threefs_meta::{At, Identity, Inode, LockKind, MetaQuery};

use super::data::now;
use super::handles::{O_ACCMODE, O_RDWR, O_WRONLY, handle_number, writes_directly};
use crate::daemon::{Call, Daemon, inode_of};
use crate::files::OpenFile;
use crate::wire::{self, Body, Fields};

/// Flag of RELEASE: the handle was used for flock.
const RELEASE_FLOCK: u32 = 1 << 1;

impl Daemon {
    /// Opens an inode if the caller is permitted to, and returns its current attributes.
    pub(crate) async fn open_inode(
        &self,
        call: &Call<'_>,
        id: InodeId,
        flags: u32,
    ) -> Result<Inode, Errno> {
        let access = match flags & O_ACCMODE {
            O_WRONLY => WRITE,
            O_RDWR => READ | WRITE,
            _ => READ,
        };
        if self.read_only && access & WRITE != 0 {
            return Err(Errno::ROFS);
        }
        let open = MetaQuery::Open { at: At::inode(id), access, client: self.journal.client() };
        let inode = match self.query(call, &format!("open {id}"), open).await {
            // The kernel reads a file that is executable but not readable; it has checked the
            // permission.
            Err(Errno::ACCESS) if access == READ => {
                let client = self.journal.client();
                let access = threefs_meta::permission::EXECUTE;
                let open = MetaQuery::Open { at: At::inode(id), access, client };
                inode_of(self.query(call, &format!("execute {id}"), open).await?)?
            }
            reply => inode_of(reply?)?,
        };
        if inode.links == 0 && self.files.get(id).is_none() {
            // Removed by another client; the path may lead to another inode now.
            return Err(Errno::STALE);
        }
        Ok(inode)
    }

    pub(crate) async fn open(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let flags = Fields(&call.request.body).u32().ok_or(Errno::INVAL)?;
        let id = self.inode(call.request.node);
        let inode = self.open_inode(call, id, flags).await?;
        let handle = FileHandle::of(&id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        let (_, same) = self.open_file(call, handle, &inode).await?;
        if !same {
            // The length in the kernel may be as stale as the pages.
            self.device.invalidate_attributes(call.request.node);
        }
        let keep = if same { wire::OPEN_KEEP_CACHE } else { 0 };
        let handle = self.handle(handle_number(flags));
        Ok(wire::opened(Body::default(), handle, keep | self.direct_flags(flags)))
    }

    /// Flags of an open file that the kernel does not cache: with `O_DIRECT`, whose writes it would
    /// otherwise send one after the other, and for appends. With its page cache, the kernel would
    /// divide an append at the bounds of pages, and fill its pages at the end that it knows, which
    /// may not be the end of the file.
    pub(super) fn direct_flags(&self, flags: u32) -> u32 {
        let appends = flags & wire::O_APPEND != 0 && flags & O_ACCMODE != 0;
        let append = if appends && self.shares_appends() { wire::OPEN_DIRECT_IO } else { 0 };
        let direct = wire::OPEN_DIRECT_IO | wire::OPEN_PARALLEL_DIRECT_WRITES;
        append | if writes_directly(flags) { direct } else { 0 }
    }

    /// Adds a handle to an open file.
    pub(crate) async fn open_file(
        &self,
        call: &Call<'_>,
        handle: FileHandle,
        inode: &Inode,
    ) -> Result<(Arc<OpenFile>, bool), Errno> {
        // Neither a previous daemon nor the last close has reported it.
        let find_end = self.journal.is_dirty(inode.id) && self.files.get(inode.id).is_none();
        self.take_over(handle, inode, 1, find_end && !self.read_only, call.deadline).await
    }

    /// Takes over the unreported writes of a file: its chunks and, with `find_end`, its end.
    async fn take_over(
        &self,
        handle: FileHandle,
        inode: &Inode,
        handles: u32,
        find_end: bool,
        deadline: Deadline,
    ) -> Result<(Arc<OpenFile>, bool), Errno> {
        let (mut end, truncate_version) = (inode.length(), handle.truncate_version);
        if find_end {
            let former_end = self.former_end(&handle, end, deadline).await;
            let errno = |error| self.errno_of(&format!("take over {}", inode.id), &error, true);
            end = former_end.map_err(errno)?;
        }
        let written = self.journal.written(inode.id, truncate_version);
        let (open, same) = self.files.open(handle, inode, handles);
        let mut state = open.state();
        let unreported = end > inode.length() || !written.is_empty();
        // It may have been truncated meanwhile.
        if unreported && state.file.truncate_version == truncate_version {
            state.unreported.merge(&written);
            state.length = state.length.max(end);
            state.dirty = true;
            state.written = now();
        }
        drop(state);
        Ok((open, same))
    }

    /// The open file of a handle. A file that a previous daemon opened is taken over.
    pub(crate) async fn file_of(
        &self,
        call: &Call<'_>,
        handle: u64,
    ) -> Result<Arc<OpenFile>, Errno> {
        let id = self.inode(call.request.node);
        if let Some(file) = self.files.get(id) {
            return Ok(file);
        }
        self.open_former(id, self.is_former(handle) && !self.read_only, call.deadline).await
    }

    /// Opens a file that a previous daemon has left open; `find_end`: it may have written it.
    pub(super) async fn open_former(
        &self,
        id: InodeId,
        find_end: bool,
        deadline: Deadline,
    ) -> Result<Arc<OpenFile>, Errno> {
        let (client, operation) = (self.journal.client(), format!("take over {id}"));
        let query = MetaQuery::Open { at: At::inode(id), access: 0, client };
        let reply = self.client.query_for(&Identity::ROOT, &operation, query, deadline).await;
        let inode = inode_of(reply.map_err(|error| self.errno_of(&operation, &error, true))?)?;
        let file = FileHandle::of(&id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        let (open, _) = self.take_over(file, &inode, 0, find_end, deadline).await?;
        let mut state = open.state();
        state.has_session = inode.quota.is_some() && !state.file.is_in_snapshot();
        state.learn(&inode);
        drop(state);
        Ok(open)
    }

    /// The kernel ignores errors of RELEASE: the preceding FLUSH has reported everything.
    pub(crate) async fn release<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, _flags) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u32().ok_or(Errno::INVAL)?);
        let (flags, owner) = (fields.u32().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let id = self.inode(call.request.node);
        if self.pending.end(id) > 0 {
            // After a flush that has timed out, or of another handle. The file stays open meanwhile.
            call.permit = None;
            self.pending.outlast(id).await;
            call.deadline = Deadline::after(self.timeout);
        }
        if flags & RELEASE_FLOCK != 0 && self.locks.is_locked(id) {
            if let Some(open) = self.files.get(id)
                && let Err(error) = self.report_length(id, &open, false, call.deadline).await
            {
                tracing::debug!(inode = id.0, %error, "the length will be reported later");
            }
            self.release_owner(call, LockKind::Flock, owner).await;
        }
        let open = match self.files.get(id) {
            Some(open) => open,
            None if self.is_former(handle) => self.file_of(call, handle).await?,
            None => return Ok(Body::default()),
        };
        let last = open.state().handles <= 1;
        let reported = self.report_length(id, &open, last, call.deadline).await;
        let was_last = match self.is_former(handle) {
            true => self.files.close_former(id),
            false => self.files.close(id),
        };
        if was_last {
            // The preceding FLUSH has reported it, unless it timed out.
            let _ = self.pending.take_error(id);
            self.note_closed(id);
            self.release_file_locks(call, id).await;
        }
        reported?;
        Ok(Body::default())
    }

    /// Closes a handle that a registration for rings holds.
    pub(crate) async fn release_registered(&self, id: InodeId, deadline: Deadline) {
        let Some(open) = self.files.get(id) else { return };
        let last = open.state().handles <= 1;
        if let Err(error) = self.report_length(id, &open, last, deadline).await {
            tracing::debug!(inode = id.0, %error, "the length will be reported later");
        }
        if self.files.close(id) {
            self.note_closed(id);
        }
    }

    pub(super) fn note_closed(&self, id: InodeId) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.push(id);
        self.closed_notify.notify_one();
    }
}
