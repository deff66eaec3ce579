//! Tests of the determinism guarantees.

use super::*;

#[test]
fn bits_do_not_depend_on_the_order_of_arrival() {
    let mut choice = Seed(7);
    let op = operation(&mut choice, Kind::Allreduce, 20_000, 9);
    for seed in 0..20 {
        let mut sim = Sim::new(plan(9, 4), 1, vec![op.clone()], seed, 4, 8);
        sim.run(None);
        sim.assert_complete();
    }
}

/// Reduces a tensor in one operation, and split over operations of several kinds; returns both
/// results.
fn in_pieces(seed: u64, modes: Determinism, short: bool) -> (Vec<f32>, Vec<f32>) {
    let mut choice = Seed(seed);
    let (nodes, locals) = (2 + choice.below(8), 1 + choice.below(2));
    let (world, zone_a) = (nodes * locals, choice.below(nodes + 1));
    let plan = plan(nodes, zone_a);
    let length = 3000 * world;
    let whole = under(modes, short, operation(&mut choice, Kind::Allreduce, length, world));
    let (mut at, mut ops, mut cuts) = (0, Vec::new(), Vec::new());
    while at < length {
        let kind = [Kind::Allreduce, Kind::Reduce, Kind::ReduceScatter][choice.below(3)];
        let blocks = if kind == Kind::ReduceScatter { world } else { 1 };
        let count = (1 + choice.below(20_000)).min(length - at).div_ceil(blocks);
        let end = (at + count * blocks).min(length);
        let kind = if at + count * blocks > length { Kind::Allreduce } else { kind };
        let count = if kind == Kind::ReduceScatter { count } else { end - at };
        let fingerprint = Fingerprint {
            kind,
            count: count as u64,
            root: choice.below(world) as u32,
            ..whole.fingerprint
        };
        let input = whole.input.iter().map(|input| input[at..end].to_vec()).collect();
        ops.push(Op { fingerprint, input });
        cuts.push((at, count));
        at = end;
    }
    let mut sim = Sim::new(plan.clone(), locals, ops, seed, 3, 6);
    sim.run(None);
    sim.assert_complete();
    let mut pieces = vec![0.0; length];
    for ((op, output), (at, count)) in sim.ops.iter().zip(&sim.output).zip(cuts) {
        for (rank, output) in output.iter().enumerate() {
            match op.fingerprint.kind {
                Kind::ReduceScatter => {
                    pieces[at + rank * count..at + (rank + 1) * count].copy_from_slice(output);
                }
                Kind::Reduce if rank as u32 != op.fingerprint.root => {}
                _ => pieces[at..at + count].copy_from_slice(output),
            }
        }
    }
    let mut sim = Sim::new(plan, locals, vec![whole], seed, 3, 6);
    sim.run(None);
    (std::mem::take(&mut sim.output[0][0]), pieces)
}

#[test]
fn stable_sums_have_the_same_bits_for_any_split() {
    for seed in 0..30 {
        let modes = Determinism { stable: true, wide: seed % 3 == 0 };
        let (whole, pieces) = in_pieces(seed, modes, seed % 2 == 0);
        assert!(whole == pieces, "seed {seed}");
    }
    let other = |seed| {
        let (whole, pieces) = in_pieces(seed, Determinism::DEFAULT, false);
        whole != pieces
    };
    assert!((0..5).any(other), "without the mode the results differ, so the test is sensitive");
}

#[test]
fn a_wide_sum_is_the_exact_tree_of_binary32_rounded_once() {
    let mut differs = false;
    for seed in 0..20 {
        let mut choice = Seed(seed);
        let nodes = 2 + choice.below(8);
        let modes = Determinism { stable: true, wide: true };
        let op = under(modes, true, operation(&mut choice, Kind::Allreduce, 20_000, nodes));
        let mut exact = op.clone();
        exact.fingerprint = Fingerprint { element_bytes: 4, ..op.fingerprint };
        let mut narrow = op.clone();
        narrow.fingerprint.modes.wide = false;
        let outputs = [op, exact, narrow].map(|op| {
            let mut sim = Sim::new(plan(nodes, nodes / 2), 1, vec![op], seed, 2, 4);
            sim.run(None);
            std::mem::take(&mut sim.output[0][0])
        });
        let rounded: Vec<f32> = outputs[1].iter().map(|value| bf16(*value)).collect();
        assert!(outputs[0] == rounded, "seed {seed}");
        differs |= outputs[2] != rounded;
    }
    assert!(differs, "rounding at every node gives another result");
}

#[test]
fn a_sum_in_the_order_of_arrival_is_detected() {
    let mut choice = Seed(7);
    let op = operation(&mut choice, Kind::Allreduce, 20_000, 9);
    let detected = (0..20).any(|seed| {
        let mut sim = Sim::new(plan(9, 4), 1, vec![op.clone()], seed, 4, 8);
        sim.arrival_order = true;
        sim.run(None);
        sim.output[0] != oracle(&sim.plan, 1, &op)
    });
    assert!(detected);
}
