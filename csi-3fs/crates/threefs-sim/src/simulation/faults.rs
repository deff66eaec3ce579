//! Fault injection, and the end of all faults.

use rand::Rng;
use threefs_core::ids::ChunkId;
use threefs_core::replica::Event;
use threefs_core::routing::Chain;
use threefs_core::time::Millis;

use super::{INODE, LAST_REQUEST_US, Network, SimEvent, Simulation, Violation};
use crate::fault_plan::{FAULTS_END_US, Fault};
use crate::mutations::Mutation;
use crate::store::{Log, Store};
use crate::topology::{At, chain_id};

/// Time that a process gets to leave its chain.
const LEAVE_US: u64 = 20_000;
/// Time for which a store with a damaged log fails.
const DAMAGED_FAILS_US: u64 = 20_000;
/// Time until a service that has exited is restarted.
const RESTART_US: u64 = 5_000;

impl Simulation {
    pub(super) fn fault(&mut self, fault: Fault) -> Result<(), Violation> {
        let ends = matches!(
            fault,
            Fault::Restart { .. }
                | Fault::Resume { .. }
                | Fault::Left { .. }
                | Fault::GoodNetwork
                | Fault::EmptyDisk { .. }
                | Fault::RestoreLog { .. }
                | Fault::ManagerBack
                | Fault::EndAll
        );
        if !ends && self.faults_ended {
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
                    return self.broadcast(node, || Event::Tick);
                }
            }
            Fault::FailStore { node, chain, for_us } => {
                self.hosted_mut(At { node, chain }).fails_until = self.now + for_us;
            }
            Fault::DamageLog { node, chain, back_after_us } => {
                self.damage_log(At { node, chain }, back_after_us);
            }
            Fault::RestoreLog { node, chain, store } => {
                let it = &mut self.hosted_mut(At { node, chain }).store;
                if it.id == store && it.log == Log::Damaged {
                    it.log = Log::Sound;
                }
            }
            Fault::Restart { node } => self.restart(node)?,
            Fault::Pause { node, for_us } => {
                self.nodes[node].paused = self.nodes[node].alive;
                self.push(for_us, SimEvent::Fault(Fault::Resume { node }));
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
                self.push(for_us, SimEvent::Fault(Fault::GoodNetwork));
            }
            Fault::GoodNetwork => {
                (self.network.loss, self.network.repeat, self.network.delay) = (0.0, 0.0, 0.0);
            }
            Fault::HangDisk { node, for_us } => {
                self.nodes[node].disk_hangs_until = self.now + for_us;
            }
            Fault::FillDisk { node, for_us } => {
                self.nodes[node].full = true;
                self.push(for_us, SimEvent::Fault(Fault::EmptyDisk { node }));
            }
            Fault::EmptyDisk { node } => self.nodes[node].full = false,
            Fault::Damage { node, chunk } => self.damage(node, chunk),
            Fault::ManagerAway { .. } if self.failovers.are_some() => {}
            Fault::ManagerAway { for_us } => {
                self.manager_away = true;
                self.push(for_us, SimEvent::Fault(Fault::ManagerBack));
            }
            Fault::ManagerBack => self.manager_back(),
            Fault::BackUp => self.manager.back_up(),
            Fault::Restore => {
                self.manager_away = false;
                self.manager.restore(Millis(self.now / 1_000));
                // Schedules without snapshots have a metadata service as well.
                if self.epochs.first_at().is_none_or(|at| at > self.now) {
                    self.push(0, SimEvent::Create);
                }
            }
            Fault::EndAll => self.end_faults()?,
        }
        Ok(())
    }

    fn crash(&mut self, node: usize, back_after_us: u64) {
        if !self.nodes[node].alive {
            return;
        }
        let rng = &mut self.rng;
        self.nodes[node].end();
        for target in &mut self.nodes[node].targets {
            target.store.kill(|unflushed| rng.random_range(0..=unflushed));
        }
        self.push(back_after_us, SimEvent::Fault(Fault::Restart { node }));
    }

    /// The process exits because mgmtd has another incarnation of its node, and is restarted. A
    /// late heartbeat of an earlier incarnation is sufficient for that.
    pub(crate) fn end(&mut self, node: usize) {
        self.note(|| format!("node {node} ends: replaced"));
        self.nodes[node].end();
        let targets = &mut self.nodes[node].targets;
        targets.iter_mut().for_each(|target| target.store.kill(|unflushed| unflushed));
        self.push(RESTART_US, SimEvent::Fault(Fault::Restart { node }));
    }

    fn lose_power(&mut self, node: usize, back_after_us: u64) {
        let alive = self.nodes[node].alive;
        if alive {
            self.nodes[node].end();
        }
        let rng = &mut self.rng;
        for target in &mut self.nodes[node].targets {
            target.store.crash(|unflushed| rng.random_range(0..=unflushed));
        }
        if alive {
            self.push(back_after_us, SimEvent::Fault(Fault::Restart { node }));
        }
    }

    /// As on SIGTERM: the replica leaves its chain, and a moment later the process exits.
    fn leave(&mut self, node: usize, back_after_us: u64) -> Result<(), Violation> {
        let state = &mut self.nodes[node];
        if !state.alive || state.paused {
            return Ok(());
        }
        state.leaving = true;
        self.push(LEAVE_US, SimEvent::Fault(Fault::Left { node, back_after_us }));
        match self.mutation {
            Mutation::ReportLeaveAtOnce => Ok(()),
            _ => self.broadcast(node, || Event::Leave),
        }
    }

    fn broadcast(&mut self, node: usize, event: fn() -> Event) -> Result<(), Violation> {
        (0..self.topology.chains)
            .try_for_each(|chain| self.deliver_event(At { node, chain }, event()))
    }

    /// A node returns with an empty disk.
    fn lose_disk(&mut self, node: usize, back_after_us: u64) {
        if self.data_is_lost || !self.nodes[node].alive {
            return;
        }
        self.data_is_lost = true;
        self.crash(node, back_after_us);
        for chain in 0..self.topology.chains {
            let id = self.new_store_id();
            self.hosted_mut(At { node, chain }).store = Store::in_place_of_lost(id);
        }
        self.repair_all();
    }

    /// A store cannot be opened in its current state.
    fn damage_log(&mut self, at: At, back_after_us: Option<u64>) {
        let log = match back_after_us {
            None if self.data_is_lost => return,
            None => {
                self.data_is_lost = true;
                self.repair_all();
                Log::Destroyed
            }
            Some(_) if self.hosted(at).store.log == Log::Destroyed => return,
            Some(time) => {
                let (node, chain, store) = (at.node, at.chain, self.hosted(at).store.id);
                let restored = Fault::RestoreLog { node, chain, store };
                self.push(time, SimEvent::Fault(restored));
                Log::Damaged
            }
        };
        let until = self.now + DAMAGED_FAILS_US;
        let hosted = self.hosted_mut(at);
        hosted.store.log = log;
        hosted.fails_until = until;
    }

    /// Whether the data of this target is permanently lost.
    pub(super) fn is_lost(&self, at: At) -> bool {
        let store = &self.hosted(at).store;
        let unknown = self.store_of(at.target()) != Some(store.id);
        store.log == Log::Destroyed || store.in_place_of_lost && unknown
    }

    /// Repairs damaged copies: the good ones may be lost.
    pub(crate) fn repair_all(&mut self) {
        let targets = self.nodes.iter_mut().flat_map(|node| &mut node.targets);
        targets.for_each(|target| target.store.repair_all());
    }

    fn restart(&mut self, node: usize) -> Result<(), Violation> {
        if self.nodes[node].alive {
            return Ok(());
        }
        self.start_node(node)
    }

    fn resume(&mut self, node: usize) {
        self.nodes[node].paused = false;
        for event in std::mem::take(&mut self.nodes[node].backlog) {
            self.push(0, event);
        }
    }

    fn manager_back(&mut self) {
        if self.manager_away {
            self.manager_away = false;
            self.manager.restart(Millis(self.now / 1_000));
        }
    }

    /// Damages one copy of a chunk, once, while all replicas have it: a second damage would be
    /// unrecoverable.
    fn damage(&mut self, node: usize, index: u32) {
        let chunk = ChunkId::new(INODE, index);
        let chain = self.topology.chain_of(chunk);
        let slots = self.nodes[node].targets[chain].store.slots();
        let versions = slots.range(chunk..=chunk.last_version()).map(|(chunk, _)| *chunk);
        let chunk = self.epochs.pick(&versions.collect::<Vec<_>>()).unwrap_or(chunk);
        let whole = self.manager.chain(chain_id(chain)).is_some_and(Chain::is_whole);
        let version = |at: At| {
            self.hosted(at).store.slots().get(&chunk).map(|slot| slot.committed.state.version)
        };
        let versions: Vec<_> = self.members_of(chain).map(version).collect();
        let same = versions.windows(2).all(|pair| pair[0] == pair[1]);
        let store = &mut self.nodes[node].targets[chain].store;
        if whole && same && !self.damaged.contains(&index) && store.damage(chunk) {
            self.damaged.push(index);
        }
    }

    fn end_faults(&mut self) -> Result<(), Violation> {
        self.faults_ended = true;
        self.network = Network::default();
        self.manager_back();
        self.end_failovers();
        for node in 0..self.nodes.len() {
            for target in &mut self.nodes[node].targets {
                target.fails_until = 0;
            }
            self.restart(node)?;
            self.resume(node);
            self.nodes[node].disk_hangs_until = 0;
            self.nodes[node].full = false;
        }
        self.ends_at = Some(LAST_REQUEST_US);
        self.push(LAST_REQUEST_US - FAULTS_END_US, SimEvent::CheckConverged);
        Ok(())
    }
}
