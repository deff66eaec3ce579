//! The little of a file system that the store needs, as a seam: the real one here, one that
//! records and forgets (what a loss of power does) in the tests.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, FlockOperation};

/// Unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

/// One open file. Reads and writes name their position; many threads may use it at once.
pub trait DiskFile: Send + Sync + 'static {
    /// Fills `buffer` from `offset`; what lies beyond the end reads as zeros.
    ///
    /// # Errors
    /// As the system says.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// As the system says; `StorageFull` for a full disk.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// All writes that have returned are durable when this returns.
    ///
    /// # Errors
    /// As the system says.
    fn sync_data(&self) -> io::Result<()>;

    /// What is read next comes from the disk. After a failed flush the kernel may still have in memory,
    /// as clean, what the disk did not take.
    ///
    /// # Errors
    /// As the system says.
    fn drop_cache(&self) -> io::Result<()>;

    /// Takes room up to `length` bytes from the file system, so that writes below it do not run
    /// out of space. The length of the file becomes `length` if it was shorter.
    ///
    /// # Errors
    /// `StorageFull`, or as the system says.
    fn allocate(&self, length: u64) -> io::Result<()>;

    /// Takes room for a hole ([`Self::punch`]) within the file.
    ///
    /// # Errors
    /// `StorageFull`, or as the system says.
    fn fill(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Gives the room of a part of the file back; it reads as zeros from now on.
    ///
    /// # Errors
    /// As the system says; the file is unchanged then.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Does the file have holes?
    ///
    /// # Errors
    /// As the system says.
    fn has_holes(&self) -> io::Result<bool>;

    /// All bytes become zeros; the file keeps its length and its room.
    ///
    /// # Errors
    /// As the system says.
    fn zero(&self) -> io::Result<()>;

    /// Cuts the file at `length` bytes and gives the room behind it back.
    ///
    /// # Errors
    /// As the system says.
    fn cut(&self, length: u64) -> io::Result<()>;

    /// Length of the file.
    ///
    /// # Errors
    /// As the system says.
    fn length(&self) -> io::Result<u64>;
}

/// One folder with the files of one store.
pub trait Disk: Send + Sync + 'static {
    /// The open file.
    type File: DiskFile;

    /// Opens `name` for reading and writing, creating it if need be.
    ///
    /// # Errors
    /// As the system says.
    fn open(&self, name: &str) -> io::Result<Self::File>;

    /// Names of all files.
    ///
    /// # Errors
    /// As the system says.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Gives a file another name, atomically.
    ///
    /// # Errors
    /// As the system says.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// As the system says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Names (created, renamed, removed) are durable when this returns.
    ///
    /// # Errors
    /// As the system says.
    fn sync_names(&self) -> io::Result<()>;

    /// Bytes that the file system still has for this user.
    ///
    /// # Errors
    /// As the system says.
    fn free_bytes(&self) -> io::Result<u64>;
}

/// A folder of the real file system, locked against a second process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    folder: File,
    // Held for its lock only.
    _lock: File,
}

impl Folder {
    /// Opens `path`, creating it if need be.
    ///
    /// # Errors
    /// As the system says; `WouldBlock` if another process has it open.
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
            // Without support the file is at least as long; a full disk shows at the write.
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
            // Without support the room is given back and taken anew.
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
    fn a_hole_gives_its_room_back_and_takes_it_again() {
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
