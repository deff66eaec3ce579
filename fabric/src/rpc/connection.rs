//! The calling side of one connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

use super::frame::{Kind, Limits};
use super::guard::{Guard, Heard, Stopped};
use super::io::{Outgoing, READ_BUFFER_BYTES, ReadError, read_body, read_header, write_frames};
use super::{Fault, Payload, Reply, RpcError, decode, handshake};
use crate::BoxFuture;
use crate::auth::{AuthError, Key};
use crate::class::TrafficClass;
use crate::deadline::Deadline;

/// A peer that has not acknowledged what it was sent for so long is gone: without this the kernel
/// tries for a quarter of an hour, ever more seldom, and calls wait behind what it tries.
const UNHEARD_MAX: Duration = Duration::from_secs(30);

/// Bounds and timers of a connection.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// The service's name; both sides sign it (`crate::auth`).
    pub context: String,
    /// The cluster's key.
    pub key: Key,
    /// Marks the socket.
    pub class: TrafficClass,
    /// Largest frame sent or taken.
    pub limits: Limits,
    /// Calls in flight; further ones wait for a place until their deadline.
    pub calls_in_flight_max: usize,
    /// How long connecting and authenticating may take.
    pub connect_timeout: Duration,
    /// How long a begun reply may take to arrive, and the peer may refuse to take a byte.
    pub stall_timeout: Duration,
}

impl ConnectionConfig {
    /// Usual bounds for a service of this name.
    pub fn new(context: impl Into<String>, key: Key) -> Self {
        Self {
            context: context.into(),
            key,
            class: TrafficClass::Other,
            limits: Limits::default(),
            calls_in_flight_max: 1024,
            connect_timeout: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(30),
        }
    }
}

/// One authenticated connection. Dropping it closes it and fails what waits.
pub struct Connection {
    shared: Arc<Shared>,
    outbox: mpsc::Sender<Outgoing<()>>,
    places: Semaphore,
    driver: JoinHandle<()>,
}

struct Shared {
    config: ConnectionConfig,
    peer: String,
    next_request_id: AtomicU64,
    waiting: Mutex<Waiting>,
    heard: Mutex<Heard>,
    /// Held by who asks what the server's clock shows.
    asking: tokio::sync::Mutex<()>,
}

/// Who waits for which reply; `ended` once no reply can come any more.
#[derive(Default)]
struct Waiting {
    calls: HashMap<u64, oneshot::Sender<Result<Reply, Fault>>>,
    ended: Option<String>,
}

impl Connection {
    /// Connects and authenticates.
    ///
    /// # Errors
    /// [`RpcError::Unreachable`], or [`RpcError::Refused`] when the peer is somebody else.
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
        let mut stream = tokio::time::timeout_at(deadline.instant().into(), connect)
            .await
            .map_err(|_| unreachable("connecting took too long".into()))?
            .map_err(|error| unreachable(error.to_string()))?;
        prepare(&stream, config.class).map_err(|error| unreachable(error.to_string()))?;
        match handshake::dial(&mut stream, &config.key, &config.context, deadline).await {
            Ok(()) => {}
            Err(error @ AuthError::Broken { .. }) => return Err(unreachable(error.to_string())),
            Err(source) => {
                let context = config.context.clone();
                return Err(RpcError::Refused { context, peer: address.into(), source });
            }
        }
        Ok(Self::start(stream, address, config))
    }

    fn start(stream: TcpStream, address: &str, config: ConnectionConfig) -> Self {
        let (read_half, mut write_half) = stream.into_split();
        let (outbox, mut queue) = mpsc::channel(config.calls_in_flight_max.clamp(1, 1024));
        let places = Semaphore::new(config.calls_in_flight_max);
        let shared = Arc::new(Shared {
            config,
            peer: address.into(),
            next_request_id: AtomicU64::new(1),
            waiting: Mutex::default(),
            heard: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        });
        let driven = Arc::clone(&shared);
        let driver = tokio::spawn(async move {
            let stall_timeout = driven.config.stall_timeout;
            let ended = tokio::select! {
                ended = driven.read(read_half) => ended.to_string(),
                written = write_frames(&mut write_half, &mut queue, stall_timeout) => match written {
                    Ok(()) => "closed by this side".into(),
                    Err(error) => error.to_string(),
                },
            };
            driven.end(ended);
        });
        Self { shared, outbox, places, driver }
    }

    /// True once no call can succeed on it any more.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().ended.is_some()
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Any [`RpcError`]; [`RpcError::executed`] says whether it can have had its effect.
    pub fn call(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
    ) -> BoxFuture<'_, Result<Reply, RpcError>> {
        Box::pin(self.call_now(message, payload, deadline, None))
    }

    /// [`Connection::call`] that nobody begins once `guard` has ended, wherever its frame is then.
    ///
    /// # Errors
    /// As [`Connection::call`]; [`RpcError::Fenced`] when the right is lost.
    pub fn call_guarded<'a>(
        &'a self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
        guard: &'a Guard,
    ) -> BoxFuture<'a, Result<Reply, RpcError>> {
        Box::pin(self.call_now(message, payload, deadline, Some(guard)))
    }

    async fn call_now(
        &self,
        message: Bytes,
        payload: Payload,
        deadline: Deadline,
        guard: Option<&Guard>,
    ) -> Result<Reply, RpcError> {
        let begun = Instant::now();
        let timed_out = |sent| RpcError::TimedOut {
            context: self.shared.config.context.clone(),
            peer: self.shared.peer.clone(),
            waited_ms: begun.elapsed().as_millis() as u64,
            sent,
        };
        self.check_size(&message, &payload)?;
        let guarded = match guard {
            Some(guard) => match guard.end(deadline).await {
                Ok(end) => {
                    self.hear(deadline).await?;
                    self.shared.heard().reading_before(end)
                }
                Err(Stopped::TimedOut) => return Err(timed_out(false)),
                Err(Stopped::Closed) => return Err(self.shared.fenced()),
            },
            None => None,
        };
        let at = deadline.instant().into();
        let Ok(place) = tokio::time::timeout_at(at, self.places.acquire()).await else {
            return Err(timed_out(false));
        };
        // A process that was stopped for a while goes on with an operation whose time is over: what
        // it may do now is somebody else's by now.
        if deadline.passed() {
            return Err(timed_out(false));
        }
        let (request_id, reply) = self.shared.expect_reply()?;
        // Forgets the call however it ends, also when the caller's future is dropped.
        let _forget = Forget { shared: &self.shared, request_id };
        let (kind, time_ms) = match guarded {
            Some(reading) => (Kind::Guarded, reading),
            None => {
                let left = deadline.remaining().unwrap_or_default();
                (Kind::Request, left.as_millis() as u32)
            }
        };
        let frame = Outgoing { kind, request_id, time_ms, message, payload, hold: () };
        match tokio::time::timeout_at(at, self.outbox.send(frame)).await {
            Err(_) => return Err(timed_out(false)),
            Ok(Err(_)) => return Err(self.shared.lost()),
            Ok(Ok(())) => {}
        }
        let answered = tokio::time::timeout_at(at, reply).await;
        drop(place);
        match answered {
            Err(_) => Err(timed_out(true)),
            Ok(Err(_)) => Err(self.shared.lost()),
            Ok(Ok(Ok(reply))) => Ok(reply),
            Ok(Ok(Err(fault))) => Err(RpcError::Faulted {
                context: self.shared.config.context.clone(),
                peer: self.shared.peer.clone(),
                fault,
            }),
        }
    }

    /// Asks what the server's clock shows, if that is not known well enough.
    async fn hear(&self, deadline: Deadline) -> Result<(), RpcError> {
        if !self.shared.heard().is_old() {
            return Ok(());
        }
        let asking = tokio::time::timeout_at(deadline.instant().into(), self.shared.asking.lock());
        let _asking = asking.await;
        if !self.shared.heard().is_old() {
            return Ok(());
        }
        // Any answer tells it: an older server calls this a bad request.
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

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        // Nothing panics while it holds the lock, and the map stays whole if something did.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect_reply(&self) -> Result<(u64, oneshot::Receiver<Result<Reply, Fault>>), RpcError> {
        let request_id = self.next_request_id.fetch_add(1, Relaxed);
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.lock();
        if let Some(detail) = &waiting.ended {
            return Err(RpcError::Unreachable {
                context: self.config.context.clone(),
                peer: self.peer.clone(),
                detail: detail.clone(),
            });
        }
        waiting.calls.insert(request_id, sender);
        Ok((request_id, receiver))
    }

    fn heard(&self) -> Heard {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fenced(&self) -> RpcError {
        RpcError::Fenced { context: self.config.context.clone(), peer: self.peer.clone() }
    }

    fn lost(&self) -> RpcError {
        RpcError::Lost {
            context: self.config.context.clone(),
            peer: self.peer.clone(),
            detail: self.lock().ended.clone().unwrap_or_else(|| "closed".into()),
        }
    }

    fn end(&self, detail: String) {
        let mut waiting = self.lock();
        waiting.ended.get_or_insert(detail);
        // Dropping the senders wakes everybody who waits.
        waiting.calls.clear();
    }

    async fn read(&self, read_half: OwnedReadHalf) -> ReadError {
        let mut reader = BufReader::with_capacity(READ_BUFFER_BYTES, read_half);
        loop {
            if let Err(error) = self.read_one(&mut reader).await {
                return error;
            }
        }
    }

    async fn read_one(&self, reader: &mut BufReader<OwnedReadHalf>) -> Result<(), ReadError> {
        let stall_timeout = self.config.stall_timeout;
        let header = read_header(reader, &self.config.limits, stall_timeout).await?;
        let (message, payload) = read_body(reader, &header, stall_timeout).await?;
        let result = match header.kind {
            Kind::Reply => Ok(Reply { message, payload: payload.into() }),
            Kind::Fault => Err(decode(&message)
                .unwrap_or_else(|error| Fault::internal(format!("unreadable fault: {error}")))),
            Kind::Request | Kind::Guarded => return Ok(()),
        };
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Heard::now(header.time_ms);
        // A reply that nobody waits for belongs to a call that gave up.
        if let Some(caller) = self.lock().calls.remove(&header.request_id) {
            let _ = caller.send(result);
        }
        Ok(())
    }
}

struct Forget<'a> {
    shared: &'a Shared,
    request_id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.lock().calls.remove(&self.request_id);
    }
}

/// Small frames leave at once, dead peers are noticed by the kernel too, and the class is marked.
pub(super) fn prepare(stream: &TcpStream, class: TrafficClass) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(UNHEARD_MAX))?;
    Ok(class.apply(stream)?)
}
