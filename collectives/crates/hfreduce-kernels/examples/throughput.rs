//! How fast each kernel is on this machine, beside what one core can get out of memory.
//!
//! `cargo run --release -p hfreduce-kernels --example throughput`; rounds are interleaved, medians are printed.

use std::hint::black_box;
use std::time::Instant;

use hfreduce_kernels::{Dtype, Isa, Op, Store, reduce_raw_with};

const INPUTS: usize = 8;
const BYTES: usize = 16 << 20;
const ROUNDS: usize = 7;

fn main() {
    let inputs: Vec<Vec<u8>> = (0..INPUTS).map(|n| vec![n as u8 + 1; BYTES]).collect();
    let mut output = vec![0_u8; BYTES];
    let mut kinds = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for isa in Isa::ALL {
            for store in [Store::Cached, Store::Streaming] {
                if isa.available() == isa && (isa != Isa::Scalar || store == Store::Cached) {
                    kinds.push((dtype, isa, store, Vec::new()));
                }
            }
        }
    }
    let mut triad_rounds = Vec::new();
    let mut arrays = [vec![0.5_f32; BYTES], vec![1.0; BYTES], vec![2.0; BYTES]];
    for _ in 0..ROUNDS {
        for (dtype, isa, store, rounds) in &mut kinds {
            let pointers: Vec<_> = inputs.iter().map(|input| input.as_ptr()).collect();
            let numel = BYTES / dtype.size_bytes();
            let start = Instant::now();
            // SAFETY: all buffers hold `BYTES` bytes.
            let done = unsafe {
                reduce_raw_with(
                    *isa,
                    *store,
                    *dtype,
                    Op::Sum,
                    &pointers,
                    output.as_mut_ptr(),
                    numel,
                )
            };
            if let Err(error) = done {
                eprintln!("{error}");
            }
            rounds.push((INPUTS + 1) as f64 * BYTES as f64 / start.elapsed().as_secs_f64() / 1e9);
            black_box(&output);
        }
        triad_rounds.push(triad(&mut arrays));
    }
    let limit = median(&mut triad_rounds);
    println!("{INPUTS} inputs of {} MiB, one core; triad {limit:.1} GB/s", BYTES >> 20);
    println!(
        "{:10} {:8} {:10} {:>16} {:>12} {:>9}",
        "type", "isa", "store", "GB/s (in + out)", "GB/s out", "of triad"
    );
    for (dtype, isa, store, mut rounds) in kinds {
        let speed = median(&mut rounds);
        let (store, out) = (format!("{store:?}").to_lowercase(), speed / (INPUTS + 1) as f64);
        println!(
            "{:10} {:8} {store:10} {speed:16.1} {out:12.2} {:9.2}",
            dtype.name(),
            isa.name(),
            speed / limit
        );
    }
}

/// STREAM's triad, a = b + s c, in GB/s of the three arrays.
fn triad([a, b, c]: &mut [Vec<f32>; 3]) -> f64 {
    let start = Instant::now();
    for ((a, b), c) in a.iter_mut().zip(b.iter()).zip(c.iter()) {
        *a = b + 3.0 * c;
    }
    black_box(&a);
    3.0 * 4.0 * a.len() as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
