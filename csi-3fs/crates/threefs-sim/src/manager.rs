//! The manager as the simulator has it: heartbeats with a timeout, the real chain rules, routing
//! in versions. It may be away for a while; what it decided is durable, what it heard is not.

use std::collections::BTreeMap;
use std::rc::Rc;

use threefs_core::chain::advance;
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply, LocalReport};
use threefs_core::ids::{ChainId, Incarnation, NodeId, RoutingVersion, TargetId};
use threefs_core::moves::{Move, abandon, begin, follow};
use threefs_core::routing::PublicState::{self, Offline};
use threefs_core::routing::{Chain, RoutingInfo};
use threefs_core::time::Millis;

/// After so long without a heartbeat a node is dead.
pub const DEAD_AFTER_MS: u64 = 100;

#[derive(Debug)]
struct Heard {
    at: Millis,
    incarnation: Incarnation,
    sequence: u64,
    reports: BTreeMap<TargetId, LocalReport>,
}

/// See the module.
#[derive(Debug)]
pub struct Manager {
    routing: Rc<RoutingInfo>,
    heard: BTreeMap<NodeId, Heard>,
    started_at: Millis,
    /// See [`crate::Mutant::LeaveOutAtOnce`].
    pub hasty: bool,
    /// See [`crate::Mutant::AbandonServing`].
    pub careless: bool,
}

impl Manager {
    /// A manager of one new chain.
    #[must_use]
    pub fn new(chain: Chain) -> Self {
        let mut routing = RoutingInfo { version: RoutingVersion(1), ..RoutingInfo::default() };
        routing.chains.insert(chain.id, chain);
        Self {
            routing: Rc::new(routing),
            heard: BTreeMap::new(),
            started_at: Millis(0),
            hasty: false,
            careless: false,
        }
    }

    /// It comes back: what it heard is forgotten, and it decides nothing before every node that
    /// lives has had the time to be heard.
    pub fn restart(&mut self, now: Millis) {
        self.heard.clear();
        self.started_at = now;
    }

    /// What it publishes now.
    #[must_use]
    pub fn routing(&self) -> Rc<RoutingInfo> {
        Rc::clone(&self.routing)
    }

    /// The chain as it is decided now.
    #[must_use]
    pub fn chain(&self, id: ChainId) -> Option<&Chain> {
        self.routing.chains.get(&id)
    }

    /// Takes a heartbeat; `None` for one that came late.
    pub fn heartbeat(&mut self, now: Millis, heartbeat: &Heartbeat) -> Option<HeartbeatReply> {
        if let Some(heard) = self.heard.get(&heartbeat.node) {
            let newer =
                (heartbeat.incarnation, heartbeat.sequence) > (heard.incarnation, heard.sequence);
            if !newer {
                return None;
            }
        }
        let reports = heartbeat.targets.iter().map(|line| (line.target, line.report)).collect();
        self.heard.insert(
            heartbeat.node,
            Heard {
                at: now,
                incarnation: heartbeat.incarnation,
                sequence: heartbeat.sequence,
                reports,
            },
        );
        let routing_version = self.routing.version;
        Some(HeartbeatReply { routing_version, lease_ms: DEAD_AFTER_MS / 2 })
    }

    /// Looks at all chains. True if something changed.
    pub fn scan(&mut self, now: Millis) -> bool {
        if now.since(self.started_at) <= DEAD_AFTER_MS {
            return false;
        }
        let reports: BTreeMap<TargetId, LocalReport> = self
            .heard
            .values()
            .filter(|heard| now.since(heard.at) <= DEAD_AFTER_MS)
            .flat_map(|heard| heard.reports.iter().map(|(target, report)| (*target, *report)))
            .collect();
        let mut changed = false;
        let mut next = (*self.routing).clone();
        for chain in next.chains.values_mut() {
            let mut transition = advance(chain, &reports);
            let this = next.moves.get(&chain.id).copied();
            if let Some(this) = this.filter(|_| self.hasty)
                && this.retires(&transition.chain, this.source)
            {
                let leaving = transition.chain.targets.iter_mut();
                leaving.filter(|it| it.target == this.source).for_each(|it| it.state = Offline);
            }
            if let Some(this) = this {
                let (followed, ended) = follow(chain, transition.chain, &this);
                transition.chain = followed;
                if ended {
                    next.moves.remove(&chain.id);
                    next.retired.insert(this.source);
                }
            }
            changed |= transition.changed(chain);
            *chain = transition.chain;
        }
        if changed {
            next.version = self.routing.version.next();
            self.routing = Rc::new(next);
        }
        changed
    }

    /// Gives the chain's move up, if that can be now; the target that was to be its destination.
    pub fn abandon_move(&mut self, id: ChainId) -> Option<TargetId> {
        let mut next = (*self.routing).clone();
        let this = next.moves.get(&id).copied()?;
        let chain = next.chains.get_mut(&id)?;
        *chain = if self.careless {
            // At the worst moment, which chance would find more seldom.
            if chain.state_of(this.destination) != Some(PublicState::Serving) {
                return None;
            }
            let mut without = chain.clone();
            without.targets.retain(|place| place.target != this.destination);
            Chain { version: chain.version.next(), ..without }
        } else {
            abandon(chain, &this)?
        };
        next.moves.remove(&id);
        next.retired.insert(this.destination);
        next.version = self.routing.version.next();
        self.routing = Rc::new(next);
        Some(this.destination)
    }

    /// The first target of the chain shall move to a node that has none; false while a move is
    /// under way or another target does not serve.
    pub fn begin_move(&mut self, id: ChainId, destination: TargetId, node: NodeId) -> bool {
        let mut next = (*self.routing).clone();
        let Some(chain) = next.chains.get_mut(&id) else { return false };
        let Some(source) = chain.targets.first().map(|place| place.target) else { return false };
        if !chain.is_whole() || next.moves.contains_key(&id) {
            return false;
        }
        *chain = begin(chain, destination, node);
        next.moves.insert(id, Move { chain: id, source, destination });
        next.version = self.routing.version.next();
        self.routing = Rc::new(next);
        true
    }
}
