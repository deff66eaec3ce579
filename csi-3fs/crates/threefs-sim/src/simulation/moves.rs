//! A move of a replica to the spare node.

use rand::Rng;
use threefs_core::ids::{NodeId, TargetId};
use threefs_core::routing::Move;
use threefs_core::routing::PublicState;

use super::failover::SECOND;
use super::{SimEvent, Simulation};
use crate::manager::SCAN_MS;
use crate::topology::{At, chain_id};

/// The chain with the move.
const CHAIN: usize = 0;

impl Simulation {
    pub(super) fn start_move(&mut self) {
        let spare = self.nodes.len() - 1;
        let target = At { node: spare, chain: CHAIN }.target();
        let node = NodeId(spare as u32);
        if self.manager_is_away() || !self.manager.start_move(chain_id(CHAIN), target, node) {
            self.push(SCAN_MS * 1_000, SimEvent::Move);
        }
    }

    /// Abandons the move at the first possible time, unless it has completed: the destination is
    /// considered permanently lost.
    pub(super) fn abandon_move(&mut self) {
        if self.faults_ended || !self.manager.routing().moves.contains_key(&chain_id(CHAIN)) {
            return;
        }
        let given_up = match self.manager_is_away() {
            true => None,
            false => self.manager.abandon_move(chain_id(CHAIN)),
        };
        match given_up {
            Some(destination) => {
                self.note(|| format!("GIVEN UP: {destination}"));
                self.delay_routing_to(destination);
            }
            None => self.push(SCAN_MS * 1_000, SimEvent::AbandonMove),
        }
    }

    /// Delays the routing for a replaced replica and a client, so that the client may send it
    /// requests after all others have changed.
    pub(super) fn delay_routing(&mut self, this: &Move) {
        let is_replaced = self
            .manager
            .chain(chain_id(CHAIN))
            .is_some_and(|chain| chain.state_of(this.destination) == Some(PublicState::Serving));
        if self.faults_ended || !is_replaced || self.moves.random_bool(0.3) {
            return;
        }
        self.delay_routing_to(this.source);
    }

    fn delay_routing_to(&mut self, target: TargetId) {
        let until = self.now + self.moves.random_range(10_000..80_000);
        let client = self.tasks[self.moves.random_range(0..self.tasks.len())].endpoint;
        if self.failovers.alone {
            return;
        }
        for late in [At::of(target).node, client] {
            for endpoint in [self.manager_endpoint(), SECOND] {
                self.network.blocked.insert((endpoint, late), until);
            }
        }
    }
}
