//! Where partial sums of neighbours wait: a slot for every frame of a window.

use crate::core::credit::CLASSES;
use crate::core::tree::Partial;

/// By link and class, as many slots as a window has frames.
#[derive(Debug)]
pub struct Pools {
    memory: Vec<[Vec<u8>; CLASSES]>,
    slot_bytes: usize,
}

impl Pools {
    /// For so many links.
    pub fn new(links: usize, window: u32, slot_bytes: usize) -> Self {
        // Zeroed memory of this size comes from the kernel untouched: it costs nothing until used.
        let pool = |_| vec![0; window as usize * slot_bytes];
        let memory = (0..links).map(|_| std::array::from_fn(pool)).collect();
        Self { memory, slot_bytes }
    }

    /// A slot, to read. Connections write and kernels read, never both at once: the core's accounting
    /// of slots sees to that.
    pub fn place(&self, partial: &Partial) -> *const u8 {
        let at = self.offset(partial);
        self.memory[partial.link][partial.class].as_ptr().wrapping_add(at)
    }

    /// The same, to write.
    pub fn place_mut(&mut self, partial: &Partial) -> *mut u8 {
        let at = self.offset(partial);
        self.memory[partial.link][partial.class].as_mut_ptr().wrapping_add(at)
    }

    fn offset(&self, partial: &Partial) -> usize {
        let at = partial.slot as usize * self.slot_bytes;
        let pool = self.memory[partial.link][partial.class].len();
        assert!(at + self.slot_bytes <= pool, "slot {} of a pool of {pool} bytes", partial.slot);
        at
    }
}
