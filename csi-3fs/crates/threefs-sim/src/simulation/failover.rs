//! Failover of mgmtd: two processes over one store, with separate clocks. The primary is killed, stopped
//! or cut off from the store. A former primary answers heartbeats until its lease ends, or until a write
//! of it is refused.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::heartbeat::HeartbeatReply;
use threefs_core::time::Millis;
use threefs_mgmtd::{LeaseState, LeaseWatch, MgmtdError, Model};

use super::{Packet, SimEvent, Simulation, Violation};
use crate::fault_plan::FAULTS_END_US;
use crate::manager::TIMERS;
use crate::mutations::Mutation;

/// Seed of the generator of failovers.
const SEED: u64 = 0x6661_696c;
/// Endpoint of the second mgmtd.
pub(super) const SECOND: usize = 1_000;
/// Interval in which an mgmtd renews or reads the lease.
const TICK_US: u64 = 5_000;
const MGMTDS: usize = 2;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Kill,
    Stop,
    CutStore,
}

/// A fault of the primary, and links of nodes that are cut with it.
#[derive(Clone, Debug)]
struct Planned {
    at: u64,
    kind: Kind,
    for_us: u64,
    cuts: Vec<Cut>,
}

/// A node or client is cut off from one of the mgmtds.
#[derive(Clone, Copy, Debug)]
struct Cut {
    endpoint: usize,
    /// From the primary, or from the other one.
    from_primary: bool,
    for_us: u64,
}

/// One mgmtd process.
#[derive(Debug, Default)]
struct Process {
    dead_until: u64,
    stopped_until: u64,
    cut_until: u64,
    watch: LeaseWatch,
    backlog: Vec<SimEvent>,
}

/// What an mgmtd does with a message.
enum Role {
    Leads,
    Former,
    Contends,
    Stopped,
    Dead,
}

/// Both mgmtds and the lease in their store.
#[derive(Debug)]
pub(crate) struct Failovers {
    plan: Vec<Planned>,
    /// No other fault occurs: then the leases of nodes never end.
    pub(super) alone: bool,
    processes: [Process; MGMTDS],
    rates: [f64; MGMTDS],
    /// The process that has taken the lease last, unless it is dead.
    leader: Option<usize>,
    epoch: u64,
    renewal: u64,
    renewed_at: Millis,
    /// The one that led before, and its state: it may still answer.
    former: Option<(usize, Model)>,
    pub(super) takeovers: u64,
}

impl Failovers {
    pub(crate) fn new(seed: u64, mutation: Mutation, (nodes, clients): (usize, usize)) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SEED);
        let (some, alone) = (rng.random_bool(0.25), rng.random_bool(0.4));
        let some = match mutation {
            Mutation::None => some,
            _ => mutation.needs_failovers(),
        };
        let alone = match mutation {
            Mutation::None => some && alone,
            _ => mutation.stops_data(),
        };
        let count = if alone { 1 } else { rng.random_range(1..=4) };
        let plan = (0..if some { count } else { 0 }).map(|_| {
            let kind = [Kind::Kill, Kind::Stop, Kind::CutStore][rng.random_range(0..3)];
            // A node and a client that know only the former primary.
            let split = !alone && rng.random_bool(0.5);
            let kind = if split { Kind::CutStore } else { kind };
            let times = if split { 250_000..450_000 } else { 1_000..450_000 };
            let for_us = rng.random_range(times);
            let (node, client) = (rng.random_range(0..nodes), rng.random_range(0..clients));
            let ends = if alone { vec![] } else { vec![node, nodes + 1 + client] };
            let cuts = ends.into_iter().filter_map(|endpoint| {
                let cut = Cut { endpoint, from_primary: rng.random_bool(0.3), for_us };
                (split || rng.random_bool(0.5)).then_some(cut)
            });
            let cuts = cuts.map(|cut| Cut { from_primary: cut.from_primary && !split, ..cut });
            let cuts = cuts.collect();
            Planned { at: rng.random_range(60_000..FAULTS_END_US - 200_000), kind, for_us, cuts }
        });
        let plan = plan.collect();
        let most = if alone { 0.02 } else { 0.05 };
        let rates = [(); MGMTDS].map(|()| rng.random_range(1.0 - most..1.0 + most));
        let rates = if some { rates } else { [1.0; MGMTDS] };
        Self {
            plan,
            alone,
            processes: Default::default(),
            rates,
            leader: Some(0),
            epoch: 1,
            renewal: 0,
            renewed_at: Millis(0),
            former: None,
            takeovers: 0,
        }
    }

    /// Whether this schedule has two mgmtds.
    pub(super) fn are_some(&self) -> bool {
        !self.plan.is_empty()
    }

    fn clock(&self, mgmtd: usize, now: u64) -> Millis {
        Millis((now as f64 * self.rates[mgmtd] / 1_000.0) as u64)
    }

    fn role(&self, mgmtd: usize, now: u64) -> Role {
        let process = &self.processes[mgmtd];
        match self.leader {
            _ if now < process.dead_until => Role::Dead,
            _ if now < process.stopped_until => Role::Stopped,
            Some(leader) if leader == mgmtd => Role::Leads,
            _ if self.former.as_ref().is_some_and(|(former, _)| *former == mgmtd) => Role::Former,
            _ => Role::Contends,
        }
    }
}

impl Simulation {
    /// Schedules the faults of the primary.
    pub(super) fn plan_failovers(&mut self) {
        for number in 0..self.failovers.plan.len() {
            self.push(self.failovers.plan[number].at, SimEvent::Failover { number });
        }
        for mgmtd in 0..if self.failovers.are_some() { MGMTDS } else { 0 } {
            self.push(1_000 * mgmtd as u64, SimEvent::Mgmtd { mgmtd });
        }
    }

    fn mgmtd_endpoint(&self, mgmtd: usize) -> usize {
        if mgmtd == 0 { self.manager_endpoint() } else { SECOND }
    }

    /// Sends a message to each mgmtd.
    pub(crate) fn send_to_managers(&mut self, from: usize, packet: Packet) {
        if self.failovers.are_some() {
            self.send(from, SECOND, packet.clone());
        }
        self.send(from, self.manager_endpoint(), packet);
    }

    /// The clock of the primary.
    pub(crate) fn manager_now(&self) -> Millis {
        self.failovers.clock(self.failovers.leader.unwrap_or(0), self.now)
    }

    /// Whether no mgmtd leads now.
    pub(crate) fn manager_is_away(&self) -> bool {
        if !self.failovers.are_some() {
            return self.manager_away;
        }
        let leads = |leader| {
            matches!(self.failovers.role(leader, self.now), Role::Leads)
                && self.manager.holds_lease(self.manager_now())
        };
        !self.failovers.leader.is_some_and(leads)
    }

    pub(super) fn failover(&mut self, number: usize) {
        let Some(leader) = self.failovers.leader.filter(|_| !self.faults_ended) else { return };
        let Planned { kind, for_us, cuts, .. } = self.failovers.plan[number].clone();
        self.note(|| format!("FAULT {kind:?} of mgmtd {leader} for {for_us} us"));
        let process = &mut self.failovers.processes[leader];
        let until = self.now + for_us;
        match kind {
            Kind::Kill => {
                *process = Process { dead_until: until, ..Process::default() };
                self.failovers.leader = None;
            }
            Kind::Stop => process.stopped_until = until,
            Kind::CutStore => process.cut_until = until,
        }
        for Cut { endpoint, from_primary, for_us } in cuts {
            let mgmtd = if from_primary { leader } else { MGMTDS - 1 - leader };
            let (mgmtd, until) = (self.mgmtd_endpoint(mgmtd), self.now + for_us);
            self.network.blocked.insert((endpoint, mgmtd), until);
            self.network.blocked.insert((mgmtd, endpoint), until);
        }
    }

    /// The primary renews its lease, or another mgmtd reads it.
    pub(super) fn mgmtd_ticks(&mut self, mgmtd: usize) -> Result<(), Violation> {
        self.push(TICK_US, SimEvent::Mgmtd { mgmtd });
        self.check_leases()?;
        let now = self.now;
        let role = self.failovers.role(mgmtd, now);
        if matches!(role, Role::Dead | Role::Stopped) {
            return Ok(());
        }
        for event in std::mem::take(&mut self.failovers.processes[mgmtd].backlog) {
            self.push(0, event);
        }
        if now < self.failovers.processes[mgmtd].cut_until {
            return Ok(());
        }
        let clock = self.failovers.clock(mgmtd, now);
        match role {
            Role::Leads if !self.manager.holds_lease(clock) => {
                self.manager.take_over(clock);
                self.start_term(mgmtd);
            }
            Role::Leads if clock.since(self.failovers.renewed_at) >= TIMERS.renewal_ms() => {
                self.renewed(clock);
            }
            // Its renewal is refused.
            Role::Former => self.failovers.former = None,
            Role::Contends => self.contend(mgmtd, clock),
            _ => {}
        }
        Ok(())
    }

    fn contend(&mut self, mgmtd: usize, clock: Millis) {
        let (epoch, renewal) = (self.failovers.epoch, self.failovers.renewal);
        let state = LeaseState { epoch, renewal, routing: self.manager.routing().version };
        let watch = &mut self.failovers.processes[mgmtd].watch;
        watch.observe(state, clock, &TIMERS);
        let silence_ms = match self.mutation {
            Mutation::TakeOverAfterLease => TIMERS.primary_lease_ms,
            _ => TIMERS.takeover_ms(),
        };
        if !watch.is_silent(silence_ms, &TIMERS) {
            return;
        }
        if let Some(leader) = self.failovers.leader {
            self.failovers.former = Some((leader, self.manager.model().clone()));
        }
        match self.mutation {
            Mutation::ForgetFormerPrimary => self.manager.restart(clock),
            _ => self.manager.take_over(clock),
        }
        self.failovers.takeovers += 1;
        self.start_term(mgmtd);
    }

    fn start_term(&mut self, mgmtd: usize) {
        self.failovers.leader = Some(mgmtd);
        self.failovers.epoch += 1;
        self.note(|| format!("mgmtd {mgmtd} leads"));
        self.renewed(self.failovers.clock(mgmtd, self.now));
    }

    fn renewed(&mut self, clock: Millis) {
        self.failovers.renewal += 1;
        self.failovers.renewed_at = clock;
        self.manager.renewed(clock);
    }

    /// Without other faults, each node keeps its lease, so reads and writes continue.
    fn check_leases(&self) -> Result<(), Violation> {
        let ended = |node: &usize| {
            let node = &self.nodes[*node];
            node.lease.valid_until().is_some_and(|until| until <= node.clock(self.now))
        };
        match (0..self.nodes.len()).find(ended) {
            Some(node) if self.failovers.alone => {
                Err(self.violation(format!("the lease of node {node} ended during a failover")))
            }
            _ => Ok(()),
        }
    }

    /// Handles a message to an mgmtd.
    pub(super) fn manager_receives(&mut self, endpoint: usize, from: usize, packet: Packet) {
        let mgmtd = usize::from(endpoint == SECOND);
        match self.failovers.role(mgmtd, self.now) {
            Role::Leads if !self.manager_is_away() => self.primary_receives(endpoint, from, packet),
            Role::Former => self.former_receives((mgmtd, endpoint), from, packet),
            Role::Stopped => {
                let event = SimEvent::Deliver { from, to: endpoint, packet };
                self.failovers.processes[mgmtd].backlog.push(event);
            }
            _ => {}
        }
    }

    /// Handles a message to the primary mgmtd.
    fn primary_receives(&mut self, to: usize, from: usize, packet: Packet) {
        match packet {
            Packet::Heartbeat { heartbeat, seen, fences, sent_at, incarnation } => {
                let (now, before) = (self.manager_now(), self.manager.routing());
                let reply = self.manager.heartbeat(now, &heartbeat, &seen, &fences);
                self.decided(&before);
                match reply {
                    Ok((reply, fences)) => {
                        let reply = granted(reply, self.mutation);
                        let reply = Packet::HeartbeatReply { reply, fences, sent_at, incarnation };
                        self.send(to, from, reply);
                    }
                    Err(MgmtdError::Replaced { .. }) => {
                        self.send(to, from, Packet::Replaced { incarnation });
                    }
                    Err(_) => {}
                }
            }
            Packet::AskRouting { incarnation } => {
                let routing = self.manager.routing();
                self.send(to, from, Packet::Routing { routing, incarnation });
            }
            Packet::AskFences { known, incarnation } => {
                self.send_fences(to, from, known, incarnation);
            }
            _ => {}
        }
    }

    fn former_receives(&mut self, (mgmtd, endpoint): (usize, usize), from: usize, packet: Packet) {
        let clock = self.failovers.clock(mgmtd, self.now);
        let Some((_, model)) = &mut self.failovers.former else { return };
        if !model.holds_lease(clock) && self.mutation != Mutation::AnswerWithoutLease {
            self.failovers.former = None;
            return;
        }
        let reply = match packet {
            Packet::Heartbeat { heartbeat, seen, fences, sent_at, incarnation } => {
                let version = model.routing().version;
                let reply = model.heartbeat(&heartbeat, &seen, &fences, clock);
                if model.routing().version != version {
                    // A write of it is refused, and it steps down.
                    self.failovers.former = None;
                    return;
                }
                match reply {
                    Ok((reply, fences)) => {
                        let reply = granted(reply, self.mutation);
                        Packet::HeartbeatReply { reply, fences, sent_at, incarnation }
                    }
                    Err(MgmtdError::Replaced { .. }) => Packet::Replaced { incarnation },
                    Err(_) => return,
                }
            }
            Packet::AskRouting { incarnation } => {
                Packet::Routing { routing: model.routing().clone().into(), incarnation }
            }
            Packet::AskFences { known, incarnation } => match model.fences_after(known) {
                Some(fences) => Packet::Fences { fences: Box::new(fences), incarnation },
                None => return,
            },
            _ => return,
        };
        self.send(endpoint, from, reply);
    }

    /// All mgmtds run again.
    pub(super) fn end_failovers(&mut self) {
        for process in &mut self.failovers.processes {
            (process.dead_until, process.stopped_until, process.cut_until) = (0, 0, 0);
        }
    }
}

/// The lease that a heartbeat is answered with.
fn granted(reply: HeartbeatReply, mutation: Mutation) -> HeartbeatReply {
    let lease_ms = match mutation {
        Mutation::HalfLease => TIMERS.node_failure_ms / 2,
        Mutation::WholeLease => TIMERS.node_failure_ms,
        _ => reply.lease_ms,
    };
    HeartbeatReply { lease_ms, ..reply }
}
