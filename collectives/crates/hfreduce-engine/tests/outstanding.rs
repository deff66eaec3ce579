//! Thousands of operations outstanding: compared with the other ranks', bounded, and none waits for ever.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hfreduce_engine::{Buffer, Communicator, DType, ErrorKind, ReduceOp, WaitError, Work};
use support::{Served, TIMEOUT, buffer, placement, run, run_at};

/// More than one window, more than the fingerprints that a segment keeps, and more collective
/// operations than a daemon takes.
const MANY: usize = 5000;

/// A message of one element each.
fn each(data: &mut [f32]) -> impl Iterator<Item = Buffer> + '_ {
    data.chunks_exact_mut(1).map(buffer)
}

fn wait_all(works: impl IntoIterator<Item = Work>) {
    works.into_iter().for_each(|work| work.wait(None).unwrap());
}

#[test]
fn an_operation_is_compared_however_far_the_other_ranks_are_ahead() {
    for (nodes, locals) in [(1, 2), (1, 3), (2, 1), (2, 2)] {
        let late = (nodes * locals - 1) as u32;
        let started = AtomicBool::new(false);
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let mut data = vec![1.0; MANY];
                if comm.rank() == late {
                    let until = Instant::now() + TIMEOUT;
                    while !started.load(Ordering::SeqCst) {
                        assert!(Instant::now() < until);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                // Every byte count is equal, so nothing but the fingerprint tells the two apart.
                let op = if comm.rank() == late { ReduceOp::Max } else { ReduceOp::Sum };
                let start = |data: Buffer| comm.allreduce(data, DType::F32, op, 0, TIMEOUT, false);
                let works: Vec<Work> = match comm.rank() == late {
                    true => each(&mut data[..1]).map(start).filter_map(Result::ok).collect(),
                    false => each(&mut data).map(start).filter_map(Result::ok).collect(),
                };
                if comm.rank() == 0 {
                    // What it has called, it has started as far as the window lets it.
                    comm.wait_a_moment();
                    started.store(true, Ordering::SeqCst);
                }
                // A rank may hear of the end before it has called anything.
                let error = match works.first().map(|work| work.wait(None)) {
                    None => comm.error().unwrap(),
                    Some(Err(WaitError::Failed(error))) => error,
                    other => {
                        panic!("rank {}: the first operation must fail: {other:?}", comm.rank())
                    }
                };
                assert_eq!(error.cause.kind, ErrorKind::Mismatch, "{error}");
                let detail = &error.cause.detail;
                assert!(detail.contains("max") && detail.contains("operation #1"), "{detail}");
            },
        );
    }
}

trait Moment {
    fn wait_a_moment(&self);
}

impl Moment for Communicator {
    /// Until every other thread has had the driver: a wait that ends by itself.
    fn wait_a_moment(&self) {
        let mut nothing = [0.0];
        let never = self.recv_any(buffer(&mut nothing), DType::F32, 77, TIMEOUT).unwrap();
        let ended = never.wait(Some(Duration::from_millis(300)));
        assert!(matches!(ended, Err(WaitError::StillRunning { .. })), "{ended:?}");
        std::mem::forget(never);
    }
}

/// All kinds of operations at once: along the trees and over direct connections.
fn mixed(comm: &Communicator, count: usize) {
    let (own, world) = (comm.rank(), comm.world_size());
    let mut sums = vec![1.0; count];
    let mut casts: Vec<f32> = (0..count).map(|at| (own as usize * count + at) as f32).collect();
    let mut inputs: Vec<f32> = (0..count * world).map(|at| (at + own as usize) as f32).collect();
    let mut outputs = vec![-1.0; count * world];
    let mut works = Vec::new();
    let parts = inputs.chunks_exact_mut(world).zip(outputs.chunks_exact_mut(world));
    let all = each(&mut sums).zip(each(&mut casts)).zip(parts).enumerate();
    for (at, ((sum, cast), (input, output))) in all {
        let root = (at % world) as u32;
        works.push(comm.allreduce(sum, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap());
        works.push(comm.broadcast(cast, DType::F32, root, TIMEOUT, false).unwrap());
        let (input, output, ones) = (buffer(input), buffer(output), vec![1; world]);
        let sent = comm.alltoall(input, output, &ones, &ones, DType::F32, TIMEOUT, false);
        works.push(sent.unwrap());
    }
    wait_all(works);
    assert!(sums.iter().all(|sum| *sum == world as f32));
    for (at, cast) in casts.iter().enumerate() {
        assert_eq!(*cast, ((at % world) * count + at) as f32);
    }
    for (at, output) in outputs.iter().enumerate() {
        let (operation, from) = (at / world, at % world);
        assert_eq!(*output, (operation * world + own as usize + from) as f32);
    }
}

#[test]
fn thousands_of_collectives_are_outstanding() {
    for (nodes, locals) in [(1, 3), (2, 1), (2, 2)] {
        run(&placement(nodes, locals), |_| {}, |comm| mixed(&comm, MANY / 3));
    }
}

#[test]
fn a_message_overtakes_collectives_that_the_window_holds_back() {
    for (nodes, locals) in [(1, 2), (2, 1)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let (mut data, mut word) = (vec![1.0; MANY], [7.0 * comm.rank() as f32]);
                let start =
                    |data| comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false);
                if comm.rank() == 0 {
                    let works: Vec<Work> =
                        each(&mut data).map(|data| start(data).unwrap()).collect();
                    comm.send(buffer(&mut word), DType::F32, 1, 3, TIMEOUT)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    wait_all(works);
                } else {
                    // Calls nothing before it has the message.
                    comm.recv(buffer(&mut word), DType::F32, 0, 3, TIMEOUT)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    wait_all(each(&mut data).map(|data| start(data).unwrap()).collect::<Vec<_>>());
                }
                assert_eq!(word, [0.0]);
                assert!(data.iter().all(|sum| *sum == 2.0));
            },
        );
    }
}

#[test]
fn operations_that_are_held_back_fail_when_a_rank_leaves() {
    for (nodes, locals) in [(1, 2), (2, 1), (2, 2)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let last = comm.world_size() as u32 - 1;
                let mut data = vec![1.0; MANY];
                let start =
                    |data| comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false);
                let count = if comm.rank() == last { 10 } else { MANY };
                let works: Vec<_> = each(&mut data[..count]).map(start).collect();
                let ends = works.into_iter().map(|work| match work?.wait(None) {
                    Err(WaitError::Failed(error)) => Err(error),
                    other => {
                        other.unwrap();
                        Ok(())
                    }
                });
                if comm.rank() == last {
                    ends.for_each(|end| end.unwrap());
                    return;
                }
                // It may have left before the others have all results of the last one that it called.
                let errors: Vec<_> = ends.filter_map(Result::err).collect();
                assert!(errors.len() >= MANY - 10);
                assert!(errors.iter().all(|error| error.cause.kind == ErrorKind::PeerLeft));
            },
        );
    }
}

/// Receives of `count` messages, the sends of as many, and then `count` collectives, all outstanding.
fn messages_and_collectives(comm: &Communicator, count: usize) {
    let peer = 1 - comm.rank();
    let mut sent: Vec<f32> = (0..count).map(|at| at as f32).collect();
    let (mut came, mut sums) = (vec![-1.0; count], vec![1.0; count]);
    let mut works = Vec::new();
    for data in each(&mut came) {
        works.push(comm.recv(data, DType::F32, peer, 1, TIMEOUT).unwrap());
    }
    for data in each(&mut sent) {
        works.push(comm.send(data, DType::F32, peer, 1, TIMEOUT).unwrap());
    }
    for data in each(&mut sums) {
        works.push(comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap());
    }
    wait_all(works);
    assert_eq!(came, sent);
    assert!(sums.iter().all(|sum| *sum == 2.0));
}

fn through_daemons(count: usize) {
    for (nodes, locals) in [(1, 2), (2, 1)] {
        let daemons: Vec<Served> = (0..nodes).map(|_| Served::new(locals)).collect();
        let at = |rank: u32| Some(daemons[rank as usize / locals].path.clone());
        run_at(
            &placement(nodes, locals),
            at,
            |_| {},
            |comm| {
                messages_and_collectives(&comm.unwrap(), count);
            },
        );
    }
}

#[test]
fn thousands_are_outstanding_through_daemons() {
    through_daemons(MANY);
}

/// How long after its deadline an operation may end, however many there are and however busy the machine is.
const LATE: Duration = Duration::from_secs(60);

/// Receives whose messages never come, and what ends them: their deadline, an abort, or a close.
fn nothing_comes(comm: &Communicator, count: usize, ended_by: ErrorKind) {
    if comm.rank() > 0 {
        // Its own operation ends with the group.
        let mut data = [0.0];
        let work = comm.recv(buffer(&mut data), DType::F32, 0, 2, TIMEOUT);
        assert!(work.is_err() || work.unwrap().wait(None).is_err());
        return;
    }
    // Long enough to start all of them before.
    let limit = Duration::from_secs(1 + count as u64 / 5000);
    let deadline = if ended_by == ErrorKind::TimedOut { limit } else { TIMEOUT };
    let mut data = vec![0.0; count];
    let start = |data: Buffer| comm.recv(data, DType::F32, 1, 1, deadline);
    let works: Vec<Work> = each(&mut data).map_while(|data| start(data).ok()).collect();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| works[0].wait(None));
        match ended_by {
            ErrorKind::Aborted => comm.abort("the test says so"),
            ErrorKind::PeerLeft => drop(comm.close(Duration::ZERO)),
            _ => {}
        }
        waits.join().unwrap().unwrap_err();
    });
    for work in &works {
        assert!(matches!(work.wait(Some(LATE)), Err(WaitError::Failed(_))));
    }
    assert!(begun.elapsed() < limit + LATE);
    let Err(WaitError::Failed(error)) = works[0].wait(None) else { panic!("it has failed") };
    let expected = match ended_by {
        ErrorKind::PeerLeft => ErrorKind::Aborted, // Closed while it was under way.
        other => other,
    };
    assert_eq!(error.cause.kind, expected, "{error}");
}

fn end_in_time(count: usize) {
    for ended_by in [ErrorKind::TimedOut, ErrorKind::Aborted, ErrorKind::PeerLeft] {
        for (nodes, locals) in [(1, 2), (2, 1)] {
            run(&placement(nodes, locals), |_| {}, |comm| nothing_comes(&comm, count, ended_by));
        }
        let daemon = Served::new(2);
        let at = |_| Some(daemon.path.clone());
        let body = |comm: Result<Communicator, _>| nothing_comes(&comm.unwrap(), count, ended_by);
        run_at(&placement(1, 2), at, |_| {}, body);
    }
}

#[test]
fn thousands_that_wait_for_nothing_end_in_time() {
    end_in_time(MANY);
}

#[test]
#[ignore = "a soak test: a minute"]
fn a_hundred_thousand_that_wait_for_nothing_end_in_time() {
    end_in_time(100_000);
}

#[test]
#[ignore = "a soak test: some ten seconds"]
fn a_hundred_thousand_are_outstanding_through_daemons() {
    through_daemons(100_000);
}
