//! Slots of the segment: which of them this rank has released, and whether those that it needs are
//! free.

use super::node::Node;
use hfreduce_shm::segment::WAIT_SLOT;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// A part waits for a slot.
    pub is_wanted: bool,
    /// This rank has released the slots of all chunks below this one.
    pub released: u64,
    free_below: u64,
}

impl Slots {
    /// True if the slot of a chunk is free; otherwise records that this rank waits for one.
    pub fn take(&mut self, node: &Node, number: u64) -> bool {
        self.take_of(node, number, node.shm.shape().slots as u64)
    }

    /// The same, where `slots` chunks have a slot.
    pub fn take_of(&mut self, node: &Node, number: u64, slots: u64) -> bool {
        if number >= self.free_below + slots {
            self.free_below = node.shm.released_by_all();
        }
        let free = number < self.free_below + slots;
        self.is_wanted |= !free;
        free
    }

    /// Releases the slots of all chunks below `through`; wakes the ranks that wait for slots if all
    /// ranks have released some.
    pub fn release(&mut self, node: &Node, through: u64) {
        if self.released == through {
            return;
        }
        let before = std::mem::replace(&mut self.released, through);
        node.shm.release(node.local(), self.released);
        if node.locals() == 1 {
            return;
        }
        node.shm.full_fence();
        // The other ranks' counters change with every operation: they are read only if a rank
        // sleeps.
        let locals = 0..node.locals();
        let asleep = |local| node.shm.sleeps_for(local, WAIT_SLOT);
        if locals.clone().any(asleep) && node.shm.released_by_all() > before {
            for local in locals {
                node.wake(local, WAIT_SLOT);
            }
        }
    }
}
