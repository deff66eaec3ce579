//! File system interface of the store, and its implementation; tests have one that records
//! operations and simulates a loss of power.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, FlockOperation};

/// Unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

/// One open file. Reads and writes are positional; many threads may use it at once.
pub trait DiskFile: Send + Sync + 'static {
    /// Fills `buffer` from `offset`; data beyond the end reads as zeros.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// Errors of the operating system; `StorageFull` for a full disk.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// All writes that have returned are durable when this returns.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn sync_data(&self) -> io::Result<()>;

    /// Drops the page cache, so that reads come from the disk. After a failed flush the kernel may
    /// cache unwritten data as clean.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn drop_cache(&self) -> io::Result<()>;

    /// Allocates space up to `length` bytes, so that writes below it do not run out of space.
    /// Extends the file to `length` if it is shorter.
    ///
    /// # Errors
    /// `StorageFull`, or errors of the operating system.
    fn allocate(&self, length: u64) -> io::Result<()>;

    /// Allocates space for a hole ([`Self::punch`]) within the file.
    ///
    /// # Errors
    /// `StorageFull`, or errors of the operating system.
    fn fill(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Deallocates a range of the file, which then reads as zeros.
    ///
    /// # Errors
    /// Errors of the operating system; the file is unchanged.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Whether the file has holes.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn has_holes(&self) -> io::Result<bool>;

    /// Zeroes all bytes; the file keeps its length and its space.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn zero(&self) -> io::Result<()>;

    /// Truncates the file to `length` bytes and frees the space behind it.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn cut(&self, length: u64) -> io::Result<()>;

    /// Length of the file.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn length(&self) -> io::Result<u64>;
}

/// One folder with the files of one store.
pub trait Disk: Send + Sync + 'static {
    /// The open file.
    type File: DiskFile;

    /// Opens `name` for reading and writing, creating it if necessary.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn open(&self, name: &str) -> io::Result<Self::File>;

    /// Names of all files.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Renames a file, atomically.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Names (created, renamed, removed) are durable when this returns.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn sync_names(&self) -> io::Result<()>;

    /// Free bytes of the file system for this user.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn free_bytes(&self) -> io::Result<u64>;
}

/// A folder of the file system, locked against a second process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    folder: File,
    // Kept open for its lock.
    _lock: File,
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
        Ok(Self { path: path.to_owned(), folder: File::open(path)?, _lock: lock })
    }
}

impl Disk for Folder {
    type File = File;

    fn open(&self, name: &str) -> io::Result<File> {
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(self.path.join(name))
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

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = rustix::fs::fstatvfs(&self.folder)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

impl DiskFile for File {
    fn read_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match FileExt::read_at(self, buffer, offset) {
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

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn drop_cache(&self) -> io::Result<()> {
        Ok(rustix::fs::fadvise(self, 0, None, Advice::DontNeed)?)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let now = self.metadata()?.len();
        if now >= length {
            return Ok(());
        }
        match rustix::fs::fallocate(self.as_fd(), FallocateFlags::empty(), now, length - now) {
            Ok(()) => Ok(()),
            // Without support, only the length is set; a full disk is detected by writes.
            Err(rustix::io::Errno::OPNOTSUPP) => self.set_len(length),
            Err(error) => Err(error.into()),
        }
    }

    fn fill(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(self.as_fd(), FallocateFlags::empty(), offset, length)?)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(self.as_fd(), flags, offset, length)?)
    }

    fn has_holes(&self) -> io::Result<bool> {
        let metadata = self.metadata()?;
        Ok(metadata.blocks() * STAT_BLOCK_BYTES < metadata.len())
    }

    fn zero(&self) -> io::Result<()> {
        let length = self.metadata()?.len();
        if length == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(self.as_fd(), FallocateFlags::ZERO_RANGE, 0, length) {
            Ok(()) => Ok(()),
            // Without support, the space is freed and allocated again.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                self.set_len(0)?;
                self.allocate(length)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn cut(&self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
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
}
