//! Real processes that are killed and stopped in the middle of operations.
//!
//! The test starts itself again once for each rank (see `a_rank`); words go over pipes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{DType, Endpoint, Options, ReduceOp, WaitError};
use support::{KEY, TIMEOUT, buffer, placement};

const RANK: &str = "HFREDUCE_TEST_RANK";
/// Enough that a signal most often comes while some rank is at the memory of others.
const ELEMENTS: usize = 1_000_000;
/// Of a small operation.
const FEW_ELEMENTS: usize = 1024;
/// Instead of the rank that reduces: none does, the ranks send each other messages.
const MESSAGES: usize = 2;
/// A part of equal length for each of two, three and four ranks.
const MESSAGE_ELEMENTS: usize = 1_200_000;

/// Not a test by itself: what a rank of the tests below does, in a process of its own.
#[test]
fn a_rank() {
    let Ok(spec) = std::env::var(RANK) else { return };
    let numbers: Vec<usize> = spec.split(',').map(|word| word.parse().unwrap()).collect();
    let [rank, nodes, locals, liveness_ms, round, elements] = numbers[..] else { panic!("{spec}") };
    let mut options = Options::new(rank as u32, placement(nodes, locals));
    // Where they share processors and rank 0's memory is its own, they add in turn.
    options.processors = (round == 1).then_some(1);
    options.liveness = Duration::from_millis(liveness_ms as u64);
    options.folders = Folders::default();
    let endpoint = Endpoint::new(options, &KEY).unwrap();
    println!("\n@info {}", String::from_utf8(endpoint.info()).unwrap());
    let mut lines = std::io::stdin().lines();
    let infos: Vec<Vec<u8>> =
        (0..nodes * locals).map(|_| lines.next().unwrap().unwrap().into_bytes()).collect();
    let comm = endpoint.connect(&infos, Duration::from_secs(30)).unwrap();
    // Every other rank's memory is registered: the others of its node read and write it.
    let registered = rank % 2 == round;
    let block = comm.allocate(4 * elements).unwrap();
    let mut private = vec![1.0; elements];
    let data: &mut [f32] = if registered {
        // SAFETY: the block holds so many and nobody else refers to it here.
        unsafe { std::slice::from_raw_parts_mut(block.base().cast(), elements) }
    } else {
        &mut private
    };
    data.fill(1.0);
    let world = nodes * locals;
    let mut sent = vec![1.0; elements];
    let counts = vec![elements / world; world];
    for calls in 0.. {
        // Stopped between two operations, it hears of its own end when it calls the next.
        let called = if round == MESSAGES {
            let (from, to) = (buffer(&mut sent), buffer(data));
            comm.alltoall(from, to, &counts, &counts, DType::F32, TIMEOUT, true)
        } else {
            comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
        };
        if let Err(error) = called.map_err(WaitError::Failed).and_then(|work| work.wait(None)) {
            let cause = comm.error().unwrap().cause;
            data.fill(rank as f32);
            println!("\n@failed {} {}", cause.kind.word(), cause.peer.map_or(-1, i64::from));
            eprintln!("rank {rank}: {error}");
            // Asked again when whoever stood still has gone on.
            if lines.next().is_some() {
                println!("\n@whole {}", data.iter().all(|value| *value == rank as f32));
            }
            return;
        }
        data.fill(1.0);
        if calls == 3 {
            let staged = comm.counters().staged_bytes.load(Ordering::Relaxed);
            assert_eq!(staged > 0, round == MESSAGES && locals > 1);
            let ring = comm.counters().ring_bytes.load(Ordering::Relaxed);
            assert_eq!(ring > 0, round == 1 && elements == ELEMENTS);
            if std::env::var_os(FORKS).is_some() {
                live_on_in_a_child();
            }
            println!("\n@running");
        }
    }
}

/// Set for ranks that fork a child, as data loaders do.
const FORKS: &str = "HFREDUCE_TEST_FORKS";

/// A forked child that outlives this process: for a minute, as no test waits for it.
fn live_on_in_a_child() {
    // SAFETY: the child calls only what is async-signal-safe, and ends by a signal.
    unsafe {
        if libc::fork() == 0 {
            libc::alarm(60);
            loop {
                libc::pause();
            }
        }
    }
}

/// Who of a node adds.
#[derive(Clone, Copy)]
enum Sum {
    Owned,
    Round,
    /// Whoever contributes last, where they share a processor.
    Small,
    /// As [`Sum::Owned`], by ranks that have a living forked child each.
    Forked,
    /// No rank reduces: long messages, through the node's memory where it is one node.
    Messages,
}

/// Nodes, and ranks on each.
type Shape = (usize, usize);

struct Rank {
    process: Child,
    input: ChildStdin,
    words: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, (nodes, locals): Shape, liveness_ms: u64, what: Sum) -> Self {
        let (round, elements) = match what {
            Sum::Owned | Sum::Forked => (0, ELEMENTS),
            Sum::Round => (1, ELEMENTS),
            Sum::Small => (1, FEW_ELEMENTS),
            Sum::Messages => (MESSAGES, MESSAGE_ELEMENTS),
        };
        let mut command = Command::new(std::env::current_exe().unwrap());
        if matches!(what, Sum::Forked) {
            command.env(FORKS, "1");
        }
        let mut process = command
            .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, format!("{rank},{nodes},{locals},{liveness_ms},{round},{elements}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (send, words) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok).filter(|line| line.starts_with('@')) {
                let _ = send.send(line);
            }
        });
        Self { process, input, words }
    }

    fn word(&self, what: &str) -> String {
        let line = self.words.recv_timeout(Duration::from_secs(40)).expect("a rank says nothing");
        line.strip_prefix(what).unwrap_or_else(|| panic!("{line} instead of {what}")).trim().into()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends `signal` to `victim` in the middle of operations; all others must name it in time.
fn survivors_name(
    shape: Shape,
    (victim, what): (usize, Sum),
    signal: i32,
    kind: &str,
    (liveness_ms, within): (u64, Duration),
) {
    let (nodes, locals) = shape;
    let mut ranks: Vec<Rank> =
        (0..nodes * locals).map(|rank| Rank::start(rank, shape, liveness_ms, what)).collect();
    let infos: Vec<String> = ranks.iter().map(|rank| rank.word("@info")).collect();
    for rank in &mut ranks {
        for info in &infos {
            writeln!(rank.input, "{info}").unwrap();
        }
        rank.input.flush().unwrap();
    }
    for rank in &ranks {
        rank.word("@running");
    }
    let signalled = Instant::now();
    ranks[victim].signal(signal);
    for (at, rank) in ranks.iter().enumerate().filter(|(at, _)| *at != victim) {
        assert_eq!(
            rank.word("@failed"),
            format!("{kind} {victim}"),
            "rank {at} of {nodes}x{locals}"
        );
    }
    let took = signalled.elapsed();
    assert!(took < within, "{took:?} from the signal to the last survivor's error");
    if signal == libc::SIGSTOP {
        // What it was in the middle of goes on, and reaches nobody's memory any more.
        ranks[victim].signal(libc::SIGCONT);
        assert_eq!(ranks[victim].word("@failed"), format!("{kind} {victim}"));
        for (at, rank) in ranks.iter_mut().enumerate() {
            writeln!(rank.input, "whole?").unwrap();
            rank.input.flush().unwrap();
            assert_eq!(rank.word("@whole"), "true", "rank {at} of {nodes}x{locals}");
        }
    }
}

#[test]
fn a_killed_rank_is_named_at_once_by_every_survivor() {
    // Leaders, members, interior nodes and leaves.
    for (shape, victim) in
        [((1, 2), 0), ((1, 3), 1), ((2, 1), 1), ((2, 2), 0), ((2, 2), 3), ((4, 1), 2), ((3, 2), 1)]
    {
        let limits = (240_000, Duration::from_secs(60));
        survivors_name(shape, (victim, Sum::Owned), libc::SIGKILL, "peer_died", limits);
    }
}

#[test]
fn a_killed_rank_whose_forked_child_lives_is_named_at_once_too() {
    for (shape, victim) in [((2, 1), 1), ((3, 1), 0)] {
        let limits = (240_000, Duration::from_secs(60));
        survivors_name(shape, (victim, Sum::Forked), libc::SIGKILL, "peer_died", limits);
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_liveness_time() {
    for (shape, victim) in [((1, 2), 1), ((1, 3), 0), ((2, 2), 0), ((2, 2), 3), ((3, 1), 1)] {
        // Far longer than a busy host keeps a process from running.
        let limits = (6000, Duration::from_secs(60));
        survivors_name(shape, (victim, Sum::Owned), libc::SIGSTOP, "peer_stalled", limits);
    }
}

#[test]
fn who_ends_or_stops_while_a_sum_goes_round_is_named() {
    for victim in 0..3 {
        let limits = (240_000, Duration::from_secs(60));
        survivors_name((1, 3), (victim, Sum::Round), libc::SIGKILL, "peer_died", limits);
    }
    let limits = (6000, Duration::from_secs(60));
    survivors_name((1, 3), (1, Sum::Round), libc::SIGSTOP, "peer_stalled", limits);
}

#[test]
fn who_ends_or_stops_among_small_operations_is_named() {
    for victim in 0..3 {
        let limits = (240_000, Duration::from_secs(60));
        survivors_name((1, 3), (victim, Sum::Small), libc::SIGKILL, "peer_died", limits);
    }
    let limits = (6000, Duration::from_secs(60));
    for victim in 0..2 {
        survivors_name((1, 3), (victim, Sum::Small), libc::SIGSTOP, "peer_stalled", limits);
    }
}

#[test]
fn who_ends_or_stops_among_long_messages_is_named() {
    for (shape, victim) in [((1, 2), 0), ((1, 3), 1), ((2, 2), 3)] {
        let limits = (240_000, Duration::from_secs(60));
        survivors_name(shape, (victim, Sum::Messages), libc::SIGKILL, "peer_died", limits);
    }
    for (shape, victim) in [((1, 2), 1), ((1, 3), 0), ((2, 2), 1)] {
        let limits = (6000, Duration::from_secs(60));
        survivors_name(shape, (victim, Sum::Messages), libc::SIGSTOP, "peer_stalled", limits);
    }
}
