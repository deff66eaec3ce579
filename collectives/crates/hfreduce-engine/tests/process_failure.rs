//! Real processes that are killed or stopped in the middle of operations.
//!
//! The test starts itself once for each rank (see `a_rank`); the processes exchange lines over pipes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use hfreduce_engine::flight::Folders;
use hfreduce_engine::{DType, Endpoint, Options, ReduceOp, WaitError};
use support::{Calls, KEY, TIMEOUT, buffer, placement};

const RANK: &str = "HFREDUCE_TEST_RANK";
/// Enough elements that a signal most often arrives while a rank accesses the memory of others.
const ELEMENTS: usize = 1_000_000;
/// Elements of a small operation.
const FEW_ELEMENTS: usize = 1024;
/// Value in the place of the rank that reduces: no rank does, the ranks exchange messages.
const MESSAGES: usize = 2;
/// Divisible into parts of equal length for two, three and four ranks.
const MESSAGE_ELEMENTS: usize = 1_200_000;

/// Not a test by itself: the body of a rank of the tests below, which is a separate process.
#[test]
fn a_rank() {
    let Ok(spec) = std::env::var(RANK) else { return };
    let numbers: Vec<usize> = spec.split(',').map(|word| word.parse().unwrap()).collect();
    let [rank, nodes, locals, liveness_ms, round, elements] = numbers[..] else { panic!("{spec}") };
    let mut options = Options::new(rank as u32, placement(nodes, locals));
    // With one processor, and private memory on rank 0, the ranks use ring accumulation.
    options.processors = (round == 1).then_some(1);
    options.liveness = Duration::from_millis(liveness_ms as u64);
    options.folders = Folders::default();
    let endpoint = Endpoint::new(options, &KEY).unwrap();
    println!("\n@info {}", String::from_utf8(endpoint.info()).unwrap());
    let mut lines = std::io::stdin().lines();
    let infos: Vec<Vec<u8>> =
        (0..nodes * locals).map(|_| lines.next().unwrap().unwrap().into_bytes()).collect();
    let comm = endpoint.connect(&infos, Duration::from_secs(30)).unwrap();
    // Every second rank registers its memory: the other ranks of its node read and write it.
    let registered = rank % 2 == round;
    let block = comm.allocate(4 * elements).unwrap();
    let mut private = vec![1.0; elements];
    let data: &mut [f32] = if registered {
        // SAFETY: the block holds that many elements and no other reference to it exists.
        unsafe { std::slice::from_raw_parts_mut(block.base().cast(), elements) }
    } else {
        &mut private
    };
    data.fill(1.0);
    let world = nodes * locals;
    let mut outgoing = vec![1.0; elements];
    let counts = vec![elements / world; world];
    for calls in 0.. {
        // A rank that was stopped between two operations gets its failure from its next call.
        let work = if round == MESSAGES {
            let (from, to) = (buffer(&mut outgoing), buffer(data));
            comm.alltoall(from, to, &counts, &counts, DType::F32, TIMEOUT, true)
        } else {
            comm.allreduce(buffer(data), DType::F32, ReduceOp::Sum, 0, TIMEOUT, true)
        };
        if let Err(error) = work.map_err(WaitError::Failed).and_then(|work| work.wait(None)) {
            let cause = comm.error().unwrap().cause;
            data.fill(rank as f32);
            println!("\n@failed {} {}", cause.kind.name(), cause.peer.map_or(-1, i64::from));
            eprintln!("rank {rank}: {error}");
            // Requested once a stopped rank has resumed.
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
                fork_a_living_child();
            }
            println!("\n@running");
        }
    }
}

/// Set for ranks that fork a child, as data loaders do.
const FORKS: &str = "HFREDUCE_TEST_FORKS";

/// Forks a child that outlives this process for a minute; no test waits for it.
fn fork_a_living_child() {
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

/// How the ranks of a node reduce.
#[derive(Clone, Copy)]
enum Sum {
    Owned,
    Ring,
    /// Last arriver, on a shared processor.
    Small,
    /// As [`Sum::Owned`], by ranks that each have a running forked child.
    Forked,
    /// No rank reduces: long messages, through the node's memory if there is one node.
    Messages,
}

/// Nodes, and ranks on each.
type Shape = (usize, usize);

struct Rank {
    process: Child,
    input: ChildStdin,
    lines_received: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, (nodes, locals): Shape, liveness_ms: u64, what: Sum) -> Self {
        let (round, elements) = match what {
            Sum::Owned | Sum::Forked => (0, ELEMENTS),
            Sum::Ring => (1, ELEMENTS),
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
        let (send, lines_received) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok).filter(|line| line.starts_with('@')) {
                let _ = send.send(line);
            }
        });
        Self { process, input, lines_received }
    }

    fn line(&self, what: &str) -> String {
        let line =
            self.lines_received.recv_timeout(Duration::from_secs(40)).expect("no line from a rank");
        line.strip_prefix(what).unwrap_or_else(|| panic!("{line} instead of {what}")).trim().into()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of this process that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends `signal` to `victim` in the middle of operations; all others must report it in time.
fn survivors_report(
    shape: Shape,
    (victim, what): (usize, Sum),
    signal: i32,
    kind: &str,
    (liveness_ms, within): (u64, Duration),
) {
    let (nodes, locals) = shape;
    let mut ranks: Vec<Rank> =
        (0..nodes * locals).map(|rank| Rank::start(rank, shape, liveness_ms, what)).collect();
    let infos: Vec<String> = ranks.iter().map(|rank| rank.line("@info")).collect();
    for rank in &mut ranks {
        for info in &infos {
            writeln!(rank.input, "{info}").unwrap();
        }
        rank.input.flush().unwrap();
    }
    for rank in &ranks {
        rank.line("@running");
    }
    let signalled = Instant::now();
    ranks[victim].signal(signal);
    for (at, rank) in ranks.iter().enumerate().filter(|(at, _)| *at != victim) {
        assert_eq!(
            rank.line("@failed"),
            format!("{kind} {victim}"),
            "rank {at} of {nodes}x{locals}"
        );
    }
    let took = signalled.elapsed();
    assert!(took < within, "{took:?} from the signal to the last survivor's error");
    if signal == libc::SIGSTOP {
        // A resumed rank reports the failure too and does not write to other ranks' memory.
        ranks[victim].signal(libc::SIGCONT);
        assert_eq!(ranks[victim].line("@failed"), format!("{kind} {victim}"));
        for (at, rank) in ranks.iter_mut().enumerate() {
            writeln!(rank.input, "whole?").unwrap();
            rank.input.flush().unwrap();
            assert_eq!(rank.line("@whole"), "true", "rank {at} of {nodes}x{locals}");
        }
    }
}

#[test]
fn every_survivor_reports_a_killed_rank_immediately() {
    // Owners, other ranks, interior nodes and leaves.
    for (shape, victim) in
        [((1, 2), 0), ((1, 3), 1), ((2, 1), 1), ((2, 2), 0), ((2, 2), 3), ((4, 1), 2), ((3, 2), 1)]
    {
        let limits = (240_000, Duration::from_secs(60));
        survivors_report(shape, (victim, Sum::Owned), libc::SIGKILL, "peer_died", limits);
    }
}

#[test]
fn a_killed_rank_with_a_living_forked_child_is_reported_immediately() {
    for (shape, victim) in [((2, 1), 1), ((3, 1), 0)] {
        let limits = (240_000, Duration::from_secs(60));
        survivors_report(shape, (victim, Sum::Forked), libc::SIGKILL, "peer_died", limits);
    }
}

#[test]
fn a_stopped_rank_is_reported_after_the_liveness_timeout() {
    for (shape, victim) in [((1, 2), 1), ((1, 3), 0), ((2, 2), 0), ((2, 2), 3), ((3, 1), 1)] {
        // Far longer than a busy host keeps a process from running.
        let limits = (6000, Duration::from_secs(60));
        survivors_report(shape, (victim, Sum::Owned), libc::SIGSTOP, "peer_stalled", limits);
    }
}

#[test]
fn a_killed_or_stopped_rank_is_reported_during_ring_accumulation() {
    for victim in 0..3 {
        let limits = (240_000, Duration::from_secs(60));
        survivors_report((1, 3), (victim, Sum::Ring), libc::SIGKILL, "peer_died", limits);
    }
    let limits = (6000, Duration::from_secs(60));
    survivors_report((1, 3), (1, Sum::Ring), libc::SIGSTOP, "peer_stalled", limits);
}

#[test]
fn a_killed_or_stopped_rank_is_reported_during_small_operations() {
    for victim in 0..3 {
        let limits = (240_000, Duration::from_secs(60));
        survivors_report((1, 3), (victim, Sum::Small), libc::SIGKILL, "peer_died", limits);
    }
    let limits = (6000, Duration::from_secs(60));
    for victim in 0..2 {
        survivors_report((1, 3), (victim, Sum::Small), libc::SIGSTOP, "peer_stalled", limits);
    }
}

#[test]
fn a_killed_or_stopped_rank_is_reported_during_long_messages() {
    for (shape, victim) in [((1, 2), 0), ((1, 3), 1), ((2, 2), 3)] {
        let limits = (240_000, Duration::from_secs(60));
        survivors_report(shape, (victim, Sum::Messages), libc::SIGKILL, "peer_died", limits);
    }
    for (shape, victim) in [((1, 2), 1), ((1, 3), 0), ((2, 2), 1)] {
        let limits = (6000, Duration::from_secs(60));
        survivors_report(shape, (victim, Sum::Messages), libc::SIGSTOP, "peer_stalled", limits);
    }
}
