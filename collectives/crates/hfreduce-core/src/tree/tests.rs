//! Tests of whole groups of state machines over a simulated network.

mod bits;
mod network;
mod operations;

use hfreduce_plan::{NodePlace, Plan};

use super::*;
use crate::error::ErrorKind;
use crate::{Determinism, Geometry, Kind};
use network::{Seed, Sim, plan};
use operations::{Op, bf16, mixed, operation, oracle, under};

const SLOT_BYTES: usize = 16 << 10;

#[test]
fn every_mix_of_operations_ends_with_the_oracle_s_bits() {
    for seed in 0..150 {
        let mut choice = Seed(seed);
        let nodes = 1 + choice.below(9);
        let locals = 1 + choice.below(2);
        let zone_a = choice.below(nodes + 1);
        let (modes, short) = (Determinism::from_code(choice.below(4) as u8), choice.below(2) == 1);
        let ops = mixed(&mut choice, nodes * locals);
        let ops = ops.into_iter().map(|op| under(modes, short, op)).collect();
        let (credits, window) = (1 + choice.below(4) as u32, 1 + choice.below(6));
        let mut sim = Sim::new(plan(nodes, zone_a), locals, ops, seed, credits, window);
        // Odd seeds use several streams, whose chunks and credits overtake each other.
        sim.streams = 1 + (seed as usize % 2) * choice.below(8);
        sim.run(None);
        sim.assert_complete();
    }
}

/// No frames travel back that could carry credits.
#[test]
fn reductions_to_single_ranks_do_not_starve_each_other() {
    for seed in 0..60 {
        let mut choice = Seed(seed);
        let nodes = 3 + choice.below(6);
        let root = choice.below(nodes) as u32;
        let sequence = |choice: &mut Seed| {
            let count = 1 + choice.below(30_000);
            let mut op = operation(choice, Kind::Reduce, count, nodes);
            op.fingerprint.root = root;
            op
        };
        let ops = (0..6).map(|_| sequence(&mut choice)).collect();
        let mut sim = Sim::new(plan(nodes, nodes), 1, ops, seed, 2 + seed as u32 % 3, 6);
        sim.run(None);
        sim.assert_complete();
    }
}

#[test]
fn every_survivor_reports_the_rank_that_died() {
    for seed in 0..300 {
        let mut choice = Seed(seed);
        let nodes = 2 + choice.below(9);
        let ops = mixed(&mut choice, nodes);
        let zone_a = choice.below(nodes + 1);
        let mut sim = Sim::new(plan(nodes, zone_a), 1, ops, seed, 2, 4);
        let victim = choice.below(nodes);
        let when = choice.below(400);
        sim.run(Some((when, victim)));
        for (at, node) in sim.nodes.iter().enumerate().filter(|(at, _)| *at != victim) {
            let cause = node.cause.as_ref().unwrap_or_else(|| panic!("seed {seed}, node {at}"));
            assert_eq!((cause.kind, cause.peer), (ErrorKind::PeerDied, Some(victim as u32)));
        }
    }
}

#[test]
fn no_rank_waits_after_two_deaths() {
    for seed in 0..100 {
        let mut choice = Seed(seed);
        let nodes = 4 + choice.below(9);
        let ops = mixed(&mut choice, nodes);
        let mut sim = Sim::new(plan(nodes, nodes / 2), 1, ops, seed, 2, 4);
        let (first, other) = (choice.below(nodes), choice.below(nodes));
        sim.kill(other);
        sim.run(Some((choice.below(200), first)));
        for (at, node) in sim.nodes.iter().enumerate().filter(|(_, node)| !node.dead) {
            assert!(node.cause.is_some(), "seed {seed}, node {at}");
        }
    }
}

#[test]
fn a_rank_that_calls_another_operation_is_reported_by_its_neighbors() {
    let plan = plan(2, 1);
    let mut choice = Seed(3);
    let own = operation(&mut choice, Kind::Allreduce, 100, 2).fingerprint;
    let other = Fingerprint { op: 3, ..own };
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 4);
    let head = DataHead {
        sequence: 0,
        chunk: 0,
        tree: 0,
        stage: Stage::Up,
        bytes: 400,
        fingerprint: other,
    };
    // The frame arrives before the operation is started: the mismatch is detected at the start.
    let place = core.place(0, &head).unwrap();
    core.arrived(0, &head, place).unwrap();
    let (link, why) = core.start(0, own).unwrap_err();
    assert_eq!(
        (link, why),
        (0, Violation::Mismatch { sequence: 0, fingerprint: own, peer_fingerprint: other })
    );
    assert!(core.compare(0, other).is_err() && core.compare(0, own).is_ok());
    // The head arrives before the start of the operation, its payload after it.
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 4);
    let place = core.place(0, &head).unwrap();
    core.start(0, own).unwrap();
    let why = core.arrived(0, &head, place).unwrap_err();
    assert_eq!(why, Violation::Mismatch { sequence: 0, fingerprint: own, peer_fingerprint: other });
}

#[test]
fn an_unfinished_operation_is_compared_after_any_number_of_later_operations() {
    let plan = plan(2, 1);
    let own = operation(&mut Seed(3), Kind::Allreduce, 100, 2).fingerprint;
    let other = Fingerprint { op: 3, ..own };
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 4);
    for sequence in 0..OUTSTANDING_MAX as u64 {
        core.start(sequence, own).unwrap();
    }
    let head = DataHead {
        sequence: 0,
        chunk: 0,
        tree: 0,
        stage: Stage::Up,
        bytes: 400,
        fingerprint: other,
    };
    let differs = Violation::Mismatch { sequence: 0, fingerprint: own, peer_fingerprint: other };
    assert_eq!(core.place(0, &head), Err(differs));
    // Older than any outstanding operation: no fingerprint is kept, and the frame is rejected.
    for sequence in OUTSTANDING_MAX as u64..=HISTORY as u64 {
        core.start(sequence, own).unwrap();
    }
    assert!(matches!(core.place(0, &head), Err(Violation::Protocol(_))));
}

#[test]
fn unexpected_frames_are_violations() {
    let plan = plan(2, 1);
    let fingerprint = operation(&mut Seed(3), Kind::Allreduce, 100, 2).fingerprint;
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 2);
    core.start(0, fingerprint).unwrap();
    let chunk = Geometry::new(&fingerprint, 2, SLOT_BYTES).chunk(0);
    core.activate(0, chunk, None).unwrap();
    let good =
        DataHead { sequence: 0, chunk: 0, tree: 0, stage: Stage::Up, bytes: 400, fingerprint };
    assert!(core.place(0, &DataHead { bytes: 404, ..good }).is_err());
    assert!(core.place(0, &DataHead { tree: 1, ..good }).is_err());
    let mut core = TreeCore::new(Flows::new(&plan, 0), (0, 1), 1);
    core.start(0, fingerprint).unwrap();
    assert!(core.place(0, &good).is_ok());
    assert!(core.place(0, &DataHead { sequence: 1, ..good }).is_err(), "no credit");
    assert!(core.credits(0, [1; CLASSES]).is_err(), "nothing was sent");
}
