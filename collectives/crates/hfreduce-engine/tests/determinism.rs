//! Guarantees of the determinism modes, with ranks as threads over real shared memory and TCP.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use hfreduce_engine::{
    Buffer, Communicator, DType, Determinism, ErrorKind, Options, ReduceOp, WaitError,
};
use hfreduce_kernels::{Pass, Store, Width};
use support::{Calls, TIMEOUT, placement, run, try_run, values};

const STABLE: Determinism = Determinism { stable: true, wide: false };
const WIDE: Determinism = Determinism { stable: false, wide: true };
const BOTH: Determinism = Determinism { stable: true, wide: true };

const FLOATS: [DType; 6] =
    [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2];
/// One node, several nodes over two zones, several nodes in one zone.
const LAYOUTS: [(usize, usize, bool); 5] =
    [(1, 3, true), (2, 2, true), (4, 2, true), (5, 1, false), (3, 2, false)];
const NUMEL: usize = 30_011;

type Tune = fn(&mut Options);

fn layout((nodes, locals, zones): (usize, usize, bool)) -> Vec<(String, String)> {
    let mut places = placement(nodes, locals);
    if !zones {
        places.iter_mut().for_each(|place| place.1 = "A".to_owned());
    }
    places
}

/// Elements of a type, as bytes: values whose sum depends on the order and fits the type.
fn elements(dtype: DType, rank: u32, numel: usize) -> Vec<u8> {
    let singles: Vec<f32> =
        values(rank, 3, numel).iter().map(|value| (value * 1e-6).clamp(-20.0, 20.0)).collect();
    if dtype == DType::F64 {
        return singles.iter().flat_map(|value| (f64::from(*value) / 3.0).to_le_bytes()).collect();
    }
    narrowed(dtype, &singles)
}

/// Values rounded to a type that is fp32 or shorter.
fn narrowed(dtype: DType, singles: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; singles.len() * dtype.size_bytes()];
    let wide = [singles.as_ptr().cast::<u8>()];
    let (op, output, to) = (hfreduce_kernels::Op::Sum, bytes.as_mut_ptr(), Width::Narrow);
    let (numel, inputs) = (singles.len(), &[][..]);
    let pass = Pass { dtype, op, inputs, wide: &wide, output, to, numel, divisor: 1 };
    // SAFETY: both hold `numel` elements of their types.
    unsafe { pass.run(Store::Cached).unwrap() };
    bytes
}

fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut singles = vec![0_f32; bytes.len() / dtype.size_bytes()];
    let inputs = [bytes.as_ptr()];
    let (op, output, to) = (hfreduce_kernels::Op::Sum, singles.as_mut_ptr().cast(), Width::Wide);
    let (numel, wide) = (singles.len(), &[][..]);
    let pass = Pass { dtype, op, inputs: &inputs, wide, output, to, numel, divisor: 1 };
    // SAFETY: as above.
    unsafe { pass.run(Store::Cached).unwrap() };
    singles
}

/// The ranges of a vector, in this order, as one buffer.
fn pieces(data: &mut [u8], cuts: &[(usize, usize)]) -> Buffer {
    let base = data.as_mut_ptr();
    assert!(cuts.iter().all(|(at, bytes)| at + bytes <= data.len()));
    // SAFETY: inside the vector; the tests wait for the work before they touch or drop it.
    unsafe { Buffer::new(cuts.iter().map(|(at, bytes)| (base.add(*at), *bytes))) }
}

fn whole(data: &mut [u8]) -> Buffer {
    let bytes = data.len();
    pieces(data, &[(0, bytes)])
}

fn sum(comm: &Communicator, buffer: Buffer, dtype: DType, op: ReduceOp) {
    comm.allreduce(buffer, dtype, op, 0, TIMEOUT, true).unwrap().wait(None).unwrap();
}

/// Cuts of a vector of elements, the same for all ranks.
fn cuts(size: usize, salt: u64) -> Vec<(usize, usize)> {
    let mut state = salt * 2 + 1;
    let mut next = |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    let (mut at, mut cuts) = (0, Vec::new());
    while at < NUMEL {
        let count = (1 + next(12_000)).min(NUMEL - at);
        cuts.push((at * size, count * size));
        at += count;
    }
    // In random order: an operation does not depend on its position in a tensor.
    for at in 0..cuts.len() {
        let other = next(cuts.len());
        cuts.swap(at, other);
    }
    cuts
}

/// The sum of one tensor, with several ways of splitting it into operations.
fn every_split(comm: &Communicator, dtype: DType) -> Vec<(&'static str, Vec<u8>)> {
    let (size, own) = (dtype.size_bytes(), elements(dtype, comm.rank(), NUMEL));
    let mut results = Vec::new();
    let mut data = own.clone();
    sum(comm, whole(&mut data), dtype, ReduceOp::Sum);
    results.push(("whole", data));
    let mut data = own.clone();
    for cut in cuts(size, 5) {
        sum(comm, pieces(&mut data, &[cut]), dtype, ReduceOp::Sum);
    }
    results.push(("in pieces", data));
    let mut data = own.clone();
    let shuffled = cuts(size, 11);
    for bucket in shuffled.chunks(3) {
        sum(comm, pieces(&mut data, bucket), dtype, ReduceOp::Sum);
    }
    results.push(("in buckets of pieces", data));
    let mut data = own.clone();
    for (cut, root) in cuts(size, 17).into_iter().zip((0..comm.world_size() as u32).cycle()) {
        let reduced =
            comm.reduce(pieces(&mut data, &[cut]), dtype, ReduceOp::Sum, root, TIMEOUT, true);
        reduced.unwrap().wait(None).unwrap();
        let broadcast = comm.broadcast(pieces(&mut data, &[cut]), dtype, root, TIMEOUT, true);
        broadcast.unwrap().wait(None).unwrap();
    }
    results.push(("reduced and broadcast", data));
    // Padded to a block for each rank, as a sharded optimizer does.
    let mut data = own;
    let block = NUMEL.div_ceil(comm.world_size()) * size;
    data.resize(block * comm.world_size(), 0);
    let (mut shard, mut all) = (vec![0; block], vec![0; data.len()]);
    let scattered = comm.reduce_scatter(
        whole(&mut data),
        whole(&mut shard),
        dtype,
        ReduceOp::Sum,
        TIMEOUT,
        true,
    );
    scattered.unwrap().wait(None).unwrap();
    let gathered = comm.allgather(whole(&mut shard), whole(&mut all), dtype, TIMEOUT, true);
    gathered.unwrap().wait(None).unwrap();
    all.truncate(NUMEL * size);
    results.push(("scattered and gathered", all));
    results
}

#[test]
fn stable_bits_do_not_depend_on_the_split_of_tensors_into_operations() {
    let tunings: [(Determinism, Tune); 3] = [
        (STABLE, |_| {}),
        (STABLE, |options| {
            (options.slot_bytes, options.slots, options.peer_memory) = (16 << 10, Some(3), false);
        }),
        (BOTH, |options| options.slot_bytes = 4096),
    ];
    for shape in LAYOUTS {
        let mut reference: Vec<Vec<u8>> = Vec::new();
        for (modes, tune) in tunings {
            let tuned = |options: &mut Options| {
                tune(options);
                options.determinism = modes;
            };
            let outputs = run(&layout(shape), tuned, |comm| {
                FLOATS.map(|dtype| {
                    let results = every_split(&comm, dtype);
                    for (split, bits) in &results {
                        assert!(*bits == results[0].1, "{shape:?} {modes} {dtype}: {split}");
                    }
                    results[0].1.clone()
                })
            });
            assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "the same on every rank");
            if modes == STABLE {
                // Chunks, slots and transport do not change the bits either.
                assert!(reference.is_empty() || reference == outputs[0], "{shape:?}");
                reference = outputs[0].to_vec();
            }
        }
    }
}

#[test]
fn without_stable_mode_buckets_change_bits() {
    let differs = run(
        &layout((5, 1, false)),
        |options| options.slot_bytes = 16 << 10,
        |comm| {
            let results = every_split(&comm, DType::F32);
            results.iter().any(|(_, bits)| *bits != results[0].1)
        },
    );
    assert!(differs.iter().all(|differs| *differs), "without it the bits differ");
}

#[test]
fn a_wide_sum_is_the_exact_sum_of_the_tree_rounded_once() {
    for shape in LAYOUTS {
        let exact = |dtype: DType, op: ReduceOp| {
            let outputs = run(
                &layout(shape),
                |options| options.determinism = STABLE,
                |comm| {
                    let own = widened(dtype, &elements(dtype, comm.rank(), NUMEL));
                    let mut data: Vec<u8> =
                        own.iter().flat_map(|value| value.to_le_bytes()).collect();
                    sum(&comm, whole(&mut data), DType::F32, op);
                    widened(DType::F32, &data)
                },
            );
            narrowed(dtype, &outputs[0])
        };
        for (dtype, op) in [
            (DType::F16, ReduceOp::Sum),
            (DType::Bf16, ReduceOp::Average),
            (DType::F8E4M3, ReduceOp::Sum),
            (DType::F8E5M2, ReduceOp::Average),
        ] {
            let with = |modes: Determinism| {
                run(
                    &layout(shape),
                    |options| options.determinism = modes,
                    |comm| {
                        let mut data = elements(dtype, comm.rank(), NUMEL);
                        sum(&comm, whole(&mut data), dtype, op);
                        data
                    },
                )
            };
            let (expected, outputs) = (exact(dtype, op), with(BOTH));
            assert!(
                outputs.iter().all(|data| *data == expected),
                "{shape:?} {dtype} {}",
                op.name()
            );
            let narrow = with(STABLE);
            if dtype.is_fp8() {
                assert!(narrow[0] == expected, "fp8 is always wide between nodes");
            } else if shape.0 > 2 {
                assert!(narrow[0] != expected, "rounded at every node it is something else");
            }
        }
    }
}

#[test]
fn wide_sums_are_equal_on_all_ranks_over_every_transport() {
    let with = |peer_memory: bool, channels: usize| {
        let outputs = run(
            &placement(4, 2),
            |options| {
                (options.determinism, options.peer_memory) = (WIDE, peer_memory);
                options.channels = Some(channels);
            },
            |comm| {
                // The first operations may end before the segments are mapped.
                let mut all = Vec::new();
                for dtype in [DType::Bf16, DType::F8E5M2, DType::Bf16] {
                    let mut data = elements(dtype, comm.rank(), 400_000);
                    sum(&comm, whole(&mut data), dtype, ReduceOp::Sum);
                    all.extend(data);
                }
                all
            },
        );
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]));
        outputs[0].clone()
    };
    let first = with(true, 1);
    assert!(first == with(false, 2) && first == with(true, 2));
}

#[test]
fn ranks_with_different_modes_are_reported_before_any_operation_runs() {
    let errors = try_run(
        &placement(2, 2),
        |options| options.determinism = if options.rank == 2 { WIDE } else { STABLE },
        |connected| connected.err().unwrap(),
    );
    for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        assert_eq!(error.cause.kind, ErrorKind::Mismatch, "rank {rank}: {error}");
        assert_eq!(error.cause.peer, Some(2), "{error}");
        let text = error.to_string();
        assert!(text.contains("determinism wide") && text.contains("determinism stable"), "{text}");
    }
}

#[test]
fn errors_name_the_mode() {
    let names = try_run(
        &placement(2, 1),
        |options| options.determinism = BOTH,
        |connected| {
            let comm = connected.unwrap();
            let mut data = vec![0; if comm.rank() == 0 { 8 } else { 16 }];
            let work =
                comm.allreduce(whole(&mut data), DType::Bf16, ReduceOp::Sum, 0, TIMEOUT, true);
            match work.and_then(|work| match work.wait(None) {
                Err(WaitError::Failed(error)) => Err(error),
                other => panic!("{other:?}"),
            }) {
                Err(error) => error.to_string(),
                Ok(()) => unreachable!(),
            }
        },
    );
    assert!(names.iter().all(|name| name.contains("bfloat16, sum, stable,wide")), "{names:?}");
}
