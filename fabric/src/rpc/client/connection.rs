//! Client side of one connection: opens and authenticates it, and passes replies to their calls
//! (`call`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::io::{AsyncRead, BufReader};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::config::ConnectionConfig;
use crate::BoxFuture;
use crate::auth::AuthError;
use crate::auth::credentials::Credential;
use crate::deadline::Deadline;
use crate::fault::Fault;
use crate::rpc::channel;
use crate::rpc::error::RpcError;
use crate::rpc::frame::{Kind, Outgoing, ReadError, read_body, read_header, write_frames};
use crate::rpc::local;
use crate::rpc::message::{Reply, decode};
use crate::rpc::not_after::PeerClock;
use crate::rpc::stream::{ReadHalf, Stream, prepare};

/// Slots for calls are counted per class; higher classes share those of lower ones.
const CLASSES: usize = 16;

/// Shared memory is tried for this part of the time to connect, before TCP.
const LOCAL_PARTS: u32 = 3;

/// An authenticated connection. Dropping it closes it and fails its pending calls.
pub struct Connection {
    pub(super) shared: Arc<Shared>,
    /// The credential with which it was opened.
    credential: Credential,
    pub(super) outbox: mpsc::Sender<Outgoing<()>>,
    pub(super) call_slots: [Semaphore; CLASSES],
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
        let at = deadline.instant().into();
        let addresses: Vec<SocketAddr> = tokio::time::timeout_at(at, lookup_host(address))
            .await
            .map_err(|_| unreachable("resolving the name timed out".into()))?
            .map_err(|error| unreachable(error.to_string()))?
            .collect();
        let credential = config.credentials.current();
        let over_tls = config.credentials.is_over_tls();
        if !over_tls {
            let soon = deadline.within(config.connect_timeout / LOCAL_PARTS);
            if let Some(link) = local::dial(&addresses, &credential, &config.context, soon).await {
                return Ok(Self::start(Stream::Local(link.into()), address, config, credential));
            }
        }
        let stream = tokio::time::timeout_at(at, TcpStream::connect(&addresses[..]))
            .await
            .map_err(|_| unreachable("connecting timed out".into()))?
            .map_err(|error| unreachable(error.to_string()))?;
        prepare(&stream, config.class).map_err(|error| unreachable(error.to_string()))?;
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
        // A weak reference: the queue is dropped with the connection.
        let answers = outbox.downgrade();
        let driver = tokio::spawn(async move {
            let stalled = |idle| idle >= driven.config.stall_timeout;
            let reason = tokio::select! {
                reason = driven.read(read_half, &answers) => reason.to_string(),
                written = write_frames(&mut write_half, &mut queue, stalled) => match written {
                    Ok(()) => "closed by this side".into(),
                    Err(error) => error.to_string(),
                },
            };
            driven.end(reason);
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
        self.shared.lock().closed_because.is_some()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
        self.shared.end("closed by this side".into());
    }
}

/// State of a connection that its calls and its reader share.
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

/// Pending calls; `closed_because` is set once no more frames can arrive.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) calls: HashMap<u64, Awaited>,
    pub(super) closed_because: Option<String>,
}

pub(super) enum Awaited {
    /// An offer that waits for its grant.
    Grant(oneshot::Sender<Result<(), Fault>>),
    Reply(oneshot::Sender<Result<Reply, Fault>>),
}

type WeakOutbox = mpsc::WeakSender<Outgoing<()>>;

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No code panics while it holds the lock, and the map would stay consistent if it did.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, detail: String) {
        let mut waiting = self.lock();
        waiting.closed_because.get_or_insert(detail);
        // Dropping the senders wakes all waiting calls.
        waiting.calls.clear();
    }

    async fn read(&self, read_half: ReadHalf, answers: &WeakOutbox) -> ReadError {
        let mut reader = BufReader::with_capacity(read_half.buffer_bytes(), read_half);
        loop {
            if let Err(error) = self.read_one(&mut reader, answers).await {
                return error;
            }
        }
    }

    async fn read_one(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        answers: &WeakOutbox,
    ) -> Result<(), ReadError> {
        let stall_timeout = self.config.stall_timeout;
        let header = read_header(reader, &self.config.limits, stall_timeout).await?;
        self.alive_ms.store(self.started.elapsed().as_millis() as u64, Relaxed);
        if header.kind == Kind::Grant {
            self.on_grant(header.request_id, answers);
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
    fn on_grant(&self, request_id: u64, answers: &WeakOutbox) {
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
