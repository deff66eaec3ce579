//! Life cycle of a target's store on its node: opened, and reopened after failures. The product
//! decides when, and when a damaged store is quarantined ([`threefs_core::hosting`]).

use rand::Rng;
use threefs_core::error::{StorageError, StoreError};
use threefs_core::heartbeat::LocalState;
use threefs_core::hosting::{Pauses, sets_aside};
use threefs_core::ids::Incarnation;
use threefs_core::membership::MembershipRecord;
use threefs_core::replica::{Config, Event, Replica};
use threefs_core::routing::Chain;

use crate::mutations::Mutation;
use crate::simulation::{SimEvent, Simulation, Violation};
use crate::store::{Log, Store};
use crate::topology::{At, chain_id};

/// Shorter than in the product, like all times of the simulator.
pub(super) const PAUSES: Pauses = Pauses { min_ms: 5, max_ms: 80, recovered_ms: 100 };

fn replica(at: At, opening: u64, mutation: Mutation, purge_after_ms: Option<u64>) -> Replica {
    let mut config = Config::new(at.target(), chain_id(at.chain), Incarnation(opening));
    config.call_timeout_ms = 15;
    config.retry_wait_ms = 2;
    config.retry_wait_ms_max = 20;
    config.store_stall_ms = 60;
    config.full_wait_ms = 30;
    config.purge_after_ms = purge_after_ms.unwrap_or(config.purge_after_ms);
    config.sync_window = 2;
    config.sync_page = 2;
    if let Mutation::Without(check) = mutation {
        config.without = Some(check);
    }
    Replica::new(config)
}

impl Simulation {
    /// Opens the store of a target without a replica and starts a replica, or schedules a retry.
    pub(crate) fn open(&mut self, at: At) -> Result<(), Violation> {
        if self.hosted(at).replica.is_some() {
            return Ok(());
        }
        match self.open_store(at) {
            Ok(()) => self.on_open(at),
            Err(error) if self.is_set_aside(at, &error) => {
                self.note(|| format!("{} is set aside", self.name(at)));
                let id = self.new_store_id();
                self.hosted_mut(at).store = Store::new(id);
                self.repair_all();
                self.open(at)
            }
            Err(_) => {
                self.open_later(at);
                Ok(())
            }
        }
    }

    fn open_store(&mut self, at: At) -> Result<(), StoreError> {
        let (now, mutation) = (self.now, self.mutation);
        let hosted = self.hosted_mut(at);
        if hosted.fails_until > now {
            return Err(io_error("open the store"));
        }
        if hosted.store.log != Log::Sound {
            return Err(StoreError::Damaged { reason: "a frame of the log is missing".into() });
        }
        // Data that a killed process left in the page cache becomes durable before it is read.
        if mutation != Mutation::SkipFlushAtOpen {
            hosted.store.flush();
        }
        Ok(())
    }

    fn is_set_aside(&self, at: At, error: &StoreError) -> bool {
        if self.mutation == Mutation::SetAsideLast {
            return matches!(error, StoreError::Damaged { .. });
        }
        if self.mutation == Mutation::KeepDamaged {
            return false;
        }
        let node = &self.nodes[at.node];
        let lease_valid = node.lease.is_valid(node.clock(self.now));
        let chain = node.routing.chain(chain_id(at.chain));
        sets_aside(error, chain, at.target(), lease_valid)
    }

    /// Gives a new replica the state of its node.
    fn on_open(&mut self, at: At) -> Result<(), Violation> {
        let (mutation, now) = (self.mutation, self.nodes[at.node].clock(self.now));
        let purge_after_ms = self.fencing.purge_after_ms();
        let hosted = self.hosted_mut(at);
        hosted.reopening.record_open(now);
        let replica = replica(at, hosted.opening, mutation, purge_after_ms);
        hosted.start_replica(replica);
        self.deliver_routing(at)?;
        if mutation != Mutation::ForgetFences {
            self.deliver_fences(at)?;
        }
        self.deliver_lease(at)?;
        if self.nodes[at.node].leaving && mutation != Mutation::ReportLeaveAtOnce {
            self.deliver_event(at, Event::Leave)?;
        }
        Ok(())
    }

    /// Delivers the newest routing to one target.
    pub(super) fn deliver_routing(&mut self, at: At) -> Result<(), Violation> {
        let routing = std::rc::Rc::clone(&self.nodes[at.node].routing);
        let Some(chain) = routing.chain(chain_id(at.chain)) else { return Ok(()) };
        if !self.record(at, chain) {
            return Ok(());
        }
        self.deliver_event(at, Event::Routing(chain.clone()))?;
        if routing.retires(chain, at.target()) {
            self.deliver_event(at, Event::Retire)?;
        }
        Ok(())
    }

    /// Makes a chain durable before it takes effect; false if it must not.
    fn record(&mut self, at: At, chain: &Chain) -> bool {
        let now = self.nodes[at.node].clock(self.now);
        let hosted = self.hosted_mut(at);
        let Some(replica) = &hosted.replica else { return false };
        let before = hosted.store.record.as_ref();
        if before.is_some_and(|before| before.supersedes(chain)) {
            return false;
        }
        let up_to_date = replica.report(now).state == LocalState::UpToDate;
        let (target, store) = (at.target(), hosted.store.id);
        let next = MembershipRecord::next(before, target, store, chain, up_to_date);
        hosted.store.record = next.or(hosted.store.record.take());
        true
    }

    /// Handles a failed store. Cached and unflushed data may be lost.
    pub(super) fn store_failed(&mut self, at: At) {
        self.note(|| format!("{} has failed", self.name(at)));
        let (rng, mutation) = (&mut self.rng, self.mutation);
        let hosted = &mut self.nodes[at.node].targets[at.chain];
        let target = at.target();
        let unanswered = hosted.close();
        match mutation {
            Mutation::KeepCache => hosted.store.forget_unflushed(),
            _ => hosted.store.crash(|unflushed| rng.random_range(0..=unflushed)),
        }
        for origin in unanswered {
            let error = StorageError::Timeout { target };
            self.answer(at.node, origin, Err(error), bytes::Bytes::new());
        }
        if mutation != Mutation::KeepClosed {
            self.open_later(at);
        }
    }

    fn open_later(&mut self, at: At) {
        let now = self.nodes[at.node].clock(self.now);
        let incarnation = self.nodes[at.node].incarnation;
        let pause_ms = self.hosted_mut(at).reopening.record_failure(now);
        let pause = self.rng.random_range(pause_ms * 750..=pause_ms * 1_000);
        self.push(pause, SimEvent::Open { at, incarnation });
    }
}

/// An error of the operating system.
pub(super) fn io_error(operation: &str) -> StoreError {
    StoreError::Io { operation: operation.into(), reason: "input/output error".into() }
}
