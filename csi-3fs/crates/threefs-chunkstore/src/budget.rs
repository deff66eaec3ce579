//! What the data files of all stores of one file system may take together.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::room::{Holding, Ledger, Need, Room, RoomReady, RoomWait, Settled};

/// Growth leaves this part of a file system free, and at most [`RESERVE_BYTES_MAX`].
const RESERVE_PARTS: u64 = 20;
/// The room that logs may still need is far below this.
const RESERVE_BYTES_MAX: u64 = 1 << 30;

/// Has blocks that are free for its own updates only.
pub(crate) trait Lender: Send + Sync {
    /// Gives up to `bytes` of them back to the file system. Blocks. How many it gave.
    fn lend(&self, bytes: u64) -> u64;
}

/// Shared by the stores of one disk: each sees the room that the others have taken.
#[derive(Default)]
pub struct DiskBudget {
    ledger: Mutex<Ledger>,
    lenders: Mutex<Vec<(u64, Weak<dyn Lender>)>>,
    /// Held by the store that others give blocks to.
    borrowing: Mutex<()>,
}

thread_local! {
    /// The budget that this thread settles.
    static SETTLING: Cell<*const DiskBudget> = const { Cell::new(std::ptr::null()) };
}

struct Settling {
    outer: *const DiskBudget,
}

impl Drop for Settling {
    fn drop(&mut self) {
        SETTLING.set(self.outer);
    }
}

impl fmt::Debug for DiskBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskBudget").field("ledger", &*self.ledger()).finish_non_exhaustive()
    }
}

impl DiskBudget {
    /// Data files hold at most `capacity_bytes` (0: as much as the file system has), and growth
    /// leaves `reserve_bytes` of the file system free: for logs, and for what is not a store.
    #[must_use]
    pub fn new(capacity_bytes: u64, reserve_bytes: u64) -> Arc<Self> {
        let ledger = Ledger::new(capacity_bytes, reserve_bytes);
        Arc::new(Self { ledger: Mutex::new(ledger), ..Self::default() })
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
        let mut ledger = self.ledger();
        ledger.free_bytes = free_bytes;
        ledger.capacity()
    }

    /// An existing data file is opened: it counts whether it fits or not.
    pub(crate) fn opened(&self, bytes: u64) {
        self.ledger().taken += bytes;
    }

    /// A data file is closed. The file system does not have its room back.
    pub(crate) fn closed(&self, bytes: u64) {
        let mut ledger = self.ledger();
        ledger.taken = ledger.taken.saturating_sub(bytes);
    }

    /// A store that is opened holds a chunk of this size.
    pub(crate) fn holds_chunk(&self, bytes: u64) {
        self.ledger().holds_chunk(bytes);
    }

    /// How much of `wanted` bytes there is room for.
    pub(crate) fn room(&self, wanted: u64, free_bytes: u64) -> u64 {
        let mut ledger = self.ledger();
        ledger.free_bytes = free_bytes;
        wanted.min(ledger.capacity().saturating_sub(ledger.taken))
    }

    pub(crate) fn take(&self, bytes: u64) {
        let mut ledger = self.ledger();
        ledger.taken += bytes;
        ledger.free_bytes = ledger.free_bytes.saturating_sub(bytes);
    }

    pub(crate) fn give(&self, bytes: u64) {
        let mut ledger = self.ledger();
        ledger.taken = ledger.taken.saturating_sub(bytes);
        ledger.free_bytes = ledger.free_bytes.saturating_add(bytes);
    }

    /// A store of this disk is opened; the name for what it holds.
    pub(crate) fn add_store(&self) -> u64 {
        self.ledger().add_store()
    }

    /// It is closed. The caller calls [`Self::settle`] once its blocks are given back.
    pub(crate) fn remove_store(self: &Arc<Self>, store: u64) {
        let refused = self.ledger().remove_store(store);
        self.lenders().retain(|(id, _)| *id != store);
        self.answer(refused);
    }

    /// What a store holds has changed. The caller calls [`Self::settle`] once it holds no lock.
    pub(crate) fn holds(&self, store: u64, holding: Holding) {
        self.ledger().set_holding(store, holding);
    }

    /// As [`Self::holds`], where blocks of `room` are held from now on. One step: a judgement in
    /// between would count the copy twice, and refuse an update that only has to wait.
    pub(crate) fn holds_copy(&self, store: u64, holding: Holding, room: &mut Room) {
        let mut ledger = self.ledger();
        ledger.set_holding(store, holding);
        room.took(&mut ledger);
    }

    /// As [`Self::holds`], where the update of `room` has become pending, or has failed. One step: a
    /// judgement in between would count twice what its commit frees, and let growth have it.
    pub(crate) fn holds_all(&self, store: u64, holding: Holding, room: &mut Room) {
        let mut ledger = self.ledger();
        ledger.set_holding(store, holding);
        room.ended(&mut ledger);
    }

    /// Asks for room. `ready` is called when there is room, or never can be, perhaps before this
    /// returns. `None` if it was.
    pub(crate) fn ask(
        self: &Arc<Self>,
        store: u64,
        need: Need,
        free_bytes: u64,
        ready: RoomReady,
    ) -> Option<RoomWait> {
        let wait = {
            let mut ledger = self.ledger();
            ledger.free_bytes = free_bytes;
            ledger.enqueue(store, need, ready)
        };
        self.settle();
        self.ledger().is_waiting(wait).then_some(wait)
    }

    /// Room may have become free: those that wait for it are called.
    pub(crate) fn settle(self: &Arc<Self>) {
        let this = Arc::as_ptr(self);
        let within = Settling { outer: SETTLING.replace(this) };
        if within.outer == this {
            // Whoever was called has given its room back at once. A call within a call would go as
            // deep as there are waits; the loop below goes on instead.
            return;
        }
        loop {
            let settled = self.ledger().settle();
            if settled.is_empty() {
                return;
            }
            self.answer(settled);
        }
    }

    fn answer(self: &Arc<Self>, settled: Vec<Settled>) {
        for (ready, result) in settled {
            ready(result.map(|need| Room::new(Arc::clone(self), need)));
        }
    }

    /// Ends a wait with `NoSpace`, if it has not ended yet.
    pub(crate) fn expire(self: &Arc<Self>, wait: RoomWait) {
        let expired = self.ledger().expire(wait);
        self.answer(expired.into_iter().collect());
        // Those behind it may need less.
        self.settle();
    }

    pub(crate) fn add_lender(&self, store: u64, lender: Weak<dyn Lender>) {
        self.lenders().push((store, lender));
    }

    /// Has the other stores give free blocks back to the file system. Blocks. How many bytes they
    /// gave.
    pub(crate) fn borrow_for(&self, store: u64, bytes: u64) -> u64 {
        let _one_at_a_time = self.borrowing.lock().unwrap_or_else(PoisonError::into_inner);
        let others: Vec<Arc<dyn Lender>> = self
            .lenders()
            .iter()
            .filter(|(id, _)| *id != store)
            .filter_map(|(_, lender)| lender.upgrade())
            .collect();
        let mut lent = 0;
        for other in others {
            if lent >= bytes {
                break;
            }
            lent += other.lend(bytes - lent);
        }
        lent
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lenders(&self) -> MutexGuard<'_, Vec<(u64, Weak<dyn Lender>)>> {
        self.lenders.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn a_closed_file_is_not_free_room() {
        let budget = DiskBudget::new(0, 0);
        budget.opened(70);
        assert_eq!(budget.capacity(10), 80);
        budget.closed(70);
        assert_eq!(budget.ledger().capacity(), 10);
    }
}
