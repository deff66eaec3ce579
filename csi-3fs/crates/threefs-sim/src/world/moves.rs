//! A replica moves to the spare node.

use rand::Rng;
use threefs_core::ids::NodeId;
use threefs_core::moves::Move;
use threefs_core::routing::PublicState;

use super::{CHAIN, Happening, SCAN_US, World};

impl World {
    pub(super) fn begin_move(&mut self) {
        let spare = self.nodes.len() - 1;
        let (target, node) = (self.nodes[spare].target, NodeId(spare as u32));
        if self.manager_away || !self.manager.begin_move(CHAIN, target, node) {
            self.push(SCAN_US, Happening::Move);
        }
    }

    /// A replica that is not needed any more, and a client, may be the last to hear of it: only so
    /// can one ask the other for what all others have changed.
    pub(super) fn delay_news(&mut self, this: &Move) {
        let replaced = self
            .manager
            .chain(CHAIN)
            .is_some_and(|chain| chain.state_of(this.destination) == Some(PublicState::Serving));
        if self.calm || !replaced || self.moves.random_bool(0.3) {
            return;
        }
        let until = self.now + self.moves.random_range(10_000..80_000);
        let client = self.tasks[self.moves.random_range(0..self.tasks.len())].endpoint;
        let source = self.nodes.iter().position(|node| node.target == this.source);
        for late in source.into_iter().chain([client]) {
            self.network.blocked.insert((self.manager_endpoint(), late), until);
        }
    }
}
