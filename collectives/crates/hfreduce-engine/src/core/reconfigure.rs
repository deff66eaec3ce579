//! New members for a communicator: how those who go on agree on who they are.
//!
//! ```text
//! coordinator (the first of the list)            every other member
//!   Call(roster)  ────────────────▶  compares it with the list that its own caller gave
//!                 ◀────────────────  Join(epoch, card)   or   Differ(roster)
//!                 ────────────────▶  Wait(member): who is still missing
//!   when all have joined: Welcome(epoch, chance, cards) ──▶  all connect anew with these cards
//!   when one is gone, late or of another opinion: No(why) ──▶  all fail, and say so
//! ```
//! One attempt ends for everybody who takes part in it: with an agreement, with the coordinator's
//! No, with the end of the connection to the coordinator, or at the deadline. A call that comes
//! after a member's attempt has ended is not for that attempt: it waits at the door for the next
//! one. Attempts cannot be
//! mixed up: each has a number of chance from its coordinator, which becomes part of the group's
//! name, and a connection that was made for another group is refused. Some may reach an agreement
//! whose connections then fail while others do not: members are known by a number that no epoch
//! changes, so all of them find each other again in the next attempt.
//!
//! Lines are numbered by the driver: `member` for those that the coordinator dialled, from
//! [`Reconfiguration::first_incoming`] on for those that came in.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;

/// What is said. The driver bounds the length before it takes memory for one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The coordinator asks a member in.
    Call {
        /// A digest of the list of members.
        list_digest: u64,
        /// The coordinator's own number, and how many calls it has made: connections may overtake
        /// each other, so an older call can come after a newer one.
        caller: u64,
        /// See above.
        attempt: u64,
    },
    /// The member's list is the same.
    Join {
        /// The last epoch that it was in.
        epoch: u32,
        /// What the others need to know to connect to it.
        info: String,
    },
    /// The member's caller gave another list.
    Differ {
        /// In words.
        list: String,
    },
    /// Not all are there.
    Wait {
        /// The first that is missing.
        member: usize,
    },
    /// All are there.
    Welcome {
        /// The new epoch.
        epoch: u32,
        /// Makes this attempt different from every other.
        nonce: u64,
        /// Everybody's card, in the order of the list.
        infos: Vec<String>,
    },
    /// The attempt is over.
    Reject(Rejection),
}

/// Why there is no agreement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// What kind of failure.
    pub kind: ErrorKind,
    /// Who is to blame, by place in the coordinator's list.
    pub member: Option<usize>,
    /// What exactly.
    pub detail: String,
}

/// What all agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The new epoch, above every member's last one.
    pub epoch: u32,
    /// This attempt's own number.
    pub nonce: u64,
    /// Everybody's card, in the order of the list.
    pub infos: Vec<String>,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Connect to a member; the line has its number.
    Dial {
        /// Its place in the list.
        member: usize,
    },
    /// Send.
    Send {
        /// On which line.
        line: u64,
        /// What.
        message: Message,
    },
    /// It is over; what was to be said still goes out.
    End(Result<Agreement, Rejection>),
}

/// What a rank brings.
#[derive(Clone, Debug)]
pub struct Start {
    /// Its number, whatever its rank is.
    pub id: u64,
    /// Grows with each of its attempts.
    pub attempt: u64,
    /// Its place in the list; the first one coordinates. Newcomers do not know it.
    pub own: Option<usize>,
    /// How many members the list has; for newcomers whatever the coordinator says.
    pub size: usize,
    /// A digest of the list.
    pub list_digest: u64,
    /// The list in words, for messages.
    pub list: String,
    /// Its last epoch.
    pub epoch: u32,
    /// What the others need to know about it.
    pub info: String,
    /// A number that nobody else has, for the coordinator.
    pub nonce: u64,
}

/// One rank's side of one attempt.
#[derive(Debug)]
pub struct Reconfiguration {
    start: Start,
    newest: u32,
    /// As the coordinator: who has joined.
    infos: Vec<Option<String>>,
    /// As a member: the line of the call that was answered.
    joined: Option<u64>,
    /// As a member: by whom it was called last, and in which attempt.
    newest_call: Option<(u64, u64)>,
    /// As the coordinator whom it waits for, as a member whom the coordinator waits for.
    awaited: usize,
    /// As the coordinator: whose door was opened, and why nobody is let in any more.
    connected: Vec<bool>,
    refused: Option<Rejection>,
    over: bool,
    steps: VecDeque<Step>,
}

impl Reconfiguration {
    /// Begins.
    pub fn new(start: Start) -> Self {
        let (mut infos, connected) = (vec![None; start.size], vec![false; start.size]);
        let coordinates = start.own == Some(0);
        let mut steps = VecDeque::new();
        if coordinates {
            infos[0] = Some(start.info.clone());
            steps.extend((1..start.size).map(|member| Step::Dial { member }));
        }
        let (newest, awaited) = (start.epoch, usize::from(coordinates));
        let (joined, newest_call, refused, over) = (None, None, None, false);
        let mut reconfigure = Self {
            start,
            newest,
            infos,
            joined,
            newest_call,
            awaited,
            connected,
            refused,
            over,
            steps,
        };
        if coordinates {
            reconfigure.welcome();
        }
        reconfigure
    }

    /// The first number for lines that come in.
    pub fn first_incoming(&self) -> u64 {
        self.start.size as u64
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Who is waited for, by place in the list; a newcomer does not know the list.
    pub fn awaited(&self) -> Option<u32> {
        self.start.own.map(|_| self.awaited as u32)
    }

    /// True once it has ended; nothing that comes later concerns this attempt.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// A member answers its door; even after a refusal, so that it hears of it.
    pub fn connected(&mut self, member: usize) {
        self.connected[member] = true;
        let Start { list_digest, id: caller, attempt, .. } = self.start;
        self.send(member as u64, Message::Call { list_digest, caller, attempt });
        if let Some(why) = self.refused.clone() {
            self.send(member as u64, Message::Reject(why));
        }
    }

    /// Something was said on a line.
    pub fn received(&mut self, line: u64, message: Message) {
        if self.over {
            return;
        }
        match (self.called(line), message) {
            (None, Message::Call { list_digest, caller, attempt }) => {
                self.call(line, list_digest, (caller, attempt));
            }
            (None, Message::Welcome { epoch, nonce, infos }) if self.joined == Some(line) => {
                self.end(Ok(Agreement { epoch, nonce, infos }));
            }
            (None, Message::Wait { member }) => {
                if self.joined == Some(line) {
                    self.awaited = member;
                }
            }
            // A disagreement concerns whoever was called and has not joined another call since;
            // anything else that ends an attempt of another list, or one from before ours, does
            // not.
            (None, Message::Reject(why)) => {
                let disagreed = why.kind == ErrorKind::Mismatch && self.joined.is_none();
                if self.joined == Some(line) || disagreed {
                    self.end(Err(why));
                }
            }
            (Some(member), Message::Join { epoch, info }) => {
                self.newest = self.newest.max(epoch);
                self.infos[member] = Some(info);
                self.welcome();
                self.report_missing(member);
            }
            (Some(member), Message::Differ { list }) => {
                let detail = format!("it was given {list} and we {}", self.start.list);
                self.refuse(ErrorKind::Mismatch, Some(member), detail);
            }
            (called, message) => {
                let detail = format!("it said {message:?} at the wrong time");
                self.refuse(ErrorKind::Protocol, called.or(Some(0)), detail);
            }
        }
    }

    /// A line ended, or could not be made.
    pub fn lost(&mut self, line: u64, kind: ErrorKind, detail: &str) {
        if self.over {
            return;
        }
        match self.called(line) {
            Some(member) => self.refuse(kind, Some(member), detail.to_owned()),
            None if self.joined == Some(line) => {
                let detail = format!("it called, and went before all had joined: {detail}");
                self.end(Err(Rejection { kind, member: Some(0), detail }));
            }
            None => {}
        }
    }

    /// Time is up.
    pub fn timed_out(&mut self) {
        if self.over {
            return;
        }
        if self.start.own == Some(0) {
            let absent = self.infos.iter().position(Option::is_none);
            let detail = "it did not call reconfigure in time".to_owned();
            self.refuse(ErrorKind::TimedOut, absent, detail);
        } else {
            let what = match self.joined {
                Some(_) => "the coordinator waited for it until our time was up",
                None => "the first of the list did not call in time",
            };
            let (kind, detail) = (ErrorKind::TimedOut, what.to_owned());
            self.end(Err(Rejection { kind, member: Some(self.awaited), detail }));
        }
    }

    /// The member at the end of a line that we dialled.
    fn called(&self, line: u64) -> Option<usize> {
        (self.start.own == Some(0) && line < self.first_incoming()).then_some(line as usize)
    }

    fn call(&mut self, line: u64, list_digest: u64, (caller, attempt): (u64, u64)) {
        if self.newest_call.is_some_and(|(other, newer)| caller == other && attempt < newer) {
            return;
        }
        self.newest_call = Some((caller, attempt));
        let newcomer = self.start.own.is_none();
        // Whoever coordinates a list is called by nobody who has the same one.
        if newcomer || (list_digest == self.start.list_digest && self.start.own != Some(0)) {
            // A later call of the same coordinator: the attempt before is over.
            self.joined = Some(line);
            let (epoch, info) = (self.start.epoch, self.start.info.clone());
            self.send(line, Message::Join { epoch, info });
        } else {
            self.send(line, Message::Differ { list: self.start.list.clone() });
        }
    }

    fn welcome(&mut self) {
        let Some(infos) = self.infos.iter().cloned().collect::<Option<Vec<String>>>() else {
            return;
        };
        let (epoch, nonce) = (self.newest.saturating_add(1), self.start.nonce);
        for line in 1..self.start.size as u64 {
            self.send(line, Message::Welcome { epoch, nonce, infos: infos.clone() });
        }
        self.end(Ok(Agreement { epoch, nonce, infos }));
    }

    /// So that whoever has less time than the coordinator blames the right one.
    fn report_missing(&mut self, joined: usize) {
        let Some(missing) = self.infos.iter().position(Option::is_none) else { return };
        let told = std::mem::replace(&mut self.awaited, missing);
        for line in 1..self.start.size {
            if self.infos[line].is_some() && (line == joined || told != missing) {
                self.send(line as u64, Message::Wait { member: missing });
            }
        }
    }

    fn refuse(&mut self, kind: ErrorKind, member: Option<usize>, detail: String) {
        let why = Rejection { kind, member, detail };
        if self.start.own == Some(0) {
            for line in 1..self.start.size {
                if self.connected[line] {
                    self.send(line as u64, Message::Reject(why.clone()));
                }
            }
            self.refused = Some(why.clone());
        }
        self.end(Err(why));
    }

    fn send(&mut self, line: u64, message: Message) {
        self.steps.push_back(Step::Send { line, message });
    }

    fn end(&mut self, how: Result<Agreement, Rejection>) {
        self.over = true;
        self.steps.push_back(Step::End(how));
    }
}
