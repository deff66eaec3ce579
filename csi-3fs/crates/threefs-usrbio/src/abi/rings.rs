//! The C functions of rings.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;

use super::{Iov, IovHandle, PATH_BYTES, negative, path, stored};
use crate::files;
use crate::ring::{Done, Ring, RingOptions, ring_bytes};
use crate::session::Session;

/// `struct hf3fs_ior`.
#[repr(C)]
pub struct Ior {
    /// Memory of the ring.
    pub iov: Iov,
    /// Owned by the library; null after the ring was destroyed.
    pub iorh: *mut c_void,
    /// Mount point with a terminating zero.
    pub mount_point: [u8; PATH_BYTES],
    /// The ring is for reads.
    pub for_read: bool,
    /// See `RingOptions::depth`.
    pub io_depth: c_int,
    /// As the caller passed it.
    pub priority: c_int,
    /// As the caller passed it.
    pub timeout: c_int,
    /// As the caller passed it.
    pub flags: u64,
}

/// `struct hf3fs_cqe`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Cqe {
    /// Slot of the I/O.
    pub index: i32,
    /// 0.
    pub reserved: i32,
    /// Bytes, or a negative errno.
    pub result: i64,
    /// As the caller passed it.
    pub userdata: *const c_void,
}

/// See `hf3fs_usrbio.h`.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_ior_size(entries: c_int) -> usize {
    u32::try_from(entries).map_or(0, ring_bytes)
}

struct Parameters {
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
}

/// # Safety
/// `ior` is null or valid for writes, `mount` is null or a string.
unsafe fn create(
    ior: *mut Ior,
    mount: *const c_char,
    parameters: &Parameters,
) -> Result<(), Errno> {
    let Parameters { entries, for_read, io_depth, priority, timeout, numa, flags } = *parameters;
    let ior = NonNull::new(ior).ok_or(Errno::INVAL)?;
    // SAFETY: the caller's promise.
    let mount = unsafe { path(mount) }?;
    if timeout < 0 {
        return Err(Errno::INVAL);
    }
    let mount_point = stored(mount)?;
    let entries = u32::try_from(entries).map_err(|_| Errno::INVAL)?;
    let options = RingOptions::with_flags(entries, for_read, io_depth, numa, flags)?;
    let ring = Ring::create(Session::of(mount)?, options)?;
    let iov = Iov {
        base: ring.memory().base(),
        iovh: std::ptr::null_mut(),
        id: ring.memory().id,
        mount_point,
        size: ring.memory().bytes(),
        block_size: 0,
        numa,
    };
    let iorh = Box::into_raw(Box::new(ring)).cast();
    let filled = Ior { iov, iorh, mount_point, for_read, io_depth, priority, timeout, flags };
    // SAFETY: the caller's promise.
    unsafe { ior.write(filled) };
    Ok(())
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `ior` is null or valid for writes, `mount` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iorcreate4(ior, mount, entries, for_read, io_depth, 0, numa, 0) }
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iorcreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate2(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    numa: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iorcreate3(ior, mount, entries, for_read, io_depth, priority, 0, numa) }
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iorcreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate3(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    priority: c_int,
    timeout: c_int,
    numa: c_int,
) -> c_int {
    let parameters = Parameters { entries, for_read, io_depth, priority, timeout, numa, flags: 0 };
    // SAFETY: the caller's promise.
    negative(unsafe { create(ior, mount, &parameters) })
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_iorcreate`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iorcreate4(
    ior: *mut Ior,
    mount: *const c_char,
    entries: c_int,
    for_read: bool,
    io_depth: c_int,
    timeout: c_int,
    numa: c_int,
    flags: u64,
) -> c_int {
    let parameters = Parameters { entries, for_read, io_depth, priority: 0, timeout, numa, flags };
    // SAFETY: the caller's promise.
    negative(unsafe { create(ior, mount, &parameters) })
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `ior` is null or was filled by this library, and no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iordestroy(ior: *mut Ior) {
    // SAFETY: the caller's promise.
    let Some(ior) = (unsafe { ior.as_mut() }) else { return };
    let handle = std::mem::replace(&mut ior.iorh, std::ptr::null_mut());
    if !handle.is_null() {
        // SAFETY: made by `create`, and not used any more.
        drop(unsafe { Box::from_raw(handle.cast::<Ring>()) });
    }
}

/// The ring of a structure.
///
/// # Safety
/// `ior` is null or was filled by this library.
unsafe fn ring<'a>(ior: *const Ior) -> Result<&'a Ring, Errno> {
    // SAFETY: the caller's promise; the handle is this library's, or null.
    let ring = unsafe { ior.as_ref().and_then(|ior| ior.iorh.cast::<Ring>().as_ref()) };
    ring.ok_or(Errno::INVAL)
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// As [`hf3fs_submit_ios`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_io_entries(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    let ring = unsafe { ring(ior) };
    // At most 2^16.
    ring.map_or(0, |ring| ring.entries() as c_int)
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// Both structures are null or were filled by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_prep_io(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    memory: *mut c_void,
    fd: c_int,
    offset: usize,
    length: u64,
    userdata: *const c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { prepare(ior, iov, read, memory, fd, offset, length, userdata) } {
        // At most 2^16.
        Ok(slot) => slot as c_int,
        Err(error) => -error.raw_os_error(),
    }
}

/// # Safety
/// As [`hf3fs_prep_io`].
#[allow(clippy::too_many_arguments)]
unsafe fn prepare(
    ior: *const Ior,
    iov: *const Iov,
    read: bool,
    memory: *mut c_void,
    fd: c_int,
    offset: usize,
    length: u64,
    userdata: *const c_void,
) -> Result<u32, Errno> {
    // SAFETY: the caller's promise.
    let ring = unsafe { ring(ior) }?;
    // SAFETY: the caller's promise; the handle is this library's, or null.
    let handle = unsafe { iov.as_ref().and_then(|iov| iov.iovh.cast::<IovHandle>().as_ref()) };
    let handle = handle.ok_or(Errno::INVAL)?;
    if read != ring.for_read() {
        return Err(Errno::INVAL);
    }
    let at = (memory as usize).checked_sub(handle.memory.base() as usize).ok_or(Errno::INVAL)?;
    let fd = fd.checked_abs().ok_or(Errno::BADF)?;
    let file = files::registered(fd)?;
    ring.prepare(&handle.memory, at, &file, offset as u64, length, userdata as usize)
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `ior` is null or was filled by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_submit_ios(ior: *const Ior) -> c_int {
    // SAFETY: the caller's promise.
    negative(unsafe { ring(ior) }.and_then(Ring::submit))
}

/// See `hf3fs_usrbio.h`.
///
/// # Safety
/// `ior` is null or was filled by this library; `cqes` has room for `count` elements; `deadline` is
/// null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_wait_for_ios(
    ior: *const Ior,
    cqes: *mut Cqe,
    count: c_int,
    minimum: c_int,
    deadline: *const libc::timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let ring = match unsafe { ring(ior) } {
        Ok(ring) if count > 0 && !cqes.is_null() => ring,
        _ => return -Errno::INVAL.raw_os_error(),
    };
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline.as_ref() }.map(|time| {
        let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
        let nanoseconds = Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0));
        let after = seconds.saturating_add(nanoseconds);
        UNIX_EPOCH.checked_add(after).unwrap_or_else(|| SystemTime::now() + FOREVER)
    });
    let minimum = usize::try_from(minimum).unwrap_or(0);
    let mut done = vec![Done::default(); usize::try_from(count).unwrap_or(0)];
    match ring.wait(&mut done, minimum, deadline) {
        Ok(filled) => {
            for (index, done) in done.iter().take(filled).enumerate() {
                let cqe = Cqe {
                    // At most 2^16.
                    index: done.slot as i32,
                    reserved: 0,
                    result: done.result,
                    userdata: done.userdata as *const c_void,
                };
                // SAFETY: there is room for `count` elements.
                unsafe { cqes.add(index).write(cqe) };
            }
            // At most `count`.
            filled as c_int
        }
        Err(error) => -error.raw_os_error(),
    }
}

/// Stands for a deadline that the clock cannot represent.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
