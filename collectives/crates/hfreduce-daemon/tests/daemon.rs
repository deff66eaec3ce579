//! Ranks that a daemon serves: the same results as with in-process drivers, and isolation between groups and
//! users.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../hfreduce-engine/tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use hfreduce_daemon::AnyEndpoint;
use hfreduce_engine::{
    Buffer, Communicator, DType, ErrorKind, Options, ReduceOp, WaitError, Watermarks,
};
use support::{
    Calls, KEY, Served, TIMEOUT, allreduce, buffer, digest, numbers, placement, run_at, values,
};

const F32: DType = DType::F32;

/// Digests of this rank's result of every operation.
fn all_operations(comm: &Communicator) -> Vec<u64> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let last = world as u32 - 1;
    let mut results = Vec::new();
    for count in [1, 1000, 70_000, 400_001] {
        let mut data = values(rank, 1, count);
        allreduce(comm, &mut data).wait(None).unwrap();
        results.push(digest(&data));
        let mut block = comm.allocate(count * 4).unwrap();
        // SAFETY: no other reference to the block exists until the next call and after its end.
        let outgoing = unsafe { std::slice::from_raw_parts_mut(block.base().cast::<f32>(), count) };
        outgoing.copy_from_slice(&values(rank, 1, count));
        allreduce(comm, outgoing).wait(None).unwrap();
        results.push(digest(outgoing));
        let _ = &mut block;
    }
    let own = values(rank, 2, 5000);
    let mut whole = values(rank, 3, 5000 * world);
    let complete = |work: Result<hfreduce_engine::Work, _>| work.unwrap().wait(None).unwrap();
    let mut input = own.clone();
    complete(comm.broadcast(buffer(&mut input), F32, last, TIMEOUT, true));
    results.push(digest(&input));
    let mut input = own.clone();
    complete(comm.reduce(buffer(&mut input), F32, ReduceOp::Sum, last, TIMEOUT, true));
    results.push(if rank == last { digest(&input) } else { 0 });
    let (mut input, mut output) = (own.clone(), vec![0.0; whole.len()]);
    complete(comm.allgather(buffer(&mut input), buffer(&mut output), F32, TIMEOUT, true));
    results.push(digest(&output));
    let mut output = vec![0.0; 5000];
    let (from, to) = (buffer(&mut whole), buffer(&mut output));
    complete(comm.reduce_scatter(from, to, F32, ReduceOp::Average, TIMEOUT, true));
    results.push(digest(&output));
    let mut output = vec![0.0; if rank == last { whole.len() } else { 0 }];
    complete(comm.gather(buffer(&mut input), buffer(&mut output), F32, last, TIMEOUT, true));
    results.push(digest(&output));
    let mut output = vec![0.0; 5000];
    let from = if rank == last { buffer(&mut whole) } else { Buffer::default() };
    complete(comm.scatter(from, buffer(&mut output), F32, last, TIMEOUT, true));
    results.push(digest(&output));
    let (counts, mut output) = (vec![5000; world], vec![0.0; whole.len()]);
    let (from, to) = (buffer(&mut whole), buffer(&mut output));
    complete(comm.alltoall(from, to, &counts, &counts, F32, TIMEOUT, true));
    results.push(digest(&output));
    if world > 1 {
        // Received late: an operation called after the receive ends before it.
        let (next, before) = ((rank + 1) % world as u32, (rank + last) % world as u32);
        let (mut outgoing, mut incoming) = (own.clone(), vec![0.0; 5000]);
        let receive = comm.recv(buffer(&mut incoming), F32, before, 7, TIMEOUT).unwrap();
        complete(comm.barrier(TIMEOUT, true));
        complete(comm.send(buffer(&mut outgoing), F32, next, 7, TIMEOUT));
        receive.wait(None).unwrap();
        results.push(digest(&incoming));
        let receive = comm.recv_any(buffer(&mut incoming), F32, 8, TIMEOUT).unwrap();
        complete(comm.send(buffer(&mut outgoing), F32, next, 8, TIMEOUT));
        receive.wait(None).unwrap();
        assert_eq!(receive.source(), Some(before));
        results.push(digest(&incoming));
    }
    let (mut first, mut second) = (values(rank, 5, 10), values(rank, 6, 999));
    // SAFETY: both outlive the operation, which is waited for.
    let pieces = unsafe {
        Buffer::new([(first.as_mut_ptr().cast(), 40), (second.as_mut_ptr().cast(), 999 * 4)])
    };
    complete(comm.allreduce(pieces, F32, ReduceOp::Sum, 3, TIMEOUT, true));
    results.extend([digest(&first), digest(&second)]);
    results
}

#[test]
fn bits_are_equal_with_without_and_with_some_daemons() {
    let daemons: Vec<Served> = (0..3).map(|_| Served::new(16)).collect();
    for (nodes, locals) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
        let through = |is_served: fn(u32) -> bool| {
            let daemon =
                |rank: u32| is_served(rank).then(|| daemons[rank as usize / locals].path.clone());
            run_at(&placement(nodes, locals), daemon, |_| {}, |comm| all_operations(&comm.unwrap()))
        };
        let own = through(|_| false);
        assert!(through(|_| true) == own, "{nodes} × {locals}, all served");
        assert!(through(|rank| rank % 2 == 1) == own, "{nodes} × {locals}, some served");
    }
}

#[test]
fn registered_memory_is_used_in_place() {
    let daemon = Served::new(2);
    let at = |_| Some(daemon.path.clone());
    run_at(
        &placement(1, 2),
        at,
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let block = comm.allocate(1 << 20).unwrap();
            // SAFETY: no other reference to it exists until the call and after its end.
            let data =
                unsafe { std::slice::from_raw_parts_mut(block.base().cast::<f32>(), 1 << 18) };
            data.copy_from_slice(&numbers(comm.rank(), 1, 1 << 18));
            allreduce(&comm, data).wait(None).unwrap();
            let sum = |at: usize| numbers(0, 1, at + 1)[at] + numbers(1, 1, at + 1)[at];
            assert_eq!((data[0], data[777]), (sum(0), sum(777)));
            let in_place_bytes = &comm.counters().in_place_bytes;
            assert_eq!(in_place_bytes.load(std::sync::atomic::Ordering::Relaxed), 1 << 20);
            assert_eq!(comm.registered_bytes(), 1 << 20, "no block was staged for it");
        },
    );
}

#[test]
fn pipelined_memory_is_reduced_while_it_arrives() {
    let daemon = Served::new(2);
    const HALF: usize = 1 << 20;
    run_at(
        &placement(1, 2),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let (rank, count) = (comm.rank(), 2 * HALF / 4);
            let mut data = numbers(rank, 1, count);
            let watermarks = Arc::new(Watermarks::default());
            let pipelined = buffer(&mut data).pipelined(watermarks.clone());
            let peer = 1 - rank;
            let refused =
                comm.send(pipelined.clone(), F32, peer, 0, TIMEOUT).map(drop).unwrap_err();
            assert_eq!(refused.cause.kind, ErrorKind::Invalid);
            let work = comm.allreduce(pipelined, F32, ReduceOp::Sum, 0, TIMEOUT, false).unwrap();
            // A later call does not wait for it.
            let mut message = [rank as f32];
            let send = comm.send(buffer(&mut message), F32, peer, 1, TIMEOUT).unwrap();
            let mut other = [9.0];
            let receive = comm.recv(buffer(&mut other), F32, peer, 1, TIMEOUT).unwrap();
            send.wait(None).unwrap();
            receive.wait(None).unwrap();
            assert_eq!((other[0], watermarks.delivered()), (peer as f32, 0));
            work.arrived(&watermarks, HALF);
            let until = Instant::now() + TIMEOUT;
            while watermarks.delivered() == 0 {
                assert!(Instant::now() < until, "no output of the first half");
                std::thread::yield_now();
            }
            assert!(watermarks.delivered() <= HALF && !work.is_done());
            work.arrived(&watermarks, 2 * HALF);
            work.wait(None).unwrap();
            let sums =
                numbers(0, 1, count).into_iter().zip(numbers(1, 1, count)).map(|(a, b)| a + b);
            assert!(sums.eq(data.iter().copied()));
        },
    );
}

#[test]
fn the_end_of_a_group_does_not_affect_others() {
    let daemon = Served::new(16);
    let both = Barrier::new(4);
    let group = |breaks: bool| {
        let (both, path) = (&both, &daemon.path);
        let body = move |comm: Result<Communicator, _>| {
            let comm = comm.unwrap();
            let mut data = numbers(comm.rank(), 1, 70_000);
            allreduce(&comm, &mut data).wait(None).unwrap();
            both.wait();
            if breaks && comm.rank() == 1 {
                comm.abort("a test");
            }
            let mut data = numbers(comm.rank(), 1, 70_000);
            let work = comm.allreduce(buffer(&mut data), F32, ReduceOp::Sum, 0, TIMEOUT, true);
            work.map_err(WaitError::Failed).and_then(|work| work.wait(None)).err()
        };
        run_at(&placement(1, 2), |_| Some(path.clone()), |_| {}, body)
    };
    std::thread::scope(|scope| {
        let broken = scope.spawn(|| group(true));
        assert!(group(false).iter().all(Option::is_none));
        for error in broken.join().unwrap() {
            let Some(WaitError::Failed(error)) = error else { panic!("{error:?}") };
            assert_eq!((error.cause.kind, error.cause.peer), (ErrorKind::Aborted, Some(1)));
            assert!(error.to_string().contains("a test"), "{error}");
        }
    });
    // The next group at the same socket.
    assert!(group_of_two(&daemon).iter().all(|sum| *sum == 3.0));
}

fn group_of_two(daemon: &Served) -> Vec<f32> {
    run_at(
        &placement(1, 2),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let mut data = [1.0 + comm.rank() as f32];
            allreduce(&comm, &mut data).wait(None).unwrap();
            data[0]
        },
    )
}

#[test]
fn invalid_messages_at_the_socket_do_not_disturb_a_group() {
    let daemon = Served::new(8);
    let frame = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let inputs = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 64],
        frame("{}"),
        frame("\"Beat\""),
        frame(r#"{"Leave":{"timeout_ms":1}}"#),
        frame(r#"{"Open":{"version":1,"process":1,"options":{},"key":[]}}"#),
        frame("{\"Open\":")[..6].to_vec(),
    ];
    run_at(
        &placement(1, 2),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            for input in &inputs {
                let mut stream = UnixStream::connect(&daemon.path).unwrap();
                stream.write_all(input).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
                // The connection ends, with or without a refusal.
                let _ = stream.read_to_end(&mut Vec::new());
                let mut data = numbers(comm.rank(), 1, 1000);
                allreduce(&comm, &mut data).wait(None).unwrap();
            }
        },
    );
}

#[test]
fn requests_over_a_limit_are_refused_with_the_remedy() {
    let daemon = Served::new(1);
    let place = placement(1, 1);
    run_at(
        &place,
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let mut data = [1.0];
            // Its only slot is in use, and the group continues.
            let full = AnyEndpoint::open(Options::new(0, place.clone()), &KEY, Some(&daemon.path));
            let full = full.map(drop).unwrap_err().to_string();
            assert!(full.contains("has 1 ranks") && full.contains("--ranks-max"), "{full}");
            allreduce(&comm, &mut data).wait(None).unwrap();
        },
    );
    let nowhere = daemon.path.with_extension("not");
    let absent = AnyEndpoint::open(Options::new(0, place.clone()), &KEY, Some(&nowhere));
    let absent = absent.map(drop).unwrap_err().to_string();
    assert!(
        absent.contains("hfreduced.not") && absent.contains("unset HFREDUCE_DAEMON"),
        "{absent}"
    );
    let mut little = Options::new(0, place);
    little.registered_bytes = 4096;
    let little = AnyEndpoint::open(little, &KEY, Some(&daemon.path)).map(drop).unwrap_err();
    assert!(little.to_string().contains("HFREDUCE_REGISTERED_BYTES"), "{little}");
}

/// A rank of a group of two on one node needs at most 10 MiB besides registered memory.
const TWO_RANKS: usize = 20 << 20;

#[test]
fn a_group_over_its_users_memory_limit_ends_alone() {
    let daemon = Served::with_memory(8, 2 * (2 * TWO_RANKS + (24 << 20)));
    let at = |_| Some(daemon.path.clone());
    let sums = |bytes: usize| {
        run_at(
            &placement(1, 2),
            at,
            |_| {},
            |comm| {
                let comm = comm.unwrap();
                let mut data = vec![1.0; bytes / 4];
                let work = comm.allreduce(buffer(&mut data), F32, ReduceOp::Sum, 0, TIMEOUT, true);
                let result = work.map_err(WaitError::Failed).and_then(|work| work.wait(None));
                result.map(|()| data[0]).map_err(|error| error.to_string())
            },
        )
    };
    run_at(
        &placement(1, 2),
        at,
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let mut data = [1.0];
            allreduce(&comm, &mut data).wait(None).unwrap();
            if comm.rank() == 0 {
                // 8 MiB for each of its ranks are available to the other group, and 32 MiB are not.
                assert_eq!(sums(8 << 20), [Ok(2.0), Ok(2.0)]);
                for error in sums(32 << 20).into_iter().map(Result::unwrap_err) {
                    let remedy = "HFREDUCE_REGISTERED_BYTES";
                    assert!(error.contains("(io)") && error.contains(remedy), "{error}");
                    assert!(error.contains("--memory-max"), "{error}");
                }
            }
            allreduce(&comm, &mut data).wait(None).unwrap();
            assert_eq!(data[0], 4.0);
        },
    );
    daemon.eventually_empty();
    assert_eq!(sums(8 << 20), [Ok(2.0), Ok(2.0)], "a group that ended has released its memory");
}

#[test]
fn a_segment_over_its_users_memory_limit_is_not_created() {
    let daemon = Served::with_memory(8, 1 << 30);
    let mut options = Options::new(0, placement(1, 2));
    (options.slots, options.slot_bytes) = (Some(64), 64 << 20);
    let refused = AnyEndpoint::open(options, &KEY, Some(&daemon.path)).map(drop).unwrap_err();
    assert_eq!(refused.cause.kind, ErrorKind::Io);
    let text = refused.to_string();
    assert!(text.contains("0 of 536870912 in use") && text.contains("--memory-max"), "{text}");
    // 64 slots of 64 MiB on both links of four neighbors in a large group.
    let mut options = Options::new(1, placement(8, 1));
    (options.slots, options.window, options.slot_bytes) = (Some(2), 64, 8 << 20);
    let refused = AnyEndpoint::open(options, &KEY, Some(&daemon.path)).map(drop).unwrap_err();
    assert!(refused.to_string().contains("--memory-max"), "{refused}");
}

#[test]
fn calls_in_progress_count_as_memory_of_their_user() {
    let daemon = Served::with_memory(2, 2 * (TWO_RANKS + (20 << 20)));
    let at = |_| Some(daemon.path.clone());
    run_at(
        &placement(1, 2),
        at,
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let block = comm.allocate(4096).unwrap();
            let receive = || {
                // SAFETY: the block outlives the works, which have ended when the group is broken.
                let outgoing = unsafe { Buffer::new([(block.base(), 4)]) };
                comm.recv(outgoing, F32, 1 - comm.rank(), 0, TIMEOUT)
            };
            let works: Vec<_> = (0..30_000).map_while(|_| receive().ok()).collect();
            let error = works[0].wait(None).unwrap_err().to_string();
            assert!(error.contains("--memory-max"), "{error}");
        },
    );
}

#[test]
fn registered_memory_does_not_take_the_addresses_of_other_users() {
    let daemon = Served::with_memory(3, 1 << 50);
    let tune = |options: &mut Options| {
        (options.registered_bytes, options.channels) = (10 << 40, Some(3));
    };
    let results = run_at(
        &placement(1, 3),
        |_| Some(daemon.path.clone()),
        tune,
        |comm| {
            let comm = comm?;
            let block = comm.allocate(4 << 20).unwrap();
            // SAFETY: the block outlives the operation, which is waited for.
            let memory = unsafe { Buffer::new([(block.base(), 4 << 20)]) };
            let work = comm.allreduce(memory, F32, ReduceOp::Sum, 0, TIMEOUT, true)?;
            work.wait(None).map_err(|error| match error {
                WaitError::Failed(error) => error,
                other => panic!("{other}"),
            })
        },
    );
    // Each rank maps its 10 TiB, but not all of them also those of both others.
    let errors: Vec<String> = results
        .into_iter()
        .filter_map(|result| result.err())
        .map(|error| error.to_string())
        .collect();
    let names_limit = |error: &String| error.contains("of 61572651155456 in use");
    assert!(errors.iter().any(names_limit), "{errors:?}");
}

#[test]
fn a_group_over_its_users_descriptor_limit_ends_alone() {
    // Without messages two ranks of a node need at most 48 descriptors each.
    let daemon = Served::with_descriptors(8, 2 * (2 * 48 + 3));
    let at = |_| Some(daemon.path.clone());
    let exchange = |messages: bool| {
        run_at(
            &placement(1, 2),
            at,
            |_| {},
            |comm| {
                let comm = comm.unwrap();
                let mut data = [1.0];
                allreduce(&comm, &mut data).wait(None).unwrap();
                let (mut outgoing, mut incoming) = ([1.0], [0.0]);
                let mut swap = || {
                    let peer = 1 - comm.rank();
                    let send = comm.send(buffer(&mut outgoing), F32, peer, 1, TIMEOUT)?;
                    let receive = comm.recv(buffer(&mut incoming), F32, peer, 1, TIMEOUT)?;
                    let failed = |error| match error {
                        WaitError::Failed(error) => error,
                        other => panic!("{other}"),
                    };
                    send.wait(None).and_then(|()| receive.wait(None)).map_err(failed)
                };
                messages.then(|| swap().map_err(|error| error.to_string()))
            },
        )
    };
    // One connection from and one to each other rank.
    for error in exchange(true).into_iter().map(|result| result.unwrap().unwrap_err()) {
        assert!(error.contains("99 of 99 in use") && error.contains("LimitNOFILE"), "{error}");
    }
    daemon.eventually_empty();
    assert_eq!(exchange(false), [None, None]);
}

#[test]
fn a_stopping_daemon_reports_that_it_was_stopped() {
    let daemon = std::sync::Mutex::new(Some(Served::new(4)));
    let path = daemon.lock().unwrap().as_ref().unwrap().path.clone();
    run_at(
        &placement(1, 2),
        |_| Some(path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let mut data = numbers(comm.rank(), 1, 1000);
            if comm.rank() == 0 {
                drop(daemon.lock().unwrap().take());
            }
            let work = comm.allreduce(buffer(&mut data), F32, ReduceOp::Sum, 0, TIMEOUT, true);
            let error =
                work.map_err(WaitError::Failed).and_then(|work| work.wait(None)).unwrap_err();
            assert!(error.to_string().contains("hfreduced on this node was stopped"), "{error}");
        },
    );
}

#[test]
fn progress_of_inputs_is_read_although_more_calls_wait_than_a_daemon_accepts() {
    const BYTES: usize = 4096;
    let daemon = Served::new(1);
    let at = |_| Some(daemon.path.clone());
    run_at(
        &placement(1, 1),
        at,
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            let block = comm.allocate(5000 * BYTES).unwrap();
            let start = |at: usize| {
                let watermarks = Arc::new(Watermarks::default());
                // SAFETY: a separate part of the block, which outlives the works.
                let buffer = unsafe { Buffer::new([(block.base().add(at * BYTES), BYTES)]) };
                let buffer = buffer.pipelined(watermarks.clone());
                let soon = Duration::from_secs(60);
                (comm.allreduce(buffer, F32, ReduceOp::Sum, 0, soon, false).unwrap(), watermarks)
            };
            let works: Vec<_> = (0..5000).map(start).collect();
            works.iter().for_each(|(work, watermarks)| work.arrived(watermarks, BYTES));
            for (work, watermarks) in &works {
                work.wait(None).unwrap();
                assert_eq!(watermarks.delivered(), BYTES);
            }
        },
    );
}
