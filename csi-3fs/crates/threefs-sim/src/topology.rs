//! Topology of a schedule's cluster: the number of chains, their order over the nodes, and the
//! budgets of the nodes' ports.

use fabric::rpc::Budget;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::{ChainId, ChunkId, NodeId, TargetId};
use threefs_core::routing::Chain;
use threefs_storage::admission;

use crate::mutations::Mutation;

/// Seed of the generator of topologies.
const SEED: u64 = 0x7368_6170;
/// Maximum number of nodes.
const NODES_MAX: usize = 8;

/// A target: the replica of a chain on a node, both as indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub node: usize,
    pub chain: usize,
}

impl At {
    /// Its id.
    pub(crate) fn target(self) -> TargetId {
        TargetId((self.chain * NODES_MAX + self.node) as u64 + 1)
    }

    /// The target with this id.
    pub(crate) fn of(target: TargetId) -> Self {
        let number = target.0 as usize - 1;
        Self { node: number % NODES_MAX, chain: number / NODES_MAX }
    }
}

/// The id of a chain.
pub(crate) fn chain_id(chain: usize) -> ChainId {
    ChainId(chain as u32 + 1)
}

/// Topology of the simulated cluster.
#[derive(Debug)]
pub(crate) struct Topology {
    /// Number of chains.
    pub chains: usize,
    /// Budgets of each port; `None` = unlimited.
    pub budgets: Option<Vec<Budget>>,
    rng: ChaCha8Rng,
}

impl Topology {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SEED);
        let several = rng.random_bool(0.4) || mutation.needs_budgets();
        let chains = if several { rng.random_range(2..=3) } else { 1 };
        let bounded = rng.random_bool(0.5) || mutation.needs_budgets();
        let (calls_max, part) = (rng.random_range(1..=3), [1, 2, 6][rng.random_range(0..3)]);
        // At least as many updates as forwards.
        let updates_max = calls_max * [1, 3][rng.random_range(0..2)];
        let budgets = bounded.then(|| {
            // The product's memory shares; payloads have a few bytes here.
            let budgets = admission::budgets(admission::PARTS * part);
            let calls_max = [updates_max].into_iter().chain(std::iter::repeat(calls_max));
            let bounded = budgets.into_iter().zip(calls_max);
            bounded.map(|(budget, calls_max)| Budget { calls_max, ..budget }).collect()
        });
        Self { chains, budgets, rng }
    }

    /// Creates the chains over the first `members` nodes: the first in node order, the others in
    /// random order.
    pub(crate) fn make_chains(&mut self, members: usize) -> Vec<Chain> {
        let mut order: Vec<usize> = (0..members).collect();
        let chain = |chain: usize| {
            if chain > 0 {
                order.shuffle(&mut self.rng);
            }
            let place = |&node: &usize| (At { node, chain }.target(), NodeId(node as u32));
            Chain::create(chain_id(chain), &order.iter().map(place).collect::<Vec<_>>())
        };
        (0..self.chains).map(chain).collect()
    }

    /// The chain that holds a chunk.
    pub(crate) fn chain_of(&self, chunk: ChunkId) -> usize {
        chunk.index as usize % self.chains
    }
}
