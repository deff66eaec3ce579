//! Open file table of the mount: layout, length, reservation and unreported writes of each file.
//!
//! Every write recorded here is durable in its chunks. The length is reported later: at close, fsync
//! and periodically. A daemon that takes over a mount does not know all
//! unreported lengths of its predecessor: it checks the chunks of every file that is used through
//! an older handle.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threefs_client::FileHandle;
use threefs_core::ids::{ClientId, InodeId};
use threefs_meta::{Inode, InodeKind, SessionId, Written};

/// Maximum number of closed files whose last content version is kept, so that the kernel may keep
/// their pages.
const CONTENTS_MAX: usize = 65_536;

/// An open file, shared by all its handles.
pub(crate) struct OpenFile {
    state: Mutex<FileState>,
    /// Held while a reservation or a length is sent: one at a time per file.
    pub reporting: tokio::sync::Mutex<()>,
}

#[derive(Clone, Debug)]
pub(crate) struct FileState {
    pub file: FileHandle,
    /// Length as this mount sees it.
    pub length: u64,
    /// The length, or a write, is not reported to the metadata service yet.
    pub dirty: bool,
    /// A report of the length is in flight.
    pub reporting: bool,
    /// Version of the newest inode that was applied: a reply that a newer one has overtaken must
    /// not undo it.
    pub applied_version: u64,
    /// Chunks written since the last report.
    pub unreported: Written,
    /// Writes up to here need no further reservation.
    pub reserved: u64,
    pub in_quota: bool,
    pub has_session: bool,
    /// Handles of this daemon.
    pub handles: u32,
    /// Time of the last write, by the local clock.
    pub written: i64,
}

impl OpenFile {
    pub(crate) fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileState {
    /// Applies the inode of a query's reply, unless this mount has newer state.
    pub(crate) fn learn(&mut self, inode: &Inode) {
        if inode.version >= self.applied_version {
            self.follow(inode);
        }
    }

    /// Applies the inode of a change's reply.
    pub(crate) fn follow(&mut self, inode: &Inode) {
        self.applied_version = inode.version;
        let InodeKind::File { length, reserved, truncate_version, written, .. } = &inode.kind
        else {
            return;
        };
        let (length, reserved, truncate_version) = (*length, *reserved, *truncate_version);
        self.file.written.clone_from(written);
        self.in_quota = inode.quota.is_some();
        if truncate_version != self.file.truncate_version {
            self.file.truncate_version = truncate_version;
            self.has_session = false;
            // The truncation may have removed some of them.
            self.unreported = Written::default();
        }
        self.length = if self.dirty || self.reporting { self.length.max(length) } else { length };
        self.reserved = if self.has_session { reserved.max(length) } else { length };
    }

    /// Ends the write session, and with it the reservation beyond the length.
    pub(crate) fn end_session(&mut self) {
        self.has_session = false;
        self.reserved = self.reserved.min(self.length);
    }
}

impl FileState {
    /// Applies a length that this mount has set, so the metadata service knows it. A concurrent
    /// write is still to be reported, unless it may have been truncated.
    pub(crate) fn resize(&mut self, inode: &Inode) {
        let cut = matches!(&inode.kind, InodeKind::File { truncate_version, .. }
            if *truncate_version != self.file.truncate_version);
        self.dirty = !cut && !self.unreported.is_empty();
        self.follow(inode);
    }
}

#[derive(Default)]
pub(crate) struct Files {
    open: Mutex<HashMap<InodeId, Arc<OpenFile>>>,
    /// Content version of the kernel's cached pages, as the metadata service counts changes.
    contents: Mutex<HashMap<InodeId, u64>>,
}

impl Files {
    /// The file, if it is open.
    pub(crate) fn get(&self, inode: InodeId) -> Option<Arc<OpenFile>> {
        self.all().get(&inode).cloned()
    }

    /// Adds a handle to a file that is open; `None` if it is not.
    pub(crate) fn retain(&self, inode: InodeId) -> Option<Arc<OpenFile>> {
        let open = self.all();
        let file = open.get(&inode)?;
        file.state().handles += 1;
        Some(Arc::clone(file))
    }

    /// Adds handles to a file whose inode was just read. Returns whether the kernel may keep its
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
        let same = self.is_same(inode);
        state.learn(inode);
        state.handles += handles;
        drop(state);
        self.remember(inode);
        (file, same)
    }

    /// Records that the kernel's pages will be of this inode's content.
    fn remember(&self, inode: &Inode) {
        let Some(content) = content(inode) else { return };
        let mut contents = self.contents();
        if contents.len() >= CONTENTS_MAX {
            contents.clear();
        }
        contents.insert(inode.id, content);
    }

    /// Records the inode after `changes` changes of its content by this mount: the kernel's pages
    /// stay valid unless another client has changed it as well.
    pub(crate) fn advance(&self, inode: &Inode, changes: u64) {
        let Some(content) = content(inode) else { return };
        let mut contents = self.contents();
        let Some(cached) = contents.get_mut(&inode.id) else { return };
        if cached.checked_add(changes) == Some(content) {
            *cached = content;
        } else {
            contents.remove(&inode.id);
        }
    }

    /// The kernel may have pages of any content.
    pub(crate) fn forget_content(&self, inode: InodeId) {
        self.contents().remove(&inode);
    }

    /// Whether the kernel's pages match this content of the file.
    pub(crate) fn is_same(&self, inode: &Inode) -> bool {
        content(inode).is_some_and(|content| self.contents().get(&inode.id) == Some(&content))
    }

    fn contents(&self) -> MutexGuard<'_, HashMap<InodeId, u64>> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a handle of a previous daemon; true if no other handle is known, and the file is
    /// dropped then.
    pub(crate) fn close_former(&self, inode: InodeId) -> bool {
        let mut open = self.all();
        let in_use = open.get(&inode).is_some_and(|file| file.state().handles > 0);
        if !in_use {
            open.remove(&inode);
        }
        !in_use
    }

    /// Closes a handle; true if it was the last one, and the file is dropped then.
    pub(crate) fn close(&self, inode: InodeId) -> bool {
        let mut open = self.all();
        let Some(file) = open.get(&inode) else { return true };
        let handles = {
            let mut state = file.state();
            state.handles = state.handles.saturating_sub(1);
            state.handles
        };
        if handles == 0 {
            open.remove(&inode);
        }
        handles == 0
    }

    /// All open files.
    pub(crate) fn inodes(&self) -> Vec<InodeId> {
        self.all().keys().copied().collect()
    }

    /// Files with an unreported length.
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
            reporting: false,
            applied_version: 0,
            unreported: Written::default(),
            reserved: 0,
            in_quota: false,
            has_session: false,
            handles: 0,
            written: 0,
        };
        Self { state: Mutex::new(state), reporting: tokio::sync::Mutex::new(()) }
    }
}

/// Write session of a mount for a file: the same for all its daemons, so that any of them can end
/// it.
pub(crate) fn session_of(client: ClientId, inode: InodeId) -> SessionId {
    SessionId(client.0 ^ (u128::from(inode.0) << 64))
}

fn content(inode: &Inode) -> Option<u64> {
    match inode.kind {
        InodeKind::File { content, .. } => Some(content),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::ids::{TableId, TableVersion};
    use threefs_core::layout::{ChainChoice, Layout};
    use threefs_meta::Nanoseconds;

    use super::*;

    fn file(length: u64, truncate_version: u64) -> Inode {
        let layout = Layout {
            table: TableId(1),
            table_version: TableVersion(1),
            chunk_bytes: 1 << 20,
            stripe: 1,
            chains: ChainChoice::Explicit(Vec::new()),
        };
        let (reserved, content, written) = (0, 0, Written::default());
        let kind = InodeKind::File { layout, length, reserved, truncate_version, content, written };
        let time = Nanoseconds(0);
        Inode {
            id: InodeId(7),
            version: truncate_version,
            kind,
            mode: 0o644,
            uid: 0,
            gid: 0,
            links: 1,
            accessed: time,
            modified: time,
            changed: time,
            quota: None,
        }
    }

    /// Each close of a descriptor may be the last one; copies of the descriptor may continue to
    /// write.
    #[test]
    fn a_reservation_ends_with_its_session() {
        let mut inode = file(10, 1);
        inode.quota = Some(InodeId(2));
        if let InodeKind::File { reserved, .. } = &mut inode.kind {
            *reserved = 100;
        }
        let open = OpenFile::new(FileHandle::of("file", &inode).unwrap());
        let mut state = open.state();
        state.has_session = true;
        state.follow(&inode);
        assert_eq!(state.reserved, 100);
        state.end_session();
        assert_eq!((state.has_session, state.reserved), (false, 10));
    }

    /// The other mount's change is not in the kernel's pages, whatever this mount has yet to report.
    #[test]
    fn an_unreported_write_does_not_keep_pages_that_another_mount_has_changed() {
        let files = Files::default();
        let with_content = |version: u64, count: u64| {
            let mut inode = Inode { version, ..file(10, 1) };
            if let InodeKind::File { content, .. } = &mut inode.kind {
                *content = count;
            }
            inode
        };
        let open = |inode: &Inode| files.open(FileHandle::of("file", inode).unwrap(), inode, 1);
        let (opened, same) = open(&with_content(1, 5));
        assert!(!same, "nothing is known of its pages");
        assert!(open(&with_content(1, 5)).1);
        opened.state().dirty = true;
        assert!(open(&with_content(1, 5)).1, "only this mount has written");
        assert!(!open(&with_content(2, 6)).1, "another mount has written");
    }

    #[test]
    fn a_write_concurrent_with_a_resize_is_reported_unless_it_may_have_been_truncated() {
        let inode = file(10, 1);
        let open = OpenFile::new(FileHandle::of("file", &inode).unwrap());
        let mut state = open.state();
        state.unreported.add(3, 3);
        state.dirty = true;
        state.length = 4 << 20;
        state.resize(&file(100, 1));
        assert!(state.dirty && state.unreported.contains(3), "a longer file");
        assert_eq!(state.length, 4 << 20);
        state.resize(&file(50, 2));
        assert!(!state.dirty && state.unreported.is_empty());
        assert_eq!(state.length, 50);
    }
}
