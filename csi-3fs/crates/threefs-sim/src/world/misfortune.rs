//! Faults as they hit the world, and the end of them all.

use rand::Rng;
use threefs_core::ids::ChunkId;
use threefs_core::routing::Chain;
use threefs_core::time::Millis;

use super::{CHAIN, Happening, INODE, LAST_REQUEST_US, Network, World};
use crate::faults::{CALM_AT_US, Fault};

/// Until the service is started again that has ended by itself.
const RESTART_US: u64 = 5_000;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        if self.calm && !matches!(fault, Fault::Restart { .. } | Fault::Resume { .. }) {
            return;
        }
        match fault {
            Fault::Crash { node, back_after_us } => self.crash(node, back_after_us),
            Fault::PowerLoss { back_after_us } => {
                for node in 0..self.nodes.len() {
                    let spread = self.rng.random_range(0..20_000);
                    self.crash(node, back_after_us + spread);
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
    }

    fn crash(&mut self, node: usize, back_after_us: u64) {
        if !self.nodes[node].alive {
            return;
        }
        let rng = &mut self.rng;
        self.nodes[node].crash(|unflushed| rng.random_range(0..=unflushed));
        self.push(back_after_us, Happening::Fault(Fault::Restart { node }));
    }

    /// The process ends by itself, because mgmtd knows of another life of its node, and is started
    /// again. A heartbeat of an earlier life that mgmtd had not heard of is enough for that.
    pub(crate) fn end(&mut self, node: usize) {
        self.note(|| format!("node {node} ends: replaced"));
        self.nodes[node].crash(|unflushed| unflushed);
        self.push(RESTART_US, Happening::Fault(Fault::Restart { node }));
    }

    fn restart(&mut self, node: usize) {
        if !self.nodes[node].alive {
            self.nodes[node].restart();
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
