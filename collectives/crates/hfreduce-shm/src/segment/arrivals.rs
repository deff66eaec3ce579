//! Arrival counters of chunks that the last arriver reduces.

use super::ShmSegment;
use super::primitives::ArrivalCounter;

/// In a separate cache line: adjacent slots belong to different operations.
#[repr(C, align(128))]
pub(super) struct ArrivalBlock(ArrivalCounter);

impl ShmSegment {
    #[inline]
    fn arrivals(&self, chunk: u64) -> &ArrivalCounter {
        let slot = (chunk % self.shape.slots as u64) as usize;
        let offset = self.shape.arrivals_at() + slot * size_of::<ArrivalBlock>();
        // SAFETY: as in `rank`: `slot` is under `slots`, rank blocks end at a multiple of 128.
        unsafe { &(*self.segment.base().add(offset).cast::<ArrivalBlock>()).0 }
    }

    /// Counts the contribution of `local` to `chunk`; true for the last arriver.
    #[inline]
    pub fn arrive(&self, chunk: u64, local: usize) -> bool {
        self.arrivals(chunk).arrive(chunk, local) == self.shape.locals
    }

    /// True if all contributions but one have arrived.
    #[inline]
    pub fn lacks_last_arrival(&self, chunk: u64) -> bool {
        self.arrivals(chunk).progress(chunk).0 + 1 == self.shape.locals
    }

    /// Publishes that the result of `chunk` is in its slot.
    #[inline]
    pub fn complete_reduction(&self, chunk: u64, local: usize) {
        self.arrivals(chunk).complete(chunk, local);
    }

    /// The rank that has reduced `chunk`, once its result is available.
    #[inline]
    pub fn reduced_by(&self, chunk: u64) -> Option<usize> {
        self.arrivals(chunk).reduced_by(chunk).filter(|local| *local < self.shape.locals)
    }

    /// The rank that reduces `chunk`, once all have contributed.
    #[inline]
    pub fn reducer(&self, chunk: u64) -> Option<usize> {
        let (contributed, last) = self.arrivals(chunk).progress(chunk);
        (contributed >= self.shape.locals).then_some(last.min(self.shape.locals - 1))
    }
}
