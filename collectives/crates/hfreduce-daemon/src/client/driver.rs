//! Driver of a rank that a daemon runs: passes calls to the daemon and returns their results.
//!
//! It replaces the engine's driver: a thread that waits for an operation holds it, and sleeps in
//! it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fabric::arena::Arena;

use super::queue::Queued;
use super::staging::{BufferStager, StagedOperation};
use crate::protocol::{BEAT, CallRequest, Done, Request, Response};
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_engine::driver::{Backend, Shared, Submission, TICK, lock};
use hfreduce_engine::operation::Operation;
use hfreduce_engine::work::WorkState;
use hfreduce_transport::message_socket::MessageSocket;
use hfreduce_transport::poller::{Poller, Ready};

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_DAEMON: u64 = 1;
/// Time after the daemon's deadline at which the rank ends an operation: the daemon has the cause.
const LATER: Duration = Duration::from_secs(2);
/// Time in which the daemon reports that it no longer accesses the rank's memory.
const QUIET_WITHIN: Duration = Duration::from_millis(500);

/// The remote driver of one rank.
pub struct ClientDriver {
    pub(crate) shared: Arc<Shared>,
    pub(crate) line: MessageSocket<UnixStream>,
    /// The daemon, for messages.
    name: String,
    pub(crate) memory: BufferStager,
    pub(crate) calls: BTreeMap<u64, PendingCall>,
    /// Calls with a pipelined input.
    pub(crate) pipelined: BTreeSet<u64>,
    queued: Queued,
    next_ticket: u64,
    poller: Poller,
    ready: Vec<Ready>,
    wants_room: bool,
    /// The daemon has broken the group or has ended: it accesses no memory of the rank.
    quiet: bool,
    peer_closed: bool,
    last_message_at: Instant,
    ticked: Instant,
    beat: Instant,
    reduced_until: Option<Instant>,
}

pub(crate) struct PendingCall {
    pub(crate) operation: Operation,
    work: Arc<WorkState>,
    pub(crate) staged: StagedOperation,
    /// Of pipelined memory: bytes copied in, and out.
    pub(crate) copied: (usize, usize),
}

impl Backend for ClientDriver {
    fn is_busy(&self) -> bool {
        !self.calls.is_empty()
            || self.queued.iter().next().is_some()
            || !lock(&self.shared.submissions).is_empty()
    }

    fn drive(&mut self, until: Instant, is_done: &dyn Fn(&dyn Backend) -> bool) {
        loop {
            let moved = self.pump();
            let now = Instant::now();
            if is_done(self) || now >= until {
                return;
            }
            if !moved {
                let next = until.min(self.ticked + TICK);
                self.sleep(next.saturating_duration_since(now));
            }
        }
    }

    fn poll_once(&mut self) {
        self.pump();
    }

    fn fail_after_panic(&mut self) {
        let detail = "the thread that communicates with hfreduced panicked: a bug in the engine";
        self.fail(self.own_reason(ErrorKind::Io, detail));
    }

    fn close(&mut self, _next: u64, until: Instant) {
        if self.line.end_reason().is_some() {
            return;
        }
        self.peer_closed = true;
        let remaining = until.saturating_duration_since(Instant::now());
        self.line.send(&Request::Leave { timeout_ms: remaining.as_millis() as u64 });
        while Instant::now() < until {
            self.line.flush();
            match self.line.next_message() {
                Some(Response::Left) => return,
                Some(_) => {}
                None if self.line.end_reason().is_some() => return,
                None => self.sleep(until.saturating_duration_since(Instant::now()).min(TICK)),
            }
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl ClientDriver {
    /// Creates the driver on the connection over which the group was connected.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new(
        shared: Arc<Shared>,
        line: MessageSocket<UnixStream>,
        arena: Arc<Arena>,
        name: String,
    ) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        poller.watch_edges(&shared.doorbell, TOKEN_DOORBELL)?;
        poller.watch(line.stream(), TOKEN_DAEMON)?;
        let now = Instant::now();
        Ok(Self {
            shared,
            line,
            name,
            memory: BufferStager::new(arena),
            calls: BTreeMap::new(),
            pipelined: BTreeSet::new(),
            queued: Queued::default(),
            next_ticket: 0,
            poller,
            ready: Vec::new(),
            wants_room: false,
            quiet: false,
            peer_closed: false,
            last_message_at: now,
            ticked: now,
            beat: now,
            reduced_until: None,
        })
    }

    /// The connection, for another epoch; none if the session was closed.
    pub fn into_line(self) -> Option<MessageSocket<UnixStream>> {
        (!self.peer_closed).then_some(self.line)
    }

    /// Makes progress without new events; true if anything changed.
    fn pump(&mut self) -> bool {
        let mut moved = self.listen();
        if self.shared.pending.swap(false, Ordering::SeqCst) {
            moved |= self.take_pending();
            moved |= self.stage_arrived();
        }
        self.line.flush();
        let now = Instant::now();
        if now.duration_since(self.ticked) >= TICK {
            self.ticked = now;
            self.tick(now);
        }
        moved
    }

    fn take_pending(&mut self) -> bool {
        let request = lock(&self.shared.abort_request).take();
        if let Some((kind, reason)) = request
            && self.shared.broken.get().is_none()
        {
            self.line.send(&Request::Abort { kind, reason: reason.clone() });
            self.fail(self.own_reason(kind, &reason));
        }
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        calls.into_iter().for_each(|call| self.queued.push(call));
        let mut any = false;
        while let Some(call) = self.queued.next() {
            self.submit(call);
            any = true;
        }
        any
    }

    fn submit(&mut self, call: Submission) {
        let Submission { operation, work } = call;
        if self.shared.broken.get().is_none() {
            match self.memory.stage(&operation, self.shared.identity.rank) {
                Ok(staged) => return self.hand_over(operation, work, staged),
                Err(error) => {
                    let detail = format!("{error} (HFREDUCE_REGISTERED_BYTES)");
                    self.line.send(&Request::Abort { kind: ErrorKind::Io, reason: detail.clone() });
                    self.fail(self.own_reason(ErrorKind::Io, &detail));
                }
            }
        }
        self.fail_work(&work);
    }

    fn hand_over(&mut self, operation: Operation, work: Arc<WorkState>, staged: StagedOperation) {
        let now = Instant::now();
        if self.calls.is_empty() {
            self.last_message_at = now; // No message was expected without calls.
        }
        let (input, output) = staged.regions();
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let remaining = work.deadline.saturating_duration_since(now);
        self.line.send(&Request::Call(Box::new(CallRequest {
            ticket,
            fingerprint: operation.fingerprint.encode(),
            input,
            output,
            transfers: operation.transfers.clone(),
            timeout_ms: remaining.as_millis() as u64,
            pipelined: operation.input.is_pipelined() || operation.output.is_pipelined(),
        })));
        if operation.input.is_pipelined() {
            self.pipelined.insert(ticket);
        }
        self.calls.insert(ticket, PendingCall { operation, work, staged, copied: (0, 0) });
    }

    /// Handles messages of the daemon; true if there were any.
    fn listen(&mut self) -> bool {
        let mut any = false;
        while let Some(message) = self.line.next_message() {
            any = true;
            self.handle(message);
        }
        if any {
            self.last_message_at = Instant::now();
        }
        if let Some(why) = self.line.end_reason() {
            // A broken daemon session may end before the rank has read the reason.
            let detail = format!(
                "{} on this node, which runs this rank, ended: {why}; see its log",
                self.name
            );
            self.quiet = true;
            self.fail(self.own_reason(ErrorKind::PeerDied, &detail));
        }
        any
    }

    fn handle(&mut self, message: Response) {
        match message {
            Response::Delivered { ticket, end } => self.copy_delivered(ticket, end),
            Response::Done(done) => done.into_iter().for_each(|done| self.complete(done)),
            Response::Broken { cause, record, retired } => {
                self.end_peer_access(retired);
                self.shared.recorder.dumped_at(record.map(PathBuf::from));
                self.fail(cause);
            }
            Response::Beat | Response::Left => {}
            Response::Opened { .. }
            | Response::Connected { .. }
            | Response::Reconfigured(_)
            | Response::Refused(_) => {
                let detail = format!("{} sent {message:?} to a connected group", self.name);
                self.fail(self.own_reason(ErrorKind::Protocol, &detail));
            }
        }
    }

    fn complete(&mut self, done: Done) {
        let Some(call) = self.calls.remove(&done.ticket) else { return };
        self.pipelined.remove(&done.ticket);
        if self.queued.ended(call.operation.fingerprint.kind) {
            self.shared.pending.store(true, Ordering::SeqCst);
        }
        let PendingCall { operation, work, staged, copied: (_, out) } = call;
        if let Some(source) = done.source {
            work.set_source(source);
        }
        let (counters, now) = (&self.shared.counters, Instant::now());
        counters.operations.fetch_add(1, Ordering::Relaxed);
        if operation.fingerprint.kind.reduces() && staged.is_in_place() {
            let bytes = operation.input.bytes() as u64;
            counters.in_place_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        counters.count_allreduce(&work, &mut self.reduced_until, now);
        staged.copy_out(&operation, out, self.shared.identity.rank);
        operation.output.deliver(operation.output.bytes());
        self.memory.release(staged);
        self.shared.recorder.finished(work.flight, false, now);
        work.complete();
        self.shared.waiters.wake_all();
    }

    /// Sends and checks heartbeats; checks deadlines.
    fn tick(&mut self, now: Instant) {
        if self.shared.broken.get().is_some() {
            return;
        }
        if now.duration_since(self.beat) >= BEAT {
            self.beat = now;
            self.line.send(&Request::Beat);
        }
        let works = self.calls.values().map(|call| &call.work);
        let mut works = works.chain(self.queued.iter().map(|call| &call.work));
        let late = works.find(|work| now >= work.deadline + LATER).cloned();
        drop(works);
        if let Some(late) = late {
            let seconds = late.timeout.as_secs_f64();
            let detail =
                format!("not done within {seconds:.1} s, without a message of {}", self.name);
            return self.fail(self.own_reason(ErrorKind::TimedOut, &detail));
        }
        let silent = now.duration_since(self.last_message_at);
        if !self.calls.is_empty() && silent > self.shared.identity.liveness.max(3 * BEAT) {
            let detail = format!(
                "{} on this node, which runs this rank, sent no heartbeat for {:.1} s: it is stopped, \
                 or gets no processor",
                self.name,
                silent.as_secs_f64()
            );
            self.fail(self.own_reason(ErrorKind::PeerStalled, &detail));
        }
    }

    /// Breaks the communicator, unless it is broken already.
    fn fail(&mut self, cause: AbortReason) {
        if self.shared.broken.get().is_some() {
            return;
        }
        let mut cause = cause;
        if cause.sequence < 0
            && let Some(oldest) = self.calls.values().next()
        {
            let (fingerprint, sequence) =
                (oldest.work.fingerprint.describe(), oldest.work.sequence);
            cause = cause.during(&fingerprint, sequence as i64, "waiting for hfreduced");
        }
        tracing::error!(rank = self.shared.identity.rank, ?cause, "communicator broken");
        self.shared.recorder.broke(&cause.encode());
        let _ = self.shared.broken.set(cause);
        self.wait_for_peer_access();
        for (_, call) in std::mem::take(&mut self.calls) {
            self.memory.release(call.staged);
            self.fail_work(&call.work);
        }
        let calls = std::mem::take(&mut *lock(&self.shared.submissions));
        for call in self.queued.take_all().into_iter().chain(calls) {
            self.fail_work(&call.work);
        }
        self.shared.waiters.wake_all();
    }

    /// Before callers get their memory back: waits until the daemon no longer accesses it, or
    /// makes such accesses ineffective.
    fn wait_for_peer_access(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let until = Instant::now() + QUIET_WITHIN;
        while !self.quiet && Instant::now() < until {
            self.line.flush();
            match self.line.next_message() {
                Some(Response::Broken { retired, .. }) => self.end_peer_access(retired),
                Some(_) => {}
                None if self.line.end_reason().is_some() => self.quiet = true,
                None => self.sleep(until.saturating_duration_since(Instant::now())),
            }
        }
        if !self.quiet {
            self.end_peer_access(true);
        }
    }

    /// The daemon no longer accesses memory of the rank; `retired`: unless a peer of it is
    /// stopped.
    fn end_peer_access(&mut self, retired: bool) {
        if retired {
            self.memory.abandon(self.calls.values().map(|call| &call.staged));
        }
        self.quiet = true;
    }

    fn fail_work(&self, work: &WorkState) {
        if let Some(error) = self.shared.error(Some(work), "waiting for hfreduced") {
            self.shared.recorder.finished(work.flight, true, Instant::now());
            self.shared.record_unended(work);
            work.fail(error);
        }
    }

    fn own_reason(&self, kind: ErrorKind, detail: &str) -> AbortReason {
        let identity = &self.shared.identity;
        let node = identity.placement.node_name(identity.rank);
        AbortReason::new(kind, identity.rank, detail).with_peer(identity.rank, node)
    }

    fn sleep(&mut self, most: Duration) {
        let full = self.line.unsent() > 0;
        if full != self.wants_room {
            self.wants_room = full;
            let _ = self.poller.want_room(self.line.stream(), TOKEN_DAEMON, full);
        }
        if self.line.end_reason().is_some() {
            self.poller.forget(self.line.stream());
        }
        self.shared.counters.sleeps.fetch_add(1, Ordering::Relaxed);
        if self.poller.wait(most, &mut self.ready).is_err() {
            std::thread::sleep(Duration::from_millis(1)); // Avoids a busy loop.
        }
    }
}
