//! Client side of one connection.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::config::{CallOptions, ConnectionConfig};
use super::shared::{Awaited, Shared};
use crate::BoxFuture;
use crate::auth::AuthError;
use crate::auth::credentials::Credential;
use crate::deadline::Deadline;
use crate::fault::FaultCode;
use crate::rpc::channel;
use crate::rpc::error::RpcError;
use crate::rpc::frame::Kind;
use crate::rpc::io::{Outgoing, write_frames};
use crate::rpc::lease::LeaseError;
use crate::rpc::message::{DIRECT_BYTES_MAX, Payload, Reply};
use crate::rpc::stream::{Stream, prepare};

/// Requests up to this size are sent without an offer, one at a time per connection, as long as the
/// server accepts them: the round trip of an offer would take about as long as the transfer.
const UNOFFERED_BYTES_MAX: usize = 256 << 10;

/// Slots for calls are counted per class; higher classes share those of lower ones.
const CLASSES: usize = 16;

/// An authenticated connection. Dropping it closes it and fails its pending calls.
pub struct Connection {
    shared: Arc<Shared>,
    /// The credential with which it was opened.
    credential: Credential,
    outbox: mpsc::Sender<Outgoing<()>>,
    call_slots: [Semaphore; CLASSES],
    driver: JoinHandle<()>,
}

impl Connection {
    /// Connects and authenticates.
    ///
    /// # Errors
    /// [`RpcError::Unreachable`], or [`RpcError::Refused`] if authentication fails.
    pub fn open(
        address: &str,
        config: ConnectionConfig,
        deadline: Deadline,
    ) -> BoxFuture<'_, Result<Self, RpcError>> {
        Box::pin(Self::open_now(address, config, deadline))
    }

    async fn open_now(
        address: &str,
        config: ConnectionConfig,
        deadline: Deadline,
    ) -> Result<Self, RpcError> {
        let deadline = deadline.within(config.connect_timeout);
        let unreachable = |detail: String| RpcError::Unreachable {
            context: config.context.clone(),
            peer: address.into(),
            detail,
        };
        let connect = TcpStream::connect(address);
        let stream = tokio::time::timeout_at(deadline.instant().into(), connect)
            .await
            .map_err(|_| unreachable("connecting timed out".into()))?
            .map_err(|error| unreachable(error.to_string()))?;
        prepare(&stream, config.class).map_err(|error| unreachable(error.to_string()))?;
        let credential = config.credentials.current();
        let over_tls = config.credentials.is_over_tls();
        match channel::dial(stream, over_tls, &credential, &config.context, deadline).await {
            Ok(stream) => Ok(Self::start(stream, address, config, credential)),
            Err(error @ AuthError::Broken { .. }) => Err(unreachable(error.to_string())),
            Err(source) => {
                let context = config.context.clone();
                Err(RpcError::Refused { context, peer: address.into(), source })
            }
        }
    }

    fn start(
        stream: Stream,
        address: &str,
        config: ConnectionConfig,
        credential: Credential,
    ) -> Self {
        let (read_half, mut write_half) = stream.split();
        let (outbox, mut queue) = mpsc::channel(config.calls_in_flight_max.clamp(1, 1024));
        let call_slots = std::array::from_fn(|_| Semaphore::new(config.calls_in_flight_max));
        let shared = Arc::new(Shared {
            config,
            peer: address.into(),
            next_request_id: AtomicU64::new(1),
            waiting: Mutex::default(),
            peer_clock: Mutex::default(),
            started: Instant::now(),
            alive_ms: AtomicU64::new(0),
            clock_refresh: tokio::sync::Mutex::default(),
            unoffered: Semaphore::new(1),
            offer_until_ms: AtomicU64::new(0),
        });
        let driven = Arc::clone(&shared);
        // Weak: the queue ends with the connection.
        let answers = outbox.downgrade();
        let driver = tokio::spawn(async move {
            let stalled = |idle| idle >= driven.config.stall_timeout;
            let ended = tokio::select! {
                ended = driven.read(read_half, &answers) => ended.to_string(),
                written = write_frames(&mut write_half, &mut queue, stalled) => match written {
                    Ok(()) => "closed by this side".into(),
                    Err(error) => error.to_string(),
                },
            };
            driven.end(ended);
        });
        Self { shared, credential, outbox, call_slots, driver }
    }

    /// True once the credential has changed since the connection was opened: pending calls complete
    /// on it, new calls use another connection.
    pub fn is_outdated(&self) -> bool {
        !self.credential.is_equivalent(&self.shared.config.credentials.current())
    }

    /// True once no call can succeed on it.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().ended.is_some()
    }

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
        let call_slots = &self.call_slots[usize::from(options.class) % CLASSES];
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
                ended => return ended,
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
        let mut pending = PendingCall { connection: self, request_id, granted: false };
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
            Ok(Err(_)) => return Err(self.shared.lost()),
            Ok(Ok(())) => pending.granted = false,
        }
        match self.shared.wait(reply, start, deadline, options.idle_timeout).await {
            None => Err(timed_out(true)),
            Some(Err(_)) => Err(self.shared.lost()),
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
        let (sender, granted) = oneshot::channel();
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
        match self.shared.wait(granted, start, deadline, options.idle_timeout).await {
            None => Err(not_sent()),
            Some(Err(_)) => Err(self.shared.unreachable()),
            Some(Ok(Err(fault))) => Err(self.shared.faulted(fault)),
            Some(Ok(Ok(()))) => {
                pending.granted = true;
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

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
        self.shared.end("closed by this side".into());
    }
}

struct PendingCall<'a> {
    connection: &'a Connection,
    request_id: u64,
    /// The grant of the server, which has not been used yet.
    granted: bool,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.connection.shared.lock().calls.remove(&self.request_id);
        if self.granted {
            let decline = Outgoing::bare(Kind::Decline, self.request_id, ());
            let _ = self.connection.outbox.try_send(decline);
        }
    }
}

fn remaining_ms(deadline: Deadline) -> u32 {
    deadline.remaining().unwrap_or_default().as_millis() as u32
}
