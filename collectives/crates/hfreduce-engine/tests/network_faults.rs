//! Two ranks with a proxy that drops, repeats, reorders, damages, delays and truncates their frames. Both ranks
//! get the correct sums or, in time, an error that reports the peer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fabric::auth::{CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES};
use hfreduce_engine::flight::Folders;
use hfreduce_engine::{CollectiveError, DType, Endpoint, ErrorKind, Options, ReduceOp, WaitError};
use hfreduce_transport::wire::HEAD_BYTES;
use support::{Calls, KEY, TIMEOUT, buffer, placement};

/// Bytes that the ranks exchange before the first frame.
const FROM_DIALLER: usize = HELLO_BYTES + PROOF_BYTES + 24;
const FROM_ACCEPTOR: usize = CHALLENGE_BYTES + 1;
/// Enough elements for several chunks per operation.
const NUMEL: usize = 60_000;
const OPERATIONS: usize = 6;
const SCENARIOS: usize = 54;

/// A fault that affects one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// The frame does not arrive.
    Drop,
    /// The frame arrives twice.
    Repeat,
    /// The frame arrives after the next one.
    Swap,
    /// One byte of its head is changed.
    Damage(usize, u8),
    /// Sixty-four bytes of noise precede it.
    Noise(u8),
    /// An old frame is repeated before it.
    Replay,
    /// Half of it arrives, then the connection is closed.
    Truncate,
    /// The connection is closed.
    Cut,
    /// Only this direction is closed.
    HalfCut,
    /// No more bytes arrive, and the connection stays open, as with an unplugged cable.
    Freeze,
    /// It arrives byte by byte, slowly.
    Trickle,
}

impl Fault {
    fn of(seed: &mut u64) -> Self {
        let noise = below(seed, 256) as u8;
        match below(seed, 14) {
            0 => Self::Drop,
            1 => Self::Repeat,
            2 => Self::Swap,
            3..=6 => Self::Damage(below(seed, HEAD_BYTES as u64) as usize, noise.max(1)),
            7 => Self::Noise(noise),
            8 => Self::Replay,
            9 => Self::Truncate,
            10 => Self::Cut,
            11 => Self::HalfCut,
            12 => Self::Freeze,
            _ => Self::Trickle,
        }
    }

    /// True if no data is lost.
    fn is_harmless(self) -> bool {
        matches!(self, Self::Nothing | Self::Trickle)
    }
}

/// A small random number generator, so that a scenario is defined by one number.
fn below(seed: &mut u64, bound: u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *seed;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)) % bound
}

/// Forwards one direction, frame by frame, with `fault` at frame `at`.
fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    preface: usize,
    at: usize,
    fault: Fault,
    done: &AtomicBool,
) -> std::io::Result<()> {
    // Byte by byte: the two ranks wait for each other's answers.
    std::io::copy(&mut (&from).take(preface as u64), &mut to)?;
    let mut before: Option<Vec<u8>> = None;
    for number in 0.. {
        let mut frame = vec![0; HEAD_BYTES];
        from.read_exact(&mut frame)?;
        let payload = u32::from_le_bytes([frame[20], frame[21], frame[22], frame[23]]) as usize;
        frame.resize(HEAD_BYTES + payload, 0);
        from.read_exact(&mut frame[HEAD_BYTES..])?;
        let now = if number == at { fault } else { Fault::Nothing };
        done.fetch_or(now != Fault::Nothing, Ordering::Relaxed);
        match now {
            Fault::Nothing => to.write_all(&frame)?,
            Fault::Drop => {}
            Fault::Repeat => {
                to.write_all(&frame)?;
                to.write_all(&frame)?;
            }
            Fault::Swap => {
                let mut next = vec![0; HEAD_BYTES];
                from.read_exact(&mut next)?;
                let payload = u32::from_le_bytes([next[20], next[21], next[22], next[23]]) as usize;
                next.resize(HEAD_BYTES + payload, 0);
                from.read_exact(&mut next[HEAD_BYTES..])?;
                to.write_all(&next)?;
                to.write_all(&frame)?;
            }
            Fault::Damage(place, bits) => {
                let mut damaged = frame.clone();
                damaged[place] ^= bits;
                to.write_all(&damaged)?;
            }
            Fault::Noise(noise) => {
                to.write_all(&[noise; HEAD_BYTES])?;
                to.write_all(&frame)?;
            }
            Fault::Replay => {
                to.write_all(before.as_ref().unwrap_or(&frame))?;
                to.write_all(&frame)?;
            }
            Fault::Truncate => {
                to.write_all(&frame[..frame.len() / 2])?;
                return to.shutdown(Shutdown::Both);
            }
            Fault::Cut => return to.shutdown(Shutdown::Both),
            Fault::HalfCut => return to.shutdown(Shutdown::Write),
            // Continues to read, so that the sender does not notice.
            Fault::Freeze => return std::io::copy(&mut from, &mut std::io::sink()).map(drop),
            Fault::Trickle => {
                to.set_nodelay(true)?;
                for piece in frame.chunks((frame.len() / 40).max(1)) {
                    to.write_all(piece)?;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        before.get_or_insert(frame);
    }
    Ok(())
}

/// Listens in place of rank 1's port, and applies the fault to one of several streams; the threads end with
/// their connections.
fn start_proxy(
    port: u16,
    (streams, proxied): (usize, usize),
    (outward, at, fault): (bool, usize, Fault),
    done: &Arc<AtomicBool>,
) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (own, done) = (listener.local_addr().unwrap().port(), done.clone());
    std::thread::spawn(move || {
        // One tree edge, dialed stream by stream.
        for stream in 0..streams {
            let Ok((dialer, _)) = listener.accept() else { return };
            let acceptor = TcpStream::connect(("127.0.0.1", port)).unwrap();
            for (from, to, preface, is_faulty) in [
                (&dialer, &acceptor, FROM_DIALLER, outward && stream == proxied),
                (&acceptor, &dialer, FROM_ACCEPTOR, !outward && stream == proxied),
            ] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let fault = if is_faulty { fault } else { Fault::Nothing };
                let done = done.clone();
                std::thread::spawn(move || {
                    let end = to.try_clone().unwrap();
                    let _ = pass(from, to, preface, at, fault, &done);
                    if fault != Fault::HalfCut {
                        let _ = end.shutdown(Shutdown::Both);
                    }
                });
            }
        }
    });
    own
}

/// Body of a rank: allreduces until one fails.
fn sums(endpoint: Endpoint, infos: &[Vec<u8>], timeout: Duration) -> Result<(), CollectiveError> {
    let comm = endpoint.connect(infos, timeout * 4)?;
    for operation in 0..OPERATIONS {
        let mut data = vec![(comm.rank() as usize + operation) as f32; NUMEL];
        let work =
            comm.allreduce(buffer(&mut data), DType::F32, ReduceOp::Sum, 0, timeout, true)?;
        match work.wait(None) {
            Ok(()) => {}
            Err(WaitError::Failed(error)) => return Err(error),
            Err(error) => panic!("{error}"),
        }
        let sum = (1 + 2 * operation) as f32;
        assert!(data.iter().all(|value| *value == sum), "wrong sums without an error");
    }
    Ok(())
}

/// Runs one scenario; true if the fault was applied.
fn scenario(number: u64) -> bool {
    let mut seed = number;
    let fault = Fault::of(&mut seed);
    let (outward, at) = (below(&mut seed, 2) == 0, below(&mut seed, 40) as usize);
    let streams = 1 + number as usize % 3;
    let faulty_stream = below(&mut seed, streams as u64) as usize;
    // The first stream carries most of the frames.
    let at = if faulty_stream == 0 { at } else { at / 8 };
    // A harmless fault must not cause a failure, however busy the host is; the others should be short.
    let (timeout, liveness) = match fault.is_harmless() {
        true => (TIMEOUT, TIMEOUT),
        false => (Duration::from_millis(2500), Duration::from_millis(1500)),
    };
    let endpoints: Vec<Endpoint> = (0..2)
        .map(|rank| {
            let mut options = Options::new(rank, placement(2, 1));
            options.folders = Folders::default();
            options.liveness = liveness;
            options.streams = Some(streams);
            Endpoint::new(options, &KEY).unwrap()
        })
        .collect();
    let infos: Vec<Vec<u8>> = endpoints.iter().map(Endpoint::info).collect();
    let mut proxied: serde_json::Value = serde_json::from_slice(&infos[1]).unwrap();
    let port = proxied["port"].as_u64().unwrap() as u16;
    let done = Arc::new(AtomicBool::new(false));
    proxied["port"] =
        start_proxy(port, (streams, faulty_stream), (outward, at, fault), &done).into();
    let proxied = vec![infos[0].clone(), serde_json::to_vec(&proxied).unwrap()];
    let results: Vec<Result<(), CollectiveError>> = std::thread::scope(|scope| {
        let ranks = endpoints.into_iter().zip([&proxied, &infos]);
        let ranks = ranks.map(|(end, infos)| scope.spawn(move || sums(end, infos, timeout)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let what = format!(
        "scenario {number}: {fault:?} at frame {at} of stream {faulty_stream} of {streams}, \
         outward {outward}: {results:?}"
    );
    for (rank, result) in results.iter().enumerate() {
        match result {
            Ok(()) => {}
            Err(error) => {
                assert!(!fault.is_harmless(), "{what}");
                let other = [1 - rank as u32, rank as u32];
                assert!(error.cause.peer.is_some_and(|peer| other.contains(&peer)), "{what}");
                assert!(error.rank == rank as u32 && !error.operation.is_empty(), "{what}");
                let invalid = [ErrorKind::Invalid, ErrorKind::Aborted, ErrorKind::Io];
                assert!(!invalid.contains(&error.cause.kind), "{what}");
            }
        }
    }
    done.load(Ordering::Relaxed)
}

#[test]
fn network_faults_lead_to_correct_sums_or_to_an_error_on_both_ranks() {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= SCENARIOS {
                        return;
                    }
                    done.fetch_add(usize::from(scenario(number as u64)), Ordering::Relaxed);
                }
            });
        }
    });
    let done = done.into_inner();
    assert!(done > SCENARIOS / 2, "{done}: too few faults were applied");
}
