//! The shape of a schedule's cluster: how many chains there are, in which order each goes over the
//! nodes, and what the nodes' ports let in.

use fabric::rpc::Budget;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::{ChainId, ChunkId, NodeId, TargetId};
use threefs_core::routing::Chain;
use threefs_storage::admission;

use crate::mutations::Mutation;

/// Separates its random numbers from those of everything else.
const SEED: u64 = 0x7368_6170;
/// Nodes of one cluster, at most.
const NODES_MAX: usize = 8;

/// One target: the replica of a chain on a node, both as indices.
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

    /// The one with this id.
    pub(crate) fn of(target: TargetId) -> Self {
        let number = target.0 as usize - 1;
        Self { node: number % NODES_MAX, chain: number / NODES_MAX }
    }
}

/// The id of a chain.
pub(crate) fn chain_id(chain: usize) -> ChainId {
    ChainId(chain as u32 + 1)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Topology {
    /// How many chains.
    pub chains: usize,
    /// What each port lets in; `None` = everything.
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
        // More updates than forwards, or as many.
        let updates_max = calls_max * [1, 3][rng.random_range(0..2)];
        let budgets = bounded.then(|| {
            // The product's shares of the memory; payloads are a few bytes here.
            let budgets = admission::budgets(admission::PARTS * part);
            let calls_max = [updates_max].into_iter().chain(std::iter::repeat(calls_max));
            let bounded = budgets.into_iter().zip(calls_max);
            bounded.map(|(budget, calls_max)| Budget { calls_max, ..budget }).collect()
        });
        Self { chains, budgets, rng }
    }

    /// The chains over the first `members` nodes: the first in the order of the nodes, each other
    /// one in an order of its own.
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
