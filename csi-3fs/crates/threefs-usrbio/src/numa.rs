//! NUMA placement of memory.

use rustix::io::Errno;

const PREFERRED: libc::c_long = 1;
const NODES_MAX: usize = 1024;

/// Prefers a node for pages of a mapping that are not allocated yet. Without support for NUMA it
/// has no effect, as on a machine with one node.
///
/// # Errors
/// `EINVAL`: an unknown node.
pub(crate) fn prefer(base: *mut u8, bytes: usize, node: usize) -> Result<(), Errno> {
    if node >= NODES_MAX {
        return Err(Errno::INVAL);
    }
    let mut mask = [0u64; NODES_MAX / 64];
    if let Some(word) = mask.get_mut(node / 64) {
        *word = 1 << (node % 64);
    }
    // SAFETY: changes the placement of pages of the caller's mapping, not their contents; the kernel
    // reads a mask of the length that is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            base,
            bytes,
            PREFERRED,
            mask.as_ptr(),
            NODES_MAX as libc::c_ulong + 1,
            0,
        )
    };
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EINVAL) if result != 0 => Err(Errno::INVAL),
        _ => Ok(()),
    }
}
