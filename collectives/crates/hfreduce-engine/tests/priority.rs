//! Groups of one process with different priorities. All tests here use state of the whole process, so they run
//! one at a time.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod support;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hfreduce_engine::{Communicator, DType, Priority, ReduceOp, Share, Work};
use support::{Calls, TIMEOUT, buffer, placement, run};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// Longer than any test.
const ONE_HOUR: Duration = Duration::from_secs(3600);

fn group(priority: Priority, held_back: Duration) -> Vec<Communicator> {
    let tune = |options: &mut hfreduce_engine::Options| {
        (options.priority, options.held_back) = (priority, held_back);
    };
    run(&placement(2, 1), tune, |comm| comm)
}

/// Starts an operation that makes progress in the background.
fn start(comm: &Communicator, data: &mut [f32]) -> Work {
    comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap()
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

fn has_started(comm: &Communicator) -> bool {
    let flight = comm.flight().unwrap();
    flight.entries.last().is_some_and(|last| last.state == "started" && last.chunks > 0)
}

fn chunks(comms: &[Communicator]) -> u64 {
    comms.iter().map(|comm| comm.counters().chunks.load(Ordering::SeqCst)).sum()
}

#[test]
fn chunks_of_a_low_group_wait_for_a_high_group_and_those_of_an_equal_one_do_not() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let high = group(Priority::HIGH, ONE_HOUR);
    let same = group(Priority::HIGH, ONE_HOUR);
    let low = group(Priority::LOW, ONE_HOUR);
    let mut small = [vec![1.0; 1024], vec![2.0; 1024]];
    let mut large = [vec![1.0; 1 << 20], vec![2.0; 1 << 20]];
    let mut other = [vec![1.0; 1024], vec![2.0; 1024]];
    // 4 KiB on one of two ranks: in progress until the other rank calls it.
    let first = start(&high[0], &mut small[0]);
    wait_until("the high operation starts", || has_started(&high[0]));
    let before = chunks(&low);
    let [a, b] = &mut large;
    let works = [start(&low[0], a), start(&low[1], b)];
    let delays = |comm: &Communicator| comm.counters().held_back.load(Ordering::SeqCst) > 0;
    wait_until("both delay their chunks", || low.iter().all(delays));
    let [a, b] = &mut other;
    for work in [start(&same[0], a), start(&same[1], b)] {
        work.wait(None).unwrap();
    }
    assert_eq!(chunks(&low), before, "none of eight");
    assert!(works.iter().all(|work| !work.is_done()));
    // Delayed operations resume as soon as the high one has ended, not an hour later.
    for work in [first, start(&high[1], &mut small[1])].iter().chain(&works) {
        work.wait(None).unwrap();
    }
    assert!(chunks(&low) > before);
    assert!(small.iter().chain(&large).flatten().all(|value| *value == 3.0));
}

#[test]
fn chunks_do_not_wait_for_a_high_group_of_another_user() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let high = group(Priority::HIGH, ONE_HOUR);
    let other = Arc::new(Share::default());
    let tune = |options: &mut hfreduce_engine::Options| {
        (options.priority, options.held_back) = (Priority::LOW, ONE_HOUR);
        options.share = other.clone();
    };
    let low = run(&placement(2, 1), tune, |comm| comm);
    let mut small = [vec![1.0; 1024], vec![2.0; 1024]];
    let mut large = [vec![1.0; 1 << 20], vec![2.0; 1 << 20]];
    let ([a, b], [c, d]) = (&mut small, &mut large);
    let first = start(&high[0], a);
    wait_until("the high operation starts", || has_started(&high[0]));
    for work in [start(&low[0], c), start(&low[1], d)] {
        work.wait(Some(Duration::from_secs(60))).unwrap();
    }
    assert!(!first.is_done());
    for work in [first, start(&high[1], b)] {
        work.wait(None).unwrap();
    }
}

#[test]
fn ranks_that_would_deadlock_on_priorities_make_progress() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let high = group(Priority::HIGH, Duration::from_millis(10));
    let low = group(Priority::LOW, Duration::from_millis(10));
    let mut small = [vec![1.0; 1024], vec![2.0; 1024]];
    let mut large = [vec![1.0; 1 << 20], vec![2.0; 1 << 20]];
    let ([a, b], [c, d]) = (&mut small, &mut large);
    let first = start(&high[0], a);
    wait_until("the high operation starts", || has_started(&high[0]));
    // Rank 1 calls the high operation only after the low one, which rank 0 delays because of the high one.
    for work in [start(&low[0], c), start(&low[1], d)] {
        work.wait(None).unwrap();
    }
    for work in [first, start(&high[1], b)] {
        work.wait(None).unwrap();
    }
}
