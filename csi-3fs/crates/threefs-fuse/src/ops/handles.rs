//! Numbers in handles of open files: what the kernel passes back with each request.

use rustix::fs::OFlags;
use threefs_rings::Access;

pub(super) const O_ACCMODE: u32 = 3;
pub(super) const O_WRONLY: u32 = 1;
pub(super) const O_RDWR: u32 = 2;

/// Bits of a file's handle: the access with which it was opened. An ioctl request has no other
/// sign of it.
const HANDLE_READ: u64 = 1;
const HANDLE_WRITE: u64 = 2;
/// The kernel sends parallel writes, which leave its pages as they are.
const HANDLE_PARALLEL: u64 = 4;

/// The number in the handle of a file that is opened with these flags.
pub(super) fn handle_number(flags: u32) -> u64 {
    let parallel = if writes_directly(flags) { HANDLE_PARALLEL } else { 0 };
    match flags & O_ACCMODE {
        O_WRONLY => HANDLE_WRITE | parallel,
        O_RDWR => HANDLE_READ | HANDLE_WRITE | parallel,
        _ => HANDLE_READ,
    }
}

/// Whether a file is opened for writes that bypass the page cache.
pub(super) fn writes_directly(flags: u32) -> bool {
    flags & OFlags::DIRECT.bits() != 0 && flags & O_ACCMODE != 0
}

/// Whether writes through a handle leave the kernel's pages as they are.
pub(super) fn leaves_pages(handle: u64) -> bool {
    handle & HANDLE_PARALLEL != 0
}

/// The access with which a handle was opened.
pub(super) fn handle_access(handle: u64) -> Access {
    Access { read: handle & HANDLE_READ != 0, write: handle & HANDLE_WRITE != 0 }
}
