//! Fault plan: the faults of a schedule and their times.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::StoreId;
use threefs_core::replica::Check;

use crate::mutations::Mutation;

/// End of the faults, in microseconds of virtual time.
pub const FAULTS_END_US: u64 = 700_000;

/// Start or end of a fault.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The process crashes, and is restarted after this time; the node keeps running.
    Crash { node: usize, back_after_us: u64 },
    /// The process is asked to shut down: it leaves its chain first.
    Leave { node: usize, back_after_us: u64 },
    /// End of the grace period of a shutdown.
    Left { node: usize, back_after_us: u64 },
    /// The node loses its disk; an empty one replaces it.
    LoseDisk { node: usize, back_after_us: u64 },
    /// A store reports I/O errors.
    FailStore { node: usize, chain: usize, for_us: u64 },
    /// The log of a store is damaged, and the operator can restore it after this time, or never.
    DamageLog { node: usize, chain: usize, back_after_us: Option<u64> },
    /// The log is restored.
    RestoreLog { node: usize, chain: usize, store: StoreId },
    /// A node's clock jumps ahead, as after a suspend.
    Jump { node: usize, by_ms: u64 },
    /// All nodes lose power together.
    PowerLoss { back_after_us: u64 },
    /// The crashed process restarts.
    Restart { node: usize },
    /// The process is stopped, as by SIGSTOP.
    Pause { node: usize, for_us: u64 },
    /// The stopped process continues.
    Resume { node: usize },
    /// Messages from one endpoint to another are lost.
    Cut { from: usize, to: usize, for_us: u64 },
    /// An endpoint is isolated from all others.
    Isolate { endpoint: usize, for_us: u64 },
    /// Messages are lost, repeated and delayed at random.
    BadNetwork { loss: f64, repeat: f64, delay: f64, for_us: u64 },
    /// The network works normally again.
    GoodNetwork,
    /// A disk does not respond.
    HangDisk { node: usize, for_us: u64 },
    /// A disk is full.
    FillDisk { node: usize, for_us: u64 },
    /// A disk has space again.
    EmptyDisk { node: usize },
    /// One chunk of one replica is damaged.
    Damage { node: usize, chunk: u32 },
    /// The manager is unavailable.
    ManagerAway { for_us: u64 },
    /// The manager is back, with its written state and without heartbeats.
    ManagerBack,
    /// A backup of the manager's store is made.
    BackUp,
    /// The manager loses its store, and continues with the backup.
    Restore,
    /// All faults end.
    EndAll,
}

/// The faults of a schedule in order. Each schedule has some kinds only, so that both long
/// sequences of one kind and mixtures occur.
pub fn plan(
    rng: &mut ChaCha8Rng,
    nodes: usize,
    endpoints: usize,
    chunks: u32,
) -> Vec<(u64, Fault)> {
    let kinds: Vec<u32> = (0..10).filter(|_| rng.random_bool(0.4)).collect();
    let mut plan = Vec::new();
    // Spread over the schedule, or concentrated.
    let window = match rng.random_bool(0.6) {
        true => 0..FAULTS_END_US - 50_000,
        false => {
            let from = rng.random_range(0..FAULTS_END_US - 250_000);
            from..from + 200_000
        }
    };
    if !kinds.is_empty() {
        for _ in 0..rng.random_range(1..9) {
            let at = rng.random_range(window.clone());
            let kind = kinds[rng.random_range(0..kinds.len())];
            plan.push((at, fault(rng, kind, nodes, endpoints, chunks)));
        }
    }
    plan.push((FAULTS_END_US, Fault::EndAll));
    plan
}

fn fault(rng: &mut ChaCha8Rng, kind: u32, nodes: usize, endpoints: usize, chunks: u32) -> Fault {
    let node = rng.random_range(0..nodes);
    // Below and above the timeout of the failure detector.
    let long = rng.random_range(1_000..250_000);
    let short = rng.random_range(1_000..60_000);
    match kind {
        0 | 1 => {
            Fault::Crash { node, back_after_us: if rng.random_bool(0.5) { long } else { short } }
        }
        2 => Fault::PowerLoss { back_after_us: short },
        3 => Fault::Pause { node, for_us: long },
        4 => {
            let to = rng.random_range(0..endpoints);
            Fault::Cut { from: node, to, for_us: long }
        }
        5 => Fault::Isolate { endpoint: rng.random_range(0..nodes + 1), for_us: long },
        6 => Fault::BadNetwork {
            loss: rng.random_range(0.0..0.3),
            repeat: rng.random_range(0.0..0.3),
            delay: rng.random_range(0.0..0.5),
            for_us: long * 2,
        },
        7 => Fault::HangDisk { node, for_us: long },
        8 if rng.random_bool(0.5) => Fault::FillDisk { node, for_us: long },
        8 => Fault::Damage { node, chunk: rng.random_range(0..chunks) },
        _ => Fault::ManagerAway { for_us: long },
    }
}

/// Seed of the generator of restores.
const RESTORE_SEED: u64 = 0x7265_7374;

/// A backup of the manager's store, and its restore, in some of the schedules; in half of them with a
/// restart of all nodes.
pub fn restore(seed: u64, mutation: Mutation, nodes: usize) -> Vec<(u64, Fault)> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ RESTORE_SEED);
    let some = rng.random_bool(0.15);
    // A held chain hides other seeded bugs for a while.
    let restores = match mutation {
        Mutation::None => some,
        _ => matches!(mutation, Mutation::TrustBackup | Mutation::TrustFences),
    };
    if !restores {
        return Vec::new();
    }
    let restored_at = rng.random_range(50_000..FAULTS_END_US);
    let backed_up_at = rng.random_range(0..restored_at);
    let mut faults = vec![(backed_up_at, Fault::BackUp), (restored_at, Fault::Restore)];
    if rng.random_bool(0.5) {
        let crash = |node| (restored_at, Fault::Crash { node, back_after_us: 5_000 });
        faults.extend((0..nodes).map(crash));
    }
    faults
}

/// Seed of the generator of these faults.
const MORE_SEED: u64 = 0x6d6f_7265;

/// Faults of whole nodes, in some of the schedules: planned shutdowns, lost disks, clock jumps.
pub fn more(seed: u64, mutation: Mutation, nodes: usize, chains: usize) -> Vec<(u64, Fault)> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ MORE_SEED);
    let mut plan = Vec::new();
    let mut some = |forced: bool, chance: f64, times: usize, fault: fn(usize, u64) -> Fault| {
        let some = rng.random_bool(chance) || forced;
        for _ in 0..if some { rng.random_range(1..=times) } else { 0 } {
            let at = rng.random_range(10_000..FAULTS_END_US - 50_000);
            plan.push((at, fault(rng.random_range(0..nodes), rng.random_range(1_000..150_000))));
        }
    };
    let loses_disk = matches!(mutation, Mutation::TrustAnyStore | Mutation::PromoteEmpty);
    some(mutation == Mutation::ReportLeaveAtOnce, 0.25, 3, |node, time| Fault::Leave {
        node,
        back_after_us: time,
    });
    some(loses_disk, 0.2, 3, |node, time| Fault::LoseDisk { node, back_after_us: time });
    some(false, 0.15, 2, |node, time| Fault::Jump { node, by_ms: time / 500 });
    let crashing = matches!(mutation, Mutation::SkipFlushAtOpen | Mutation::KeepCache);
    some(crashing, 0.1, 3, |node, time| Fault::Crash { node, back_after_us: time / 10 });
    let failing = matches!(mutation, Mutation::KeepClosed | Mutation::KeepCache);
    let damages = matches!(mutation, Mutation::KeepDamaged | Mutation::SetAsideLast);
    for (forced, chance) in [(failing, 0.2), (damages, 0.15)] {
        let times = if rng.random_bool(chance) || forced { rng.random_range(1..=3) } else { 0 };
        for _ in 0..times {
            let at = rng.random_range(10_000..FAULTS_END_US - 50_000);
            let (node, chain) = (rng.random_range(0..nodes), rng.random_range(0..chains));
            let time = rng.random_range(1_000..150_000);
            let back_after_us = rng.random_bool(0.6).then_some(time);
            let fault = match chance > 0.18 {
                true => Fault::FailStore { node, chain, for_us: time },
                false => Fault::DamageLog { node, chain, back_after_us },
            };
            plan.push((at, fault));
        }
    }
    plan.extend(rare(&mut rng, mutation, nodes));
    plan
}

/// Faults in an order without which few of the schedules find a seeded bug.
fn rare(rng: &mut ChaCha8Rng, mutation: Mutation, nodes: usize) -> Vec<(u64, Fault)> {
    let at = rng.random_range(10_000..FAULTS_END_US - 250_000);
    let (node, time) = (rng.random_range(0..nodes), rng.random_range(1_000..100_000));
    match mutation {
        // Killed on all nodes, so that no other replica has flushed it.
        Mutation::SkipFlushAtOpen => {
            let crash = |node| (at, Fault::Crash { node, back_after_us: 5_000 });
            let loss = (at + 5_000 + time, Fault::PowerLoss { back_after_us: 5_000 });
            (0..nodes).map(crash).chain([loss]).collect()
        }
        // The heartbeats of a node are lost, and nothing else.
        Mutation::WholeLease => {
            vec![(at, Fault::Cut { from: node, to: nodes, for_us: 100_000 + time })]
        }
        // A client gets no reply, and after a while there is another head, which answers.
        Mutation::Without(Check::PurgeAge) => {
            let cut = |node| (at, Fault::Cut { from: node, to: nodes + 1, for_us: time + 5_000 });
            let crash = (at + time, Fault::Crash { node: 0, back_after_us: 2_000 });
            (0..nodes).map(cut).chain([crash]).collect()
        }
        _ => Vec::new(),
    }
}
