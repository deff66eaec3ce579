//! Cost of the flight recorder: nanoseconds per operation, compared with a 4 KiB allreduce of two ranks.

#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use hfreduce_core::{Fingerprint, Kind};
use hfreduce_engine::flight::{Folders, RankInfo, Recorder};
use hfreduce_engine::{Buffer, Call, DType, Endpoint, Options, ReduceOp};

const ROUNDS: u32 = 5;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    let mut recording: Vec<f64> = (0..ROUNDS).map(|_| record(1_000_000)).collect();
    let mut reducing: Vec<f64> = (0..ROUNDS).map(|_| reduce(20_000)).collect();
    recording.sort_by(f64::total_cmp);
    reducing.sort_by(f64::total_cmp);
    let (record, reduce) = (recording[ROUNDS as usize / 2], reducing[ROUNDS as usize / 2]);
    println!("recorder, an operation of one chunk: {record:.1} ns");
    println!("allreduce, 4 KiB, two ranks of a node: {reduce:.0} ns");
    println!("share: {:.2} %", 100.0 * record / reduce);
}

/// Nanoseconds of all records of one operation with one chunk.
fn record(operations: u64) -> f64 {
    let recorder = Recorder::new(&Folders::from_environment(), &RankInfo::default());
    let fingerprint = Fingerprint {
        kind: Kind::Allreduce,
        dtype: 0,
        element_bytes: 4,
        op: 0,
        root: 0,
        count: 1024,
        shape: 0,
        modes: hfreduce_engine::Determinism::DEFAULT,
    };
    // The engine reads the clock at these points anyway.
    let now = Instant::now();
    for sequence in 0..operations {
        let number = recorder.called(sequence, &fingerprint, 4096, 60_000, now);
        recorder.cut(number, 1);
        recorder.progress(number, 1, 0);
        recorder.progress(number, 1, 1);
        recorder.finished(number, false, now);
    }
    now.elapsed().as_nanos() as f64 / operations as f64
}

/// Nanoseconds of one allreduce.
fn reduce(operations: u32) -> f64 {
    let placement = vec![("n0".to_owned(), "A".to_owned()); 2];
    let endpoints: Vec<Endpoint> = (0..2)
        .map(|rank| Endpoint::new(Options::new(rank, placement.clone()), &[7; 32]).unwrap())
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
    let times: Vec<f64> = std::thread::scope(|scope| {
        let ranks = endpoints.into_iter().map(|endpoint| {
            let infos = &infos;
            scope.spawn(move || {
                let comm = endpoint.connect(infos, TIMEOUT).unwrap();
                let mut data = vec![1.0_f32; 1024];
                let started = Instant::now();
                for _ in 0..operations {
                    // SAFETY: the vector outlives the operation, which is waited for.
                    let buffer = unsafe { Buffer::new([(data.as_mut_ptr().cast(), 4096)]) };
                    let call = Call::new(Kind::Allreduce, DType::F32, TIMEOUT, true);
                    let work = comm.call(Call { input: buffer, op: ReduceOp::Max, ..call });
                    work.unwrap().wait(None).unwrap();
                }
                started.elapsed().as_nanos() as f64 / f64::from(operations)
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    times.into_iter().fold(0.0, f64::max)
}
