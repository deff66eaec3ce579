//! Operations on paths and names. Reads and writes of file data are in `read` and `write`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use threefs_core::ids::{Epoch, InodeId};
use threefs_core::layout::Layout;
use threefs_core::snapshot_inode;
use threefs_meta::{
    At, Entry, Inode, InodeKind, LayoutDefaults, MetaChange, MetaError, MetaQuery, MetaReply,
    RenameMode, Written,
};
use tokio::task::JoinSet;

use crate::Client;
use crate::error::{ClientError, OperationName};
use crate::window::task_result;

const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;
/// Maximum number of concurrent file creations: enough to share the metadata store's flushes.
const CREATES_IN_FLIGHT_MAX: usize = 64;

/// An open file. It refers to its inode, also when the file is renamed.
#[derive(Clone, Debug)]
pub struct FileHandle {
    /// Path at open, for messages.
    pub path: OperationName,
    /// Inode of the file.
    pub inode: InodeId,
    /// Location of its chunks.
    pub layout: Layout,
    /// Truncate version when the handle was created.
    pub truncate_version: u64,
    /// Chunks that must exist, as of the creation of the handle.
    pub written: Written,
    /// Whether it counts for a quota, so that growth must be reserved.
    pub(crate) quota: bool,
    /// Of a file of a snapshot, once it is read: the epoch of the snapshot. A later snapshot may have
    /// the number of a removed one, and so the inode.
    pub(crate) epoch: Arc<OnceLock<Epoch>>,
}

impl FileHandle {
    /// Whether it is a file of a snapshot.
    pub fn is_in_snapshot(&self) -> bool {
        snapshot_inode::split(self.inode).is_some()
    }

    /// Refuses a change of a file of a snapshot.
    pub(crate) fn check_writable(&self) -> Result<(), ClientError> {
        match self.is_in_snapshot() {
            true => Err(MetaError::ReadOnly { path: self.path.to_string() }.into()),
            false => Ok(()),
        }
    }

    /// The handle with the current state of its inode.
    pub(crate) fn renewed(&self, inode: &Inode) -> Result<Self, ClientError> {
        Ok(Self { epoch: Arc::clone(&self.epoch), ..Self::of(&self.path, inode)? })
    }

    /// Opens an inode; `path` is for messages.
    ///
    /// # Errors
    /// The inode is not a regular file.
    pub fn of(path: &str, inode: &Inode) -> Result<Self, ClientError> {
        match &inode.kind {
            InodeKind::File { layout, truncate_version, written, .. } => Ok(Self {
                path: Arc::from(path),
                inode: inode.id,
                layout: layout.clone(),
                truncate_version: *truncate_version,
                written: written.clone(),
                quota: inode.quota.is_some(),
                epoch: Arc::default(),
            }),
            InodeKind::Directory { .. } => {
                Err(ClientError::Meta(MetaError::IsADirectory { path: path.into() }))
            }
            InodeKind::Symlink { .. } => Err(ClientError::Meta(MetaError::Invalid {
                field: "path".into(),
                value: path.into(),
                reason: "it is a symbolic link, not a file".into(),
            })),
            InodeKind::Special { .. } => Err(ClientError::Meta(MetaError::NotSupported {
                path: path.into(),
                reason: "it is a special file; open it through a mount".into(),
            })),
        }
    }
}

impl Client {
    /// Creates a directory; with `parents` also missing parents, and an existing directory is not
    /// an error.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn mkdir(&self, path: &str, parents: bool) -> Result<(), ClientError> {
        let defaults = LayoutDefaults::default();
        let at = At::path(path);
        let change = MetaChange::MakeDirectory { at, mode: DIRECTORY_MODE, parents, defaults };
        self.change("make directory", path, change).await.map(drop)
    }

    /// The inode at a path; with `follow`, follows a symbolic link in the last component.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn stat(&self, path: &str, follow: bool) -> Result<Inode, ClientError> {
        let query = MetaQuery::Stat { at: At::path(path), follow };
        inode(self.query("stat", path, query).await?)
    }

    /// Entries of a directory, sorted by name.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn list(&self, path: &str) -> Result<Vec<Entry>, ClientError> {
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = all.last().map(|entry| entry.name.clone()).unwrap_or_default();
            let query = MetaQuery::List { at: At::path(path), after, limit: 0 };
            match self.query("list", path, query).await? {
                MetaReply::Page { entries, more } => {
                    all.extend(entries);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(ClientError::unexpected("meta", &other)),
            }
        }
    }

    /// Entries of a directory with their inodes, sorted by name, without entries that are removed
    /// meanwhile.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn scan(&self, path: &str) -> Result<Vec<(Entry, Inode)>, ClientError> {
        let entries = self.list(path).await?;
        let at: Vec<At> = entries.iter().map(|entry| At::inode(entry.inode)).collect();
        let inodes = self.stat_many("list", path, at).await?;
        let current = entries.into_iter().zip(inodes);
        Ok(current.filter_map(|(entry, inode)| Some((entry, inode.ok()?))).collect())
    }

    /// Opens a file.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn open(&self, path: &str) -> Result<FileHandle, ClientError> {
        FileHandle::of(path, &self.stat(path, true).await?)
    }

    /// Creates a file, or opens an existing one unless `exclusive`.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn create(&self, path: &str, exclusive: bool) -> Result<FileHandle, ClientError> {
        let change = MetaChange::Create {
            at: At::path(path),
            mode: FILE_MODE,
            exclusive,
            layout: LayoutDefaults::default(),
            write: false,
            track_open: false,
        };
        match self.change("create", path, change).await? {
            MetaReply::Opened { inode, .. } => FileHandle::of(path, &inode),
            other => Err(ClientError::unexpected("meta", &other)),
        }
    }

    /// Length of an open file.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn length(&self, file: &FileHandle) -> Result<u64, ClientError> {
        Ok(self.current(file).await?.0)
    }

    /// Length and current state of an open file.
    pub(crate) async fn current(
        &self,
        file: &FileHandle,
    ) -> Result<(u64, FileHandle), ClientError> {
        let query = MetaQuery::Stat { at: At::inode(file.inode), follow: false };
        match self.query("stat", &file.path, query).await {
            Ok(reply) => {
                let inode = inode(reply)?;
                Ok((inode.length(), file.renewed(&inode)?))
            }
            Err(ClientError::Meta(MetaError::NotFound { .. })) => {
                Err(ClientError::Stale { path: file.path.to_string() })
            }
            Err(error) => Err(error),
        }
    }

    /// Truncates an open file or extends it with zeros.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn set_length(&self, file: &FileHandle, length: u64) -> Result<(), ClientError> {
        file.check_writable()?;
        let change = MetaChange::SetLength { at: At::inode(file.inode), length };
        self.change("set length of", &file.path, change).await.map(drop)
    }

    /// Renames atomically, replacing an existing file.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rename(&self, source: &str, destination: &str) -> Result<(), ClientError> {
        let (from, to) = (At::path(source), At::path(destination));
        let change = MetaChange::Rename { from, to, mode: RenameMode::Replace };
        self.change("rename", &format!("{source} to {destination}"), change).await.map(drop)
    }

    /// Gives a file another name: a hard link, which never replaces an existing name.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn link(&self, source: &str, destination: &str) -> Result<(), ClientError> {
        let (from, to) = (At::path(source), At::path(destination));
        let what = format!("{source} to {destination}");
        self.change("link", &what, MetaChange::Link { from, to }).await.map(drop)
    }

    /// Removes a name that is not a directory.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn unlink(&self, path: &str) -> Result<(), ClientError> {
        self.change("remove", path, MetaChange::Unlink { at: At::path(path) }).await.map(drop)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rmdir(&self, path: &str) -> Result<(), ClientError> {
        let change = MetaChange::RemoveDirectory { at: At::path(path) };
        self.change("remove directory", path, change).await.map(drop)
    }

    /// Removes a file or a directory tree.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn rmtree(&self, path: &str) -> Result<(), ClientError> {
        let change = MetaChange::RemoveTree { at: At::path(path) };
        self.change("remove tree", path, change).await.map(drop)
    }

    /// Creates a symbolic link.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn symlink(&self, target: &str, path: &str) -> Result<(), ClientError> {
        let change = MetaChange::MakeSymlink { at: At::path(path), target: target.into() };
        self.change("make symbolic link", path, change).await.map(drop)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn readlink(&self, path: &str) -> Result<String, ClientError> {
        match self.stat(path, false).await?.kind {
            InodeKind::Symlink { target } => Ok(target),
            _ => Err(ClientError::InvalidArgument {
                detail: format!("`{path}` is not a symbolic link; use `stat` to see what it is"),
            }),
        }
    }

    /// File and length of each path, without duplicates.
    pub(crate) async fn look_up<'a>(
        &self,
        paths: &[&'a str],
        verb: &str,
    ) -> Result<BTreeMap<&'a str, Result<(FileHandle, u64), ClientError>>, ClientError> {
        let mut unique: Vec<&str> = paths.to_vec();
        unique.sort_unstable();
        unique.dedup();
        let at = unique.iter().map(|path| At::path(*path)).collect();
        let inodes = self.stat_many(verb, unique.first().unwrap_or(&""), at).await?;
        let current = unique.into_iter().zip(inodes).map(|(path, inode)| {
            let file = inode.map_err(ClientError::Meta);
            (path, file.and_then(|it| Ok((FileHandle::of(path, &it)?, it.length()))))
        });
        Ok(current.collect())
    }

    /// Opens many files to write; with `create`, creates those that do not exist.
    pub(crate) async fn open_or_create(
        &self,
        paths: &[&str],
        create: bool,
    ) -> Result<HashMap<String, FileHandle>, ClientError> {
        let mut files = HashMap::new();
        let mut missing = Vec::new();
        for (path, current) in self.look_up(paths, "write").await? {
            match current {
                Ok((file, _)) => {
                    files.insert(path.to_owned(), file);
                }
                Err(ClientError::Meta(MetaError::NotFound { .. })) if create => {
                    missing.push(path.to_owned());
                }
                Err(error) => return Err(error),
            }
        }
        let mut creates: JoinSet<Result<FileHandle, ClientError>> = JoinSet::new();
        for path in missing {
            if creates.len() >= CREATES_IN_FLIGHT_MAX
                && let Some(result) = creates.join_next().await
            {
                insert(&mut files, result)?;
            }
            let client = self.clone();
            creates.spawn(async move { client.create(&path, false).await });
        }
        while let Some(result) = creates.join_next().await {
            insert(&mut files, result)?;
        }
        Ok(files)
    }

    /// Inodes of many paths or inode numbers, in order, each with a separate error.
    pub(crate) async fn stat_many(
        &self,
        verb: &str,
        path: &str,
        at: Vec<At>,
    ) -> Result<Vec<Result<Inode, MetaError>>, ClientError> {
        let mut all = Vec::with_capacity(at.len());
        for page in at.chunks(threefs_meta::protocol::BATCH_MAX) {
            let query = MetaQuery::StatMany { at: page.to_vec() };
            match self.query(verb, path, query).await? {
                MetaReply::Inodes(inodes) if inodes.len() == page.len() => all.extend(inodes),
                other => return Err(ClientError::unexpected("meta", &other)),
            }
        }
        Ok(all)
    }

    pub(crate) async fn change(
        &self,
        verb: &str,
        path: &str,
        change: MetaChange,
    ) -> Result<MetaReply, ClientError> {
        let what = format!("{verb} `{path}`");
        self.0.metadata.change(&what, change, &self.1, self.deadline()).await
    }

    pub(crate) async fn query(
        &self,
        verb: &str,
        path: &str,
        query: MetaQuery,
    ) -> Result<MetaReply, ClientError> {
        let what = format!("{verb} `{path}`");
        self.0.metadata.query(&what, query, self.deadline()).await
    }
}

pub(crate) fn inode(reply: MetaReply) -> Result<Inode, ClientError> {
    match reply {
        MetaReply::Inode(inode) => Ok(inode),
        other => Err(ClientError::unexpected("meta", &other)),
    }
}

fn insert(
    files: &mut HashMap<String, FileHandle>,
    result: Result<Result<FileHandle, ClientError>, tokio::task::JoinError>,
) -> Result<(), ClientError> {
    let file = task_result(result)?;
    files.insert(file.path.to_string(), file);
    Ok(())
}
