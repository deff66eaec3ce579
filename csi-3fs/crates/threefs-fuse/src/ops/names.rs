//! Name operations: lookup, create, link, remove, rename.

use rustix::io::Errno;
use threefs_client::FileHandle;
use threefs_meta::{
    At, Inode, InodeKind, LayoutDefaults, MetaChange, MetaQuery, MetaReply, RenameMode, SpecialKind,
};

use super::handles::handle_number;
use crate::daemon::{Call, Daemon, inode_of, unexpected};
use crate::wire::{self, Body, Fields, opcode};

const O_EXCL: u32 = 0o200;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const S_IFMT: u32 = 0o170_000;
const S_IFREG: u32 = 0o100_000;
const S_IFIFO: u32 = 0o010_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFBLK: u32 = 0o060_000;
const S_IFSOCK: u32 = 0o140_000;

impl Daemon {
    pub(crate) async fn lookup(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        let name = Fields(&call.request.body).name().ok_or(Errno::INVAL)?;
        if self.is_virtual_name(call.request.node, name) {
            return Ok(self.virtual_directory_entry());
        }
        let at = self.entry(call.request.node, name)?;
        let operation = format!("look up `{}` in {}", at.path, at.directory);
        let query = MetaQuery::Stat { at, follow: false };
        Ok(self.entry_body(&inode_of(self.query(call, &operation, query).await?)?))
    }

    /// FUSE entry of an inode.
    pub(crate) fn entry_body(&self, inode: &Inode) -> Body {
        let attributes = self.newest_attributes(inode);
        wire::entry(Body::default(), inode.id.0, &attributes, self.valid)
    }

    pub(crate) async fn make_directory<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (mode, _umask) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32());
        let at = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let operation = format!("make directory `{}` in {}", at.path, at.directory);
        let defaults = LayoutDefaults::default();
        let change = MetaChange::MakeDirectory { at, mode, parents: false, defaults };
        Ok(self.entry_body(&inode_of(self.change(call, &operation, change).await?)?))
    }

    pub(crate) async fn make_node<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let mode = fields.u32().ok_or(Errno::INVAL)?;
        let device = fields.u32().ok_or(Errno::INVAL)?;
        let (_umask, _padding) = (fields.u32(), fields.u32());
        let at = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let special = match mode & S_IFMT {
            0 | S_IFREG => None,
            S_IFIFO => Some(SpecialKind::Fifo),
            S_IFCHR => Some(SpecialKind::CharacterDevice),
            S_IFBLK => Some(SpecialKind::BlockDevice),
            S_IFSOCK => Some(SpecialKind::Socket),
            _ => return Err(Errno::INVAL),
        };
        if let Some(kind) = special {
            let operation = format!("make special file `{}` in {}", at.path, at.directory);
            let change = MetaChange::MakeSpecial { at, mode: mode & 0o7777, kind, device };
            return Ok(self.entry_body(&inode_of(self.change(call, &operation, change).await?)?));
        }
        let change = MetaChange::Create {
            at,
            mode: mode & 0o7777,
            exclusive: true,
            layout: LayoutDefaults::default(),
            write: false,
            track_open: false,
        };
        match self.change(call, "make a file", change).await? {
            MetaReply::Opened { inode, .. } => Ok(self.entry_body(&inode)),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) async fn create<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (flags, mode) = (fields.u32().ok_or(Errno::INVAL)?, fields.u32().ok_or(Errno::INVAL)?);
        let (_umask, _open_flags) = (fields.u32(), fields.u32());
        let at = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let operation = format!("create `{}` in {}", at.path, at.directory);
        let change = MetaChange::Create {
            at,
            mode: mode & 0o7777,
            exclusive: flags & O_EXCL != 0,
            layout: LayoutDefaults::default(),
            write: false,
            track_open: true,
        };
        let inode = match self.change(call, &operation, change).await? {
            MetaReply::Opened { inode, created: true, .. } => inode,
            // Created by another client meanwhile: open it, if the caller is permitted to.
            MetaReply::Opened { inode, .. } => self.open_inode(call, inode.id, flags).await?,
            other => return Err(unexpected(&other)),
        };
        let handle = FileHandle::of(&inode.id.to_string(), &inode).map_err(|_| Errno::ISDIR)?;
        self.open_file(call, handle, &inode).await?;
        let (handle, open_flags) = (self.handle(handle_number(flags)), self.direct_flags(flags));
        let body = self.entry_body(&inode);
        Ok(wire::opened(body, handle, wire::OPEN_KEEP_CACHE | open_flags))
    }

    pub(crate) async fn symlink<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let at = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let target = fields.name().ok_or(Errno::INVAL)?;
        let target = std::str::from_utf8(target).map_err(|_| Errno::ILSEQ)?.to_owned();
        let operation = format!("make symbolic link `{}` in {}", at.path, at.directory);
        let change = MetaChange::MakeSymlink { at, target };
        Ok(self.entry_body(&inode_of(self.change(call, &operation, change).await?)?))
    }

    pub(crate) async fn read_link(&self, call: &mut Call<'_>) -> Result<Body, Errno> {
        match self.stat(call, self.inode(call.request.node)).await?.kind {
            InodeKind::Symlink { target } => Ok(Body(target.into_bytes())),
            _ => Err(Errno::INVAL),
        }
    }

    pub(crate) async fn link<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let from = At::inode(self.inode(fields.u64().ok_or(Errno::INVAL)?));
        let to = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let operation = format!("link {} as `{}` in {}", from.directory, to.path, to.directory);
        let change = MetaChange::Link { from, to };
        Ok(self.entry_body(&inode_of(self.change(call, &operation, change).await?)?))
    }

    pub(crate) async fn remove<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let name = Fields(&call.request.body).name().ok_or(Errno::INVAL)?;
        let at = self.entry(call.request.node, name)?;
        let operation = format!("remove `{}` from {}", at.path, at.directory);
        let change = match call.request.opcode {
            opcode::RMDIR => MetaChange::RemoveDirectory { at },
            _ => MetaChange::Unlink { at },
        };
        self.report_closed().await;
        self.change(call, &operation, change).await?;
        Ok(Body::default())
    }

    pub(crate) async fn rename<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let new_parent = fields.u64().ok_or(Errno::INVAL)?;
        let flags = match call.request.opcode {
            opcode::RENAME2 => {
                let flags = fields.u32().ok_or(Errno::INVAL)?;
                let _padding = fields.u32();
                flags
            }
            _ => 0,
        };
        let mode = match flags {
            0 => RenameMode::Replace,
            RENAME_NOREPLACE => RenameMode::NoReplace,
            RENAME_EXCHANGE => RenameMode::Exchange,
            _ => return Err(Errno::INVAL),
        };
        let from = self.entry(call.request.node, fields.name().ok_or(Errno::INVAL)?)?;
        let to = self.entry(new_parent, fields.name().ok_or(Errno::INVAL)?)?;
        let operation = format!(
            "rename `{}` in {} to `{}` in {}",
            from.path, from.directory, to.path, to.directory
        );
        self.report_closed().await;
        self.change(call, &operation, MetaChange::Rename { from, to, mode }).await?;
        Ok(Body::default())
    }
}
