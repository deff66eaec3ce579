//! Disk budget: space shared by the data files of all stores of one file system.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use threefs_core::error::StoreError;

use crate::accounting::{Accounting, Completion, ReserveWait, SpaceRequest, Usage};

/// Divisor of a file system's size that growth leaves free, at most [`RESERVE_BYTES_MAX`].
const RESERVE_PARTS: u64 = 20;
/// Maximum reserve. Logs need far less than this.
const RESERVE_BYTES_MAX: u64 = 1 << 30;

/// A store whose free blocks can be returned to the file system.
pub(crate) trait Reclaim: Send + Sync {
    /// Returns up to `bytes` of free blocks to the file system. Blocks. Returns the number of
    /// bytes.
    fn reclaim(&self, bytes: u64) -> u64;
}

/// Called once with the reservation, or with `NoSpace`; must not block.
pub type ReserveCallback = Box<dyn FnOnce(Result<Reservation, StoreError>) + Send>;

/// Space reserved for one update's copy. Released when it is dropped, or used by
/// [`crate::ChunkStore::apply_in`].
#[derive(Default)]
pub struct Reservation {
    grant: Option<(Arc<DiskBudget>, SpaceRequest)>,
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("request", &self.grant.as_ref().map(|(_, request)| request))
            .finish()
    }
}

impl Reservation {
    fn finish(&mut self, accounting: &mut Accounting<ReserveCallback>) {
        if let Some((_, request)) = self.grant.take() {
            accounting.update_finished(request);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Some(budget) = self.grant.as_ref().map(|(budget, _)| Arc::clone(budget)) else {
            return;
        };
        self.finish(&mut budget.accounting());
        budget.grant_waiting();
    }
}

/// Space budget shared by the stores of one disk.
#[derive(Default)]
pub struct DiskBudget {
    accounting: Mutex<Accounting<ReserveCallback>>,
    reclaimables: Mutex<Vec<(u64, Weak<dyn Reclaim>)>>,
    /// Held by the store that reclaims blocks from others.
    reclaiming: Mutex<()>,
}

thread_local! {
    /// The budget whose callbacks this thread is running.
    static GRANTING: Cell<*const DiskBudget> = const { Cell::new(std::ptr::null()) };
}

struct GrantingGuard {
    outer: *const DiskBudget,
}

impl Drop for GrantingGuard {
    fn drop(&mut self) {
        GRANTING.set(self.outer);
    }
}

impl fmt::Debug for DiskBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskBudget")
            .field("accounting", &*self.accounting())
            .finish_non_exhaustive()
    }
}

impl DiskBudget {
    /// Data files hold at most `capacity_bytes` (0: the size of the file system), and growth leaves
    /// `reserve_bytes` of the file system free for logs and other files.
    #[must_use]
    pub fn new(capacity_bytes: u64, reserve_bytes: u64) -> Arc<Self> {
        let accounting = Accounting::new(capacity_bytes, reserve_bytes);
        Arc::new(Self { accounting: Mutex::new(accounting), ..Self::default() })
    }

    /// As [`Self::new`], with a reserve of a twentieth of the file system of `folder`, at most 1
    /// GiB.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn of_folder(folder: &Path, capacity_bytes: u64) -> io::Result<Arc<Self>> {
        let stat = rustix::fs::statvfs(folder)?;
        let total = stat.f_blocks.saturating_mul(stat.f_frsize);
        Ok(Self::new(capacity_bytes, (total / RESERVE_PARTS).min(RESERVE_BYTES_MAX)))
    }

    /// [`Self::capacity`] with the current free space of the file system of `folder`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn capacity_of(&self, folder: &Path) -> io::Result<u64> {
        let stat = rustix::fs::statvfs(folder)?;
        Ok(self.capacity(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    /// Bytes that all data files hold or may still allocate, given `free_bytes` of the file system.
    #[must_use]
    pub fn capacity(&self, free_bytes: u64) -> u64 {
        let mut accounting = self.accounting();
        accounting.free_bytes = free_bytes;
        accounting.capacity()
    }

    /// An existing data file is opened: it counts even if it exceeds the capacity.
    pub(crate) fn add_data_file(&self, bytes: u64) {
        self.accounting().allocated += bytes;
    }

    /// A data file is closed, which does not free its space in the file system.
    pub(crate) fn closed(&self, bytes: u64) {
        let mut accounting = self.accounting();
        accounting.allocated = accounting.allocated.saturating_sub(bytes);
    }

    /// An opened store holds a chunk of this size.
    pub(crate) fn holds_chunk(&self, bytes: u64) {
        self.accounting().holds_chunk(bytes);
    }

    /// How many of `requested` bytes are available.
    pub(crate) fn available(&self, requested: u64, free_bytes: u64) -> u64 {
        let mut accounting = self.accounting();
        accounting.free_bytes = free_bytes;
        requested.min(accounting.capacity().saturating_sub(accounting.allocated))
    }

    pub(crate) fn allocate(&self, bytes: u64) {
        let mut accounting = self.accounting();
        accounting.allocated += bytes;
        accounting.free_bytes = accounting.free_bytes.saturating_sub(bytes);
    }

    pub(crate) fn release(&self, bytes: u64) {
        let mut accounting = self.accounting();
        accounting.allocated = accounting.allocated.saturating_sub(bytes);
        accounting.free_bytes = accounting.free_bytes.saturating_add(bytes);
    }

    /// Registers a store of this disk; returns its id.
    pub(crate) fn add_store(&self) -> u64 {
        self.accounting().add_store()
    }

    /// Unregisters a closed store. The caller must call [`Self::grant_waiting`] once its blocks are
    /// released.
    pub(crate) fn remove_store(self: &Arc<Self>, store: u64) {
        let completions = self.accounting().remove_store(store);
        self.reclaimables().retain(|(id, _)| *id != store);
        self.complete(completions);
    }

    /// Updates the usage of a store. The caller must call [`Self::grant_waiting`] once it holds no lock.
    pub(crate) fn set_usage(&self, store: u64, usage: Usage) {
        self.accounting().set_usage(store, usage);
    }

    /// As [`Self::set_usage`], when the blocks of `reservation` were allocated. In one step: otherwise an
    /// admission in between would count the copy twice and reject an update that only has to wait.
    pub(crate) fn blocks_allocated(&self, store: u64, usage: Usage, reservation: &mut Reservation) {
        let mut accounting = self.accounting();
        accounting.set_usage(store, usage);
        if let Some((_, request)) = &mut reservation.grant {
            accounting.blocks_allocated(request);
        }
    }

    /// As [`Self::set_usage`], when the update of `reservation` has become pending or has failed. In one
    /// step: otherwise an admission in between would count the space freed by its commit twice, and
    /// grant it to growth.
    pub(crate) fn update_finished(&self, store: u64, usage: Usage, reservation: &mut Reservation) {
        let mut accounting = self.accounting();
        accounting.set_usage(store, usage);
        reservation.finish(&mut accounting);
    }

    /// Requests space. Calls `ready` when space is available or never can be, perhaps before this
    /// returns. `None` if it was called.
    pub(crate) fn request(
        self: &Arc<Self>,
        store: u64,
        request: SpaceRequest,
        free_bytes: u64,
        ready: ReserveCallback,
    ) -> Option<ReserveWait> {
        let wait = {
            let mut accounting = self.accounting();
            accounting.free_bytes = free_bytes;
            accounting.enqueue(store, request, ready)
        };
        self.grant_waiting();
        self.accounting().is_waiting(wait).then_some(wait)
    }

    /// Grants waiting requests for which space has become available.
    pub(crate) fn grant_waiting(self: &Arc<Self>) {
        let this = Arc::as_ptr(self);
        let within = GrantingGuard { outer: GRANTING.replace(this) };
        if within.outer == this {
            // A callback has released its reservation immediately. A nested call would recurse once
            // per wait; the outer loop continues instead.
            return;
        }
        loop {
            let completions = self.accounting().grant_waiting();
            if completions.is_empty() {
                return;
            }
            self.complete(completions);
        }
    }

    fn complete(self: &Arc<Self>, completions: Vec<Completion<ReserveCallback>>) {
        for (ready, result) in completions {
            ready(result.map(|request| Reservation { grant: Some((Arc::clone(self), request)) }));
        }
    }

    /// Ends a wait with `NoSpace`, if it has not ended yet.
    pub(crate) fn expire(self: &Arc<Self>, wait: ReserveWait) {
        let expired = self.accounting().expire(wait);
        self.complete(expired.into_iter().collect());
        // Requests behind it may need less.
        self.grant_waiting();
    }

    pub(crate) fn add_reclaimable(&self, store: u64, reclaimable: Weak<dyn Reclaim>) {
        self.reclaimables().push((store, reclaimable));
    }

    /// Makes the other stores return free blocks to the file system. Blocks. Returns the number of
    /// bytes.
    pub(crate) fn reclaim_for(&self, store: u64, bytes: u64) -> u64 {
        let _one_at_a_time = self.reclaiming.lock().unwrap_or_else(PoisonError::into_inner);
        let other_stores: Vec<Arc<dyn Reclaim>> = self
            .reclaimables()
            .iter()
            .filter(|(id, _)| *id != store)
            .filter_map(|(_, reclaimable)| reclaimable.upgrade())
            .collect();
        let mut reclaimed = 0;
        for other in other_stores {
            if reclaimed >= bytes {
                break;
            }
            reclaimed += other.reclaim(bytes - reclaimed);
        }
        reclaimed
    }

    pub(crate) fn accounting(&self) -> MutexGuard<'_, Accounting<ReserveCallback>> {
        self.accounting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reclaimables(&self) -> MutexGuard<'_, Vec<(u64, Weak<dyn Reclaim>)>> {
        self.reclaimables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_share_one_capacity_and_leave_the_reserve() {
        let budget = DiskBudget::new(100, 0);
        budget.allocate(70);
        assert_eq!(budget.available(50, 1_000), 30);
        budget.release(20);
        assert_eq!(budget.available(50, 1_000), 50);
        let budget = DiskBudget::new(0, 40);
        budget.allocate(10);
        assert_eq!(budget.available(50, 60), 20, "40 of 60 free bytes are reserved");
        assert_eq!(budget.capacity(60), 30);
        assert_eq!(budget.available(50, 30), 0);
    }

    #[test]
    fn a_closed_file_is_not_free_space() {
        let budget = DiskBudget::new(0, 0);
        budget.add_data_file(70);
        assert_eq!(budget.capacity(10), 80);
        budget.closed(70);
        assert_eq!(budget.accounting().capacity(), 10);
    }
}
