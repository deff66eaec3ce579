//! Small operations, which the last arriver reduces: the bits of an owner's sum, and the same failures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Barrier;
use std::time::Duration;

use hfreduce_engine::{
    Buffer, CollectiveError, Communicator, DType, ErrorKind, Options, ReduceOp, WaitError, Work,
};
use support::{Calls, TIMEOUT, placement, run, try_run, unless_ended, values};

/// The largest small operation, and one above the limit.
const SMALL: usize = 16 << 10;
const LARGE: usize = SMALL + 4096;
const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Average];

/// Options of ranks that share a processor, or have one each.
fn sharing(processors: usize) -> impl Fn(&mut Options) {
    move |options| options.processors = Some(processors)
}

/// Any bytes are numbers: NaNs, infinities and zeros of both signs among them.
fn content(rank: u32, salt: u64, count: usize) -> Vec<u8> {
    let numbers = values(rank, salt, count.div_ceil(4));
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
    bytes[..count / 8].fill(if rank.is_multiple_of(2) { 0 } else { 0x80 });
    bytes.truncate(count);
    bytes
}

fn whole(bytes: &mut [u8]) -> Buffer {
    // SAFETY: the tests wait for the work before they touch or drop the memory.
    unsafe { Buffer::new([(bytes.as_mut_ptr(), bytes.len())]) }
}

fn sum(comm: &Communicator, buffer: Buffer) -> Work {
    comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true).unwrap()
}

type Called = Result<Work, CollectiveError>;

fn failed(work: Called) -> CollectiveError {
    match work.map_err(WaitError::Failed).and_then(|work| work.wait(None)) {
        Err(WaitError::Failed(error)) => error,
        other => panic!("it must fail: {other:?}"),
    }
}

#[test]
fn the_last_arrivers_sum_has_the_bits_of_an_owners_sum() {
    for processors in [1, 3] {
        run(&placement(1, 3), sharing(processors), |comm| {
            for dtype in (0..=u8::MAX).map_while(DType::from_code) {
                for op in OPS.into_iter().filter(|op| op.supports(dtype)) {
                    let source = content(comm.rank(), 1, LARGE);
                    let mut owned = source.clone();
                    let work = comm.allreduce(whole(&mut owned), dtype, op, 0, TIMEOUT, true);
                    work.unwrap().wait(None).unwrap();
                    for bytes in [8, 4000, SMALL] {
                        let mut data = source[..bytes].to_vec();
                        let work = comm.allreduce(whole(&mut data), dtype, op, 0, TIMEOUT, true);
                        work.unwrap().wait(None).unwrap();
                        assert!(data == owned[..bytes], "{dtype:?} {op:?} {bytes}");
                    }
                }
            }
        });
    }
}

#[test]
fn reduce_reduce_scatter_and_ranges_have_the_bits_of_allreduce() {
    run(&placement(1, 4), sharing(1), |comm| {
        let (dtype, op) = (DType::F32, ReduceOp::Sum);
        let source = content(comm.rank(), 2, 4 * SMALL);
        let mut all = source.clone();
        sum(&comm, whole(&mut all)).wait(None).unwrap();

        let mut reduced = source[..SMALL].to_vec();
        comm.reduce(whole(&mut reduced), dtype, op, 2, TIMEOUT, true).unwrap().wait(None).unwrap();
        let expected = if comm.rank() == 2 { &all } else { &source };
        assert!(reduced == expected[..SMALL], "other ranks' buffers are unchanged");

        let (mut input, mut block) = (source.clone(), vec![0; SMALL]);
        let (from, to) = (whole(&mut input), whole(&mut block));
        comm.reduce_scatter(from, to, dtype, op, TIMEOUT, true).unwrap().wait(None).unwrap();
        assert!(block == all[comm.rank() as usize * SMALL..][..SMALL]);

        // Ranges that cut elements.
        let mut data = source[..SMALL].to_vec();
        let (left, right) = data.split_at_mut(3001);
        let pieces = [left, right].map(|piece| (piece.as_mut_ptr(), piece.len()));
        // SAFETY: as for `whole`.
        sum(&comm, unsafe { Buffer::new(pieces) }).wait(None).unwrap();
        assert!(data == all[..SMALL]);
    });
}

#[test]
fn more_small_operations_than_slots_end_in_order_between_others() {
    for processors in [1, 4] {
        run(&placement(1, 4), sharing(processors), |comm| {
            // Small operations, one with owners, one that uses the ring if the ranks share a processor.
            let sizes = [1, 1000, 4096, 9000, 1 << 18];
            let mut data: Vec<Vec<f32>> = (0..100)
                .map(|salt| vec![(comm.rank() + salt) as f32; sizes[salt as usize % sizes.len()]])
                .collect();
            let works: Vec<Work> =
                data.iter_mut().map(|data| sum(&comm, support::buffer(data))).collect();
            let barrier = comm.barrier(TIMEOUT, true).unwrap();
            works.iter().rev().for_each(|work| work.wait(None).unwrap());
            barrier.wait(None).unwrap();
            for (salt, data) in data.iter().enumerate() {
                let sum = 6.0 + 4.0 * salt as f32;
                assert!(data.iter().all(|value| *value == sum), "operation {salt}");
            }
        });
    }
}

#[test]
fn repeatedly_late_ranks_get_every_result() {
    run(&placement(1, 3), sharing(1), |comm| {
        for round in 0..300_u32 {
            // A different rank is late each time; the others sleep by then.
            if round % 3 == comm.rank() && round % 10 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            let mut data = [(round + comm.rank()) as f32; 64];
            sum(&comm, support::buffer(&mut data)).wait(None).unwrap();
            assert_eq!(data, [(3 * round + 3) as f32; 64]);
        }
    });
}

#[test]
fn a_rank_that_calls_another_operation_or_none_is_reported() {
    for wrong in 0..3 {
        // The same bytes in another type, more elements, more than a small operation, another operation.
        let odd: [fn(&Communicator, &mut [f32]) -> Called; 4] = [
            |comm, data| {
                let buffer = support::buffer(&mut data[..64]);
                comm.allreduce(buffer, DType::I32, ReduceOp::Sum, 0, TIMEOUT, true)
            },
            |comm, data| {
                let buffer = support::buffer(&mut data[..65]);
                comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
            },
            |comm, data| {
                let buffer = support::buffer(data);
                comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
            },
            |comm, _| comm.barrier(TIMEOUT, true),
        ];
        for odd in odd {
            try_run(&placement(1, 3), sharing(1), |comm| {
                let Some(comm) = unless_ended(comm, ErrorKind::Mismatch) else { return };
                let mut data = vec![1.0_f32; LARGE / 4];
                let call = if comm.rank() == wrong {
                    odd(&comm, &mut data)
                } else {
                    let buffer = support::buffer(&mut data[..64]);
                    comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
                };
                let error = failed(call);
                assert_eq!(error.cause.kind, ErrorKind::Mismatch, "{error}");
            });
        }
        let together = Barrier::new(2);
        try_run(&placement(1, 3), sharing(1), |comm| {
            let Some(comm) = unless_ended(comm, ErrorKind::TimedOut) else { return };
            if comm.rank() == wrong {
                while comm.error().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return;
            }
            let mut data = [1.0_f32; 64];
            // Long enough that no other rank is late on a busy host.
            let (buffer, soon) = (support::buffer(&mut data), Duration::from_secs(3));
            together.wait();
            let error = failed(comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, soon, true));
            let reported = (error.cause.kind, error.cause.peer);
            assert_eq!(reported, (ErrorKind::TimedOut, Some(wrong)), "{error}");
        });
    }
}
