//! Ring accumulation, used if ranks share processors: the bits of an owner's sum, whatever the memory, and the
//! same failures.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hfreduce_engine::{Buffer, Communicator, DType, ErrorKind, Options, ReduceOp, WaitError, Work};
use support::{Calls, TIMEOUT, placement, run, try_run, unless_ended, values};

/// Size of an operation that uses the ring: several chunks, the last one short.
const BYTES: usize = (1 << 20) + 1000 * 8;
const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Average];

/// Options of ranks that share a processor, or have one each.
fn sharing(processors: usize) -> impl Fn(&mut Options) {
    move |options| {
        options.processors = Some(processors);
        options.slot_bytes = 64 << 10;
    }
}

fn went_round(comm: &Communicator) -> u64 {
    comm.counters().ring_bytes.load(Ordering::Relaxed)
}

/// Any bytes are numbers: NaNs, infinities and zeros of both signs among them.
fn content(rank: u32, salt: u64) -> Vec<u8> {
    let numbers = values(rank, salt, BYTES / 4);
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
    bytes[..1 << 14].fill(if rank.is_multiple_of(2) { 0 } else { 0x80 });
    bytes
}

fn whole(bytes: &mut [u8]) -> Buffer {
    // SAFETY: the tests wait for the work before they touch or drop the memory.
    unsafe { Buffer::new([(bytes.as_mut_ptr(), bytes.len())]) }
}

fn sum(comm: &Communicator, buffer: Buffer) -> Work {
    comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true).unwrap()
}

/// Every type and operation, and ranges that cut elements; returns each rank's results.
fn all_results(processors: usize) -> Vec<Vec<u8>> {
    let mut results = run(&placement(1, 3), sharing(processors), |comm| {
        let mut results = Vec::new();
        let input = content(comm.rank(), 1);
        for dtype in (0..=u8::MAX).map_while(DType::from_code) {
            for op in OPS.into_iter().filter(|op| op.supports(dtype)) {
                let mut data = input.clone();
                let buffer = whole(&mut data);
                let work = comm.allreduce(buffer, dtype, op, 0, TIMEOUT, true).unwrap();
                work.wait(None).unwrap();
                results.push(data);
            }
        }
        let mut data = input;
        let (left, right) = data.split_at_mut(300_001);
        let pieces = [left, right].map(|piece| (piece.as_mut_ptr(), piece.len()));
        // SAFETY: as for `whole`.
        sum(&comm, unsafe { Buffer::new(pieces) }).wait(None).unwrap();
        results.push(data);
        assert_eq!(went_round(&comm) > 0, processors == 1);
        results
    });
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "the same on every rank");
    results.remove(0)
}

#[test]
fn ring_accumulation_has_the_bits_of_an_owners_sum() {
    assert!(all_results(1) == all_results(3));
}

#[test]
fn reduce_and_reduce_scatter_have_the_bits_of_allreduce() {
    let results = [1, 4].map(|processors| {
        run(&placement(1, 4), sharing(processors), |comm| {
            let mut reduced = content(comm.rank(), 1);
            let (dtype, op) = (DType::F32, ReduceOp::Sum);
            let work = comm.reduce(whole(&mut reduced), dtype, op, 2, TIMEOUT, true).unwrap();
            work.wait(None).unwrap();
            let mut input = content(comm.rank(), 2).repeat(4);
            let mut block = vec![0; BYTES];
            let (input, output) = (whole(&mut input), whole(&mut block));
            let work = comm.reduce_scatter(input, output, dtype, op, TIMEOUT, true).unwrap();
            work.wait(None).unwrap();
            assert_eq!(went_round(&comm) > 0, processors == 1);
            (reduced, block)
        })
    });
    assert!(results[0] == results[1]);
    assert!(results[0][0].0 == content(0, 1), "other ranks' buffers are unchanged");
}

#[test]
fn rank_0_selects_the_algorithm_for_any_registration_with_small_operations_between() {
    let registers: [fn(u32) -> bool; 4] = [|_| true, |rank| rank == 0, |rank| rank == 1, |_| false];
    run(&placement(1, 3), sharing(1), |comm| {
        let input = content(comm.rank(), 5);
        let mut expected = input.clone();
        sum(&comm, whole(&mut expected)).wait(None).unwrap();
        for register in registers {
            let before = went_round(&comm);
            let block = comm.allocate(BYTES).unwrap();
            let mut own = vec![0; BYTES];
            let place = if register(comm.rank()) { block.base() } else { own.as_mut_ptr() };
            // SAFETY: both hold `BYTES` bytes; no other reference to them exists before the call.
            let data = unsafe { std::slice::from_raw_parts_mut(place, BYTES) };
            data.copy_from_slice(&input);
            let mut small = [1.0_f32; 100];
            let first = sum(&comm, whole(data));
            let second = sum(&comm, support::buffer(&mut small));
            second.wait(None).unwrap();
            first.wait(None).unwrap();
            assert!(data == expected && small == [3.0; 100]);
            assert_eq!(went_round(&comm) > before, !register(0));
        }
    });
}

#[test]
fn long_short_fragmented_and_registered_sums_run_concurrently() {
    let few_slots = |options: &mut Options| {
        (options.processors, options.slot_bytes, options.slots) = (Some(1), 128 << 10, Some(8));
    };
    let (short, long) = (1 << 18, 5 << 18);
    run(&placement(1, 3), few_slots, |comm| {
        let start = |salt: u32| (comm.rank() + salt) as f32;
        let block = comm.allocate(4 * long).unwrap();
        // SAFETY: the block holds that many elements; before the calls no other reference exists.
        let block = unsafe { std::slice::from_raw_parts_mut(block.base().cast(), long) };
        // Rank 0 decides: an owner adds the values that the others have copied to their slots.
        let mut own = vec![0.0; long];
        let registered = if comm.rank() == 0 { block } else { &mut own[..] };
        for round in 0..3 {
            let sizes = [long, short, long, 100, short, long];
            let mut data: Vec<Vec<f32>> =
                (round..).zip(sizes).map(|(s, n)| vec![start(s); n]).collect();
            registered.fill(start(round));
            let mut works = vec![];
            for (number, data) in data.iter_mut().enumerate() {
                if number == 2 {
                    works.push(sum(&comm, support::buffer(registered)));
                    let pieces = data
                        .chunks_mut(12_345)
                        .map(|piece| (piece.as_mut_ptr().cast(), size_of_val(piece)));
                    // SAFETY: as for `whole`.
                    works.push(sum(&comm, unsafe { Buffer::new(pieces) }));
                } else {
                    works.push(sum(&comm, support::buffer(data)));
                }
            }
            works.iter().rev().for_each(|work| work.wait(None).unwrap());
            for (salt, data) in (round..).zip(&data) {
                assert!(data.iter().all(|value| *value == 3.0 + 3.0 * salt as f32), "{salt}");
            }
            assert!(registered.iter().all(|value| *value == 3.0 + 3.0 * round as f32));
        }
    });
}

#[test]
fn more_operations_than_the_segment_records_end_in_order() {
    run(&placement(1, 3), sharing(1), |comm| {
        let count = (1 << 18) + 1;
        let mut data: Vec<Vec<f32>> =
            (0..24).map(|salt| vec![(comm.rank() + salt) as f32; count]).collect();
        let works: Vec<Work> =
            data.iter_mut().map(|data| sum(&comm, support::buffer(data))).collect();
        works.iter().rev().for_each(|work| work.wait(None).unwrap());
        for (salt, data) in data.iter().enumerate() {
            assert!(data.iter().all(|value| *value == 3.0 + 3.0 * salt as f32), "operation {salt}");
        }
        assert_eq!(went_round(&comm), 24 * 4 * count as u64);
    });
}

#[test]
fn a_rank_that_calls_another_operation_or_none_is_reported() {
    for wrong in 0..3 {
        try_run(&placement(1, 3), sharing(1), |comm| {
            let Some(comm) = unless_ended(comm, ErrorKind::Mismatch) else { return };
            let mut data = vec![1.0_f32; (1 << 18) + usize::from(comm.rank() == wrong)];
            let buffer = support::buffer(&mut data);
            let failed = comm
                .allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
                .map_err(WaitError::Failed)
                .and_then(|work| work.wait(None));
            let Err(WaitError::Failed(error)) = failed else { panic!("{failed:?}") };
            assert_eq!(error.cause.kind, ErrorKind::Mismatch, "{error}");
        });
        let together = Barrier::new(2);
        try_run(&placement(1, 3), sharing(1), |comm| {
            let Some(comm) = unless_ended(comm, ErrorKind::TimedOut) else { return };
            if comm.rank() == wrong {
                while comm.error().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return;
            }
            let mut data = vec![1.0_f32; 1 << 18];
            // Long enough that no other rank is late on a busy host.
            let (buffer, soon) = (support::buffer(&mut data), Duration::from_secs(3));
            together.wait();
            let failed = comm
                .allreduce(buffer, DType::F32, ReduceOp::Sum, 0, soon, true)
                .map_err(WaitError::Failed)
                .and_then(|work| work.wait(None));
            let Err(WaitError::Failed(error)) = failed else { panic!("{failed:?}") };
            let reported = (error.cause.kind, error.cause.peer);
            assert_eq!(reported, (ErrorKind::TimedOut, Some(wrong)), "{error}");
        });
    }
}
