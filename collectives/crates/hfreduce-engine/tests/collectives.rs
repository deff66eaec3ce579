//! Results of the operations, with ranks as threads over real shared memory and TCP.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::Ordering;

use hfreduce_engine::{DType, ReduceOp};
use support::{Calls, TIMEOUT, allreduce, buffer, digest, numbers, placement, run, values};

const GROUPS: [(usize, usize); 6] = [(1, 1), (1, 3), (2, 1), (3, 1), (4, 2), (5, 1)];

fn sum(world: usize, salt: u64, count: usize) -> Vec<f32> {
    let mut sum = vec![0.0; count];
    for rank in 0..world {
        let numbers = numbers(rank as u32, salt, count);
        sum.iter_mut().zip(numbers).for_each(|(sum, value)| *sum += value);
    }
    sum
}

#[test]
fn allreduce_sums_every_size() {
    for (nodes, locals) in GROUPS {
        let world = nodes * locals;
        let digests = run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                [1, 5, 1000, 5000, 70_000, 1_000_003].map(|count| {
                    let mut data = numbers(comm.rank(), 1, count);
                    allreduce(&comm, &mut data).wait(None).unwrap();
                    assert!(data == sum(world, 1, count));
                    digest(&data)
                })
            },
        );
        assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "the same bits on every rank");
    }
}

#[test]
fn bits_do_not_differ_between_runs() {
    let once = || {
        run(
            &placement(3, 2),
            |_| {},
            |comm| {
                let mut data = values(comm.rank(), 2, 300_000);
                allreduce(&comm, &mut data).wait(None).unwrap();
                digest(&data)
            },
        )[0]
    };
    let first = once();
    assert!((0..5).all(|_| once() == first));
}

#[test]
fn bits_do_not_depend_on_the_distribution_of_the_work() {
    let with = |channels| {
        run(
            &placement(2, 4),
            |options| options.channels = Some(channels),
            |comm| {
                assert_eq!(comm.channels(), channels);
                let mut data = values(comm.rank(), 2, 900_000);
                allreduce(&comm, &mut data).wait(None).unwrap();
                digest(&data)
            },
        )[0]
    };
    assert_eq!(with(1), with(3));
}

#[test]
fn bits_do_not_depend_on_peer_memory() {
    let with = |supports_peer_memory: fn(u32) -> bool| {
        let results = run(
            &placement(4, 2),
            |options| options.peer_memory = supports_peer_memory(options.rank),
            |comm| {
                let mut data = Vec::new();
                // The first operation may end before the segments are mapped.
                for _ in 0..3 {
                    data = values(comm.rank(), 2, 300_000);
                    allreduce(&comm, &mut data).wait(None).unwrap();
                }
                let counters = comm.counters();
                let mapped = counters.mapped_bytes.load(Ordering::Relaxed);
                let sent_bytes = counters.sent_bytes.load(Ordering::Relaxed);
                (digest(&data), mapped, sent_bytes)
            },
        );
        let sums = results
            .iter()
            .fold((0, 0), |(a, b), (_, mapped, sent_bytes)| (a + mapped, b + sent_bytes));
        assert!(sums.0 <= sums.1);
        (results[0].0, sums.0 > 0)
    };
    let (bits, mapped) = with(|_| true);
    assert!(mapped);
    assert_eq!(with(|_| false), (bits, false));
    // A rank that offers no segment maps none either: half of the links use their sockets.
    assert_eq!(with(|rank| rank < 4).0, bits);
}

#[test]
fn many_concurrent_operations_end_in_order() {
    run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let mut data: Vec<Vec<f32>> =
                (0..40).map(|salt| numbers(comm.rank(), salt, 1 + 3000 * salt as usize)).collect();
            let works: Vec<_> = data.iter_mut().map(|data| allreduce(&comm, data)).collect();
            works.iter().rev().for_each(|work| work.wait(None).unwrap());
            for (salt, data) in data.iter().enumerate() {
                assert!(*data == sum(4, salt as u64, data.len()));
            }
        },
    );
}

#[test]
fn a_fused_call_is_one_operation_over_several_ranges() {
    run(
        &placement(3, 1),
        |_| {},
        |comm| {
            let sizes = [3, 100_000, 1, 0, 77_777];
            let mut data: Vec<Vec<f32>> =
                sizes.iter().enumerate().map(|(s, n)| numbers(comm.rank(), s as u64, *n)).collect();
            // SAFETY: the vectors stay until the work has ended.
            let all = unsafe {
                hfreduce_engine::Buffer::new(
                    data.iter_mut().map(|d| (d.as_mut_ptr().cast(), d.len() * 4)),
                )
            };
            comm.allreduce(all, DType::F32, ReduceOp::Sum, 9, TIMEOUT, true)
                .unwrap()
                .wait(None)
                .unwrap();
            for (salt, data) in data.iter().enumerate() {
                assert!(*data == sum(3, salt as u64, data.len()));
            }
        },
    );
}

#[test]
fn min_max_and_product_are_correct() {
    run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let start = comm.rank() as f32 + 1.0;
            for (op, want) in [
                (ReduceOp::Average, 2.5),
                (ReduceOp::Min, 1.0),
                (ReduceOp::Max, 4.0),
                (ReduceOp::Product, 24.0),
            ] {
                let mut data = vec![start; 50_000];
                let work =
                    comm.allreduce(buffer(&mut data), DType::F32, op, 0, TIMEOUT, true).unwrap();
                work.wait(None).unwrap();
                assert!(data.iter().all(|value| *value == want), "{op:?} {}", data[0]);
            }
        },
    );
}

#[test]
fn any_rank_can_be_the_root_of_broadcast_and_reduce() {
    for (nodes, locals) in GROUPS {
        let world = nodes * locals;
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                for root in 0..world as u32 {
                    for count in [7, 40_000] {
                        let mut data = numbers(comm.rank(), 5, count);
                        comm.broadcast(buffer(&mut data), DType::F32, root, TIMEOUT, true)
                            .unwrap()
                            .wait(None)
                            .unwrap();
                        assert_eq!(data, numbers(root, 5, count));
                        let mut data = numbers(comm.rank(), 6, count);
                        comm.reduce(
                            buffer(&mut data),
                            DType::F32,
                            ReduceOp::Sum,
                            root,
                            TIMEOUT,
                            true,
                        )
                        .unwrap()
                        .wait(None)
                        .unwrap();
                        if comm.rank() == root {
                            assert!(data == sum(world, 6, count));
                        } else {
                            assert_eq!(data, numbers(comm.rank(), 6, count));
                        }
                    }
                }
            },
        );
    }
}

#[test]
fn blocks_are_gathered_and_scattered() {
    for (nodes, locals) in GROUPS {
        let world = nodes * locals;
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                for count in [0, 1, 9000, 100_001] {
                    let mut input = numbers(comm.rank(), 8, count);
                    let mut output = vec![0.0; count * world];
                    comm.allgather(
                        buffer(&mut input),
                        buffer(&mut output),
                        DType::F32,
                        TIMEOUT,
                        true,
                    )
                    .unwrap()
                    .wait(None)
                    .unwrap();
                    let want: Vec<f32> =
                        (0..world).flat_map(|r| numbers(r as u32, 8, count)).collect();
                    assert!(output == want);
                    let mut wide = numbers(comm.rank(), 9, count * world);
                    let mut block = vec![0.0; count];
                    comm.reduce_scatter(
                        buffer(&mut wide),
                        buffer(&mut block),
                        DType::F32,
                        ReduceOp::Sum,
                        TIMEOUT,
                        true,
                    )
                    .unwrap()
                    .wait(None)
                    .unwrap();
                    let at = comm.rank() as usize * count;
                    assert!(block == sum(world, 9, count * world)[at..at + count]);
                }
            },
        );
    }
}

#[test]
fn operations_complete_in_the_background_without_a_wait() {
    run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let mut data = vec![comm.rank() as f32; 200_000];
            let work = comm
                .allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, false)
                .unwrap();
            while !work.is_done() {
                std::thread::yield_now();
            }
            assert!(work.error().is_none() && data.iter().all(|value| *value == 6.0));
            comm.barrier(TIMEOUT, false).unwrap().wait(None).unwrap();
        },
    );
}

#[test]
fn the_root_gathers_and_scatters_blocks() {
    for (nodes, locals) in [(1, 1), (1, 3), (3, 1), (2, 2)] {
        let world = nodes * locals;
        run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                for root in 0..world as u32 {
                    for count in [0, 3, 400_000] {
                        let is_root = comm.rank() == root;
                        let mut input = numbers(comm.rank(), 1, count);
                        let mut output = vec![0.0; if is_root { count * world } else { 0 }];
                        comm.gather(
                            buffer(&mut input),
                            buffer(&mut output),
                            DType::F32,
                            root,
                            TIMEOUT,
                            true,
                        )
                        .unwrap()
                        .wait(None)
                        .unwrap();
                        let want: Vec<f32> =
                            (0..world as u32).flat_map(|r| numbers(r, 1, count)).collect();
                        assert!(!is_root || output == want);
                        let mut output = if is_root { want } else { vec![] };
                        let mut block = vec![0.0; count];
                        comm.scatter(
                            buffer(&mut output),
                            buffer(&mut block),
                            DType::F32,
                            root,
                            TIMEOUT,
                            true,
                        )
                        .unwrap()
                        .wait(None)
                        .unwrap();
                        assert!(block == numbers(comm.rank(), 1, count));
                    }
                }
            },
        );
    }
}

#[test]
fn a_receive_from_any_rank_reports_the_sender() {
    for (nodes, locals) in [(1, 4), (4, 1), (2, 2)] {
        let results = run(
            &placement(nodes, locals),
            |_| {},
            |comm| {
                let mut data = [comm.rank() as f32; 100];
                if comm.rank() > 0 {
                    comm.send(buffer(&mut data), DType::F32, 0, 3, TIMEOUT)
                        .unwrap()
                        .wait(None)
                        .unwrap();
                    // Only a receive from any rank would wait for ranks that have closed.
                    return vec![];
                }
                let mut received: Vec<(u32, f32)> = (1..4)
                    .map(|_| {
                        let from = buffer(&mut data);
                        let work = comm.recv_any(from, DType::F32, 3, TIMEOUT).unwrap();
                        work.wait(None).unwrap();
                        (work.source().unwrap(), data[99])
                    })
                    .collect();
                received.sort_by_key(|(source, _)| *source);
                let invalid = comm.recv(buffer(&mut data), DType::F32, u32::MAX, 3, TIMEOUT);
                assert!(invalid.err().unwrap().to_string().contains("is not in a group of"));
                received
            },
        );
        assert_eq!(results[0], [(1, 1.0), (2, 2.0), (3, 3.0)]);
    }
}

#[test]
fn alltoall_exchanges_parts_of_different_sizes() {
    run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let (rank, world) = (comm.rank() as usize, comm.world_size());
            let part =
                |from: usize, to: usize| numbers(from as u32, to as u64, from * 50_000 + to * 7);
            for _ in 0..3 {
                let mut input: Vec<f32> = (0..world).flat_map(|to| part(rank, to)).collect();
                let want: Vec<f32> = (0..world).flat_map(|from| part(from, rank)).collect();
                let mut output = vec![0.0; want.len()];
                let sends: Vec<usize> = (0..world).map(|to| part(rank, to).len()).collect();
                let receives: Vec<usize> = (0..world).map(|from| part(from, rank).len()).collect();
                let (from, into) = (buffer(&mut input), buffer(&mut output));
                comm.alltoall(from, into, &sends, &receives, DType::F32, TIMEOUT, true)
                    .unwrap()
                    .wait(None)
                    .unwrap();
                assert!(output == want);
            }
        },
    );
}

#[test]
fn messages_are_matched_by_tag_during_collectives() {
    run(
        &placement(2, 2),
        |_| {},
        |comm| {
            let (rank, world) = (comm.rank(), comm.world_size() as u32);
            let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
            let mut outgoing: Vec<Vec<f32>> =
                (0..5).map(|tag| numbers(rank, tag, 300_000)).collect();
            let mut incoming = vec![vec![0.0_f32; 300_000]; 5];
            let mut works = vec![];
            // Received in the reverse order of sending.
            for (tag, data) in incoming.iter_mut().enumerate().rev() {
                works.push(
                    comm.recv(buffer(data), DType::F32, before, tag as u64, TIMEOUT).unwrap(),
                );
            }
            for (tag, data) in outgoing.iter_mut().enumerate() {
                works.push(comm.send(buffer(data), DType::F32, next, tag as u64, TIMEOUT).unwrap());
            }
            let mut sum = vec![1.0; 1000];
            allreduce(&comm, &mut sum).wait(None).unwrap();
            works.iter().for_each(|work| work.wait(None).unwrap());
            for (tag, data) in incoming.iter().enumerate() {
                assert!(*data == numbers(before, tag as u64, 300_000));
            }
        },
    );
}
