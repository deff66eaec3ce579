//! The C functions of `hf3fs_usrbio.h`: conversion of arguments and results.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::files;
use crate::memory::Memory;
use crate::mounts;
use crate::session::Session;

mod rings;

pub use rings::{Cqe, Ior};

const PATH_BYTES: usize = 256;

/// `struct hf3fs_iov`.
#[repr(C)]
pub struct Iov {
    /// First byte.
    pub base: *mut u8,
    /// Owned by the library; null after the memory was destroyed.
    pub iovh: *mut c_void,
    /// Id.
    pub id: [u8; 16],
    /// Mount point with a terminating zero.
    pub mount_point: [u8; PATH_BYTES],
    /// Size in bytes.
    pub size: usize,
    /// Block size, or 0.
    pub block_size: usize,
    /// Preferred node, or negative.
    pub numa: c_int,
}

/// What `Iov::iovh` points to.
struct IovHandle {
    memory: Arc<Memory>,
}

fn negative(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => -error.raw_os_error(),
    }
}

fn positive(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => error.raw_os_error(),
    }
}

/// A path argument.
///
/// # Safety
/// Null, or a string with a terminating zero.
unsafe fn path<'a>(text: *const c_char) -> Result<&'a Path, Errno> {
    if text.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
    if bytes.is_empty() {
        return Err(Errno::INVAL);
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// A mount point, as the structures store it.
fn stored(mount: &Path) -> Result<[u8; PATH_BYTES], Errno> {
    let bytes = mounts::path_bytes(mount);
    let mut stored = [0; PATH_BYTES];
    if bytes.len() >= PATH_BYTES {
        return Err(Errno::INVAL);
    }
    stored.get_mut(..bytes.len()).ok_or(Errno::INVAL)?.copy_from_slice(bytes);
    Ok(stored)
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_is_hf3fs(fd: c_int) -> bool {
    mounts::is_3fs(fd)
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `target` has room for `size` bytes, `file` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_extract_mount_point(
    target: *mut c_char,
    size: c_int,
    file: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    let point = unsafe { path(file) }.ok().and_then(mounts::extract_mount_point);
    let Some(point) = point else { return -1 };
    let bytes = mounts::path_bytes(&point);
    let needed = bytes.len() + 1;
    if needed <= usize::try_from(size).unwrap_or(0) && !target.is_null() {
        // SAFETY: there is room for the bytes and the terminating zero.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.cast(), bytes.len());
            target.add(bytes.len()).write(0);
        }
    }
    c_int::try_from(needed).unwrap_or(-1)
}

/// Fills the caller's structure.
///
/// # Safety
/// `iov` is null or valid for writes.
unsafe fn make(
    iov: *mut Iov,
    mount: *const c_char,
    block: usize,
    numa: c_int,
    memory: impl FnOnce(Arc<Session>) -> Result<Memory, Errno>,
) -> Result<(), Errno> {
    let iov = NonNull::new(iov).ok_or(Errno::INVAL)?;
    // SAFETY: the caller's promise.
    let mount = unsafe { path(mount) }?;
    let mount_point = stored(mount)?;
    let memory = memory(Session::of(mount)?)?;
    memory.register()?;
    let filled = Iov {
        base: memory.base(),
        id: memory.id,
        mount_point,
        size: memory.bytes(),
        block_size: block,
        numa,
        iovh: Box::into_raw(Box::new(IovHandle { memory: Arc::new(memory) })).cast(),
    };
    // SAFETY: the caller's promise.
    unsafe { iov.write(filled) };
    Ok(())
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `iov` is null or valid for writes, `mount` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate(
    iov: *mut Iov,
    mount: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    let create = |session| Memory::create(session, size, block_size, numa);
    // SAFETY: the caller's promise.
    negative(unsafe { make(iov, mount, block_size, numa, create) })
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iovcreate`]; `id` is null or has 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovopen(
    iov: *mut Iov,
    id: *const [u8; 16],
    mount: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    if id.is_null() {
        return negative(Err(Errno::INVAL));
    }
    // SAFETY: the caller's promise.
    let id = unsafe { id.read() };
    let open = |session| Memory::open(session, id, size, block_size);
    // SAFETY: the caller's promise.
    negative(unsafe { make(iov, mount, block_size, numa, open) })
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iovopen`]; `base` is null or has `size` bytes until the memory is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovwrap(
    iov: *mut Iov,
    base: *mut c_void,
    id: *const [u8; 16],
    mount: *const c_char,
    size: usize,
    block_size: usize,
    numa: c_int,
) -> c_int {
    let (Some(base), false) = (NonNull::new(base.cast()), id.is_null()) else {
        return negative(Err(Errno::INVAL));
    };
    // SAFETY: the caller's promise.
    let id = unsafe { id.read() };
    let wrap = |session| Memory::wrap(session, id, base, size, block_size);
    // SAFETY: the caller's promise.
    negative(unsafe { make(iov, mount, block_size, numa, wrap) })
}

/// See `hf3fs_usrbio.h`: device memory is not supported.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iovcreate_device(
    _iov: *mut Iov,
    _mount: *const c_char,
    _size: usize,
    _block_size: usize,
    _device_id: c_int,
) -> c_int {
    negative(Err(Errno::NOTSUP))
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `iov` is null or was filled by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink(iov: *mut Iov) {
    // SAFETY: the caller's promise; the handle is this library's.
    let handle = unsafe { iov.as_ref().and_then(|iov| iov.iovh.cast::<IovHandle>().as_ref()) };
    if let Some(handle) = handle {
        handle.memory.unlink();
    }
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iovunlink`]; no other call uses the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy(iov: *mut Iov) {
    // SAFETY: the caller's promise.
    let Some(iov) = (unsafe { iov.as_mut() }) else { return };
    let handle = std::mem::replace(&mut iov.iovh, std::ptr::null_mut());
    if !handle.is_null() {
        // SAFETY: made by `make`, and not used any more. I/O in flight has its own reference.
        drop(unsafe { Box::from_raw(handle.cast::<IovHandle>()) });
    }
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_reg_fd(fd: c_int, _flags: u64) -> c_int {
    match files::register(fd) {
        Ok(copy) => -copy,
        Err(error) => error.raw_os_error(),
    }
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_dereg_fd(fd: c_int) {
    files::deregister(fd);
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// Both are null or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_hardlink(target: *const c_char, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let paths = unsafe { path(target).and_then(|target| Ok((target, path(name)?))) };
    positive(paths.and_then(|(target, name)| rustix::fs::link(target, name)))
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `start` and `end` have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_punchhole(
    fd: RawFd,
    count: c_int,
    start: *const usize,
    end: *const usize,
    _flags: usize,
) -> c_int {
    let Ok(count) = usize::try_from(count) else { return Errno::INVAL.raw_os_error() };
    if fd < 0 || !mounts::is_3fs(fd) {
        return Errno::BADF.raw_os_error();
    }
    for index in 0..count {
        if start.is_null() || end.is_null() {
            return Errno::INVAL.raw_os_error();
        }
        // SAFETY: the caller's promise.
        let (start, end) = unsafe { (start.add(index).read(), end.add(index).read()) };
        let length = end.checked_sub(start).filter(|length| *length > 0);
        let Some(length) = length else { return Errno::INVAL.raw_os_error() };
        // SAFETY: the caller's descriptor, used for this call only.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(file, mode, start as u64, length as u64);
        if punched.is_err() {
            return positive(punched);
        }
    }
    0
}

/// See `hf3fs_usrbio.h`: device memory is not supported.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_available() -> bool {
    false
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_device_count() -> c_int {
    0
}

/// See `hf3fs_usrbio.h`: all memory is host memory.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iov_mem_type(_iov: *const Iov) -> c_int {
    0
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iov_device_id(_iov: *const Iov) -> c_int {
    -1
}

/// See `hf3fs_usrbio.h`: host memory needs no synchronization.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_iovsync(_iov: *const Iov, _direction: c_int) -> c_int {
    0
}
