//! Detects forked children. It is checked at every call: reading a page that the kernel wipes on
//! fork costs no system call.

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

const PAGE_BYTES: usize = 4096;

/// Identifies the process that created it.
#[derive(Debug)]
pub struct ForkGuard {
    /// Non-zero in that process; none where the kernel does not support it (before Linux 4.14).
    page: Option<NonNull<u32>>,
    process: u32,
}

// SAFETY: the page is written before another thread has its address, and then only read.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// Guard of this process.
    pub fn new() -> Self {
        Self { page: wipe_on_fork_page(), process: std::process::id() }
    }

    /// True in that process, false in a child.
    pub fn is_owner(&self) -> bool {
        match self.page {
            // SAFETY: mapped and readable until the guard is dropped. Volatile: a fork changes it.
            Some(page) => unsafe { page.read_volatile() != 0 },
            None => self.process == std::process::id(),
        }
    }

    /// Id of that process.
    pub fn id(&self) -> u32 {
        self.process
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: `wipe_on_fork_page` made exactly this mapping, and no other address of it
            // exists.
            let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), PAGE_BYTES) };
        }
    }
}

fn wipe_on_fork_page() -> Option<NonNull<u32>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel aliases nothing; it is exclusive
    // while it is advised, written and, where the kernel does not support the advice, unmapped.
    unsafe {
        let nowhere = std::ptr::null_mut();
        let page =
            rustix::mm::mmap_anonymous(nowhere, PAGE_BYTES, access, MapFlags::PRIVATE).ok()?;
        if rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork).is_err() {
            let _ = rustix::mm::munmap(page, PAGE_BYTES);
            return None;
        }
        page.cast::<u32>().write_volatile(1);
        NonNull::new(page.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_not_the_owner() {
        let by_page = ForkGuard::new();
        let by_process = ForkGuard { page: None, process: std::process::id() };
        assert!(by_page.page.is_some() && by_page.is_owner() && by_process.is_owner());
        // SAFETY: the child only does what a child of a multi-threaded process may: it reads and
        // exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_owner = by_page.is_owner() || by_process.is_owner();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(is_owner)) };
        }
        let mut status = 0;
        // SAFETY: a child of this process that no other thread waits for.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert!(by_page.is_owner() && by_process.is_owner());
    }
}
