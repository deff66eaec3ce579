//! Failures without a dead process: mismatch, absence, abort, close, unauthenticated connections.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use hfreduce_engine::{
    CollectiveError, Communicator, DType, Endpoint, ErrorKind, Options, ReduceOp, WaitError, Work,
};
use support::{Calls, KEY, TIMEOUT, allreduce, buffer, placement, run, try_run};

fn failed(work: Result<Work, CollectiveError>) -> CollectiveError {
    match work.and_then(|work| match work.wait(None) {
        Err(WaitError::Failed(error)) => Err(error),
        other => panic!("it must fail: {other:?}"),
    }) {
        Err(error) => error,
        Ok(()) => panic!("it must fail"),
    }
}

/// Runs `body` as every rank; all must report this kind and one of these ranks, before the timeout.
fn all_report(
    nodes: usize,
    locals: usize,
    kind: ErrorKind,
    culprits: &[u32],
    body: impl Fn(&Communicator) -> CollectiveError + Sync,
) -> Vec<CollectiveError> {
    let started = Instant::now();
    let errors = try_run(
        &placement(nodes, locals),
        |_| {},
        |connected| {
            let comm = match connected {
                Ok(comm) => comm,
                Err(error) => return error,
            };
            let error = body(&comm);
            // A broken communicator reports the first cause again.
            let repeated = comm.barrier(TIMEOUT, true).err().or_else(|| comm.error()).unwrap();
            assert_eq!(repeated.cause, error.cause);
            error
        },
    );
    for error in &errors {
        assert_eq!(error.cause.kind, kind, "{error}");
        assert!(error.cause.peer.is_some_and(|peer| culprits.contains(&peer)), "{error}");
        assert!(&*error.job == "test/job" && !error.node.is_empty() && !error.operation.is_empty());
    }
    assert!(started.elapsed() < TIMEOUT * 3 / 4, "no rank waits until the timeout of {TIMEOUT:?}");
    errors
}

#[test]
fn every_rank_reports_mismatching_operations() {
    for (nodes, locals) in [(1, 2), (3, 1), (2, 2)] {
        let odd = (nodes * locals - 1) as u32;
        let expected_ranks: Vec<u32> = (0..=odd).collect();
        let sum = |comm: &Communicator, data: &mut [f32], op| {
            failed(comm.allreduce(buffer(data), DType::F32, op, 0, TIMEOUT, true))
        };
        // Another reduction, with every byte count equal.
        let errors = all_report(nodes, locals, ErrorKind::Mismatch, &expected_ranks, |comm| {
            let op = if comm.rank() == odd { ReduceOp::Max } else { ReduceOp::Sum };
            sum(comm, &mut vec![1.0; 10_000], op)
        });
        let detail = &errors[0].cause.detail;
        assert!(
            detail.contains("max")
                && detail.contains("sum")
                && detail.contains(&format!("rank {odd}")),
            "{detail}"
        );
        // Another size.
        all_report(nodes, locals, ErrorKind::Mismatch, &expected_ranks, |comm| {
            sum(comm, &mut vec![1.0; 10_000 + usize::from(comm.rank() == odd)], ReduceOp::Sum)
        });
        // Another type of equal width.
        all_report(nodes, locals, ErrorKind::Mismatch, &expected_ranks, |comm| {
            let dtype = if comm.rank() == odd { DType::I32 } else { DType::F32 };
            let mut data = vec![1.0; 10_000];
            failed(comm.allreduce(buffer(&mut data), dtype, ReduceOp::Sum, 0, TIMEOUT, true))
        });
    }
}

#[test]
fn mismatching_operations_that_would_deadlock_are_detected() {
    for (nodes, locals) in [(1, 2), (3, 1), (2, 2)] {
        let odd = (nodes * locals - 1) as u32;
        let expected_ranks: Vec<u32> = (0..=odd).collect();
        // The odd rank waits for a broadcast that is never sent, the others for its contribution.
        all_report(nodes, locals, ErrorKind::Mismatch, &expected_ranks, |comm| {
            let mut data = vec![1.0; 10_000];
            let data = buffer(&mut data);
            failed(match comm.rank() == odd {
                true => comm.broadcast(data, DType::F32, 0, TIMEOUT, true),
                false => comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true),
            })
        });
        // One rank uses point-to-point connections, the others the trees.
        all_report(nodes, locals, ErrorKind::Mismatch, &expected_ranks, |comm| {
            let (mut data, mut other) = (vec![1.0; 100], vec![1.0; 100]);
            let (data, other) = (buffer(&mut data), buffer(&mut other));
            failed(match comm.rank() == odd {
                true => comm.scatter(data, other, DType::F32, 0, TIMEOUT, true),
                false => comm.allreduce(data, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true),
            })
        });
    }
}

/// A call of an operation that has a root.
type Rooted = fn(&Communicator, &mut [f32], &mut [f32], u32) -> Result<Work, CollectiveError>;

#[test]
fn different_roots_are_reported_for_every_operation() {
    // Blocks that use slots, blocks of one message, and empty blocks.
    for count in [0, 100, 300_000] {
        for (nodes, locals) in [(1, 3), (3, 1), (2, 2), (4, 1)] {
            roots_differ(nodes, locals, count);
        }
    }
}

fn roots_differ(nodes: usize, locals: usize, count: usize) {
    const OPERATIONS: [(&str, Rooted); 4] = [
        ("broadcast", |comm, block, _, root| {
            comm.broadcast(buffer(block), DType::F32, root, TIMEOUT, true)
        }),
        ("reduce", |comm, block, _, root| {
            comm.reduce(buffer(block), DType::F32, ReduceOp::Sum, root, TIMEOUT, true)
        }),
        ("gather", |comm, block, all, root| {
            comm.gather(buffer(block), buffer(all), DType::F32, root, TIMEOUT, true)
        }),
        ("scatter", |comm, block, all, root| {
            comm.scatter(buffer(all), buffer(block), DType::F32, root, TIMEOUT, true)
        }),
    ];
    let world = (nodes * locals) as u32;
    let all: Vec<u32> = (0..world).collect();
    for (name, operation) in OPERATIONS {
        // Every rank passes itself, or the next rank, or one rank passes itself and the others rank 0.
        let roots: [fn(u32, u32) -> u32; 3] = [
            |own, _| own,
            |own, world| (own + 1) % world,
            |own, world| if own + 1 == world { own } else { 0 },
        ];
        for root_of in roots {
            let errors = all_report(nodes, locals, ErrorKind::Mismatch, &all, |comm| {
                let (mut block, mut blocks) = (vec![1.0; count], vec![1.0; count * world as usize]);
                let work = operation(comm, &mut block, &mut blocks, root_of(comm.rank(), world));
                match work.map(|work| work.wait(None)) {
                    Err(error) | Ok(Err(WaitError::Failed(error))) => error,
                    // A root that has sent its part gets the mismatch from the next operation.
                    Ok(Ok(())) => failed(comm.barrier(TIMEOUT, true)),
                    other => panic!("{other:?}"),
                }
            });
            let detail = &errors[0].cause.detail;
            assert_eq!(detail.matches(name).count(), 2, "{detail}");
            assert_eq!(detail.matches(", root ").count(), 2, "{detail}");
        }
    }
}

#[test]
fn a_rank_that_never_calls_is_reported_at_the_deadline() {
    for (nodes, locals, absent) in [(1, 3, 1), (3, 1, 2), (2, 2, 3), (2, 2, 0)] {
        let timeout = Duration::from_millis(3000);
        let together = Barrier::new(nodes * locals - 1);
        let errors = all_report(nodes, locals, ErrorKind::TimedOut, &[absent], |comm| {
            if comm.rank() == absent {
                while comm.error().is_none() {
                    std::thread::yield_now();
                }
                let mut error = comm.error().unwrap();
                error.operation = "nothing".into();
                return error;
            }
            let mut data = vec![1.0; 10_000];
            together.wait();
            failed(comm.allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, timeout, true))
        });
        assert!(errors.iter().any(|error| error.phase.contains("waiting")), "{}", errors[0]);
    }
}

#[test]
fn an_abort_reaches_all_ranks() {
    all_report(2, 2, ErrorKind::Aborted, &[2], |comm| {
        if comm.rank() == 2 {
            comm.abort("loss is NaN");
        }
        let mut data = vec![1.0; 10_000];
        let error =
            failed(comm.allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, true));
        assert!(error.to_string().contains("loss is NaN"), "{error}");
        error
    });
}

#[test]
fn a_rank_that_closes_early_is_reported_by_the_others() {
    let completed = Barrier::new(3);
    let errors = run(
        &placement(3, 1),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 10_000];
            allreduce(&comm, &mut data).wait(None).unwrap();
            // The others may not have its result yet.
            completed.wait();
            (comm.rank() != 1).then(|| {
                failed(comm.allreduce(
                    buffer(&mut data),
                    DType::F32,
                    ReduceOp::Sum,
                    0,
                    TIMEOUT,
                    true,
                ))
            })
        },
    );
    for error in errors.into_iter().flatten() {
        assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::PeerLeft, Some(1)), "{error}");
    }
}

#[test]
fn close_reports_operations_that_it_aborted() {
    let started = Barrier::new(2);
    let closed = run(
        &placement(2, 1),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 10_000];
            allreduce(&comm, &mut data).wait(None).unwrap();
            // Rank 1 never calls.
            let work = (comm.rank() == 0).then(|| allreduce(&comm, &mut data));
            started.wait();
            let error = comm.close(Duration::from_millis(100));
            assert!(comm.close(TIMEOUT).is_none(), "reported once");
            (work.is_some(), error)
        },
    );
    for (had_work, error) in closed {
        let kinds = error.as_ref().map(|error| error.cause.kind);
        match had_work {
            // Whichever is first: its close timeout or the other rank's close.
            true => {
                assert!(
                    matches!(kinds, Some(ErrorKind::Aborted | ErrorKind::PeerLeft)),
                    "{error:?}"
                )
            }
            false => assert!(!matches!(kinds, Some(ErrorKind::PeerLeft)), "{error:?}"),
        }
    }
    let quiet = run(
        &placement(2, 1),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 10_000];
            allreduce(&comm, &mut data).wait(None).unwrap();
            comm.close(TIMEOUT).is_none()
        },
    );
    assert!(quiet.into_iter().all(|clean| clean), "a clean close returns no error");
}

#[test]
fn invalid_arguments_are_refused_without_side_effects() {
    run(
        &placement(1, 2),
        |_| {},
        |comm| {
            let mut data = vec![1.0; 10];
            let bad_op =
                comm.allreduce(buffer(&mut data), DType::F32, ReduceOp::BitAnd, 0, TIMEOUT, true);
            assert!(bad_op.err().unwrap().to_string().contains("band is not defined for float32"));
            let bad_root = comm.broadcast(buffer(&mut data), DType::F32, 2, TIMEOUT, true);
            assert!(bad_root.err().unwrap().to_string().contains("root 2 is not in a group of"));
            let to_self = comm.send(buffer(&mut data), DType::F32, comm.rank(), 0, TIMEOUT);
            assert_eq!(to_self.err().unwrap().cause.kind, ErrorKind::Invalid);
            allreduce(&comm, &mut data).wait(None).unwrap();
            assert!(
                data.iter().all(|value| *value == 2.0),
                "a refused call does not break the communicator"
            );
        },
    );
}

fn port_of(endpoint: &Endpoint) -> u16 {
    let info: serde_json::Value = serde_json::from_slice(&endpoint.info()).unwrap();
    info["port"].as_u64().unwrap() as u16
}

#[test]
fn unauthenticated_connections_are_counted_and_do_not_disturb_the_group() {
    let endpoints: Vec<Endpoint> = (0..2)
        .map(|rank| Endpoint::new(Options::new(rank, placement(2, 1)), &KEY).unwrap())
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
    let ports: Vec<u16> = endpoints.iter().map(port_of).collect();
    let connect_unauthenticated = |port: u16| {
        let mut garbage = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = garbage.write_all(&[0xa5; 100_000]);
        let mut silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        silent.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let _ = silent.read(&mut [0; 8]);
        let mut rest = Vec::new();
        garbage.set_read_timeout(Some(TIMEOUT)).unwrap();
        let _ = garbage.read_to_end(&mut rest);
        assert!(rest.is_empty(), "no reply before authentication");
        silent
    };
    let _before: Vec<TcpStream> = ports.iter().map(|port| connect_unauthenticated(*port)).collect();
    std::thread::scope(|scope| {
        for endpoint in endpoints {
            scope.spawn(|| {
                let comm = endpoint.connect(&infos, TIMEOUT).unwrap();
                let mut data = vec![1.0; 500_000];
                let work = comm
                    .allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, false)
                    .unwrap();
                let _during = connect_unauthenticated(ports[comm.rank() as usize]);
                work.wait(None).unwrap();
                comm.barrier(TIMEOUT, true).unwrap().wait(None).unwrap();
                let refused = &comm.counters().refused;
                assert!(refused.load(std::sync::atomic::Ordering::Relaxed) >= 2);
            });
        }
    });
}

#[test]
fn a_rank_with_another_key_or_that_never_connects_is_reported() {
    let make =
        |rank: u32, key: &[u8]| Endpoint::new(Options::new(rank, placement(2, 1)), key).unwrap();
    let (first, second) = (make(0, &KEY), make(1, &[9; 32]));
    let infos = vec![first.info(), second.info()];
    let error = first.connect(&infos, TIMEOUT).err().unwrap();
    assert!(error.cause.peer == Some(1) && error.to_string().contains("key"), "{error}");

    let (first, second) = (make(0, &KEY), make(1, &KEY));
    let infos = vec![first.info(), second.info()];
    let error = second.connect(&infos, Duration::from_millis(200)).err().unwrap();
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::TimedOut, Some(0)), "{error}");

    let lonely = Endpoint::new(Options::new(0, placement(1, 2)), &KEY).unwrap();
    let absent = Endpoint::new(Options::new(1, placement(1, 2)), &KEY).unwrap();
    let infos = vec![lonely.info(), absent.info()];
    let error = lonely.connect(&infos, Duration::from_millis(200)).err().unwrap();
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::TimedOut, Some(1)), "{error}");
}

#[test]
fn ranks_with_different_slot_sizes_are_reported_before_they_connect() {
    let first = Endpoint::new(Options::new(0, placement(2, 1)), &KEY).unwrap();
    let mut options = Options::new(1, placement(2, 1));
    options.slot_bytes = 8192;
    let second = Endpoint::new(options, &KEY).unwrap();
    let infos = vec![first.info(), second.info()];
    let error = first.connect(&infos, Duration::from_secs(1)).err().unwrap();
    assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::Mismatch, Some(1)));
    assert!(error.to_string().contains("8192"), "{error}");
}
