//! Accounting of a disk's space: usage of its stores, reservations for the copies of updates in
//! flight, and waiting requests.
//!
//! An update is copy on write: it allocates space for what it writes, and its commit frees what it
//! replaces. On a nearly full disk the copies in flight exceed the free space, so updates wait here
//! until others are committed. Decision 0077 explains the classes.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use threefs_core::error::StoreError;
use threefs_core::message::class;

/// Number of classes: updates, forwards by hop, and whole chunks for a SYNCING replica or a repair.
const CLASSES: usize = class::REPLACE as usize + 1;
/// Sixteenths of the space that a class leaves to the classes above it.
const LEFT_TO_HIGHER: [u64; CLASSES] = [8, 6, 4, 3, 2, 1, 0];
const PARTS: u64 = 16;
/// Growth leaves space for copies: at most the capacity divided by this, and at least twice the
/// largest chunk.
const RESERVED_PARTS: u64 = 32;

/// Space that an update needs and frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpaceRequest {
    /// Class of the request (`threefs_core::message::class`).
    pub(crate) class: u8,
    /// Bytes of the blocks that it writes.
    pub(crate) bytes: u64,
    /// Bytes of the blocks freed by its commit.
    pub(crate) freed_bytes: u64,
    /// Size of the chunk after the update: overwriting all of it needs this space.
    pub(crate) whole: u64,
}

/// Space usage of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Bytes of committed and pending content.
    pub(crate) content_bytes: u64,
    /// Bytes that the commits of all pending states will free.
    pub(crate) returning: u64,
    /// Number of pending states.
    pub(crate) pending: u64,
}

/// Identifies a waiting request, for [`crate::ChunkStore::expire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReserveWait(u64);

struct Waiting<R> {
    id: u64,
    /// The store that will use the space.
    store: u64,
    request: SpaceRequest,
    /// Returned with the result.
    ready: R,
}

impl<R> Waiting<R> {
    fn reject(self) -> Completion<R> {
        (self.ready, Err(StoreError::NoSpace { needed_bytes: self.request.bytes }))
    }
}

/// Result of [`Accounting::admit`].
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    Grant,
    /// Grant when other updates in flight have finished.
    Wait,
    /// Not possible even without other updates.
    Reject,
}

/// Accounting of a disk's space: usage, reservations and waiting requests. `R` identifies the
/// receiver of a request's result.
pub(crate) struct Accounting<R> {
    capacity_bytes: u64,
    reserve_bytes: u64,
    /// Bytes of all data files, without their holes.
    pub(crate) allocated: u64,
    /// Free bytes of the file system when last queried, corrected by allocations since.
    pub(crate) free_bytes: u64,
    stores: BTreeMap<u64, Usage>,
    all: Usage,
    next_id: u64,
    granted_bytes: u64,
    granted_returns: u64,
    reservations: u64,
    /// Largest copy requested so far.
    largest: u64,
    /// Size of the largest chunk.
    largest_chunk: u64,
    waiting: [VecDeque<Waiting<R>>; CLASSES],
}

impl<R> Default for Accounting<R> {
    fn default() -> Self {
        Self {
            capacity_bytes: 0,
            reserve_bytes: 0,
            allocated: 0,
            free_bytes: 0,
            stores: BTreeMap::new(),
            all: Usage::default(),
            next_id: 0,
            granted_bytes: 0,
            granted_returns: 0,
            reservations: 0,
            largest: 0,
            largest_chunk: 0,
            waiting: std::array::from_fn(|_| VecDeque::new()),
        }
    }
}

impl<R> fmt::Debug for Accounting<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting: usize = self.waiting.iter().map(VecDeque::len).sum();
        f.debug_struct("Accounting")
            .field("allocated", &self.allocated)
            .field("content_bytes", &self.all)
            .field("granted", &self.granted_bytes)
            .field("waiting", &waiting)
            .finish_non_exhaustive()
    }
}

/// Result for a waiting request.
pub(crate) type Completion<R> = (R, Result<SpaceRequest, StoreError>);

impl<R> Accounting<R> {
    pub(crate) fn new(capacity_bytes: u64, reserve_bytes: u64) -> Self {
        Self { capacity_bytes, reserve_bytes, ..Self::default() }
    }

    /// Bytes that all data files hold or may still allocate.
    pub(crate) fn capacity(&self) -> u64 {
        let possible =
            self.allocated.saturating_add(self.free_bytes.saturating_sub(self.reserve_bytes));
        if self.capacity_bytes > 0 { possible.min(self.capacity_bytes) } else { possible }
    }

    pub(crate) fn add_store(&mut self) -> u64 {
        self.next_id += 1;
        self.stores.insert(self.next_id, Usage::default());
        self.next_id
    }

    /// Unregisters a closed store; returns its waiting requests, rejected.
    pub(crate) fn remove_store(&mut self, store: u64) -> Vec<Completion<R>> {
        self.set_usage(store, Usage::default());
        self.stores.remove(&store);
        let waits = |queue: &mut VecDeque<Waiting<R>>| {
            let (own, other_waits) =
                std::mem::take(queue).into_iter().partition(|it: &Waiting<R>| it.store == store);
            *queue = other_waits;
            own
        };
        let own: Vec<VecDeque<Waiting<R>>> = self.waiting.iter_mut().map(waits).collect();
        own.into_iter().flatten().map(Waiting::reject).collect()
    }

    pub(crate) fn set_usage(&mut self, store: u64, now: Usage) {
        let Some(usage) = self.stores.get_mut(&store) else { return };
        let before = std::mem::replace(usage, now);
        self.all.content_bytes = self.all.content_bytes + now.content_bytes - before.content_bytes;
        self.all.returning = self.all.returning + now.returning - before.returning;
        self.all.pending = self.all.pending + now.pending - before.pending;
    }

    /// The blocks of a granted request are allocated: from now on the store's usage counts them.
    pub(crate) fn blocks_allocated(&mut self, request: &mut SpaceRequest) {
        self.granted_bytes -= request.bytes;
        request.bytes = 0;
    }

    /// The update of a granted request is pending or has failed: the store's usage counts all of
    /// it.
    pub(crate) fn update_finished(&mut self, request: SpaceRequest) {
        self.granted_bytes -= request.bytes;
        self.granted_returns -= request.freed_bytes;
        self.reservations -= 1;
    }

    /// Records that a chunk of this size may be overwritten.
    pub(crate) fn holds_chunk(&mut self, bytes: u64) {
        self.largest_chunk = self.largest_chunk.max(bytes);
    }

    /// Free space now, and once all updates in flight have finished. Negative if the disk holds
    /// more than its capacity.
    pub(crate) fn free_space(&self) -> (i64, i64) {
        let now =
            self.capacity() as i64 - self.all.content_bytes as i64 - self.granted_bytes as i64;
        (now, now + (self.all.returning + self.granted_returns) as i64)
    }

    fn admit(&self, request: SpaceRequest) -> Admission {
        let (now, alone) = self.free_space();
        let (bytes, growth) =
            (request.bytes as i64, request.bytes as i64 - request.freed_bytes as i64);
        let copies = self.largest.saturating_mul(PARTS).min(self.capacity() / RESERVED_PARTS);
        let largest_chunk = self.largest_chunk.max(request.whole);
        let mut reserved = copies.max(largest_chunk.saturating_mul(2)) as i64;
        if request.class > class::UPDATE {
            // The head has admitted it, and its disk may have had slightly more space.
            reserved /= 2;
        }
        if alone < bytes || (growth > 0 && alone - growth < reserved) {
            return Admission::Reject;
        }
        let left_to_higher =
            alone as u64 * LEFT_TO_HIGHER[usize::from(request.class).min(CLASSES - 1)] / PARTS;
        // With so little space each class has less than one copy: clients' updates are serialized,
        // and forwards take what is available.
        let scarce = (alone as u64) < request.bytes.saturating_mul(PARTS);
        let alone_now = self.reservations == 0 && self.all.pending == 0;
        let may = now - bytes >= left_to_higher as i64
            || (scarce && now >= bytes && (request.class > class::UPDATE || alone_now));
        if may { Admission::Grant } else { Admission::Wait }
    }

    pub(crate) fn enqueue(&mut self, store: u64, request: SpaceRequest, ready: R) -> ReserveWait {
        self.largest = self.largest.max(request.bytes);
        self.next_id += 1;
        let id = self.next_id;
        let queue = &mut self.waiting[usize::from(request.class).min(CLASSES - 1)];
        queue.push_back(Waiting { id, store, request, ready });
        ReserveWait(id)
    }

    /// Completes requests that no longer need to wait: highest classes first, each class in order.
    pub(crate) fn grant_waiting(&mut self) -> Vec<Completion<R>> {
        let mut completions = Vec::new();
        for class in (0..CLASSES).rev() {
            while let Some(first) = self.waiting[class].front() {
                let request = first.request;
                let admission = self.admit(request);
                if admission == Admission::Wait {
                    break;
                }
                let Some(first) = self.waiting[class].pop_front() else { break };
                let result = if admission == Admission::Grant {
                    // Recorded only for granted requests: a rejected chunk is never overwritten.
                    self.holds_chunk(request.whole);
                    self.granted_bytes += request.bytes;
                    self.granted_returns += request.freed_bytes;
                    self.reservations += 1;
                    Ok(request)
                } else {
                    Err(StoreError::NoSpace { needed_bytes: request.bytes })
                };
                completions.push((first.ready, result));
            }
        }
        completions
    }

    /// Removes a request that has timed out.
    pub(crate) fn expire(&mut self, wait: ReserveWait) -> Option<Completion<R>> {
        let waiting = self.waiting.iter_mut().find_map(|queue| {
            let at = queue.iter().position(|it| it.id == wait.0)?;
            queue.remove(at)
        });
        waiting.map(Waiting::reject)
    }

    pub(crate) fn is_waiting(&self, wait: ReserveWait) -> bool {
        self.waiting.iter().flatten().any(|it| it.id == wait.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,600 free bytes for copies; content fills the rest.
    fn accounting(pending: u64) -> Accounting<()> {
        let mut accounting = Accounting::new(101_600, 0);
        accounting.free_bytes = 1 << 40;
        let store = accounting.add_store();
        let returning = 100 * pending;
        accounting
            .set_usage(store, Usage { content_bytes: 100_000 + returning, returning, pending });
        accounting
    }

    fn overwrite(class: u8) -> SpaceRequest {
        SpaceRequest { class, bytes: 100, freed_bytes: 100, whole: 100 }
    }

    /// Number of granted requests.
    fn grant_count(accounting: &mut Accounting<()>, request: SpaceRequest) -> usize {
        for _ in 0..20 {
            accounting.enqueue(0, request, ());
        }
        accounting.grant_waiting().iter().filter(|(_, result)| result.is_ok()).count()
    }

    #[test]
    fn each_class_has_space_that_lower_classes_cannot_take() {
        let mut all = accounting(0);
        let by_class: Vec<usize> =
            (0..CLASSES as u8).map(|class| grant_count(&mut all, overwrite(class))).collect();
        assert_eq!(by_class, [8, 2, 2, 1, 1, 1, 1]);
        assert_eq!(
            grant_count(&mut accounting(0), overwrite(class::REPLACE)),
            16,
            "what the other classes leave"
        );
        assert_eq!(grant_count(&mut accounting(8), overwrite(class::UPDATE)), 0, "8 are in flight");
        assert_eq!(grant_count(&mut accounting(7), overwrite(class::UPDATE)), 1);
    }

    #[test]
    fn growth_beyond_the_capacity_is_rejected_and_overwrites_wait() {
        let growth = SpaceRequest { class: class::UPDATE, bytes: 100, freed_bytes: 0, whole: 100 };
        let admission = |pending, request| {
            let mut accounting = accounting(pending);
            accounting.largest = 100;
            accounting.admit(request)
        };
        // Space for 16 copies is kept for overwrites; half of it if the head has admitted the
        // growth.
        assert_eq!(admission(0, growth), Admission::Reject);
        assert_eq!(admission(0, SpaceRequest { class: 1, ..growth }), Admission::Grant);
        assert_eq!(admission(0, overwrite(class::UPDATE)), Admission::Grant);
        assert_eq!(admission(16, overwrite(class::UPDATE)), Admission::Wait);
        assert_eq!(
            admission(16, growth),
            Admission::Reject,
            "the copies in flight are not free space"
        );
        let large =
            SpaceRequest { class: class::UPDATE, bytes: 1_700, freed_bytes: 1_700, whole: 1_700 };
        assert_eq!(admission(0, large), Admission::Reject, "not even without other updates");
        // A chunk that was written in pieces may be overwritten as a whole.
        let mut accounting = accounting(0);
        accounting.holds_chunk(1_500);
        let growth = SpaceRequest { class: class::UPDATE, bytes: 1, freed_bytes: 0, whole: 1 };
        assert_eq!(accounting.admit(growth), Admission::Reject);
        assert_eq!(accounting.admit(SpaceRequest { class: 1, ..growth }), Admission::Grant);
        let whole = SpaceRequest { class: 1, bytes: 1_500, freed_bytes: 1_500, whole: 1_500 };
        assert_eq!(accounting.admit(whole), Admission::Grant);
    }

    #[test]
    fn a_rejected_chunk_leaves_space_for_smaller_ones() {
        let grows_to =
            |whole| SpaceRequest { class: class::UPDATE, bytes: 10, freed_bytes: 0, whole };
        let mut accounting = accounting(0);
        assert_eq!(grant_count(&mut accounting, grows_to(1_000)), 0, "it could not be overwritten");
        assert_eq!(accounting.admit(grows_to(10)), Admission::Grant);
        assert_eq!(accounting.admit(grows_to(1_000)), Admission::Reject);
    }

    #[test]
    fn waits_of_a_closed_store_are_rejected() {
        let mut accounting = accounting(7);
        let closed = accounting.add_store();
        let large = SpaceRequest { class: class::UPDATE, bytes: 500, freed_bytes: 500, whole: 500 };
        accounting.enqueue(closed, large, ());
        accounting.enqueue(0, overwrite(class::UPDATE), ());
        assert!(accounting.grant_waiting().is_empty(), "the second waits behind the first");
        let completions = accounting.remove_store(closed);
        let is_full = |result: &Result<_, _>| matches!(result, Err(StoreError::NoSpace { .. }));
        assert!(completions.len() == 1 && completions.iter().all(|(_, result)| is_full(result)));
        assert_eq!(accounting.grant_waiting().len(), 1);
    }

    #[test]
    fn with_space_for_few_copies_updates_are_serialized() {
        let large = SpaceRequest { class: class::UPDATE, bytes: 500, freed_bytes: 500, whole: 500 };
        let mut one = accounting(0);
        assert_eq!(grant_count(&mut one, large), 1);
        assert_eq!(
            grant_count(&mut one, SpaceRequest { class: 1, ..large }),
            2,
            "forwards take what is available"
        );
    }
}
