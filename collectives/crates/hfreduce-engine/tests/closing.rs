//! Communicators that are closed, aborted, late or forked while threads wait: every wait ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Barrier;
use std::time::Duration;

use hfreduce_engine::{Communicator, DType, ErrorKind, ReduceOp, WaitError, Work};
use support::{Calls, TIMEOUT, allreduce, buffer, placement, run, try_run};

/// Deadline of operations that should end for another reason: a wait until the deadline fails the test.
const DEADLINE: Duration = Duration::from_secs(20);

fn call(comm: &Communicator, data: &mut [f32], timeout: Duration) -> Work {
    comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, timeout, true).unwrap()
}

fn kind_of(ended: Result<(), WaitError>) -> Option<ErrorKind> {
    match ended {
        Ok(()) => None,
        Err(WaitError::Failed(error)) => Some(error.cause.kind),
        Err(running @ WaitError::StillRunning { .. }) => panic!("{running}"),
    }
}

#[test]
fn closing_ends_the_wait_of_another_thread() {
    for shape in [(2, 1), (1, 2), (2, 2)] {
        let over = Barrier::new(shape.0 * shape.1);
        let kinds = run(
            &placement(shape.0, shape.1),
            |_| {},
            |comm| {
                let mut kind = None;
                if comm.rank() == 0 {
                    let mut data = vec![1.0; 1000];
                    let work = call(&comm, &mut data, DEADLINE);
                    kind = std::thread::scope(|scope| {
                        let waiter = scope.spawn(|| kind_of(work.wait(None)));
                        std::thread::sleep(Duration::from_millis(20));
                        comm.close(Duration::from_millis(100));
                        waiter.join().unwrap()
                    });
                }
                over.wait();
                kind
            },
        );
        assert_eq!(kinds[0], Some(ErrorKind::Aborted), "{shape:?}");
    }
}

#[test]
fn close_completes_operations_that_all_ranks_have_called() {
    let kinds = run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 100_000];
            if comm.rank() == 3 {
                std::thread::sleep(Duration::from_millis(50));
            }
            let work = allreduce(&comm, &mut data);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| kind_of(work.wait(None)));
                assert!(comm.close(TIMEOUT).is_none());
                waiter.join().unwrap()
            })
        },
    );
    assert_eq!(kinds, [None; 4]);
}

#[test]
fn a_closed_communicator_refuses_operations() {
    run(
        &placement(2, 1),
        |_| {},
        |comm| {
            comm.close(TIMEOUT);
            let mut data = vec![1.0; 8];
            let refused =
                comm.allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, DEADLINE, true);
            assert_eq!(refused.err().unwrap().cause.kind, ErrorKind::PeerLeft);
        },
    );
}

/// Pseudorandom numbers; each seed is a test case.
struct Choice(u64);

impl Choice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Several threads of a rank wait while another thread closes or aborts the group.
fn inject_fault(comm: &Communicator, seed: u64) {
    let mut choice = Choice(seed * 1000 + u64::from(comm.rank()));
    (0..4).for_each(|_| {
        choice.below(2);
    });
    let calls = choice.below(5) as usize;
    let mut data = vec![vec![1.0; 20_000]; calls];
    let timeout = Duration::from_millis(200 + choice.below(800));
    let works: Vec<Option<Work>> = data
        .iter_mut()
        .map(|data| {
            let work = comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, timeout, true);
            work.ok()
        })
        .collect();
    std::thread::scope(|scope| {
        for work in works.iter().flatten() {
            scope.spawn(|| kind_of(work.wait(None)));
        }
        std::thread::sleep(Duration::from_micros(choice.below(3000)));
        match choice.below(4) {
            0 => drop(comm.close(Duration::from_millis(choice.below(100)))),
            1 => comm.abort("injected fault"),
            2 => {
                scope.spawn(|| comm.close(Duration::from_millis(30)));
                comm.abort("while it closes");
            }
            _ => {}
        }
    });
    assert!(works.iter().flatten().all(Work::is_done));
}

#[test]
fn every_wait_ends_whether_threads_close_or_abort_the_group() {
    let shapes = [(1, 2), (2, 1), (2, 2), (3, 1)];
    for seed in 0..24 {
        let (nodes, locals) = shapes[seed as usize % shapes.len()];
        // A rank may receive the fault of another rank while it still connects.
        let rank = |connected: Result<Communicator, _>| {
            connected.iter().for_each(|comm| inject_fault(comm, seed));
        };
        try_run(&placement(nodes, locals), |_| {}, rank);
    }
}

/// Runs `body` in a forked child; true if it returned true there.
fn in_a_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `body` and exits without running other code of the parent.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends this process alone.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = 0;
    // SAFETY: a child of this process that no other thread waits for.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn a_forked_child_does_not_affect_the_group() {
    let ready = Barrier::new(2);
    let forked = Barrier::new(2);
    run(
        &placement(2, 1),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 1000];
            if comm.rank() == 0 {
                let work = call(&comm, &mut data, DEADLINE);
                ready.wait();
                let right = in_a_child(|| {
                    comm.abort("a failure of the child");
                    work.abort(ErrorKind::Aborted, "a failure of the child");
                    drop(comm.fail(ErrorKind::Io, "copying", "a failure of the child".into()));
                    let ended = work.wait(None);
                    comm.close(Duration::from_millis(10));
                    matches!(ended, Err(WaitError::Failed(error))
                        if error.cause.kind == ErrorKind::Invalid)
                });
                assert!(right, "the wait ends in the child at once, and names the fork");
                forked.wait();
                work.wait(None).unwrap();
            } else {
                ready.wait();
                forked.wait();
                call(&comm, &mut data, DEADLINE).wait(None).unwrap();
            }
            assert!(data.iter().all(|value| *value == 2.0));
            assert!(comm.error().is_none());
        },
    );
}
