//! The operator: promotes another target if the last serving stores of a chain are permanently
//! lost.

use rand::Rng;
use threefs_core::ids::ChunkId;
use threefs_core::membership::Unproven;
use threefs_core::routing::{ChainTarget, PublicState};

use super::{INODE, SimEvent, Simulation, Violation};
use crate::store::{Log, Store};
use crate::topology::{At, chain_id};

/// Interval between checks by the operator.
const OPERATOR_INTERVAL_US: u64 = 30_000;

impl Simulation {
    pub(super) fn run_operator(&mut self) -> Result<(), Violation> {
        self.push(OPERATOR_INTERVAL_US, SimEvent::Operator);
        if self.manager_is_away() {
            return Ok(());
        }
        for chain in 0..self.topology.chains {
            if let Some(at) = self.target_to_promote(chain) {
                self.promote(at)?;
            }
        }
        Ok(())
    }

    /// Any target with an open store: mgmtd refuses those that must not lead.
    fn target_to_promote(&mut self, chain: usize) -> Option<At> {
        if self.manager.is_held(chain_id(chain)) && !self.is_hopeless(chain) {
            return None;
        }
        let published = self.manager.chain(chain_id(chain))?;
        let last = |state| state == PublicState::LastSrv;
        let mut served_last = published.targets.iter().filter(|place| last(place.state));
        let all_lost = served_last.all(|place| self.is_lost(At::of(place.target)));
        if published.head().is_some() || !all_lost {
            return None;
        }
        let candidates = published.targets.iter().filter(|place| !last(place.state));
        let candidates: Vec<At> = candidates
            .map(|place| At::of(place.target))
            .filter(|at| self.hosted(*at).replica.is_some())
            .collect();
        (!candidates.is_empty()).then(|| candidates[self.moves.random_range(0..candidates.len())])
    }

    /// Whether a held chain is never confirmed: stores with its data or with a membership record are
    /// lost.
    fn is_hopeless(&self, chain: usize) -> bool {
        let has_record = |place: &ChainTarget| {
            let store = &self.hosted(At::of(place.target)).store;
            store.record.is_some() && store.log != Log::Destroyed
        };
        match self.manager.unproven(chain_id(chain)) {
            Some(Unproven::NoRecord(places)) => !places.iter().all(has_record),
            unproven => unproven.is_some(),
        }
    }

    fn promote(&mut self, at: At) -> Result<(), Violation> {
        let before = self.manager.routing();
        let empties = self.manager.would_empty_others(at.target());
        if let Err(error) = self.manager.promote(at.target(), self.manager_now()) {
            self.note(|| format!("NOT PROMOTED: {error}"));
            self.replace_destroyed(at.chain);
            return Ok(());
        }
        self.note(|| format!("PROMOTED {}", self.name(at)));
        if empties {
            let violation = format!("{} was promoted with an empty store", self.name(at));
            return Err(self.violation(violation));
        }
        self.decided(&before);
        // Only the data that no other store has is lost.
        let chunks = (0..self.chunks).map(|index| ChunkId::new(INODE, index));
        let chunks: Vec<ChunkId> = chunks.chain(super::gc::removed_chunks()).collect();
        let of_chain = chunks.into_iter().filter(|it| self.topology.chain_of(*it) == at.chain);
        let slots = self.nodes[at.node].targets[at.chain].store.slots();
        let checked = self.history.promoted(self.now, of_chain, slots);
        checked.map_err(|violation| self.violation(violation))?;
        self.repair_all();
        self.forget_again(at.chain);
        self.promotions += 1;
        if let Some(chain) = self.manager.chain(chain_id(at.chain)) {
            self.promoted.insert(at.chain, chain.version);
        }
        Ok(())
    }

    /// Replaces destroyed stores: mgmtd may refuse to promote an empty store because the content of
    /// stores that are not open is unknown.
    fn replace_destroyed(&mut self, chain: usize) {
        for at in (0..self.nodes.len()).map(|node| At { node, chain }) {
            if self.hosted(at).store.log == Log::Destroyed && self.hosted(at).replica.is_none() {
                let id = self.new_store_id();
                self.hosted_mut(at).store = Store::in_place_of_lost(id);
            }
        }
    }
}
