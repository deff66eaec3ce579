//! Creation and opening of files; creation of symbolic links.

use threefs_core::ids::ClientId;
use threefs_core::layout::Layout;
use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::file::length::start_session;
use crate::ops::lookup::{FinalSymlink, NameInDirectory, Resolved, find, lookup, lookup_name};
use crate::ops::quota::{self, Charge};
use crate::ops::{
    Inputs, NewInode, OpError, count_subdirectories, load_named, names, store, touch,
};
use crate::permission::{READ, WRITE};
use crate::protocol::{
    At, EntryKind, InodeKind, LayoutDefaults, MetaError, MetaReply, PATH_BYTES_MAX, SessionId,
};
use crate::rows::{self, DentryRow, InodeRow};

/// Chooses the chains of new files.
pub(crate) trait Layouts: Sync {
    /// The layout of a file, by its settings; those of its directory replace missing ones.
    fn choose(&self, wishes: [LayoutDefaults; 2]) -> Result<Layout, MetaError>;
}

/// A write session to start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionRequest {
    pub session: SessionId,
    pub client: ClientId,
}

/// `MetaChange::Create`.
pub(crate) struct Create<'a, L> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub mode: u32,
    pub exclusive: bool,
    pub layout: LayoutDefaults,
    pub layouts: &'a L,
    pub write: Option<SessionRequest>,
    pub inputs: Inputs,
}

impl<L: Layouts> Operation for Create<'_, L> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        // As in POSIX, an exclusive creation does not follow a symbolic link.
        let last = if self.exclusive { FinalSymlink::Keep } else { FinalSymlink::Follow };
        let resolved = lookup(txn, self.caller, self.at, last).await?;
        let existing = match &resolved {
            Resolved::Inode(_) => Some(find(txn, self.caller, self.at, last).await?),
            Resolved::Entry { entry: Some(entry), .. } => {
                Some(load_named(txn, *entry, &self.at.path).await?)
            }
            Resolved::Entry { entry: None, .. } => None,
        };
        if let Some(row) = existing {
            if self.exclusive {
                return Err(MetaError::Exists { path: self.at.path.clone() }.into());
            }
            return open_inode(txn, row, self.at, self.write, false, None).await;
        }
        let name_in = lookup_name(txn, self.caller, self.at, last).await?;
        name_in.check(self.caller, self.at)?;
        let NameInDirectory { parent, name, .. } = name_in;
        let InodeKind::Directory { defaults, .. } = &parent.inode.kind else {
            return Err(MetaError::NotADirectory { path: self.at.path.clone() }.into());
        };
        let layout = self.layouts.choose([self.layout, *defaults])?;
        let (caller, inputs, mode) = (self.caller, &self.inputs, self.mode);
        let new_inode = NewInode { caller, parent: &parent.inode, inputs, mode };
        let mut row = new_inode.file(inputs.first_inode, layout);
        insert(txn, &parent, &name, &mut row, inputs).await?;
        open_inode(txn, row, self.at, self.write, true, None).await
    }
}

/// Writes a new inode and its name, and charges its directory's quota.
pub(crate) async fn insert(
    txn: &mut Transaction,
    parent: &InodeRow,
    name: &str,
    row: &mut InodeRow,
    inputs: &Inputs,
) -> Result<(), OpError> {
    row.metadata_bytes += quota::name_bytes(name).unsigned_abs();
    let entry = DentryRow::new(row.inode.id, row.kind());
    names::set(txn, parent.inode.id, name, Some(&entry)).await?;
    store(txn, row).await?;
    touch(txn, parent.inode.id, inputs.now).await?;
    if entry.kind == EntryKind::Directory {
        count_subdirectories(txn, parent.inode.id, 1).await?;
    }
    quota::charge(txn, row.inode.quota, Charge::of(row)).await
}

async fn open_inode(
    txn: &mut Transaction,
    mut row: InodeRow,
    at: &At,
    write: Option<SessionRequest>,
    created: bool,
    full: Option<&MetaError>,
) -> Result<MetaReply, OpError> {
    let id = row.inode.id;
    match row.kind() {
        EntryKind::File => {}
        EntryKind::Directory if write.is_none() && !created => {}
        EntryKind::Directory => {
            return Err(MetaError::IsADirectory { path: at.path.clone() }.into());
        }
        EntryKind::Special(_) => {
            let reason = "it is a special file, which the kernel opens".into();
            return Err(MetaError::NotSupported { path: at.path.clone(), reason }.into());
        }
        EntryKind::Symlink => {
            return Err(MetaError::TooManySymlinks { path: at.path.clone() }.into());
        }
    }
    if row.inode.links == 0 {
        return Err(crate::ops::not_found(&at.path, id));
    }
    if let Some(SessionRequest { session, client }) = write {
        if !created && txn.get(&rows::trim(id)).await?.is_some() {
            return Err(OpError::TrimPending(id));
        }
        start_session(txn, &mut row, session, client, full).await?;
        // Also conflicts with garbage collection, which reads the inode before it drops the chunks.
        store(txn, &mut row).await?;
    }
    let session = write.map(|request| request.session);
    Ok(MetaReply::Opened { inode: crate::ops::visible(txn, row).await?, session, created })
}

/// `MetaChange::Open`.
pub(crate) struct Open<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub write: Option<SessionRequest>,
    /// Set if the store is too full for new sessions.
    pub full: Option<MetaError>,
}

impl Operation for Open<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.caller, self.at, FinalSymlink::Follow).await?;
        let access = if self.write.is_some() { WRITE } else { READ };
        self.caller.check(&row.inode, access, &self.at.path)?;
        open_inode(txn, row, self.at, self.write, false, self.full.as_ref()).await
    }
}

/// `MetaChange::MakeSymlink`.
pub(crate) struct Symlink<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub target: &'a str,
    pub inputs: Inputs,
}

impl Operation for Symlink<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let target = self.target.to_owned();
        if target.is_empty() || target.len() > PATH_BYTES_MAX || target.contains('\0') {
            return Err(MetaError::Invalid {
                field: "target".into(),
                value: target.chars().take(40).collect(),
                reason: format!("must have 1 to {PATH_BYTES_MAX} bytes and no NUL byte"),
            }
            .into());
        }
        let name_in = lookup_name(txn, self.caller, self.at, FinalSymlink::Keep).await?;
        if name_in.entry.is_some() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        name_in.check(self.caller, self.at)?;
        let (caller, inputs, parent) = (self.caller, &self.inputs, &name_in.parent.inode);
        let new_inode = NewInode { caller, parent, inputs, mode: 0o777 };
        let mut row = new_inode.inode(inputs.first_inode, 1, InodeKind::Symlink { target });
        insert(txn, &name_in.parent, &name_in.name, &mut row, inputs).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}
