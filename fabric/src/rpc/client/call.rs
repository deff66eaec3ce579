//! One call on a connection: waits for a slot and for the lease, offers a large request, sends it
//! and waits for the reply.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{SemaphorePermit, oneshot};

use super::config::CallOptions;
use super::connection::{Awaited, Connection, Shared};
use crate::BoxFuture;
use crate::deadline::Deadline;
use crate::fault::{Fault, FaultCode};
use crate::rpc::error::RpcError;
use crate::rpc::frame::{Kind, Outgoing};
use crate::rpc::lease::LeaseError;
use crate::rpc::message::{DIRECT_BYTES_MAX, Payload, Reply};
use crate::rpc::not_after::PeerClock;

/// Requests up to this size are sent without an offer, one at a time per connection, as long as the
/// server accepts them: the round trip of an offer would take about as long as the transfer.
const UNOFFERED_BYTES_MAX: usize = 256 << 10;

/// Time after a refusal during which all large requests are offered.
const OFFER_PERIOD: Duration = Duration::from_secs(5);

impl Connection {
    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Any [`RpcError`]; [`RpcError::executed`] reports whether it can have been executed.
    pub fn call(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
    ) -> BoxFuture<'_, Result<Reply, RpcError>> {
        Box::pin(self.call_now(message, payload, deadline, CallOptions::default()))
    }

    /// [`Connection::call`] with options.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`RpcError::LeaseLost`] if the lease of `not_after` is lost.
    pub fn call_with<'a>(
        &'a self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
        options: CallOptions<'a>,
    ) -> BoxFuture<'a, Result<Reply, RpcError>> {
        Box::pin(self.call_now(message, payload, deadline, options))
    }

    async fn call_now(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
        options: CallOptions<'_>,
    ) -> Result<Reply, RpcError> {
        let start = Instant::now();
        let timed_out = |sent| self.shared.timed_out(start, sent);
        self.check_size(&message, &payload)?;
        let expiry = match options.not_after {
            Some(not_after) => match not_after.end(deadline).await {
                Ok(end) => {
                    self.refresh_peer_clock(deadline).await?;
                    self.shared.peer_clock().reading_before(end)
                }
                Err(LeaseError::TimedOut) => return Err(timed_out(false)),
                Err(LeaseError::Lost) => return Err(self.shared.lease_lost()),
            },
            None => None,
        };
        let at = deadline.instant().into();
        let call_slots = &self.call_slots[usize::from(options.class) % self.call_slots.len()];
        let Ok(_slot) = tokio::time::timeout_at(at, call_slots.acquire()).await else {
            return Err(timed_out(false));
        };
        let request = Outgoing {
            class: options.class,
            message,
            payload,
            ..Outgoing::bare(Kind::Request, 0, ())
        };
        let bytes = request.message.len() + request.payload.len();
        if bytes > DIRECT_BYTES_MAX
            && bytes <= UNOFFERED_BYTES_MAX
            && let Some(_permit) = self.shared.unoffered()
        {
            let unoffered = Outgoing {
                class: request.class,
                message: request.message.clone(),
                payload: request.payload.clone(),
                ..Outgoing::bare(Kind::Request, 0, ())
            };
            match self.attempt(unoffered, expiry, false, deadline, options, start).await {
                // The call was not started: the server has no spare memory.
                Err(RpcError::Faulted { fault, .. }) if fault.code == FaultCode::Overloaded => {
                    self.shared.offer_for_a_while();
                }
                result => return result,
            }
        }
        self.attempt(request, expiry, bytes > DIRECT_BYTES_MAX, deadline, options, start).await
    }

    /// Sends a request, after an offer if `offers` is set, and waits for its reply.
    async fn attempt(
        &self,
        request: Outgoing<()>,
        expiry: Option<u32>,
        offers: bool,
        deadline: Deadline,
        options: CallOptions<'_>,
        start: Instant,
    ) -> Result<Reply, RpcError> {
        let timed_out = |sent| self.shared.timed_out(start, sent);
        let at = deadline.instant().into();
        let request_id = self.shared.next_request_id.fetch_add(1, Relaxed);
        // Removes the call on every path, including when the caller's future is dropped.
        let mut pending = PendingCall { connection: self, request_id, has_grant: false };
        if offers {
            let announces = (request.message.len(), request.payload.len());
            self.offer(&mut pending, announces, deadline, options, start).await?;
        }
        // A process that was stopped may resume an operation whose time has expired: another
        // process may hold the right by now.
        if deadline.passed() {
            return Err(timed_out(false));
        }
        let (kind, time_ms) = match expiry {
            Some(reading) => (Kind::NotAfter, reading),
            None => (Kind::Request, remaining_ms(deadline)),
        };
        let (sender, reply) = oneshot::channel();
        self.shared.expect(request_id, Awaited::Reply(sender))?;
        let frame = Outgoing { kind, request_id, time_ms, ..request };
        match tokio::time::timeout_at(at, self.outbox.send(frame)).await {
            Err(_) => return Err(timed_out(false)),
            Ok(Err(_)) => return Err(self.shared.connection_lost()),
            Ok(Ok(())) => pending.has_grant = false,
        }
        match self.shared.wait(reply, start, deadline, options.idle_timeout).await {
            None => Err(timed_out(true)),
            Some(Err(_)) => Err(self.shared.connection_lost()),
            Some(Ok(Ok(reply))) => Ok(reply),
            Some(Ok(Err(fault))) => Err(self.shared.faulted(fault)),
        }
    }

    /// Offers a large request and waits until the server has memory for it.
    async fn offer(
        &self,
        pending: &mut PendingCall<'_>,
        announces: (usize, usize),
        deadline: Deadline,
        options: CallOptions<'_>,
        start: Instant,
    ) -> Result<(), RpcError> {
        let request_id = pending.request_id;
        let (sender, grant) = oneshot::channel();
        self.shared.expect(request_id, Awaited::Grant(sender))?;
        let bare = Outgoing::bare(Kind::Offer, request_id, ());
        let (class, time_ms) = (options.class, remaining_ms(deadline));
        let frame = Outgoing { class, time_ms, announces, ..bare };
        let not_sent = || self.shared.timed_out(start, false);
        match tokio::time::timeout_at(deadline.instant().into(), self.outbox.send(frame)).await {
            Err(_) => return Err(not_sent()),
            // No part of the request itself has been sent.
            Ok(Err(_)) => return Err(self.shared.unreachable()),
            Ok(Ok(())) => {}
        }
        match self.shared.wait(grant, start, deadline, options.idle_timeout).await {
            None => Err(not_sent()),
            Some(Err(_)) => Err(self.shared.unreachable()),
            Some(Ok(Err(fault))) => Err(self.shared.faulted(fault)),
            Some(Ok(Ok(()))) => {
                pending.has_grant = true;
                Ok(())
            }
        }
    }

    /// Requests a reading of the server's clock, if the last one is missing or too old.
    async fn refresh_peer_clock(&self, deadline: Deadline) -> Result<(), RpcError> {
        if !self.shared.peer_clock().is_old() {
            return Ok(());
        }
        let refresh =
            tokio::time::timeout_at(deadline.instant().into(), self.shared.clock_refresh.lock());
        let _refresh = refresh.await;
        if !self.shared.peer_clock().is_old() {
            return Ok(());
        }
        // Any reply carries the reading: an older server returns a bad-request fault.
        match self.call(Bytes::new(), Payload::empty(), deadline).await {
            Ok(_) | Err(RpcError::Faulted { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn check_size(&self, message: &Bytes, payload: &Payload) -> Result<(), RpcError> {
        let limits = &self.shared.config.limits;
        for (part, bytes, bytes_max) in [
            ("message", message.len(), limits.message_bytes_max),
            ("payload", payload.len(), limits.payload_bytes_max),
        ] {
            if bytes > bytes_max {
                let context = self.shared.config.context.clone();
                return Err(RpcError::TooLarge { context, part, bytes, bytes_max });
            }
        }
        Ok(())
    }
}

struct PendingCall<'a> {
    connection: &'a Connection,
    request_id: u64,
    /// The grant of the server, which has not been used yet.
    has_grant: bool,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.connection.shared.lock().calls.remove(&self.request_id);
        if self.has_grant {
            let decline = Outgoing::bare(Kind::Decline, self.request_id, ());
            let _ = self.connection.outbox.try_send(decline);
        }
    }
}

fn remaining_ms(deadline: Deadline) -> u32 {
    deadline.remaining().unwrap_or_default().as_millis() as u32
}

impl Shared {
    /// Registers a pending call. An error means that no more frames can arrive.
    fn expect(&self, request_id: u64, awaited: Awaited) -> Result<(), RpcError> {
        let mut waiting = self.lock();
        if waiting.closed_because.is_some() {
            drop(waiting);
            return Err(self.unreachable());
        }
        waiting.calls.insert(request_id, awaited);
        Ok(())
    }

    /// Waits for a reply until the deadline, or until the connection has been silent for too long.
    async fn wait<T>(
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
    fn unoffered(&self) -> Option<SemaphorePermit<'_>> {
        let now_ms = self.started.elapsed().as_millis() as u64;
        let offers = now_ms < self.offer_until_ms.load(Relaxed);
        if offers { None } else { self.unoffered.try_acquire().ok() }
    }

    fn offer_for_a_while(&self) {
        let until = self.started.elapsed() + OFFER_PERIOD;
        self.offer_until_ms.store(until.as_millis() as u64, Relaxed);
    }

    fn alive_at(&self) -> Instant {
        self.started + Duration::from_millis(self.alive_ms.load(Relaxed))
    }

    fn timed_out(&self, start: Instant, sent: bool) -> RpcError {
        RpcError::TimedOut {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            waited_ms: start.elapsed().as_millis() as u64,
            sent,
        }
    }

    fn unreachable(&self) -> RpcError {
        RpcError::Unreachable {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            detail: self.lock().closed_because.clone().unwrap_or_else(|| "closed".into()),
        }
    }

    fn faulted(&self, fault: Fault) -> RpcError {
        RpcError::Faulted { context: self.config.context.clone(), peer: self.peer.clone(), fault }
    }

    fn peer_clock(&self) -> PeerClock {
        *self.peer_clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease_lost(&self) -> RpcError {
        RpcError::LeaseLost { context: self.config.context.clone(), peer: self.peer.clone() }
    }

    fn connection_lost(&self) -> RpcError {
        RpcError::Lost {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            detail: self.lock().closed_because.clone().unwrap_or_else(|| "closed".into()),
        }
    }
}
