//! Memory of a GPU that the processor copies by itself: windows to it, opened when first used and
//! kept for the next time.
//!
//! A copy engine takes some µs to begin whatever it copies; the processor begins at once, writes
//! almost as fast and reads slowly. So the small copies come here, and all others never do.
//!
//! A window is known by the driver's numbers for its allocation and for the physical memory behind it:
//! memory that was freed and allocated again at the same address, or mapped anew there, gets a window
//! of its own. The old one is not used again and goes when room is needed.

use std::collections::VecDeque;

use crate::cuda::{Cuda, Pointer};
use crate::gdr::{Gdr, Mapped};

/// Read from the GPU without its copy engine up to here: 8 µs, as long as an engine needs to begin
/// (GDRCopy's own figures: reads 0.5 GB/s, writes 9.6 GB/s, 6 to 7 µs for a copy to begin).
pub const READ_BYTES_MAX: usize = 4 << 10;
/// Written to the GPU without its copy engine up to here: 3.4 µs by the same figures.
pub const WRITE_BYTES_MAX: usize = 32 << 10;
/// The granule in which a GPU's memory is pinned.
const PAGE_BYTES: u64 = 64 << 10;
/// Windows of a GPU. Its memory that can be mapped is bounded, 256 MiB on older machines; a window
/// has two pages at most.
const WINDOWS_MAX: usize = 64;

struct Window {
    /// The allocation that it looks into, and the memory behind it.
    memory: (u64, u64),
    start: Pointer,
    end: Pointer,
    /// None: it cannot be mapped, and is not tried again.
    mapped: Option<Mapped>,
}

/// See the module's text.
pub struct Windows {
    gdr: Option<Gdr>,
    /// The one that was used last comes first.
    open: VecDeque<Window>,
}

impl Windows {
    /// Over GDRCopy, if it is there.
    pub fn new(gdr: Option<Gdr>) -> Self {
        Self { gdr, open: VecDeque::new() }
    }

    /// True if a copy of so many bytes shall come here.
    pub fn suits(&self, down: bool, bytes: usize) -> bool {
        let most = if down { READ_BYTES_MAX } else { WRITE_BYTES_MAX };
        self.gdr.is_some() && (1..=most).contains(&bytes)
    }

    /// Copies from the GPU; false if the copy engine must. The context is current.
    ///
    /// # Safety
    /// The GPU's memory is allocated and nobody writes to it; `to` is writable for `bytes`.
    pub unsafe fn read(&mut self, cuda: &Cuda, to: *mut u8, from: Pointer, bytes: usize) -> bool {
        // SAFETY: the caller's promise; the window holds these bytes.
        self.through(cuda, from, bytes, |gdr, mapped| unsafe { gdr.read(mapped, to, from, bytes) })
    }

    /// Copies to the GPU; false if the copy engine must. The context is current.
    ///
    /// # Safety
    /// The GPU's memory is allocated and nobody uses it; `from` is readable for `bytes`.
    pub unsafe fn write(
        &mut self,
        cuda: &Cuda,
        to: Pointer,
        from: *const u8,
        bytes: usize,
    ) -> bool {
        // SAFETY: the caller's promise; the window holds these bytes.
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
        // Two pieces of physical memory may change apart.
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
                tracing::warn!(why, "GDRCopy is not used any more: copies go by the copy engines");
                self.close();
                false
            }
        }
    }

    /// Makes the window with these bytes the first one, a new one if need be.
    fn bring_forward(&mut self, memory: (u64, u64), at: Pointer, bytes: usize) -> bool {
        let (Some(gdr), Some(end)) = (&self.gdr, at.checked_add(bytes as u64)) else {
            return false;
        };
        let holds =
            |window: &Window| window.memory == memory && window.start <= at && end <= window.end;
        let known = self.open.iter().position(holds).and_then(|place| self.open.remove(place));
        let window = known.unwrap_or_else(|| {
            if self.open.len() >= WINDOWS_MAX {
                self.open.pop_back().into_iter().for_each(|oldest| shut(gdr, oldest));
            }
            let start = at / PAGE_BYTES * PAGE_BYTES;
            let end = end.next_multiple_of(PAGE_BYTES);
            let mapped = gdr.map(start, (end - start) as usize);
            if let Err(why) = &mapped {
                tracing::info!(why, "memory of a GPU cannot be mapped: it goes by copy engine");
            }
            Window { memory, start, end, mapped: mapped.ok() }
        });
        self.open.push_front(window);
        true
    }

    /// Gives everything back; nothing is mapped any more.
    fn close(&mut self) {
        let Some(gdr) = self.gdr.take() else { return };
        self.open.drain(..).for_each(|window| shut(&gdr, window));
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.close();
    }
}

fn shut(gdr: &Gdr, window: Window) {
    if let Some(mapped) = window.mapped {
        gdr.give_back(mapped);
    }
}
