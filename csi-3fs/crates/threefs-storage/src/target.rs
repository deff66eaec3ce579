//! Target: one replica with its store and timer.
//!
//! Events may come from any thread. They are queued; one thread of the target at a time processes
//! them in order and starts the resulting actions in order. No other thread ever waits for the
//! replica or its store: the report, the next wakeup and the store's usage are published after each
//! event.
//!
//! A single request costs one thread switch: the thread that processes it also runs its last store
//! operation, if the queue is empty. Small updates are applied by the thread that processes them, and
//! flushed together (`flushes`). The reply of another replica and the confirmation of the predecessor
//! cost none: they are processed on the runtime thread that received them, and the commit is a change
//! in memory. The store does not hold its lock over disk calls.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use threefs_chunkstore::ChunkStore;
use threefs_core::heartbeat::{LocalReport, LocalState, TargetReport};
use threefs_core::ids::{FencesVersion, StoreId};
use threefs_core::message::{StorageRequest, StorageResult};
use threefs_core::replica::{Action, Config, Event, Replica, Token};
use threefs_core::time::Millis;
use tokio::sync::{Notify, oneshot, watch};

use crate::context::NodeContext;
use crate::scrub::Scrub;
use crate::workers::Workers;

mod actions;
mod calls;
mod reads;
mod record;
mod requests;
mod small;
mod status;

use actions::Change;
use calls::PeerCall;

/// Maximum sleep of the timer.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Pause between two readings of a store's usage, in milliseconds: heartbeats are more frequent.
const USAGE_MS: u64 = 1_000;
/// No event is being processed.
const IDLE: u64 = u64::MAX;

/// Response to a request.
pub(crate) type Response = (StorageResult, Bytes);

/// A store operation; it returns the next event.
type Job = Box<dyn FnOnce(&Arc<Target>) -> Option<Event> + Send>;

/// What processed events leave to do.
#[derive(Default)]
struct Work {
    /// The last store operation; the others have been started.
    job: Option<Job>,
    /// Small updates, which share a flush.
    changes: Vec<Change>,
    /// Events are left in the queue, for the caller to process.
    more: bool,
}

pub(crate) struct Target {
    config: Config,
    pub(crate) store: Arc<dyn ChunkStore>,
    pub(crate) workers: Workers,
    pub(crate) scrub: Arc<Scrub>,
    /// Folder of the store, with the membership record.
    folder: PathBuf,
    inbox: Mutex<Inbox>,
    /// Locked by the thread that processes events, also while it waits for the store.
    state: Mutex<State>,
    /// Never held over a wait.
    snapshot: Mutex<Snapshot>,
    /// When the current event started to be processed, in milliseconds of the shared clock.
    busy_since: AtomicU64,
    /// The target was reported OFFLINE because an event took too long: it must not serve
    /// afterwards.
    offline_reported: AtomicBool,
    pub(crate) context: Arc<NodeContext>,
    /// Notified when the next wakeup changes.
    pub(crate) rearmed: Arc<Notify>,
    /// Whether the store has failed. The last field: the store is dropped before this sender.
    failed: watch::Sender<bool>,
}

/// Queued events. Bounded by the calls in flight of the port, plus a few events of the target
/// itself.
#[derive(Default)]
struct Inbox {
    waiting: VecDeque<Incoming>,
    /// A thread processes events, or is about to.
    scheduled: bool,
    ticking: bool,
}

enum Incoming {
    Event(Event),
    Request {
        request: StorageRequest,
        payload: Bytes,
        expires: Option<Millis>,
        answer: oneshot::Sender<Response>,
    },
}

struct State {
    replica: Replica,
    /// Unanswered requests. Bounded by the calls in flight of the port.
    waiting: HashMap<Token, oneshot::Sender<Response>>,
    next_token: u64,
}

/// Snapshot of the state after the last event.
struct Snapshot {
    report: LocalReport,
    /// The fences that the replica confirms.
    drained: FencesVersion,
    next_wakeup: Option<Millis>,
    usage: StoreUsage,
    /// When its next reading is due.
    usage_due: Millis,
    /// A thread is reading the store's usage.
    refreshing: bool,
}

/// Identity and usage of a store.
#[derive(Clone, Copy)]
pub(crate) struct StoreUsage {
    pub(crate) id: StoreId,
    used_bytes: u64,
    chunks: u64,
}

impl StoreUsage {
    /// Blocks: the store may be waiting for its disk.
    pub(crate) fn of(store: &dyn ChunkStore) -> Self {
        Self { id: store.id(), used_bytes: store.used_bytes(), chunks: store.chunks() }
    }
}

impl Target {
    /// `usage`: of the store, which has just been opened.
    pub(crate) fn new(
        config: Config,
        store: Arc<dyn ChunkStore>,
        usage: StoreUsage,
        scrub: Scrub,
        folder: PathBuf,
        context: Arc<NodeContext>,
    ) -> Arc<Self> {
        let replica = Replica::new(config.clone());
        let report = replica.report(context.clock.now());
        let snapshot = Snapshot {
            report,
            drained: FencesVersion(0),
            next_wakeup: None,
            usage,
            usage_due: Millis(0),
            refreshing: false,
        };
        let state = State { replica, waiting: HashMap::new(), next_token: 0 };
        Arc::new(Self {
            workers: Workers::new(config.target.to_string()),
            config,
            store,
            scrub: Arc::new(scrub),
            folder,
            inbox: Mutex::default(),
            state: Mutex::new(state),
            snapshot: Mutex::new(snapshot),
            busy_since: AtomicU64::new(IDLE),
            offline_reported: AtomicBool::new(false),
            context,
            rearmed: Arc::default(),
            failed: watch::Sender::new(false),
        })
    }

    /// Becomes true when the store fails. Closed once the target, and with it the store, is
    /// dropped.
    pub(crate) fn failure(&self) -> watch::Receiver<bool> {
        self.failed.subscribe()
    }

    /// Sends ticks when they are due, for the lifetime of the target.
    pub(crate) async fn run_timer(target: Weak<Self>, rearmed: Arc<Notify>) {
        loop {
            let pause = {
                let Some(target) = target.upgrade() else { return };
                let next_wakeup = target.snapshot().next_wakeup;
                let now = target.context.clock.now();
                let pause =
                    next_wakeup.map_or(SLEEP_MAX, |at| Duration::from_millis(at.since(now)));
                if pause.is_zero() {
                    target.tick();
                    // Until it is processed; the processing thread rearms the timer.
                    SLEEP_MAX
                } else {
                    pause.min(SLEEP_MAX)
                }
            };
            // The time is checked again either way.
            let _ = tokio::time::timeout(pause, rearmed.notified()).await;
        }
    }

    /// Queues one event. Never waits.
    pub(crate) fn handle(self: &Arc<Self>, event: Event) {
        self.enqueue(Incoming::Event(event));
    }

    /// As `handle`, for an event that needs no disk: processed on this thread if no other thread is
    /// processing events. Further events are left to the target's threads.
    pub(crate) fn handle_inline(self: &Arc<Self>, event: Event) {
        self.process_inline(Incoming::Event(event));
    }

    fn process_inline(self: &Arc<Self>, incoming: Incoming) {
        if !self.queue(incoming) {
            return;
        }
        let Work { job, changes, more } = self.process_at_most(1);
        if let Some(job) = job {
            self.spawn(job);
        }
        if !changes.is_empty() {
            let target = Arc::clone(self);
            self.workers.run(move || target.apply_together(changes));
        }
        if more {
            self.process_on_worker();
        }
    }

    /// This target's entry in the next heartbeat, and the fences that it confirms. Never waits for the
    /// disk.
    pub(crate) fn report(self: &Arc<Self>) -> (TargetReport, FencesVersion) {
        let now = self.context.clock.now();
        let (report, drained) = match self.state.try_lock() {
            Ok(state) => (state.replica.report(now), state.replica.drained_fences()),
            Err(_) => self.busy_report(now),
        };
        let usage = self.refresh_usage(now);
        let line = TargetReport {
            target: self.config.target,
            chain: self.config.chain,
            report,
            used_bytes: usage.used_bytes,
            store: Some(usage.id),
            chunks: usage.chunks,
        };
        (line, drained)
    }

    /// The report while an event is being processed, perhaps by a thread that waits for the disk.
    fn busy_report(&self, now: Millis) -> (LocalReport, FencesVersion) {
        let (report, drained) = {
            let snapshot = self.snapshot();
            (snapshot.report, snapshot.drained)
        };
        let since = self.busy_since.load(SeqCst);
        if since == IDLE || now.since(Millis(since)) <= self.config.store_stall_ms {
            return (report, drained);
        }
        // Set before it is reported, so that nothing is served afterwards.
        self.offline_reported.store(true, SeqCst);
        (LocalReport { state: LocalState::Offline, ..report }, drained)
    }

    /// The store's usage as it was read last; starts another reading if it is due.
    fn refresh_usage(self: &Arc<Self>, now: Millis) -> StoreUsage {
        let mut snapshot = self.snapshot();
        let usage = snapshot.usage;
        if now >= snapshot.usage_due && !std::mem::replace(&mut snapshot.refreshing, true) {
            snapshot.usage_due = now.after(USAGE_MS);
            drop(snapshot);
            let target = Arc::clone(self);
            self.workers.run(move || {
                let usage = StoreUsage::of(&*target.store);
                let mut snapshot = target.snapshot();
                (snapshot.usage, snapshot.refreshing) = (usage, false);
            });
        }
        usage
    }

    fn snapshot(&self) -> MutexGuard<'_, Snapshot> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tick(self: &Arc<Self>) {
        if !std::mem::replace(&mut self.inbox().ticking, true) {
            self.handle(Event::Tick);
        }
    }

    /// Queues an event or request and ensures that a thread processes it.
    fn enqueue(self: &Arc<Self>, incoming: Incoming) {
        if self.queue(incoming) {
            self.process_on_worker();
        }
    }

    fn process_on_worker(self: &Arc<Self>) {
        let target = Arc::clone(self);
        self.workers.run(move || {
            let work = target.process_all();
            target.run(work);
        });
    }

    /// Returns true if the caller must ensure that it is processed.
    fn queue(&self, incoming: Incoming) -> bool {
        self.queue_all([incoming])
    }

    fn queue_all(&self, incoming: impl IntoIterator<Item = Incoming>) -> bool {
        let mut inbox = self.inbox();
        inbox.waiting.extend(incoming);
        !std::mem::replace(&mut inbox.scheduled, true)
    }

    /// Runs a store operation, then processes its event unless another thread does.
    fn run(self: &Arc<Self>, mut work: Work) {
        while work.changes.is_empty() {
            let Some(job) = work.job.take() else { return };
            if let Some(event) = job(self)
                && self.queue(Incoming::Event(event))
            {
                work = self.process_all();
            }
        }
        self.run_elsewhere(work.job);
        self.apply_together(work.changes);
    }

    fn run_elsewhere(self: &Arc<Self>, job: Option<Job>) {
        if let Some(job) = job {
            self.spawn(job);
        }
    }

    fn spawn(self: &Arc<Self>, job: Job) {
        let target = Arc::clone(self);
        self.workers.run(move || target.run(Work { job: Some(job), ..Work::default() }));
    }

    /// Processes all queued events.
    fn process_all(self: &Arc<Self>) -> Work {
        self.process_at_most(usize::MAX)
    }

    fn process_at_most(self: &Arc<Self>, events_max: usize) -> Work {
        let mut work = Work::default();
        let mut calls = Vec::new();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut processed = 0;
        loop {
            let incoming = {
                let mut inbox = self.inbox();
                if processed == events_max && !inbox.waiting.is_empty() {
                    work.more = true;
                    break;
                }
                let Some(incoming) = inbox.waiting.pop_front() else {
                    inbox.scheduled = false;
                    break;
                };
                processed += 1;
                if matches!(incoming, Incoming::Event(Event::Tick)) {
                    inbox.ticking = false;
                }
                incoming
            };
            self.process(&mut state, incoming, &mut work, &mut calls);
        }
        self.start_calls(calls);
        work
    }

    fn process(
        self: &Arc<Self>,
        state: &mut State,
        incoming: Incoming,
        work: &mut Work,
        calls: &mut Vec<PeerCall>,
    ) {
        let now = self.context.clock.now();
        self.busy_since.store(now.0, SeqCst);
        let event = match incoming {
            Incoming::Event(Event::Routing(chain)) => self.recorded(&state.replica, chain),
            Incoming::Event(event) => event,
            Incoming::Request { request, payload, expires, answer } => {
                state.next_token += 1;
                let token = Token(state.next_token);
                state.waiting.insert(token, answer);
                Event::Request { token, request, payload, expires }
            }
        };
        let mut next = VecDeque::from([event]);
        while let Some(event) = next.pop_front() {
            for action in self.actions(state, now, event) {
                match self.commit_at_once(&action) {
                    Some(committed) => next.push_back(committed),
                    None => self.execute(state, action, work, calls),
                }
            }
        }
        self.busy_since.store(IDLE, SeqCst);
        self.publish(&state.replica);
    }

    fn execute(
        self: &Arc<Self>,
        state: &mut State,
        action: Action,
        work: &mut Work,
        calls: &mut Vec<PeerCall>,
    ) {
        match action {
            Action::Apply { op, update, payload, payload_checksum, class, waits, prepare }
                if small::is_small(&payload) =>
            {
                let change =
                    Change { op, update, payload, payload_checksum, class, waits, prepare };
                work.changes.push(change);
            }
            Action::Call { call, node, request, payload, timeout_ms } => {
                calls.push(PeerCall { call, node, request, payload, timeout_ms });
            }
            action => {
                if let Some(job) = self.start(state, action)
                    && let Some(job) = work.job.replace(job)
                {
                    self.spawn(job);
                }
            }
        }
    }

    /// Publishes the report and the next wakeup.
    fn publish(&self, replica: &Replica) {
        let (report, next) = (replica.report(self.context.clock.now()), replica.next_wakeup());
        let drained = replica.drained_fences();
        let (report_changed, rearmed) = {
            let mut snapshot = self.snapshot();
            let reported = (snapshot.report, snapshot.drained);
            let changed = (reported != (report, drained), snapshot.next_wakeup != next);
            (snapshot.report, snapshot.drained) = (report, drained);
            snapshot.next_wakeup = next;
            changed
        };
        if report_changed {
            self.context.report_changed.notify_one();
        }
        if replica.has_failed() {
            self.failed.send_replace(true);
        }
        if rearmed {
            self.rearmed.notify_one();
        }
    }
}

#[cfg(test)]
#[path = "target_test.rs"]
pub(crate) mod tests;
