//! State of a connection that its calls and its reader share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, BufReader};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};

use super::config::ConnectionConfig;
use crate::deadline::Deadline;
use crate::fault::Fault;
use crate::rpc::error::RpcError;
use crate::rpc::frame::Kind;
use crate::rpc::io::{Outgoing, READ_BUFFER_BYTES, ReadError, read_body, read_header};
use crate::rpc::message::{Reply, decode};
use crate::rpc::not_after::PeerClock;

/// Time after a refusal during which all large requests are offered.
const OFFER_PERIOD: Duration = Duration::from_secs(5);

pub(super) struct Shared {
    pub(super) config: ConnectionConfig,
    pub(super) peer: String,
    pub(super) next_request_id: AtomicU64,
    pub(super) waiting: Mutex<Waiting>,
    pub(super) peer_clock: Mutex<PeerClock>,
    pub(super) started: Instant,
    /// Arrival time of the last frame, in milliseconds since `started`.
    pub(super) alive_ms: AtomicU64,
    /// Held by the caller that requests a reading of the server's clock.
    pub(super) clock_refresh: tokio::sync::Mutex<()>,
    /// Held by the one large request that is sent without an offer.
    pub(super) unoffered: Semaphore,
    /// Large requests are offered until this time, in milliseconds since `started`.
    pub(super) offer_until_ms: AtomicU64,
}

/// Pending calls; `ended` once no more frames can arrive.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) calls: HashMap<u64, Awaited>,
    pub(super) ended: Option<String>,
}

pub(super) enum Awaited {
    /// An offer that waits for its grant.
    Grant(oneshot::Sender<Result<(), Fault>>),
    Reply(oneshot::Sender<Result<Reply, Fault>>),
}

impl Shared {
    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        // No code panics while it holds the lock, and the map would stay consistent if it did.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a pending call. An error means that no more frames can arrive.
    pub(super) fn expect(&self, request_id: u64, awaited: Awaited) -> Result<(), RpcError> {
        let mut waiting = self.lock();
        if waiting.ended.is_some() {
            drop(waiting);
            return Err(self.unreachable());
        }
        waiting.calls.insert(request_id, awaited);
        Ok(())
    }

    /// Waits for a reply until the deadline, or until the connection has been silent for too long.
    pub(super) async fn wait<T>(
        &self,
        mut answer: oneshot::Receiver<T>,
        start: Instant,
        deadline: Deadline,
        idle_timeout: Option<Duration>,
    ) -> Option<Result<T, oneshot::error::RecvError>> {
        loop {
            let until = match idle_timeout {
                Some(idle) => deadline.instant().min(self.alive_at().max(start) + idle),
                None => deadline.instant(),
            };
            match tokio::time::timeout_at(until.into(), &mut answer).await {
                Ok(answered) => return Some(answered),
                Err(_) if deadline.passed() => return None,
                Err(_) => {
                    let idle = idle_timeout.unwrap_or_default();
                    if self.alive_at().max(start).elapsed() >= idle {
                        return None;
                    }
                }
            }
        }
    }

    /// Permission to send one large request without an offer.
    pub(super) fn unoffered(&self) -> Option<SemaphorePermit<'_>> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let offers = now_ms < self.offer_until_ms.load(Relaxed);
        if offers { None } else { self.unoffered.try_acquire().ok() }
    }

    pub(super) fn offer_for_a_while(&self) {
        let until = self.started.elapsed() + OFFER_PERIOD;
        self.offer_until_ms.store(until.as_millis() as u64, Relaxed);
    }

    pub(super) fn alive_at(&self) -> Instant {
        self.started + Duration::from_millis(self.alive_ms.load(Relaxed))
    }

    pub(super) fn timed_out(&self, start: Instant, sent: bool) -> RpcError {
        RpcError::TimedOut {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            waited_ms: start.elapsed().as_millis() as u64,
            sent,
        }
    }

    pub(super) fn unreachable(&self) -> RpcError {
        RpcError::Unreachable {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            detail: self.lock().ended.clone().unwrap_or_else(|| "closed".into()),
        }
    }

    pub(super) fn faulted(&self, fault: Fault) -> RpcError {
        RpcError::Faulted { context: self.config.context.clone(), peer: self.peer.clone(), fault }
    }

    pub(super) fn peer_clock(&self) -> PeerClock {
        *self.peer_clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lease_lost(&self) -> RpcError {
        RpcError::LeaseLost { context: self.config.context.clone(), peer: self.peer.clone() }
    }

    pub(super) fn lost(&self) -> RpcError {
        RpcError::Lost {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            detail: self.lock().ended.clone().unwrap_or_else(|| "closed".into()),
        }
    }

    pub(super) fn end(&self, detail: String) {
        let mut waiting = self.lock();
        waiting.ended.get_or_insert(detail);
        // Dropping the senders wakes all waiting calls.
        waiting.calls.clear();
    }

    pub(super) async fn read(
        &self,
        read_half: impl AsyncRead + Unpin,
        answers: &WeakOutbox,
    ) -> ReadError {
        let mut reader = BufReader::with_capacity(READ_BUFFER_BYTES, read_half);
        loop {
            if let Err(error) = self.read_one(&mut reader, answers).await {
                return error;
            }
        }
    }

    pub(super) async fn read_one(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        answers: &WeakOutbox,
    ) -> Result<(), ReadError> {
        let stall_timeout = self.config.stall_timeout;
        let header = read_header(reader, &self.config.limits, stall_timeout).await?;
        self.alive_ms.store(self.started.elapsed().as_millis() as u64, Relaxed);
        if header.kind == Kind::Grant {
            self.granted(header.request_id, answers);
            return Ok(());
        }
        if !matches!(header.kind, Kind::Reply | Kind::Fault) {
            return Err(ReadError::Direction(header.kind));
        }
        let (message, payload) = read_body(reader, &header, stall_timeout).await?;
        self.alive_ms.store(self.started.elapsed().as_millis() as u64, Relaxed);
        *self.peer_clock.lock().unwrap_or_else(PoisonError::into_inner) =
            PeerClock::now(header.time_ms);
        let fault = || {
            decode(&message)
                .unwrap_or_else(|error| Fault::internal(format!("unreadable fault: {error}")))
        };
        // A reply without a pending call belongs to a call that timed out.
        let awaited = self.lock().calls.remove(&header.request_id);
        match (awaited, header.kind) {
            (Some(Awaited::Reply(caller)), Kind::Reply) => {
                let _ = caller.send(Ok(Reply { message, payload: payload.into() }));
            }
            (Some(Awaited::Reply(caller)), _) => {
                let _ = caller.send(Err(fault()));
            }
            (Some(Awaited::Grant(caller)), Kind::Fault) => {
                let _ = caller.send(Err(fault()));
            }
            (Some(Awaited::Grant(_)), _) | (None, _) => {}
        }
        Ok(())
    }

    /// The server has reserved memory; if the call has timed out meanwhile, the grant is declined.
    pub(super) fn granted(&self, request_id: u64, answers: &WeakOutbox) {
        let mut waiting = self.lock();
        let used = match waiting.calls.remove(&request_id) {
            Some(Awaited::Grant(caller)) => caller.send(Ok(())).is_ok(),
            Some(other) => {
                waiting.calls.insert(request_id, other);
                true
            }
            None => false,
        };
        drop(waiting);
        if !used && let Some(outbox) = answers.upgrade() {
            // If the queue is full, the server's grant times out.
            let _ = outbox.try_send(Outgoing::bare(Kind::Decline, request_id, ()));
        }
    }
}

pub(super) type WeakOutbox = mpsc::WeakSender<Outgoing<()>>;
