//! Agreement of the members of a communicator on its next epoch.
//!
//! ```text
//! coordinator (the first of the list)            every other member
//!   Call(list_digest) ────────────▶  compares it with the list that its caller gave
//!                 ◀────────────────  Join(epoch, info)   or   Differ(list)
//!                 ────────────────▶  Wait(member): a member is still missing
//!   all have joined: Welcome(epoch, nonce, infos) ──▶  all connect with these infos
//!   one is lost, late or has another list: Reject(why) ──▶  all fail with that reason
//! ```
//! An attempt ends for every member that takes part: with an agreement, with the coordinator's
//! Reject, with the end of the connection to the coordinator, or at the deadline. A Call that
//! arrives after a member's attempt has ended is kept for its next attempt. A coordinator that has
//! rejected a list may call with the next one before all members know: a Call contains the lists
//! that its coordinator has rejected, and a member that still has one of them fails with that reason
//! and keeps the Call. Attempts cannot be confused: each has a random number from its coordinator as
//! part of the group's name, and a connection that was made for another group is refused. Some
//! members may reach an agreement and then fail to connect while others do not: members are
//! identified by a number that stays the same in all epochs, so they find each other again in the
//! next attempt.
//!
//! Connections are numbered by the driver: `member` for those that the coordinator dialed, from
//! [`Reconfiguration::first_incoming`] for those that were accepted.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, truncate};

/// Maximum length of a rejection's details: every later call of the coordinator repeats them.
const DETAIL_BYTES_MAX: usize = 4096;

/// Messages between members. The driver checks the length before it allocates memory for one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The coordinator invites a member.
    Call(Call),
    /// The member has the same list.
    Join {
        /// The member's last epoch.
        epoch: u32,
        /// What the other members need to connect to it.
        info: String,
    },
    /// The member's caller gave another list.
    Differ {
        /// That list, for messages.
        list: String,
    },
    /// The coordinator waits for another member.
    Wait {
        /// The first missing member.
        member: usize,
    },
    /// All members have joined.
    Welcome {
        /// The new epoch.
        epoch: u32,
        /// Random number of this attempt.
        nonce: u64,
        /// The infos of all members, in the order of the list.
        infos: Vec<String>,
    },
    /// The attempt has failed.
    Reject(Rejection),
}

/// A coordinator's invitation of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Digest of the list of members.
    pub list_digest: u64,
    /// Identity of the coordinator. With `attempt`, the number of its calls: connections may
    /// overtake each other, so an older call can arrive after a newer one.
    pub caller: u64,
    /// Number of the coordinator's attempt.
    pub attempt: u64,
    /// The last lists that the coordinator has rejected in its present epoch, oldest first.
    pub rejected: Vec<RejectedList>,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// The kind of failure.
    pub kind: ErrorKind,
    /// The member that caused it, by position in the coordinator's list.
    pub member: Option<usize>,
    /// Details.
    pub detail: String,
}

/// A list of members whose attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedList {
    /// Digest of the list.
    pub list_digest: u64,
    /// Why the attempt failed.
    pub why: Rejection,
}

/// What all members agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The new epoch, greater than the last epoch of every member.
    pub epoch: u32,
    /// Random number of this attempt.
    pub nonce: u64,
    /// The infos of all members, in the order of the list.
    pub infos: Vec<String>,
}

/// Steps for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Connect to a member; the connection has the member's number.
    Dial {
        /// Position of the member in the list.
        member: usize,
    },
    /// Send a message.
    Send {
        /// The connection.
        line: u64,
        /// The message.
        message: Message,
    },
    /// Keep a connection for the next attempt, which receives the call first.
    Keep {
        /// The connection.
        line: u64,
        /// The call.
        call: Call,
    },
    /// The attempt has ended; queued messages are still sent.
    End(Result<Agreement, Rejection>),
}

/// Parameters of one rank's attempt.
#[derive(Clone, Debug)]
pub struct Start {
    /// Identity of the rank, the same in all epochs.
    pub id: u64,
    /// Increases with each attempt of the rank.
    pub attempt: u64,
    /// Position of the rank in the list; the first one coordinates. None for newcomers.
    pub own: Option<usize>,
    /// Number of members in the list; the coordinator's list applies to newcomers.
    pub size: usize,
    /// Digest of the list.
    pub list_digest: u64,
    /// The list, for messages.
    pub list: String,
    /// Its last epoch.
    pub epoch: u32,
    /// What the other members need to connect to this rank.
    pub info: String,
    /// A unique number, used by the coordinator.
    pub nonce: u64,
    /// The last lists that this rank has rejected as the coordinator in its present epoch.
    pub rejected: Vec<RejectedList>,
}

/// One rank's side of one attempt.
#[derive(Debug)]
pub struct Reconfiguration {
    start: Start,
    newest: u32,
    /// As the coordinator: the infos of the members that have joined.
    infos: Vec<Option<String>>,
    /// As a member: the connection whose call was answered.
    joined: Option<u64>,
    /// As a member: the last caller and its attempt.
    newest_call: Option<(u64, u64)>,
    /// The member that the coordinator waits for.
    awaited: usize,
    /// As the coordinator: the members that are connected, and why the attempt was rejected.
    connected: Vec<bool>,
    refused: Option<Rejection>,
    over: bool,
    steps: VecDeque<Step>,
}

impl Reconfiguration {
    /// Starts an attempt.
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

    /// The first number for accepted connections.
    pub fn first_incoming(&self) -> u64 {
        self.start.size as u64
    }

    /// Returns the next step.
    pub fn poll(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Position of the missing member in the list; a newcomer does not have the list.
    pub fn awaited(&self) -> Option<u32> {
        self.start.own.map(|_| self.awaited as u32)
    }

    /// True once the attempt has ended; later events do not concern it.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Handles a connection to a member, also after a rejection, so that the member receives it.
    pub fn connected(&mut self, member: usize) {
        self.connected[member] = true;
        let Start { list_digest, id: caller, attempt, .. } = self.start;
        let rejected = self.start.rejected.clone();
        let call = Call { list_digest, caller, attempt, rejected };
        self.send(member as u64, Message::Call(call));
        if let Some(why) = self.refused.clone() {
            self.send(member as u64, Message::Reject(why));
        }
    }

    /// Handles a message.
    pub fn received(&mut self, line: u64, message: Message) {
        if self.over {
            return;
        }
        match (self.dialed_member(line), message) {
            (None, Message::Call(call)) => self.call(line, call),
            (None, Message::Welcome { epoch, nonce, infos }) if self.joined == Some(line) => {
                self.end(Ok(Agreement { epoch, nonce, infos }));
            }
            (None, Message::Wait { member }) => {
                if self.joined == Some(line) {
                    self.awaited = member;
                }
            }
            // A disagreement concerns a member that was called and has not joined another call
            // since. Any other end of an attempt with another list, or of an attempt from before
            // this one, does not.
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
                let detail = format!("it was given {list}, this rank {}", self.start.list);
                self.refuse(ErrorKind::Mismatch, Some(member), detail);
            }
            (member, message) => {
                let detail = format!("unexpected message {message:?}");
                self.refuse(ErrorKind::Protocol, member.or(Some(0)), detail);
            }
        }
    }

    /// Handles the end of a connection, or a failure to connect.
    pub fn disconnected(&mut self, line: u64, kind: ErrorKind, detail: &str) {
        if self.over {
            return;
        }
        match self.dialed_member(line) {
            Some(member) => self.refuse(kind, Some(member), detail.to_owned()),
            None if self.joined == Some(line) => {
                let detail = format!("it called and was lost before all had joined: {detail}");
                self.end(Err(Rejection { kind, member: Some(0), detail }));
            }
            None => {}
        }
    }

    /// Handles the deadline.
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
                Some(_) => "the coordinator waited for it until the deadline",
                None => "the first member of the list did not call in time",
            };
            let (kind, detail) = (ErrorKind::TimedOut, what.to_owned());
            self.end(Err(Rejection { kind, member: Some(self.awaited), detail }));
        }
    }

    /// The member at the end of a connection that was dialed.
    fn dialed_member(&self, line: u64) -> Option<usize> {
        (self.start.own == Some(0) && line < self.first_incoming()).then_some(line as usize)
    }

    fn call(&mut self, line: u64, call: Call) {
        let Call { list_digest, caller, attempt, .. } = call;
        if self.newest_call.is_some_and(|(other, newer)| caller == other && attempt < newer) {
            return;
        }
        self.newest_call = Some((caller, attempt));
        let (newcomer, coordinates) = (self.start.own.is_none(), self.start.own == Some(0));
        let own_list = self.start.list_digest;
        let rejected = call.rejected.iter().rfind(|list| list.list_digest == own_list);
        // The coordinator of a list is not called by a rank that has the same list.
        if newcomer || (list_digest == own_list && !coordinates) {
            // A later call of the same coordinator replaces its previous attempt.
            self.joined = Some(line);
            let (epoch, info) = (self.start.epoch, self.start.info.clone());
            self.send(line, Message::Join { epoch, info });
        } else if let Some(RejectedList { why, .. }) = rejected.cloned()
            && !coordinates
        {
            self.steps.push_back(Step::Keep { line, call });
            self.end(Err(why));
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

    /// Reports the missing member, so that a member with an earlier deadline names the right rank.
    fn report_missing(&mut self, joined: usize) {
        let Some(missing) = self.infos.iter().position(Option::is_none) else { return };
        let previous = std::mem::replace(&mut self.awaited, missing);
        for line in 1..self.start.size {
            if self.infos[line].is_some() && (line == joined || previous != missing) {
                self.send(line as u64, Message::Wait { member: missing });
            }
        }
    }

    fn refuse(&mut self, kind: ErrorKind, member: Option<usize>, mut detail: String) {
        truncate(&mut detail, DETAIL_BYTES_MAX);
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
