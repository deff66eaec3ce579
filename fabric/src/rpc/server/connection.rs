//! An authenticated connection: reads requests, runs their handlers, and writes the replies.
//!
//! Small requests are read as they arrive. A request with a larger body is offered first
//! (`Kind::Offer`) and sent when the server has reserved memory for it (`Kind::Grant`), so that no
//! body is sent only to be discarded, and the server never exceeds its budgets. A waiting offer
//! costs a task and a few words of memory; a connection may have as many offers as calls.
//!
//! Reserved memory is released when the reply is written, when the connection closes, when the
//! caller declines, or when the grant times out.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, BufReader};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::budget::{Budgets, Credit, Owner};
use super::call_slots::CallSlot;
use super::config::{ServerConfig, ServerStats};
use super::panics::{Panicked, until_panic};
use super::reply_memory::ReplyMemory;
use super::service::{Call, Peer, Service};
use super::usage::{Caller, ConnectionUsage, USAGE_CLASS, UsageReader, UsageTable};
use crate::auth::ticket::Grant;
use crate::deadline::Deadline;
use crate::fault::{Fault, FaultCode};
use crate::rpc::frame::{
    Header, Kind, Outgoing, ReadError, read_body, read_header, skip_body, write_frames,
};
use crate::rpc::handshake::{PeerAuth, unix_now};
use crate::rpc::message::{DIRECT_BYTES_MAX, Payload, Reply, encode};
use crate::rpc::not_after::ConnectionClock;
use crate::rpc::stream::{ReadHalf, Stream};

/// Replies queued for their connection. A full queue blocks only its connection's reader.
const OUTBOX_MAX: usize = 1024;

pub(super) struct Shared<S> {
    pub service: S,
    pub config: Arc<ServerConfig>,
    pub stats: Arc<ServerStats>,
    pub budgets: Budgets,
    pub usage: Arc<UsageTable>,
}

/// Held by a call until its reply is written.
pub(super) struct InFlight {
    _class: CallSlot,
    _connection: OwnedSemaphorePermit,
    _bytes: Option<Credit>,
    _reply_memory: Option<ReplyMemory>,
}

type Outbox = mpsc::Sender<Outgoing<Option<InFlight>>>;

/// State that the calls of one connection share.
struct ConnectionState {
    peer: Peer,
    grant: Grant,
    usage: ConnectionUsage,
    usage_reader: Mutex<UsageReader>,
    outbox: Outbox,
    clock: ConnectionClock,
    /// Slots for calls and for offers, per class: a full class does not delay the others.
    calls: Vec<Arc<Semaphore>>,
    offers: Vec<Arc<Semaphore>>,
    grants: Mutex<HashMap<u64, ReservedMemory>>,
    closed: watch::Receiver<bool>,
}

/// Memory that is reserved for a request that has not arrived yet.
struct ReservedMemory {
    credit: Credit,
    /// Dropped with the entry, which cancels the timer of the grant.
    _used: oneshot::Sender<()>,
}

impl ConnectionState {
    fn grants(&self) -> MutexGuard<'_, HashMap<u64, ReservedMemory>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume of the peer's ticket; `None` for a service.
    fn volume(&self) -> Option<u64> {
        self.grant.ticket().map(|ticket| ticket.directory)
    }

    fn owner(&self) -> Owner {
        Owner { connection: self.peer.connection, volume: self.volume() }
    }

    async fn until_closed(&self) {
        let mut closed = self.closed.clone();
        // An error means that the connection's task has exited.
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

impl<S: Service> Shared<S> {
    pub(super) async fn serve(self: &Arc<Self>, stream: Stream, peer: Peer, peer_auth: PeerAuth) {
        let context = &self.config.context;
        let (read_half, mut write_half) = stream.split();
        let (outbox, mut queue) = mpsc::channel(OUTBOX_MAX);
        let (close, closed) = watch::channel(false);
        let state = Arc::new(ConnectionState {
            peer,
            grant: peer_auth.grant.clone(),
            usage: self.usage.start(Caller::new(&peer_auth.grant, peer.address.ip())),
            usage_reader: Mutex::default(),
            outbox,
            clock: ConnectionClock::start(),
            calls: self.budgets.each_class(self.config.calls_per_connection_max),
            offers: self.budgets.each_class(self.config.calls_per_connection_max),
            grants: Mutex::default(),
            closed,
        });
        let stalled = |idle: Duration| {
            idle >= self.config.stall_timeout
                || idle >= self.config.reply_stall_timeout
                    && self.budgets.replies_are_short(state.volume())
        };
        let result = tokio::select! {
            result = self.read(read_half, &state) => result,
            written = write_frames(&mut write_half, &mut queue, stalled) => {
                written.map_err(ReadError::from)
            }
            result = self.revoked(&peer_auth) => Err(result),
        };
        // Cancels calls that wait for memory on behalf of this connection.
        close.send_replace(true);
        state.grants().clear();
        match result {
            Ok(()) | Err(ReadError::Closed) => {}
            Err(error) => {
                self.stats.broken.fetch_add(1, Relaxed);
                tracing::warn!(context, address = %peer.address, %error, "connection closed");
            }
        }
    }

    /// Completes when the credential of the connection has ended: its ticket has expired, or its
    /// key was removed.
    async fn revoked(&self, peer_auth: &PeerAuth) -> ReadError {
        loop {
            let remaining = match peer_auth.grant.ticket() {
                // Not in whole seconds: the connection would outlive its ticket by up to one
                // second.
                Some(ticket) => {
                    Duration::from_secs(ticket.expires_unix_s).saturating_sub(unix_now())
                }
                None => self.config.key_poll,
            };
            if remaining.is_zero() {
                return ReadError::Expired;
            }
            tokio::time::sleep(remaining.min(self.config.key_poll)).await;
            // A different key under the same id does not keep the connection open.
            let ring = self.config.keys.current();
            if ring.get(peer_auth.key_id).is_none_or(|key| !key.is(&peer_auth.key)) {
                return ReadError::KeyRemoved(peer_auth.key_id);
            }
        }
    }

    async fn read(
        self: &Arc<Self>,
        read_half: ReadHalf,
        state: &Arc<ConnectionState>,
    ) -> Result<(), ReadError> {
        let mut reader = BufReader::with_capacity(read_half.buffer_bytes(), read_half);
        loop {
            let limits = &self.config.limits;
            let header = read_header(&mut reader, limits, self.config.stall_timeout).await?;
            match header.kind {
                Kind::Request | Kind::NotAfter => {
                    self.read_call(&mut reader, header, state).await?
                }
                Kind::Offer => self.reserve_for_offer(&header, state).await,
                Kind::Decline => drop(state.grants().remove(&header.request_id)),
                kind @ (Kind::Reply | Kind::Fault | Kind::Grant) => {
                    return Err(ReadError::Direction(kind));
                }
            }
        }
    }

    async fn read_call(
        self: &Arc<Self>,
        reader: &mut (impl AsyncRead + Unpin),
        header: Header,
        state: &Arc<ConnectionState>,
    ) -> Result<(), ReadError> {
        let id = header.request_id;
        if header.class == USAGE_CLASS {
            // Not admitted as a call: it must be answered when the calls of others fill the budgets.
            skip_body(reader, &header, self.config.stall_timeout).await?;
            self.reply(state, id, self.report_usage(state), None).await;
            return Ok(());
        }
        let Some(in_flight) = self.admit(&header, state) else {
            skip_body(reader, &header, self.config.stall_timeout).await?;
            self.reply(state, id, Err(self.overloaded(header.class)), None).await;
            return Ok(());
        };
        // A body in transfer holds memory that other calls may be waiting for.
        let stall_timeout = self.config.stall_timeout.min(self.config.grant_timeout);
        let (message, payload) = read_body(reader, &header, stall_timeout).await?;
        if header.kind == Kind::Request && message.is_empty() && payload.is_empty() {
            // An empty request only reads the clock.
            self.reply(state, id, Ok(Reply::default()), None).await;
            return Ok(());
        }
        let (deadline, expires) = match header.kind {
            Kind::NotAfter => {
                let expires = state.clock.instant_of(header.time_ms);
                (Deadline::after(expires.remaining()), Some(expires))
            }
            _ => (Deadline::after(Duration::from_millis(u64::from(header.time_ms))), None),
        };
        if expires.is_some_and(|at| at.remaining().is_zero()) {
            self.stats.expired.fetch_add(1, Relaxed);
            self.reply(state, id, Err(Fault::expired()), None).await;
            return Ok(());
        }
        let replies = Arc::clone(self.budgets.replies(header.class));
        let reply_memory = ReplyMemory::new(replies, state.owner(), deadline, state.closed.clone());
        let in_flight = InFlight { _reply_memory: Some(reply_memory.clone()), ..in_flight };
        let (class, peer, grant) = (header.class, state.peer, state.grant.clone());
        state.usage.call(class, message.len() + payload.len());
        let call = Call { message, payload, deadline, expires, peer, grant, class, reply_memory };
        self.stats.calls.fetch_add(1, Relaxed);
        tokio::spawn(Arc::clone(self).call(call, id, in_flight, Arc::clone(state)));
        Ok(())
    }

    /// Memory for a call whose body follows: reserved earlier, small, or free at this moment.
    fn admit(&self, header: &Header, state: &ConnectionState) -> Option<InFlight> {
        let bytes = header.message_bytes + header.payload_bytes;
        let grant = state.grants().remove(&header.request_id).map(|it| it.credit);
        let credit = match grant {
            Some(credit) if credit.covers(bytes) => Some(credit),
            _ if bytes <= DIRECT_BYTES_MAX => None,
            _ => {
                let requests = self.budgets.requests(header.class);
                Some(requests.try_acquire(state.owner(), bytes)?)
            }
        };
        Some(InFlight {
            _class: self.budgets.call(header.class, state.volume())?,
            _connection: call_slot(&state.calls, header.class)?,
            _bytes: credit,
            _reply_memory: None,
        })
    }

    /// Reserves memory for an offered request, in fair order, and sends the grant.
    async fn reserve_for_offer(self: &Arc<Self>, header: &Header, state: &Arc<ConnectionState>) {
        let id = header.request_id;
        let Some(slot) = call_slot(&state.offers, header.class) else {
            return self.reply(state, id, Err(self.overloaded(header.class)), None).await;
        };
        let bytes = header.message_bytes + header.payload_bytes;
        let deadline = Deadline::after(Duration::from_millis(u64::from(header.time_ms)));
        let requests = Arc::clone(self.budgets.requests(header.class));
        let (state, grant_timeout) = (Arc::clone(state), self.config.grant_timeout);
        tokio::spawn(async move {
            let _slot = slot;
            let credit = tokio::select! {
                credit = requests.acquire(state.owner(), bytes, deadline) => credit,
                () = state.until_closed() => None,
            };
            // If memory is not available by then, the caller has timed out by its own clock.
            let Some(credit) = credit else { return };
            let (used, unused) = oneshot::channel();
            state.grants().insert(id, ReservedMemory { credit, _used: used });
            if state.outbox.send(Outgoing::bare(Kind::Grant, id, None)).await.is_ok() {
                // Completes immediately when the request arrives or the connection closes.
                let _ = tokio::time::timeout(grant_timeout, unused).await;
            }
            state.grants().remove(&id);
        });
    }

    /// Usage of the server by all callers, which a tenant must not see.
    fn report_usage(&self, state: &ConnectionState) -> Result<Reply, Fault> {
        state.grant.require_service("a report of all callers")?;
        let mut reader = state.usage_reader.lock().unwrap_or_else(PoisonError::into_inner);
        Reply::of(&self.usage.report(&mut reader))
    }

    fn overloaded(&self, class: u8) -> Fault {
        self.stats.overloaded.fetch_add(1, Relaxed);
        let detail = format!("too many calls or bytes of class {class} are in flight");
        Fault { code: FaultCode::Overloaded, detail }
    }

    async fn call(
        self: Arc<Self>,
        call: Call,
        id: u64,
        in_flight: InFlight,
        state: Arc<ConnectionState>,
    ) {
        let class = call.class;
        // The caller receives a reply even if the handler panics.
        let result = {
            let handler = pin!(self.service.handle(call));
            until_panic(handler).await
        };
        let result = result.unwrap_or_else(|Panicked(message)| {
            tracing::error!(context = self.config.context, message, "handler panicked");
            Err(Fault::internal("the handler panicked; see the server's log"))
        });
        if let Ok(reply) = &result {
            state.usage.reply(class, reply.message.len() + reply.payload.len());
        }
        self.reply(&state, id, result, Some(in_flight)).await;
    }

    async fn reply(
        &self,
        state: &ConnectionState,
        request_id: u64,
        result: Result<Reply, Fault>,
        hold: Option<InFlight>,
    ) {
        let limits = &self.config.limits;
        let fits = |reply: &Reply| {
            reply.message.len() <= limits.message_bytes_max
                && reply.payload.len() <= limits.payload_bytes_max
        };
        let result = result.and_then(|reply| {
            if fits(&reply) {
                return Ok(reply);
            }
            Err(Fault::internal("the reply exceeds the frame limit; request less data per call"))
        });
        let (kind, message, payload) = match result {
            Ok(reply) => (Kind::Reply, reply.message, reply.payload),
            Err(fault) => (Kind::Fault, encode(&fault).unwrap_or(Bytes::new()), Payload::empty()),
        };
        if let Some(reply_memory) =
            hold.as_ref().and_then(|in_flight| in_flight._reply_memory.as_ref())
        {
            reply_memory.shrink(message.len() + payload.len());
        }
        let time_ms = state.clock.reading();
        let bare = Outgoing::bare(kind, request_id, hold);
        let reply = Outgoing { time_ms, message, payload, ..bare };
        // An error means that the connection has closed: no caller waits for this reply.
        let _ = state.outbox.send(reply).await;
    }
}

/// The entry of a class; an unknown class counts as the first one.
fn call_slot(classes: &[Arc<Semaphore>], class: u8) -> Option<OwnedSemaphorePermit> {
    let slots = classes.get(usize::from(class)).or(classes.first())?;
    Arc::clone(slots).try_acquire_owned().ok()
}
