//! How fast one pass over eight inputs is, beside what the same cores get out of memory in the same run.
//!
//! `cargo run --release -p hfreduce-kernels --example throughput [FILE.json]`. Rounds are interleaved; medians are
//! printed, and ratios in the file are lists of one value a round. Bytes are those of the inputs and of the output; the triad's are those of its three arrays.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use hfreduce_kernels::{Dtype, Isa, Op, Store, reduce_raw_with, triad};

const INPUTS: usize = 8;
/// Of each buffer: nine of them are larger than a last-level cache.
const BYTES: usize = 32 << 20;
const ROUNDS: usize = 5;
/// The part of the buffers that the scalar code goes through: it is that slow.
const SCALAR_SHARE: usize = 16;

/// (type, share of the triad that one thread is to reach).
const TYPES: [(Dtype, f64); 5] = [
    (Dtype::F32, 0.9),
    (Dtype::Bf16, 0.85),
    (Dtype::F16, 0.85),
    (Dtype::F8E4M3, 0.6),
    (Dtype::F8E5M2, 0.6),
];

/// One way to reduce, by the seconds that it takes.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    OnePass(Isa, Store),
    /// Seven additions of two.
    Pairwise,
    Scalar,
    Triad,
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    let mut rows = Vec::new();
    for count in 1..=threads {
        rows.extend(measure(count));
    }
    if let Some(path) = std::env::args().nth(1) {
        let text = format!(
            "{{\"inputs\": {INPUTS}, \"buffer_bytes\": {BYTES}, \"rounds\": {ROUNDS}, \"isa\": \"{}\", \"rows\": [\n{}\n]}}\n",
            Isa::best().name(),
            rows.join(",\n")
        );
        if let Err(error) = std::fs::write(&path, text) {
            eprintln!("{path}: {error}");
            std::process::exit(1);
        }
    }
}

/// Every way for every type with so many threads, each with buffers of its own: a table and its rows as JSON.
fn measure(threads: usize) -> Vec<String> {
    let best = Isa::best();
    let ways: Vec<Way> = [Way::Scalar, Way::Pairwise]
        .into_iter()
        .chain(Isa::ALL.into_iter().filter(|isa| *isa > Isa::Scalar && *isa <= best).flat_map(
            |isa| [Store::Cached, Store::Streaming].map(|store| Way::OnePass(isa, store)),
        ))
        .collect();
    let mut plan = vec![(Dtype::F32, Way::Triad)];
    plan.extend(TYPES.iter().flat_map(|(dtype, _)| ways.iter().map(|way| (*dtype, *way))));
    let barrier = Barrier::new(threads);
    let per_thread: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let run = || worker(&plan, &barrier);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    // The slowest thread's time counts; all move the same amount.
    let rates = |index: usize| -> Vec<f64> {
        (0..ROUNDS)
            .map(|round| per_thread.iter().map(|times| times[index][round]).fold(0.0, f64::max))
            .map(|seconds| threads as f64 * moved(plan[index].1) / seconds / 1e9)
            .collect()
    };
    let triads = rates(0);
    let triad = median(&triads);
    println!(
        "\n{INPUTS} inputs of {} MiB, {threads} thread(s); triad {triad:.1} GB/s",
        BYTES >> 20
    );
    println!(
        "{:14} {:17} {:>8} {:>9} {:>6} {:>10} {:>8}",
        "type", "way", "GB/s", "of triad", "goal", "x pairwise", "x scalar"
    );
    let mut rows = Vec::new();
    for (dtype, goal) in TYPES {
        let of = |way| {
            plan.iter().position(|entry| *entry == (dtype, way)).map(rates).unwrap_or_default()
        };
        let (scalars, pairwises) = (of(Way::Scalar), of(Way::Pairwise));
        let (scalar, pairwise) = (median(&scalars), median(&pairwises));
        for &way in &ways {
            let (speeds, name) = (of(way), name(way));
            let speed = median(&speeds);
            let shown = if way == Way::OnePass(best, Store::Streaming) {
                format!("{goal}")
            } else {
                String::new()
            };
            println!(
                "{:14} {name:17} {speed:8.1} {:9.2} {shown:>6} {:10.2} {:8.1}",
                dtype.name(),
                speed / triad,
                speed / pairwise,
                speed / scalar
            );
            rows.push(format!(
                "  {{\"threads\": {threads}, \"type\": \"{}\", \"way\": \"{name}\", \"gbps\": {speed:.3}, \"triad_gbps\": {triad:.3}, \
                 \"of_triad\": {}, \"of_pairwise\": {}, \"of_scalar\": {}, \"goal_of_triad\": {goal}}}",
                dtype.name(), ratios(&speeds, &triads), ratios(&speeds, &pairwises), ratios(&speeds, &scalars)
            ));
        }
    }
    rows
}

fn name(way: Way) -> String {
    match way {
        Way::OnePass(isa, store) => {
            format!("{} {}", isa.name(), format!("{store:?}").to_lowercase())
        }
        Way::Pairwise => "pairwise".into(),
        Way::Scalar => "scalar".into(),
        Way::Triad => "triad".into(),
    }
}

/// Bytes in and out that a way is credited with: one pass's, so that ratios are those of useful work.
fn moved(way: Way) -> f64 {
    let pass = (INPUTS + 1) * BYTES;
    match way {
        Way::OnePass(..) | Way::Pairwise => pass as f64,
        Way::Scalar => (pass / SCALAR_SHARE) as f64,
        Way::Triad => 3.0 * BYTES as f64,
    }
}

/// Seconds of each entry of the plan in each round, for one thread.
fn worker(plan: &[(Dtype, Way)], barrier: &Barrier) -> Vec<Vec<f64>> {
    // Small numbers of every type, other ones in every buffer.
    let inputs: Vec<Vec<u8>> = (0..INPUTS)
        .map(|n| (0..BYTES).map(|i| if i % 2 == 1 { 0x3C } else { (i % 7 + n) as u8 }).collect())
        .collect();
    let mut output = vec![0_u8; BYTES];
    let mut times = vec![Vec::new(); plan.len()];
    for round in 0..=ROUNDS {
        for (index, &(dtype, way)) in plan.iter().enumerate() {
            barrier.wait();
            let start = Instant::now();
            run(dtype, way, &inputs, &mut output);
            let seconds = start.elapsed().as_secs_f64();
            black_box(&output);
            if round > 0 {
                times[index].push(seconds);
            }
        }
    }
    times
}

fn run(dtype: Dtype, way: Way, inputs: &[Vec<u8>], output: &mut [u8]) {
    let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
    let target = output.as_mut_ptr();
    let numel = BYTES / dtype.size_bytes();
    let pass = |isa, store, from: &[*const u8], numel| {
        // SAFETY: all buffers hold `BYTES` bytes; the output is apart from the inputs or is the first.
        let done = unsafe { reduce_raw_with(isa, store, dtype, Op::Sum, from, target, numel) };
        if let Err(error) = done {
            eprintln!("{error}");
        }
    };
    match way {
        Way::OnePass(isa, store) => pass(isa, store, &pointers, numel),
        Way::Scalar => pass(Isa::Scalar, Store::Cached, &pointers, numel / SCALAR_SHARE),
        Way::Pairwise => {
            pass(Isa::best(), Store::Cached, &pointers[..2], numel);
            for input in &pointers[2..] {
                pass(Isa::best(), Store::Cached, &[target.cast_const(), *input], numel);
            }
        }
        Way::Triad => triad(&inputs[0], &inputs[1], output),
    }
}

/// Round by round, as a JSON list.
fn ratios(of: &[f64], to: &[f64]) -> String {
    let list: Vec<String> = of.iter().zip(to).map(|(a, b)| format!("{:.4}", a / b)).collect();
    format!("[{}]", list.join(", "))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
