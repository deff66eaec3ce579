//! Detection of forked children. A child inherits the descriptors of sessions, which would keep
//! the parent's registrations alive after the parent's end: the child closes them at once.

use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};

/// Maximum number of sessions whose descriptors a child closes.
const SESSIONS: usize = 64;

static FORKS: AtomicU64 = AtomicU64::new(0);
static DESCRIPTORS: [AtomicI32; SESSIONS] = [const { AtomicI32::new(-1) }; SESSIONS];
static INSTALLED: Once = Once::new();

/// Number of forks between the first caller and this process.
pub(crate) fn generation() -> u64 {
    FORKS.load(SeqCst)
}

/// Closes a descriptor in each child that is forked from now on.
pub(crate) fn close_in_children(fd: RawFd) {
    INSTALLED.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded while a
        // session uses it, and makes only calls that are allowed in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    for slot in &DESCRIPTORS {
        if slot.compare_exchange(-1, fd, SeqCst, SeqCst).is_ok() {
            return;
        }
    }
}

/// Undoes [`close_in_children`].
pub(crate) fn keep_in_children(fd: RawFd) {
    for slot in &DESCRIPTORS {
        if slot.compare_exchange(fd, -1, SeqCst, SeqCst).is_ok() {
            return;
        }
    }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, SeqCst);
    for slot in &DESCRIPTORS {
        let fd = slot.swap(-1, SeqCst);
        if fd >= 0 {
            // SAFETY: a session's descriptor of the parent; no value of this process owns it any
            // more, because values of an earlier generation never close theirs.
            unsafe { libc::close(fd) };
        }
    }
}
