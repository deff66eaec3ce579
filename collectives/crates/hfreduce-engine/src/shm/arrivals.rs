//! The rolls of a segment: who has contributed to a chunk that the last one adds up.

use super::ShmSegment;
use super::primitives::ArrivalCounter;

/// In a line of its own: neighbouring slots belong to different operations.
#[repr(C, align(128))]
pub(super) struct ArrivalBlock(ArrivalCounter);

impl ShmSegment {
    fn arrivals(&self, chunk: u64) -> &ArrivalCounter {
        let slot = (chunk % self.shape.slots as u64) as usize;
        let offset = self.shape.arrivals_at() + slot * size_of::<ArrivalBlock>();
        // SAFETY: as in `rank`: `slot` is under `slots`, rank blocks end at a multiple of 128.
        unsafe { &(*self.segment.base().add(offset).cast::<ArrivalBlock>()).0 }
    }

    /// Says that `local` has contributed to `chunk`, which the last one adds up; true for him.
    pub fn arrive(&self, chunk: u64, local: usize) -> bool {
        self.arrivals(chunk).arrive(chunk, local) == self.shape.locals
    }

    /// True if nobody's contribution to such a chunk is missing but one.
    pub fn lacks_last_arrival(&self, chunk: u64) -> bool {
        self.arrivals(chunk).progress(chunk).0 + 1 == self.shape.locals
    }

    /// Says that the sum of such a chunk is in its slot.
    pub fn complete_reduction(&self, chunk: u64, local: usize) {
        self.arrivals(chunk).complete(chunk, local);
    }

    /// Who has put it there, if it is there.
    pub fn reduced_by(&self, chunk: u64) -> Option<usize> {
        self.arrivals(chunk).reduced_by(chunk).filter(|local| *local < self.shape.locals)
    }

    /// Who is adding it up, if everybody has contributed.
    pub fn reducer(&self, chunk: u64) -> Option<usize> {
        let (contributed, last) = self.arrivals(chunk).progress(chunk);
        (contributed >= self.shape.locals).then_some(last.min(self.shape.locals - 1))
    }
}
