//! Content of files: opening, reading, writing, telling lengths.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{ClientError, FileHandle};
use threefs_core::ids::InodeId;
use threefs_meta::identity::{READ, WRITE};
use threefs_meta::protocol::REPORT_RANGES_MAX;
use threefs_meta::{
    At, Inode, InodeKind, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, Reservation,
    Written,
};

use crate::calls::{inode_of, unexpected};
use crate::daemon::{Call, Daemon};
use crate::files::{OpenFile, session_of};
use crate::wire::{self, Body, Fields};

const O_ACCMODE: u32 = 3;
const O_WRONLY: u32 = 1;
const O_RDWR: u32 = 2;
/// Space that a growing file reserves ahead: its length up to the first of these, then an eighth of
/// its length, at least the first and at most the second. What it does not need counts for some
/// minutes longer.
const DOUBLED_MAX: u64 = 1 << 20;
const AHEAD_MAX: u64 = 64 << 20;
/// Truncations by others that a write follows before it gives up.
const CUTS_MAX: usize = 16;
/// Ranges of written chunks of a file that are not reported yet; a write that finds more reports
/// them first. With what all requests in work may add, one report has room for them.
const UNREPORTED_MAX: usize = 64;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Daemon {
    /// Opens an inode if the caller may; whatever it was, it is the newest.
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
            // A program that may only be executed is read by the kernel, which has checked that.
            Err(Errno::ACCESS) if access == READ => {
                let client = self.journal.client();
                let access = threefs_meta::identity::EXECUTE;
                let open = MetaQuery::Open { at: At::inode(id), access, client };
                inode_of(self.query(call, &format!("execute {id}"), open).await?)?
            }
            answered => inode_of(answered?)?,
        };
        if inode.links == 0 && self.files.get(id).is_none() {
            // Somebody removed it; perhaps the path leads to another one now.
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
            // The length that the kernel knows may be as old as the pages.
            self.device.invalidate_attributes(call.request.node);
        }
        let flags = if same { wire::OPEN_KEEP_CACHE } else { 0 };
        Ok(wire::opened(Body::default(), self.handle(0), flags))
    }

    /// One more handle of a file.
    pub(crate) async fn open_file(
        &self,
        call: &Call<'_>,
        handle: FileHandle,
        inode: &Inode,
    ) -> Result<(Arc<OpenFile>, bool), Errno> {
        // Neither a former daemon nor the last close has reported it, or it is open.
        let looks = self.journal.is_untold(inode.id) && self.files.get(inode.id).is_none();
        self.take_over(call, handle, inode, 1, looks && !self.read_only).await
    }

    /// What was written to a file and not reported, which is now this daemon's to report: its chunks
    /// and, if it `looks` for it, its end.
    async fn take_over(
        &self,
        call: &Call<'_>,
        handle: FileHandle,
        inode: &Inode,
        handles: u32,
        looks: bool,
    ) -> Result<(Arc<OpenFile>, bool), Errno> {
        let (mut end, truncate_version) = (inode.length(), handle.truncate_version);
        if looks {
            let found = self.former_end(&handle, end, call.deadline).await;
            let failed = |error| self.failed(&format!("take over {}", inode.id), &error, true);
            end = found.map_err(failed)?;
        }
        let noted = self.journal.noted(inode.id, truncate_version);
        let (open, same) = self.files.open(handle, inode, handles);
        let mut state = open.state();
        let unreported = end > inode.length() || !noted.is_empty();
        // It may have been cut meanwhile.
        if unreported && state.file.truncate_version == truncate_version {
            state.unreported.merge(&noted);
            state.length = state.length.max(end);
            state.dirty = true;
            state.written = now();
        }
        drop(state);
        Ok((open, same))
    }

    /// The file of a handle. One that a former daemon opened is taken over.
    pub(crate) async fn file_of(
        &self,
        call: &Call<'_>,
        handle: u64,
    ) -> Result<Arc<OpenFile>, Errno> {
        let id = self.inode(call.request.node);
        if let Some(file) = self.files.get(id) {
            return Ok(file);
        }
        let client = self.journal.client();
        let open = MetaQuery::Open { at: At::inode(id), access: 0, client };
        let inode = inode_of(self.query_as_root(call, &format!("take over {id}"), open).await?)?;
        let file = FileHandle::of(&id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        let looks = self.is_former(handle) && !self.read_only;
        let (open, _) = self.take_over(call, file, &inode, 0, looks).await?;
        let mut state = open.state();
        state.has_session = inode.quota.is_some();
        state.learn(&inode);
        drop(state);
        Ok(open)
    }

    pub(crate) async fn read(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)?;
        let open = self.file_of(call, handle).await?;
        let (file, length) = {
            let state = open.state();
            (state.file.clone(), state.length)
        };
        let size = length.saturating_sub(offset).min(u64::from(size));
        // At most what one read of the kernel asks for.
        let mut buffer = vec![0; size as usize];
        if size > 0 {
            let read = self.client.read_range(&file, offset, &mut buffer, call.deadline).await;
            read.map_err(|error| self.failed(&format!("read {}", file.inode), &error, true))?;
        }
        Ok(Body(buffer))
    }

    pub(crate) async fn write(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let size = fields.u32().ok_or(Errno::INVAL)? as usize;
        let payload =
            call.request.body.slice_ref(call.request.body.get(40..40 + size).ok_or(Errno::INVAL)?);
        let end = offset.checked_add(size as u64).ok_or(Errno::FBIG)?;
        let id = self.inode(call.request.node);
        let open = self.file_of(call, handle).await?;
        self.reserve(&open, end, call.deadline).await?;
        let unreported = open.state().unreported.ranges();
        if unreported >= UNREPORTED_MAX {
            self.tell_length(id, &open, false, call.deadline).await?;
        }
        let file = self.write_reserved(&open, offset, payload, call.deadline).await?;
        let mut chunks = Written::of_bytes(offset, end, file.layout.chunk_bytes);
        let noted = {
            let mut state = open.state();
            state.length = state.length.max(end);
            if state.file.truncate_version != file.truncate_version {
                // Some of them may be gone.
                chunks = Written::default();
            }
            state.unreported.merge(&chunks);
            state.dirty = true;
            state.written = now();
            // With the lock held: a report that ends after it would leave the note for ever.
            self.journal.note(file.inode, file.truncate_version, &chunks)
                && self.journal.untold(file.inode)
        };
        if !noted {
            self.tell_length(file.inode, &open, false, call.deadline).await?;
        }
        Ok(Body::default().u32(size as u32).u32(0))
    }

    /// Writes what is reserved, and reserves it again where another client's cut, or a long silence of
    /// this one, took the reservation. Gives the file as it was when it was written.
    async fn write_reserved(
        &self,
        open: &OpenFile,
        offset: u64,
        payload: Bytes,
        deadline: Deadline,
    ) -> Result<FileHandle, Errno> {
        let end = offset + payload.len() as u64;
        let mut cuts = 0;
        loop {
            let file = open.state().file.clone();
            match self.client.write_range(&file, offset, payload.clone(), deadline).await {
                Ok(()) => return Ok(file),
                Err(ClientError::NotReserved { .. }) if cuts < CUTS_MAX => {
                    cuts += 1;
                    open.state().reserved = 0;
                    self.reserve(open, end, deadline).await?;
                }
                Err(ClientError::InvalidArgument { .. }) => return Err(Errno::FBIG),
                Err(error) => {
                    return Err(self.failed(&format!("write {}", file.inode), &error, true));
                }
            }
        }
    }

    /// Has a quota charged before anything is written: ahead if that fits, else exactly.
    pub(crate) async fn reserve(
        &self,
        open: &OpenFile,
        end: u64,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let enough = |open: &OpenFile| {
            let state = open.state();
            !state.in_quota || end <= state.reserved
        };
        if enough(open) {
            return Ok(());
        }
        let _one_at_a_time = open.telling.lock().await;
        let mut wanted = {
            let state = open.state();
            // No further than a file can be: meta refuses that.
            end.saturating_add(ahead(state.length)).min(state.file.layout.length_max()).max(end)
        };
        for _ in 0..CUTS_MAX {
            if enough(open) {
                return Ok(());
            }
            let (id, truncate_version) = {
                let state = open.state();
                (state.file.inode, state.file.truncate_version)
            };
            let session = session_of(self.journal.client(), id);
            let reservation = Reservation { inode: id, session, end: wanted, truncate_version };
            let change = MetaChange::Reserve { reservations: vec![reservation] };
            let what = format!("reserve {wanted} bytes for {id}");
            match self.tell(&what, change, deadline).await {
                Ok(MetaReply::Inodes(mut inodes)) => {
                    let inode = inodes.pop().ok_or(Errno::IO)?;
                    let inode = inode
                        .map_err(|error| self.failed(&what, &ClientError::Meta(error), true))?;
                    let mut state = open.state();
                    if truncate_version_of(&inode) == Some(truncate_version) {
                        state.has_session = true;
                    }
                    state.follow(&inode);
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(ClientError::Meta(MetaError::QuotaExceeded { .. })) if wanted > end => {
                    wanted = end;
                }
                Err(error) => return Err(self.failed(&what, &error, true)),
            }
        }
        Err(Errno::IO)
    }

    /// Tells the metadata service the length, if it does not know it; with `last` also that nothing
    /// is reserved any more. Makes it durable: the metadata half of an fsync.
    pub(crate) async fn tell_length(
        &self,
        id: InodeId,
        open: &OpenFile,
        last: bool,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let _one_at_a_time = open.telling.lock().await;
        for _ in 0..CUTS_MAX {
            let telling = Telling::begin(open);
            let (length, truncate_version, dirty, ends) = {
                let state = open.state();
                let ends = last && state.has_session && !telling.more;
                (state.length, state.file.truncate_version, telling.dirty, ends)
            };
            if !dirty && !ends {
                return Ok(());
            }
            let written = telling.written.clone();
            let report = LengthReport { inode: id, length, truncate_version, written };
            let change = MetaChange::ReportLengths {
                reports: if dirty { vec![report] } else { Vec::new() },
                ends: if ends {
                    vec![(id, session_of(self.journal.client(), id))]
                } else {
                    Vec::new()
                },
            };
            let what = format!("tell the length of {id}");
            let told = self.tell(&what, change, deadline).await;
            let inode = match told {
                Ok(MetaReply::Inodes(mut inodes)) => match inodes.pop() {
                    Some(Ok(inode)) => Some(inode),
                    Some(Err(error)) => {
                        let refused = Err(ClientError::Meta(error));
                        if is_settled(&refused) {
                            // Nobody will read it.
                            telling.told();
                            self.journal.told(id);
                        }
                        return refused.map_err(|error| self.failed(&what, &error, true));
                    }
                    None => None,
                },
                Ok(other) => return Err(unexpected(&other)),
                Err(error) => return Err(self.failed(&what, &error, true)),
            };
            let cut = {
                let mut state = open.state();
                if ends {
                    state.end_session();
                }
                let cut = inode
                    .as_ref()
                    .is_some_and(|inode| truncate_version_of(inode) != Some(truncate_version));
                if let Some(inode) = &inode {
                    // Somebody cut it, before it was written or after: what was acknowledged counts.
                    state.dirty |= cut && inode.length() < length;
                    state.dirty |= telling.more;
                    // It keeps a length that has grown since.
                    state.follow(inode);
                }
                // A write that sets `dirty` notes it after that.
                if !state.dirty {
                    self.journal.told(id);
                } else if !cut {
                    self.journal.reported(id, truncate_version, &telling.written);
                }
                cut
            };
            let more = telling.more;
            telling.told();
            if !cut {
                if let Some(inode) = &inode {
                    self.files.advance(inode, u64::from(dirty));
                }
                if !more {
                    return Ok(());
                }
            }
        }
        Err(Errno::IO)
    }

    pub(crate) async fn flush(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let handle = Fields(&call.request.body).u64().ok_or(Errno::INVAL)?;
        let id = self.inode(call.request.node);
        if self.files.get(id).is_none() && !self.is_former(handle) {
            return Ok(Body::default());
        }
        let open = self.file_of(call, handle).await?;
        let last = open.state().handles <= 1;
        self.tell_length(id, &open, last, call.deadline).await?;
        Ok(Body::default())
    }

    pub(crate) async fn fsync(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let handle = Fields(&call.request.body).u64().ok_or(Errno::INVAL)?;
        let open = self.file_of(call, handle).await?;
        self.tell_length(self.inode(call.request.node), &open, false, call.deadline).await?;
        Ok(Body::default())
    }

    /// Its errors reach nobody: what matters was told by the close before.
    pub(crate) async fn release(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let handle = Fields(&call.request.body).u64().ok_or(Errno::INVAL)?;
        let id = self.inode(call.request.node);
        let open = match self.files.get(id) {
            Some(open) => open,
            None if self.is_former(handle) => self.file_of(call, handle).await?,
            None => return Ok(Body::default()),
        };
        let last = open.state().handles <= 1;
        let told = self.tell_length(id, &open, last, call.deadline).await;
        let forgotten = match self.is_former(handle) {
            true => self.files.close_former(id),
            false => self.files.close(id),
        };
        if forgotten {
            let mut released =
                self.released.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            released.push(id);
            self.released_now.notify_one();
        }
        told?;
        Ok(Body::default())
    }

    /// Everything before the end counts as data, as POSIX allows.
    pub(crate) async fn seek(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset) =
            (fields.u64().ok_or(Errno::INVAL)?, fields.u64().ok_or(Errno::INVAL)?);
        let whence = fields.u32().ok_or(Errno::INVAL)?;
        let length = self.file_of(call, handle).await?.state().length;
        match whence {
            SEEK_DATA | SEEK_HOLE if offset >= length => Err(Errno::NXIO),
            SEEK_DATA => Ok(Body::default().u64(offset)),
            SEEK_HOLE => Ok(Body::default().u64(length)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Finds and tells the lengths that a former daemon had not told: before anybody asks for them.
    pub(crate) async fn tell_former(&self, timeout: std::time::Duration) {
        for id in self.journal.all_untold() {
            let deadline = Deadline::after(timeout);
            if self.pass(deadline).await.is_err() {
                return;
            }
            let told = self.tell_former_one(id, deadline).await;
            if is_settled(&told) {
                self.journal.told(id);
            } else if let Err(error) = told {
                // It is found when the file is opened, or used through an old handle.
                tracing::warn!(inode = id.0, %error, "a length was not told");
                if !matches!(error, ClientError::Meta(_)) {
                    return;
                }
            }
        }
    }

    pub(crate) async fn tell_former_one(
        &self,
        id: InodeId,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let query = MetaQuery::Stat { at: At::inode(id), follow: false };
        let what = format!("take over {id}");
        let root = threefs_meta::Identity::ROOT;
        let MetaReply::Inode(inode) = self.client.query_for(&root, &what, query, deadline).await?
        else {
            return Ok(());
        };
        let file = FileHandle::of(&id.to_string(), &inode)?;
        let end = self.former_end(&file, inode.length(), deadline).await?;
        let truncate_version = file.truncate_version;
        let mut noted = self.journal.noted(id, truncate_version);
        loop {
            let written = noted.take(REPORT_RANGES_MAX);
            let report = LengthReport { inode: id, length: end, truncate_version, written };
            let change = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
            if let MetaReply::Inodes(inodes) = self.tell(&what, change, deadline).await? {
                inodes.into_iter().try_for_each(|told| told.map(drop))?;
            }
            if noted.is_empty() {
                return Ok(());
            }
        }
    }

    /// The end of what former daemons wrote to a file, at least `length`: of what storage has, and
    /// of what was noted, should storage have lost it.
    async fn former_end(
        &self,
        file: &FileHandle,
        length: u64,
        deadline: Deadline,
    ) -> Result<u64, ClientError> {
        let stored = self.client.stored_end(file, length, deadline).await?;
        let noted = self.journal.noted(file.inode, file.truncate_version);
        let last = noted.iter().last().map_or(0, |(_, last)| u64::from(last));
        let begin = last * u64::from(file.layout.chunk_bytes);
        Ok(if noted.is_empty() { stored } else { stored.max(begin + 1) })
    }

    /// Tells all lengths that nobody was told. What fails is told by the next close or fsync.
    pub(crate) async fn tell_lengths(&self) {
        for (id, open) in self.files.dirty() {
            if !self.may_be_used() {
                return;
            }
            let deadline = Deadline::after(std::time::Duration::from_secs(5));
            if let Err(error) = self.tell_length(id, &open, false, deadline).await {
                tracing::debug!(inode = id.0, %error, "its length is told later");
            }
        }
    }
}

/// A length on its way. If it does not arrive, however that ends, it must be told again.
struct Telling<'a> {
    open: &'a OpenFile,
    dirty: bool,
    written: Written,
    /// There are further chunks to tell of.
    more: bool,
    truncate_version: u64,
}

impl<'a> Telling<'a> {
    fn begin(open: &'a OpenFile) -> Self {
        let mut state = open.state();
        let dirty = std::mem::take(&mut state.dirty);
        state.telling = dirty;
        let written = state.unreported.take(REPORT_RANGES_MAX);
        let more = !state.unreported.is_empty();
        let truncate_version = state.file.truncate_version;
        drop(state);
        Self { open, dirty, written, more, truncate_version }
    }

    fn told(mut self) {
        self.dirty = false;
    }
}

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        let mut state = self.open.state();
        state.telling = false;
        state.dirty |= self.dirty;
        if self.dirty && state.file.truncate_version == self.truncate_version {
            state.unreported.merge(&self.written);
        }
    }
}

/// How much a file of this length reserves ahead.
fn ahead(length: u64) -> u64 {
    length.min(DOUBLED_MAX).max(length / 8).min(AHEAD_MAX)
}

/// Whether there is nothing left to report: all is known, or the file is gone. What is refused for
/// another reason (no space, a quota) was acknowledged nevertheless.
fn is_settled(told: &Result<(), ClientError>) -> bool {
    matches!(told, Ok(()) | Err(ClientError::Meta(MetaError::NotFound { .. })))
}

fn truncate_version_of(inode: &Inode) -> Option<u64> {
    match inode.kind {
        InodeKind::File { truncate_version, .. } => Some(truncate_version),
        _ => None,
    }
}

pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_file_reserves_more_ahead() {
        const MIB: u64 = 1 << 20;
        for (length, expected) in [
            (0, 0),
            (4096, 4096),
            (3 * MIB, MIB),
            (16 * MIB, 2 * MIB),
            (800 * MIB, 64 * MIB),
            (u64::MAX, 64 * MIB),
        ] {
            assert_eq!(ahead(length), expected, "{length}");
        }
    }

    #[test]
    fn what_is_refused_for_want_of_space_is_still_to_be_reported() {
        let detail = "the store is nearly full".to_owned();
        assert!(!is_settled(&Err(ClientError::Meta(MetaError::NoSpace { detail }))));
        let path = "7".to_owned();
        assert!(is_settled(&Err(ClientError::Meta(MetaError::NotFound { path }))));
        assert!(is_settled(&Ok(())));
    }
}
