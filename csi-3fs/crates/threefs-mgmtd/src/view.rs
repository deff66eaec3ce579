//! What a primary knows in memory, and what follows from it. Pure: time comes in as [`Millis`].

use std::collections::BTreeMap;

use threefs_core::chain::{Reason, advance};
use threefs_core::heartbeat::{Heartbeat, LocalReport, TargetReport};
use threefs_core::ids::{NodeId, TargetId};
use threefs_core::moves::{Move, follow};
use threefs_core::routing::{Chain, RoutingInfo};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::ops::{Fence, Loaded};
use crate::protocol::{ClusterStatus, MgmtdError, NodeStatus};
use crate::rows::{NodeRow, Wanted};

/// A primary's knowledge. Routing is exactly what is stored; heartbeats are only here.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub fence: Fence,
    /// When this primary began.
    pub since: Millis,
    /// Before the last renewal that succeeded was asked for.
    pub renewed_at: Millis,
    pub routing: RoutingInfo,
    pub nodes: BTreeMap<NodeId, NodeRow>,
    pub wanted: Wanted,
    heard: BTreeMap<NodeId, Heard>,
    ticked_at: Millis,
}

/// The newest heartbeat of a node's present life.
#[derive(Clone, Debug)]
struct Heard {
    at: Millis,
    sequence: u64,
    targets: Vec<TargetReport>,
}

/// What a scan decides.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub chains: Vec<Chain>,
    pub reasons: Vec<Reason>,
    /// Moves that are complete with it.
    pub ended: Vec<Move>,
}

/// What has to happen before a heartbeat can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Nothing.
    Known,
    /// The node, or its address, has to be written down first.
    Register,
    /// It is a new life: the targets of the former one have to leave SERVING and SYNCING first.
    Restarted,
}

impl View {
    pub(crate) fn new(fence: Fence, loaded: Loaded, now: Millis) -> Self {
        Self {
            fence,
            since: now,
            renewed_at: now,
            routing: loaded.routing,
            nodes: loaded.nodes,
            wanted: loaded.wanted,
            heard: BTreeMap::new(),
            ticked_at: now,
        }
    }

    /// A tick. Time in which mgmtd itself did not run (a starved or stopped process) is not silence
    /// of the nodes: their heartbeats wait in its sockets. Taking somebody for dead later than one
    /// could is always safe.
    pub(crate) fn tick(&mut self, timers: &Timers, now: Millis) {
        let slept_ms = now.since(self.ticked_at).saturating_sub(timers.scan_ms * 2);
        self.ticked_at = now;
        if slept_ms > 0 {
            self.heard.values_mut().for_each(|heard| heard.at = heard.at.after(slept_ms));
        }
    }

    /// Whether the lease certainly still holds.
    pub(crate) fn holds_lease(&self, timers: &Timers, now: Millis) -> bool {
        now.since(self.renewed_at) < timers.primary_lease_ms
    }

    /// How long until it is known who is alive: every node that holds targets has been heard, or
    /// has had its full time to speak since this primary began. `None` = it is known.
    pub(crate) fn settles_in_ms(&self, timers: &Timers, now: Millis) -> Option<u64> {
        let waited = now.since(self.since);
        let all_heard = || {
            let mut holders = self.routing.chains.values().flat_map(|chain| &chain.targets);
            holders.all(|place| self.heard.contains_key(&place.node))
        };
        let left = timers.node_failure_ms.checked_sub(waited).filter(|left| *left > 0)?;
        (!all_heard()).then_some(left)
    }

    /// What a heartbeat needs, or why it is refused.
    pub(crate) fn admit(&self, heartbeat: &Heartbeat) -> Result<Admission, MgmtdError> {
        let node = heartbeat.node;
        let Some(row) = self.nodes.get(&node) else { return Ok(Admission::Register) };
        if row.former_lives.contains(&heartbeat.incarnation) {
            return Err(MgmtdError::Replaced { node, address: row.info.address.clone() });
        }
        if row.incarnation != heartbeat.incarnation {
            return Ok(Admission::Restarted);
        }
        match self.heard.get(&node) {
            Some(heard) if heartbeat.sequence <= heard.sequence => Err(MgmtdError::Stale {
                node,
                sequence: heartbeat.sequence,
                newest: heard.sequence,
            }),
            _ if row.info.address != heartbeat.address => Ok(Admission::Register),
            _ => Ok(Admission::Known),
        }
    }

    /// Takes an admitted heartbeat. True when it says anything new about a target.
    pub(crate) fn hear(&mut self, heartbeat: Heartbeat, now: Millis) -> bool {
        let Heartbeat { node, sequence, targets, .. } = heartbeat;
        let said = |targets: &[TargetReport]| -> Vec<(TargetId, LocalReport)> {
            targets.iter().map(|line| (line.target, line.report)).collect()
        };
        let new = said(&targets);
        let before = self.heard.insert(node, Heard { at: now, sequence, targets });
        before.is_none_or(|before| said(&before.targets) != new)
    }

    /// A former life's reports say nothing any more.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.heard.remove(&node);
    }

    pub(crate) fn is_alive(&self, node: NodeId, timers: &Timers, now: Millis) -> bool {
        self.heard.get(&node).is_some_and(|heard| now.since(heard.at) < timers.node_failure_ms)
    }

    /// What has to change now. The node `dead` counts as dead.
    pub(crate) fn scan(&self, timers: &Timers, now: Millis, dead: Option<NodeId>) -> Changes {
        let mut reports: BTreeMap<TargetId, LocalReport> = BTreeMap::new();
        for (node, heard) in &self.heard {
            if self.is_alive(*node, timers, now) && dead != Some(*node) {
                reports.extend(heard.targets.iter().map(|line| (line.target, line.report)));
            }
        }
        let mut changes = Changes::default();
        for chain in self.routing.chains.values() {
            let mut next = advance(chain, &reports);
            if let Some(this) = self.routing.moves.get(&chain.id) {
                let (followed, ended) = follow(chain, next.chain, this);
                next.chain = followed;
                changes.ended.extend(ended.then_some(*this));
            }
            if next.changed(chain) {
                changes.reasons.extend(next.reasons);
                changes.chains.push(next.chain);
            }
        }
        changes
    }

    pub(crate) fn status(
        &self,
        timers: &Timers,
        now: Millis,
        primary: &str,
        nodes_expected: u32,
    ) -> ClusterStatus {
        let nodes = self.nodes.values().map(|row| {
            let node = row.info.id;
            let heard = self.heard.get(&node);
            let sum = |bytes: fn(&TargetReport) -> u64| {
                heard.map_or(0, |heard| heard.targets.iter().map(bytes).sum())
            };
            NodeStatus {
                node,
                address: row.info.address.clone(),
                alive: self.is_alive(node, timers, now),
                heartbeat_age_ms: heard.map(|heard| now.since(heard.at)),
                used_bytes: sum(|line| line.used_bytes),
                capacity_bytes: sum(|line| line.capacity_bytes),
            }
        });
        let chains = &self.routing.chains;
        ClusterStatus {
            epoch: self.fence.epoch,
            primary: primary.into(),
            routing_version: self.routing.version,
            nodes_expected,
            nodes: nodes.collect(),
            chains: chains.len() as u32,
            chains_whole: chains.values().filter(|chain| chain.is_whole()).count() as u32,
            chains_down: chains.values().filter(|chain| chain.head().is_none()).count() as u32,
        }
    }
}
