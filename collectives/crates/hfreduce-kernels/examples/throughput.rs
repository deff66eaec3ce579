//! Throughput of one reduction pass over eight inputs, compared with the memory bandwidth of the same cores in
//! the same run.
//!
//! `cargo run --release -p hfreduce-kernels --example throughput [FILE.json]`. Rounds of all methods are
//! interleaved. Medians are printed; each ratio in the file is a list with one value per round. Bytes are those
//! of the inputs and of the output; the triad's are those of its three arrays.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use hfreduce_kernels::{Dtype, Isa, Op, Store, reduce_raw_with, triad};

const INPUTS: usize = 8;
/// Size of each buffer: nine of them exceed the last-level cache.
const BYTES: usize = 32 << 20;
const ROUNDS: usize = 5;
/// Divisor of the buffer length for the scalar code, which is too slow for the whole length.
const SCALAR_SHARE: usize = 16;

/// (type, target share of the triad's throughput with one thread).
const TYPES: [(Dtype, f64); 5] = [
    (Dtype::F32, 0.9),
    (Dtype::Bf16, 0.85),
    (Dtype::F16, 0.85),
    (Dtype::F8E4M3, 0.6),
    (Dtype::F8E5M2, 0.6),
];

/// A measured method.
#[derive(Clone, Copy, PartialEq)]
enum Method {
    OnePass(Isa, Store),
    /// Seven additions of two buffers.
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

/// Measures every method for every type with `threads` threads, each with separate buffers: prints a table and
/// returns its rows as JSON.
fn measure(threads: usize) -> Vec<String> {
    let best = Isa::best();
    let ways: Vec<Method> = [Method::Scalar, Method::Pairwise]
        .into_iter()
        .chain(Isa::ALL.into_iter().filter(|isa| *isa > Isa::Scalar && *isa <= best).flat_map(
            |isa| [Store::Cached, Store::Streaming].map(|store| Method::OnePass(isa, store)),
        ))
        .collect();
    let mut plan = vec![(Dtype::F32, Method::Triad)];
    plan.extend(TYPES.iter().flat_map(|(dtype, _)| ways.iter().map(|way| (*dtype, *way))));
    let barrier = Barrier::new(threads);
    let per_thread: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let run = || worker(&plan, &barrier);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    // All threads move the same amount, so the slowest one determines the rate.
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
        let (scalars, pairwises) = (of(Method::Scalar), of(Method::Pairwise));
        let (scalar, pairwise) = (median(&scalars), median(&pairwises));
        for &way in &ways {
            let (speeds, name) = (of(way), name(way));
            let speed = median(&speeds);
            let shown = if way == Method::OnePass(best, Store::Streaming) {
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

fn name(way: Method) -> String {
    match way {
        Method::OnePass(isa, store) => {
            format!("{} {}", isa.name(), format!("{store:?}").to_lowercase())
        }
        Method::Pairwise => "pairwise".into(),
        Method::Scalar => "scalar".into(),
        Method::Triad => "triad".into(),
    }
}

/// Bytes in and out that a method is credited with: those of one pass, so that ratios compare useful work.
fn moved(way: Method) -> f64 {
    let pass = (INPUTS + 1) * BYTES;
    match way {
        Method::OnePass(..) | Method::Pairwise => pass as f64,
        Method::Scalar => (pass / SCALAR_SHARE) as f64,
        Method::Triad => 3.0 * BYTES as f64,
    }
}

/// Seconds of each entry of the plan in each round, for one thread.
fn worker(plan: &[(Dtype, Method)], barrier: &Barrier) -> Vec<Vec<f64>> {
    // Small numbers, valid in every type and different in every buffer.
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

fn run(dtype: Dtype, way: Method, inputs: &[Vec<u8>], output: &mut [u8]) {
    let pointers: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
    let target = output.as_mut_ptr();
    let numel = BYTES / dtype.size_bytes();
    let pass = |isa, store, from: &[*const u8], numel| {
        // SAFETY: all buffers hold `BYTES` bytes; the output does not overlap the inputs, or is the first one.
        let done = unsafe { reduce_raw_with(isa, store, dtype, Op::Sum, from, target, numel) };
        if let Err(error) = done {
            eprintln!("{error}");
        }
    };
    match way {
        Method::OnePass(isa, store) => pass(isa, store, &pointers, numel),
        Method::Scalar => pass(Isa::Scalar, Store::Cached, &pointers, numel / SCALAR_SHARE),
        Method::Pairwise => {
            pass(Isa::best(), Store::Cached, &pointers[..2], numel);
            for input in &pointers[2..] {
                pass(Isa::best(), Store::Cached, &[target.cast_const(), *input], numel);
            }
        }
        Method::Triad => triad(&inputs[0], &inputs[1], output),
    }
}

/// Ratios of each round, as a JSON list.
fn ratios(of: &[f64], to: &[f64]) -> String {
    let list: Vec<String> = of.iter().zip(to).map(|(a, b)| format!("{:.4}", a / b)).collect();
    format!("[{}]", list.join(", "))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
