//! Loom models of the segment's protocols. Loom explores every interleaving of two or three ranks and
//! every value that a load may return, and reports a payload cell that is read while it is written.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use fabric::atomics::model::*;

impl<A: Atomics> Default for PublishedCounter<A> {
    fn default() -> Self {
        Self(A::U64::default())
    }
}

impl<A: Atomics> Default for PeerAccess<A> {
    fn default() -> Self {
        Self(A::U32::default())
    }
}

impl<const WORDS: usize, A: Atomics> Default for Seqlock<WORDS, A> {
    fn default() -> Self {
        Self { stamp: A::U64::default(), words: std::array::from_fn(|_| A::U64::default()) }
    }
}

impl<A: Atomics> Default for ArrivalCounter<A> {
    fn default() -> Self {
        Self(A::U64::default())
    }
}

impl<A: Atomics> Default for SleepState<A> {
    fn default() -> Self {
        Self(A::U32::default())
    }
}

impl<const WORDS: usize, A: Atomics> Default for OnceRecord<WORDS, A> {
    fn default() -> Self {
        let words = std::array::from_fn(|_| A::U64::default());
        Self { state: A::U32::default(), length: A::U32::default(), words }
    }
}

/// A node of two ranks with one slot: rank 1 contributes to every chunk, rank 0 reduces, both read.
struct Node<A: Atomics> {
    staged: PublishedCounter<A>,
    published: PublishedCounter<A>,
    released: [PublishedCounter<A>; 2],
    input: UnsafeCell<u64>,
    result: UnsafeCell<u64>,
}

impl<A: Atomics> Node<A> {
    fn rank(&self, local: usize, chunks: u64) {
        for chunk in 0..chunks {
            until(|| self.released.iter().all(|released| released.get() >= chunk));
            if local == 1 {
                // SAFETY: loom reports concurrent access.
                self.input.with_mut(|input| unsafe { *input = 10 + chunk });
                self.staged.publish(chunk + 1);
                until(|| self.published.get() > chunk);
            } else {
                until(|| self.staged.get() > chunk);
                // SAFETY: as above.
                let input = self.input.with(|input| unsafe { *input });
                // SAFETY: as above.
                self.result.with_mut(|result| unsafe { *result = input * 2 });
                self.published.publish(chunk + 1);
            }
            // SAFETY: as above.
            assert_eq!(self.result.with(|result| unsafe { *result }), (10 + chunk) * 2);
            self.released[local].publish(chunk + 1);
        }
    }
}

fn until(ready: impl Fn() -> bool) {
    while !ready() {
        thread::yield_now();
    }
}

fn reuse_slot<A: Atomics>() {
    let (input, result) = (UnsafeCell::new(0), UnsafeCell::new(0));
    let node = Arc::new(Node::<A> {
        staged: PublishedCounter::default(),
        published: PublishedCounter::default(),
        released: Default::default(),
        input,
        result,
    });
    let other = node.clone();
    let owner = thread::spawn(move || other.rank(0, 2));
    node.rank(1, 2);
    owner.join().unwrap();
}

#[test]
fn no_slot_is_written_while_it_is_read() {
    every_order(reuse_slot::<Modelled>);
    assert!(breaks(reuse_slot::<Weak<NO_RELEASE>>));
    assert!(breaks(reuse_slot::<Weak<NO_ACQUIRE>>));
}

/// Ring accumulation: two ranks add in turn, chunk after chunk in one slot.
struct RingAccumulator<A: Atomics> {
    staged: [PublishedCounter<A>; 2],
    released: [PublishedCounter<A>; 2],
    sum: UnsafeCell<u64>,
}

impl<A: Atomics> RingAccumulator<A> {
    fn rank(&self, local: usize, chunks: u64) {
        for chunk in 0..chunks {
            if local == 0 {
                until(|| self.released.iter().all(|released| released.get() >= chunk));
                // SAFETY: as in `Node::rank`.
                self.sum.with_mut(|sum| unsafe { *sum = 10 + chunk });
            } else {
                until(|| self.staged[0].get() > chunk);
                // SAFETY: as above.
                self.sum.with_mut(|sum| unsafe { *sum += 1 });
            }
            self.staged[local].publish(chunk + 1);
            until(|| self.staged[1].get() > chunk);
            // SAFETY: as above.
            assert_eq!(self.sum.with(|sum| unsafe { *sum }), 11 + chunk);
            self.released[local].publish(chunk + 1);
        }
    }
}

fn accumulate_in_ring_order<A: Atomics>() {
    let accumulator = Arc::new(RingAccumulator::<A> {
        staged: Default::default(),
        released: Default::default(),
        sum: UnsafeCell::new(0),
    });
    let other = accumulator.clone();
    let first = thread::spawn(move || other.rank(0, 2));
    accumulator.rank(1, 2);
    first.join().unwrap();
}

#[test]
fn a_ring_accumulator_has_one_user_at_a_time() {
    every_order(accumulate_in_ring_order::<Modelled>);
    assert!(breaks(accumulate_in_ring_order::<Weak<NO_RELEASE>>));
    assert!(breaks(accumulate_in_ring_order::<Weak<NO_ACQUIRE>>));
}

/// The third rank synchronizes with the first only through the second.
fn pass_accumulator_on_twice<A: Atomics>() {
    let shared = Arc::new((<[PublishedCounter<A>; 2]>::default(), UnsafeCell::new(0)));
    let (zeroth, first) = (shared.clone(), shared.clone());
    let ranks = [
        thread::spawn(move || {
            // SAFETY: as in `Node::rank`.
            zeroth.1.with_mut(|sum| unsafe { *sum = 1 });
            zeroth.0[0].publish(1);
        }),
        thread::spawn(move || {
            if first.0[0].get() == 1 {
                // SAFETY: as above.
                first.1.with_mut(|sum| unsafe { *sum += 1 });
                first.0[1].publish(1);
            }
        }),
    ];
    if shared.0[1].get() == 1 {
        // SAFETY: as above.
        assert_eq!(shared.1.with(|sum| unsafe { *sum }), 2);
    }
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn an_accumulator_passed_on_twice_is_complete() {
    every_order(pass_accumulator_on_twice::<Modelled>);
    assert!(breaks(pass_accumulator_on_twice::<Weak<NO_RELEASE>>));
    assert!(breaks(pass_accumulator_on_twice::<Weak<NO_ACQUIRE>>));
}

/// Two readers release a slot; its owner writes it again after both releases.
fn reuse_slot_after_both_readers<A: Atomics>() {
    let shared = Arc::new((<[PublishedCounter<A>; 2]>::default(), UnsafeCell::new(7)));
    let readers: Vec<_> = (0..2)
        .map(|reader| {
            let shared = shared.clone();
            thread::spawn(move || {
                // SAFETY: as in `Node::rank`.
                assert_eq!(shared.1.with(|value| unsafe { *value }), 7);
                shared.0[reader].publish(1);
            })
        })
        .collect();
    if shared.0.iter().all(|released: &PublishedCounter<A>| released.get() == 1) {
        // SAFETY: as in `Node::rank`.
        shared.1.with_mut(|value| unsafe { *value = 8 });
    }
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

#[test]
fn a_slot_is_reused_after_all_readers_released_it() {
    every_order(reuse_slot_after_both_readers::<Modelled>);
    assert!(breaks(reuse_slot_after_both_readers::<Weak<NO_RELEASE>>));
    assert!(breaks(reuse_slot_after_both_readers::<Weak<NO_ACQUIRE>>));
}

/// A node of two ranks with one slot, where the last arriver reduces.
struct ArrivalNode<A: Atomics> {
    arrivals: ArrivalCounter<A>,
    released: [PublishedCounter<A>; 2],
    inputs: [UnsafeCell<u64>; 2],
    result: UnsafeCell<u64>,
}

impl<A: Atomics> ArrivalNode<A> {
    fn rank(&self, local: usize, chunks: u64) {
        for chunk in 0..chunks {
            until(|| self.released.iter().all(|released| released.get() >= chunk));
            // SAFETY: as in `Node::rank`.
            self.inputs[local].with_mut(|input| unsafe { *input = 10 + chunk });
            if self.arrivals.arrive(chunk, local) == 2 {
                // SAFETY: as above.
                let sum = self.inputs.iter().map(|input| input.with(|input| unsafe { *input }));
                let sum = sum.sum::<u64>();
                // SAFETY: as above.
                self.result.with_mut(|result| unsafe { *result = sum });
                self.arrivals.complete(chunk, local);
            }
            until(|| self.arrivals.reduced_by(chunk).is_some());
            // SAFETY: as above.
            assert_eq!(self.result.with(|result| unsafe { *result }), (10 + chunk) * 2);
            self.released[local].publish(chunk + 1);
        }
    }
}

fn last_arriver_reduces<A: Atomics>() {
    let node = Arc::new(ArrivalNode::<A> {
        arrivals: ArrivalCounter::default(),
        released: Default::default(),
        inputs: [UnsafeCell::new(0), UnsafeCell::new(0)],
        result: UnsafeCell::new(0),
    });
    let other = node.clone();
    let second = thread::spawn(move || other.rank(1, 2));
    node.rank(0, 2);
    second.join().unwrap();
}

#[test]
fn the_last_arriver_sees_all_inputs_and_all_see_its_result() {
    every_order(last_arriver_reduces::<Modelled>);
    assert!(breaks(last_arriver_reduces::<Weak<NO_RELEASE>>));
    assert!(breaks(last_arriver_reduces::<Weak<NO_ACQUIRE>>));
}

/// Three ranks arrive concurrently: exactly one is the last, and all ranks observe which.
fn count_arrivals<A: Atomics>() {
    let arrivals = Arc::new(ArrivalCounter::<A>::default());
    let ranks: Vec<_> = [1, 2]
        .map(|local| {
            let arrivals = arrivals.clone();
            thread::spawn(move || arrivals.arrive(7, local))
        })
        .into();
    let mut counts = vec![arrivals.arrive(7, 0)];
    counts.extend(ranks.into_iter().map(|rank| rank.join().unwrap()));
    assert_eq!(counts.iter().sum::<usize>(), 1 + 2 + 3, "{counts:?}");
    assert_eq!(arrivals.progress(7), (3, counts.iter().position(|count| *count == 3).unwrap()));
}

#[test]
fn one_of_several_arrivers_is_the_last() {
    every_order(count_arrivals::<Modelled>);
}

/// Rank 1 writes into memory of rank 0, which aborts and reclaims it.
fn reclaim_memory<A: Atomics>() {
    let shared =
        Arc::new((PeerAccess::<A>::default(), OnceRecord::<1, A>::default(), UnsafeCell::new(0)));
    let other = shared.clone();
    let writer = thread::spawn(move || {
        let (access, end, memory) = &*other;
        if access.start(end) {
            // SAFETY: as in `Node::rank`.
            memory.with_mut(|value| unsafe { *value = 1 });
            access.end();
        }
    });
    let (access, end, memory) = &*shared;
    end.write(0, b"over");
    if !access.is_accessing_peers() {
        // SAFETY: as in `Node::rank`.
        memory.with_mut(|value| unsafe { *value = 2 });
    }
    writer.join().unwrap();
}

#[test]
fn reclaimed_memory_is_not_written() {
    every_order(reclaim_memory::<Modelled>);
    assert!(breaks(reclaim_memory::<Weak<NO_RELEASE>>));
    assert!(breaks(reclaim_memory::<Weak<NO_ACQUIRE>>));
    assert!(breaks(reclaim_memory::<Weak<NO_FENCE>>));
    assert!(breaks(reclaim_memory::<Weak<NO_TOTAL_ORDER>>));
}

/// Two ranks contribute, and the last one wakes the rank that waits for both.
fn last_contributor_wakes<A: Atomics>() {
    let shared = Arc::new((SleepState::<A>::default(), <[PublishedCounter<A>; 2]>::default()));
    let all = |staged: &[PublishedCounter<A>; 2]| staged.iter().all(|staged| staged.get() == 1);
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.1[rank].publish(1);
                A::fence(SeqCst);
                shared.0.sleeps_for(1) && all(&shared.1) && shared.0.claim_wakeup(1)
            })
        })
        .collect();
    shared.0.fall_asleep(1);
    let observed = all(&shared.1);
    let notified = ranks.into_iter().map(|rank| rank.join().unwrap());
    assert!(notified.fold(observed, |any, notified| any | notified), "the rank is never woken");
}

#[test]
fn one_of_several_contributors_notifies() {
    every_order(last_contributor_wakes::<Modelled>);
}

fn sleep_while_another_rank_publishes<A: Atomics>() {
    let shared = Arc::new((SleepState::<A>::default(), PublishedCounter::<A>::default()));
    let sleeping = shared.clone();
    let sleeper = thread::spawn(move || {
        sleeping.0.fall_asleep(1);
        let observed = sleeping.1.get() == 1;
        if observed {
            sleeping.0.wake_up();
        }
        observed
    });
    shared.1.publish(1);
    A::fence(SeqCst);
    let notified = shared.0.claim_wakeup(1);
    assert!(sleeper.join().unwrap() || notified, "the rank is never woken");
}

#[test]
fn no_change_is_missed_by_a_sleeper() {
    every_order(sleep_while_another_rank_publishes::<Modelled>);
    assert!(breaks(sleep_while_another_rank_publishes::<Weak<NO_FENCE>>));
    assert!(breaks(sleep_while_another_rank_publishes::<Weak<NO_TOTAL_ORDER>>));
}

fn wake_twice<A: Atomics>() {
    let sleeper = Arc::new(SleepState::<A>::default());
    sleeper.fall_asleep(1);
    let other = sleeper.clone();
    let waker = thread::spawn(move || u32::from(other.claim_wakeup(1)));
    let wakeups = u32::from(sleeper.claim_wakeup(1)) + waker.join().unwrap();
    assert_eq!(wakeups, 1);
}

#[test]
fn a_sleeping_rank_is_notified_once() {
    every_order(wake_twice::<Modelled>);
}

/// A rank wakes up by itself, for example by a socket event, and sleeps for another event while
/// another rank is about to notify it of the previous one.
fn sleep_again_before_a_late_wakeup(claim_wakeup: fn(&SleepState<Modelled>) -> bool) {
    let sleeper = Arc::new(SleepState::<Modelled>::default());
    sleeper.fall_asleep(1);
    let other = sleeper.clone();
    let waker = thread::spawn(move || claim_wakeup(&other));
    sleeper.wake_up();
    sleeper.fall_asleep(2);
    waker.join().unwrap();
    assert!(sleeper.claim_wakeup(2), "the new wait was cleared");
}

#[test]
fn a_late_notification_does_not_clear_another_wait() {
    every_order(|| sleep_again_before_a_late_wakeup(|sleeper| sleeper.claim_wakeup(1)));
    let blindly = |sleeper: &SleepState<Modelled>| {
        sleeper.0.load(Relaxed) & 1 != 0 && sleeper.0.swap(0, Relaxed) & 1 != 0
    };
    assert!(
        breaks(move || sleep_again_before_a_late_wakeup(blindly)),
        "a plain check is not enough"
    );
}

fn read_while_it_is_written<A: Atomics>() {
    let block = Arc::new(Seqlock::<2, A>::default());
    block.write(1, [1, 1]);
    let other = block.clone();
    let writer = thread::spawn(move || other.write(2, [2, 2]));
    for stamp in [1, 2] {
        if let Some(words) = block.read(stamp) {
            assert_eq!(words, [stamp, stamp]);
        }
    }
    writer.join().unwrap();
    assert_eq!(block.read(2), Some([2, 2]));
}

#[test]
fn a_fingerprint_is_read_completely_or_not_at_all() {
    every_order(read_while_it_is_written::<Modelled>);
    assert!(breaks(read_while_it_is_written::<Weak<NO_RELEASE>>));
    assert!(breaks(read_while_it_is_written::<Weak<NO_ACQUIRE>>));
    assert!(breaks(read_while_it_is_written::<Weak<NO_FENCE>>));
}

fn write_two_causes<A: Atomics>() {
    let record = Arc::new(OnceRecord::<2, A>::default());
    let writers: Vec<_> = [[1; 9], [2; 9]]
        .map(|cause| {
            let record = record.clone();
            thread::spawn(move || record.write(u32::from(cause[0]), &cause))
        })
        .into();
    match record.read() {
        RecordState::Complete(cause) => assert!(cause == [1; 9] || cause == [2; 9], "{cause:?}"),
        RecordState::Partial(writer) => assert!(writer == 1 || writer == 2, "{writer}"),
        RecordState::Empty => {}
    }
    let won: Vec<bool> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    assert_eq!(record.read(), RecordState::Complete(vec![if won[0] { 1 } else { 2 }; 9]));
}

#[test]
fn one_abort_reason_is_recorded_and_read_completely() {
    every_order(write_two_causes::<Modelled>);
    assert!(breaks(write_two_causes::<Weak<NO_RELEASE>>));
    assert!(breaks(write_two_causes::<Weak<NO_ACQUIRE>>));
}
