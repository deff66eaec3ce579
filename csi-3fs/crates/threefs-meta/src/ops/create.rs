//! Makes and opens files and symbolic links.

use threefs_core::ids::ClientId;
use threefs_core::layout::Layout;
use threefs_kv::{Operation, Transaction};

use super::length::begin_session;
use super::quota::{self, Charge};
use super::walk::{Last, Place, Slot, find, slot, walk};
use super::{Birth, Given, OpError, count_subdirectories, load_named, store, touch};
use crate::identity::{Identity, READ, WRITE};
use crate::protocol::{
    At, EntryKind, InodeKind, LayoutDefaults, MetaError, MetaReply, PATH_BYTES_MAX, SessionId,
};
use crate::rows::{self, DentryRow, InodeRow};

/// Gives new files their chains.
pub(crate) trait Layouts: Sync {
    /// The layout of a file, by its own wishes, else by its directory's.
    fn choose(&self, wishes: [LayoutDefaults; 2]) -> Result<Layout, MetaError>;
}

/// A write session that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub session: SessionId,
    pub client: ClientId,
}

/// `MetaChange::Create`.
pub(crate) struct Create<'a, L> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub mode: u32,
    pub exclusive: bool,
    pub layout: LayoutDefaults,
    pub layouts: &'a L,
    pub write: Option<Wanted>,
    pub given: Given,
}

impl<L: Layouts> Operation for Create<'_, L> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        // As in POSIX, an exclusive creation does not go through a symbolic link.
        let last = if self.exclusive { Last::Keep } else { Last::Follow };
        let place = walk(txn, self.who, self.at, last).await?;
        let found = match &place {
            Place::Bare(_) => Some(find(txn, self.who, self.at, last).await?),
            Place::Entry { found: Some(entry), .. } => {
                Some(load_named(txn, *entry, &self.at.path).await?)
            }
            Place::Entry { found: None, .. } => None,
        };
        if let Some(row) = found {
            if self.exclusive {
                return Err(MetaError::Exists { path: self.at.path.clone() }.into());
            }
            return opened(txn, row, self.at, self.write, false, None).await;
        }
        let slot = slot(txn, self.who, self.at, last).await?;
        slot.check(self.who, self.at)?;
        let Slot { parent, name, .. } = slot;
        let InodeKind::Directory { defaults, .. } = &parent.inode.kind else {
            return Err(MetaError::NotADirectory { path: self.at.path.clone() }.into());
        };
        let layout = self.layouts.choose([self.layout, *defaults])?;
        let (who, given, mode) = (self.who, &self.given, self.mode);
        let birth = Birth { who, parent: &parent.inode, given, mode };
        let mut row = birth.file(given.first_inode, layout);
        insert(txn, &parent, &name, &mut row, given).await?;
        opened(txn, row, self.at, self.write, true, None).await
    }
}

/// Writes a new inode and its name; it counts for its directory's quota.
pub(super) async fn insert(
    txn: &mut Transaction,
    parent: &InodeRow,
    name: &str,
    row: &mut InodeRow,
    given: &Given,
) -> Result<(), OpError> {
    row.metadata_bytes += quota::name_bytes(name).unsigned_abs();
    let entry = DentryRow { inode: row.inode.id, kind: row.kind() };
    rows::write(txn, &rows::dentry(parent.inode.id, name), &entry)?;
    store(txn, row)?;
    touch(txn, parent.inode.id, given.now);
    if entry.kind == EntryKind::Directory {
        count_subdirectories(txn, parent.inode.id, 1);
    }
    quota::charge(txn, row.inode.quota, Charge::of(row)).await
}

async fn opened(
    txn: &mut Transaction,
    mut row: InodeRow,
    at: &At,
    write: Option<Wanted>,
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
        return Err(super::not_found(&at.path, id));
    }
    if let Some(Wanted { session, client }) = write {
        if !created && txn.get(&rows::trim(id)).await?.is_some() {
            return Err(OpError::TrimPending(id));
        }
        begin_session(txn, &mut row, session, client, full).await?;
        // Conflicts with the collector, too, which reads the inode before it takes the chunks.
        store(txn, &mut row)?;
    }
    let session = write.map(|wanted| wanted.session);
    Ok(MetaReply::Opened { inode: super::visible(txn, row).await?, session, created })
}

/// `MetaChange::Open`.
pub(crate) struct Open<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub write: Option<Wanted>,
    /// Why no session may begin, if so.
    pub full: Option<MetaError>,
}

impl Operation for Open<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.who, self.at, Last::Follow).await?;
        let access = if self.write.is_some() { WRITE } else { READ };
        self.who.check(&row.inode, access, &self.at.path)?;
        opened(txn, row, self.at, self.write, false, self.full.as_ref()).await
    }
}

/// `MetaChange::MakeSymlink`.
pub(crate) struct Symlink<'a> {
    pub who: &'a Identity,
    pub at: &'a At,
    pub target: &'a str,
    pub given: Given,
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
                reason: format!("it must have 1 to {PATH_BYTES_MAX} bytes and no zero byte"),
            }
            .into());
        }
        let slot = slot(txn, self.who, self.at, Last::Keep).await?;
        if slot.found.is_some() {
            return Err(MetaError::Exists { path: self.at.path.clone() }.into());
        }
        slot.check(self.who, self.at)?;
        let (who, given, parent) = (self.who, &self.given, &slot.parent.inode);
        let birth = Birth { who, parent, given, mode: 0o777 };
        let mut row = birth.inode(given.first_inode, 1, InodeKind::Symlink { target });
        insert(txn, &slot.parent, &slot.name, &mut row, given).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}
