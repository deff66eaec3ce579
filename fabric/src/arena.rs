//! Shared-memory arena: the owner allocates blocks, and peers map the whole segment, so that an
//! address inside a block is an offset for every process that maps it.
//!
//! ```text
//! owner  Arena::create ── segment().fd() and bytes ──▶ peer  Segment::open, Segment::at(offset)
//!        allocate ─▶ Block        find(address) ─▶ offset ──▶ the same bytes
//! ```
//! The segment is created at its full size. Pages are allocated on first touch and freed with their
//! block. Allocating a block therefore needs no negotiation with peers, and one descriptor per
//! process is sufficient.
//!
//! Mapping, the exchange of offsets and the synchronisation of access are the caller's protocol.
//! The arena offers one operation for failures: [`Arena::revoke`] replaces the pages under a range,
//! so that a peer that still writes to the range, for example after it was stopped in the middle of
//! a write, writes to pages that are no longer in use.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::process::Resource;
use thiserror::Error;

use crate::shm::Segment;

/// Alignment of blocks: the smallest page.
pub const PAGE_BYTES: usize = 4096;
/// Alignment of large blocks, so that the kernel can use huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Reason why an allocation failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArenaError {
    /// The arena is full or too fragmented.
    #[error(
        "{requested} bytes of shared memory were requested, {used} of {limit} are in use: raise the \
         limit or free blocks"
    )]
    Full {
        /// Requested size in bytes.
        requested: usize,
        /// Allocated bytes of all blocks.
        used: usize,
        /// Size of the arena in bytes.
        limit: usize,
    },
    /// The arena was retired by [`Arena::revoke`] and allocates nothing more.
    #[error("this shared memory was revoked from a stalled peer: create a new arena")]
    Retired,
}

/// Shared-memory arena. See the module documentation.
#[derive(Debug)]
pub struct Arena {
    segment: Segment,
    blocks: Mutex<Blocks>,
    retired: AtomicBool,
    /// A peer allocates the blocks.
    delegated: AtomicBool,
    /// A forked child shares the memory and must not free any of it.
    process: u32,
}

#[derive(Debug, Default)]
struct Blocks {
    /// Start of each block, and its requested size in bytes.
    allocated: BTreeMap<usize, usize>,
    free: BTreeMap<usize, usize>,
    used: usize,
}

/// Zeroed memory of an [`Arena`]. Freed when dropped: no peer may use it after that.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

/// Position of a range in its arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// Offset from the start of the segment, in bytes.
    pub offset: u64,
    /// The pages of the range hold no data of other blocks, so that it can be revoked.
    pub whole_pages: bool,
}

impl Arena {
    /// Creates an arena of `bytes` bytes, rounded up to whole pages. Pages are allocated on first
    /// touch.
    ///
    /// # Errors
    /// Returns the kernel's error: not enough address space, or too many descriptors.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let segment = Segment::create(name, bytes.max(PAGE_BYTES))?;
        // SAFETY: advice about our own mapping; a kernel without huge pages returns an error.
        let _ = unsafe {
            rustix::mm::madvise(segment.base().cast(), segment.bytes(), Advice::LinuxHugepage)
        };
        Ok(Self::of(segment))
    }

    /// An arena over memory that a peer created and delegated to this process
    /// ([`Arena::delegate`]).
    pub fn of(segment: Segment) -> Self {
        let blocks = Blocks { free: [(0, segment.bytes())].into(), ..Blocks::default() };
        Self {
            segment,
            blocks: Mutex::new(blocks),
            retired: false.into(),
            delegated: false.into(),
            process: std::process::id(),
        }
    }

    /// Delegates allocation to a peer that maps the segment; the peer allocates whole pages. From
    /// now on this process sees the arena as one block.
    pub fn delegate(&self) {
        self.delegated.store(true, Ordering::Release);
    }

    /// Default arena size: the memory of the node, or 0 where the address space or the file size of
    /// this process is limited.
    pub fn default_bytes() -> usize {
        let limited = [Resource::As, Resource::Fsize, Resource::Data];
        if limited.into_iter().any(|kind| rustix::process::getrlimit(kind).current.is_some()) {
            return 0;
        }
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kilobytes = total.and_then(|line| line.trim().strip_suffix(" kB"));
        kilobytes.and_then(|count| count.parse::<usize>().ok()).map_or(0, |count| count << 10)
    }

    /// The segment, to pass to a peer.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Allocated bytes of all blocks, in whole pages.
    pub fn used(&self) -> usize {
        self.blocks().used
    }

    /// True after [`Arena::revoke`]: [`Arena::find`] returns `None`.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Stops allocation: a peer that maps the arena has revoked a part of it.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Allocates `bytes` zeroed bytes that start at a page boundary.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Block, ArenaError> {
        if self.is_retired() || self.delegated.load(Ordering::Acquire) {
            return Err(ArenaError::Retired);
        }
        let mut blocks = self.blocks();
        let (used, limit) = (blocks.used, self.segment.bytes());
        let full = ArenaError::Full { requested: bytes, used, limit };
        let whole = whole(bytes).ok_or(full.clone())?;
        let offset = blocks.take(whole).ok_or(full)?;
        blocks.allocated.insert(offset, bytes);
        blocks.used += whole;
        Ok(Block { arena: self.clone(), offset, bytes })
    }

    /// Location of `bytes` bytes from `address`, if they are part of one block.
    pub fn find(&self, address: *const u8, bytes: usize) -> Option<Location> {
        let offset = address.addr().checked_sub(self.segment.base().addr())?;
        if offset >= self.segment.bytes() || self.is_retired() {
            return None;
        }
        let end = offset.checked_add(bytes)?;
        if self.delegated.load(Ordering::Acquire) {
            let whole_pages = offset.is_multiple_of(PAGE_BYTES);
            let location = Location { offset: offset as u64, whole_pages };
            return (end <= self.segment.bytes()).then_some(location);
        }
        let blocks = self.blocks();
        let (start, length) = blocks.allocated.range(..=offset).next_back()?;
        let block_end = start + length;
        let whole_pages = offset.is_multiple_of(PAGE_BYTES)
            && (end == block_end || end.is_multiple_of(PAGE_BYTES));
        (end <= block_end).then_some(Location { offset: offset as u64, whole_pages })
    }

    /// Replaces the pages under a range with private pages of the owner: the address and the
    /// content stay the same, and later writes of a peer to the segment are not visible. Only the
    /// caller may use the range during the call. Retires the arena.
    ///
    /// # Errors
    /// Returns the kernel's error: not enough memory for the copy.
    pub fn revoke(&self, offset: u64, bytes: usize) -> io::Result<()> {
        self.retire();
        let bytes =
            bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        if !offset.is_multiple_of(PAGE_BYTES as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if bytes == 0 {
            return Ok(());
        }
        let place = self.segment.at(offset, bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping of `bytes`, filled from a range of this arena of the same
        // length and then moved over it as a whole; in this process only the caller uses that range
        // during the call. A peer that resumes now changes bytes that are no longer part of any
        // result.
        unsafe {
            let nowhere = std::ptr::null_mut();
            let copy = rustix::mm::mmap_anonymous(nowhere, bytes, access, MapFlags::PRIVATE)?;
            std::ptr::copy_nonoverlapping(place.cast_const(), copy.cast(), bytes);
            let remapped =
                rustix::mm::mremap_fixed(copy, bytes, bytes, MremapFlags::MAYMOVE, place.cast());
            if remapped.is_err() {
                let _ = rustix::mm::munmap(copy, bytes);
            }
            remapped?;
        }
        Ok(())
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, offset: usize, bytes: usize) {
        if self.process != std::process::id() {
            return;
        }
        let Some(whole) = whole(bytes) else { return };
        let mut blocks = self.blocks();
        blocks.allocated.remove(&offset);
        blocks.used -= whole;
        if self.is_retired() {
            return; // Peers may still write there: never allocate it again.
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let fd = self.segment.fd();
        match rustix::fs::fallocate(fd, flags, offset as u64, whole as u64) {
            Ok(()) => blocks.give_back(offset, whole),
            // Not zeroed, so not allocated again: address space is lost, memory stays correct.
            Err(error) => tracing::warn!(%error, "failed to free shared memory"),
        }
    }
}

fn whole(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE_BYTES)
}

impl Blocks {
    /// The first gap that is large enough.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let step = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let (gap, length, at) = self.free.iter().find_map(|(gap, length)| {
            let at = gap.next_multiple_of(step);
            (at.checked_add(bytes)? <= gap + length).then_some((*gap, *length, at))
        })?;
        self.free.remove(&gap);
        if at > gap {
            self.free.insert(gap, at - gap);
        }
        let (end, gap_end) = (at + bytes, gap + length);
        if gap_end > end {
            self.free.insert(end, gap_end - end);
        }
        Some(at)
    }

    fn give_back(&mut self, offset: usize, bytes: usize) {
        let (mut start, mut end) = (offset, offset + bytes);
        if let Some((before, length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            start = *before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        self.free.insert(start, end - start);
    }
}

impl Block {
    /// First byte of the block. Valid for [`Block::bytes`] bytes while the block exists.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: a block lies inside the segment.
        unsafe { self.arena.segment.base().add(self.offset) }
    }

    /// Offset of the block in the segment, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Requested size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.give_back(self.offset, self.bytes);
    }
}

#[cfg(test)]
#[path = "arena_test.rs"]
mod tests;
