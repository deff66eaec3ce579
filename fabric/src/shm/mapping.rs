//! Memory mapping of a descriptor in this process.
//!
//! Each open maps the descriptor at an address of the kernel's choice. The thread sanitizer treats
//! these mappings as different memory and would miss races between ranks that are threads.
//! `scripts/sanitize` therefore sets `cfg(one_mapping)`, which makes all mappings of one file in a
//! process the same.

use std::io;
use std::ptr::NonNull;

use rustix::fd::OwnedFd;
use rustix::mm::{MapFlags, ProtFlags};

/// An address range. Unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) base: NonNull<u8>,
    pub(super) bytes: usize,
}

// SAFETY: an address range; synchronisation inside it is the caller's protocol.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives access to the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(fd: &OwnedFd, bytes: usize, access: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address chosen by the kernel aliases no other memory.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    /// Address of a range; `None` if it is not entirely inside the mapping.
    pub(super) fn at(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        // SAFETY: the offset lies inside the mapping.
        inside.then(|| unsafe { self.base.as_ptr().add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` created exactly this mapping, and it is not used after this.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Handle to a mapping that the owner of one descriptor uses.
#[cfg(not(one_mapping))]
pub(super) type SharedMapping = Mapping;
#[cfg(one_mapping)]
pub(super) type SharedMapping = std::sync::Arc<Mapping>;

/// Maps a file, as [`Mapping::new`] does.
#[cfg(not(one_mapping))]
pub(super) fn map(fd: &OwnedFd, bytes: usize, access: ProtFlags) -> io::Result<SharedMapping> {
    Mapping::new(fd, bytes, access)
}

/// The existing mapping of this file, or a new one. The creator maps the file first and with write
/// access, so a later open has at least the access that it requests.
#[cfg(one_mapping)]
pub(super) fn map(fd: &OwnedFd, bytes: usize, access: ProtFlags) -> io::Result<SharedMapping> {
    use std::collections::HashMap;
    use std::sync::{LazyLock, Mutex, PoisonError, Weak};

    type Maps = HashMap<(u64, u64, usize), Weak<Mapping>>;
    static MAPS: LazyLock<Mutex<Maps>> = LazyLock::new(Mutex::default);

    let file = rustix::fs::fstat(fd)?;
    let mut maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
    maps.retain(|_, mapping| mapping.strong_count() > 0);
    let key = (file.st_dev, file.st_ino, bytes);
    if let Some(mapping) = maps.get(&key).and_then(Weak::upgrade) {
        return Ok(mapping);
    }
    let mapping = std::sync::Arc::new(Mapping::new(fd, bytes, access)?);
    maps.insert(key, std::sync::Arc::downgrade(&mapping));
    Ok(mapping)
}
