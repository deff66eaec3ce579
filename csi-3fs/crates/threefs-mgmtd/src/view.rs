//! What a primary knows in memory, and what follows from it. Pure: time comes in as [`Millis`].

use std::collections::{BTreeMap, BTreeSet};

use threefs_core::chain::{NotPromotable, Reason, Transition, advance, promote};
use threefs_core::heartbeat::{DataFolder, Heartbeat, LocalReport, LocalState, TargetReport};
use threefs_core::ids::{ChainId, NodeId, RoutingVersion, StoreId, TargetId};
use threefs_core::moves::{Move, follow};
use threefs_core::routing::{Chain, ChainTarget, PublicState, RoutingInfo};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::ops::{Fence, Loaded};
use crate::protocol::{ClusterStatus, ForeignStore, MgmtdError, NodeStatus, Promotion};
use crate::rows::{NodeRow, Wanted};

/// A node with less than this part of its bytes free gets nothing more.
const FREE_PARTS_MIN: u64 = 10;
/// A move whose destination has given up so often is given up: a full disk does not get emptier.
const SETBACKS_MAX: u32 = 3;
/// How long a node gets nothing after that. An operator makes room meanwhile, or other moves do.
const REFUSED_MS: u64 = 600_000;

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
    /// The store with which each target has served.
    pub stores: BTreeMap<TargetId, StoreId>,
    /// What was decided last about growth, if nothing was to be done.
    pub quiet: Option<Situation>,
    heard: BTreeMap<NodeId, Heard>,
    /// Nodes of which a new life has spoken, and since when: the former one counts as dead.
    restarting: BTreeMap<NodeId, Millis>,
    /// How often a destination of a move has given up while its node was alive.
    setbacks: BTreeMap<TargetId, u32>,
    /// Nodes on which a move has failed, and until when they are left alone.
    refused: BTreeMap<NodeId, Millis>,
    ticked_at: Millis,
    /// When a node whose data is of another cluster, or of lost chains, was last refused.
    refused_data_at: Option<Millis>,
}

/// All that growth is decided from. As long as it is the same, so is the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Situation {
    routing: RoutingVersion,
    wanted: Wanted,
    alive: BTreeSet<NodeId>,
    full: BTreeSet<NodeId>,
    hopeless: Vec<ChainId>,
}

/// The newest heartbeat of a node's present life.
#[derive(Clone, Debug)]
struct Heard {
    at: Millis,
    sequence: u64,
    targets: Vec<TargetReport>,
    /// Of all targets together.
    capacity_bytes: u64,
}

impl Heard {
    fn used_bytes(&self) -> u64 {
        self.targets.iter().map(|line| line.used_bytes).sum()
    }
}

/// What a scan decides.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub chains: Vec<Chain>,
    pub reasons: Vec<Reason>,
    /// Moves that are complete with it.
    pub ended: Vec<Move>,
    /// Targets that serve with another store than is known.
    pub stores: Vec<(TargetId, StoreId)>,
}

impl Changes {
    /// Nothing is to be written.
    pub(crate) fn is_empty(&self) -> bool {
        self.chains.is_empty() && self.stores.is_empty()
    }
}

/// What has to happen before a heartbeat can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Nothing.
    Known,
    /// Only its answer, again: it was taken, and that did not reach the node.
    Repeated,
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
            stores: loaded.stores,
            quiet: None,
            heard: BTreeMap::new(),
            restarting: BTreeMap::new(),
            setbacks: BTreeMap::new(),
            refused: BTreeMap::new(),
            ticked_at: now,
            refused_data_at: None,
        }
    }

    /// Refuses a node whose data is not of this cluster.
    pub(crate) fn check_data(
        &mut self,
        node: NodeId,
        data: DataFolder,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let ours = self.routing.cluster;
        let refusal = match data {
            DataFolder::Of(theirs) if theirs != ours => {
                MgmtdError::OtherCluster { node, theirs, ours }
            }
            DataFolder::Unmarked if self.routing.chains.is_empty() => {
                MgmtdError::ChainsLost { node }
            }
            _ => return Ok(()),
        };
        self.refused_data_at = Some(now);
        Err(refusal)
    }

    /// Whether the first chains may be made: not while nodes with data of other chains report, which
    /// means that this store is not the one that the cluster had.
    pub(crate) fn may_make_chains(&self, timers: &Timers, now: Millis) -> bool {
        // Refused processes end and are started again: they need longer than a heartbeat does.
        let quiet_ms = timers.node_failure_ms.saturating_mul(30);
        self.refused_data_at.is_none_or(|at| now.since(at) >= quiet_ms)
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
        if self.restarting.contains_key(&node) {
            return Err(MgmtdError::Replaced { node, address: row.info.address.clone() });
        }
        match self.heard.get(&node) {
            // Not heard anew: it says when the node was alive no better than the first time.
            Some(heard) if heartbeat.sequence == heard.sequence => Ok(Admission::Repeated),
            Some(heard) if heartbeat.sequence < heard.sequence => Err(MgmtdError::Stale {
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
        let Heartbeat { node, sequence, targets, capacity_bytes, .. } = heartbeat;
        let said = |targets: &[TargetReport]| -> Vec<(TargetId, LocalReport)> {
            targets.iter().map(|line| (line.target, line.report)).collect()
        };
        let new = said(&targets);
        let before = self.heard.insert(node, Heard { at: now, sequence, targets, capacity_bytes });
        before.is_none_or(|before| said(&before.targets) != new)
    }

    /// A new life of a node has spoken.
    pub(crate) fn restarts(&mut self, node: NodeId, now: Millis) {
        self.restarting.entry(node).or_insert(now);
    }

    /// Whether a target of the node is still SERVING or SYNCING.
    pub(crate) fn takes_part(&self, node: NodeId) -> bool {
        let active = |state| matches!(state, PublicState::Serving | PublicState::Syncing);
        self.routing.targets_of_node(node).any(|(_, place)| active(place.state))
    }

    /// A former life's reports say nothing any more.
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.heard.remove(&node);
        self.restarting.remove(&node);
    }

    /// Whether a chain has to wait before anything of it is decided: some of those that serve it are
    /// dead, and of the others none has been heard lately. If all of them die, as they do when the
    /// power fails or all processes are killed, they must be found dead *together*: then each of
    /// them may lead. One after the other they would leave the last one alone as the authority,
    /// and its disk may be the one that is lost. It ends with a heartbeat of one of them, or after
    /// `node_failure_ms` of silence of the last; nobody is served by the chain meanwhile anyway.
    fn must_wait(
        &self,
        chain: &Chain,
        reports: &BTreeMap<TargetId, LocalReport>,
        timers: &Timers,
        now: Millis,
    ) -> bool {
        let serves = |place: &ChainTarget| {
            reports.get(&place.target).is_some_and(|report| match report.state {
                LocalState::UpToDate => true,
                LocalState::Online => report.chain_version != chain.version,
                LocalState::Offline => false,
            })
        };
        let restarted =
            chain.serving().filter_map(|place| self.restarting.get(&place.node)).max().copied();
        let heard_lately = |place: &&ChainTarget| {
            self.heard.get(&place.node).is_some_and(|heard| {
                now.since(heard.at) < timers.node_lease_ms()
                    && restarted.is_none_or(|since| heard.at >= since)
            })
        };
        let (alive, dead): (Vec<&ChainTarget>, Vec<&ChainTarget>) =
            chain.serving().partition(|place| serves(place));
        !dead.is_empty() && !alive.is_empty() && !alive.iter().any(heard_lately)
    }

    pub(crate) fn is_alive(&self, node: NodeId, timers: &Timers, now: Millis) -> bool {
        self.heard.get(&node).is_some_and(|heard| now.since(heard.at) < timers.node_failure_ms)
    }

    /// See [`Situation`].
    pub(crate) fn situation(&self, timers: &Timers, now: Millis) -> Situation {
        let alive = self.nodes.keys().filter(|node| self.is_alive(**node, timers, now));
        Situation {
            routing: self.routing.version,
            wanted: self.wanted.clone(),
            alive: alive.copied().collect(),
            full: self.full(now),
            hopeless: self.hopeless().map(|this| this.chain).collect(),
        }
    }

    /// Nodes that shall get nothing more: their disk has hardly any room left, or a move to
    /// them has failed lately. A node that has said nothing of its room has some.
    pub(crate) fn full(&self, now: Millis) -> BTreeSet<NodeId> {
        let is_full = |heard: &Heard| {
            let free = heard.capacity_bytes.saturating_sub(heard.used_bytes());
            heard.capacity_bytes > 0 && free < heard.capacity_bytes / FREE_PARTS_MIN
        };
        let full = self.heard.iter().filter(|(_, heard)| is_full(heard));
        let refused = self.refused.iter().filter(|(_, until)| now < **until);
        full.map(|(node, _)| *node).chain(refused.map(|(node, _)| *node)).collect()
    }

    /// Nodes with a target that cannot even be opened.
    pub(crate) fn broken(&self) -> impl Iterator<Item = NodeId> {
        let broken = |heard: &Heard| heard.targets.iter().any(cannot_open);
        self.heard.iter().filter(move |(_, heard)| broken(heard)).map(|(node, _)| *node)
    }

    /// A move's destination has given up while its node was alive: its disk is full, or fails.
    pub(crate) fn note_setbacks(&mut self, timers: &Timers, now: Millis, chains: &[Chain]) {
        for chain in chains {
            let Some(this) = self.routing.moves.get(&chain.id) else { continue };
            let before = self.routing.chains.get(&chain.id);
            let was_syncing = before.and_then(|chain| chain.state_of(this.destination))
                == Some(PublicState::Syncing);
            let Some(place) = chain.place(this.destination) else { continue };
            if was_syncing
                && place.state == PublicState::Offline
                && self.is_alive(place.node, timers, now)
                && self.line(place.node, place.target).is_some_and(|line| says_offline(&line))
            {
                *self.setbacks.entry(this.destination).or_default() += 1;
            }
        }
    }

    /// Whether a move will not succeed where it goes: to a node that shall leave, to a disk that is
    /// full again and again, to a target that cannot even be opened.
    fn is_hopeless(&self, this: &Move) -> bool {
        let chain = self.routing.chains.get(&this.chain);
        let Some(place) = chain.and_then(|chain| chain.place(this.destination)) else {
            return false;
        };
        let setbacks = self.setbacks.get(&this.destination).copied().unwrap_or(0);
        let cannot_open =
            self.line(place.node, place.target).is_some_and(|line| cannot_open(&line));
        self.wanted.leaving.contains(&place.node) || setbacks >= SETBACKS_MAX || cannot_open
    }

    /// Moves that will not succeed.
    pub(crate) fn hopeless(&self) -> impl Iterator<Item = &Move> {
        self.routing.moves.values().filter(|this| self.is_hopeless(this))
    }

    /// A move to this node was given up.
    pub(crate) fn refuse(&mut self, node: NodeId, destination: TargetId, now: Millis) {
        self.setbacks.remove(&destination);
        self.refused.insert(node, now.after(REFUSED_MS));
    }

    fn line(&self, node: NodeId, target: TargetId) -> Option<TargetReport> {
        let heard = self.heard.get(&node)?;
        heard.targets.iter().find(|line| line.target == target).copied()
    }

    /// What has to change now.
    pub(crate) fn scan(&self, timers: &Timers, now: Millis) -> Changes {
        let mut lines: BTreeMap<TargetId, &TargetReport> = BTreeMap::new();
        for (node, heard) in &self.heard {
            if self.is_alive(*node, timers, now) && !self.restarting.contains_key(node) {
                lines.extend(heard.targets.iter().map(|line| (line.target, line)));
            }
        }
        let mut reports: BTreeMap<TargetId, LocalReport> =
            lines.iter().map(|(target, line)| (*target, line.report)).collect();
        for place in self.routing.chains.values().flat_map(|chain| &chain.targets) {
            if let Some(line) = lines.get(&place.target)
                && self.is_foreign(place, line)
                && let Some(report) = reports.get_mut(&place.target)
            {
                report.state = LocalState::Offline;
            }
        }
        let mut changes = Changes::default();
        for chain in self.routing.chains.values() {
            if self.must_wait(chain, &reports, timers, now) {
                continue;
            }
            let mut next = advance(chain, &reports);
            if let Some(this) = self.routing.moves.get(&chain.id) {
                let (followed, ended) = follow(chain, next.chain, this);
                next.chain = followed;
                changes.ended.extend(ended.then_some(*this));
            }
            let serving = next.chain.serving().map(|place| place.target);
            changes.stores.extend(serving.filter_map(|target| {
                let line = lines.get(&target)?;
                // A report of a former state of the chain may be about a former store. Of a target
                // that never served there is none, and its store is written down with the change
                // that lets it serve: were it lost before its next heartbeat, an empty one would
                // lead in its place.
                let news = match self.stores.get(&target) {
                    None => true,
                    known => {
                        line.report.chain_version == chain.version && known.copied() != line.store
                    }
                };
                news.then_some((target, line.store?))
            }));
            if next.changed(chain) {
                changes.reasons.extend(next.reasons);
                changes.chains.push(next.chain);
            }
        }
        changes
    }

    /// Targets that served last and report another store than the one they served with: the disk was
    /// emptied or replaced, or its folder is missing. Such a store is never taken for the chain's
    /// data; the target counts as dead until another one serves, and is synced then.
    pub(crate) fn foreign(&self) -> impl Iterator<Item = ForeignStore> {
        self.routing.chains.values().flat_map(move |chain| {
            chain.targets.iter().filter_map(move |place| {
                let line = self.line(place.node, place.target)?;
                self.is_foreign(place, &line).then_some(ForeignStore {
                    target: place.target,
                    node: place.node,
                    chain: chain.id,
                    served_with: self.stores.get(&place.target).copied()?,
                    reported: line.store?,
                })
            })
        })
    }

    /// See [`Self::foreign`].
    fn is_foreign(&self, place: &ChainTarget, line: &TargetReport) -> bool {
        let known = self.stores.get(&place.target).copied();
        let leads = matches!(place.state, PublicState::Serving | PublicState::LastSrv);
        leads && line.store.is_some() && !line.is_of(known)
    }

    /// What making `target` the one that leads its chain would mean, and the chain with it.
    pub(crate) fn promotion(
        &self,
        timers: &Timers,
        now: Millis,
        target: TargetId,
    ) -> Result<(Promotion, Transition, StoreId), MgmtdError> {
        let refused = |reason: String| MgmtdError::CannotPromote { target, reason };
        let chain = self.routing.chain_of_target(target);
        let chain = chain.ok_or_else(|| refused("no chain has this target".into()))?;
        let alive = |place: &ChainTarget| {
            let line = self.line(place.node, place.target);
            line.filter(|line| self.is_alive(place.node, timers, now) && !says_offline(line))
        };
        let transition = promote(chain, target).map_err(|reason| {
            refused(match reason {
                NotPromotable::Absent => "no chain has this target".into(),
                NotPromotable::Served => format!("{} has a target that serves", chain.id),
                NotPromotable::MayLead => format!(
                    "it was one of the last to serve {}, which comes back with it by itself",
                    chain.id
                ),
            })
        })?;
        if let Some(place) = chain.targets.iter().find(|place| {
            let back = alive(place).is_some_and(|line| !self.is_foreign(place, &line));
            place.state == PublicState::LastSrv && back
        }) {
            return Err(refused(format!("{} is back and leads {}", place.target, chain.id)));
        }
        let place = chain.place(target).ok_or_else(|| refused("it is gone".into()))?;
        let line = alive(place).ok_or_else(|| {
            refused(format!("{} does not report it as usable: start the node first", place.node))
        })?;
        let store = line.store.ok_or_else(|| refused("its store is not open".into()))?;
        let all_empty =
            || chain.targets.iter().all(|place| alive(place).is_some_and(|line| line.chunks == 0));
        if line.chunks == 0 && !all_empty() {
            return Err(refused(
                "its store is empty, and a chain led by it would empty the others; promote a \
                 target that holds chunks"
                    .into(),
            ));
        }
        let lost = chain.targets.iter().filter(|it| it.state == PublicState::LastSrv);
        let promotion = Promotion {
            target,
            node: place.node,
            chain: chain.id,
            chunks: line.chunks,
            served_last: lost.map(|place| (place.target, place.node)).collect(),
            was_complete: self.stores.get(&target) == Some(&store),
        };
        Ok((promotion, transition, store))
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
            NodeStatus {
                node,
                address: row.info.address.clone(),
                alive: self.is_alive(node, timers, now),
                heartbeat_age_ms: heard.map(|heard| now.since(heard.at)),
                used_bytes: heard.map_or(0, Heard::used_bytes),
                capacity_bytes: heard.map_or(0, |heard| heard.capacity_bytes),
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
            foreign_stores: self.foreign().collect(),
            chains_down: chains.values().filter(|chain| chain.head().is_none()).count() as u32,
        }
    }
}

fn says_offline(line: &TargetReport) -> bool {
    line.report.state == LocalState::Offline
}

fn cannot_open(line: &TargetReport) -> bool {
    says_offline(line) && line.store.is_none()
}
