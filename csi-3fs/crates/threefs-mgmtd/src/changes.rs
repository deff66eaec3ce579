//! Changes of the stored state that a scan or an operator decides.

use threefs_core::chain::Reason;
use threefs_core::ids::{ChainId, StoreId, TargetId};
use threefs_core::routing::{Chain, Move};

/// Result of a scan.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub chains: Vec<Chain>,
    pub reasons: Vec<Reason>,
    /// Moves that end.
    pub ended_moves: Vec<Move>,
    /// Targets that serve with another store than the recorded one.
    pub stores: Vec<(TargetId, StoreId)>,
    /// Held chains of which a newer state is known.
    pub learned: Vec<Chain>,
    /// Held chains that are confirmed or promoted.
    pub released: Vec<ChainId>,
    /// Chains with a move that has ended in a lost store.
    pub dropped_moves: Vec<ChainId>,
}

impl Changes {
    /// A target leads its chain by decision of an operator.
    pub(crate) fn promotion(chain: Chain, target: TargetId, store: StoreId) -> Self {
        let (released, stores) = (vec![chain.id], vec![(target, store)]);
        Self { chains: vec![chain], stores, released, ..Self::default() }
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.stores.is_empty()
    }
}
