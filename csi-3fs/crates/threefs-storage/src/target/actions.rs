//! Execution of the replica's actions: space and store operations, calls to peers, responses.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use threefs_chunkstore::Reservation;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{StoreUpdate, Which};
use threefs_core::error::{StorageError, StoreError};
use threefs_core::ids::{ChunkId, ChunkVersion};
use threefs_core::message::{Content, RepairRequest, StorageReply, StorageRequest};
use threefs_core::replica::{Action, Event, OpId, Prepare, Token};
use threefs_core::time::Millis;
use tokio::sync::oneshot;

use super::calls::PeerCall;
use super::{Job, Response, State, Target};

/// How long an update waits for space before it fails with `NoSpace`. Shorter than the
/// predecessor's timeout.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(10);

/// An update to be applied.
#[derive(Clone)]
pub(super) struct Change {
    pub(super) op: OpId,
    pub(super) update: StoreUpdate,
    pub(super) payload: Bytes,
    pub(super) payload_checksum: Checksum,
    pub(super) class: u8,
    /// Waits for space, if other updates have reserved it.
    pub(super) waits: bool,
    /// To be sent once the update is accepted.
    pub(super) prepare: Option<Prepare>,
}

impl Change {
    /// The call that sends the update to the successor.
    pub(super) fn prepare_call(&self) -> Option<PeerCall> {
        let Prepare { call, node, request, timeout_ms, .. } = self.prepare.clone()?;
        let request = StorageRequest::Prepare(request);
        Some(PeerCall { call, node, request, payload: self.payload.clone(), timeout_ms })
    }
}

/// State of a reservation.
enum Stage {
    /// `ChunkStore::reserve` has not returned.
    Requested,
    /// It has returned without a result.
    Waiting,
    /// The result came before it returned.
    Answered(Result<Reservation, StoreError>),
}

impl Target {
    /// The replica's actions for an event.
    pub(super) fn actions(&self, state: &mut State, now: Millis, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        state.replica.handle(now, event, &*self.store, &mut actions);
        if self.offline_reported.swap(false, SeqCst) {
            // The lease may have ended, and another target may serve, while the store was slow.
            for action in &mut actions {
                if let Action::ServeRead { token, .. }
                | Action::ServeReads { token, .. }
                | Action::ServeRepair { token, .. } = action
                {
                    let (token, target) = (*token, self.config.target);
                    *action =
                        Action::Reply { token, result: Err(StorageError::Timeout { target }) };
                }
            }
            let now = self.context.clock.now();
            state.replica.handle(now, Event::Retire, &*self.store, &mut actions);
        }
        actions
    }

    /// Commits in place if that is a change in memory only, which is the common case.
    pub(super) fn commit_at_once(&self, action: &Action) -> Option<Event> {
        let Action::Commit { op, chunk, version, chain_version } = *action else { return None };
        let result = self.store.commit_at_once(chunk, version, chain_version)?;
        Some(Event::Committed { op, result })
    }

    /// Starts an action; returns a store operation, which the caller must run.
    pub(super) fn start(self: &Arc<Self>, state: &mut State, action: Action) -> Option<Job> {
        match action {
            // Space is reserved on the target's threads, because this reads the free space of the
            // disk.
            Action::Apply { op, update, payload, payload_checksum, class, waits, prepare } => {
                let change =
                    Change { op, update, payload, payload_checksum, class, waits, prepare };
                job(move |target| {
                    let reservation = target.reserve(&change)?;
                    apply_in(change, reservation)(target)
                })
            }
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
            Action::Drop { op, chunk } => job(move |target| {
                let result = target.store.purge(chunk, ChunkVersion(0));
                Some(Event::Forgotten { op, result })
            }),
            Action::ForgetInodes { op, inodes, version_floor } => job(move |target| {
                let result = target.store.forget_inodes(&inodes, version_floor);
                Some(Event::InodesForgotten { op, result })
            }),
            Action::ReadContent { op, chunk, which } => job(move |target| {
                let content = target.store.read(chunk, which, 0, u32::MAX);
                let result = content.map(|outcome| (outcome.state, Bytes::from(outcome.bytes)));
                Some(Event::Content { op, result })
            }),
            Action::Reply { token, result } => {
                answer(state, token, (result, Bytes::new()));
                None
            }
            Action::ServeRead { token, request, chain_version } => {
                let waiting = state.waiting.remove(&token)?;
                job(move |target| target.serve_read(waiting, &request, chain_version))
            }
            Action::ServeReads { token, reads, chain_version } => {
                let waiting = state.waiting.remove(&token)?;
                self.start_reads(waiting, reads, chain_version)
            }
            Action::ServeRepair { token, request, which } => {
                let waiting = state.waiting.remove(&token)?;
                job(move |target| target.serve_repair(waiting, &request, which))
            }
            // Started after the event (`calls`).
            Action::Call { .. } => None,
            // A long poll already follows the routing and receives every change immediately.
            Action::RefreshRouting => None,
            Action::Alert(alert) => {
                tracing::warn!("{alert}");
                self.scrub.observe(&alert);
                None
            }
        }
    }

    /// Reserves space for an update. If there is none now, the update is applied later, once there is;
    /// the wait does not block a thread, because the commits that free space need them.
    pub(super) fn reserve(
        self: &Arc<Self>,
        change: &Change,
    ) -> Option<Result<Reservation, StoreError>> {
        let op = change.op;
        let stage = Arc::new(Mutex::new(Stage::Requested));
        let ready = {
            let (stage, target) = (Arc::clone(&stage), Arc::downgrade(self));
            let change = change.clone();
            move |reservation| {
                {
                    let mut stage = lock(&stage);
                    if matches!(*stage, Stage::Requested) {
                        *stage = Stage::Answered(reservation);
                        return;
                    }
                }
                let Some(target) = target.upgrade() else { return };
                target.handle(Event::RoomGiven { op });
                target.spawn(apply_in(change, reservation));
            }
        };
        let (update, length) = (&change.update, change.payload.len());
        let wait = self.store.reserve(update, length, change.class, Box::new(ready));
        let mut stage = lock(&stage);
        if let Stage::Answered(reservation) = std::mem::replace(&mut *stage, Stage::Waiting) {
            return Some(reservation);
        }
        // Under the lock, so that this event precedes the end of the wait.
        self.handle(Event::RoomAwaited { op });
        let wait = wait?;
        if !change.waits {
            drop(stage);
            self.store.expire(wait);
            return None;
        }
        let target = Arc::downgrade(self);
        self.context.runtime.spawn(async move {
            tokio::time::sleep(RESERVE_TIMEOUT).await;
            if let Some(target) = target.upgrade() {
                target.store.expire(wait);
            }
        });
        None
    }

    fn serve_repair(
        &self,
        waiting: oneshot::Sender<Response>,
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
            // The chunk has changed meanwhile: this is not the version that was requested.
            Ok(_) => (Err(StorageError::ChunkNotCommit { chunk }), Bytes::new()),
            Err(error) => (Err(error.at(self.config.target)), Bytes::new()),
        };
        // Damage here is repaired when this replica's chunk is read or scrubbed: replicas that are all
        // damaged would otherwise request repairs from each other without end.
        let _ = waiting.send(answer);
        None
    }
}

fn apply_in(change: Change, reservation: Result<Reservation, StoreError>) -> Job {
    Box::new(move |target: &Arc<Target>| {
        let mut prepare = change.prepare_call();
        let Change { op, update, payload, payload_checksum, .. } = change;
        let mut send = || target.start_calls(prepare.take().into_iter().collect());
        let result = reservation.and_then(|reservation| {
            target.store.apply_in(&update, &payload, payload_checksum, reservation, &mut send)
        });
        Some(Event::Applied { op, result, unsent: prepare.is_some() })
    })
}

fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn job(run: impl FnOnce(&Arc<Target>) -> Option<Event> + Send + 'static) -> Option<Job> {
    Some(Box::new(run))
}

/// Sends a response that was read from the store; returns an event if the chunk is damaged.
pub(super) fn answered(
    waiting: oneshot::Sender<Response>,
    answer: Response,
    chunk: ChunkId,
) -> Option<Event> {
    let damaged = matches!(answer.0, Err(StorageError::ChunkCorrupt { .. }));
    // The reader may have disconnected.
    let _ = waiting.send(answer);
    damaged.then_some(Event::DamageFound { chunk })
}

fn answer(state: &mut State, token: Token, answer: Response) {
    if let Some(waiting) = state.waiting.remove(&token) {
        let _ = waiting.send(answer);
    }
}
