//! FUSE protocol, version 7: constants and layouts of linux/fuse.h.
//!
//! All integers are little endian, as on every platform that 3FS supports.

use std::time::Duration;

use bytes::Bytes;

/// The protocol version of this daemon; a kernel with a higher minor version falls back to it.
pub(crate) const MAJOR: u32 = 7;
pub(crate) const MINOR: u32 = 38;
/// Maximum size of a write, and of a read.
pub(crate) const WRITE_BYTES_MAX: usize = 1 << 20;
/// Maximum size of a request: a write with its headers.
pub(crate) const REQUEST_BYTES_MAX: usize = WRITE_BYTES_MAX + 4096;
pub(crate) const HEADER_BYTES: usize = 40;
/// Set in the number of a request that the kernel resends.
pub(crate) const RESENT: u64 = 1 << 63;

pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const GETLK: u32 = 31;
    pub(crate) const SETLK: u32 = 32;
    pub(crate) const SETLKW: u32 = 33;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const SYNCFS: u32 = 50;
}

/// INIT flags that this daemon supports; the result is their intersection with the kernel's.
pub(crate) mod init {
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    /// The kernel sends lock requests of fcntl; otherwise it applies them itself.
    pub(crate) const POSIX_LOCKS: u64 = 1 << 1;
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    /// The same for flock.
    pub(crate) const FLOCK_LOCKS: u64 = 1 << 10;
    pub(crate) const AUTO_INVALIDATE: u64 = 1 << 12;
    pub(crate) const READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(crate) const ASYNC_DIRECT: u64 = 1 << 15;
    /// Write-back cache: the kernel keeps written pages and writes them back later, several at a
    /// time. It then knows lengths and times better than this daemon, so no other client may change
    /// the files.
    pub(crate) const WRITE_BACK: u64 = 1 << 16;
    pub(crate) const PARALLEL_DIRECTORIES: u64 = 1 << 18;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const CACHE_SYMLINKS: u64 = 1 << 23;
    pub(crate) const EXTENDED: u64 = 1 << 30;
    /// Open files with [`super::OPEN_DIRECT_IO`] can be mapped shared (Linux 6.6).
    pub(crate) const DIRECT_MAPPED: u64 = 1 << 36;
    pub(crate) const RESEND: u64 = 1 << 39;
    /// Idmapped mounts of this file system may be created (Linux 6.12). Requests then name the
    /// caller only if they create an inode, with the ids of the mount; see [`super::NO_ID`].
    pub(crate) const IDMAPPED: u64 = 1 << 40;
    pub(crate) const SUPPORTED: u64 = ASYNC_READ
        | BIG_WRITES
        | AUTO_INVALIDATE
        | READDIRPLUS
        | READDIRPLUS_AUTO
        | ASYNC_DIRECT
        | PARALLEL_DIRECTORIES
        | MAX_PAGES
        | CACHE_SYMLINKS
        | EXTENDED
        | DIRECT_MAPPED
        | RESEND;
}

/// Fields that a SETATTR changes.
pub(crate) mod set {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    /// Sent only with a write-back cache.
    pub(crate) const CTIME: u32 = 1 << 10;
}

/// User and group of a request that does not name its caller. The kernel sends it with
/// [`init::IDMAPPED`] only, for requests that create no inode.
pub(crate) const NO_ID: u32 = u32::MAX;
/// Flags of open(2) and of the open file of a write.
pub(crate) const O_APPEND: u32 = 0o2000;
const O_DSYNC: u32 = 0o10000;
/// Flag of a write: of a page, not of a system call.
const WRITE_CACHE: u32 = 1 << 0;
/// Flag of a write: clears the set-user-ID and set-group-ID bits of the file.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// The kernel neither reads nor writes its pages through this open file.
pub(crate) const OPEN_DIRECT_IO: u32 = 1 << 0;
/// The kernel sends concurrent writes within the file at the same time; it needs
/// [`OPEN_DIRECT_IO`] (Linux 6.2).
pub(crate) const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// The kernel keeps its cached pages of a file.
pub(crate) const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// Invalidates the kernel's attributes of an inode.
pub(crate) const NOTIFY_INVALIDATE_INODE: i32 = 2;
/// Makes the kernel resend all unanswered requests.
pub(crate) const NOTIFY_RESEND: i32 = 7;

/// A request of the kernel.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
    pub body: Bytes,
}

impl Request {
    /// `None`: the bytes are not a request.
    pub(crate) fn parse(bytes: Bytes) -> Option<Self> {
        let mut fields = Fields(&bytes);
        let length = fields.u32()? as usize;
        let (opcode, unique, node) = (fields.u32()?, fields.u64()?, fields.u64()?);
        let (uid, gid, _pid) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if length != bytes.len() || length < HEADER_BYTES {
            return None;
        }
        Some(Self { opcode, unique, node, uid, gid, body: bytes.slice(HEADER_BYTES..) })
    }
}

/// Whether a write is to be placed at the end of the file. A page that a mapping has changed has its
/// place, whichever open file it is written through.
pub(crate) fn is_append(write: &Request) -> bool {
    write_flags(write).is_some_and(|(_, open)| open & O_APPEND != 0) && !is_of_page(write)
}

/// Whether a write is of a page that the kernel has, and not of a system call.
pub(crate) fn is_of_page(write: &Request) -> bool {
    write_flags(write).is_some_and(|(flags, _)| flags & WRITE_CACHE != 0)
}

/// Whether a write is of a file opened with `O_SYNC` or `O_DSYNC`, which waits for it to be durable.
pub(crate) fn is_synchronous(write: &Request) -> bool {
    write_flags(write).is_some_and(|(_, open)| open & O_DSYNC != 0)
}

/// Flags of a write, and of the open file that it is sent through.
fn write_flags(write: &Request) -> Option<(u32, u32)> {
    let mut fields = Fields(&write.body);
    let (_handle, _offset, _size) = (fields.u64()?, fields.u64()?, fields.u32()?);
    let (flags, _owner, open) = (fields.u32()?, fields.u64()?, fields.u32()?);
    Some((flags, open))
}

/// Reads fields from the front of a body.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*front)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// A NUL-terminated name.
    pub(crate) fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let (name, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Some(name)
    }
}

/// A body under construction.
#[derive(Default)]
pub(crate) struct Body(pub Vec<u8>);

impl Body {
    pub(crate) fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
}

/// The attributes of an inode.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attributes {
    pub inode: u64,
    pub size: u64,
    /// Nanoseconds since 1970.
    pub accessed: i64,
    pub modified: i64,
    pub changed: i64,
    /// Kind and permission bits.
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    /// Number of a device.
    pub device: u32,
}

/// Preferred I/O size for programs: buffered writers use it, and every write is durable when it
/// returns.
const BLOCK_BYTES: u32 = 128 << 10;

impl Attributes {
    fn put(&self, body: Body) -> Body {
        let second = |time: i64| time.div_euclid(1_000_000_000) as u64;
        let nanosecond = |time: i64| time.rem_euclid(1_000_000_000) as u32;
        body.u64(self.inode)
            .u64(self.size)
            .u64(self.size.div_ceil(512))
            .u64(second(self.accessed))
            .u64(second(self.modified))
            .u64(second(self.changed))
            .u32(nanosecond(self.accessed))
            .u32(nanosecond(self.modified))
            .u32(nanosecond(self.changed))
            .u32(self.mode)
            .u32(self.links)
            .u32(self.uid)
            .u32(self.gid)
            .u32(self.device)
            .u32(BLOCK_BYTES)
            .u32(0)
    }
}

/// An entry, valid in the kernel's caches for `valid`.
pub(crate) fn entry(body: Body, node: u64, attributes: &Attributes, valid: Duration) -> Body {
    let (seconds, nanoseconds) = (valid.as_secs(), valid.subsec_nanos());
    let body = body.u64(node).u64(0).u64(seconds).u64(seconds).u32(nanoseconds).u32(nanoseconds);
    attributes.put(body)
}

pub(crate) fn attributes(attributes: &Attributes, valid: Duration) -> Body {
    attributes.put(Body::default().u64(valid.as_secs()).u32(valid.subsec_nanos()).u32(0))
}

pub(crate) fn opened(body: Body, handle: u64, flags: u32) -> Body {
    body.u64(handle).u32(flags).u32(0)
}

/// A directory entry; `next` is the offset of the following one.
pub(crate) fn directory_entry(body: Body, inode: u64, next: u64, mode: u32, name: &[u8]) -> Body {
    let padding = name.len().next_multiple_of(8) - name.len();
    // Names have at most 255 bytes.
    let mut body = body.u64(inode).u64(next).u32(name.len() as u32).u32(mode >> 12);
    body.0.extend_from_slice(name);
    body.zeros(padding)
}

/// Bytes of a directory entry, with or without the inode's attributes.
pub(crate) fn directory_entry_bytes(name: &[u8], plus: bool) -> usize {
    let entry_bytes = if plus { 128 } else { 0 };
    entry_bytes + 24 + name.len().next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_the_kernels_sizes() {
        let attributes_ = Attributes::default();
        assert_eq!(attributes(&attributes_, Duration::ZERO).0.len(), 104);
        assert_eq!(entry(Body::default(), 1, &attributes_, Duration::ZERO).0.len(), 128);
        assert_eq!(opened(Body::default(), 1, 0).0.len(), 16);
        let body = directory_entry(Body::default(), 1, 2, 0o100_644, b"name");
        assert_eq!(body.0.len(), directory_entry_bytes(b"name", false));
    }

    #[test]
    fn a_request_with_a_wrong_length_is_rejected() {
        let mut bytes = Body::default().u32(41).zeros(36).0;
        assert!(Request::parse(bytes.clone().into()).is_none());
        bytes[0] = 40;
        assert!(Request::parse(bytes.into()).is_some());
        assert!(Request::parse(Bytes::from_static(&[1, 2, 3])).is_none());
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        let early = Attributes { modified: -1, ..Attributes::default() };
        let body = attributes(&early, Duration::ZERO).0;
        assert_eq!(body[16 + 32..16 + 40], u64::MAX.to_le_bytes());
        assert_eq!(body[16 + 52..16 + 56], 999_999_999u32.to_le_bytes());
    }
}
