//! Files that are open through this mount: where their chunks are, how long they are, what is
//! reserved for them, and whether the metadata service knows.
//!
//! Every write is in the chunks, durable, when the kernel has its answer. What is told later, at
//! close, fsync and in between, is the length. A daemon that takes over a mount does not know which
//! lengths its predecessor had not told: it looks at the chunks of every file that is used through
//! an older handle.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threefs_client::FileHandle;
use threefs_core::ids::{ClientId, InodeId};
use threefs_meta::{Inode, InodeKind, SessionId};

/// Files whose last seen version is remembered after they are closed, so that the kernel may keep
/// their pages.
const VERSIONS_MAX: usize = 65_536;

/// What tells that a file's content has changed: time, length, truncations.
type Version = (i64, u64, u64);

/// One file, however often it is open.
pub(crate) struct OpenFile {
    state: Mutex<FileState>,
    /// Held while a reservation or a length is told: one at a time for a file.
    pub telling: tokio::sync::Mutex<()>,
}

#[derive(Clone, Debug)]
pub(crate) struct FileState {
    pub file: FileHandle,
    /// As this mount sees it.
    pub length: u64,
    /// The metadata service does not know the length, or that something was written.
    pub dirty: bool,
    /// The length is on its way to the metadata service.
    pub telling: bool,
    /// When the newest inode that was taken over had changed, by the metadata service's clock: an
    /// answer that was overtaken by a newer one must not undo it.
    pub seen: i64,
    /// Writes may go up to here without asking.
    pub reserved: u64,
    pub in_quota: bool,
    pub has_session: bool,
    /// Handles of this daemon.
    pub handles: u32,
    /// When something was written last, by this machine's clock.
    pub written: i64,
}

impl OpenFile {
    pub(crate) fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileState {
    /// Takes over what a question was answered, where this mount does not know better.
    pub(crate) fn learn(&mut self, inode: &Inode) {
        if inode.changed.0 >= self.seen {
            self.follow(inode);
        }
    }

    /// Takes over what a change of ours was answered.
    pub(crate) fn follow(&mut self, inode: &Inode) {
        self.seen = inode.changed.0;
        let InodeKind::File { length, reserved, truncate_version, .. } = inode.kind else { return };
        self.in_quota = inode.quota.is_some();
        if truncate_version != self.file.truncate_version {
            self.file.truncate_version = truncate_version;
            self.has_session = false;
        }
        self.length = if self.dirty || self.telling { self.length.max(length) } else { length };
        self.reserved = if self.has_session { reserved.max(length) } else { length };
    }
}

#[derive(Default)]
pub(crate) struct Files {
    open: Mutex<HashMap<InodeId, Arc<OpenFile>>>,
    versions: Mutex<HashMap<InodeId, Version>>,
}

impl Files {
    /// The file if it is known.
    pub(crate) fn get(&self, inode: InodeId) -> Option<Arc<OpenFile>> {
        self.all().get(&inode).cloned()
    }

    /// One more handle of a file, whose inode was just read. Tells whether the kernel may keep its
    /// pages.
    pub(crate) fn open(
        &self,
        handle: FileHandle,
        inode: &Inode,
        handles: u32,
    ) -> (Arc<OpenFile>, bool) {
        let mut open = self.all();
        let file = open.entry(inode.id).or_insert_with(|| Arc::new(OpenFile::new(handle)));
        let file = Arc::clone(file);
        drop(open);
        let mut state = file.state();
        let (dirty, same) = (state.dirty, self.is_same(inode));
        state.learn(inode);
        state.handles += handles;
        drop(state);
        self.remember(inode);
        (file, same || dirty)
    }

    /// The metadata service's inode after a change of ours: the kernel has these pages.
    pub(crate) fn remember(&self, inode: &Inode) {
        let Some(version) = version(inode) else { return };
        let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        if versions.len() >= VERSIONS_MAX {
            versions.clear();
        }
        versions.insert(inode.id, version);
    }

    /// Whether the kernel's pages are of this version of the file.
    pub(crate) fn is_same(&self, inode: &Inode) -> bool {
        let versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
        version(inode).is_some_and(|version| versions.get(&inode.id) == Some(&version))
    }

    /// A handle of a former daemon less; true if no other is known, and the file is forgotten then.
    pub(crate) fn close_former(&self, inode: InodeId) -> bool {
        let mut open = self.all();
        let known = open.get(&inode).is_some_and(|file| file.state().handles > 0);
        if !known {
            open.remove(&inode);
        }
        !known
    }

    /// One handle less; true if it was the last one, and the file is forgotten then.
    pub(crate) fn close(&self, inode: InodeId) -> bool {
        let mut open = self.all();
        let Some(file) = open.get(&inode) else { return true };
        let left = {
            let mut state = file.state();
            state.handles = state.handles.saturating_sub(1);
            state.handles
        };
        if left == 0 {
            open.remove(&inode);
        }
        left == 0
    }

    /// Everything that is open.
    pub(crate) fn inodes(&self) -> Vec<InodeId> {
        self.all().keys().copied().collect()
    }

    /// Files whose length the metadata service does not know.
    pub(crate) fn dirty(&self) -> Vec<(InodeId, Arc<OpenFile>)> {
        let open = self.all();
        let dirty = open.iter().filter(|(_, file)| file.state().dirty);
        dirty.map(|(inode, file)| (*inode, Arc::clone(file))).collect()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<InodeId, Arc<OpenFile>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenFile {
    fn new(file: FileHandle) -> Self {
        let state = FileState {
            file,
            length: 0,
            dirty: false,
            telling: false,
            seen: i64::MIN,
            reserved: 0,
            in_quota: false,
            has_session: false,
            handles: 0,
            written: 0,
        };
        Self { state: Mutex::new(state), telling: tokio::sync::Mutex::new(()) }
    }
}

/// The write session of a mount for a file: the same for all its daemons, so that any of them can
/// end it.
pub(crate) fn session_of(client: ClientId, inode: InodeId) -> SessionId {
    SessionId(client.0 ^ (u128::from(inode.0) << 64))
}

fn version(inode: &Inode) -> Option<Version> {
    match inode.kind {
        InodeKind::File { length, truncate_version, .. } => {
            Some((inode.modified.0, length, truncate_version))
        }
        _ => None,
    }
}
