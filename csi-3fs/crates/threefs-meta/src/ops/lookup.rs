//! Path lookup: from a directory and a path to an entry or an inode.

use threefs_core::ids::InodeId;
use threefs_kv::Transaction;

use crate::identity::Identity;
use crate::ops::scope;
use crate::ops::{OpError, load, load_named, names as entries, not_found};
use crate::permission::{EXECUTE, WRITE};
use crate::protocol::{
    At, EntryKind, InodeKind, MetaError, NAME_BYTES_MAX, PATH_BYTES_MAX, ROOT, SYMLINKS_MAX,
};
use crate::rows::{DentryRow, InodeRow, REMOVED};

/// Whether a symbolic link in the last component is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinalSymlink {
    Follow,
    Keep,
}

/// Result of a path lookup.
#[derive(Clone, Debug)]
pub(crate) enum Resolved {
    /// A name in a directory, with its entry if it exists.
    Entry { parent: InodeId, name: String, entry: Option<DentryRow> },
    /// An inode without a name: the start itself, or the target of `..`.
    Inode(InodeId),
}

/// Looks up a path, checking search permission on its directories. Rows that it reads conflict with
/// changes of them. For a caller with a scope the tree starts at the scope, as after a chroot:
/// absolute paths and links start there, `..` stays inside, and a link that leaves it is refused.
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
    // Remaining names, the next one last.
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
                reason: "a path of the control plane must not contain `..`".into(),
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
        let entry = entries::get(txn, parent, &name).await?;
        let symlink = entry.filter(|entry| entry.kind == EntryKind::Symlink);
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
                let detail = format!("{} is listed as a symbolic link but is not one", entry.inode);
                return Err(MetaError::Damaged { detail }.into());
            };
            names.extend(split(&target).rev().map(str::to_owned));
            resolved = Resolved::Inode(if target.starts_with('/') { root } else { parent });
            continue;
        }
        resolved = Resolved::Entry { parent, name, entry };
    }
    Ok(resolved)
}

/// The directory at a location, for descending further.
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
        Resolved::Entry { entry: Some(entry), .. } => match entry.kind {
            EntryKind::Directory => Ok(entry.inode),
            _ => Err(not_a_directory(at)),
        },
        Resolved::Entry { entry: None, .. } => Err(not_found(&at.path, at.directory)),
    }
}

/// The inode at a location, or `NotFound`.
pub(crate) async fn find(
    txn: &mut Transaction,
    caller: &Identity,
    at: &At,
    last: FinalSymlink,
) -> Result<InodeRow, OpError> {
    match lookup(txn, caller, at, last).await? {
        Resolved::Inode(id) => load(txn, id, &at.path).await,
        Resolved::Entry { entry: Some(entry), .. } => load_named(txn, entry, &at.path).await,
        Resolved::Entry { entry: None, .. } => Err(not_found(&at.path, at.directory)),
    }
}

/// A name in an existing directory, for changing its entry.
pub(crate) struct NameInDirectory {
    pub parent: InodeRow,
    pub name: String,
    pub entry: Option<DentryRow>,
}

/// Looks up a location as a name in a directory. The caller checks write permission with
/// `NameInDirectory::check`. A final `.` or `..` and the root have no name.
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
            reason: "the path must end with a name".into(),
        }
        .into()),
        Resolved::Entry { parent, name, entry } => {
            let parent = load(txn, parent, &at.path).await?;
            match parent.parent() {
                None => Err(not_a_directory(at)),
                Some(REMOVED) => Err(not_found(&at.path, at.directory)),
                Some(_) => Ok(NameInDirectory { parent, name, entry }),
            }
        }
    }
}

impl NameInDirectory {
    /// Checks that the caller may add and remove names here.
    pub(crate) fn check(&self, caller: &Identity, at: &At) -> Result<(), OpError> {
        Ok(caller.check(&self.parent.inode, WRITE | EXECUTE, &at.path)?)
    }
}

/// The names of a path, without empty ones and `.`.
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
            MetaError::Invalid { field, value, reason: "it contains a NUL byte".into() }.into()
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
