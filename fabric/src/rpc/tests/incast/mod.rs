//! Incast: many services answer few receivers, each behind a link with a finite queue. A
//! deterministic simulation with the product's memory of replies ([`Credits`]) and the window of its
//! client: a read is a permission to send, and a client requests at most a window of bytes from all
//! services.

mod simulation;
mod tcp;

use simulation::{Config, Report, simulate};

const GIGABIT: u64 = 125_000_000;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Seeds of the disks' latencies.
const SEEDS: u64 = 2;

/// 64 services, receivers of 1 Gb/s with a queue of 64 KiB.
fn config(receivers: &[u64], seed: u64) -> Config {
    Config {
        services: 64,
        receivers: receivers.to_vec(),
        queue_bytes: 64 * KIB,
        window_bytes: 32 * MIB,
        operations_max: 64,
        request_bytes: 512 * KIB,
        memory_bytes: 16 * MIB,
        shares: 8,
        disk_us: (1_000, 10_000),
        seconds: 1,
        seed,
    }
}

fn run(name: &str, config: &Config) -> Report {
    let report = simulate(config);
    println!("{name}: {report}");
    report
}

#[test]
fn a_receiver_of_64_services_uses_its_link() {
    for seed in 0..SEEDS {
        let report = run("window", &config(&[GIGABIT], seed));
        assert!(report.goodput(0) >= 0.95 && report.fairness_of_services(0) >= 0.95);
        assert!(report.memory_max <= 2 * MIB, "the window limits what is read ahead of the link");
        let unlimited = Config {
            window_bytes: 1 << 40,
            operations_max: 2_048,
            memory_bytes: 1 << 40,
            ..config(&[GIGABIT], seed)
        };
        let report = run("no window", &unlimited);
        assert!(report.memory_max > 8 * MIB);
        // Enough for the queue and the link, but not for the latency of the disks.
        let small = Config { window_bytes: 512 * KIB, ..config(&[GIGABIT], seed) };
        assert!(run("small window", &small).goodput(0) < 0.9);
    }
}

/// Half of the receivers are slow and keep the memory of their replies for long: they request more
/// than all of it.
#[test]
fn slow_receivers_do_not_slow_down_others() {
    let receivers = [GIGABIT, GIGABIT / 20, GIGABIT, GIGABIT / 20];
    for seed in 0..SEEDS {
        let config = config(&receivers, seed);
        let config = Config { services: 16, memory_bytes: 4 * MIB, shares: 1, ..config };
        let report = run("half slow", &config);
        for receiver in [0, 2] {
            assert!(report.goodput(receiver) >= 0.95);
            assert!(report.fairness_of_services(receiver) >= 0.95);
        }
        assert!(report.fairness_of_receivers(&[0, 2]) >= 0.95);
        assert!(report.memory_max <= 4 * MIB);
    }
}

/// A receiver that stops never returns memory: it keeps at most its share.
#[test]
fn stopped_receivers_do_not_stop_others() {
    let config = config(&[GIGABIT, 1, GIGABIT, 1], 1);
    let config = Config { memory_bytes: 8 * MIB, shares: 4, ..config };
    let report = run("half stopped", &config);
    assert!(report.goodput(0) >= 0.95 && report.goodput(2) >= 0.95);
    assert!(report.memory_max <= 8 * MIB);
}
