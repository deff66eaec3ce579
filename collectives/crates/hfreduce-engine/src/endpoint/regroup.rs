//! A communicator with other members: the driver of [`Regroup`], and what comes before and after.
//!
//! The coordinator dials every member at the port that it has had since its first epoch. Then all
//! connect anew: new board, new connections, new plan. Nothing of the epoch before is used, and a
//! connection that was made for it is refused because it names another group.

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::auth::nonce;
use fabric::deadline::Deadline;

use super::home::Home;
use super::info::{Doors, Info, digest, first_eight, host, refused};
use super::members::{Member, list, roster, words};
use super::neighbours::{Call, Hello, Purpose, dial};
use super::record;
use super::{Endpoint, Options};
use crate::cause::{Cause, CauseKind, CollectiveError};
use crate::communicator::Communicator;
use crate::core::regroup::{Agreement, Refusal, Regroup, Start, Step};
use crate::drivers::lock;
use crate::flight::Recorder;
use crate::line::Line;

/// Members that are dialled at the same time.
const DIALLERS_MAX: usize = 32;
/// How often doors and lines are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long the last words may take to leave.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long operations under way in the epoch before may take to end.
const CLOSE: Duration = Duration::from_secs(2);

/// One who waits to be taken into a communicator that exists.
pub struct Newcomer {
    home: Arc<Home>,
    options: Options,
}

impl Newcomer {
    /// Opens its port. The placement in `options` is its own place alone.
    ///
    /// # Errors
    /// As [`Endpoint::new`].
    pub fn new(options: Options, key: &[u8]) -> Result<Self, CollectiveError> {
        if options.placement.len() != 1 || options.rank != 0 {
            let detail = "a newcomer has one place, its own, and no rank yet".to_owned();
            return Err(refused(&options, CauseKind::Invalid, "being called", detail));
        }
        let endpoint = Endpoint::new(options, key)?;
        Ok(Self { home: endpoint.home, options: endpoint.options })
    }

    /// What the members need to know to take it in.
    pub fn info(&self) -> Vec<u8> {
        let card = self.options.info(&self.home, 0, &Doors::default());
        serde_json::to_vec(&card).unwrap_or_default()
    }

    /// Waits until a member's `reconfigure` names it, and connects. May be called again after an
    /// error.
    ///
    /// # Errors
    /// Who is missing or does not fit.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        let deadline = Deadline::after(timeout);
        let place = (self.home.clone(), self.options.clone());
        go(place, None, (Vec::new(), String::new()), None, deadline)
            .map_err(|why| why.into_error(&self.options, &|_| None))
    }
}

impl Communicator {
    /// Ends this epoch and goes on with `members`, in this order. Every member calls it with the
    /// same list; the first is a present rank. Works on a broken communicator and on a whole one,
    /// and may be called again, with fewer members, after an error.
    ///
    /// # Errors
    /// Who is missing, gone or of another opinion, as ranks of the present epoch.
    pub fn reconfigure(
        &self,
        members: &[Member],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        let deadline = Deadline::after(timeout);
        let invalid = |detail| self.refused(CauseKind::Invalid, "reconfigure", detail);
        let origin = self.origin().map_err(invalid)?;
        let list = list(origin, members).map_err(invalid)?;
        let own = list.iter().position(|info| info.id == origin.home.id);
        let Some(own) = own else {
            return Err(invalid(format!(
                "rank {} is not among the members; it leaves with close()",
                self.rank()
            )));
        };
        let words = words(members, &list);
        self.close(CLOSE.min(timeout));
        self.release();
        let place = (origin.home.clone(), origin.options.clone());
        let rank_of = |member: usize| match members.get(member) {
            Some(Member::Rank(rank)) => Some(*rank),
            _ => None,
        };
        let came_from = Some((origin.epoch, self.completed()));
        go(place, Some(own), (list, words), came_from, deadline)
            .map_err(|why| why.into_error(&origin.options, &rank_of))
    }
}

/// Why there is no new epoch.
enum Trouble {
    Refused(Refusal),
    /// While connecting: ranks are those of the new epoch.
    Failed(CollectiveError),
}

impl Trouble {
    /// As the caller knows the ranks.
    fn into_error(
        self,
        options: &Options,
        rank_of: &dyn Fn(usize) -> Option<u32>,
    ) -> CollectiveError {
        let own = refused(options, CauseKind::Io, "agreeing on the members", String::new());
        match self {
            Self::Refused(Refusal { kind, member, detail }) => {
                let mut cause = Cause::new(kind, options.rank, detail);
                cause.peer = member.and_then(rank_of);
                let node = cause.peer.and_then(|rank| options.placement.get(rank as usize));
                cause.peer_node = node.map(|(node, _)| node.clone());
                let operation = "reconfigure".to_owned();
                CollectiveError { operation, cause: Box::new(cause), ..own }
            }
            Self::Failed(mut error) => {
                error.rank = options.rank;
                let known = |rank: u32| rank_of(rank as usize);
                error.cause.peer = error.cause.peer.and_then(known);
                error.cause.seen_by = known(error.cause.seen_by).unwrap_or(options.rank);
                CollectiveError { operation: "reconfigure".into(), ..error }
            }
        }
    }
}

fn go(
    (home, options): (Arc<Home>, Options),
    own: Option<usize>,
    (list, words): (Vec<Info>, String),
    came_from: Option<(u32, u64)>,
    deadline: Deadline,
) -> Result<Communicator, Trouble> {
    let trouble = |phase: &str, error: std::io::Error| {
        Trouble::Failed(refused(&options, CauseKind::Io, phase, error.to_string()))
    };
    let chance = nonce().map_err(|error| trouble("asking the system for chance", error))?;
    let doors = Doors::open(true, options.lend)
        .map_err(|error| trouble("listening on a local socket", error))?;
    let card = Info { came_from, ..options.info(&home, 0, &doors) };
    let start = Start {
        id: home.id,
        attempt: u64::from(home.attempts.fetch_add(1, Ordering::Relaxed)),
        own,
        size: list.len(),
        roster: roster(&list),
        list: words,
        epoch: came_from.map_or(0, |(epoch, _)| epoch),
        card: serde_json::to_string(&card).unwrap_or_default(),
        chance: u64::from_le_bytes(first_eight(&chance)),
    };
    home.inbox.between(list.len());
    let recorder = record::agreeing(&options, &start);
    let agreed =
        Talk::new(&home, list, start, deadline).run(&recorder).map_err(Trouble::Refused)?;
    let ids: Vec<u8> = [agreed.chance, u64::from(agreed.epoch)].map(u64::to_le_bytes).concat();
    let (endpoint, infos) = next_epoch(home, options, &agreed, doors)?;
    let group = infos.iter().flat_map(|info| info.id.to_le_bytes()).chain(ids).collect::<Vec<_>>();
    endpoint.enter(infos, digest(&group), agreed.epoch, deadline).map_err(Trouble::Failed)
}

/// The endpoint of this rank in the epoch that all agreed on: a pure function of the cards.
fn next_epoch(
    home: Arc<Home>,
    options: Options,
    agreed: &Agreement,
    doors: Doors,
) -> Result<(Endpoint, Vec<Info>), Trouble> {
    let fail = |detail: String| {
        Trouble::Failed(refused(&options, CauseKind::Protocol, "reading the cards", detail))
    };
    let cards = agreed.cards.iter().enumerate().map(|(rank, card)| {
        let card: Result<Info, _> = serde_json::from_str(card);
        card.map(|card| Info { rank: rank as u32, ..card })
    });
    let infos: Vec<Info> =
        cards.collect::<Result<_, _>>().map_err(|error| fail(error.to_string()))?;
    let rank = infos.iter().position(|info| info.id == home.id);
    let rank = rank.ok_or_else(|| fail("the coordinator left us out".to_owned()))?;
    let options = Options {
        rank: rank as u32,
        placement: infos.iter().map(|info| (info.node.clone(), info.zone.clone())).collect(),
        // A bridge that is still one; the same on all ranks, because all ask the first card.
        bridge: infos.first().and_then(|info| info.bridge.clone()).filter(|(one, other)| {
            [one, other].iter().all(|end| infos.iter().any(|info| info.node == **end))
        }),
        ..options
    };
    let endpoint = Endpoint::of_epoch(home, options, infos[rank].clone(), doors);
    let endpoint = endpoint.map_err(Trouble::Failed)?;
    let told: Vec<Vec<u8>> =
        infos.iter().map(|info| serde_json::to_vec(info).unwrap_or_default()).collect();
    let infos = endpoint.read_infos(&told).map_err(Trouble::Failed)?;
    Ok((endpoint, infos))
}

/// For tests of strangers' cards: how many infos and places the epoch has, if there is one.
#[cfg(test)]
pub(super) fn fuzzed_epoch(
    home: Arc<Home>,
    options: Options,
    agreed: &Agreement,
) -> Option<(usize, usize)> {
    let (endpoint, infos) = next_epoch(home, options, agreed, Doors::default()).ok()?;
    Some((infos.len(), endpoint.placement.world_size()))
}

type Dialled = (usize, Result<TcpStream, (CauseKind, String)>);

/// The conversation: lines, doors and time around the core.
struct Talk<'a> {
    home: &'a Home,
    list: Arc<Vec<Info>>,
    core: Regroup,
    attempt: u32,
    lines: BTreeMap<u64, Line>,
    /// Lines that came in and said nothing yet, with their callers' numbers and attempts.
    unheard: BTreeMap<u64, (u64, u32)>,
    next_line: u64,
    /// Coordinators end first: what is left of the time is for connecting.
    joining: Deadline,
    to_dial: Arc<Mutex<VecDeque<usize>>>,
    dialled: (Sender<Dialled>, Receiver<Dialled>),
    /// Members that are being dialled, or wait for it.
    dialling: usize,
    diallers: usize,
}

impl<'a> Talk<'a> {
    fn new(home: &'a Home, list: Vec<Info>, start: Start, deadline: Deadline) -> Self {
        let left = deadline.remaining().unwrap_or_default();
        let joining = if start.own == Some(0) { deadline.within(left * 3 / 4) } else { deadline };
        let (attempt, core) = (start.attempt as u32, Regroup::new(start));
        Self {
            attempt,
            home,
            list: Arc::new(list),
            next_line: core.first_incoming(),
            core,
            lines: BTreeMap::new(),
            unheard: BTreeMap::new(),
            joining,
            to_dial: Arc::default(),
            dialled: channel(),
            dialling: 0,
            diallers: 0,
        }
    }

    fn run(mut self, recorder: &Recorder) -> Result<Agreement, Refusal> {
        loop {
            recorder.waiting(None, "agreeing on the members", self.core.awaited());
            if let Some(how) = self.act() {
                self.leave();
                return how;
            }
            self.take_dialled();
            self.open_the_door();
            self.listen();
            if self.joining.remaining().is_none() {
                self.core.late();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Says what is left to say, to those too who come to their doors only now. Calls that nobody
    /// heard are for the next attempt.
    fn leave(&mut self) {
        for (number, (caller, attempt)) in std::mem::take(&mut self.unheard) {
            if let Some(line) = self.lines.remove(&number) {
                self.home.inbox.wait_at_the_door(Call { caller, attempt, line });
            }
        }
        let until = Deadline::after(FAREWELL);
        loop {
            self.take_dialled();
            self.act();
            let unsaid =
                self.lines.values_mut().map(|line| usize::from(!line.flush())).sum::<usize>();
            if unsaid + self.dialling == 0 || until.remaining().is_none() {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn act(&mut self) -> Option<Result<Agreement, Refusal>> {
        while let Some(step) = self.core.poll() {
            match step {
                Step::Dial { member } => self.dial(member),
                Step::Say { line, word } => {
                    if let Some(line) = self.lines.get_mut(&line) {
                        line.say(&word);
                    }
                }
                Step::End(how) => return Some(how),
            }
        }
        None
    }

    fn dial(&mut self, member: usize) {
        lock(&self.to_dial).push_back(member);
        self.dialling += 1;
        if self.diallers >= DIALLERS_MAX {
            return;
        }
        self.diallers += 1;
        let (list, to_dial, done) =
            (self.list.clone(), self.to_dial.clone(), self.dialled.0.clone());
        let (key, host) = (self.home.key.clone(), host());
        let (joining, hello) = (
            self.joining,
            Hello { group: self.home.id, from: self.attempt, purpose: Purpose::Regroup },
        );
        let dialler = move || {
            loop {
                let Some(member) = lock(&to_dial).pop_front() else { return };
                // Whoever does not answer is named by the dialler, before time is up for all.
                let left = joining.remaining().unwrap_or_default();
                let deadline = joining.within(left * 3 / 4);
                let dialled = dial(&key, &host, &list[member], hello, deadline);
                if done.send((member, dialled)).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("hfreduce-dial".into()).spawn(dialler);
        if let Err(error) = spawned {
            self.core.lost(member as u64, CauseKind::Io, &format!("no thread to dial: {error}"));
        }
    }

    fn take_dialled(&mut self) {
        while let Ok((member, dialled)) = self.dialled.1.try_recv() {
            self.dialling -= 1;
            match dialled.map(Line::new) {
                Ok(Ok(line)) => {
                    self.lines.insert(member as u64, line);
                    self.core.reached(member);
                }
                Ok(Err(error)) => {
                    self.core.lost(member as u64, CauseKind::Io, &error.to_string());
                }
                Err((kind, detail)) => self.core.lost(member as u64, kind, &detail),
            }
        }
    }

    fn open_the_door(&mut self) {
        let calls = std::mem::take(&mut *lock(&self.home.inbox.calls));
        for Call { caller, attempt, line } in calls {
            self.lines.insert(self.next_line, line);
            self.unheard.insert(self.next_line, (caller, attempt));
            self.next_line += 1;
        }
    }

    fn listen(&mut self) {
        let mut ended = Vec::new();
        for (number, line) in &mut self.lines {
            line.flush();
            while !self.core.is_over()
                && let Some(word) = line.next_word()
            {
                self.unheard.remove(number);
                self.core.heard(*number, word);
            }
            if let Some(why) = line.ended() {
                self.core.lost(*number, CauseKind::PeerDied, why);
                ended.push(*number);
            }
        }
        for number in ended {
            self.lines.remove(&number);
        }
    }
}
