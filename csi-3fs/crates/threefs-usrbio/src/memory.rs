//! Memory for data and rings: files in `/dev/shm` that this process maps and the daemon opens.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::{FallocateFlags, XattrFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use threefs_rings::control::{LINKS_DIRECTORY, OWNED, Register, VIRTUAL_DIRECTORY};
use threefs_rings::{Id, MEMORY_FOLDER, memory_name};

use crate::numa;
use crate::recovery::with_live;
use crate::session::{Live, Numbers, Session, errno_of};

/// Memory that the daemon of a mount can access.
pub struct Memory {
    /// Its id.
    pub id: Id,
    base: NonNull<u8>,
    bytes: usize,
    block: usize,
    /// This process has created the mapping.
    mapped: bool,
    /// This process has created the name, and not removed it.
    owned: AtomicBool,
    session: Arc<Session>,
    numbers: Numbers,
}

// SAFETY: the memory is shared with other processes anyway; this type never accesses it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates memory and maps it. `numa`: the preferred node, or negative.
    ///
    /// # Errors
    /// `ENOSPC`: `/dev/shm` is full. `EINVAL`: a size of 0, a block larger than the memory, or an
    /// unknown node.
    pub fn create(
        session: Arc<Session>,
        bytes: usize,
        block: usize,
        numa: i32,
    ) -> Result<Self, Errno> {
        if bytes == 0 || block > bytes {
            return Err(Errno::INVAL);
        }
        let id: Id = rand::random();
        let path = path_of(&id);
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(&path).map_err(|error| errno_of(&error))?;
        // Dropped after an error: the name is removed.
        let mut memory = Self::new(session, id, NonNull::dangling(), bytes, block);
        memory.owned.store(true, Relaxed);
        rustix::fs::ftruncate(&file, bytes as u64)?;
        memory.map(&file)?;
        if let Ok(node) = usize::try_from(numa) {
            numa::prefer(memory.base.as_ptr(), bytes, node)?;
        }
        memory.populate(&file)?;
        Ok(memory)
    }

    /// Maps memory that another process of this user has created.
    ///
    /// # Errors
    /// `ENOENT`: its creator has removed it. `EINVAL`: it is smaller.
    pub fn open(session: Arc<Session>, id: Id, bytes: usize, block: usize) -> Result<Self, Errno> {
        let file = File::options().read(true).write(true).open(path_of(&id));
        let file = file.map_err(|error| errno_of(&error))?;
        check_size(&file, bytes, block)?;
        let mut memory = Self::new(session, id, NonNull::dangling(), bytes, block);
        memory.map(&file)?;
        memory.populate(&file)?;
        Ok(memory)
    }

    /// As [`Memory::adopt`], with a new id. `numa`: the preferred node of pages that are not
    /// allocated yet, or negative.
    ///
    /// # Errors
    /// As [`Memory::adopt`], and `EINVAL` for an unknown node.
    pub fn share(
        session: Arc<Session>,
        name: &str,
        base: NonNull<u8>,
        bytes: usize,
        block: usize,
        numa: i32,
    ) -> Result<Self, Errno> {
        if let Ok(node) = usize::try_from(numa) {
            numa::prefer(base.as_ptr(), bytes, node)?;
        }
        Self::adopt(session, name, rand::random(), base, bytes, block)
    }

    /// Uses memory at `base`, which is a mapping of the beginning of the file `name` in `/dev/shm`
    /// and stays mapped as long as the result is used.
    ///
    /// # Errors
    /// `ENOENT`: the file does not exist. `EINVAL`: it is smaller. `EEXIST`: the id is in use.
    pub fn adopt(
        session: Arc<Session>,
        name: &str,
        id: Id,
        base: NonNull<u8>,
        bytes: usize,
        block: usize,
    ) -> Result<Self, Errno> {
        let name = name.trim_start_matches('/');
        if name.is_empty() || name.contains('/') {
            return Err(Errno::INVAL);
        }
        // A name with the id, which stays when the program removes its name.
        let path = Path::new(MEMORY_FOLDER).join(name);
        std::fs::hard_link(path, path_of(&id)).map_err(|error| errno_of(&error))?;
        let memory = Self::new(session, id, base, bytes, block);
        memory.owned.store(true, Relaxed);
        let file = File::options().read(true).write(true).open(path_of(&id));
        let file = file.map_err(|error| errno_of(&error))?;
        check_size(&file, bytes, block)?;
        memory.populate(&file)?;
        Ok(memory)
    }

    /// Uses memory at `base` under an id that a process has registered, or has published by a link
    /// in the mount.
    ///
    /// # Errors
    /// As [`Memory::adopt`]; `ENOENT` also if the id is unknown.
    pub fn wrap(
        session: Arc<Session>,
        id: Id,
        base: NonNull<u8>,
        bytes: usize,
        block: usize,
    ) -> Result<Self, Errno> {
        if let Ok(file) = File::options().read(true).write(true).open(path_of(&id)) {
            check_size(&file, bytes, block)?;
            let memory = Self::new(session, id, base, bytes, block);
            memory.populate(&file)?;
            return Ok(memory);
        }
        let links = session.mount().join(VIRTUAL_DIRECTORY).join(LINKS_DIRECTORY);
        let mut link = dashed(&id);
        if block > 0 {
            link = format!("{link}.b{block}");
        }
        let target = std::fs::read_link(links.join(link)).map_err(|error| errno_of(&error))?;
        let name = target.strip_prefix(MEMORY_FOLDER).map_err(|_| Errno::INVAL)?;
        let name = name.to_str().ok_or(Errno::INVAL)?;
        Self::adopt(session, name, id, base, bytes, block)
    }

    fn new(session: Arc<Session>, id: Id, base: NonNull<u8>, bytes: usize, block: usize) -> Self {
        let numbers = Numbers::default();
        let owned = AtomicBool::new(false);
        Self { id, base, bytes, block, mapped: false, owned, session, numbers }
    }

    fn map(&mut self, file: &File) -> Result<(), Errno> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), self.bytes, access, flags, file, 0) }?;
        self.base = NonNull::new(base.cast()).ok_or(Errno::FAULT)?;
        self.mapped = true;
        Ok(())
    }

    /// Populates the memory and grants the daemon access.
    fn populate(&self, file: &File) -> Result<(), Errno> {
        // Otherwise the daemon would allocate the pages, and a full /dev/shm would kill this process
        // at a later access.
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, self.bytes as u64)?;
        grant(file, self.session.live().user)
    }

    /// Registers the memory for data.
    ///
    /// # Errors
    /// `ENOENT`: the daemon does not see this process's `/dev/shm`. `EMFILE`: this user has too much
    /// registered.
    pub fn register(&self) -> Result<(), Errno> {
        with_live(&self.session, |live| self.number(live)).map(drop)
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Registers the memory for data, if the session does not know it.
    pub(crate) fn number(&self, live: &Arc<Live>) -> Result<u32, Errno> {
        self.numbers.get(live, || live.register(&self.request(0, 0)))
    }

    /// Registration as memory for data, or with `entries` as a ring.
    pub(crate) fn request(&self, entries: u32, flags: u32) -> Register {
        Register {
            id: self.id,
            bytes: self.bytes as u64,
            block: self.block as u64,
            entries,
            flags: flags | if self.owned.load(Relaxed) { OWNED } else { 0 },
            limit: 0,
            start: 0,
            number: 0,
        }
    }

    /// Removes the name, unless the daemon does so when this process ends; other processes cannot
    /// open the memory any more.
    pub fn unlink(&self) {
        if self.session.live().user != 0 {
            self.remove_name();
        }
    }

    fn remove_name(&self) {
        if self.session.check_fork().is_ok() && self.owned.swap(false, Relaxed) {
            let _ = std::fs::remove_file(path_of(&self.id));
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for (live, number) in self.numbers.take() {
            live.remove_region(number);
        }
        self.remove_name();
        if self.mapped {
            // SAFETY: mapped by `map` with this length; rings hold a reference while I/O is in
            // flight, and the program must not use the memory after it has destroyed it.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }
}

fn path_of(id: &Id) -> PathBuf {
    Path::new(MEMORY_FOLDER).join(memory_name(id))
}

/// Text of a UUID.
fn dashed(id: &Id) -> String {
    let hex: Vec<String> = id.iter().map(|byte| format!("{byte:02x}")).collect();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(|part| hex[part].concat()).join("-")
}

fn check_size(file: &File, bytes: usize, block: usize) -> Result<(), Errno> {
    let about = file.metadata().map_err(|error| errno_of(&error))?;
    if bytes == 0 || block > bytes || about.size() < bytes as u64 {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// Grants only the daemon's user access to the memory.
fn grant(file: &File, user: u32) -> Result<(), Errno> {
    let about = file.metadata().map_err(|error| errno_of(&error))?;
    if user == 0 || user == about.uid() {
        return Ok(());
    }
    const ALL: u32 = u32::MAX;
    let mode = about.mode();
    let permissions = |shift: u32| (mode >> shift & 7) as u16;
    // linux/posix_acl_xattr.h: version 2, then tag, permissions and id of each entry.
    let entries: [(u16, u16, u32); 5] = [
        (0x01, permissions(6), ALL),
        (0x02, 6, user),
        (0x04, permissions(3), ALL),
        (0x10, 6 | permissions(3), ALL),
        (0x20, permissions(0), ALL),
    ];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    rustix::fs::fsetxattr(file, "system.posix_acl_access", &value, XattrFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_written_as_a_uuid() {
        let id: Id = std::array::from_fn(|index| index as u8);
        assert_eq!(dashed(&id), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
