//! Members that agree on a new epoch while things go wrong, on a simulated clock: the engine's own
//! [`Regroup`], and around it what its driver does with doors, lines and deadlines.
//!
//! Whoever fails asks the scheduler who is there and tries again, as a job would. What is looked
//! at: every attempt ends, nobody is in two groups of one name, epochs only grow, the sum in a
//! group has the contributions of its members and no other, and at the end all who can run
//! together do.

mod accidents;
mod lines;

use std::collections::{BTreeMap, VecDeque};

use hfreduce_core::error::ErrorKind;
use hfreduce_core::reconfigure::{Agreement, Message, Reconfiguration, Rejection, Start, Step};

use crate::agenda::{Agenda, MILLISECOND, SECOND, Time};
use crate::faults::Seed;

/// What each attempt is given.
const TIMEOUT: Time = 2 * SECOND;
/// After which a dialler gives up a member that does not answer.
const DIAL: Time = TIMEOUT * 9 / 16;
/// How long the connecting after an agreement takes.
const CONNECT: Time = 50 * MILLISECOND;
/// Within this everybody who can is in one group again.
const HORIZON: Time = 60 * SECOND;

/// A mistake in the driver, to see that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// Nobody looks at the time.
    NeverLate,
    /// Coordinators do not number their attempts.
    NoChance,
    /// Members drop the calls that nobody heard when their attempt ends.
    DropsCalls,
}

/// What goes wrong in a story.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plot {
    /// Members die, stop and lose their network.
    Accidents,
    /// One member is given another list at first, and all try again at once.
    Misled { member: usize, omitted: usize },
}

/// What goes wrong, to whom.
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
    Accident(usize),
    Wake(usize),
}

struct Connection {
    coordinator: usize,
    attempt: u32,
    line: u64,
    member: usize,
    /// It is made: the coordinator knows.
    reached: bool,
    /// The member's attempt that took it, and its number there.
    taken: Option<(u32, u64)>,
    came: VecDeque<Option<Message>>,
    /// The last arrival at either end: a line keeps the order.
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
    attempt: u32,
    entered: Time,
    epoch: u32,
    next_line: u64,
    agreed: Option<Agreement>,
    /// After a refusal: the attempt whose coordinator still tells those that it reaches.
    leaving: Option<(u32, Reconfiguration)>,
    /// The group that it is in, by name.
    group: Option<(u32, u64, Vec<String>)>,
    alone: bool,
}

/// One story.
pub struct Story {
    seed: Seed,
    bug: Option<Bug>,
    agenda: Agenda<Event>,
    actors: Vec<Actor>,
    connections: Vec<Connection>,
    plot: Plot,
    faults: Vec<(usize, Fault)>,
    /// By name: what all its members must have agreed on.
    groups: BTreeMap<(u32, u64), Agreement>,
    wrong: Option<String>,
    number: u64,
}

/// Runs many seeds; how many attempts there were in all.
///
/// # Errors
/// What was wrong first.
pub fn try_regroups(seeds: std::ops::Range<u64>, bug: Option<Bug>) -> Result<u64, String> {
    seeds.map(|number| Story::new(number, bug).run()).sum()
}

impl Story {
    fn new(number: u64, bug: Option<Bug>) -> Self {
        let mut seed = Seed(number);
        let members = 2 + seed.below(14) as usize;
        let mut agenda = Agenda::default();
        let mut faults = Vec::new();
        let plot = match seed.below(3) {
            0 => Plot::Misled {
                member: seed.below(members as u64) as usize,
                omitted: seed.below(members as u64) as usize,
            },
            _ => Plot::Accidents,
        };
        let accidents = if plot == Plot::Accidents { seed.below(4) } else { 0 };
        for _ in 0..accidents {
            let whom = seed.below(members as u64) as usize;
            let fault = match seed.below(4) {
                0 | 1 => Fault::Killed,
                2 => Fault::Stopped((seed.below(2) == 0).then(|| seed.below(4 * SECOND))),
                _ => Fault::Unplugged,
            };
            agenda.plan(1 + seed.below(3 * SECOND), Event::Accident(faults.len()));
            faults.push((whom, fault));
        }
        for member in 0..members {
            agenda.plan(1 + seed.below(SECOND), Event::Enter(member));
        }
        let actors = (0..members).map(|_| Actor::default()).collect();
        let (connections, groups, wrong) = (Vec::new(), BTreeMap::new(), None);
        Self { seed, bug, agenda, actors, connections, plot, faults, groups, wrong, number }
    }

    fn run(mut self) -> Result<u64, String> {
        while self.agenda.next_at().is_some_and(|at| at <= HORIZON)
            && self.wrong.is_none()
            && let Some(event) = self.agenda.take()
        {
            self.handle(event);
        }
        self.look_at_the_end();
        match self.wrong {
            None => Ok(self.actors.iter().map(|actor| u64::from(actor.attempt)).sum()),
            Some(what) => {
                Err(format!("seed {}: {:?} {:?}: {what}", self.number, self.plot, self.faults))
            }
        }
    }

    fn look_at_the_end(&mut self) {
        let there = self.there();
        let names: Vec<_> = there.iter().map(|one| self.actors[*one].group.clone()).collect();
        let together = names.windows(2).all(|pair| pair[0] == pair[1]);
        if self.wrong.is_none() && (!together || names.iter().any(Option::is_none)) {
            self.wrong = Some(format!("{there:?} are not in one group at the end: {names:?}"));
        }
    }

    /// What a scheduler would say: who runs and can be reached.
    fn there(&self) -> Vec<usize> {
        let runs = |one: &usize| {
            let actor = &self.actors[*one];
            !actor.dead && !actor.stopped && !actor.unplugged
        };
        (0..self.actors.len()).filter(runs).collect()
    }

    fn handle(&mut self, event: Event) {
        let of = match &event {
            Event::Accident(at) => return self.accident(*at),
            Event::Wake(whom) => return self.wake(*whom),
            Event::Enter(one) | Event::Late(one, _) | Event::Connected(one, _) => *one,
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
            Event::Enter(one) => self.enter(one),
            Event::ToMember(at, message) => {
                self.connections[at].came.push_back(message);
                self.open_the_door(of);
            }
            Event::ToCoordinator(at, message) => {
                let (attempt, line) = (self.connections[at].attempt, self.connections[at].line);
                self.tell(of, attempt, line, message);
            }
            Event::Reached(at) => self.reached(of, at),
            Event::GaveUp { attempt, member, .. } => {
                if self.actors[of].attempt == attempt
                    && let Some(core) = &mut self.actors[of].core
                {
                    core.lost(member as u64, ErrorKind::PeerDied, "no answer");
                    self.act(of);
                }
            }
            Event::Late(_, attempt) => {
                if self.actors[of].attempt == attempt
                    && self.bug != Some(Bug::NeverLate)
                    && let Some(core) = &mut self.actors[of].core
                {
                    core.timed_out();
                    self.act(of);
                }
            }
            Event::Connected(_, attempt) => self.connected(of, attempt),
            Event::Accident(_) | Event::Wake(_) => {}
        }
    }

    fn enter(&mut self, one: usize) {
        if self.actors[one].core.is_some() || self.actors[one].agreed.is_some() {
            return;
        }
        let mut list = self.there();
        if let Plot::Misled { member, omitted } = self.plot
            && (member, self.actors[one].attempt) == (one, 0)
            && omitted != one
        {
            list.retain(|member| *member != omitted);
        }
        // Who is cut off learns from its scheduler that the job goes on without it.
        let Some(own) = list.iter().position(|member| *member == one) else {
            self.actors[one].alone = true;
            return;
        };
        let now = self.agenda.now();
        let chance = if self.bug == Some(Bug::NoChance) { 0 } else { self.seed.below(u64::MAX) };
        let actor = &mut self.actors[one];
        actor.attempt += 1;
        (actor.entered, actor.group) = (now, None);
        let start = Start {
            id: one as u64,
            attempt: u64::from(actor.attempt),
            own: Some(own),
            size: list.len(),
            list_digest: list
                .iter()
                .fold(1, |all: u64, one| all.wrapping_mul(31).wrapping_add(*one as u64)),
            list: format!("{list:?}"),
            epoch: actor.epoch,
            info: format!("{one}.{}", actor.attempt),
            nonce: chance,
        };
        let core = Reconfiguration::new(start);
        actor.next_line = core.first_incoming();
        (actor.core, actor.list) = (Some(core), list);
        let patience = if own == 0 { TIMEOUT * 3 / 4 } else { TIMEOUT };
        self.agenda.plan(now + patience, Event::Late(one, actor.attempt));
        self.act(one);
        self.open_the_door(one);
    }

    fn act(&mut self, one: usize) {
        while let Some(step) = self.actors[one].core.as_mut().and_then(Reconfiguration::poll) {
            match step {
                Step::Dial { member } => self.dial(one, member),
                Step::Send { line, message } => self.say(one, line, message),
                Step::End(how) => {
                    self.end(one, how);
                    return;
                }
            }
        }
    }

    fn end(&mut self, one: usize, how: Result<Agreement, Rejection>) {
        let now = self.agenda.now();
        let actor = &mut self.actors[one];
        let attempt = actor.attempt;
        let core = actor.core.take().map(|core| (attempt, core));
        actor.leaving = core.filter(|_| how.is_err());
        actor.agreed = None;
        for at in 0..self.connections.len() {
            let connection = &mut self.connections[at];
            let ours = connection.coordinator == one && connection.attempt == attempt;
            let theirs = connection.member == one
                && connection.taken.is_some_and(|(taken, _)| taken == attempt);
            let unheard = connection.member == one
                && connection.taken.is_none()
                && !connection.came.is_empty()
                && self.bug == Some(Bug::DropsCalls);
            if unheard {
                connection.came.clear();
            }
            if (ours && connection.reached) || theirs || unheard {
                self.send(at, one, None);
            }
        }
        if let (Plot::Misled { .. }, Err(why)) = (self.plot, &how)
            && why.kind != ErrorKind::Mismatch
        {
            self.wrong = Some(format!("member {one} fails although all run: {why:?}"));
        }
        match how {
            Ok(agreement) => {
                let name = (agreement.epoch, agreement.nonce);
                let same = self.groups.entry(name).or_insert_with(|| agreement.clone());
                if *same != agreement {
                    self.wrong = Some(format!("two groups are named {name:?}"));
                }
                if agreement.epoch <= self.actors[one].epoch {
                    self.wrong = Some(format!("member {one} falls back to {}", agreement.epoch));
                }
                self.actors[one].epoch = agreement.epoch;
                self.actors[one].agreed = Some(agreement);
                self.agenda.plan(now + CONNECT, Event::Connected(one, attempt));
            }
            Err(_) => self.try_again(one),
        }
    }

    fn try_again(&mut self, one: usize) {
        let longest = match self.plot {
            Plot::Accidents => 300 * MILLISECOND,
            Plot::Misled { .. } => 5 * MILLISECOND,
        };
        let pause = 1 + self.seed.below(longest);
        self.agenda.plan(self.agenda.now() + pause, Event::Enter(one));
    }

    /// The connections of the new group are made, or somebody is not there to make them.
    fn connected(&mut self, one: usize, attempt: u32) {
        if self.actors[one].attempt != attempt {
            return;
        }
        let Some(agreement) = self.actors[one].agreed.clone() else { return };
        let waited = self.agenda.now() - self.actors[one].entered;
        let list = self.actors[one].list.clone();
        let runs = |member: &usize| {
            let actor = &self.actors[*member];
            !actor.dead && !actor.stopped && !actor.unplugged
        };
        let came = |member: &usize| {
            let actor = &self.actors[*member];
            let named = |agreed: &Agreement| {
                (agreed.epoch, agreed.nonce) == (agreement.epoch, agreement.nonce)
            };
            actor.agreed.as_ref().is_some_and(named) && runs(member)
        };
        let contributions: Vec<usize> = list.iter().copied().filter(came).collect();
        if contributions == list {
            // Whoever answers to the group's name adds its part: exactly the members may.
            let summed: Vec<String> = list
                .iter()
                .map(|member| format!("{member}.{}", self.actors[*member].attempt))
                .collect();
            if summed != agreement.infos {
                self.wrong = Some(format!("{summed:?} were summed as {:?}", agreement.infos));
            }
            let name = (agreement.epoch, agreement.nonce, agreement.infos);
            self.actors[one].group = Some(name);
            // Somebody came back or went while we were at it.
            if self.there() != list {
                (self.actors[one].group, self.actors[one].agreed) = (None, None);
                self.try_again(one);
            }
            return;
        }
        if waited < TIMEOUT {
            self.agenda.plan(self.agenda.now() + CONNECT, Event::Connected(one, attempt));
        } else {
            self.actors[one].agreed = None;
            self.try_again(one);
        }
    }
}
