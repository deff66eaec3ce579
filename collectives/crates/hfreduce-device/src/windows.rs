//! Mapped windows of GPU memory, through which the processor copies: opened at the first use and cached.
//!
//! A copy engine takes some µs to start any copy; the processor starts at once, writes almost as fast and reads
//! slowly. So small copies use windows, and all others use the copy engines.
//!
//! A window is identified by the driver's numbers of its allocation and of the physical memory behind it:
//! memory that was freed and allocated again, or mapped again, at the same address gets another window. The old
//! one is not used any more and is evicted when space is needed.

use std::collections::VecDeque;

use crate::cuda::{Cuda, Pointer};
use crate::gdr::{Gdr, Mapped};

/// Maximum size of reads from the GPU without its copy engine: 8 µs, as long as an engine needs to start
/// (GDRCopy's figures: reads 0.5 GB/s, writes 9.6 GB/s, 6 to 7 µs for a copy to start).
pub const READ_BYTES_MAX: usize = 4 << 10;
/// Maximum size of writes to the GPU without its copy engine: 3.4 µs by the same figures.
pub const WRITE_BYTES_MAX: usize = 32 << 10;
/// The granule in which a GPU's memory is pinned.
const PAGE_BYTES: u64 = 64 << 10;
/// Maximum number of windows of a GPU. Its mappable memory is bounded, 256 MiB on older hardware; a window has
/// two pages at most.
const WINDOWS_MAX: usize = 64;

struct Window {
    /// The allocation of the window, and the memory behind it.
    memory: (u64, u64),
    start: Pointer,
    end: Pointer,
    /// None: mapping failed, and is not tried again.
    mapped: Option<Mapped>,
}

/// See the module's documentation.
pub struct Windows {
    gdr: Option<Gdr>,
    /// The most recently used window is the first.
    open: VecDeque<Window>,
}

impl Windows {
    /// Windows over GDRCopy, if it is available.
    pub fn new(gdr: Option<Gdr>) -> Self {
        Self { gdr, open: VecDeque::new() }
    }

    /// True if a copy of `bytes` bytes shall use a window.
    pub fn suits(&self, down: bool, bytes: usize) -> bool {
        let most = if down { READ_BYTES_MAX } else { WRITE_BYTES_MAX };
        self.gdr.is_some() && (1..=most).contains(&bytes)
    }

    /// Copies from the GPU; false if the copy engine must copy. The context is current.
    ///
    /// # Safety
    /// The GPU's memory is allocated and not written meanwhile; `to` is writable for `bytes`.
    pub unsafe fn read(&mut self, cuda: &Cuda, to: *mut u8, from: Pointer, bytes: usize) -> bool {
        // SAFETY: guaranteed by the caller; the window holds these bytes.
        self.through(cuda, from, bytes, |gdr, mapped| unsafe { gdr.read(mapped, to, from, bytes) })
    }

    /// Copies to the GPU; false if the copy engine must copy. The context is current.
    ///
    /// # Safety
    /// The GPU's memory is allocated and not accessed meanwhile; `from` is readable for `bytes`.
    pub unsafe fn write(
        &mut self,
        cuda: &Cuda,
        to: Pointer,
        from: *const u8,
        bytes: usize,
    ) -> bool {
        // SAFETY: guaranteed by the caller; the window holds these bytes.
        self.through(cuda, to, bytes, |gdr, mapped| unsafe { gdr.write(mapped, to, from, bytes) })
    }

    fn through(
        &mut self,
        cuda: &Cuda,
        at: Pointer,
        bytes: usize,
        copy: impl FnOnce(&Gdr, &Mapped) -> Result<(), String>,
    ) -> bool {
        let Some(memory) = cuda.memory_of(at) else { return false };
        // Two ranges of physical memory may change independently.
        if cuda.memory_of(at + bytes as u64 - 1) != Some(memory)
            || !self.bring_forward(memory, at, bytes)
        {
            return false;
        }
        let first = self.open.front().and_then(|window| window.mapped.as_ref());
        let (Some(gdr), Some(mapped)) = (&self.gdr, first) else { return false };
        match copy(gdr, mapped) {
            Ok(()) => true,
            Err(why) => {
                tracing::warn!(why, "disabling GDRCopy: all copies use the copy engines");
                self.close();
                false
            }
        }
    }

    /// Makes the window with these bytes the first one; opens it if necessary.
    fn bring_forward(&mut self, memory: (u64, u64), at: Pointer, bytes: usize) -> bool {
        let (Some(gdr), Some(end)) = (&self.gdr, at.checked_add(bytes as u64)) else {
            return false;
        };
        let holds =
            |window: &Window| window.memory == memory && window.start <= at && end <= window.end;
        let cached = self.open.iter().position(holds).and_then(|place| self.open.remove(place));
        let window = cached.unwrap_or_else(|| {
            if self.open.len() >= WINDOWS_MAX {
                self.open.pop_back().into_iter().for_each(|oldest| close_window(gdr, oldest));
            }
            let start = at / PAGE_BYTES * PAGE_BYTES;
            let end = end.next_multiple_of(PAGE_BYTES);
            let mapped = gdr.map(start, (end - start) as usize);
            if let Err(why) = &mapped {
                tracing::info!(why, "cannot map memory of a GPU: its copies use the copy engine");
            }
            Window { memory, start, end, mapped: mapped.ok() }
        });
        self.open.push_front(window);
        true
    }

    /// Releases everything; no memory is mapped afterwards.
    fn close(&mut self) {
        let Some(gdr) = self.gdr.take() else { return };
        self.open.drain(..).for_each(|window| close_window(&gdr, window));
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.close();
    }
}

fn close_window(gdr: &Gdr, window: Window) {
    if let Some(mapped) = window.mapped {
        gdr.release(mapped);
    }
}
