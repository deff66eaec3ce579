//! One replica, its store and its timer.
//!
//! Events may come from any thread; the replica takes them one at a time under its lock, and its
//! actions are started under the same lock, so that they begin in the order that it gave them.
//! Nothing waits under the lock: store operations go to blocking threads, calls to tasks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use fabric::deadline::Deadline;
use fabric::moment::Moment;
use threefs_chunkstore::ChunkStore;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::Which;
use threefs_core::error::StorageError;
use threefs_core::heartbeat::{LocalReport, TargetReport};
use threefs_core::ids::{ChainVersion, NodeId};
use threefs_core::message::{
    Content, ReadDone, ReadRequest, RepairRequest, StorageReply, StorageRequest, StorageResult,
};
use threefs_core::replica::{Action, CallId, Config, Event, Replica, Token};
use threefs_core::time::Millis;
use tokio::sync::{Notify, oneshot};

use crate::node::Shared;

/// Longest sleep of the timer: a bound, not a pace.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// What a request is answered with.
pub(crate) type Answer = (StorageResult, Bytes);

pub(crate) struct Target {
    config: Config,
    store: Arc<dyn ChunkStore>,
    state: Mutex<State>,
    shared: Arc<Shared>,
    /// The next wakeup may have moved.
    pub(crate) rearmed: Arc<Notify>,
}

struct State {
    replica: Replica,
    /// Requests without an answer. As many as the port lets in flight.
    waiting: HashMap<Token, oneshot::Sender<Answer>>,
    next_token: u64,
    report: Option<LocalReport>,
    next_wakeup: Option<Millis>,
}

impl Target {
    pub(crate) fn new(
        config: Config,
        store: Arc<dyn ChunkStore>,
        shared: Arc<Shared>,
    ) -> Arc<Self> {
        let state = State {
            replica: Replica::new(config.clone()),
            waiting: HashMap::new(),
            next_token: 0,
            report: None,
            next_wakeup: None,
        };
        Arc::new(Self { config, store, state: Mutex::new(state), shared, rearmed: Arc::default() })
    }

    /// Sends ticks when they are due, as long as the target lives.
    pub(crate) async fn keep_time(target: Weak<Self>, rearmed: Arc<Notify>) {
        loop {
            let pause = {
                let Some(target) = target.upgrade() else { return };
                let due = target.lock().next_wakeup;
                let now = target.shared.clock.now();
                let pause = due.map_or(SLEEP_MAX, |at| Duration::from_millis(at.since(now)));
                if pause.is_zero() {
                    target.handle(Event::Tick);
                    continue;
                }
                pause.min(SLEEP_MAX)
            };
            // Either way the time is looked at anew.
            let _ = tokio::time::timeout(pause, rearmed.notified()).await;
        }
    }

    /// Takes one event and starts what has to be done about it.
    pub(crate) fn handle(self: &Arc<Self>, event: Event) {
        self.with(self.lock(), event);
    }

    /// A request of another process; its answer, whenever it comes.
    pub(crate) async fn request(
        self: &Arc<Self>,
        request: StorageRequest,
        payload: Bytes,
        expires: Option<Moment>,
    ) -> Answer {
        let expires = expires.map(|at| self.shared.clock.at(at));
        let (sender, receiver) = oneshot::channel();
        {
            let mut state = self.lock();
            state.next_token += 1;
            let token = Token(state.next_token);
            state.waiting.insert(token, sender);
            self.with(state, Event::Request { token, request, payload, expires });
        }
        receiver.await.unwrap_or_else(|_| {
            (Err(StorageError::Timeout { target: self.config.target }), Bytes::new())
        })
    }

    /// This target's line of the next heartbeat.
    pub(crate) fn report(&self) -> TargetReport {
        let report = self.lock().replica.report(self.shared.clock.now());
        let space = self.store.space();
        TargetReport {
            target: self.config.target,
            chain: self.config.chain,
            report,
            used_bytes: space.used_bytes,
            capacity_bytes: space.capacity_bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with(self: &Arc<Self>, mut state: MutexGuard<'_, State>, event: Event) {
        let mut actions = Vec::new();
        let now = self.shared.clock.now();
        state.replica.handle(now, event, &*self.store, &mut actions);
        for action in actions {
            self.start(&mut state, action);
        }
        let report = Some(state.replica.report(now));
        if state.report != report {
            state.report = report;
            self.shared.report_changed.notify_one();
        }
        let next = state.replica.next_wakeup();
        if state.next_wakeup != next {
            state.next_wakeup = next;
            self.rearmed.notify_one();
        }
    }

    fn start(self: &Arc<Self>, state: &mut State, action: Action) {
        match action {
            Action::Apply { op, update, payload } => self.store(move |target| {
                let result = target.store.apply(&update, &payload);
                Event::Applied { op, result }
            }),
            Action::Commit { op, chunk, version, chain_version } => self.store(move |target| {
                let result = target.store.commit(chunk, version, chain_version);
                Event::Committed { op, result }
            }),
            Action::Forget { op, chunk } => self.store(move |target| {
                let result = target.store.forget(chunk);
                Event::Forgotten { op, result }
            }),
            Action::ForgetInodes { op, inodes } => self.store(move |target| {
                let result = target.store.forget_inodes(&inodes);
                Event::InodesForgotten { op, result }
            }),
            Action::ReadContent { op, chunk, which } => self.store(move |target| {
                let read = target.store.read(chunk, which, 0, u32::MAX);
                let result = read.map(|outcome| (outcome.state, Bytes::from(outcome.bytes)));
                Event::Content { op, result }
            }),
            Action::Call { call, node, request, payload, timeout_ms } => {
                tokio::spawn(Arc::clone(self).call(call, node, request, payload, timeout_ms));
            }
            Action::Reply { token, result } => answer(state, token, (result, Bytes::new())),
            Action::ServeRead { token, request, chain_version } => {
                if let Some(waiting) = state.waiting.remove(&token) {
                    self.serve_read(waiting, request, chain_version);
                }
            }
            Action::ServeRepair { token, request, which } => {
                if let Some(waiting) = state.waiting.remove(&token) {
                    self.serve_repair(waiting, request, which);
                }
            }
            // The routing is followed by a long poll that learns of it as soon as it is published.
            Action::RefreshRouting => {}
            Action::Alert(alert) => tracing::warn!("{alert}"),
        }
    }

    /// Runs a store operation on a blocking thread; what it gives is the next event.
    fn store(self: &Arc<Self>, operation: impl FnOnce(&Self) -> Event + Send + 'static) {
        let target = Arc::clone(self);
        tokio::task::spawn_blocking(move || target.handle(operation(&target)));
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
        self.handle(Event::Answer { call, result, payload });
    }

    fn serve_read(
        self: &Arc<Self>,
        waiting: oneshot::Sender<Answer>,
        request: ReadRequest,
        chain_version: ChainVersion,
    ) {
        let target = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let ReadRequest { chunk, offset, length, .. } = request;
            let read = target.store.read(chunk, Which::Committed, offset, length);
            let answer = match read {
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
                Err(error) => (Err(error.clone().at(target.config.target)), Bytes::new()),
            };
            let damaged = matches!(answer.0, Err(StorageError::ChunkCorrupt { .. }));
            // A reader that has gone needs no answer.
            let _ = waiting.send(answer);
            if damaged {
                target.handle(Event::DamageFound { chunk });
            }
        });
    }

    fn serve_repair(
        self: &Arc<Self>,
        waiting: oneshot::Sender<Answer>,
        request: RepairRequest,
        which: Which,
    ) {
        let target = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            let chunk = request.chunk;
            let answer = match target.store.read(chunk, which, 0, u32::MAX) {
                Ok(outcome) if outcome.state.version == request.version => {
                    let (version, checksum) = (outcome.state.version, outcome.state.checksum);
                    let content = Content { version, checksum };
                    (Ok(StorageReply::Content(content)), Bytes::from(outcome.bytes))
                }
                // It has moved on meanwhile: what is asked for is not what anybody needs now.
                Ok(_) => (Err(StorageError::ChunkNotCommit { chunk }), Bytes::new()),
                Err(error) => (Err(error.at(target.config.target)), Bytes::new()),
            };
            let damaged = matches!(answer.0, Err(StorageError::ChunkCorrupt { .. }));
            let _ = waiting.send(answer);
            if damaged {
                target.handle(Event::DamageFound { chunk });
            }
        });
    }
}

fn answer(state: &mut State, token: Token, answer: Answer) {
    if let Some(waiting) = state.waiting.remove(&token) {
        let _ = waiting.send(answer);
    }
}

/// The clock of this process, as the core counts time. It goes on while the machine is suspended:
/// the lease to serve must end then.
pub(crate) struct Clock(Moment);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Moment::now())
    }

    pub(crate) fn now(&self) -> Millis {
        self.at(Moment::now())
    }

    fn at(&self, moment: Moment) -> Millis {
        Millis(moment.since(self.0).as_millis() as u64)
    }
}
