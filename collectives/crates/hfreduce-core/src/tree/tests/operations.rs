//! Operations on fp32 or bf16, and their expected results: the same sums, computed serially.

use super::*;

#[derive(Clone)]
pub struct Op {
    pub fingerprint: Fingerprint,
    /// Per rank; the result replaces it (allgather and reduce_scatter use `output`).
    pub input: Vec<Vec<f32>>,
}

impl Op {
    pub fn element_bytes(&self) -> usize {
        usize::from(self.fingerprint.element_bytes)
    }

    /// Rounds a sum as a node writes it: elements of two bytes are bf16, rounded unless they are
    /// wide.
    pub fn rounded(&self, mut sum: Vec<f32>, is_root: bool) -> Vec<f32> {
        if self.element_bytes() == 2 && (is_root || !self.fingerprint.modes.wide) {
            sum.iter_mut().for_each(|value| *value = bf16(*value));
        }
        sum
    }
}

/// The nearest bf16, ties to even.
pub fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

pub fn operation(seed: &mut Seed, kind: Kind, count: usize, world: usize) -> Op {
    let root = seed.below(world) as u32;
    let length = if kind == Kind::ReduceScatter { count * world } else { count };
    // Magnitudes that round: a sum in another order has other bits.
    let input = (0..world)
        .map(|_| {
            (0..length)
                .map(|_| {
                    (seed.below(2_000_001) as f32 - 1e6) * 10f32.powi(seed.below(9) as i32 - 4)
                })
                .collect()
        })
        .collect();
    let fingerprint = Fingerprint {
        kind,
        dtype: 0,
        element_bytes: 4,
        op: 0,
        root,
        count: count as u64,
        shape: 0,
        modes: Determinism::DEFAULT,
    };
    Op { fingerprint, input }
}

/// The same operation on bf16 or fp32, under these modes.
pub fn under(modes: Determinism, short: bool, mut op: Op) -> Op {
    let modes = Determinism { wide: modes.wide && short, ..modes };
    let modes = if op.fingerprint.kind.reduces() { modes } else { Determinism::DEFAULT };
    let element_bytes = if short { 2 } else { 4 };
    op.fingerprint = Fingerprint { modes, element_bytes, ..op.fingerprint };
    if short {
        op.input.iter_mut().flatten().for_each(|value| *value = bf16(*value));
    }
    op
}

pub fn mixed(seed: &mut Seed, world: usize) -> Vec<Op> {
    const KINDS: [Kind; 6] = [
        Kind::Allreduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Allgather,
        Kind::ReduceScatter,
        Kind::Barrier,
    ];
    (0..3 + seed.below(4))
        .map(|_| {
            let kind = KINDS[seed.below(KINDS.len())];
            let count = match kind {
                Kind::Barrier => 0,
                Kind::Allgather | Kind::ReduceScatter => seed.below(9000),
                _ => seed.below(40_000),
            };
            operation(seed, kind, count, world)
        })
        .collect()
}

/// The expected results: the same sums, computed serially in the order of the plan.
pub fn oracle(plan: &Plan, locals: usize, op: &Op) -> Vec<Vec<f32>> {
    let world = plan.nodes().len() * locals;
    let geometry = Geometry::new(&op.fingerprint, world, SLOT_BYTES);
    let mut output = match op.fingerprint.kind {
        Kind::Allgather => vec![vec![0.0; op.fingerprint.count as usize * world]; world],
        Kind::ReduceScatter => vec![vec![0.0; op.fingerprint.count as usize]; world],
        _ => op.input.clone(),
    };
    for index in 0..geometry.chunks() {
        let chunk = geometry.chunk(index);
        let from = chunk.input_offset / op.element_bytes();
        let count = chunk.bytes / op.element_bytes();
        let cut = |rank: usize| op.input[rank][from..from + count].to_vec();
        let root = chunk.rooted_at(chunk.root().map(|rank| rank as usize / locals));
        let result = match chunk.source.single() {
            Some(rank) => cut(rank as usize),
            None => {
                let top = root.unwrap_or(plan.trees()[chunk.tree].root);
                subtree(plan, (chunk.tree, root), top, locals, op, &cut)
            }
        };
        let at = chunk.output_offset / op.element_bytes();
        for (rank, output) in output.iter_mut().enumerate() {
            if chunk.sink.includes(rank as u32) {
                output[at..at + result.len()].copy_from_slice(&result);
            }
        }
    }
    output
}

fn subtree(
    plan: &Plan,
    (tree, root): (usize, Option<usize>),
    node: usize,
    locals: usize,
    op: &Op,
    cut: &dyn Fn(usize) -> Vec<f32>,
) -> Vec<f32> {
    let flows = Flows::new(plan, node);
    let mut sum = cut(node * locals);
    let other_nodes = (node * locals + 1..(node + 1) * locals).map(cut);
    let partials = flows
        .flow(tree, root)
        .away
        .iter()
        .map(|link| subtree(plan, (tree, root), flows.peers()[*link], locals, op, cut));
    for other in other_nodes.chain(partials) {
        sum.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
    }
    op.rounded(sum, flows.is_root(tree, root))
}
