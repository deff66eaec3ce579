//! Thousands of outstanding operations: compared with the other ranks', bounded, and each ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hfreduce_engine::{Buffer, Communicator, DType, ErrorKind, ReduceOp, WaitError, Work};
use support::{Calls, Served, TIMEOUT, buffer, placement, run, run_at};

/// More operations than one window, than the fingerprints that a segment stores, and than the collective
/// operations that a daemon accepts.
const MANY: usize = 5000;

/// Messages of one element each.
fn each(data: &mut [f32]) -> impl Iterator<Item = Buffer> + '_ {
    data.chunks_exact_mut(1).map(buffer)
}

fn wait_all(works: impl IntoIterator<Item = Work>) {
    works.into_iter().for_each(|work| work.wait(None).unwrap());
}

#[test]
fn fingerprints_are_compared_with_ranks_any_number_of_operations_ahead() {
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
                // All byte counts are equal: only the fingerprint distinguishes the two.
                let op = if comm.rank() == late { ReduceOp::Max } else { ReduceOp::Sum };
                let start = |data: Buffer| comm.allreduce(data, DType::F32, op, 0, TIMEOUT, false);
                let works: Vec<Work> = match comm.rank() == late {
                    true => each(&mut data[..1]).map(start).filter_map(Result::ok).collect(),
                    false => each(&mut data).map(start).filter_map(Result::ok).collect(),
                };
                if comm.rank() == 0 {
                    // The operations called so far have started, as far as the window allows.
                    comm.yield_driver();
                    started.store(true, Ordering::SeqCst);
                }
                // A rank may receive the failure before its first call.
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
    fn yield_driver(&self);
}

impl Moment for Communicator {
    /// Yields to every other thread that needs the driver: a wait that times out.
    fn yield_driver(&self) {
        let mut unused = [0.0];
        let never = self.recv_any(buffer(&mut unused), DType::F32, 77, TIMEOUT).unwrap();
        let ended = never.wait(Some(Duration::from_millis(300)));
        assert!(matches!(ended, Err(WaitError::StillRunning { .. })), "{ended:?}");
        std::mem::forget(never);
    }
}

/// All kinds of operations concurrently: along the trees and over point-to-point connections.
fn mixed(comm: &Communicator, count: usize) {
    let (own, world) = (comm.rank(), comm.world_size());
    let mut sums = vec![1.0; count];
    let mut broadcasts: Vec<f32> =
        (0..count).map(|at| (own as usize * count + at) as f32).collect();
    let mut inputs: Vec<f32> = (0..count * world).map(|at| (at + own as usize) as f32).collect();
    let mut outputs = vec![-1.0; count * world];
    let mut works = Vec::new();
    let parts = inputs.chunks_exact_mut(world).zip(outputs.chunks_exact_mut(world));
    let all = each(&mut sums).zip(each(&mut broadcasts)).zip(parts).enumerate();
    for (at, ((sum, cast), (input, output))) in all {
        let root = (at % world) as u32;
        works.push(comm.allreduce(sum, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap());
        works.push(comm.broadcast(cast, DType::F32, root, TIMEOUT, false).unwrap());
        let (input, output, ones) = (buffer(input), buffer(output), vec![1; world]);
        let work = comm.alltoall(input, output, &ones, &ones, DType::F32, TIMEOUT, false);
        works.push(work.unwrap());
    }
    wait_all(works);
    assert!(sums.iter().all(|sum| *sum == world as f32));
    for (at, cast) in broadcasts.iter().enumerate() {
        assert_eq!(*cast, ((at % world) * count + at) as f32);
    }
    for (at, output) in outputs.iter().enumerate() {
        let (operation, from) = (at / world, at % world);
        assert_eq!(*output, (operation * world + own as usize + from) as f32);
    }
}

#[test]
fn thousands_of_collectives_can_be_outstanding() {
    for (nodes, locals) in [(1, 3), (2, 1), (2, 2)] {
        run(&placement(nodes, locals), |_| {}, |comm| mixed(&comm, MANY / 3));
    }
}

#[test]
fn a_message_overtakes_collectives_that_the_window_delays() {
    for (nodes, locals) in [(1, 2), (2, 1)] {
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let (mut data, mut message) = (vec![1.0; MANY], [7.0 * comm.rank() as f32]);
                let start =
                    |data| comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false);
                if comm.rank() == 0 {
                    let works: Vec<Work> =
                        each(&mut data).map(|data| start(data).unwrap()).collect();
                    comm.send(buffer(&mut message), DType::F32, 1, 3, TIMEOUT)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    wait_all(works);
                } else {
                    // Calls nothing before the message has arrived.
                    comm.recv(buffer(&mut message), DType::F32, 0, 3, TIMEOUT)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    wait_all(each(&mut data).map(|data| start(data).unwrap()).collect::<Vec<_>>());
                }
                assert_eq!(message, [0.0]);
                assert!(data.iter().all(|sum| *sum == 2.0));
            },
        );
    }
}

#[test]
fn operations_delayed_by_the_window_fail_when_a_rank_closes() {
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
                // The rank may have closed before the others have all results of its last operation.
                let errors: Vec<_> = ends.filter_map(Result::err).collect();
                assert!(errors.len() >= MANY - 10);
                assert!(errors.iter().all(|error| error.cause.kind == ErrorKind::PeerLeft));
            },
        );
    }
}

/// Receives of `count` messages, as many sends, and then `count` collectives, all outstanding.
fn messages_and_collectives(comm: &Communicator, count: usize) {
    let peer = 1 - comm.rank();
    let mut outgoing: Vec<f32> = (0..count).map(|at| at as f32).collect();
    let (mut received, mut sums) = (vec![-1.0; count], vec![1.0; count]);
    let mut works = Vec::new();
    for data in each(&mut received) {
        works.push(comm.recv(data, DType::F32, peer, 1, TIMEOUT).unwrap());
    }
    for data in each(&mut outgoing) {
        works.push(comm.send(data, DType::F32, peer, 1, TIMEOUT).unwrap());
    }
    for data in each(&mut sums) {
        works.push(comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap());
    }
    wait_all(works);
    assert_eq!(received, outgoing);
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
fn thousands_can_be_outstanding_through_daemons() {
    through_daemons(MANY);
}

/// Time after its deadline by which an operation must end, however many there are and however busy the host is.
const LATE: Duration = Duration::from_secs(60);

/// Receives whose messages never arrive, ended by their deadline, an abort, or a close.
fn receives_end(comm: &Communicator, count: usize, ended_by: ErrorKind) {
    if comm.rank() > 0 {
        // This rank's operation ends with the group.
        let mut data = [0.0];
        let work = comm.recv(buffer(&mut data), DType::F32, 0, 2, TIMEOUT);
        assert!(work.is_err() || work.unwrap().wait(None).is_err());
        return;
    }
    // Long enough to start all receives before.
    let limit = Duration::from_secs(1 + count as u64 / 5000);
    let deadline = if ended_by == ErrorKind::TimedOut { limit } else { TIMEOUT };
    let mut data = vec![0.0; count];
    let start = |data: Buffer| comm.recv(data, DType::F32, 1, 1, deadline);
    let works: Vec<Work> = each(&mut data).map_while(|data| start(data).ok()).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| works[0].wait(None));
        match ended_by {
            ErrorKind::Aborted => comm.abort("abort of the test"),
            ErrorKind::PeerLeft => drop(comm.close(Duration::ZERO)),
            _ => {}
        }
        waiter.join().unwrap().unwrap_err();
    });
    for work in &works {
        assert!(matches!(work.wait(Some(LATE)), Err(WaitError::Failed(_))));
    }
    assert!(started.elapsed() < limit + LATE);
    let Err(WaitError::Failed(error)) = works[0].wait(None) else { panic!("it has failed") };
    let expected = match ended_by {
        ErrorKind::PeerLeft => ErrorKind::Aborted, // Closed while in progress.
        other => other,
    };
    assert_eq!(error.cause.kind, expected, "{error}");
}

fn end_in_time(count: usize) {
    for ended_by in [ErrorKind::TimedOut, ErrorKind::Aborted, ErrorKind::PeerLeft] {
        for (nodes, locals) in [(1, 2), (2, 1)] {
            run(&placement(nodes, locals), |_| {}, |comm| receives_end(&comm, count, ended_by));
        }
        let daemon = Served::new(2);
        let at = |_| Some(daemon.path.clone());
        let body = |comm: Result<Communicator, _>| receives_end(&comm.unwrap(), count, ended_by);
        run_at(&placement(1, 2), at, |_| {}, body);
    }
}

#[test]
fn thousands_of_unmatched_receives_end_in_time() {
    end_in_time(MANY);
}

#[test]
#[ignore = "a soak test of a minute"]
fn a_hundred_thousand_unmatched_receives_end_in_time() {
    end_in_time(100_000);
}

#[test]
#[ignore = "a soak test of about ten seconds"]
fn a_hundred_thousand_can_be_outstanding_through_daemons() {
    through_daemons(100_000);
}
