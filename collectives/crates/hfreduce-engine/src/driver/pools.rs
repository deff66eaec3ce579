//! Pools of partial sums of neighbors: a slot for every frame of a window.

use hfreduce_core::credit::CLASSES;
use hfreduce_core::tree::Partial;

/// By link and class, as many slots as a window has frames.
#[derive(Debug)]
pub struct Pools {
    memory: Vec<[Vec<u8>; CLASSES]>,
    slot_bytes: usize,
}

impl Pools {
    /// Pools for this many links.
    pub fn new(links: usize, window: u32, slot_bytes: usize) -> Self {
        // Zeroed memory of this size is not touched until it is used.
        let pool = |_| vec![0; window as usize * slot_bytes];
        let memory = (0..links).map(|_| std::array::from_fn(pool)).collect();
        Self { memory, slot_bytes }
    }

    /// Address of a slot, to read. Connections write and kernels read, never at the same time: the
    /// core's accounting of slots guarantees that.
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
