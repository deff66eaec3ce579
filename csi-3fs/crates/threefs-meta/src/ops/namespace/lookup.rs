//! From a place as callers name it to a directory, a name in it and what is there.

use threefs_core::ids::InodeId;
use threefs_kv::Transaction;

use crate::identity::{EXECUTE, Identity, WRITE};
use crate::ops::volume::scope;
use crate::ops::{OpError, load, load_named, not_found};
use crate::protocol::{
    At, EntryKind, InodeKind, MetaError, NAME_BYTES_MAX, PATH_BYTES_MAX, ROOT, SYMLINKS_MAX,
};
use crate::rows::{self, DentryRow, InodeRow, REMOVED};

/// Whether a symbolic link at the very end is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinalSymlink {
    Follow,
    Keep,
}

/// Where a path leads.
#[derive(Clone, Debug)]
pub(crate) enum Resolved {
    /// A name in a directory, with what it names, if anything.
    Entry { parent: InodeId, name: String, found: Option<DentryRow> },
    /// An inode without a name at hand: the start itself, or what `..` led to.
    Inode(InodeId),
}

/// Walks a path, if the caller may go through its directories. What it reads conflicts with whoever
/// changes it. For a caller with a scope the tree begins there, as after a chroot: absolute paths
/// and links start at it, `..` stays in it, and a link that climbs out of it is refused.
pub(crate) async fn lookup(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
    last: FinalSymlink,
) -> Result<Resolved, OpError> {
    if at.path.len() > PATH_BYTES_MAX {
        return Err(too_long(&at.path));
    }
    let root = caller.scope.unwrap_or(ROOT);
    let from_root = at.path.starts_with('/') || at.directory == ROOT;
    let start = if from_root { root } else { at.directory };
    scope::check(txn, caller, start, &at.path).await?;
    let mut resolved = Resolved::Inode(start);
    let mut links_left = SYMLINKS_MAX;
    // Names still to go, the next one last.
    let mut names: Vec<String> = split(&at.path).rev().map(str::to_owned).collect();
    while let Some(name) = names.pop() {
        let parent = directory_of(txn, &resolved, at).await?;
        if !caller.is_root() {
            let row = load(txn, parent, &at.path).await?;
            caller.check(&row.inode, EXECUTE, &at.path)?;
        }
        if name == ".." && caller.is_control_plane() {
            return Err(MetaError::Invalid {
                field: "path".into(),
                value: at.path.clone(),
                reason: "a path of the control plane does not lead upwards".into(),
            }
            .into());
        }
        if name == ".." && Some(parent) == caller.scope {
            if links_left < SYMLINKS_MAX {
                return Err(scope::outside(&at.path, root));
            }
            resolved = Resolved::Inode(root);
            continue;
        }
        if name == ".." {
            let row = load(txn, parent, &at.path).await?;
            let above = row.parent().ok_or_else(|| not_a_directory(at))?;
            resolved = Resolved::Inode(if above == REMOVED { parent } else { above });
            continue;
        }
        check_name(&name)?;
        let found: Option<DentryRow> = rows::read(txn, &rows::dentry(parent, &name)).await?;
        let symlink = found.filter(|entry| entry.kind == EntryKind::Symlink);
        if let Some(entry) = symlink
            && (!names.is_empty() || last == FinalSymlink::Follow)
        {
            if caller.is_control_plane() {
                return Err(MetaError::SymlinkOnPath { path: at.path.clone(), name }.into());
            }
            if links_left == 0 {
                return Err(MetaError::TooManySymlinks { path: at.path.clone() }.into());
            }
            links_left -= 1;
            let row = load_named(txn, entry, &at.path).await?;
            let InodeKind::Symlink { target } = row.inode.kind else {
                let detail = format!("{} is listed as a symbolic link and is none", entry.inode);
                return Err(MetaError::Damaged { detail }.into());
            };
            names.extend(split(&target).rev().map(str::to_owned));
            resolved = Resolved::Inode(if target.starts_with('/') { root } else { parent });
            continue;
        }
        resolved = Resolved::Entry { parent, name, found };
    }
    Ok(resolved)
}

/// The directory that a place is, for going further down.
async fn directory_of(
    txn: &mut Transaction,
    resolved: &Resolved,
    at: &At,
) -> Result<InodeId, OpError> {
    match resolved {
        Resolved::Inode(ROOT) => Ok(ROOT),
        Resolved::Inode(id) => match load(txn, *id, &at.path).await? {
            row if row.inode.is_directory() => Ok(*id),
            _ => Err(not_a_directory(at)),
        },
        Resolved::Entry { found: Some(entry), .. } => match entry.kind {
            EntryKind::Directory => Ok(entry.inode),
            _ => Err(not_a_directory(at)),
        },
        Resolved::Entry { found: None, .. } => Err(not_found(&at.path, at.directory)),
    }
}

/// The inode at a place, or `NotFound`.
pub(crate) async fn find(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
    last: FinalSymlink,
) -> Result<InodeRow, OpError> {
    match lookup(txn, caller, at, last).await? {
        Resolved::Inode(id) => load(txn, id, &at.path).await,
        Resolved::Entry { found: Some(entry), .. } => load_named(txn, entry, &at.path).await,
        Resolved::Entry { found: None, .. } => Err(not_found(&at.path, at.directory)),
    }
}

/// A name in a living directory, for changing what it names.
pub(crate) struct NameInDirectory {
    pub parent: InodeRow,
    pub name: String,
    pub found: Option<DentryRow>,
}

/// A place as a name in a directory whose names the caller may change, which the caller of this
/// checks with `Slot::check`. `.` and `..` at the end and the root have none.
pub(crate) async fn lookup_name(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
    last: FinalSymlink,
) -> Result<NameInDirectory, OpError> {
    match lookup(txn, caller, at, last).await? {
        Resolved::Inode(id) if id == caller.scope.unwrap_or(ROOT) => {
            Err(MetaError::IsRoot { path: at.path.clone() }.into())
        }
        Resolved::Inode(_) => Err(MetaError::Invalid {
            field: "path".into(),
            value: at.path.clone(),
            reason: "it must end with a name".into(),
        }
        .into()),
        Resolved::Entry { parent, name, found } => {
            let parent = load(txn, parent, &at.path).await?;
            match parent.parent() {
                None => Err(not_a_directory(at)),
                Some(REMOVED) => Err(not_found(&at.path, at.directory)),
                Some(_) => Ok(NameInDirectory { parent, name, found }),
            }
        }
    }
}

impl NameInDirectory {
    /// Whether the caller may add and remove names here.
    pub(crate) fn check(&self, caller: &Identity, at: &At) -> Result<(), OpError> {
        Ok(caller.check(&self.parent.inode, WRITE | EXECUTE, &at.path)?)
    }
}

/// The names of a path, without those that stand for nothing.
pub(crate) fn split(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty() && *name != ".")
}

fn check_name(name: &str) -> Result<(), OpError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(too_long(name));
    }
    if name.contains('\0') {
        let (field, value) = ("name".into(), name.escape_debug().to_string());
        return Err(
            MetaError::Invalid { field, value, reason: "it contains a zero byte".into() }.into()
        );
    }
    Ok(())
}

fn too_long(name: &str) -> OpError {
    MetaError::NameTooLong { name: name.chars().take(40).collect() }.into()
}

pub(crate) fn not_a_directory(at: &At) -> OpError {
    MetaError::NotADirectory { path: at.path.clone() }.into()
}
