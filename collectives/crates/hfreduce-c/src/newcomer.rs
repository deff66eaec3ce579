//! Newcomers: members of the next epoch that do not have a group yet.

use std::ffi::c_void;

use hfreduce_daemon::AnyNewcomer;
use hfreduce_engine::Member as EngineMember;

use crate::comm::{Comm, boxed, open};
use crate::conversions::{put, seconds};
use crate::error::{Failure, Status, guard};
use crate::group::{Options, of_newcomer, read};

/// `hfr_newcomer`.
pub struct Newcomer {
    engine: AnyNewcomer,
    info: Vec<u8>,
}

/// `hfr_member`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Member {
    /// The caller's `sizeof(hfr_member)`.
    pub size: usize,
    /// A rank of the present group, without an info.
    pub rank: u32,
    /// The info of a newcomer …
    pub info: *const c_void,
    /// … and its length.
    pub info_bytes: usize,
}

/// See the header.
///
/// # Safety
/// As for `hfr_init`; `newcomer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_newcomer_init(
    options: *const Options,
    newcomer: *mut *mut Newcomer,
) -> Status {
    guard(|| {
        if newcomer.is_null() {
            return Err(Failure::invalid("newcomer is NULL"));
        }
        // SAFETY: guaranteed by the caller.
        let settings = unsafe { of_newcomer(&read(options)?)? };
        let engine = settings.newcomer()?;
        let info = engine.info();
        // SAFETY: just checked, and guaranteed by the caller.
        unsafe { put("newcomer", newcomer, Box::into_raw(Box::new(Newcomer { engine, info }))) }
    })
}

/// See the header.
///
/// # Safety
/// `newcomer` is null or open; `info` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_newcomer_info(
    newcomer: *const Newcomer,
    info: *mut *const c_void,
    bytes: *mut usize,
) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let value = unsafe { &opened(newcomer)?.info };
        if bytes.is_null() {
            return Err(Failure::invalid("bytes is NULL"));
        }
        // SAFETY: guaranteed by the caller; both are checked before either is written.
        unsafe {
            put("info", info, value.as_ptr().cast()).and_then(|()| put("bytes", bytes, value.len()))
        }
    })
}

/// See the header.
///
/// # Safety
/// `newcomer` is null or open; `comm` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_newcomer_join(
    newcomer: *mut Newcomer,
    timeout_seconds: f64,
    comm: *mut *mut Comm,
) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let newcomer = unsafe { opened(newcomer)? };
        if comm.is_null() {
            return Err(Failure::invalid("comm is NULL"));
        }
        let engine = newcomer.engine.join(seconds("timeout_seconds", timeout_seconds)?)?;
        // SAFETY: just checked, and guaranteed by the caller.
        unsafe { put("comm", comm, boxed(engine)) }
    })
}

/// See the header.
///
/// # Safety
/// `newcomer` is null or came from `hfr_newcomer_init` and was not freed; no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_newcomer_free(newcomer: *mut Newcomer) {
    guard(|| {
        if !newcomer.is_null() {
            // SAFETY: guaranteed by the caller: this library made it, and no other call uses it.
            drop(unsafe { Box::from_raw(newcomer) });
        }
        Ok(())
    });
}

/// See the header.
///
/// # Safety
/// `comm` is null or open; `members` is null or has `number` entries whose infos are readable; `next`
/// is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hfr_reconfigure_with(
    comm: *mut Comm,
    members: *const Member,
    number: usize,
    timeout_seconds: f64,
    next: *mut *mut Comm,
) -> Status {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let comm = unsafe { open(comm)? };
        if next.is_null() || members.is_null() {
            return Err(Failure::invalid("members or next is NULL"));
        }
        // SAFETY: just checked, and guaranteed by the caller.
        let listed = (0..number).map(|at| unsafe { listed(members, at) });
        let listed = listed.collect::<Result<Vec<_>, _>>()?;
        let timeout = seconds("timeout_seconds", timeout_seconds)?;
        let engine = comm.engine.reconfigure(&listed, timeout)?;
        // SAFETY: as above.
        unsafe { put("next", next, boxed(engine)) }
    })
}

/// # Safety
/// `members` has more than `at` entries whose infos are readable.
unsafe fn listed(members: *const Member, at: usize) -> Result<EngineMember, Failure> {
    // SAFETY: the header demands that the first field is the size, and all entries have one size.
    let size = unsafe { members.cast::<usize>().read() };
    if size != size_of::<Member>() {
        let expected = size_of::<Member>();
        return Err(Failure::invalid(format!(
            "members[0].size is {size} and this library's hfr_member has {expected} bytes: use \
             HFR_MEMBER_RANK and HFR_MEMBER_NEWCOMER, and the header of this version"
        )));
    }
    // SAFETY: guaranteed by the caller.
    let Member { size: own, rank, info, info_bytes } = unsafe { members.add(at).read() };
    if own != size {
        return Err(Failure::invalid(format!(
            "members[{at}].size is {own}, members[0].size {size}"
        )));
    }
    if info.is_null() {
        return Ok(EngineMember::Rank(rank));
    }
    // SAFETY: the header demands `info_bytes` readable bytes.
    let info = unsafe { std::slice::from_raw_parts(info.cast::<u8>(), info_bytes) };
    Ok(EngineMember::Newcomer(info.to_vec()))
}

/// # Safety
/// `newcomer` is null or open.
unsafe fn opened<'a>(newcomer: *const Newcomer) -> Result<&'a Newcomer, Failure> {
    // SAFETY: guaranteed by the caller; it stays open as long as a call uses it.
    unsafe { newcomer.as_ref() }.ok_or_else(|| Failure::invalid("newcomer is NULL"))
}
