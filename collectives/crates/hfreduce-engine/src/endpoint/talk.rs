//! The conversation in which members agree on the next epoch: lines, doors and time around
//! [`Regroup`].

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::deadline::Deadline;

use super::home::Home;
use super::info::{Info, host};
use super::neighbours::{Call, Hello, Purpose, dial};
use super::regroup::Watch;
use crate::cause::CauseKind;
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

type Dialled = (usize, Result<TcpStream, (CauseKind, String)>);

/// See the module's text.
pub(super) struct Talk<'a> {
    home: &'a Home,
    list: Arc<Vec<Info>>,
    core: Regroup,
    /// Our place in the list.
    own: Option<usize>,
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
    pub(super) fn new(home: &'a Home, list: Vec<Info>, start: Start, deadline: Deadline) -> Self {
        let left = deadline.remaining().unwrap_or_default();
        let joining = if start.own == Some(0) { deadline.within(left * 3 / 4) } else { deadline };
        let (own, attempt, core) = (start.own, start.attempt as u32, Regroup::new(start));
        Self {
            own,
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

    /// Until it has ended. Who is no more, by `watch`, says no word of farewell either.
    pub(super) fn run(
        mut self,
        recorder: &Recorder,
        watch: Watch<'_>,
    ) -> Result<Agreement, Refusal> {
        loop {
            if let Some(detail) = watch() {
                return Err(Refusal { kind: CauseKind::PeerDied, member: self.own, detail });
            }
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
            Hello { group: self.home.id, from: self.attempt, purpose: Purpose::Regroup, stream: 0 },
        );
        let dialler = move || {
            loop {
                let Some(member) = lock(&to_dial).pop_front() else { return };
                // Whoever does not answer is named by the dialler, before time is up for all.
                let left = joining.remaining().unwrap_or_default();
                let deadline = joining.within(left * 3 / 4);
                let dialled = dial(&key, &host, &list[member], hello, deadline, &|| false);
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
