//! Node numbers of the virtual directory `3fs-virt`; inodes of files are far below.

const BASE: u64 = 0xffff_ffff_0000_0000;
pub(crate) const DIRECTORY: u64 = BASE;
pub(crate) const SESSION: u64 = BASE + 1;
pub(crate) const LINKS: u64 = BASE + 2;
pub(crate) const FIRST_LINK: u64 = BASE + 16;

/// Whether a node number belongs to the virtual directory.
pub(crate) fn is_virtual(node: u64) -> bool {
    node >= BASE
}
