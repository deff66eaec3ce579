//! An authenticated connection: reads requests, runs their handlers, writes the replies.
//!
//! Small requests are taken as they come. One with a larger body is offered first (`Kind::Offer`)
//! and sent when the server has reserved memory for it (`Kind::Grant`), so nothing is sent only to
//! be thrown away and the server never holds more than its budgets. What an offer costs while it
//! waits is a task and a few words; a connection may have as many of them as calls.
//!
//! A reserved byte is given back when the reply is written, when the connection ends, when the
//! caller declines, and when it does not use its grant in time.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, BufReader};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::budget::{Budgets, Credit, Payer};
use super::encode;
use super::frame::{Header, Kind};
use super::guard::ConnectionClock;
use super::handshake::unix_now;
use super::io::{
    Outgoing, READ_BUFFER_BYTES, ReadError, read_body, read_header, skip_body, write_frames,
};
use super::places::Place;
use super::room::Room;
use super::server::{ServerConfig, ServerStats};
use super::stream::Stream;
use super::{Call, DIRECT_BYTES_MAX, Fault, FaultCode, Payload, Peer, Reply, Service};
use crate::auth::Key;
use crate::deadline::Deadline;
use crate::ticket::Grant;

/// Replies that wait for their connection. A full queue stops its connection's reader alone.
const OUTBOX_MAX: usize = 1024;

/// What the handshake of a connection has shown.
pub(super) struct Proved {
    pub grant: Grant,
    /// The key of the ring that it rests on, and its id.
    pub key_id: u32,
    pub key: Key,
}

pub(super) struct Shared<S> {
    pub service: S,
    pub config: Arc<ServerConfig>,
    pub stats: Arc<ServerStats>,
    pub budgets: Budgets,
}

/// Held by a call until its reply is written.
pub(super) struct InFlight {
    _class: Place,
    _connection: OwnedSemaphorePermit,
    _bytes: Option<Credit>,
    _room: Option<Room>,
}

type Outbox = mpsc::Sender<Outgoing<Option<InFlight>>>;

/// What the calls of one connection share.
struct Link {
    peer: Peer,
    grant: Grant,
    outbox: Outbox,
    clock: ConnectionClock,
    /// Places for calls and for offers, for each class: one that is full delays no other.
    calls: Vec<Arc<Semaphore>>,
    offers: Vec<Arc<Semaphore>>,
    granted: Mutex<HashMap<u64, Granted>>,
    closed: watch::Receiver<bool>,
}

/// Memory that is reserved for a request that has not come yet.
struct Granted {
    credit: Credit,
    /// Dropped with the entry: ends the timer of the grant.
    _used: oneshot::Sender<()>,
}

impl Link {
    fn granted(&self) -> MutexGuard<'_, HashMap<u64, Granted>> {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume whose ticket the peer holds; `None` for a service.
    fn volume(&self) -> Option<u64> {
        self.grant.ticket().map(|ticket| ticket.directory)
    }

    fn payer(&self) -> Payer {
        Payer { connection: self.peer.connection, volume: self.volume() }
    }

    async fn ended(&self) {
        let mut closed = self.closed.clone();
        // An error means that the connection's task has gone.
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

impl<S: Service> Shared<S> {
    pub(super) async fn serve(self: &Arc<Self>, stream: Stream, peer: Peer, proved: Proved) {
        let context = &self.config.context;
        let (read_half, mut write_half) = stream.split();
        let (outbox, mut queue) = mpsc::channel(OUTBOX_MAX);
        let (close, closed) = watch::channel(false);
        let link = Arc::new(Link {
            peer,
            grant: proved.grant.clone(),
            outbox,
            clock: ConnectionClock::start(),
            calls: self.budgets.each_class(self.config.calls_of_connection_max),
            offers: self.budgets.each_class(self.config.calls_of_connection_max),
            granted: Mutex::default(),
            closed,
        });
        let stalled = |idle: Duration| {
            idle >= self.config.stall_timeout
                || idle >= self.config.reply_stall_timeout
                    && self.budgets.replies_are_short(link.volume())
        };
        let ended = tokio::select! {
            ended = self.read(read_half, &link) => ended,
            written = write_frames(&mut write_half, &mut queue, stalled) => {
                written.map_err(ReadError::from)
            }
            ended = self.revoked(&proved) => Err(ended),
        };
        // Calls that wait for memory on behalf of this connection end now.
        close.send_replace(true);
        link.granted().clear();
        match ended {
            Ok(()) | Err(ReadError::Closed) => {}
            Err(error) => {
                self.stats.broken.fetch_add(1, Relaxed);
                tracing::warn!(context, address = %peer.address, %error, "connection closed");
            }
        }
    }

    /// Ends when what the connection rests on has ended: its ticket's time, or its key.
    async fn revoked(&self, proved: &Proved) -> ReadError {
        loop {
            let left = match proved.grant.ticket() {
                // Not in whole seconds: the connection would outlive its ticket by up to one.
                Some(ticket) => {
                    Duration::from_secs(ticket.expires_unix_s).saturating_sub(unix_now())
                }
                None => self.config.key_poll,
            };
            if left.is_zero() {
                return ReadError::Expired;
            }
            tokio::time::sleep(left.min(self.config.key_poll)).await;
            // Another key under the same id does not stand for this one.
            let ring = self.config.keys.current();
            if ring.get(proved.key_id).is_none_or(|key| !key.is(&proved.key)) {
                return ReadError::KeyRemoved(proved.key_id);
            }
        }
    }

    async fn read(
        self: &Arc<Self>,
        read_half: impl AsyncRead + Unpin,
        link: &Arc<Link>,
    ) -> Result<(), ReadError> {
        let mut reader = BufReader::with_capacity(READ_BUFFER_BYTES, read_half);
        loop {
            let limits = &self.config.limits;
            let header = read_header(&mut reader, limits, self.config.stall_timeout).await?;
            match header.kind {
                Kind::Request | Kind::Guarded => self.read_call(&mut reader, header, link).await?,
                Kind::Offer => self.offered(&header, link).await,
                Kind::Decline => drop(link.granted().remove(&header.request_id)),
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
        link: &Arc<Link>,
    ) -> Result<(), ReadError> {
        let id = header.request_id;
        let Some(in_flight) = self.admit(&header, link) else {
            skip_body(reader, &header, self.config.stall_timeout).await?;
            self.give(link, id, Err(self.overloaded(header.class)), None).await;
            return Ok(());
        };
        // A begun body holds memory that others may be waiting for.
        let stall_timeout = self.config.stall_timeout.min(self.config.grant_timeout);
        let (message, payload) = read_body(reader, &header, stall_timeout).await?;
        if header.kind == Kind::Request && message.is_empty() && payload.is_empty() {
            // Asks only what the clock shows.
            self.give(link, id, Ok(Reply::default()), None).await;
            return Ok(());
        }
        let (deadline, expires) = match header.kind {
            Kind::Guarded => {
                let expires = link.clock.moment_of(header.time_ms);
                (Deadline::after(expires.remaining()), Some(expires))
            }
            _ => (Deadline::after(Duration::from_millis(u64::from(header.time_ms))), None),
        };
        if expires.is_some_and(|at| at.remaining().is_zero()) {
            self.stats.expired.fetch_add(1, Relaxed);
            self.give(link, id, Err(Fault::expired()), None).await;
            return Ok(());
        }
        let replies = Arc::clone(self.budgets.replies(header.class));
        let room = Room::new(replies, link.payer(), deadline, link.closed.clone());
        let in_flight = InFlight { _room: Some(room.clone()), ..in_flight };
        let (class, peer, grant) = (header.class, link.peer, link.grant.clone());
        let call = Call { message, payload, deadline, expires, peer, grant, class, room };
        self.stats.calls.fetch_add(1, Relaxed);
        tokio::spawn(Arc::clone(self).call(call, id, in_flight, Arc::clone(link)));
        Ok(())
    }

    /// A place for a call whose body comes next: reserved before, small, or free by chance.
    fn admit(&self, header: &Header, link: &Link) -> Option<InFlight> {
        let bytes = header.message_bytes + header.payload_bytes;
        let granted = link.granted().remove(&header.request_id).map(|it| it.credit);
        let credit = match granted {
            Some(credit) if credit.covers(bytes) => Some(credit),
            _ if bytes <= DIRECT_BYTES_MAX => None,
            _ => {
                let requests = self.budgets.requests(header.class);
                Some(requests.try_acquire(link.payer(), bytes)?)
            }
        };
        Some(InFlight {
            _class: self.budgets.call(header.class, link.volume())?,
            _connection: place(&link.calls, header.class)?,
            _bytes: credit,
            _room: None,
        })
    }

    /// Reserves memory for an announced request, in turn, and says when it may come.
    async fn offered(self: &Arc<Self>, header: &Header, link: &Arc<Link>) {
        let id = header.request_id;
        let Some(place) = place(&link.offers, header.class) else {
            return self.give(link, id, Err(self.overloaded(header.class)), None).await;
        };
        let bytes = header.message_bytes + header.payload_bytes;
        let deadline = Deadline::after(Duration::from_millis(u64::from(header.time_ms)));
        let requests = Arc::clone(self.budgets.requests(header.class));
        let (link, grant_timeout) = (Arc::clone(link), self.config.grant_timeout);
        tokio::spawn(async move {
            let _place = place;
            let credit = tokio::select! {
                credit = requests.acquire(link.payer(), bytes, deadline) => credit,
                () = link.ended() => None,
            };
            // Without one the caller has given up by its own clock.
            let Some(credit) = credit else { return };
            let (used, unused) = oneshot::channel();
            link.granted().insert(id, Granted { credit, _used: used });
            if link.outbox.send(Outgoing::bare(Kind::Grant, id, None)).await.is_ok() {
                // Ends at once when the request comes, or the connection ends.
                let _ = tokio::time::timeout(grant_timeout, unused).await;
            }
            link.granted().remove(&id);
        });
    }

    fn overloaded(&self, class: u8) -> Fault {
        self.stats.overloaded.fetch_add(1, Relaxed);
        let detail = format!("too many calls or bytes of class {class} are in flight");
        Fault { code: FaultCode::Overloaded, detail }
    }

    async fn call(self: Arc<Self>, call: Call, id: u64, held: InFlight, link: Arc<Link>) {
        // A separate task, so that a handler that panics still gets its caller an answer.
        let shared = Arc::clone(&self);
        let handler = tokio::spawn(async move { shared.service.handle(call).await });
        let result = handler.await.unwrap_or_else(|error| {
            tracing::error!(context = self.config.context, %error, "a handler broke");
            Err(Fault::internal("the handler broke; see the server's log"))
        });
        self.give(&link, id, result, Some(held)).await;
    }

    async fn give(
        &self,
        link: &Link,
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
            Err(Fault::internal("the reply is larger than a frame may be; ask for less at once"))
        });
        let (kind, message, payload) = match result {
            Ok(reply) => (Kind::Reply, reply.message, reply.payload),
            Err(fault) => (Kind::Fault, encode(&fault).unwrap_or(Bytes::new()), Payload::empty()),
        };
        if let Some(room) = hold.as_ref().and_then(|held| held._room.as_ref()) {
            room.shrink(message.len() + payload.len());
        }
        let time_ms = link.clock.reading();
        let bare = Outgoing::bare(kind, request_id, hold);
        let reply = Outgoing { time_ms, message, payload, ..bare };
        // An error means that the connection has ended: nothing waits for this answer any more.
        let _ = link.outbox.send(reply).await;
    }
}

/// A place of a class; an unknown class counts as the first one.
fn place(classes: &[Arc<Semaphore>], class: u8) -> Option<OwnedSemaphorePermit> {
    let places = classes.get(usize::from(class)).or(classes.first())?;
    Arc::clone(places).try_acquire_owned().ok()
}
