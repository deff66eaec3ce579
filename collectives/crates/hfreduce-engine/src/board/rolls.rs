//! The rolls of a board: who has contributed to a chunk that the last one adds up.

use super::Board;
use super::blocks::Roll;

/// In a line of its own: neighbouring slots belong to different operations.
#[repr(C, align(128))]
pub(super) struct RollBlock(Roll);

impl Board {
    fn roll(&self, chunk: u64) -> &Roll {
        let slot = (chunk % self.shape.slots as u64) as usize;
        let offset = self.shape.rolls_at() + slot * size_of::<RollBlock>();
        // SAFETY: as in `rank`: `slot` is under `slots`, rank blocks end at a multiple of 128.
        unsafe { &(*self.segment.base().add(offset).cast::<RollBlock>()).0 }
    }

    /// Says that `local` has contributed to `chunk`, which the last one adds up; true for him.
    pub fn answer(&self, chunk: u64, local: usize) -> bool {
        self.roll(chunk).answer(chunk, local) == self.shape.locals
    }

    /// True if nobody's contribution to such a chunk is missing but one.
    pub fn lacks_one(&self, chunk: u64) -> bool {
        self.roll(chunk).so_far(chunk).0 + 1 == self.shape.locals
    }

    /// Says that the sum of such a chunk is in its slot.
    pub fn close(&self, chunk: u64, local: usize) {
        self.roll(chunk).close(chunk, local);
    }

    /// Who has put it there, if it is there.
    pub fn closed_by(&self, chunk: u64) -> Option<usize> {
        self.roll(chunk).closed_by(chunk).filter(|local| *local < self.shape.locals)
    }

    /// Who is adding it up, if everybody has contributed.
    pub fn adder(&self, chunk: u64) -> Option<usize> {
        let (contributed, last) = self.roll(chunk).so_far(chunk);
        (contributed >= self.shape.locals).then_some(last.min(self.shape.locals - 1))
    }
}
