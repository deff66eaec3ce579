//! File system interface of the store, and its implementation; tests have one that records
//! operations and simulates a loss of power.

use std::io;

mod direct;
mod folder;

pub use folder::{Folder, FolderFile};

/// One open file. Reads and writes are positional; many threads may use it at once.
pub trait DiskFile: Send + Sync + 'static {
    /// Fills `buffer` from `offset`; data beyond the end reads as zeros.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Appends `length` bytes from `offset`, as [`Self::read_at`] reads them.
    ///
    /// # Errors
    /// As [`Self::read_at`]; the appended bytes are then unspecified.
    fn append_to(&self, bytes: &mut Vec<u8>, length: usize, offset: u64) -> io::Result<()> {
        let start = bytes.len();
        bytes.resize(start + length, 0);
        self.read_at(bytes.get_mut(start..).unwrap_or_default(), offset)
    }

    /// Starts to read a range into the page cache, if this is supported.
    fn read_ahead(&self, offset: u64, length: u64);

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// Errors of the operating system; `StorageFull` for a full disk.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// As [`Self::write_at`]; the device has the bytes when this returns, perhaps in a volatile
    /// cache, see [`Disk::shares_flushes`].
    ///
    /// # Errors
    /// As [`Self::write_at`].
    fn write_to_device(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// The first half of [`Self::write_to_device`]: starts to write, perhaps without waiting for the
    /// device. At most one write of a file is in progress.
    ///
    /// # Errors
    /// As [`Self::write_at`].
    fn start_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// The second half: the device has the bytes when this returns.
    ///
    /// # Errors
    /// As [`Self::write_at`].
    fn finish_writing(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Whether [`Self::write_to_device`] writes large aligned `bytes` without a copy.
    fn bypasses_cache(&self) -> bool {
        false
    }

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

    /// As [`Self::drop_cache`], for a range that has been written to the device.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn drop_cache_of(&self, offset: u64, length: u64) -> io::Result<()>;

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

    /// Whether a flush of any file ([`DiskFile::sync_data`]) also makes durable what
    /// [`DiskFile::write_to_device`] has written to others, provided that the blocks had been
    /// written and flushed since they were allocated: the file system overwrites them in place, and
    /// a flush empties the cache of the whole device. `data` and `log` are the files concerned.
    fn shares_flushes(&self, data: &Self::File, log: &Self::File) -> bool;

    /// Identifies the device of a file, if it is known: files with the same one share its flushes, if
    /// [`Self::shares_flushes`].
    fn device(&self, file: &Self::File) -> Option<u64>;

    /// Free bytes of the file system for this user.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn free_bytes(&self) -> io::Result<u64>;
}
