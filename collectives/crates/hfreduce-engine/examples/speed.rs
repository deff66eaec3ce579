//! Cost of an allreduce inside one node, without Python: each rank is a separate process.
//!
//! `cargo run --release -p hfreduce-engine --example speed -- RANKS BYTES registered|private ROUNDS` makes five
//! runs of ROUNDS calls and prints the fastest and the median time of a call, and, of all ranks together,
//! processor time, context switches and page faults of a call. `SPEED_CHUNK_BYTES`, `SPEED_SLOTS` and
//! `SPEED_CHANNELS` override the engine's choices; `SPEED_NODES` is the number of simulated nodes.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{Buffer, Communicator, DType, Endpoint, Options, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(60);
const RUNS: usize = 5;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [ranks, bytes, memory, rounds] = &words[..4] else { unreachable!("collected from four") };
    let (ranks, bytes): (usize, usize) = (ranks.parse().unwrap(), bytes.parse().unwrap());
    let rounds: u32 = rounds.parse().unwrap();
    match words.get(4) {
        Some(rank) => run(rank.parse().unwrap(), ranks, bytes, memory == "registered", rounds),
        None => start(ranks, bytes, memory, rounds, &words),
    }
}

fn start(ranks: usize, bytes: usize, memory: &str, rounds: u32, words: &[String]) {
    let program = std::env::current_exe().unwrap();
    let mut children: Vec<Child> = (0..ranks)
        .map(|rank| {
            let mut command = Command::new(&program);
            command.args(words).arg(rank.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut outputs: Vec<_> =
        children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap())).collect();
    let mut line = || -> Vec<String> {
        let next = outputs.iter_mut().map(|output| {
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            line
        });
        next.collect()
    };
    let infos = line().concat();
    for child in &mut children {
        child.stdin.as_mut().unwrap().write_all(infos.as_bytes()).unwrap();
    }
    let infos = line();
    let mut all: Vec<Vec<f64>> = Vec::new();
    for line in &infos {
        all.push(line.split_whitespace().map(|word| word.parse().unwrap()).collect());
    }
    let slowest = |run: usize| all.iter().map(|rank| rank[run]).fold(0.0, f64::max);
    let mut times: Vec<f64> = (0..RUNS).map(slowest).collect();
    times.sort_by(f64::total_cmp);
    let total = |column: usize| all.iter().map(|rank| rank[RUNS + column]).sum::<f64>();
    println!(
        "{ranks} ranks, {bytes} bytes, {memory}: {:.2} us fastest, {:.2} us median; processors \
         {:.2} us ({:.2} of them system), {:.2} switches, {:.2} of them forced, {:.2} faults; \
         {:.2} sleeps, {:.2} rings ({rounds} calls a run)",
        times[0],
        times[RUNS / 2],
        total(0) + total(1),
        total(1),
        total(2) + total(3),
        total(3),
        total(4),
        total(5),
        total(6),
    );
    children.iter_mut().for_each(|child| drop(child.wait()));
}

fn run(rank: u32, ranks: usize, bytes: usize, registered: bool, rounds: u32) {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let nodes = number("SPEED_NODES").unwrap_or(1);
    let placement = (0..ranks).map(|rank| (format!("n{}", rank * nodes / ranks), "A".to_owned()));
    let mut options = Options::new(rank, placement.collect());
    options.folders = Folders::default();
    options.slot_bytes = number("SPEED_CHUNK_BYTES").unwrap_or(options.slot_bytes);
    options.slots = number("SPEED_SLOTS");
    options.channels = number("SPEED_CHANNELS");
    let endpoint = Endpoint::new(options, &[7; 32]).unwrap();
    println!("{}", String::from_utf8(endpoint.info()).unwrap());
    let mut lines = std::io::stdin().lines();
    let infos: Vec<Vec<u8>> =
        (0..ranks).map(|_| lines.next().unwrap().unwrap().into_bytes()).collect();
    let comm = endpoint.connect(&infos, TIMEOUT).unwrap();
    let block = comm.allocate(bytes).unwrap();
    let mut private = vec![0_u64; bytes.div_ceil(8)];
    let place = if registered { block.base() } else { private.as_mut_ptr().cast() };
    // SAFETY: both hold `bytes` bytes, and no operation is in progress.
    unsafe { place.write_bytes(0, bytes) };
    let call = |comm: &Communicator| {
        // SAFETY: the memory stays until the operation has ended.
        let buffer = unsafe { Buffer::new([(place, bytes)]) };
        let work = comm.allreduce(buffer, DType::F32, ReduceOp::Sum, 0, TIMEOUT, true);
        work.unwrap().wait(None).unwrap();
    };
    (0..rounds.clamp(3, 1000)).for_each(|_| call(&comm));
    let count = |counter: &std::sync::atomic::AtomicU64| {
        counter.load(std::sync::atomic::Ordering::Relaxed) as f64
    };
    let counted = || {
        let counters = comm.counters();
        [&usage()[..], &[count(&counters.sleeps), count(&counters.wakeups)]].concat()
    };
    let before = counted();
    let mut report = String::new();
    for _ in 0..RUNS {
        comm.barrier(TIMEOUT, true).unwrap().wait(None).unwrap();
        let started = Instant::now();
        (0..rounds).for_each(|_| call(&comm));
        report += &format!("{} ", started.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
    }
    let calls = f64::from(rounds) * RUNS as f64;
    for (after, before) in counted().iter().zip(before) {
        report += &format!("{} ", (after - before) / calls);
    }
    println!("{report}");
    std::io::stdout().flush().unwrap();
}

/// Microseconds of user and system time, voluntary and involuntary context switches, page faults.
fn usage() -> [f64; 5] {
    // SAFETY: a struct of numbers, which the kernel fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let micros = |time: libc::timeval| time.tv_sec as f64 * 1e6 + time.tv_usec as f64;
    [
        micros(usage.ru_utime),
        micros(usage.ru_stime),
        usage.ru_nvcsw as f64,
        usage.ru_nivcsw as f64,
        usage.ru_minflt as f64,
    ]
}
