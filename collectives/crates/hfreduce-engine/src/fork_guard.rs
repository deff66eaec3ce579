//! Whether we are the process that made something, or a child that was forked off it. That is asked
//! at every call: a look at memory that the kernel empties for children costs no system call.

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

const PAGE_BYTES: usize = 4096;

/// The process that made this.
#[derive(Debug)]
pub struct ForkGuard {
    /// Not 0 where we are that process; none where the kernel has no such memory (before Linux 4.14).
    page: Option<NonNull<u32>>,
    process: u32,
}

// SAFETY: the page is written before anybody else has its address, and then only read.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// This process.
    pub fn new() -> Self {
        Self { page: wipe_on_fork_page(), process: std::process::id() }
    }

    /// True in that process, false in a child.
    pub fn is_owner(&self) -> bool {
        match self.page {
            // SAFETY: mapped and readable until we are dropped. Volatile: a fork changes it.
            Some(page) => unsafe { page.read_volatile() != 0 },
            None => self.process == std::process::id(),
        }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.process
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: `wipe_on_fork_page` made exactly this mapping, and nobody has its address.
            let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), PAGE_BYTES) };
        }
    }
}

fn wipe_on_fork_page() -> Option<NonNull<u32>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours; it is
    // ours alone when it is advised, written and, where the kernel knows no such advice, unmapped.
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
    fn a_forked_child_is_not_the_maker() {
        let known = ForkGuard::new();
        let asked = ForkGuard { page: None, process: std::process::id() };
        assert!(known.page.is_some() && known.is_owner() && asked.is_owner());
        // SAFETY: the child does what a child of many threads may: it looks and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let here = known.is_owner() || asked.is_owner();
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(here)) };
        }
        let mut status = 0;
        // SAFETY: a child of ours that nobody else waits for.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert!(known.is_owner() && asked.is_owner());
    }
}
