//! Driver of the agreement on the next epoch: connections and time for [`Reconfiguration`].

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::deadline::Deadline;

use super::identity::EndpointIdentity;
use super::info::{Info, host};
use super::neighbors::{Call, Hello, Purpose, dial};
use crate::driver::lock;
use hfreduce_core::error::ErrorKind;
use hfreduce_core::reconfigure::{
    self, Agreement, Message, Reconfiguration, Rejection, Start, Step,
};
use hfreduce_shm::flight::Recorder;
use hfreduce_transport::message_socket::MessageSocket;

/// Maximum number of members dialed at the same time.
const DIALERS_MAX: usize = 32;
/// Interval at which connections are checked.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Time in which final messages must have been sent.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

type Dialed = (usize, Result<TcpStream, (ErrorKind, String)>);

/// Checked while members agree: returns why the rank has ended, if it has.
pub type Watch<'a> = &'a mut dyn FnMut() -> Option<String>;

/// Drives one attempt.
pub(super) struct AgreementDriver<'a> {
    identity: &'a EndpointIdentity,
    list: Arc<Vec<Info>>,
    core: Reconfiguration,
    /// Position of this rank in the list.
    own: Option<usize>,
    attempt: u32,
    lines: BTreeMap<u64, MessageSocket>,
    /// Accepted connections without a message yet, with their callers' ids and attempts.
    unheard: BTreeMap<u64, (u64, u32)>,
    next_line: u64,
    /// Coordinators end earlier: the rest of the time is for connecting.
    joining: Deadline,
    to_dial: Arc<Mutex<VecDeque<usize>>>,
    dialed: (Sender<Dialed>, Receiver<Dialed>),
    /// Members that are being dialed, or wait for it.
    dialing: usize,
    dialers: usize,
}

impl<'a> AgreementDriver<'a> {
    pub(super) fn new(
        identity: &'a EndpointIdentity,
        list: Vec<Info>,
        start: Start,
        deadline: Deadline,
    ) -> Self {
        let remaining = deadline.remaining().unwrap_or_default();
        let joining =
            if start.own == Some(0) { deadline.within(remaining * 3 / 4) } else { deadline };
        let (own, attempt, core) = (start.own, start.attempt as u32, Reconfiguration::new(start));
        Self {
            own,
            attempt,
            identity,
            list: Arc::new(list),
            next_line: core.first_incoming(),
            core,
            lines: BTreeMap::new(),
            unheard: BTreeMap::new(),
            joining,
            to_dial: Arc::default(),
            dialed: channel(),
            dialing: 0,
            dialers: 0,
        }
    }

    /// Runs until the attempt has ended. If `watch` returns a reason, no final messages are sent.
    pub(super) fn run(
        mut self,
        recorder: &Recorder,
        watch: Watch<'_>,
    ) -> Result<Agreement, Rejection> {
        loop {
            if let Some(detail) = watch() {
                return Err(Rejection { kind: ErrorKind::PeerDied, member: self.own, detail });
            }
            recorder.waiting(None, "agreeing on the members", self.core.awaited());
            if let Some(how) = self.act() {
                self.leave();
                return how;
            }
            self.take_dialed();
            self.accept_calls();
            self.listen();
            if self.joining.remaining().is_none() {
                self.core.timed_out();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Sends queued messages, also to members that connect only now. Unread calls are kept for the
    /// next attempt.
    fn leave(&mut self) {
        for (number, (caller, attempt)) in std::mem::take(&mut self.unheard) {
            if let Some(line) = self.lines.remove(&number) {
                self.identity.inbox.queue_call(Call { caller, attempt, line });
            }
        }
        let until = Deadline::after(DRAIN_TIMEOUT);
        loop {
            self.take_dialed();
            self.act();
            let unsaid =
                self.lines.values_mut().map(|line| usize::from(!line.flush())).sum::<usize>();
            if unsaid + self.dialing == 0 || until.remaining().is_none() {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn act(&mut self) -> Option<Result<Agreement, Rejection>> {
        while let Some(step) = self.core.poll() {
            match step {
                Step::Dial { member } => self.dial(member),
                Step::Send { line, message } => {
                    if let Some(line) = self.lines.get_mut(&line) {
                        line.send(&message);
                    }
                }
                Step::Keep { line, call } => self.keep(line, call),
                Step::End(how) => return Some(how),
            }
        }
        None
    }

    /// Makes a connection's call unread again. Connections that have ended were removed before: their
    /// calls would end every later attempt too.
    fn keep(&mut self, number: u64, call: reconfigure::Call) {
        if let Some(line) = self.lines.get_mut(&number) {
            self.unheard.insert(number, (call.caller, call.attempt as u32));
            line.put_back(&Message::Call(call));
        }
    }

    fn dial(&mut self, member: usize) {
        lock(&self.to_dial).push_back(member);
        self.dialing += 1;
        if self.dialers >= DIALERS_MAX {
            return;
        }
        self.dialers += 1;
        let (list, to_dial, done) =
            (self.list.clone(), self.to_dial.clone(), self.dialed.0.clone());
        let (key, host) = (self.identity.key.clone(), host());
        let (joining, hello) = (
            self.joining,
            Hello {
                group: self.identity.id,
                from: self.attempt,
                purpose: Purpose::Reconfiguration,
                stream: 0,
            },
        );
        let dialer = move || {
            loop {
                let Some(member) = lock(&to_dial).pop_front() else { return };
                // The dialer reports an unreachable member before the deadline of all.
                let remaining = joining.remaining().unwrap_or_default();
                let deadline = joining.within(remaining * 3 / 4);
                let dialed = dial(&key, &host, &list[member], hello, deadline, &|| false);
                if done.send((member, dialed)).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("hfreduce-dial".into()).spawn(dialer);
        if let Err(error) = spawned {
            self.core.disconnected(
                member as u64,
                ErrorKind::Io,
                &format!("cannot start a thread: {error}"),
            );
        }
    }

    fn take_dialed(&mut self) {
        while let Ok((member, dialed)) = self.dialed.1.try_recv() {
            self.dialing -= 1;
            match dialed.map(MessageSocket::new) {
                Ok(Ok(line)) => {
                    self.lines.insert(member as u64, line);
                    self.core.connected(member);
                }
                Ok(Err(error)) => {
                    self.core.disconnected(member as u64, ErrorKind::Io, &error.to_string());
                }
                Err((kind, detail)) => self.core.disconnected(member as u64, kind, &detail),
            }
        }
    }

    fn accept_calls(&mut self) {
        let calls = std::mem::take(&mut *lock(&self.identity.inbox.calls));
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
                && let Some(message) = line.next_message()
            {
                self.unheard.remove(number);
                self.core.received(*number, message);
            }
            if let Some(why) = line.end_reason() {
                self.core.disconnected(*number, ErrorKind::PeerDied, why);
                ended.push(*number);
            }
        }
        for number in ended {
            self.lines.remove(&number);
        }
    }
}
