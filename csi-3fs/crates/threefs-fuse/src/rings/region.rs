//! Memory that a caller has registered: a file in `/dev/shm`.
//!
//! The caller can truncate the file, or write to it, at any time. So it is never mapped for access:
//! reads and writes are system calls, which fail where a mapping would raise SIGBUS.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex::{self, WakeOp, WakeOpCmp};
use threefs_rings::{HEADER_BYTES, Id, MEMORY_FOLDER, RegionTerms, memory_name};

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Maximum operand of the addition that a futex wake performs.
const ADD_MAX: u32 = (1 << 11) - 1;

pub(crate) struct Region {
    file: File,
    /// Its name is removed when the session ends.
    owned: Option<Id>,
    pub terms: RegionTerms,
}

impl Region {
    /// Opens memory of a user. It must be populated: pages that this daemon touched first would be
    /// charged to the daemon.
    ///
    /// # Errors
    /// `ENOENT`: this daemon sees no such memory. `EPERM`: it belongs to another user. `EACCES`: the
    /// caller has not granted access. `EINVAL`: it is smaller than `terms`, or not populated.
    pub(crate) fn open(id: &Id, owned: bool, terms: RegionTerms, user: u32) -> Result<Self, Errno> {
        let path = Path::new(MEMORY_FOLDER).join(memory_name(id));
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let about = file.metadata().map_err(|error| errno_of(&error))?;
        if !about.is_file() || terms.bytes == 0 || about.size() < terms.bytes {
            return Err(Errno::INVAL);
        }
        if about.uid() != user {
            return Err(Errno::PERM);
        }
        if about.blocks().saturating_mul(512) < terms.bytes {
            return Err(Errno::INVAL);
        }
        Ok(Self { file, owned: owned.then_some(*id), terms })
    }

    /// Removes the name of owned memory, if this daemon may; a caller that was killed leaves it
    /// behind.
    pub(crate) fn unlink(&self) {
        let Some(id) = &self.owned else { return };
        let path = Path::new(MEMORY_FOLDER).join(memory_name(id));
        let same = std::fs::symlink_metadata(&path).and_then(|named| {
            let own = self.file.metadata()?;
            Ok((named.dev(), named.ino()) == (own.dev(), own.ino()))
        });
        if same.unwrap_or(false)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::debug!(path = %path.display(), %error, "could not remove shared memory");
        }
    }

    pub(crate) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        self.file.read_exact_at(buffer, offset).map_err(|_| Errno::FAULT)
    }

    pub(crate) fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.file.write_all_at(data, offset).map_err(|_| Errno::FAULT)
    }

    pub(crate) fn zero_at(&self, mut offset: u64, mut length: usize) -> Result<(), Errno> {
        while length > 0 {
            let part = length.min(ZEROS.len());
            self.write_at(offset, &ZEROS[..part])?;
            offset += part as u64;
            length -= part;
        }
        Ok(())
    }

    /// Maps the counter of a ring.
    pub(crate) fn counter(&self) -> Result<Counter, Errno> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let page = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), HEADER_BYTES, access, flags, &self.file, 0)
        }?;
        NonNull::new(page.cast()).map(Counter).ok_or(Errno::FAULT)
    }
}

/// Number of completions of a ring, in the caller's memory, on which the caller waits. Only the
/// kernel accesses it: where the page is gone, the system call fails with EFAULT.
pub(crate) struct Counter(NonNull<AtomicU32>);

// SAFETY: the pointer is passed to system calls only, and the mapping lives as long as this value.
unsafe impl Send for Counter {}
// SAFETY: as above.
unsafe impl Sync for Counter {}

impl Counter {
    /// Adds to the counter and wakes all that wait on it.
    pub(crate) fn add(&self, mut count: u32) -> Result<(), Errno> {
        // SAFETY: mapped and aligned to a page until this value is dropped; an atomic may be
        // written by others. The reference is not dereferenced here.
        let counter = unsafe { self.0.as_ref() };
        while count > 0 {
            let part = count.min(ADD_MAX);
            // The comparison decides only whether the second counter's waiters are woken: there
            // are none.
            let (op, cmp) = (WakeOp::Add, WakeOpCmp::Eq);
            let all = i32::MAX as u32;
            let flags = futex::Flags::empty();
            // Below 2^11.
            futex::wake_op(counter, flags, all, 0, counter, op, cmp, part as u16, 0)?;
            count -= part;
        }
        Ok(())
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: mapped by `Region::counter` with this length, and not used any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), HEADER_BYTES) };
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
