//! The driver of a rank that a daemon serves: hands it the calls and brings back what they gave.
//!
//! It has the place of the engine's own driver: whoever waits has it, and sleeps in it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fabric::arena::Arena;

use super::memory::{Laid, Memory};
use super::outstanding::Queued;
use super::{Ask, BEAT, Call, Done, Tell};
use crate::cause::{Cause, CauseKind};
use crate::drivers::poller::{Poller, Ready};
use crate::drivers::{Shared, Submission, TICK, lock};
use crate::line::Line;
use crate::operation::Operation;
use crate::work::WorkState;

const TOKEN_BELL: u64 = 0;
const TOKEN_DAEMON: u64 = 1;
/// How much later than the daemon, which knows whom everybody waits for, we end an operation.
const LATER: Duration = Duration::from_secs(2);
/// How long the daemon may take to say that nobody touches our memory any more.
const QUIET_WITHIN: Duration = Duration::from_millis(500);

/// See the module's text.
pub struct Attached {
    pub(super) shared: Arc<Shared>,
    pub(super) line: Line<UnixStream>,
    /// The daemon, for messages.
    name: String,
    pub(super) memory: Memory,
    pub(super) calls: BTreeMap<u64, UnderWay>,
    /// Those of them whose input fills meanwhile.
    pub(super) paced: BTreeSet<u64>,
    queued: Queued,
    next_ticket: u64,
    poller: Poller,
    ready: Vec<Ready>,
    wants_room: bool,
    /// The daemon has broken the group or is gone: it touches nothing of ours.
    quiet: bool,
    has_left: bool,
    heard: Instant,
    ticked: Instant,
    beat: Instant,
    reduced_until: Option<Instant>,
}

pub(super) struct UnderWay {
    pub(super) operation: Operation,
    work: Arc<WorkState>,
    pub(super) laid: Laid,
    /// Of paced memory: what was copied in before its end, and out.
    pub(super) copied: (usize, usize),
}

impl Attached {
    /// Over the line on which the group was connected.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(
        shared: Arc<Shared>,
        line: Line<UnixStream>,
        arena: Arc<Arena>,
        name: String,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.watch_edges(&shared.bell, TOKEN_BELL)?;
        poller.watch(line.stream(), TOKEN_DAEMON)?;
        let now = Instant::now();
        Ok(Self {
            shared,
            line,
            name,
            memory: Memory::new(arena),
            calls: BTreeMap::new(),
            paced: BTreeSet::new(),
            queued: Queued::default(),
            next_ticket: 0,
            poller,
            ready: Vec::new(),
            wants_room: false,
            quiet: false,
            has_left: false,
            heard: now,
            ticked: now,
            beat: now,
            reduced_until: None,
        })
    }

    /// True while something is under way.
    pub fn is_busy(&self) -> bool {
        !self.calls.is_empty()
            || self.queued.iter().next().is_some()
            || !lock(&self.shared.submissions).is_empty()
    }

    /// Hands over and brings back until `done` holds or `until` has come.
    pub fn drive(&mut self, until: Instant, done: impl Fn(&Self) -> bool) {
        loop {
            let moved = self.pump();
            let now = Instant::now();
            if done(self) || now >= until {
                return;
            }
            if !moved {
                let next = until.min(self.ticked + TICK);
                self.sleep(next.saturating_duration_since(now));
            }
        }
    }

    /// One look at everything without sleeping.
    pub fn glance(&mut self) {
        self.pump();
    }

    /// A thread panicked while it had this.
    pub fn give_up(&mut self) {
        let detail = "the thread that talks to hfreduced panicked: a bug in it";
        self.fail(self.blame(CauseKind::Io, detail));
    }

    /// The line, for another epoch; none if the daemon was told that there is none.
    pub fn into_line(self) -> Option<Line<UnixStream>> {
        (!self.has_left).then_some(self.line)
    }

    /// Takes leave, and waits for the daemon to have taken it from everybody, until `until`.
    pub fn leave(&mut self, until: Instant) {
        if self.line.ended().is_some() {
            return;
        }
        self.has_left = true;
        let left = until.saturating_duration_since(Instant::now());
        self.line.say(&Ask::Leave { timeout_ms: left.as_millis() as u64 });
        while Instant::now() < until {
            self.line.flush();
            match self.line.next_word() {
                Some(Tell::Left) => return,
                Some(_) => {}
                None if self.line.ended().is_some() => return,
                None => self.sleep(until.saturating_duration_since(Instant::now()).min(TICK)),
            }
        }
    }

    /// Everything that can move without new events; true if anything did.
    fn pump(&mut self) -> bool {
        let mut moved = self.listen();
        if self.shared.news.swap(false, Ordering::SeqCst) {
            moved |= self.take_news();
            moved |= self.bring_arrived();
        }
        self.line.flush();
        let now = Instant::now();
        if now.duration_since(self.ticked) >= TICK {
            self.ticked = now;
            self.tick(now);
        }
        moved
    }

    fn take_news(&mut self) -> bool {
        let asked = lock(&self.shared.abort_asked).take();
        if let Some((kind, reason)) = asked
            && self.shared.broken.get().is_none()
        {
            self.line.say(&Ask::Abort { kind, reason: reason.clone() });
            self.fail(self.blame(kind, &reason));
        }
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        calls.into_iter().for_each(|call| self.queued.push(call));
        let mut any = false;
        while let Some(call) = self.queued.next() {
            self.begin(call);
            any = true;
        }
        any
    }

    fn begin(&mut self, call: Submission) {
        let Submission { operation, work } = call;
        if self.shared.broken.get().is_none() {
            match self.memory.lay(&operation, self.shared.identity.rank) {
                Ok(laid) => return self.hand_over(operation, work, laid),
                Err(error) => {
                    let detail = format!("{error} (HFREDUCE_REGISTERED_BYTES)");
                    self.line.say(&Ask::Abort { kind: CauseKind::Io, reason: detail.clone() });
                    self.fail(self.blame(CauseKind::Io, &detail));
                }
            }
        }
        self.fail_work(&work);
    }

    fn hand_over(&mut self, operation: Operation, work: Arc<WorkState>, laid: Laid) {
        let now = Instant::now();
        if self.calls.is_empty() {
            self.heard = now; // Nothing was to be said while there was nothing to do.
        }
        let (input, output) = laid.regions();
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let left = work.deadline.saturating_duration_since(now);
        self.line.say(&Ask::Call(Box::new(Call {
            ticket,
            print: operation.print.encode(),
            input,
            output,
            transfers: operation.transfers.clone(),
            timeout_ms: left.as_millis() as u64,
            paced: operation.input.is_paced() || operation.output.is_paced(),
        })));
        if operation.input.is_paced() {
            self.paced.insert(ticket);
        }
        self.calls.insert(ticket, UnderWay { operation, work, laid, copied: (0, 0) });
    }

    /// Takes what the daemon has said; true if it said anything.
    fn listen(&mut self) -> bool {
        let mut any = false;
        while let Some(word) = self.line.next_word() {
            any = true;
            self.hear(word);
        }
        if any {
            self.heard = Instant::now();
        }
        if let Some(why) = self.line.ended() {
            // Broken, it may have ended its part before us.
            let detail = format!(
                "{} on this node, which serves it, ended: {why}; its log says more",
                self.name
            );
            self.quiet = true;
            self.fail(self.blame(CauseKind::PeerDied, &detail));
        }
        any
    }

    fn hear(&mut self, word: Tell) {
        match word {
            Tell::Delivered { ticket, end } => self.bring_delivered(ticket, end),
            Tell::Done(done) => done.into_iter().for_each(|done| self.complete(done)),
            Tell::Broken { cause, record, retired } => {
                self.end_touching(retired);
                self.shared.recorder.dumped_at(record.map(PathBuf::from));
                self.fail(cause);
            }
            Tell::Beat | Tell::Left => {}
            Tell::Opened { .. }
            | Tell::Connected { .. }
            | Tell::Regrouped(_)
            | Tell::Refused(_) => {
                let detail = format!("{} said {word:?} to a group that is connected", self.name);
                self.fail(self.blame(CauseKind::Protocol, &detail));
            }
        }
    }

    fn complete(&mut self, done: Done) {
        let Some(ended) = self.calls.remove(&done.ticket) else { return };
        self.paced.remove(&done.ticket);
        if self.queued.ended(ended.operation.print.kind) {
            self.shared.news.store(true, Ordering::SeqCst);
        }
        let UnderWay { operation, work, laid, copied: (_, out) } = ended;
        if let Some(source) = done.source {
            work.came_from(source);
        }
        let (counters, now) = (&self.shared.counters, Instant::now());
        counters.operations.fetch_add(1, Ordering::Relaxed);
        if operation.print.kind.reduces() && laid.is_in_place() {
            let bytes = operation.input.bytes() as u64;
            counters.in_place_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        counters.count_allreduce(&work, &mut self.reduced_until, now);
        laid.bring(&operation, out, self.shared.identity.rank);
        operation.output.deliver(operation.output.bytes());
        self.memory.keep(laid);
        self.shared.recorder.finished(work.flight, false, now);
        work.complete();
        self.shared.room.call();
    }

    /// Signs of life, both ways; deadlines.
    fn tick(&mut self, now: Instant) {
        if self.shared.broken.get().is_some() {
            return;
        }
        if now.duration_since(self.beat) >= BEAT {
            self.beat = now;
            self.line.say(&Ask::Beat);
        }
        let works = self.calls.values().map(|call| &call.work);
        let mut works = works.chain(self.queued.iter().map(|call| &call.work));
        let late = works.find(|work| now >= work.deadline + LATER).cloned();
        drop(works);
        if let Some(late) = late {
            let seconds = late.timeout.as_secs_f64();
            let detail = format!("not done within {seconds:.1} s, and {} says nothing", self.name);
            return self.fail(self.blame(CauseKind::TimedOut, &detail));
        }
        let silent = now.duration_since(self.heard);
        if !self.calls.is_empty() && silent > self.shared.identity.liveness.max(3 * BEAT) {
            let detail = format!(
                "{} on this node, which serves it, gave no sign of life for {:.1} s: it is stopped, \
                 or gets no processor",
                self.name,
                silent.as_secs_f64()
            );
            self.fail(self.blame(CauseKind::PeerStalled, &detail));
        }
    }

    /// Ends everything for this reason, unless it has ended before.
    fn fail(&mut self, cause: Cause) {
        if self.shared.broken.get().is_some() {
            return;
        }
        let mut cause = cause;
        if cause.sequence < 0
            && let Some(oldest) = self.calls.values().next()
        {
            let (print, sequence) = (oldest.work.print.describe(), oldest.work.sequence);
            cause = cause.during(&print, sequence as i64, "waiting for hfreduced");
        }
        tracing::error!(rank = self.shared.identity.rank, ?cause, "communicator broken");
        self.shared.recorder.broke(&cause.encode());
        let _ = self.shared.broken.set(cause);
        self.be_left_alone();
        for (_, call) in std::mem::take(&mut self.calls) {
            self.memory.keep(call.laid);
            self.fail_work(&call.work);
        }
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        for call in self.queued.take_all().into_iter().chain(calls) {
            self.fail_work(&call.work);
        }
        self.shared.room.call();
    }

    /// Before callers hear that they have their memory back: nobody reads or writes it any more, or
    /// what they write goes nowhere.
    fn be_left_alone(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let until = Instant::now() + QUIET_WITHIN;
        while !self.quiet && Instant::now() < until {
            self.line.flush();
            match self.line.next_word() {
                Some(Tell::Broken { retired, .. }) => self.end_touching(retired),
                Some(_) => {}
                None if self.line.ended().is_some() => self.quiet = true,
                None => self.sleep(until.saturating_duration_since(Instant::now())),
            }
        }
        if !self.quiet {
            self.end_touching(true);
        }
    }

    /// The daemon touches nothing of ours any more; `retired`: but somebody may who stands still.
    fn end_touching(&mut self, retired: bool) {
        if retired {
            self.memory.abandon(self.calls.values().map(|call| &call.laid));
        }
        self.quiet = true;
    }

    fn fail_work(&self, work: &WorkState) {
        if let Some(error) = self.shared.error(Some(work), "waiting for hfreduced") {
            self.shared.recorder.finished(work.flight, true, Instant::now());
            self.shared.did_not_end(work);
            work.fail(error);
        }
    }

    fn blame(&self, kind: CauseKind, detail: &str) -> Cause {
        let identity = &self.shared.identity;
        let node = identity.placement.node_name(identity.rank);
        Cause::new(kind, identity.rank, detail).blaming(identity.rank, node)
    }

    fn sleep(&mut self, most: Duration) {
        let full = self.line.unsent() > 0;
        if full != self.wants_room {
            self.wants_room = full;
            let _ = self.poller.want_room(self.line.stream(), TOKEN_DAEMON, full);
        }
        if self.line.ended().is_some() {
            self.poller.forget(self.line.stream());
        }
        self.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        if self.poller.wait(most, &mut self.ready).is_err() {
            std::thread::sleep(Duration::from_millis(1)); // Never without a pause between two looks.
        }
    }
}
