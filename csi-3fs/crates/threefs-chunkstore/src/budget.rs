//! What the data files of all stores of one file system may take together.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Growth leaves this part of a file system free, and at most [`RESERVE_BYTES_MAX`].
const RESERVE_PARTS: u64 = 20;
/// The room that logs may still need is far below this.
const RESERVE_BYTES_MAX: u64 = 1 << 30;

/// Shared by the stores of one disk: each sees the room that the others have taken.
#[derive(Debug, Default)]
pub struct DiskBudget {
    capacity_bytes: u64,
    reserve_bytes: u64,
    taken: Mutex<u64>,
}

impl DiskBudget {
    /// Data files hold at most `capacity_bytes` (0: as much as the file system has), and growth
    /// leaves `reserve_bytes` of the file system free: for logs, and for what is not a store.
    #[must_use]
    pub fn new(capacity_bytes: u64, reserve_bytes: u64) -> Arc<Self> {
        Arc::new(Self { capacity_bytes, reserve_bytes, taken: Mutex::default() })
    }

    /// The same with the reserve that suits the file system of `folder`: a twentieth of it, at most
    /// 1 GiB.
    ///
    /// # Errors
    /// As the system says.
    pub fn of_folder(folder: &Path, capacity_bytes: u64) -> io::Result<Arc<Self>> {
        let stat = rustix::fs::statvfs(folder)?;
        let total = stat.f_blocks.saturating_mul(stat.f_frsize);
        Ok(Self::new(capacity_bytes, (total / RESERVE_PARTS).min(RESERVE_BYTES_MAX)))
    }

    /// [`Self::capacity`] with what the file system of `folder` has free now.
    ///
    /// # Errors
    /// As the system says.
    pub fn capacity_of(&self, folder: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(folder)?;
        Ok(self.capacity(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    /// Bytes that all data files hold or may still take, where the file system has `free_bytes`.
    #[must_use]
    pub fn capacity(&self, free_bytes: u64) -> u64 {
        let taken = *self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let possible = taken.saturating_add(free_bytes.saturating_sub(self.reserve_bytes));
        if self.capacity_bytes > 0 { possible.min(self.capacity_bytes) } else { possible }
    }

    /// An existing data file is opened: it counts whether it fits or not.
    pub(crate) fn opened(&self, bytes: u64) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
    }

    /// How much of `wanted` bytes there is room for.
    pub(crate) fn room(&self, wanted: u64, free_bytes: u64) -> u64 {
        let capacity = self.capacity(free_bytes);
        let taken = *self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.min(capacity.saturating_sub(taken))
    }

    pub(crate) fn take(&self, bytes: u64) {
        self.opened(bytes);
    }

    pub(crate) fn give(&self, bytes: u64) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_share_one_capacity_and_leave_the_reserve() {
        let budget = DiskBudget::new(100, 0);
        budget.take(70);
        assert_eq!(budget.room(50, 1_000), 30);
        budget.give(20);
        assert_eq!(budget.room(50, 1_000), 50);
        let budget = DiskBudget::new(0, 40);
        budget.take(10);
        assert_eq!(budget.room(50, 60), 20, "40 of 60 free bytes stay");
        assert_eq!(budget.capacity(60), 30);
        assert_eq!(budget.room(50, 30), 0);
    }
}
