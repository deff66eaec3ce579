//! Faults as they hit the world, and the end of them all.

use rand::Rng;
use threefs_core::ids::{ChunkId, StoreId};
use threefs_core::replica::Event;
use threefs_core::routing::Chain;
use threefs_core::time::Millis;

use super::{CHAIN, Happening, INODE, LAST_REQUEST_US, Network, Violation, World};
use crate::faults::{CALM_AT_US, Fault};
use crate::mutant::Mutant;
use crate::node::Node;
use crate::store::Store;

/// A process that shall end has this long to leave.
const LEAVE_US: u64 = 20_000;
/// Ids of the stores on disks that took a lost one's place.
const OTHER_DISKS: u128 = 1_000;

/// Several heartbeats.
const HEARD_WITHIN_US: u64 = 40_000;
/// Until the service is started again that has ended by itself.
const RESTART_US: u64 = 5_000;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) -> Result<(), Violation> {
        let ends =
            matches!(fault, Fault::Restart { .. } | Fault::Resume { .. } | Fault::Left { .. });
        if self.calm && !ends {
            return Ok(());
        }
        match fault {
            Fault::Crash { node, back_after_us } => self.crash(node, back_after_us),
            Fault::PowerLoss { back_after_us } => {
                for node in 0..self.nodes.len() {
                    let spread = self.rng.random_range(0..20_000);
                    self.lose_power(node, back_after_us + spread);
                }
            }
            Fault::Leave { node, back_after_us } => self.leave(node, back_after_us)?,
            Fault::Left { node, back_after_us } => {
                if self.nodes[node].leaving {
                    self.crash(node, back_after_us);
                }
            }
            Fault::LoseDisk { node, back_after_us } => self.lose_disk(node, back_after_us),
            Fault::Jump { node, by_ms } => {
                self.nodes[node].jump(self.now, by_ms);
                if self.nodes[node].alive && !self.nodes[node].paused {
                    return self.give(node, Event::Tick);
                }
            }
            Fault::Restart { node } => self.restart(node),
            Fault::Pause { node, for_us } => {
                self.nodes[node].paused = self.nodes[node].alive;
                self.push(for_us, Happening::Fault(Fault::Resume { node }));
            }
            Fault::Resume { node } => self.resume(node),
            Fault::Cut { from, to, for_us } => {
                self.network.blocked.insert((from, to), self.now + for_us);
            }
            Fault::Isolate { endpoint, for_us } => {
                for other in 0..=self.tasks.iter().map(|task| task.endpoint).max().unwrap_or(0) {
                    self.network.blocked.insert((endpoint, other), self.now + for_us);
                    self.network.blocked.insert((other, endpoint), self.now + for_us);
                }
            }
            Fault::BadNetwork { loss, repeat, delay, for_us } => {
                (self.network.loss, self.network.repeat, self.network.delay) =
                    (loss, repeat, delay);
                self.push(for_us, Happening::Fault(Fault::GoodNetwork));
            }
            Fault::GoodNetwork => {
                (self.network.loss, self.network.repeat, self.network.delay) = (0.0, 0.0, 0.0);
            }
            Fault::HangDisk { node, for_us } => {
                self.nodes[node].disk_hangs_until = self.now + for_us;
            }
            Fault::FillDisk { node, for_us } => {
                self.nodes[node].full = true;
                self.push(for_us, Happening::Fault(Fault::EmptyDisk { node }));
            }
            Fault::EmptyDisk { node } => self.nodes[node].full = false,
            Fault::Damage { node, chunk } => self.damage(node, chunk),
            Fault::ManagerAway { for_us } => {
                self.manager_away = true;
                self.push(for_us, Happening::Fault(Fault::ManagerBack));
            }
            Fault::ManagerBack => self.manager_back(),
            Fault::Calm => self.become_calm(),
        }
        Ok(())
    }

    fn crash(&mut self, node: usize, back_after_us: u64) {
        if !self.nodes[node].alive {
            return;
        }
        let rng = &mut self.rng;
        self.nodes[node].end();
        self.nodes[node].store.kill(|unflushed| rng.random_range(0..=unflushed));
        self.push(back_after_us, Happening::Fault(Fault::Restart { node }));
    }

    /// The process ends by itself, because mgmtd knows of another life of its node, and is started
    /// again. A heartbeat of an earlier life that mgmtd had not heard of is enough for that.
    pub(crate) fn end(&mut self, node: usize) {
        self.note(|| format!("node {node} ends: replaced"));
        self.nodes[node].end();
        self.nodes[node].store.kill(|unflushed| unflushed);
        self.push(RESTART_US, Happening::Fault(Fault::Restart { node }));
    }

    fn lose_power(&mut self, node: usize, back_after_us: u64) {
        let alive = self.nodes[node].alive;
        if alive {
            self.nodes[node].end();
        }
        let rng = &mut self.rng;
        self.nodes[node].store.crash(|unflushed| rng.random_range(0..=unflushed));
        if alive {
            self.push(back_after_us, Happening::Fault(Fault::Restart { node }));
        }
    }

    /// As on SIGTERM: the replica leaves its chain and a moment later the process ends.
    fn leave(&mut self, node: usize, back_after_us: u64) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        if !state.alive || state.paused {
            return Ok(());
        }
        state.leaving = true;
        self.push(LEAVE_US, Happening::Fault(Fault::Left { node, back_after_us }));
        match self.mutant {
            Mutant::ReportLeaveAtOnce => Ok(()),
            _ => self.give(node, Event::Leave),
        }
    }

    /// A node comes back with an empty disk, once, while all others serve and none of them is cut
    /// off: mgmtd could find one of those dead before the lost one, and the chain would wait for the
    /// lost disk until an operator promotes another replica.
    fn lose_disk(&mut self, node: usize, back_after_us: u64) {
        let serves =
            |node: &Node| node.alive && !node.paused && node.replica.serves(node.clock(self.now));
        let all_serve = self.members().count() > 1 && self.members().all(|(_, node)| serves(node));
        let whole = self.manager.chain(CHAIN).is_some_and(Chain::is_whole);
        let network = &self.network;
        let heard = !self.manager_away
            && network.loss + network.repeat + network.delay == 0.0
            && network.blocked.values().all(|until| until + HEARD_WITHIN_US <= self.now);
        if self.lost.is_some() || !self.nodes[node].alive || !all_serve || !whole || !heard {
            return;
        }
        self.lost = Some(node);
        self.crash(node, back_after_us);
        let state = &mut self.nodes[node];
        state.store = Store::new(StoreId(u128::from(state.target.0) + OTHER_DISKS));
        // Damaged copies may have been good on this disk alone.
        for other in &mut self.nodes {
            other.store.mend();
        }
    }

    fn restart(&mut self, node: usize) {
        if !self.nodes[node].alive {
            let mutant = self.mutant;
            self.nodes[node].restart(mutant);
            self.node_starts(node);
        }
    }

    fn resume(&mut self, node: usize) {
        self.nodes[node].paused = false;
        for happening in std::mem::take(&mut self.nodes[node].backlog) {
            self.push(0, happening);
        }
    }

    fn manager_back(&mut self) {
        if self.manager_away {
            self.manager_away = false;
            self.manager.restart(Millis(self.now / 1_000));
        }
    }

    /// Damages one copy of a chunk, once, while all have it: a second damage would destroy data
    /// that nobody could bring back.
    fn damage(&mut self, node: usize, index: u32) {
        let chunk = ChunkId::new(INODE, index);
        let whole = self.manager.chain(CHAIN).is_some_and(Chain::is_whole);
        let versions: Vec<_> = self
            .members()
            .map(|(_, node)| {
                node.store.slots().get(&chunk).map(|slot| slot.committed.state.version)
            })
            .collect();
        let same = versions.windows(2).all(|pair| pair[0] == pair[1]);
        if whole && same && !self.damaged.contains(&index) && self.nodes[node].store.damage(chunk) {
            self.damaged.push(index);
        }
    }

    fn become_calm(&mut self) {
        self.calm = true;
        self.network = Network::default();
        self.manager_back();
        for node in 0..self.nodes.len() {
            self.restart(node);
            self.resume(node);
            self.nodes[node].disk_hangs_until = 0;
            self.nodes[node].full = false;
        }
        self.ends_at = Some(LAST_REQUEST_US);
        self.push(LAST_REQUEST_US - CALM_AT_US, Happening::CheckSettled);
    }
}
