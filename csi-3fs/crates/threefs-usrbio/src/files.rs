//! Registered descriptors.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::control;
use crate::mounts::is_3fs;
use crate::session::{Live, Numbers};

/// A registered file.
pub struct File {
    /// Keeps the file open until the registration ends.
    copy: OwnedFd,
    read: bool,
    write: bool,
    numbers: Numbers,
}

static FILES: RwLock<Option<HashMap<RawFd, Arc<File>>>> = RwLock::new(None);

/// Registers a descriptor; returns a copy of it, which is registered, too.
///
/// # Errors
/// `EBADF`: not a file of 3FS. `EINVAL`: already registered.
pub fn register(fd: RawFd) -> Result<RawFd, Errno> {
    if fd < 0 || !is_3fs(fd) {
        return Err(Errno::BADF);
    }
    let mut files = FILES.write().unwrap_or_else(PoisonError::into_inner);
    let files = files.get_or_insert_with(HashMap::new);
    if files.contains_key(&fd) {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's descriptor, which was open a moment ago; it is used for these calls only.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(borrowed)?;
    let copy = rustix::io::fcntl_dupfd_cloexec(borrowed, 0)?;
    let number = copy.as_raw_fd();
    let access = flags & OFlags::RWMODE;
    let (read, write) = (access != OFlags::WRONLY, access != OFlags::RDONLY);
    let file = Arc::new(File { copy, read, write, numbers: Numbers::default() });
    files.insert(fd, Arc::clone(&file));
    files.insert(number, file);
    Ok(number)
}

/// Ends a registration; the descriptor stays open, its copy is closed.
pub fn deregister(fd: RawFd) {
    let mut files = FILES.write().unwrap_or_else(PoisonError::into_inner);
    let Some(files) = files.as_mut() else { return };
    if let Some(file) = files.remove(&fd) {
        files.retain(|_, other| !Arc::ptr_eq(other, &file));
    }
}

/// The registered file of a descriptor, or of its copy.
///
/// # Errors
/// `EBADF`: not registered.
pub fn registered(fd: RawFd) -> Result<Arc<File>, Errno> {
    let files = FILES.read().unwrap_or_else(PoisonError::into_inner);
    files.as_ref().and_then(|files| files.get(&fd).cloned()).ok_or(Errno::BADF)
}

impl File {
    /// # Errors
    /// `EACCES`: the descriptor is not open for this.
    pub(crate) fn check(&self, for_read: bool) -> Result<(), Errno> {
        if if for_read { self.read } else { self.write } { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// Registers the file, if the session does not know it.
    pub(crate) fn number(&self, live: &Arc<Live>) -> Result<u32, Errno> {
        self.numbers.get(live, || control::register_file(&self.copy, live.token))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        for (live, number) in self.numbers.take() {
            live.remove_file(number);
        }
    }
}
