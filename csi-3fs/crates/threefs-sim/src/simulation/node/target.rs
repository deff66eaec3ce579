//! A target: a replica on its store; delivers events and executes actions.

use std::collections::BTreeMap;

use bytes::Bytes;
use threefs_core::chunk::Which;
use threefs_core::heartbeat::{LocalReport, LocalState, TargetReport};
use threefs_core::hosting::Reopening;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, RequestTag, StoreId};
use threefs_core::message::{StorageReply, StorageRequest, StorageResult, Updated, check_payload};
use threefs_core::replica::{Action, Event, Prepare, Replica, Token};
use threefs_core::routing::PublicState;
use threefs_core::time::Millis;

use super::disk::read_reply;
use super::hosting::PAUSES;
use super::port::HeldBudget;
use crate::mutations::Mutation;
use crate::simulation::job::Job;
use crate::simulation::{CallerId, Packet, SimEvent, Simulation, Violation};
use crate::store::Store;
use crate::topology::{At, chain_id};

/// Destination of a reply, and the budget that it releases.
#[derive(Debug)]
pub(crate) struct Origin {
    pub caller: CallerId,
    pub budget: Option<HeldBudget>,
}

/// A target on its node.
pub(crate) struct Hosted {
    at: At,
    /// Its store.
    pub store: Store,
    /// The product's replica; `None` while the store is not open.
    pub replica: Option<Replica>,
    /// Number of this opening of the store.
    pub opening: u64,
    /// Failures of the store in this incarnation of the node.
    pub reopening: Reopening,
    /// The store reports I/O errors before this time.
    pub fails_until: u64,
    /// The chain version in which it last reported OFFLINE, in this opening.
    pub reported_offline: Option<ChainVersion>,
    tokens: BTreeMap<Token, Origin>,
    next_token: u64,
    wake_at: Option<u64>,
    // For mutations: the requests of each update.
    pub(super) update_tokens: BTreeMap<RequestTag, Token>,
}

impl Hosted {
    pub(crate) fn new(at: At) -> Self {
        Self {
            at,
            store: Store::new(StoreId(at.target().0.into())),
            replica: None,
            opening: 0,
            reopening: Reopening::new(PAUSES),
            fails_until: 0,
            reported_offline: None,
            tokens: BTreeMap::new(),
            next_token: 0,
            wake_at: None,
            update_tokens: BTreeMap::new(),
        }
    }

    /// Starts in a new process, without earlier failures.
    pub(super) fn start(&mut self) {
        self.reopening = Reopening::new(PAUSES);
    }

    /// Starts a replica on a newly opened store.
    pub(super) fn start_replica(&mut self, replica: Replica) {
        self.replica = Some(replica);
        self.reported_offline = None;
    }

    /// Drops the replica; its requests stay unanswered.
    pub(super) fn close(&mut self) -> Vec<Origin> {
        self.replica = None;
        self.opening += 1;
        self.wake_at = None;
        self.update_tokens.clear();
        std::mem::take(&mut self.tokens).into_values().collect()
    }

    /// Whether it serves clients now.
    pub fn serves(&self, now: Millis) -> bool {
        self.replica.as_ref().is_some_and(|replica| replica.serves(now))
    }

    /// Its state in the chain according to its own routing.
    pub(super) fn public_state(&self) -> Option<PublicState> {
        self.replica.as_ref()?.chain()?.state_of(self.at.target())
    }

    /// Its report for the next heartbeat.
    pub(super) fn line(&self, now: Millis) -> TargetReport {
        let closed = LocalReport { state: LocalState::Offline, chain_version: ChainVersion(0) };
        let open = self.replica.is_some();
        TargetReport {
            target: self.at.target(),
            chain: chain_id(self.at.chain),
            report: self.replica.as_ref().map_or(closed, |replica| replica.report(now)),
            used_bytes: 0,
            store: open.then_some(self.store.id),
            chunks: if open { self.store.slots().len() as u64 } else { 0 },
        }
    }

    /// Changes a request such that it passes the version checks.
    fn skip_version_check(&self, request: &mut StorageRequest) {
        let Some(chain) = self.replica.as_ref().and_then(Replica::chain) else { return };
        match request {
            StorageRequest::Update(update) | StorageRequest::UpdateIf(update, _) => {
                update.to.chain_version = chain.version;
            }
            StorageRequest::Forward(forward) => {
                forward.to.chain_version = chain.version;
                if let Some(predecessor) = chain.predecessor(self.at.target()) {
                    forward.from = predecessor.target;
                }
                let slot = self.store.slots().get(&forward.chunk);
                let version = slot.map(|slot| slot.committed.state.version);
                forward.version = version.unwrap_or_default().next();
            }
            _ => {}
        }
    }
}

impl Simulation {
    pub(crate) fn hosted(&self, at: At) -> &Hosted {
        &self.nodes[at.node].targets[at.chain]
    }

    pub(crate) fn hosted_mut(&mut self, at: At) -> &mut Hosted {
        &mut self.nodes[at.node].targets[at.chain]
    }

    /// Whether a target serves clients now.
    pub(crate) fn serves(&self, at: At) -> bool {
        self.hosted(at).serves(self.nodes[at.node].clock(self.now))
    }

    /// Handles an admitted request.
    pub(super) fn request(
        &mut self,
        at: At,
        origin: Origin,
        mut request: StorageRequest,
        payload: Bytes,
        expires: Option<Millis>,
    ) -> Result<(), Violation> {
        let (mutation, serves) = (self.mutation, self.serves(at));
        let hosted = self.hosted_mut(at);
        hosted.next_token += 1;
        let token = Token(hosted.next_token);
        hosted.tokens.insert(token, origin);
        if let Err(error) = check_payload(&request, &payload) {
            return self.execute(at, vec![Action::Reply { token, result: Err(error) }]);
        }
        match (&mut request, mutation) {
            (request, Mutation::SkipVersionCheck) => hosted.skip_version_check(request),
            (
                StorageRequest::Update(update) | StorageRequest::UpdateIf(update, _),
                Mutation::AcknowledgeBeforeTail,
            ) => {
                hosted.update_tokens.insert(update.tag, token);
            }
            (StorageRequest::Read(read), Mutation::ReadPending) => {
                if serves
                    && let Ok(version) = hosted.store.read(read.chunk, Which::Newest)
                    && version.state.exists()
                {
                    let chain_version = read.to.chain_version;
                    let (reply, payload) = read_reply(read, &version, chain_version);
                    self.reply(at, token, Ok(StorageReply::Read(reply)), payload);
                    return Ok(());
                }
            }
            _ => {}
        }
        self.deliver_event(at, Event::Request { token, request, payload, expires })
    }

    /// Delivers an event to the replica, if there is one, and executes its actions.
    pub(crate) fn deliver_event(&mut self, at: At, event: Event) -> Result<(), Violation> {
        let now = self.nodes[at.node].clock(self.now);
        let hosted = self.hosted_mut(at);
        let Some(replica) = &mut hosted.replica else { return Ok(()) };
        let mut actions = Vec::new();
        replica.handle(now, event, &hosted.store, &mut actions);
        let (wakeup, has_failed) = (replica.next_wakeup(), replica.has_failed());
        self.execute(at, actions)?;
        if has_failed {
            self.store_failed(at);
        } else if let Some(wake) = wakeup {
            self.wake_at(at, wake);
        }
        Ok(())
    }

    fn wake_at(&mut self, at: At, wake: Millis) {
        let wake_at = self.nodes[at.node].moment_of(wake).max(self.now + 1);
        let now = self.now;
        let hosted = self.hosted_mut(at);
        if hosted.wake_at.is_none_or(|before| wake_at < before || before <= now) {
            hosted.wake_at = Some(wake_at);
            let opening = hosted.opening;
            self.push(wake_at - now, SimEvent::Wake { at, opening });
        }
    }

    pub(crate) fn wake_target(&mut self, at: At) -> Result<(), Violation> {
        self.hosted_mut(at).wake_at = None;
        self.deliver_event(at, Event::Tick)
    }

    fn execute(&mut self, at: At, actions: Vec<Action>) -> Result<(), Violation> {
        for action in actions {
            match action {
                Action::Apply { op, update, payload, payload_checksum, prepare, .. } => {
                    self.check_fencing(at, op, &update)?;
                    let full = self.nodes[at.node].full && !payload.is_empty();
                    let accepted = !full && self.accepts(at, &update, &payload, payload_checksum);
                    let unsent = self.send_prepare(at, prepare, &payload, accepted);
                    let payload = (payload, payload_checksum);
                    self.start_apply(at, op, update, payload, (full, unsent));
                }
                Action::Commit { op, chunk, version, chain_version } => {
                    let result = self.hosted_mut(at).store.commit(chunk, version, chain_version);
                    self.check_epoch(at, chunk)?;
                    self.observe_commit(at, chunk)?;
                    self.disk(at, 0..300, Job::Commit { op, result });
                }
                Action::Forget { op, chunk } => {
                    self.hosted_mut(at).store.forget(chunk);
                    self.disk(at, 100..2_500, Job::Forgotten { op });
                }
                Action::Purge { op, chunk, version } => {
                    self.hosted_mut(at).store.purge(chunk, version);
                    if self.has_seen_promotion(at) {
                        self.history.purged(chunk, version);
                    }
                    self.disk(at, 0..300, Job::Purged { op });
                }
                Action::Drop { op, chunk } => {
                    self.hosted_mut(at).store.purge(chunk, ChunkVersion(0));
                    self.disk(at, 0..300, Job::Purged { op });
                }
                Action::ForgetInodes { op, inodes, version_floor } => {
                    self.hosted_mut(at).store.forget_inodes(inodes, version_floor);
                    self.disk(at, 100..2_500, Job::InodesForgotten { op });
                }
                Action::ReadContent { op, chunk, which } => {
                    self.disk(at, 50..1_000, Job::Content { op, chunk, which });
                }
                Action::ServeRead { token, request, chain_version } => {
                    self.disk(at, 50..1_000, Job::Read { token, request, chain_version });
                }
                Action::ServeReads { token, reads, chain_version } => {
                    self.disk(at, 50..1_000, Job::Reads { token, reads, chain_version });
                }
                Action::ServeRepair { token, request, which } => {
                    self.disk(at, 50..1_000, Job::Repair { token, request, which });
                }
                Action::Call { call, node, request, payload, timeout_ms } => {
                    let to = node.0 as usize;
                    self.answer_early(at, call.0, to, &request);
                    self.call(at, call.0, to, request, payload, timeout_ms);
                }
                Action::Reply { token, result } => self.reply(at, token, result, Bytes::new()),
                Action::RefreshRouting => {
                    let incarnation = self.nodes[at.node].incarnation;
                    self.send_to_managers(at.node, Packet::AskRouting { incarnation });
                }
                Action::Alert(alert) => self.note(|| format!("node {}: {alert}", at.node)),
            }
        }
        Ok(())
    }

    /// Sends an update to the successor, if it is accepted here; some that are optional are not sent.
    /// Returns whether it was not sent.
    fn send_prepare(
        &mut self,
        at: At,
        prepare: Option<Prepare>,
        payload: &Bytes,
        accepted: bool,
    ) -> bool {
        let Some(prepare) = prepare else { return false };
        let Prepare { call, node, request, timeout_ms, is_optional } = prepare;
        // In every fifth schedule, without a generator, so that the others are unaffected.
        let is_left_out = is_optional && self.seed % 5 == 4 && call.0.is_multiple_of(4);
        let sends = accepted && !is_left_out;
        if sends {
            let request = StorageRequest::Prepare(request);
            self.call(at, call.0, node.0 as usize, request, payload.clone(), timeout_ms);
        }
        !sends
    }

    /// Whether the target's routing is at least as new as the last promotion in its chain.
    fn has_seen_promotion(&self, at: At) -> bool {
        let chain = self.hosted(at).replica.as_ref().and_then(Replica::chain);
        chain.map(|chain| chain.version) >= self.promoted.get(&at.chain).copied()
    }

    /// For a mutation: a forward counts as answered once it is sent.
    fn answer_early(&mut self, at: At, rpc: u64, to: usize, request: &StorageRequest) {
        if let (
            Mutation::CommitBeforeReply,
            StorageRequest::Forward(forward) | StorageRequest::Confirm(forward),
        ) = (self.mutation, request)
        {
            let reply = Updated {
                version: forward.version,
                length: 0,
                checksum: forward.chunk_checksum,
                chain_version: forward.to.chain_version,
            };
            let opening = self.hosted(at).opening;
            let caller =
                CallerId { endpoint: at.node, rpc, chain: at.chain, opening, volume: None };
            let packet = Packet::response(caller, Ok(StorageReply::Updated(reply)), Bytes::new());
            self.push(1, SimEvent::Deliver { from: to, to: at.node, packet });
        }
    }

    pub(super) fn reply(&mut self, at: At, token: Token, result: StorageResult, payload: Bytes) {
        if let Some(origin) = self.hosted_mut(at).tokens.remove(&token) {
            self.answer(at.node, origin, result, payload);
        }
    }

    /// Checks that a serving replica has not reported OFFLINE about this version of the chain, and
    /// that mgmtd has recorded the store that it serves with.
    pub(crate) fn check_serving(&self, at: At) -> Result<(), Violation> {
        if !self.serves(at) {
            return Ok(());
        }
        let hosted = self.hosted(at);
        let chain = hosted.replica.as_ref().and_then(Replica::chain);
        if chain.map(|chain| chain.version) == hosted.reported_offline {
            let violation = format!("{} reports OFFLINE while it serves", self.name(at));
            return Err(self.violation(violation));
        }
        let (registered, store) = (self.store_of(at.target()), hosted.store.id);
        // The lost store of a restored manager had recorded it.
        let is_current = self.known_routing(at.node).era() == self.manager_era();
        if registered != Some(store) && is_current {
            let name = self.name(at);
            let violation =
                format!("{name} serves with {store}, but mgmtd has recorded {registered:?}");
            return Err(self.violation(violation));
        }
        Ok(())
    }

    /// Name of a target in violations.
    pub(crate) fn name(&self, at: At) -> String {
        match self.topology.chains {
            1 => format!("node {}", at.node),
            _ => format!("node {} of {}", at.node, chain_id(at.chain)),
        }
    }

    /// Records the commit of a serving replica.
    fn observe_commit(&mut self, at: At, chunk: ChunkId) -> Result<(), Violation> {
        if !self.serves(at) {
            return Ok(());
        }
        self.check_serving(at)?;
        let Some(slot) = self.hosted(at).store.slots().get(&chunk) else { return Ok(()) };
        let committed = slot.committed.clone();
        let Some(newest) = committed.state.tags.newest() else { return Ok(()) };
        self.history
            .committed(chunk, committed.state.version, newest.tag, &committed)
            .map_err(|violation| self.violation(format!("{}: {violation}", self.name(at))))
    }
}
