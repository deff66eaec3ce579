//! Agreement on a new epoch under faults, on a simulated clock: the engine's [`Reconfiguration`], and a
//! simulation of its driver's listener, connections and deadlines.
//!
//! A member that fails asks the scheduler for the running members and tries again, as a job would. Invariants:
//! every attempt ends, no member is in two groups with one name, epochs only increase, the sum in a group
//! contains the contributions of exactly its members, and finally all members that can run together do.

mod connections;
mod faults;

use std::collections::{BTreeMap, VecDeque};

use hfreduce_core::error::ErrorKind;
use hfreduce_core::reconfigure::{
    Agreement, Message, Reconfiguration, RejectedList, Rejection, Start, Step,
};

use crate::event_queue::{EventQueue, MILLISECOND, SECOND, Time};
use crate::seed::Seed;

/// Timeout of an attempt.
const TIMEOUT: Time = 2 * SECOND;
/// Time after which a connection attempt to a member without an answer fails.
const DIAL: Time = TIMEOUT * 9 / 16;
/// Time to connect after an agreement.
const CONNECT: Time = 50 * MILLISECOND;
/// Time by which all running members must be in one group again.
const HORIZON: Time = 60 * SECOND;

/// A seeded bug in the driver, to verify that the simulation detects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Members ignore deadlines.
    IgnoresDeadlines,
    /// Coordinators use no nonce for their attempts.
    NoNonce,
    /// Members drop unanswered connections when their attempt ends.
    DropsConnections,
    /// Coordinators do not report the lists that they have rejected.
    ForgetsRejections,
}

/// Kind of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scenario {
    /// Members exit, are suspended and lose their network.
    Faults,
    /// One member starts with an outdated list, and all members retry immediately.
    OutdatedList { member: usize, omitted: usize },
    /// All members start with a list that contains one that has exited, and retry immediately.
    LostMember { lost: usize },
}

/// A fault of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Stopped(Option<Time>),
    Unplugged,
}

#[derive(Debug, Clone)]
enum Event {
    Enter(usize),
    ToMember(usize, Option<Message>),
    ToCoordinator(usize, Option<Message>),
    Reached(usize),
    GaveUp { coordinator: usize, attempt: u32, member: usize },
    Late(usize, u32),
    Connected(usize, u32),
    Fault(usize),
    Wake(usize),
}

struct Connection {
    coordinator: usize,
    attempt: u32,
    line: u64,
    member: usize,
    /// The coordinator has been notified that the connection is established.
    reached: bool,
    /// The member's attempt that accepted it, and its number there.
    accepted: Option<(u32, u64)>,
    inbox: VecDeque<Option<Message>>,
    /// The last arrival at either end: a connection preserves order.
    last: [Time; 2],
}

#[derive(Default)]
struct Actor {
    stopped: bool,
    dead: bool,
    unplugged: bool,
    missed: Vec<Event>,
    core: Option<Reconfiguration>,
    list: Vec<usize>,
    /// The lists that it has rejected as their coordinator in its present epoch.
    rejected: Vec<RejectedList>,
    attempt: u32,
    entered: Time,
    epoch: u32,
    next_line: u64,
    agreed: Option<Agreement>,
    /// After a refusal: the attempt whose coordinator still sends the refusal to members that it reaches.
    refusing: Option<(u32, Reconfiguration)>,
    /// The group of the member, by name.
    group: Option<(u32, u64, Vec<String>)>,
    alone: bool,
}

/// One simulated scenario.
pub struct Simulation {
    seed: Seed,
    bug: Option<Bug>,
    event_queue: EventQueue<Event>,
    actors: Vec<Actor>,
    connections: Vec<Connection>,
    scenario: Scenario,
    faults: Vec<(usize, Fault)>,
    /// By name: the agreement that all members of the group must share.
    groups: BTreeMap<(u32, u64), Agreement>,
    wrong: Option<String>,
    number: u64,
}

/// Runs many seeds; returns the total number of attempts.
///
/// # Errors
/// The first violation.
pub fn try_regroups(seeds: std::ops::Range<u64>, bug: Option<Bug>) -> Result<u64, String> {
    seeds.map(|number| Simulation::new(number, bug).run()).sum()
}

fn digest(list: &[usize]) -> u64 {
    list.iter().fold(1, |all: u64, id| all.wrapping_mul(31).wrapping_add(*id as u64))
}

impl Simulation {
    fn new(number: u64, bug: Option<Bug>) -> Self {
        let mut seed = Seed(number);
        let members = 2 + seed.below(14) as usize;
        let mut event_queue = EventQueue::default();
        let mut faults = Vec::new();
        let scenario = match seed.below(4) {
            0 => Scenario::OutdatedList {
                member: seed.below(members as u64) as usize,
                omitted: seed.below(members as u64) as usize,
            },
            1 => Scenario::LostMember { lost: 1 + seed.below(members as u64 - 1) as usize },
            _ => Scenario::Faults,
        };
        let count = if scenario == Scenario::Faults { seed.below(4) } else { 0 };
        for _ in 0..count {
            let victim = seed.below(members as u64) as usize;
            let fault = match seed.below(4) {
                0 | 1 => Fault::Killed,
                2 => Fault::Stopped((seed.below(2) == 0).then(|| seed.below(4 * SECOND))),
                _ => Fault::Unplugged,
            };
            event_queue.plan(1 + seed.below(3 * SECOND), Event::Fault(faults.len()));
            faults.push((victim, fault));
        }
        for member in 0..members {
            event_queue.plan(1 + seed.below(SECOND), Event::Enter(member));
        }
        let lost = |member| matches!(scenario, Scenario::LostMember { lost } if lost == member);
        let actor = |member| Actor { dead: lost(member), ..Actor::default() };
        let actors = (0..members).map(actor).collect();
        let (connections, groups, wrong) = (Vec::new(), BTreeMap::new(), None);
        Self {
            seed,
            bug,
            event_queue,
            actors,
            connections,
            scenario,
            faults,
            groups,
            wrong,
            number,
        }
    }

    fn run(mut self) -> Result<u64, String> {
        while self.event_queue.next_at().is_some_and(|at| at <= HORIZON)
            && self.wrong.is_none()
            && let Some(event) = self.event_queue.take()
        {
            self.handle(event);
        }
        self.check_end();
        match self.wrong {
            None => Ok(self.actors.iter().map(|actor| u64::from(actor.attempt)).sum()),
            Some(what) => {
                Err(format!("seed {}: {:?} {:?}: {what}", self.number, self.scenario, self.faults))
            }
        }
    }

    fn check_end(&mut self) {
        let reachable = self.reachable();
        let names: Vec<_> = reachable.iter().map(|id| self.actors[*id].group.clone()).collect();
        let together = names.windows(2).all(|pair| pair[0] == pair[1]);
        if self.wrong.is_none() && (!together || names.iter().any(Option::is_none)) {
            self.wrong = Some(format!("{reachable:?} are not in one group at the end: {names:?}"));
        }
    }

    /// The members that a scheduler would report: running and reachable.
    fn reachable(&self) -> Vec<usize> {
        let runs = |id: &usize| {
            let actor = &self.actors[*id];
            !actor.dead && !actor.stopped && !actor.unplugged
        };
        (0..self.actors.len()).filter(runs).collect()
    }

    fn handle(&mut self, event: Event) {
        let of = match &event {
            Event::Fault(at) => return self.apply_fault(*at),
            Event::Wake(victim) => return self.wake(*victim),
            Event::Enter(id) | Event::Late(id, _) | Event::Connected(id, _) => *id,
            Event::ToMember(at, _) => self.connections[*at].member,
            Event::ToCoordinator(at, _) | Event::Reached(at) => self.connections[*at].coordinator,
            Event::GaveUp { coordinator, .. } => *coordinator,
        };
        if self.actors[of].dead {
            return;
        }
        if self.actors[of].stopped {
            self.actors[of].missed.push(event);
            return;
        }
        match event {
            Event::Enter(id) => self.enter(id),
            Event::ToMember(at, message) => {
                self.connections[at].inbox.push_back(message);
                self.accept_messages(of);
            }
            Event::ToCoordinator(at, message) => {
                let (attempt, line) = (self.connections[at].attempt, self.connections[at].line);
                self.deliver(of, attempt, line, message);
            }
            Event::Reached(at) => self.reached(of, at),
            Event::GaveUp { attempt, member, .. } => {
                if self.actors[of].attempt == attempt
                    && let Some(core) = &mut self.actors[of].core
                {
                    core.disconnected(member as u64, ErrorKind::PeerDied, "no answer");
                    self.act(of);
                }
            }
            Event::Late(_, attempt) => {
                if self.actors[of].attempt == attempt
                    && self.bug != Some(Bug::IgnoresDeadlines)
                    && let Some(core) = &mut self.actors[of].core
                {
                    core.timed_out();
                    self.act(of);
                }
            }
            Event::Connected(_, attempt) => self.connected(of, attempt),
            Event::Fault(_) | Event::Wake(_) => {}
        }
    }

    fn enter(&mut self, id: usize) {
        if self.actors[id].core.is_some() || self.actors[id].agreed.is_some() {
            return;
        }
        let mut list = self.reachable();
        if let Scenario::OutdatedList { member, omitted } = self.scenario
            && (member, self.actors[id].attempt) == (id, 0)
            && omitted != id
        {
            list.retain(|member| *member != omitted);
        }
        if let (Scenario::LostMember { .. }, 0) = (self.scenario, self.actors[id].attempt) {
            list = (0..self.actors.len()).collect();
        }
        // The scheduler reports to a member without network that the job continues without it.
        let Some(own) = list.iter().position(|member| *member == id) else {
            self.actors[id].alone = true;
            return;
        };
        let now = self.event_queue.now();
        let nonce = if self.bug == Some(Bug::NoNonce) { 0 } else { self.seed.below(u64::MAX) };
        let actor = &mut self.actors[id];
        actor.attempt += 1;
        (actor.entered, actor.group) = (now, None);
        let reports_rejected = self.bug != Some(Bug::ForgetsRejections);
        let start = Start {
            id: id as u64,
            attempt: u64::from(actor.attempt),
            own: Some(own),
            size: list.len(),
            list_digest: digest(&list),
            list: format!("{list:?}"),
            epoch: actor.epoch,
            info: format!("{id}.{}", actor.attempt),
            nonce,
            rejected: if reports_rejected { actor.rejected.clone() } else { Vec::new() },
        };
        let core = Reconfiguration::new(start);
        actor.next_line = core.first_incoming();
        (actor.core, actor.list) = (Some(core), list);
        let timeout = if own == 0 { TIMEOUT * 3 / 4 } else { TIMEOUT };
        self.event_queue.plan(now + timeout, Event::Late(id, actor.attempt));
        self.act(id);
        self.accept_messages(id);
    }

    fn act(&mut self, id: usize) {
        while let Some(step) = self.actors[id].core.as_mut().and_then(Reconfiguration::poll) {
            match step {
                Step::Dial { member } => self.dial(id, member),
                Step::Send { line, message } => self.send_on(id, line, message),
                Step::Keep { line, call } => self.keep(id, line, call),
                Step::End(how) => {
                    self.end(id, how);
                    return;
                }
            }
        }
    }

    fn end(&mut self, id: usize, how: Result<Agreement, Rejection>) {
        let now = self.event_queue.now();
        let actor = &mut self.actors[id];
        let attempt = actor.attempt;
        let core = actor.core.take().map(|core| (attempt, core));
        actor.refusing = core.filter(|_| how.is_err());
        actor.agreed = None;
        for at in 0..self.connections.len() {
            let connection = &mut self.connections[at];
            let is_coordinator = connection.coordinator == id && connection.attempt == attempt;
            let is_member = connection.member == id
                && connection.accepted.is_some_and(|(accepted, _)| accepted == attempt);
            let unheard = connection.member == id
                && connection.accepted.is_none()
                && !connection.inbox.is_empty()
                && self.bug == Some(Bug::DropsConnections);
            if unheard {
                connection.inbox.clear();
            }
            if (is_coordinator && connection.reached) || is_member || unheard {
                self.send(at, id, None);
            }
        }
        if let (Scenario::OutdatedList { .. }, Err(why)) = (self.scenario, &how)
            && why.kind != ErrorKind::Mismatch
        {
            self.wrong = Some(format!("member {id} fails although all run: {why:?}"));
        }
        if let (Scenario::LostMember { .. }, Err(why)) = (self.scenario, &how)
            && why.kind == ErrorKind::Mismatch
        {
            self.wrong = Some(format!("member {id} fails although all agree: {why:?}"));
        }
        match how {
            Ok(agreement) => {
                let name = (agreement.epoch, agreement.nonce);
                let same = self.groups.entry(name).or_insert_with(|| agreement.clone());
                if *same != agreement {
                    self.wrong = Some(format!("two groups are named {name:?}"));
                }
                if agreement.epoch <= self.actors[id].epoch {
                    self.wrong = Some(format!("member {id} falls back to {}", agreement.epoch));
                }
                self.actors[id].epoch = agreement.epoch;
                self.actors[id].agreed = Some(agreement);
                self.actors[id].rejected.clear();
                self.event_queue.plan(now + CONNECT, Event::Connected(id, attempt));
            }
            Err(why) => {
                let list_digest = digest(&self.actors[id].list);
                if self.actors[id].list.first() == Some(&id) {
                    self.actors[id].rejected.push(RejectedList { list_digest, why });
                }
                self.retry(id);
            }
        }
    }

    fn retry(&mut self, id: usize) {
        let longest = match self.scenario {
            Scenario::Faults => 300 * MILLISECOND,
            Scenario::OutdatedList { .. } | Scenario::LostMember { .. } => 5 * MILLISECOND,
        };
        let pause = 1 + self.seed.below(longest);
        self.event_queue.plan(self.event_queue.now() + pause, Event::Enter(id));
    }

    /// The connections of the new group are established, or a member is missing.
    fn connected(&mut self, id: usize, attempt: u32) {
        if self.actors[id].attempt != attempt {
            return;
        }
        let Some(agreement) = self.actors[id].agreed.clone() else { return };
        let waited = self.event_queue.now() - self.actors[id].entered;
        let list = self.actors[id].list.clone();
        let runs = |member: &usize| {
            let actor = &self.actors[*member];
            !actor.dead && !actor.stopped && !actor.unplugged
        };
        let joined = |member: &usize| {
            let actor = &self.actors[*member];
            let is_same = |agreed: &Agreement| {
                (agreed.epoch, agreed.nonce) == (agreement.epoch, agreement.nonce)
            };
            actor.agreed.as_ref().is_some_and(is_same) && runs(member)
        };
        let contributions: Vec<usize> = list.iter().copied().filter(joined).collect();
        if contributions == list {
            // Every member of the group's name contributes: these must be exactly the members of the list.
            let summed: Vec<String> = list
                .iter()
                .map(|member| format!("{member}.{}", self.actors[*member].attempt))
                .collect();
            if summed != agreement.infos {
                self.wrong = Some(format!("{summed:?} were summed as {:?}", agreement.infos));
            }
            let name = (agreement.epoch, agreement.nonce, agreement.infos);
            self.actors[id].group = Some(name);
            // The set of running members changed meanwhile.
            if self.reachable() != list {
                (self.actors[id].group, self.actors[id].agreed) = (None, None);
                self.retry(id);
            }
            return;
        }
        if waited < TIMEOUT {
            self.event_queue.plan(self.event_queue.now() + CONNECT, Event::Connected(id, attempt));
        } else {
            self.actors[id].agreed = None;
            self.retry(id);
        }
    }
}
