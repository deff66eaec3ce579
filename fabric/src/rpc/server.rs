//! The listening side: authenticates, reads frames, runs handlers, writes their replies.
//!
//! Bounds: connections, calls in flight and payload bytes in flight. A call over the bounds is read
//! past in little memory and answered with `Overloaded`; it is never queued, because services that
//! call each other in a circle would otherwise wait for each other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::BufReader;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use super::frame::{Header, Kind, Limits};
use super::guard::ConnectionClock;
use super::handshake::Accepted;
use super::io::{
    Outgoing, READ_BUFFER_BYTES, ReadError, read_body, read_header, skip_body, write_frames,
};
use super::{Call, Fault, FaultCode, Payload, Peer, Reply, ServerError, Service, Shutdown};
use super::{encode, handshake};
use crate::auth::Key;
use crate::class::TrafficClass;
use crate::deadline::Deadline;

/// Bounds and timers of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The service's name; both sides sign it (`crate::auth`).
    pub context: String,
    /// The cluster's key.
    pub key: Key,
    /// Marks the sockets.
    pub class: TrafficClass,
    /// Largest frame taken.
    pub limits: Limits,
    /// Connections at once; more are closed at once.
    pub connections_max: usize,
    /// Calls between their first byte read and their last byte written, over all connections.
    pub calls_in_flight_max: usize,
    /// Bytes of messages and payloads of those calls. At least one frame of the largest size.
    pub bytes_in_flight_max: usize,
    /// How long a stranger may take to authenticate.
    pub handshake_timeout: Duration,
    /// How long a begun frame may take to arrive, and a peer may refuse to take a byte.
    pub stall_timeout: Duration,
    /// How long handlers may run on once shutdown is requested.
    pub drain_timeout: Duration,
}

impl ServerConfig {
    /// Usual bounds for a service of this name.
    pub fn new(context: impl Into<String>, key: Key) -> Self {
        Self {
            context: context.into(),
            key,
            class: TrafficClass::Other,
            limits: Limits::default(),
            connections_max: 4096,
            calls_in_flight_max: 8192,
            bytes_in_flight_max: 512 << 20,
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(2),
        }
    }
}

/// What a server has seen, for tests and metrics.
#[derive(Debug, Default)]
pub struct ServerStats {
    /// Connections that authenticated.
    pub connections: AtomicU64,
    /// Connections that did not, or came when there were too many.
    pub refused: AtomicU64,
    /// Connections that the other side closed before its first byte, as probes of a port do.
    pub silent: AtomicU64,
    /// Connections that were closed because of what came over them.
    pub broken: AtomicU64,
    /// Calls handed to the service.
    pub calls: AtomicU64,
    /// Calls refused because too much was in flight.
    pub overloaded: AtomicU64,
    /// Guarded calls that came too late.
    pub expired: AtomicU64,
}

/// A bound port.
pub struct Server {
    config: Arc<ServerConfig>,
    listener: TcpListener,
    address: SocketAddr,
    stats: Arc<ServerStats>,
}

/// Held by a call until its reply is written.
struct InFlight {
    _call: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

type Outbox = mpsc::Sender<Outgoing<Option<InFlight>>>;

impl Server {
    /// Takes the port. Nobody is served before [`Server::serve`].
    ///
    /// # Errors
    /// [`ServerError::Bind`].
    pub async fn bind(address: &str, config: ServerConfig) -> Result<Self, ServerError> {
        let bind = |source| ServerError::Bind {
            context: config.context.clone(),
            address: address.into(),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        Ok(Self { config: Arc::new(config), listener, address, stats: Arc::default() })
    }

    /// Where it listens; the port is the real one when 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counters that stay readable while it serves.
    pub fn stats(&self) -> Arc<ServerStats> {
        Arc::clone(&self.stats)
    }

    /// Serves until shutdown, then lets running handlers end for `drain_timeout`.
    pub async fn serve<S: Service>(self, service: S, shutdown: Shutdown) {
        let shared = Arc::new(Shared {
            service,
            calls: Arc::new(Semaphore::new(self.config.calls_in_flight_max)),
            bytes: Arc::new(Semaphore::new(
                self.config.bytes_in_flight_max.min(Semaphore::MAX_PERMITS),
            )),
            config: self.config,
            stats: self.stats,
        });
        let mut connections = JoinSet::new();
        let mut number = 0;
        loop {
            let accepted = tokio::select! {
                () = shutdown.requested() => break,
                Some(_) = connections.join_next() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, address)) if connections.len() < shared.config.connections_max => {
                    number += 1;
                    let peer = Peer { address, connection: number };
                    connections.spawn(Arc::clone(&shared).connection(stream, peer));
                }
                Ok((_, address)) => {
                    shared.stats.refused.fetch_add(1, Relaxed);
                    tracing::warn!(context = shared.config.context, %address, "too many connections");
                }
                // Out of descriptors, most likely: wait for some to be given back.
                Err(error) => {
                    tracing::warn!(context = shared.config.context, %error, "accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(self.listener);
        // Every call in flight holds one permit: all of them free means that all are answered.
        let all = u32::try_from(shared.config.calls_in_flight_max).unwrap_or(u32::MAX);
        let drained = shared.calls.acquire_many(all);
        if tokio::time::timeout(shared.config.drain_timeout, drained).await.is_err() {
            tracing::warn!(context = shared.config.context, "calls were cut off by shutdown");
        }
        connections.shutdown().await;
    }
}

struct Shared<S> {
    service: S,
    config: Arc<ServerConfig>,
    stats: Arc<ServerStats>,
    calls: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

impl<S: Service> Shared<S> {
    async fn connection(self: Arc<Self>, mut stream: TcpStream, peer: Peer) {
        let context = &self.config.context;
        let deadline = Deadline::after(self.config.handshake_timeout);
        let ready = super::connection::prepare(&stream, self.config.class);
        if let Err(error) = ready {
            tracing::debug!(context, address = %peer.address, %error, "socket options");
        }
        match handshake::accept(&mut stream, &self.config.key, context, deadline).await {
            Ok(Accepted::Authenticated) => {}
            Ok(Accepted::Silent) => {
                self.stats.silent.fetch_add(1, Relaxed);
                tracing::debug!(context, address = %peer.address, "connection closed unused");
                return;
            }
            Err(error) => {
                self.stats.refused.fetch_add(1, Relaxed);
                tracing::warn!(address = %peer.address, %error, "connection refused");
                return;
            }
        }
        self.stats.connections.fetch_add(1, Relaxed);
        let clock = ConnectionClock::start();
        let (read_half, write_half) = stream.into_split();
        let (outbox, queue) = mpsc::channel(self.config.calls_in_flight_max.clamp(1, 1024));
        let stall_timeout = self.config.stall_timeout;
        let ended = tokio::select! {
            ended = self.read(read_half, outbox, peer, clock) => ended,
            written = write(write_half, queue, stall_timeout) => written,
        };
        match ended {
            Ok(()) | Err(ReadError::Closed) => {}
            Err(error) => {
                self.stats.broken.fetch_add(1, Relaxed);
                tracing::warn!(context, address = %peer.address, %error, "connection closed");
            }
        }
    }

    async fn read(
        self: &Arc<Self>,
        read_half: OwnedReadHalf,
        outbox: Outbox,
        peer: Peer,
        clock: ConnectionClock,
    ) -> Result<(), ReadError> {
        let stall_timeout = self.config.stall_timeout;
        let limits = &self.config.limits;
        let answers = Answers { outbox, clock };
        let mut reader = BufReader::with_capacity(READ_BUFFER_BYTES, read_half);
        loop {
            let header = read_header(&mut reader, limits, stall_timeout).await?;
            let Some(in_flight) = self.admit(&header) else {
                skip_body(&mut reader, &header, stall_timeout).await?;
                self.stats.overloaded.fetch_add(1, Relaxed);
                let fault = Fault {
                    code: FaultCode::Overloaded,
                    detail: format!(
                        "over {} calls or {} bytes in flight",
                        self.config.calls_in_flight_max, self.config.bytes_in_flight_max
                    ),
                };
                answers.give(header.request_id, Err(fault), limits, None).await;
                continue;
            };
            let (message, payload) = read_body(&mut reader, &header, stall_timeout).await?;
            let (deadline, expires) = match header.kind {
                // Asks only what the clock shows.
                Kind::Request if message.is_empty() && payload.is_empty() => {
                    answers.give(header.request_id, Ok(Reply::default()), limits, None).await;
                    continue;
                }
                Kind::Request => {
                    let timeout = Duration::from_millis(u64::from(header.time_ms));
                    (Deadline::after(timeout), None)
                }
                Kind::Guarded => {
                    let expires = clock.moment_of(header.time_ms);
                    (Deadline::after(expires.remaining()), Some(expires))
                }
                Kind::Reply | Kind::Fault => continue,
            };
            if expires.is_some_and(|at| at.remaining().is_zero()) {
                self.stats.expired.fetch_add(1, Relaxed);
                answers.give(header.request_id, Err(Fault::expired()), limits, None).await;
                continue;
            }
            let call = Call { message, payload, deadline, expires, peer };
            self.stats.calls.fetch_add(1, Relaxed);
            tokio::spawn(Arc::clone(self).call(
                call,
                header.request_id,
                in_flight,
                answers.clone(),
            ));
        }
    }

    fn admit(&self, header: &Header) -> Option<InFlight> {
        let bytes = u32::try_from(header.message_bytes + header.payload_bytes).ok()?;
        Some(InFlight {
            _call: Arc::clone(&self.calls).try_acquire_owned().ok()?,
            _bytes: Arc::clone(&self.bytes).try_acquire_many_owned(bytes).ok()?,
        })
    }

    async fn call(self: Arc<Self>, call: Call, request_id: u64, held: InFlight, answers: Answers) {
        // A task of its own, so that a handler that panics still gets its caller an answer.
        let shared = Arc::clone(&self);
        let handler = tokio::spawn(async move { shared.service.handle(call).await });
        let result = handler.await.unwrap_or_else(|error| {
            tracing::error!(context = self.config.context, %error, "a handler broke");
            Err(Fault::internal("the handler broke; see the server's log"))
        });
        answers.give(request_id, result, &self.config.limits, Some(held)).await;
    }
}

async fn write(
    mut write_half: OwnedWriteHalf,
    mut queue: mpsc::Receiver<Outgoing<Option<InFlight>>>,
    stall_timeout: Duration,
) -> Result<(), ReadError> {
    Ok(write_frames(&mut write_half, &mut queue, stall_timeout).await?)
}

/// Where a connection's answers go, and the clock that they tell.
#[derive(Clone)]
struct Answers {
    outbox: Outbox,
    clock: ConnectionClock,
}

impl Answers {
    async fn give(
        &self,
        request_id: u64,
        result: Result<Reply, Fault>,
        limits: &Limits,
        hold: Option<InFlight>,
    ) {
        let fits = |reply: &Reply| {
            reply.message.len() <= limits.message_bytes_max
                && reply.payload.len() <= limits.payload_bytes_max
        };
        let result = result.and_then(|reply| {
            if fits(&reply) {
                return Ok(reply);
            }
            Err(Fault::internal("the reply is larger than a frame may be; ask for less at once"))
        });
        let (kind, message, payload) = match result {
            Ok(reply) => (Kind::Reply, reply.message, reply.payload),
            Err(fault) => (Kind::Fault, encode(&fault).unwrap_or(Bytes::new()), Payload::empty()),
        };
        let time_ms = self.clock.reading();
        // An error means that the connection has ended: nobody waits for this answer any more.
        let _ =
            self.outbox.send(Outgoing { kind, request_id, time_ms, message, payload, hold }).await;
    }
}
