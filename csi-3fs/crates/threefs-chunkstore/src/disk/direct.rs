//! Writes that bypass the page cache (`O_DIRECT`).
//!
//! The kernel reports a lost write if a page of the range is dirty again when a direct write ends.
//! So no page may contain blocks of two updates: pages have the size of a block, and the file is
//! read without read-ahead, which would cache several blocks as one unit (a large folio).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{Advice, AtFlags, StatxFlags};
use threefs_core::chunk::BLOCK_BYTES;

/// Smaller writes are not worth the wait for the device. `fabric` aligns bodies of this size.
pub(super) const DIRECT_BYTES_MIN: usize = 64 << 10;

/// A second descriptor of a file, for direct writes.
#[derive(Debug)]
pub(super) struct DirectWriter(File);

impl DirectWriter {
    /// `None` if the file system does not support aligned blocks, or does not say so (before Linux
    /// 6.1). Disables read-ahead for `file` otherwise.
    pub(super) fn of(file: &File) -> Option<Self> {
        if !is_supported(file).unwrap_or(false) {
            return None;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        // Whatever its name is by now.
        let writer = options.open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        rustix::fs::fadvise(file, 0, None, Advice::Random).ok()?;
        Some(Self(writer))
    }

    /// Whether memory and range can be written without a copy.
    pub(super) fn accepts(&self, bytes: &[u8], offset: u64) -> bool {
        bytes.len() >= DIRECT_BYTES_MIN
            && bytes.len().is_multiple_of(BLOCK_BYTES)
            && bytes.as_ptr().align_offset(BLOCK_BYTES) == 0
            && offset.is_multiple_of(BLOCK_BYTES as u64)
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}

fn is_supported(file: &File) -> io::Result<bool> {
    let stat = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let is_reported = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    // Zero means that the file has no direct writes: no multiple of it.
    let fits = |alignment: u32| BLOCK_BYTES.is_multiple_of(alignment as usize);
    let cached_bytes = rustix::fs::fstatvfs(file)?.f_bsize.max(rustix::param::page_size() as u64);
    Ok(is_reported
        && fits(stat.stx_dio_mem_align)
        && fits(stat.stx_dio_offset_align)
        && cached_bytes <= BLOCK_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::super::{Disk, DiskFile, Folder};
    use super::*;

    /// `length` bytes that start at a block, or one byte after it.
    fn at_a_block(memory: &mut Vec<u8>, length: usize, shift: usize) -> &mut [u8] {
        memory.resize(length + 2 * BLOCK_BYTES, 0);
        let start = memory.as_ptr().align_offset(BLOCK_BYTES) + shift;
        &mut memory[start..start + length]
    }

    /// Otherwise the other tests would pass without one direct write.
    #[test]
    fn ext4_is_written_directly_since_linux_6_1() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse::<u32>);
        let version = [numbers.next(), numbers.next()].map(|number| number.unwrap().unwrap());
        let stat = rustix::fs::statfs(folder.path()).unwrap();
        let is_ext4 = stat.f_type == 0xef53 && stat.f_bsize <= BLOCK_BYTES as _;
        if is_ext4 && version >= [6, 1] && rustix::param::page_size() == BLOCK_BYTES {
            assert!(file.bypasses_cache());
        }
    }

    #[test]
    fn what_cannot_be_written_directly_is_written_through_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        file.allocate(1 << 20).unwrap();
        let (mut memory, mut expected) = (Vec::new(), vec![0; 1 << 20]);
        let large = DIRECT_BYTES_MIN;
        let writes = [(large, 0, 0), (large, 1, 4096), (large / 2, 0, 512), (large + 1, 0, 8192)];
        for (value, (length, shift, offset)) in (1..).zip(writes) {
            let bytes = at_a_block(&mut memory, length, shift);
            bytes.fill(value);
            file.write_to_device(bytes, offset).unwrap();
            expected[offset as usize..][..length].copy_from_slice(bytes);
            let mut read = vec![0; 1 << 20];
            DiskFile::read_at(&file, &mut read, 0).unwrap();
            assert!(read == expected, "write {value}");
        }
    }

    #[test]
    fn large_writes_leave_nothing_in_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        if !file.bypasses_cache() {
            return; // This file system has no direct writes.
        }
        let length = 16 * DIRECT_BYTES_MIN;
        file.allocate(length as u64).unwrap();
        let cached_pages = || {
            let file = File::open(folder.path().join("data")).unwrap();
            // SAFETY: a new mapping of the whole file, which is unmapped below.
            unsafe {
                let access = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
                let map =
                    rustix::mm::mmap(std::ptr::null_mut(), length, access.0, access.1, &file, 0)
                        .unwrap();
                let mut pages = vec![0; length / BLOCK_BYTES];
                assert_eq!(libc::mincore(map, length, pages.as_mut_ptr()), 0);
                rustix::mm::munmap(map, length).unwrap();
                pages.iter().filter(|page| *page & 1 == 1).count()
            }
        };
        let mut memory = Vec::new();
        file.write_to_device(at_a_block(&mut memory, length, 0), 0).unwrap();
        assert_eq!(cached_pages(), 0);
        let mut block = [0; BLOCK_BYTES];
        DiskFile::read_at(&file, &mut block, 0).unwrap();
        assert_eq!(cached_pages(), 1, "read-ahead caches blocks of other updates");
    }

    /// The kernel would fail the next flush if a direct write met a dirty page of its range.
    #[test]
    fn small_and_large_writes_of_neighbouring_blocks_do_not_collide() {
        const LARGE: usize = DIRECT_BYTES_MIN;
        let folder = tempfile::tempdir().unwrap();
        let file = Folder::open(folder.path()).unwrap().open("data").unwrap();
        file.allocate(4 * LARGE as u64 + (8 << 10)).unwrap();
        let large = |round: usize| {
            let mut memory = Vec::new();
            let bytes = at_a_block(&mut memory, LARGE, 0);
            bytes.fill(round as u8);
            file.write_to_device(bytes, (round % 4 * (LARGE + BLOCK_BYTES)) as u64).unwrap();
        };
        let small = |round: usize| {
            let place = (round % 4 * (LARGE + BLOCK_BYTES) + LARGE) as u64;
            DiskFile::write_at(&file, &[round as u8; BLOCK_BYTES], place).unwrap();
            let mut read = [0; BLOCK_BYTES];
            for block in 0..4 * (LARGE / BLOCK_BYTES) {
                DiskFile::read_at(&file, &mut read, (block * BLOCK_BYTES) as u64).unwrap();
            }
            DiskFile::read_at(&file, &mut read, place).unwrap();
            assert!(read.iter().all(|byte| *byte == round as u8));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..400).for_each(large));
            scope.spawn(|| (0..4000).for_each(small));
        });
        DiskFile::sync_data(&file).unwrap();
    }
}
