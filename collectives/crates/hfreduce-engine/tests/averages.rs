//! Averages compared with exact arithmetic: every type on every layout in every determinism mode.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use hfreduce_engine::{Buffer, Communicator, DType, Determinism, ReduceOp};
use hfreduce_kernels::{Op, Pass, Store, Width};
use support::{Calls, TIMEOUT, placement, run};

const FLOATS: [DType; 6] =
    [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];
/// (nodes, ranks per node), over two zones if there are several nodes.
const LAYOUTS: [(usize, usize); 8] =
    [(1, 1), (1, 4), (2, 1), (2, 3), (4, 1), (4, 2), (5, 1), (8, 1)];
const NUMEL: usize = 2_500;

/// Element `at` of `rank` before it is rounded to `dtype`: near the ends of the range of the short types, of
/// both signs, and equal on all ranks for some elements.
fn value(dtype: DType, rank: usize, at: usize) -> f64 {
    let largest = match dtype {
        DType::F8E4M3 => 448.0,
        DType::F8E5M2 | DType::F16 => 57_344.0,
        _ => 1e6,
    };
    let sign = if (at + rank).is_multiple_of(5) { -1.0 } else { 1.0 };
    match at % 4 {
        0 => largest,
        1 => largest * 0.625,
        2 => sign * largest,
        _ => sign * largest * ((rank * 7 + at) % 16) as f64 / 16.0,
    }
}

/// The values rounded once to `dtype`, as bytes.
fn narrowed(dtype: DType, values: &[f64]) -> Vec<u8> {
    if dtype == DType::F64 {
        return values.iter().flat_map(|value| value.to_le_bytes()).collect();
    }
    let singles: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    let mut bytes = vec![0; singles.len() * dtype.size_bytes()];
    let wide = [singles.as_ptr().cast::<u8>()];
    let pass = Pass {
        dtype,
        op: Op::Sum,
        inputs: &[],
        wide: &wide,
        output: bytes.as_mut_ptr(),
        to: Width::Narrow,
        numel: singles.len(),
        divisor: 1,
    };
    // SAFETY: both hold that many elements of their types.
    unsafe { pass.run(Store::Cached).unwrap() };
    bytes
}

fn widened(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    if dtype == DType::F64 {
        let eights = bytes.chunks_exact(8);
        return eights.map(|eight| f64::from_le_bytes(eight.try_into().unwrap())).collect();
    }
    let mut singles = vec![0_f32; bytes.len() / dtype.size_bytes()];
    let pass = Pass {
        dtype,
        op: Op::Sum,
        inputs: &[bytes.as_ptr()],
        wide: &[],
        output: singles.as_mut_ptr().cast(),
        to: Width::Wide,
        numel: singles.len(),
        divisor: 1,
    };
    // SAFETY: as above.
    unsafe { pass.run(Store::Cached).unwrap() };
    singles.into_iter().map(f64::from).collect()
}

fn input_of(dtype: DType, rank: usize) -> Vec<u8> {
    let values: Vec<f64> = (0..NUMEL).map(|at| value(dtype, rank, at)).collect();
    narrowed(dtype, &values)
}

/// The exact average over the ranks, and the sum of the magnitudes.
fn exact(dtype: DType, world: usize) -> Vec<(f64, f64)> {
    let inputs: Vec<_> = (0..world).map(|rank| widened(dtype, &input_of(dtype, rank))).collect();
    let at = |at: usize| {
        let sum: f64 = inputs.iter().map(|input| input[at]).sum();
        let magnitude: f64 = inputs.iter().map(|input| input[at].abs()).sum();
        (sum / world as f64, magnitude / world as f64)
    };
    (0..NUMEL).map(at).collect()
}

fn whole(data: &mut [u8]) -> Buffer {
    // SAFETY: the tests wait for the work before they touch or drop the vector.
    unsafe { Buffer::new([(data.as_mut_ptr(), data.len())]) }
}

fn averaged(comm: &Communicator, dtype: DType) -> [Vec<u8>; 3] {
    let (rank, world) = (comm.rank() as usize, comm.world_size());
    let average = ReduceOp::Average;
    let mut all = input_of(dtype, rank);
    let work = comm.allreduce(whole(&mut all), dtype, average, 0, TIMEOUT, true);
    work.unwrap().wait(None).unwrap();
    let mut at_root = input_of(dtype, rank);
    let work = comm.reduce(whole(&mut at_root), dtype, average, 0, TIMEOUT, true);
    work.unwrap().wait(None).unwrap();
    // Every block is the whole input, so that every rank can be compared with the same values.
    let mut blocks = input_of(dtype, rank).repeat(world);
    let mut block = vec![0; NUMEL * dtype.size_bytes()];
    let (input, output) = (whole(&mut blocks), whole(&mut block));
    let work = comm.reduce_scatter(input, output, dtype, average, TIMEOUT, true);
    work.unwrap().wait(None).unwrap();
    [all, at_root, block]
}

/// Half a unit in the last place, relative, of the rounding at every node in the default mode.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 2_f64.powi(-8),
        DType::F32 => 2_f64.powi(-23),
        _ => 2_f64.powi(-51),
    }
}

#[test]
fn averages_are_correct_for_every_type_layout_and_mode() {
    for (nodes, locals) in LAYOUTS {
        let world = nodes * locals;
        let expected = FLOATS.map(|dtype| exact(dtype, world));
        for modes in (0..4).map(Determinism::from_code) {
            let outputs = run(
                &placement(nodes, locals),
                |options| options.determinism = modes,
                |comm| FLOATS.map(|dtype| averaged(&comm, dtype)),
            );
            for (rank, output) in outputs.iter().enumerate() {
                for ((dtype, expected), results) in FLOATS.into_iter().zip(&expected).zip(output) {
                    let averages: Vec<f64> = expected.iter().map(|(average, _)| *average).collect();
                    let rounded = narrowed(dtype, &averages);
                    for (operation, result) in results.iter().enumerate() {
                        if operation == 1 && rank != 0 {
                            continue; // Only the root of a reduction has its result.
                        }
                        let what =
                            format!("{nodes}×{locals} {modes} {dtype} operation {operation}");
                        let is_wide = dtype.wide() != dtype && (modes.wide || dtype != DType::Bf16);
                        if is_wide {
                            // The sums are exact in binary32, so there is exactly one rounding.
                            assert!(*result == rounded, "{what}");
                            continue;
                        }
                        for (value, (average, magnitude)) in
                            widened(dtype, result).into_iter().zip(expected)
                        {
                            let error = magnitude * rounding(dtype) * (nodes + 2) as f64;
                            assert!((value - average).abs() <= error, "{what}: {value} {average}");
                        }
                    }
                }
            }
        }
    }
}
