//! Attributes of inodes, extended ones, and free space.

use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_meta::{
    At, EntryKind, Identity, Inode, InodeKind, MetaChange, MetaQuery, MetaReply, Nanoseconds,
    SetMode, SetTime, SpecialKind,
};

use crate::calls::{inode_of, unexpected};
use crate::daemon::{Call, Daemon};
use crate::files::OpenFile;
use crate::wire::{self, Attributes, Body, Fields, set};

const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
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

/// An inode as the kernel sees it; of an open file, this mount may know more.
pub(crate) fn kernel_attributes(inode: &Inode, open: Option<&OpenFile>) -> Attributes {
    let (kind, device) = match inode.kind {
        InodeKind::File { .. } => (EntryKind::File, 0),
        InodeKind::Directory { .. } => (EntryKind::Directory, 0),
        InodeKind::Symlink { .. } => (EntryKind::Symlink, 0),
        InodeKind::Special { kind, device } => (EntryKind::Special(kind), device),
    };
    let mut attributes = Attributes {
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
    };
    if let Some(file) = open {
        let mut state = file.state();
        state.learn(inode);
        attributes.size = state.length;
        if state.dirty || state.telling {
            attributes.modified = attributes.modified.max(state.written);
            attributes.changed = attributes.changed.max(state.written);
        }
    }
    attributes
}

impl Daemon {
    fn told(&self, inode: &Inode) -> Body {
        let attributes = kernel_attributes(inode, self.files.get(inode.id).as_deref());
        wire::attributes(&attributes, self.valid)
    }

    pub(crate) async fn get_attributes(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let inode = self.stat(call, self.inode(call.request.node)).await?;
        Ok(self.told(&inode))
    }

    pub(crate) async fn set_attributes<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let id = self.inode(call.request.node);
        let wanted = Wanted::parse(&call.request.body).ok_or(Errno::INVAL)?;
        let is = |bit| wanted.valid & bit != 0;
        // Who has it open for writing was allowed to when he opened it.
        let who = if is(set::FH) { Identity::ROOT } else { call.identity() };
        let what = format!("set attributes of {id}");
        let mut answer = None;
        if is(set::SIZE) {
            answer = Some(self.set_size(call, who.clone(), wanted.size).await?);
        } else if is(set::MTIME)
            && let Some(file) = self.files.get(id)
        {
            // A later report of the length must not undo the time.
            self.tell_length(id, &file, false, call.deadline).await?;
        }
        let time = |bit, now, time| match (is(bit), is(now)) {
            (_, true) => Some(SetTime::Now),
            (true, false) => Some(SetTime::At(Nanoseconds(time))),
            _ => None,
        };
        let accessed = time(set::ATIME, set::ATIME_NOW, wanted.accessed);
        let modified = time(set::MTIME, set::MTIME_NOW, wanted.modified);
        let mode = is(set::MODE).then_some(wanted.mode & 0o7777);
        let uid = is(set::UID).then_some(wanted.uid);
        let gid = is(set::GID).then_some(wanted.gid);
        let others = mode.is_some() || uid.is_some() || gid.is_some();
        let times = accessed.is_some() || modified.is_some();
        // A change of the size sets the times itself.
        if others || (times && answer.is_none()) || answer.is_none() {
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
                // One change of a request has its number already.
                call.ticket = None;
            }
            // With a write-back cache the kernel keeps the times itself and sends them later: with
            // the open file, or with the credentials of the caller of link, rename or unlink. It
            // has checked before whether a caller may set a time.
            let write_back = is(set::MTIME) && is(set::CTIME) && !is(set::ATIME);
            let by_kernel = (is(set::FH) || write_back) && !others;
            let caller = if by_kernel { Identity::ROOT } else { call.identity() };
            let mut changed = self.change_as(call, caller.clone(), &what, change(modified)).await;
            if let (Err(Errno::PERM), Some(mode), None, None) = (&changed, mode, uid, gid)
                && self.drops_privileges(call, id, mode).await?
            {
                call.ticket = None;
                changed = self.change_as(call, Identity::ROOT, &what, change(modified)).await;
            } else if matches!(changed, Err(Errno::PERM)) && is(set::ATIME_NOW) && !others {
                // With a write-back cache the kernel fills in the modification time, also where
                // the caller asked for UTIME_NOW, which needs the right to write alone.
                call.ticket = None;
                let change = change(Some(SetTime::Now));
                changed = self.change_as(call, caller, &what, change).await;
            }
            answer = Some(inode_of(changed?)?);
        }
        let inode = answer.ok_or(Errno::INVAL)?;
        self.files.advance(&inode, u64::from(is(set::SIZE)));
        Ok(self.told(&inode))
    }

    /// Whether a new mode only lacks the set-user-ID and set-group-ID bits. The kernel clears them
    /// for the caller when a file is written or cut by somebody who may not change its mode; it
    /// has refused a chmod of such a caller before.
    async fn drops_privileges(
        &self,
        call: &Call<'_>,
        id: InodeId,
        mode: u32,
    ) -> Result<bool, Errno> {
        let known = self.stat(call, id).await?.mode & 0o7777;
        let without = |bits: u32| mode == known & !bits;
        Ok(mode != known && (without(0o6000) || without(0o4000) || without(0o2000)))
    }

    async fn set_size<'a>(
        &'a self,
        call: &mut Call<'a>,
        who: Identity,
        length: u64,
    ) -> Result<Inode, Errno> {
        let id = self.inode(call.request.node);
        let file = self.files.get(id);
        // Cut is only what lies beyond the new length and before the one that the service knows.
        match &file {
            Some(file) if file.state().dirty => {
                self.tell_length(id, file, false, call.deadline).await?;
            }
            None if self.journal.is_untold(id) && !self.read_only => {
                let told = self.tell_former_one(id, call.deadline).await;
                told.map_err(|error| self.failed(&format!("take over {id}"), &error, true))?;
                self.journal.told(id);
            }
            _ => {}
        }
        let _one_at_a_time = match &file {
            Some(file) => Some(file.telling.lock().await),
            None => None,
        };
        let change = MetaChange::SetLength { at: At::inode(id), length };
        let what = format!("set length of {id}");
        let inode = inode_of(self.change_as(call, who, &what, change).await?)?;
        if let Some(file) = &file {
            let mut state = file.state();
            state.resize(&inode);
            if !state.dirty {
                self.journal.told(id);
            }
        }
        Ok(inode)
    }

    pub(crate) async fn space(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let space = self.client.space(At::inode(self.root)).await;
        let space = space.map_err(|error| self.failed("statfs", &error, false))?;
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

    pub(crate) async fn set_attribute<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (size, flags) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32().ok_or(Errno::INVAL)?);
        let name = text(fields.name())?;
        let value = fields.0.get(..size as usize).ok_or(Errno::INVAL)?.to_vec();
        let mode = match flags {
            0 => SetMode::Any,
            XATTR_CREATE => SetMode::Create,
            XATTR_REPLACE => SetMode::Replace,
            _ => return Err(Errno::INVAL),
        };
        let at = At::inode(self.inode(call.request.node));
        let what = format!("set attribute `{name}` of {}", at.directory);
        let change = MetaChange::SetAttribute { at, name, value: Some(value), mode };
        self.change(call, &what, change).await?;
        Ok(Body::default())
    }

    pub(crate) async fn remove_attribute<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let name = text(Fields(&call.request.body).name())?;
        let at = At::inode(self.inode(call.request.node));
        let what = format!("remove attribute `{name}` of {}", at.directory);
        let change = MetaChange::SetAttribute { at, name, value: None, mode: SetMode::Any };
        self.change(call, &what, change).await?;
        Ok(Body::default())
    }

    pub(crate) async fn get_attribute(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (size, _padding) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32());
        let name = text(fields.name())?;
        if !name.starts_with("user.") {
            // Asked before every write (security.capability) and by every `ls -l` (ACLs): 3FS has
            // none, and need not be asked.
            return Err(Errno::NODATA);
        }
        let at = At::inode(self.inode(call.request.node));
        let what = format!("attribute `{name}` of {}", at.directory);
        match self.query(call, &what, MetaQuery::GetAttribute { at, name }).await? {
            MetaReply::Attribute(value) => sized(value, size),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn list_attributes(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let size = Fields(&call.request.body).u32().ok_or(Errno::INVAL)?;
        let at = At::inode(self.inode(call.request.node));
        let what = format!("list attributes of {}", at.directory);
        match self.query(call, &what, MetaQuery::ListAttributes { at }).await? {
            MetaReply::Names(names) => {
                let all = names.iter().flat_map(|name| [name.as_bytes(), b"\0"]).flatten();
                sized(all.copied().collect(), size)
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// A value, or only its length where the caller has no room yet.
fn sized(value: Vec<u8>, size: u32) -> Result<Body, Errno> {
    match size as usize {
        // Bounded by what an inode may have.
        0 => Ok(Body::default().u32(value.len() as u32).u32(0)),
        room if value.len() <= room => Ok(Body(value)),
        _ => Err(Errno::RANGE),
    }
}

fn text(name: Option<&[u8]>) -> Result<String, Errno> {
    let name = std::str::from_utf8(name.ok_or(Errno::INVAL)?);
    Ok(name.map_err(|_| Errno::ILSEQ)?.to_owned())
}

/// What a SETATTR wants.
struct Wanted {
    valid: u32,
    size: u64,
    accessed: i64,
    modified: i64,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Wanted {
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
