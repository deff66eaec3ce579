//! One replica, its store and its timer.
//!
//! Events may come from any thread. They are queued, and one thread of the target at a time takes
//! them in their order and starts the actions that follow, also in their order. Nothing else ever
//! waits for the replica or its store: what others want to know (the report, the next wakeup, what
//! the store holds) is copied out after each event.
//!
//! A single request costs one change of threads: the thread that takes it also does its last store
//! operation, if nothing else waits to be taken. The answer of another replica costs none: its event
//! is taken on the runtime's thread that brings it, and the commit is a change in memory. The store
//! holds its lock over no call of the disk.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
use threefs_chunkstore::ChunkStore;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::Which;
use threefs_core::error::StorageError;
use threefs_core::heartbeat::{LocalReport, LocalState, TargetReport};
use threefs_core::ids::{ChainVersion, ChunkId, NodeId, StoreId};
use threefs_core::message::{
    Content, ReadDone, ReadRequest, RepairRequest, StorageReply, StorageRequest, StorageResult,
};
use threefs_core::replica::{Action, CallId, Config, Event, Replica, Token};
use threefs_core::time::Millis;
use tokio::sync::{Notify, oneshot, watch};

use crate::node::Shared;
use crate::workers::Workers;

mod room;

/// Longest sleep of the timer: a bound, not a pace.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// No event is being taken.
const IDLE: u64 = u64::MAX;

/// What a request is answered with.
pub(crate) type Answer = (StorageResult, Bytes);

/// A store operation; what it gives is the next event.
type Job = Box<dyn FnOnce(&Arc<Target>) -> Option<Event> + Send>;

pub(crate) struct Target {
    config: Config,
    store: Arc<dyn ChunkStore>,
    workers: Workers,
    inbox: Mutex<Inbox>,
    /// Taken by the thread that takes events, and held over waits for the store.
    state: Mutex<State>,
    /// Never held over a wait.
    seen: Mutex<Seen>,
    /// Since when an event is being taken, in milliseconds of the shared clock.
    busy_since: AtomicU64,
    /// It was reported OFFLINE because an event has taken too long: it must not serve after it.
    silenced: AtomicBool,
    shared: Arc<Shared>,
    /// The next wakeup may have moved.
    pub(crate) rearmed: Arc<Notify>,
    /// Whether the store has failed. The last field: once this sender is gone, so is the store.
    failed: watch::Sender<bool>,
}

/// What waits to be taken. As much as the port lets in, and what the target gives itself.
#[derive(Default)]
struct Inbox {
    waiting: VecDeque<Incoming>,
    /// A thread takes events, or will.
    taken_care_of: bool,
    ticking: bool,
}

enum Incoming {
    Event(Event),
    Request {
        request: StorageRequest,
        payload: Bytes,
        expires: Option<Millis>,
        answer: oneshot::Sender<Answer>,
    },
}

struct State {
    replica: Replica,
    /// Requests without an answer. As many as the port lets in flight.
    waiting: HashMap<Token, oneshot::Sender<Answer>>,
    next_token: u64,
}

/// The state after the last event.
struct Seen {
    report: LocalReport,
    next_wakeup: Option<Millis>,
    holds: Holds,
    /// A thread asks the store.
    looking: bool,
}

/// Which store it is and what it holds.
#[derive(Clone, Copy)]
pub(crate) struct Holds {
    id: StoreId,
    used_bytes: u64,
    chunks: u64,
}

impl Holds {
    /// Blocks: the store may be at work on its disk.
    pub(crate) fn of(store: &dyn ChunkStore) -> Self {
        Self { id: store.id(), used_bytes: store.used_bytes(), chunks: store.chunks() }
    }
}

impl Target {
    /// `holds`: of the store, which has just been opened.
    pub(crate) fn new(
        config: Config,
        store: Arc<dyn ChunkStore>,
        holds: Holds,
        shared: Arc<Shared>,
    ) -> Arc<Self> {
        let replica = Replica::new(config.clone());
        let report = replica.report(shared.clock.now());
        let seen = Seen { report, next_wakeup: None, holds, looking: false };
        let state = State { replica, waiting: HashMap::new(), next_token: 0 };
        Arc::new(Self {
            workers: Workers::new(config.target.to_string()),
            config,
            store,
            inbox: Mutex::default(),
            state: Mutex::new(state),
            seen: Mutex::new(seen),
            busy_since: AtomicU64::new(IDLE),
            silenced: AtomicBool::new(false),
            shared,
            rearmed: Arc::default(),
            failed: watch::Sender::new(false),
        })
    }

    /// Becomes true when the store has failed. Closed once the target, and with it the store, is
    /// gone.
    pub(crate) fn failure(&self) -> watch::Receiver<bool> {
        self.failed.subscribe()
    }

    /// Sends ticks when they are due, as long as the target lives.
    pub(crate) async fn keep_time(target: Weak<Self>, rearmed: Arc<Notify>) {
        loop {
            let pause = {
                let Some(target) = target.upgrade() else { return };
                let due = target.seen().next_wakeup;
                let now = target.shared.clock.now();
                let pause = due.map_or(SLEEP_MAX, |at| Duration::from_millis(at.since(now)));
                if pause.is_zero() {
                    target.tick();
                    // Until it is taken; the thread that takes it rearms the timer.
                    SLEEP_MAX
                } else {
                    pause.min(SLEEP_MAX)
                }
            };
            // Either way the time is looked at anew.
            let _ = tokio::time::timeout(pause, rearmed.notified()).await;
        }
    }

    /// Queues one event. Never waits.
    pub(crate) fn handle(self: &Arc<Self>, event: Event) {
        self.give(Incoming::Event(event));
    }

    /// As `handle`, for what a thread of the runtime brings and no disk is needed for: taken there if
    /// no other thread takes events. What waits behind it is for the target's threads.
    fn handle_here(self: &Arc<Self>, event: Event) {
        if !self.queue(Incoming::Event(event)) {
            return;
        }
        let (job, more) = self.take_at_most(1);
        if let Some(job) = job {
            self.spawn(job);
        }
        if more {
            self.take_elsewhere();
        }
    }

    /// A request of another process; its answer, whenever it comes.
    pub(crate) async fn request(
        self: &Arc<Self>,
        request: StorageRequest,
        payload: Bytes,
        expires: Option<BootInstant>,
    ) -> Answer {
        let expires = expires.map(|at| self.shared.clock.at(at));
        let (answer, answered) = oneshot::channel();
        self.give(Incoming::Request { request, payload, expires, answer });
        answered.await.unwrap_or_else(|_| {
            (Err(StorageError::Timeout { target: self.config.target }), Bytes::new())
        })
    }

    /// This target's line of the next heartbeat. Never waits for the disk.
    pub(crate) fn report(self: &Arc<Self>) -> TargetReport {
        let now = self.shared.clock.now();
        let report = match self.state.try_lock() {
            Ok(state) => state.replica.report(now),
            Err(_) => self.report_of_busy(now),
        };
        let holds = self.look_at_store();
        TargetReport {
            target: self.config.target,
            chain: self.config.chain,
            report,
            used_bytes: holds.used_bytes,
            store: Some(holds.id),
            chunks: holds.chunks,
        }
    }

    /// The report while an event is being taken, perhaps by a thread that waits for the disk.
    fn report_of_busy(&self, now: Millis) -> LocalReport {
        let report = self.seen().report;
        let since = self.busy_since.load(SeqCst);
        if since == IDLE || now.since(Millis(since)) <= self.config.store_stall_ms {
            return report;
        }
        // Before it is said, so that nothing is served after it.
        self.silenced.store(true, SeqCst);
        LocalReport { state: LocalState::Offline, ..report }
    }

    /// What the store held a heartbeat ago; has it looked at anew.
    fn look_at_store(self: &Arc<Self>) -> Holds {
        let mut seen = self.seen();
        let holds = seen.holds;
        if !std::mem::replace(&mut seen.looking, true) {
            drop(seen);
            let target = Arc::clone(self);
            self.workers.run(move || {
                let holds = Holds::of(&*target.store);
                let mut seen = target.seen();
                (seen.holds, seen.looking) = (holds, false);
            });
        }
        holds
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tick(self: &Arc<Self>) {
        if !std::mem::replace(&mut self.inbox().ticking, true) {
            self.handle(Event::Tick);
        }
    }

    /// Queues what has come and makes sure that a thread takes it.
    fn give(self: &Arc<Self>, incoming: Incoming) {
        if self.queue(incoming) {
            self.take_elsewhere();
        }
    }

    fn take_elsewhere(self: &Arc<Self>) {
        let target = Arc::clone(self);
        self.workers.run(move || {
            let job = target.take_all();
            target.run(job);
        });
    }

    /// True when the caller has to see to it that it is taken.
    fn queue(&self, incoming: Incoming) -> bool {
        let mut inbox = self.inbox();
        inbox.waiting.push_back(incoming);
        !std::mem::replace(&mut inbox.taken_care_of, true)
    }

    /// Runs a store operation and, if no other thread does, takes the event that it gives.
    fn run(self: &Arc<Self>, mut next: Option<Job>) {
        while let Some(job) = next.take() {
            if let Some(event) = job(self)
                && self.queue(Incoming::Event(event))
            {
                next = self.take_all();
            }
        }
    }

    fn spawn(self: &Arc<Self>, job: Job) {
        let target = Arc::clone(self);
        self.workers.run(move || target.run(Some(job)));
    }

    /// Takes events until none is left; gives the last store operation, for this thread.
    fn take_all(self: &Arc<Self>) -> Option<Job> {
        self.take_at_most(usize::MAX).0
    }

    /// As `take_all`, and whether events are left that the caller has to have taken.
    fn take_at_most(self: &Arc<Self>, events_max: usize) -> (Option<Job>, bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last: Option<Job> = None;
        let mut taken = 0;
        loop {
            let incoming = {
                let mut inbox = self.inbox();
                if taken == events_max && !inbox.waiting.is_empty() {
                    return (last, true);
                }
                let Some(incoming) = inbox.waiting.pop_front() else {
                    inbox.taken_care_of = false;
                    return (last, false);
                };
                taken += 1;
                if matches!(incoming, Incoming::Event(Event::Tick)) {
                    inbox.ticking = false;
                }
                incoming
            };
            for job in self.take(&mut state, incoming) {
                if let Some(job) = last.replace(job) {
                    self.spawn(job);
                }
            }
        }
    }

    fn take(self: &Arc<Self>, state: &mut State, incoming: Incoming) -> Vec<Job> {
        let now = self.shared.clock.now();
        self.busy_since.store(now.0, SeqCst);
        let event = match incoming {
            Incoming::Event(event) => event,
            Incoming::Request { request, payload, expires, answer } => {
                state.next_token += 1;
                let token = Token(state.next_token);
                state.waiting.insert(token, answer);
                Event::Request { token, request, payload, expires }
            }
        };
        let mut jobs = Vec::new();
        let mut next = VecDeque::from([event]);
        while let Some(event) = next.pop_front() {
            for action in self.actions(state, now, event) {
                match self.commit_at_once(&action) {
                    Some(committed) => next.push_back(committed),
                    None => jobs.extend(self.start(state, action)),
                }
            }
        }
        self.busy_since.store(IDLE, SeqCst);
        self.look(&state.replica);
        jobs
    }

    /// What the replica has to have done about an event.
    fn actions(&self, state: &mut State, now: Millis, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        state.replica.handle(now, event, &*self.store, &mut actions);
        if self.silenced.swap(false, SeqCst) {
            // The lease may have ended in another's favour while the store was waited for.
            for action in &mut actions {
                if let Action::ServeRead { token, .. } | Action::ServeRepair { token, .. } = action
                {
                    let (token, target) = (*token, self.config.target);
                    *action =
                        Action::Reply { token, result: Err(StorageError::Timeout { target }) };
                }
            }
            let now = self.shared.clock.now();
            state.replica.handle(now, Event::Retire, &*self.store, &mut actions);
        }
        actions
    }

    /// A commit is mostly a change in memory: then no other thread is needed for it.
    fn commit_at_once(&self, action: &Action) -> Option<Event> {
        let Action::Commit { op, chunk, version, chain_version } = *action else { return None };
        let result = self.store.commit_at_once(chunk, version, chain_version)?;
        Some(Event::Committed { op, result })
    }

    /// Copies out what others want to know.
    fn look(&self, replica: &Replica) {
        let (report, next) = (replica.report(self.shared.clock.now()), replica.next_wakeup());
        let (reported, rearmed) = {
            let mut seen = self.seen();
            let changed = (seen.report != report, seen.next_wakeup != next);
            (seen.report, seen.next_wakeup) = (report, next);
            changed
        };
        if reported {
            self.shared.report_changed.notify_one();
        }
        if replica.has_failed() {
            self.failed.send_replace(true);
        }
        if rearmed {
            self.rearmed.notify_one();
        }
    }

    /// Starts an action; a store operation is for the caller to run.
    fn start(self: &Arc<Self>, state: &mut State, action: Action) -> Option<Job> {
        match action {
            // Room is asked for on the target's threads: the disk is asked how much it has.
            Action::Apply { op, update, payload, class } => job(move |target| {
                let job = target.apply(op, update, payload, class)?;
                job(target)
            }),
            Action::Commit { op, chunk, version, chain_version } => job(move |target| {
                let result = target.store.commit(chunk, version, chain_version);
                Some(Event::Committed { op, result })
            }),
            Action::Forget { op, chunk } => job(move |target| {
                let result = target.store.forget(chunk);
                Some(Event::Forgotten { op, result })
            }),
            Action::Purge { op, chunk, version } => job(move |target| {
                let result = target.store.purge(chunk, version);
                Some(Event::Forgotten { op, result })
            }),
            Action::ForgetInodes { op, inodes, version_floor } => job(move |target| {
                let result = target.store.forget_inodes(&inodes, version_floor);
                Some(Event::InodesForgotten { op, result })
            }),
            Action::ReadContent { op, chunk, which } => job(move |target| {
                let read = target.store.read(chunk, which, 0, u32::MAX);
                let result = read.map(|outcome| (outcome.state, Bytes::from(outcome.bytes)));
                Some(Event::Content { op, result })
            }),
            Action::Call { call, node, request, payload, timeout_ms } => {
                let target = Arc::clone(self);
                self.shared.runtime.spawn(target.call(call, node, request, payload, timeout_ms));
                None
            }
            Action::Reply { token, result } => {
                answer(state, token, (result, Bytes::new()));
                None
            }
            Action::ServeRead { token, request, chain_version } => {
                let waiting = state.waiting.remove(&token)?;
                job(move |target| target.serve_read(waiting, &request, chain_version))
            }
            Action::ServeRepair { token, request, which } => {
                let waiting = state.waiting.remove(&token)?;
                job(move |target| target.serve_repair(waiting, &request, which))
            }
            // The routing is followed by a long poll that learns of it as soon as it is published.
            Action::RefreshRouting => None,
            Action::Alert(alert) => {
                tracing::warn!("{alert}");
                None
            }
        }
    }

    async fn call(
        self: Arc<Self>,
        call: CallId,
        node: NodeId,
        request: StorageRequest,
        payload: Bytes,
        timeout_ms: u64,
    ) {
        let deadline = Deadline::after(Duration::from_millis(timeout_ms));
        let address = self.shared.address_of(node);
        let (result, payload) = self.shared.peers.call(&address, &request, payload, deadline).await;
        self.handle_here(Event::Answer { call, result, payload });
    }

    fn serve_read(
        &self,
        waiting: oneshot::Sender<Answer>,
        request: &ReadRequest,
        chain_version: ChainVersion,
    ) -> Option<Event> {
        // Its connection has ended: nothing needs the bytes.
        if waiting.is_closed() {
            return None;
        }
        let ReadRequest { chunk, offset, length, .. } = *request;
        let answer = match self.store.read(chunk, Which::Committed, offset, length) {
            Ok(outcome) => {
                let done = ReadDone {
                    version: outcome.state.version,
                    length: outcome.bytes.len() as u32,
                    chunk_length: outcome.state.length,
                    checksum: Checksum::of(&outcome.bytes),
                    chain_version,
                };
                (Ok(StorageReply::Read(done)), Bytes::from(outcome.bytes))
            }
            Err(error) => (Err(error.at(self.config.target)), Bytes::new()),
        };
        answered(waiting, answer, chunk)
    }

    fn serve_repair(
        &self,
        waiting: oneshot::Sender<Answer>,
        request: &RepairRequest,
        which: Which,
    ) -> Option<Event> {
        let chunk = request.chunk;
        let answer = match self.store.read(chunk, which, 0, u32::MAX) {
            Ok(outcome) if outcome.state.version == request.version => {
                let (version, checksum) = (outcome.state.version, outcome.state.checksum);
                let content = Content { version, checksum };
                (Ok(StorageReply::Content(content)), Bytes::from(outcome.bytes))
            }
            // It has moved on meanwhile: this version is not what its asker needs now.
            Ok(_) => (Err(StorageError::ChunkNotCommit { chunk }), Bytes::new()),
            Err(error) => (Err(error.at(self.config.target)), Bytes::new()),
        };
        answered(waiting, answer, chunk)
    }
}

fn job(run: impl FnOnce(&Arc<Target>) -> Option<Event> + Send + 'static) -> Option<Job> {
    Some(Box::new(run))
}

/// Sends an answer that was read from the store; damage that was met is the next event.
fn answered(waiting: oneshot::Sender<Answer>, answer: Answer, chunk: ChunkId) -> Option<Event> {
    let damaged = matches!(answer.0, Err(StorageError::ChunkCorrupt { .. }));
    // A reader that has gone needs no answer.
    let _ = waiting.send(answer);
    damaged.then_some(Event::DamageFound { chunk })
}

fn answer(state: &mut State, token: Token, answer: Answer) {
    if let Some(waiting) = state.waiting.remove(&token) {
        let _ = waiting.send(answer);
    }
}

/// The clock of this process, as the core counts time. It goes on while the machine is suspended:
/// the lease to serve must end then.
pub(crate) struct Clock(BootInstant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(BootInstant::now())
    }

    pub(crate) fn now(&self) -> Millis {
        self.at(BootInstant::now())
    }

    fn at(&self, moment: BootInstant) -> Millis {
        Millis(moment.since(self.0).as_millis() as u64)
    }
}

#[cfg(test)]
#[path = "target_test.rs"]
mod tests;
