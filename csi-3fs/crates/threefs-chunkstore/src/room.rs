//! Room for the copies that updates in flight make, shared by all stores of one disk.
//!
//! An update is copy on write: it takes room for what it writes and gives back what it replaces
//! when it is committed. On a nearly full disk the copies in flight exceed the free room, so an
//! update waits here until others have given theirs back. Decision 0077 explains the classes.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use threefs_core::error::StoreError;
use threefs_core::message::class;

use crate::budget::DiskBudget;

/// Updates, forwards by hop, and whole chunks for a SYNCING replica or a repair.
const CLASSES: usize = class::REPLACE as usize + 1;
/// Sixteenths of the room that a class leaves to the classes above it.
const LEAVES: [u64; CLASSES] = [8, 6, 4, 3, 2, 1, 0];
const PARTS: u64 = 16;
/// Growth leaves room for copies, at most this part of the capacity, and for two of the largest
/// chunk in any case.
const KEPT_PARTS: u64 = 32;

/// What an update takes and gives back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Its class (`threefs_core::message::class`).
    pub(crate) class: u8,
    /// Bytes of the blocks that it writes.
    pub(crate) bytes: u64,
    /// Bytes of the blocks that its commit frees.
    pub(crate) returns: u64,
    /// Bytes that the chunk has afterwards, and that overwriting all of it will take.
    pub(crate) whole: u64,
}

/// What a store holds of its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    /// Bytes of committed and pending content.
    pub(crate) held: u64,
    /// Those that the commits of all pending states will free.
    pub(crate) returning: u64,
    /// Number of pending states.
    pub(crate) pending: u64,
}

/// Called once with the room, or with `NoSpace`; it must not block.
pub type RoomReady = Box<dyn FnOnce(Result<Room, StoreError>) + Send>;

/// Names a wait for room, for [`crate::ChunkStore::expire`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomWait(u64);

/// Room for one update's copy. It is given back when this is dropped, or taken by
/// [`crate::ChunkStore::apply_in`].
#[derive(Default)]
pub struct Room {
    of: Option<(Arc<DiskBudget>, Need)>,
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("need", &self.of.as_ref().map(|(_, need)| need)).finish()
    }
}

impl Room {
    pub(crate) fn new(budget: Arc<DiskBudget>, need: Need) -> Self {
        Self { of: Some((budget, need)) }
    }

    /// The blocks are taken: from now on the store's holding counts them.
    pub(crate) fn took(&mut self, ledger: &mut Ledger) {
        if let Some((_, need)) = &mut self.of {
            ledger.granted -= need.bytes;
            need.bytes = 0;
        }
    }

    /// The update is pending, or has failed: the store's holding counts all of it.
    pub(crate) fn ended(&mut self, ledger: &mut Ledger) {
        let Some((_, need)) = self.of.take() else { return };
        ledger.granted -= need.bytes;
        ledger.granted_returns -= need.returns;
        ledger.rooms -= 1;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let Some(budget) = self.of.as_ref().map(|(budget, _)| Arc::clone(budget)) else { return };
        self.ended(&mut budget.ledger());
        budget.settle();
    }
}

struct Waiting {
    id: u64,
    /// The store that will use the room.
    store: u64,
    need: Need,
    ready: RoomReady,
}

impl Waiting {
    fn refused(self) -> Settled {
        (self.ready, Err(StoreError::NoSpace { needed_bytes: self.need.bytes }))
    }
}

/// What [`Ledger::judge`] finds.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Now,
    /// When other updates in flight have ended.
    Later,
    /// Not even alone.
    Never,
}

/// Who holds the room of a disk and who waits for it.
#[derive(Default)]
pub(crate) struct Ledger {
    capacity_bytes: u64,
    reserve_bytes: u64,
    /// Bytes of all data files, without their holes.
    pub(crate) taken: u64,
    /// Bytes that the file system had free when it was last asked, corrected by what was taken and
    /// given since.
    pub(crate) free_bytes: u64,
    stores: BTreeMap<u64, Holding>,
    all: Holding,
    next_id: u64,
    granted: u64,
    granted_returns: u64,
    rooms: u64,
    /// The largest copy that was asked for.
    largest: u64,
    /// The largest chunk.
    largest_chunk: u64,
    waiting: [VecDeque<Waiting>; CLASSES],
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting: usize = self.waiting.iter().map(VecDeque::len).sum();
        f.debug_struct("Ledger")
            .field("taken", &self.taken)
            .field("held", &self.all)
            .field("granted", &self.granted)
            .field("waiting", &waiting)
            .finish_non_exhaustive()
    }
}

/// An answer to one that waited.
pub(crate) type Settled = (RoomReady, Result<Need, StoreError>);

impl Ledger {
    pub(crate) fn new(capacity_bytes: u64, reserve_bytes: u64) -> Self {
        Self { capacity_bytes, reserve_bytes, ..Self::default() }
    }

    /// Bytes that all data files hold or may still take.
    pub(crate) fn capacity(&self) -> u64 {
        let possible =
            self.taken.saturating_add(self.free_bytes.saturating_sub(self.reserve_bytes));
        if self.capacity_bytes > 0 { possible.min(self.capacity_bytes) } else { possible }
    }

    pub(crate) fn add_store(&mut self) -> u64 {
        self.next_id += 1;
        self.stores.insert(self.next_id, Holding::default());
        self.next_id
    }

    /// The store is closed. Those that wait for room in it, and get none.
    pub(crate) fn remove_store(&mut self, store: u64) -> Vec<Settled> {
        self.set_holding(store, Holding::default());
        self.stores.remove(&store);
        let waits = |queue: &mut VecDeque<Waiting>| {
            let (its, others) =
                std::mem::take(queue).into_iter().partition(|it: &Waiting| it.store == store);
            *queue = others;
            its
        };
        let its: Vec<VecDeque<Waiting>> = self.waiting.iter_mut().map(waits).collect();
        its.into_iter().flatten().map(Waiting::refused).collect()
    }

    pub(crate) fn set_holding(&mut self, store: u64, now: Holding) {
        let Some(holding) = self.stores.get_mut(&store) else { return };
        let before = std::mem::replace(holding, now);
        self.all.held = self.all.held + now.held - before.held;
        self.all.returning = self.all.returning + now.returning - before.returning;
        self.all.pending = self.all.pending + now.pending - before.pending;
    }

    /// A chunk of this size may be overwritten.
    pub(crate) fn holds_chunk(&mut self, bytes: u64) {
        self.largest_chunk = self.largest_chunk.max(bytes);
    }

    /// Room that there is now, and once everything in flight has ended. Negative where the disk
    /// holds more than its capacity.
    pub(crate) fn room(&self) -> (i64, i64) {
        let now = self.capacity() as i64 - self.all.held as i64 - self.granted as i64;
        (now, now + (self.all.returning + self.granted_returns) as i64)
    }

    fn judge(&self, need: Need) -> Verdict {
        let (now, alone) = self.room();
        let (bytes, growth) = (need.bytes as i64, need.bytes as i64 - need.returns as i64);
        let copies = self.largest.saturating_mul(PARTS).min(self.capacity() / KEPT_PARTS);
        let largest_chunk = self.largest_chunk.max(need.whole);
        let mut kept = copies.max(largest_chunk.saturating_mul(2)) as i64;
        if need.class > class::UPDATE {
            // The head has admitted it, and its disk may have had a little more room than this.
            kept /= 2;
        }
        if alone < bytes || (growth > 0 && alone - growth < kept) {
            return Verdict::Never;
        }
        let leaves = alone as u64 * LEAVES[usize::from(need.class).min(CLASSES - 1)] / PARTS;
        // With so little room the classes have less than one copy each: clients' updates are
        // made one after another, and the forwards take what there is.
        let little = (alone as u64) < need.bytes.saturating_mul(PARTS);
        let alone_now = self.rooms == 0 && self.all.pending == 0;
        let may = now - bytes >= leaves as i64
            || (little && now >= bytes && (need.class > class::UPDATE || alone_now));
        if may { Verdict::Now } else { Verdict::Later }
    }

    pub(crate) fn enqueue(&mut self, store: u64, need: Need, ready: RoomReady) -> RoomWait {
        self.largest = self.largest.max(need.bytes);
        self.next_id += 1;
        let id = self.next_id;
        let queue = &mut self.waiting[usize::from(need.class).min(CLASSES - 1)];
        queue.push_back(Waiting { id, store, need, ready });
        RoomWait(id)
    }

    /// Those that need wait no longer, the highest classes first and each class in its order.
    pub(crate) fn settle(&mut self) -> Vec<Settled> {
        let mut settled = Vec::new();
        for class in (0..CLASSES).rev() {
            while let Some(first) = self.waiting[class].front() {
                let need = first.need;
                let verdict = self.judge(need);
                if verdict == Verdict::Later {
                    break;
                }
                let Some(first) = self.waiting[class].pop_front() else { break };
                let result = if verdict == Verdict::Now {
                    // Not before: one that is refused will never be overwritten.
                    self.holds_chunk(need.whole);
                    self.granted += need.bytes;
                    self.granted_returns += need.returns;
                    self.rooms += 1;
                    Ok(need)
                } else {
                    Err(StoreError::NoSpace { needed_bytes: need.bytes })
                };
                settled.push((first.ready, result));
            }
        }
        settled
    }

    /// Removes one that has waited long enough.
    pub(crate) fn expire(&mut self, wait: RoomWait) -> Option<Settled> {
        let waiting = self.waiting.iter_mut().find_map(|queue| {
            let at = queue.iter().position(|it| it.id == wait.0)?;
            queue.remove(at)
        });
        waiting.map(Waiting::refused)
    }

    pub(crate) fn is_waiting(&self, wait: RoomWait) -> bool {
        self.waiting.iter().flatten().any(|it| it.id == wait.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,600 bytes for the copies of content that fills the rest.
    fn ledger(pending: u64) -> Ledger {
        let mut ledger = Ledger::new(101_600, 0);
        ledger.free_bytes = 1 << 40;
        let store = ledger.add_store();
        let returning = 100 * pending;
        ledger.set_holding(store, Holding { held: 100_000 + returning, returning, pending });
        ledger
    }

    fn overwrite(class: u8) -> Need {
        Need { class, bytes: 100, returns: 100, whole: 100 }
    }

    /// How many of them get room.
    fn granted(ledger: &mut Ledger, need: Need) -> usize {
        for _ in 0..20 {
            ledger.enqueue(0, need, Box::new(drop));
        }
        ledger.settle().iter().filter(|(_, result)| result.is_ok()).count()
    }

    #[test]
    fn each_class_has_room_that_no_lower_one_takes() {
        let mut all = ledger(0);
        let by_class: Vec<usize> =
            (0..CLASSES as u8).map(|class| granted(&mut all, overwrite(class))).collect();
        assert_eq!(by_class, [8, 2, 2, 1, 1, 1, 1]);
        assert_eq!(granted(&mut ledger(0), overwrite(class::REPLACE)), 16, "what the others leave");
        assert_eq!(granted(&mut ledger(8), overwrite(class::UPDATE)), 0, "8 are in flight");
        assert_eq!(granted(&mut ledger(7), overwrite(class::UPDATE)), 1);
    }

    #[test]
    fn growth_beyond_the_capacity_is_refused_and_overwrites_wait() {
        let growth = Need { class: class::UPDATE, bytes: 100, returns: 0, whole: 100 };
        let verdict = |pending, need| {
            let mut ledger = ledger(pending);
            ledger.largest = 100;
            ledger.judge(need)
        };
        // 16 copies are kept for overwrites, half of it where the head has admitted the growth.
        assert_eq!(verdict(0, growth), Verdict::Never);
        assert_eq!(verdict(0, Need { class: 1, ..growth }), Verdict::Now);
        assert_eq!(verdict(0, overwrite(class::UPDATE)), Verdict::Now);
        assert_eq!(verdict(16, overwrite(class::UPDATE)), Verdict::Later);
        assert_eq!(verdict(16, growth), Verdict::Never, "those in flight end, and are no room");
        let large = Need { class: class::UPDATE, bytes: 1_700, returns: 1_700, whole: 1_700 };
        assert_eq!(verdict(0, large), Verdict::Never, "not even alone");
        // A chunk that was written in pieces is overwritten as a whole.
        let mut ledger = ledger(0);
        ledger.holds_chunk(1_500);
        let growth = Need { class: class::UPDATE, bytes: 1, returns: 0, whole: 1 };
        assert_eq!(ledger.judge(growth), Verdict::Never);
        assert_eq!(ledger.judge(Need { class: 1, ..growth }), Verdict::Now);
        let whole = Need { class: 1, bytes: 1_500, returns: 1_500, whole: 1_500 };
        assert_eq!(ledger.judge(whole), Verdict::Now);
    }

    #[test]
    fn a_chunk_that_is_refused_leaves_room_for_smaller_ones() {
        let grows_to = |whole| Need { class: class::UPDATE, bytes: 10, returns: 0, whole };
        let mut ledger = ledger(0);
        assert_eq!(granted(&mut ledger, grows_to(1_000)), 0, "it could not be overwritten");
        assert_eq!(ledger.judge(grows_to(10)), Verdict::Now);
        assert_eq!(ledger.judge(grows_to(1_000)), Verdict::Never);
    }

    #[test]
    fn a_closed_store_waits_for_nothing() {
        let mut ledger = ledger(7);
        let closed = ledger.add_store();
        let large = Need { class: class::UPDATE, bytes: 500, returns: 500, whole: 500 };
        ledger.enqueue(closed, large, Box::new(drop));
        ledger.enqueue(0, overwrite(class::UPDATE), Box::new(drop));
        assert!(ledger.settle().is_empty(), "the second waits behind the first");
        let refused = ledger.remove_store(closed);
        let is_full = |result: &Result<_, _>| matches!(result, Err(StoreError::NoSpace { .. }));
        assert!(refused.len() == 1 && refused.iter().all(|(_, result)| is_full(result)));
        assert_eq!(ledger.settle().len(), 1);
    }

    #[test]
    fn with_room_for_few_copies_updates_are_made_one_after_another() {
        let large = Need { class: class::UPDATE, bytes: 500, returns: 500, whole: 500 };
        let mut one = ledger(0);
        assert_eq!(granted(&mut one, large), 1);
        assert_eq!(granted(&mut one, Need { class: 1, ..large }), 2, "forwards take what there is");
    }
}
