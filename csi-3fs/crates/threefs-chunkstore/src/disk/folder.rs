//! Implementation of the file system interface on a folder.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use threefs_core::chunk::BLOCK_BYTES;

use rustix::buffer::spare_capacity;
use rustix::fs::{Advice, FallocateFlags, FlockOperation};

use super::direct::DirectWriter;
use super::{Disk, DiskFile};

/// `f_type` of ext4.
const EXT4_MAGIC: rustix::fs::FsWord = 0xef53;
/// Maximum number of concurrent writes to the device for each file.
const WRITERS_MAX: usize = 8;
/// Unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

/// A folder of the file system, locked against a second process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    folder: File,
    // Kept open for its lock.
    lock: File,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A child process that another thread started holds the descriptor until it executes its
        // program, so closing it here may not end the lock. Unlocking fails for no valid descriptor.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

impl Folder {
    /// Opens `path`, creating it if necessary.
    ///
    /// # Errors
    /// Errors of the operating system; `WouldBlock` if another process has it open.
    pub fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path)?;
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock"))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { path: path.to_owned(), folder: File::open(path)?, lock })
    }
}

impl Disk for Folder {
    type File = FolderFile;

    fn open(&self, name: &str) -> io::Result<FolderFile> {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        options.open(self.path.join(name)).map(FolderFile::new)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        self.folder.sync_all()
    }

    fn shares_flushes(&self, data: &FolderFile, log: &FolderFile) -> bool {
        // ext4 overwrites in place. Others may not: btrfs never does, XFS not in shared extents.
        let overwrites_in_place = |file: &FolderFile| {
            rustix::fs::fstatfs(&file.file)
                .is_ok_and(|stat| stat.f_type == EXT4_MAGIC && stat.f_bsize as usize >= BLOCK_BYTES)
        };
        // The files may be links to other file systems.
        overwrites_in_place(data) && self.device(data) == self.device(log)
    }

    fn device(&self, file: &FolderFile) -> Option<u64> {
        file.file.metadata().map(|metadata| metadata.dev()).ok()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = rustix::fs::fstatvfs(&self.folder)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// A file of a [`Folder`].
#[derive(Debug)]
pub struct FolderFile {
    file: File,
    /// Opened by the first use: the log has none.
    direct: OnceLock<Option<DirectWriter>>,
    /// Further descriptors, each used by one write to the device at a time: the kernel reports an
    /// error of writing back once to each.
    writers: Mutex<Writers>,
    writer_returned: Condvar,
}

#[derive(Debug, Default)]
struct Writers {
    idle: Vec<File>,
    open: usize,
}

impl FolderFile {
    fn new(file: File) -> Self {
        let (direct, writers) = (OnceLock::new(), Mutex::default());
        Self { file, direct, writers, writer_returned: Condvar::new() }
    }

    fn direct(&self) -> Option<&DirectWriter> {
        self.direct.get_or_init(|| DirectWriter::of(&self.file)).as_ref()
    }

    /// Calls `write` with a descriptor that no other thread uses, once one of [`WRITERS_MAX`] is
    /// free.
    fn with_writer(&self, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let all_in_use =
            |writers: &mut Writers| writers.idle.is_empty() && writers.open == WRITERS_MAX;
        let mut writers = self
            .writer_returned
            .wait_while(self.writers(), all_in_use)
            .unwrap_or_else(PoisonError::into_inner);
        let idle = writers.idle.pop();
        writers.open += usize::from(idle.is_none());
        drop(writers);
        let writer = idle.map_or_else(|| self.reopen(), Ok);
        let written = writer.as_ref().map_or(Ok(()), write);
        let mut writers = self.writers();
        let outcome = match writer {
            Ok(writer) => {
                writers.idle.push(writer);
                written
            }
            Err(error) => {
                writers.open -= 1;
                Err(error)
            }
        };
        drop(writers);
        self.writer_returned.notify_one();
        outcome
    }

    fn writers(&self) -> MutexGuard<'_, Writers> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file again, whatever its name is by now.
    fn reopen(&self) -> io::Result<File> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        OpenOptions::new().read(true).write(true).open(path)
    }
}

/// Writes a range of the page cache to the device and waits for it.
const WRITE_AND_WAIT: libc::c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE
    | libc::SYNC_FILE_RANGE_WRITE
    | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// Writes a range of the page cache to the device.
fn write_back(file: &File, offset: u64, length: usize, flags: libc::c_uint) -> io::Result<()> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    let length = i64::try_from(length).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open for the duration of the call, which accesses no memory of the
    // process.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl DiskFile for FolderFile {
    fn read_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.file.read_at(buffer, offset) {
                Ok(0) => {
                    buffer.fill(0);
                    return Ok(());
                }
                Ok(count) => {
                    buffer = &mut buffer[count..];
                    offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Into memory that is not zeroed before, if nothing follows: the spare capacity is all read.
    fn append_to(&self, bytes: &mut Vec<u8>, length: usize, offset: u64) -> io::Result<()> {
        let (start, end) = (bytes.len(), bytes.len() + length);
        bytes.reserve_exact(length);
        while bytes.len() < end && bytes.capacity() == end {
            let at = offset + (bytes.len() - start) as u64;
            match rustix::io::pread(&self.file, spare_capacity(bytes), at) {
                Ok(0) => break,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let read = bytes.len();
        bytes.resize(end, 0);
        let rest = bytes.get_mut(read..).unwrap_or_default();
        self.read_at(rest, offset + (read - start) as u64)
    }

    fn read_ahead(&self, offset: u64, length: u64) {
        // A failure is one of the read that follows.
        let _ = rustix::fs::fadvise(&self.file, offset, NonZeroU64::new(length), Advice::WillNeed);
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn write_to_device(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Some(direct) = self.direct()
            && direct.accepts(bytes, offset)
        {
            return direct.write_at(bytes, offset);
        }
        self.with_writer(|writer| {
            writer.write_all_at(bytes, offset)?;
            write_back(writer, offset, bytes.len(), WRITE_AND_WAIT)
        })
    }

    fn start_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)?;
        write_back(&self.file, offset, bytes.len(), libc::SYNC_FILE_RANGE_WRITE)
    }

    /// Also writes what the kernel has not started to write.
    fn finish_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        write_back(&self.file, offset, bytes.len(), WRITE_AND_WAIT)
    }

    fn bypasses_cache(&self) -> bool {
        self.direct().is_some()
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn drop_cache(&self) -> io::Result<()> {
        Ok(rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed)?)
    }

    fn drop_cache_of(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(rustix::fs::fadvise(&self.file, offset, NonZeroU64::new(length), Advice::DontNeed)?)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let now = self.file.metadata()?.len();
        if now >= length {
            return Ok(());
        }
        match rustix::fs::fallocate(self.file.as_fd(), FallocateFlags::empty(), now, length - now) {
            Ok(()) => Ok(()),
            // Without support, only the length is set; a full disk is detected by writes.
            Err(rustix::io::Errno::OPNOTSUPP) => self.file.set_len(length),
            Err(error) => Err(error.into()),
        }
    }

    fn fill(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(self.file.as_fd(), FallocateFlags::empty(), offset, length)?)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self.file.as_fd(), flags, offset, length)?)
    }

    fn has_holes(&self) -> io::Result<bool> {
        let metadata = self.file.metadata()?;
        Ok(metadata.blocks() * STAT_BLOCK_BYTES < metadata.len())
    }

    fn zero(&self) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if length == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(self.file.as_fd(), FallocateFlags::ZERO_RANGE, 0, length) {
            Ok(()) => Ok(()),
            // Without support, the space is freed and allocated again.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                self.file.set_len(0)?;
                self.allocate(length)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn cut(&self, length: u64) -> io::Result<()> {
        self.file.set_len(length)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_frees_its_space_and_allocates_it_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        file.allocate(256 << 10).unwrap();
        DiskFile::write_at(&file, &vec![7; 256 << 10], 0).unwrap();
        DiskFile::sync_data(&file).unwrap();
        assert!(!file.has_holes().unwrap());
        file.punch(64 << 10, 64 << 10).unwrap();
        assert!(file.has_holes().unwrap());
        assert_eq!(file.length().unwrap(), 256 << 10);
        let mut bytes = [1; 3];
        for (offset, expected) in [(64 << 10, 0), (128 << 10, 7)] {
            DiskFile::read_at(&file, &mut bytes, offset).unwrap();
            assert_eq!(bytes, [expected; 3]);
        }
        file.fill(64 << 10, 64 << 10).unwrap();
        assert!(!file.has_holes().unwrap());
    }

    #[test]
    fn ranges_are_appended_also_beyond_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        let content: Vec<u8> = (0..9_000).map(|at| (at % 251) as u8).collect();
        DiskFile::write_at(&file, &content, 0).unwrap();
        for capacity in [0, 5_003, 8_003, 20_000] {
            let mut bytes = Vec::with_capacity(capacity);
            bytes.extend_from_slice(b"abc");
            file.append_to(&mut bytes, 5_000, 100).unwrap();
            file.append_to(&mut bytes, 3_000, 8_000).unwrap();
            let expected = [b"abc", &content[100..5_100], &content[8_000..], &[0; 2_000]].concat();
            assert_eq!(bytes, expected, "{capacity}");
        }
    }

    #[test]
    fn writes_to_the_device_are_read_through_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Folder::open(folder.path()).unwrap();
        let is_ext4 = rustix::fs::statfs(folder.path()).unwrap().f_type == EXT4_MAGIC;
        let (file, log) = (disk.open("data").unwrap(), disk.open("log").unwrap());
        assert_eq!(disk.shares_flushes(&file, &log), is_ext4);
        let memory = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let link = folder.path().join("linked");
        std::os::unix::fs::symlink(memory.path(), &link).unwrap();
        assert!(!disk.shares_flushes(&file, &disk.open("linked").unwrap()));
        std::fs::remove_file(link).unwrap();
        file.allocate(64 << 10).unwrap();
        DiskFile::write_at(&file, &vec![1; 64 << 10], 0).unwrap();
        // Also after a rename.
        disk.rename("data", "other").unwrap();
        let bytes: Vec<u8> = (0..20_001).map(|at| (at % 253) as u8).collect();
        file.write_to_device(&bytes[1..], 8192).unwrap();
        let mut read = vec![0; 64 << 10];
        DiskFile::read_at(&file, &mut read, 0).unwrap();
        assert!(read[..8192].iter().all(|byte| *byte == 1));
        assert_eq!(read[8192..28_192], bytes[1..]);
        assert!(read[28_192..].iter().all(|byte| *byte == 1));
        assert_eq!(disk.list().unwrap(), ["lock", "log", "other"]);
    }

    #[test]
    fn a_descriptor_in_a_child_process_does_not_keep_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Folder::open(folder.path()).unwrap();
        let of_child = disk.lock.try_clone().unwrap();
        assert!(Folder::open(folder.path()).is_err());
        drop(disk);
        Folder::open(folder.path()).unwrap();
        drop(of_child);
    }

    #[test]
    fn concurrent_writes_to_the_device_use_few_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        let write = |number: u64| {
            for round in 0..8 {
                let bytes = [(number + round) as u8; BLOCK_BYTES];
                file.write_to_device(&bytes, (number * 8 + round) * BLOCK_BYTES as u64).unwrap();
            }
        };
        let write = &write;
        std::thread::scope(|scope| {
            for number in 0..32 {
                scope.spawn(move || write(number));
            }
        });
        let writers = file.writers();
        assert!(writers.open <= WRITERS_MAX && writers.idle.len() == writers.open);
        let mut read = vec![0; 256 * BLOCK_BYTES];
        DiskFile::read_at(&file, &mut read, 0).unwrap();
        for (block, bytes) in read.chunks(BLOCK_BYTES).enumerate() {
            let expected = (block / 8 + block % 8) as u8;
            assert!(bytes.iter().all(|byte| *byte == expected), "block {block}");
        }
    }
}
