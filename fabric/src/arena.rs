//! Memory that its owner hands out in blocks and that peers map whole: an address inside a block is
//! an offset to everybody who has the segment.
//!
//! ```text
//! owner  Arena::create ── segment().fd() and bytes ──▶ peer  Segment::open, Segment::at(offset)
//!        allocate ─▶ Block        find(address) ─▶ offset ──▶ the same bytes
//! ```
//! The segment has its full size from the beginning and costs nothing: pages exist once they are
//! touched, and go when their block does. So nothing is negotiated when a block is made, and one
//! descriptor a process is enough for ever.
//!
//! Who maps it, how offsets travel and when somebody may touch a block is its users' protocol. One
//! thing is offered for its failures: [`Arena::revoke`] exchanges the pages under a range, so that
//! whoever may still write to it, stopped in the middle perhaps, writes to pages of nobody's.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::process::Resource;
use thiserror::Error;

use crate::shm::Segment;

/// Blocks begin and end at multiples of this: the smallest page.
pub const PAGE_BYTES: usize = 4096;
/// Large blocks begin at multiples of this, where the kernel can give huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Why there is no block.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ArenaError {
    /// The arena is used up, or too scattered.
    #[error(
        "{wanted} bytes of shared memory are wanted, {used} of {limit} are in use: raise the limit \
         or give blocks back"
    )]
    Full {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes of all blocks.
        used: usize,
        /// Size of the arena.
        limit: usize,
    },
    /// After [`Arena::revoke`] nothing more is handed out.
    #[error("this shared memory was taken back from a peer that stands still: begin a new one")]
    Retired,
}

/// See the module's text.
#[derive(Debug)]
pub struct Arena {
    segment: Segment,
    blocks: Mutex<Blocks>,
    retired: AtomicBool,
    /// A peer hands out the blocks.
    delegated: AtomicBool,
    /// A forked child has the same memory and no right to give any of it back.
    process: u32,
}

#[derive(Debug, Default)]
struct Blocks {
    /// Where each begins, and its bytes as they were asked for.
    taken: BTreeMap<usize, usize>,
    free: BTreeMap<usize, usize>,
    used: usize,
}

/// Memory of an [`Arena`], zeroed. Given back when dropped: by then no peer may use it any more.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    offset: usize,
    bytes: usize,
}

/// Where a range lies in its arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// From the beginning of the segment.
    pub offset: u64,
    /// No page of it holds a byte of anybody else's, so that it can be taken back.
    pub whole_pages: bool,
}

impl Arena {
    /// An arena of `bytes` bytes, rounded up to whole pages. Its pages are not there yet.
    ///
    /// # Errors
    /// What the kernel says: no room among this process's addresses, or too many descriptors.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let segment = Segment::create(name, bytes.max(PAGE_BYTES))?;
        // SAFETY: advice about our own mapping; where the kernel knows no huge pages it says no.
        let _ = unsafe {
            rustix::mm::madvise(segment.base().cast(), segment.bytes(), Advice::LinuxHugepage)
        };
        Ok(Self::of(segment))
    }

    /// Blocks of memory that a peer created and delegated to us ([`Arena::delegate`]).
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

    /// Leaves it to a peer, who maps the segment, to hand out its blocks: whole pages each. To us all
    /// of it is one block from now on.
    pub fn delegate(&self) {
        self.delegated.store(true, Ordering::Release);
    }

    /// A size that is no limit where memory is one: what the machine has, or nothing where this
    /// process's addresses or files are limited.
    pub fn default_bytes() -> usize {
        let limited = [Resource::As, Resource::Fsize, Resource::Data];
        if limited.into_iter().any(|kind| rustix::process::getrlimit(kind).current.is_some()) {
            return 0;
        }
        let told = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kilobytes = total.and_then(|line| line.trim().strip_suffix(" kB"));
        kilobytes.and_then(|count| count.parse::<usize>().ok()).map_or(0, |count| count << 10)
    }

    /// The memory itself, to hand to a peer.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Bytes of all blocks that are handed out, in whole pages.
    pub fn used(&self) -> usize {
        self.blocks().used
    }

    /// True after [`Arena::revoke`]: no range is found any more.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Hands out nothing more: a peer that has it, too, took some of it back.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// `bytes` zeroed bytes that begin at a page.
    ///
    /// # Errors
    /// [`ArenaError`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Block, ArenaError> {
        if self.is_retired() || self.delegated.load(Ordering::Acquire) {
            return Err(ArenaError::Retired);
        }
        let mut blocks = self.blocks();
        let (used, limit) = (blocks.used, self.segment.bytes());
        let full = ArenaError::Full { wanted: bytes, used, limit };
        let whole = whole(bytes).ok_or(full.clone())?;
        let offset = blocks.take(whole).ok_or(full)?;
        blocks.taken.insert(offset, bytes);
        blocks.used += whole;
        Ok(Block { arena: self.clone(), offset, bytes })
    }

    /// Where `bytes` bytes from `address` on lie, if they are part of one block.
    pub fn find(&self, address: *const u8, bytes: usize) -> Option<Location> {
        let offset = address.addr().checked_sub(self.segment.base().addr())?;
        if offset >= self.segment.bytes() || self.is_retired() {
            return None;
        }
        let end = offset.checked_add(bytes)?;
        if self.delegated.load(Ordering::Acquire) {
            let whole_pages = offset.is_multiple_of(PAGE_BYTES);
            let found = Location { offset: offset as u64, whole_pages };
            return (end <= self.segment.bytes()).then_some(found);
        }
        let blocks = self.blocks();
        let (start, length) = blocks.taken.range(..=offset).next_back()?;
        let block_end = start + length;
        let whole_pages = offset.is_multiple_of(PAGE_BYTES)
            && (end == block_end || end.is_multiple_of(PAGE_BYTES));
        (end <= block_end).then_some(Location { offset: offset as u64, whole_pages })
    }

    /// Gives the owner pages of its own under a range: same address, same bytes, and what a peer still
    /// writes to the segment there reaches nobody. The caller alone may use the range meanwhile. The
    /// arena is retired by it.
    ///
    /// # Errors
    /// What the kernel says: too little memory for the copy.
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
        // SAFETY: a fresh private mapping of `bytes`, filled from a range of ours of the same length
        // and then put in its place whole; in this process nobody but the caller uses that range
        // meanwhile. A peer that goes on just now changes bytes that are nobody's result any more.
        unsafe {
            let nowhere = std::ptr::null_mut();
            let copy = rustix::mm::mmap_anonymous(nowhere, bytes, access, MapFlags::PRIVATE)?;
            std::ptr::copy_nonoverlapping(place.cast_const(), copy.cast(), bytes);
            let moved =
                rustix::mm::mremap_fixed(copy, bytes, bytes, MremapFlags::MAYMOVE, place.cast());
            if moved.is_err() {
                let _ = rustix::mm::munmap(copy, bytes);
            }
            moved?;
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
        blocks.taken.remove(&offset);
        blocks.used -= whole;
        if self.is_retired() {
            return; // What peers still write there must never be anybody's memory again.
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let fd = self.segment.fd();
        match rustix::fs::fallocate(fd, flags, offset as u64, whole as u64) {
            Ok(()) => blocks.give_back(offset, whole),
            // Not zeroed, so not handed out again: the addresses are lost, no memory is wrong.
            Err(error) => tracing::warn!(%error, "shared memory could not be given back"),
        }
    }
}

fn whole(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE_BYTES)
}

impl Blocks {
    /// The first gap with room.
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
    /// Its first byte. Valid for [`Block::bytes`] bytes while the block lives.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: a block lies inside the segment.
        unsafe { self.arena.segment.base().add(self.offset) }
    }

    /// Where it begins in the segment.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its size, as it was asked for.
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
