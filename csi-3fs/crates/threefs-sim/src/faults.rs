//! What goes wrong in a schedule, and when.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Faults end here, in microseconds of virtual time.
pub const CALM_AT_US: u64 = 700_000;

/// Something goes wrong, or is well again.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The process dies; it comes back after this time.
    Crash { node: usize, back_after_us: u64 },
    /// All processes die at once.
    PowerLoss { back_after_us: u64 },
    /// The dead process starts again.
    Restart { node: usize },
    /// The process is stopped (SIGSTOP).
    Pause { node: usize, for_us: u64 },
    /// It goes on.
    Resume { node: usize },
    /// Messages from one endpoint to another are lost.
    Cut { from: usize, to: usize, for_us: u64 },
    /// An endpoint is cut off from all others.
    Isolate { endpoint: usize, for_us: u64 },
    /// Messages are lost, repeated and delayed at random.
    BadNetwork { loss: f64, repeat: f64, delay: f64, for_us: u64 },
    /// The network is good again.
    GoodNetwork,
    /// A disk answers nothing.
    HangDisk { node: usize, for_us: u64 },
    /// A disk is full.
    FillDisk { node: usize, for_us: u64 },
    /// A disk has room again.
    EmptyDisk { node: usize },
    /// One chunk of one replica is damaged.
    Damage { node: usize, chunk: u32 },
    /// The manager is away.
    ManagerAway { for_us: u64 },
    /// It is back, with what it had decided and nothing that it had heard.
    ManagerBack,
    /// All faults end.
    Calm,
}

/// The faults of a schedule in order. Each schedule has some kinds only, so that deep sequences
/// of one kind happen as well as mixtures.
pub fn plan(
    rng: &mut ChaCha8Rng,
    nodes: usize,
    endpoints: usize,
    chunks: u32,
) -> Vec<(u64, Fault)> {
    let kinds: Vec<u32> = (0..10).filter(|_| rng.random_bool(0.4)).collect();
    let mut plan = Vec::new();
    // Spread over the schedule, or one upon the other.
    let window = match rng.random_bool(0.6) {
        true => 0..CALM_AT_US - 50_000,
        false => {
            let from = rng.random_range(0..CALM_AT_US - 250_000);
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
    plan.push((CALM_AT_US, Fault::Calm));
    plan
}

fn fault(rng: &mut ChaCha8Rng, kind: u32, nodes: usize, endpoints: usize, chunks: u32) -> Fault {
    let node = rng.random_range(0..nodes);
    // Both sides of the failure detector's bound.
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
