//! Attribute operations: inode attributes, extended attributes, and free space.

use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_meta::{
    At, EntryKind, Identity, Inode, InodeKind, MetaChange, Nanoseconds, SetTime, SpecialKind,
};

use crate::daemon::{Call, Daemon, inode_of};
use crate::wire::{self, Attributes, Body, Fields, set};

/// Bytes of a block in `statfs`.
const SPACE_BLOCK: u64 = 4096;

pub(crate) fn kind_bits(kind: EntryKind) -> u32 {
    match kind {
        EntryKind::File => 0o100_000,
        EntryKind::Directory => 0o040_000,
        EntryKind::Symlink => 0o120_000,
        EntryKind::Special(SpecialKind::Fifo) => 0o010_000,
        EntryKind::Special(SpecialKind::CharacterDevice) => 0o020_000,
        EntryKind::Special(SpecialKind::BlockDevice) => 0o060_000,
        EntryKind::Special(SpecialKind::Socket) => 0o140_000,
    }
}

/// Attributes of an inode for the kernel.
fn kernel_attributes(inode: &Inode) -> Attributes {
    let (kind, device) = match inode.kind {
        InodeKind::File { .. } => (EntryKind::File, 0),
        InodeKind::Directory { .. } => (EntryKind::Directory, 0),
        InodeKind::Symlink { .. } => (EntryKind::Symlink, 0),
        InodeKind::Special { kind, device } => (EntryKind::Special(kind), device),
    };
    Attributes {
        inode: inode.id.0,
        size: inode.length(),
        accessed: inode.accessed.0,
        modified: inode.modified.0,
        changed: inode.changed.0,
        mode: kind_bits(kind) | inode.mode,
        links: inode.links,
        uid: inode.uid,
        gid: inode.gid,
        device,
    }
}

impl Daemon {
    /// Attributes of an inode for the kernel; of an open file, this mount may have newer ones.
    pub(super) fn newest_attributes(&self, inode: &Inode) -> Attributes {
        let mut attributes = kernel_attributes(inode);
        // First: bytes that were written since are in the length.
        let pending_end = self.pending.end(inode.id);
        attributes.size = attributes.size.max(pending_end);
        // Not open: the pending bytes are of a previous daemon.
        let Some(file) = self.files.get(inode.id) else { return attributes };
        let mut state = file.state();
        state.learn(inode);
        attributes.size = state.length.max(pending_end);
        if state.dirty || state.reporting || pending_end > 0 {
            attributes.modified = attributes.modified.max(state.written);
            attributes.changed = attributes.changed.max(state.written);
        }
        attributes
    }

    fn attributes_body(&self, inode: &Inode) -> Body {
        wire::attributes(&self.newest_attributes(inode), self.valid)
    }

    pub(crate) async fn get_attributes(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let inode = self.stat(call, self.inode(call.request.node)).await?;
        Ok(self.attributes_body(&inode))
    }

    pub(crate) async fn set_attributes<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let id = self.inode(call.request.node);
        let requested = SetAttributes::parse(&call.request.body).ok_or(Errno::INVAL)?;
        let is = |bit| requested.valid & bit != 0;
        // A caller with the file open for writing was authorized when it opened the file.
        let caller = if is(set::FH) { Identity::ROOT } else { call.identity() };
        let operation = format!("set attributes of {id}");
        let mut answer = None;
        if is(set::SIZE) || is(set::MTIME) {
            self.drain(id, call.deadline).await?;
        }
        if is(set::SIZE) {
            answer = Some(self.set_size(call, caller.clone(), requested.size).await?);
        } else if is(set::MTIME)
            && let Some(file) = self.files.get(id)
        {
            // A later length report must not undo the time.
            self.report_length(id, &file, false, call.deadline).await?;
        }
        let time = |bit, now, time| match (is(bit), is(now)) {
            (_, true) => Some(SetTime::Now),
            (true, false) => Some(SetTime::At(Nanoseconds(time))),
            _ => None,
        };
        let accessed = time(set::ATIME, set::ATIME_NOW, requested.accessed);
        let modified = time(set::MTIME, set::MTIME_NOW, requested.modified);
        let mode = is(set::MODE).then_some(requested.mode & 0o7777);
        let uid = is(set::UID).then_some(requested.uid);
        let gid = is(set::GID).then_some(requested.gid);
        let other_attributes = mode.is_some() || uid.is_some() || gid.is_some();
        let times = accessed.is_some() || modified.is_some();
        // A change of size sets the times itself.
        if other_attributes || (times && answer.is_none()) || answer.is_none() {
            let change = |modified| MetaChange::SetAttributes {
                at: At::inode(id),
                follow: false,
                mode,
                uid,
                gid,
                accessed,
                modified,
            };
            if answer.is_some() {
                // The request's first change has used its sequence number.
                call.ticket = None;
            }
            // With a write-back cache the kernel keeps the times itself and sends them later: with
            // the open file, or with the credentials of the caller of link, rename or unlink. It
            // has already checked whether the caller may set a time.
            let write_back = is(set::MTIME) && is(set::CTIME) && !is(set::ATIME);
            let by_kernel = (is(set::FH) || write_back) && !other_attributes;
            let caller = if by_kernel { Identity::ROOT } else { call.identity() };
            let mut changed =
                self.change_as(call, caller.clone(), &operation, change(modified)).await;
            if let (Err(Errno::PERM), Some(mode), None, None) = (&changed, mode, uid, gid)
                && self.drops_privileges(call, id, mode).await?
            {
                call.ticket = None;
                changed = self.change_as(call, Identity::ROOT, &operation, change(modified)).await;
            } else if matches!(changed, Err(Errno::PERM)) && is(set::ATIME_NOW) && !other_attributes
            {
                // With a write-back cache the kernel fills in the modification time even if the
                // caller asked for UTIME_NOW, which needs write permission only.
                call.ticket = None;
                let change = change(Some(SetTime::Now));
                changed = self.change_as(call, caller, &operation, change).await;
            }
            answer = Some(inode_of(changed?)?);
        }
        let inode = answer.ok_or(Errno::INVAL)?;
        self.files.advance(&inode, u64::from(is(set::SIZE)));
        Ok(self.attributes_body(&inode))
    }

    /// Whether a new mode only clears the set-user-ID and set-group-ID bits. The kernel clears them
    /// when a caller that may not change the mode writes or truncates the file; it has rejected
    /// chmod calls of such callers before.
    async fn drops_privileges(
        &self,
        call: &Call<'_>,
        id: InodeId,
        mode: u32,
    ) -> Result<bool, Errno> {
        let current = self.stat(call, id).await?.mode & 0o7777;
        let without = |bits: u32| mode == current & !bits;
        Ok(mode != current && (without(0o6000) || without(0o4000) || without(0o2000)))
    }

    async fn set_size<'a>(
        &'a self,
        call: &mut Call<'a>,
        caller: Identity,
        length: u64,
    ) -> Result<Inode, Errno> {
        let id = self.inode(call.request.node);
        let file = self.files.get(id);
        let lease = self.appends.get(id);
        let _no_append = self.exclude_appends(lease.as_deref(), call.deadline).await?;
        // Only the range between the new length and the length known to the service is truncated.
        match &file {
            Some(file) if file.state().dirty => {
                self.report_length(id, file, false, call.deadline).await?;
            }
            None if self.journal.is_dirty(id) && !self.read_only => {
                let reported = self.report_former_length(id, call.deadline).await;
                reported
                    .map_err(|error| self.errno_of(&format!("take over {id}"), &error, true))?;
                self.journal.mark_clean(id);
            }
            _ => {}
        }
        let _one_at_a_time = match &file {
            Some(file) => Some(file.reporting.lock().await),
            None => None,
        };
        let change = MetaChange::SetLength { at: At::inode(id), length };
        let operation = format!("set length of {id}");
        let inode = inode_of(self.change_as(call, caller, &operation, change).await?)?;
        if let Some(file) = &file {
            let mut state = file.state();
            state.resize(&inode);
            if !state.dirty {
                self.journal.mark_clean(id);
            }
        }
        Ok(inode)
    }

    pub(crate) async fn space(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let space = self.client.space(At::inode(self.root)).await;
        let space = space.map_err(|error| self.errno_of("statfs", &error, false))?;
        let _ = call;
        Ok(Body::default()
            .u64(space.bytes_total / SPACE_BLOCK)
            .u64(space.bytes_free / SPACE_BLOCK)
            .u64(space.bytes_free / SPACE_BLOCK)
            .u64(space.inodes_total)
            .u64(space.inodes_free)
            .u32(SPACE_BLOCK as u32)
            .u32(255)
            .u32(SPACE_BLOCK as u32)
            .zeros(28))
    }
}

/// Fields of a SETATTR request.
struct SetAttributes {
    valid: u32,
    size: u64,
    accessed: i64,
    modified: i64,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl SetAttributes {
    fn parse(body: &[u8]) -> Option<Self> {
        let mut fields = Fields(body);
        let (valid, _padding, _handle) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let (size, _lock_owner) = (fields.u64()?, fields.u64()?);
        let (atime, mtime, _ctime) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (atime_ns, mtime_ns, _ctime_ns) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let (mode, _unused) = (fields.u32()?, fields.u32()?);
        let (uid, gid) = (fields.u32()?, fields.u32()?);
        let time = |second: u64, nanosecond: u32| {
            (second as i64).saturating_mul(1_000_000_000).saturating_add(i64::from(nanosecond))
        };
        let (accessed, modified) = (time(atime, atime_ns), time(mtime, mtime_ns));
        Some(Self { valid, size, accessed, modified, mode, uid, gid })
    }
}
