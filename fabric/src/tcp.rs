//! TCP between our processes: dialled and accepted with authentication and a traffic class.
//!
//! A listener has one accepting thread and a bounded number of short-lived ones for handshakes, so
//! that a stranger who connects and says nothing delays nobody. What fails the handshake is closed
//! and counted; the service never sees it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::auth::{self, AuthError, Key};
use crate::class::TrafficClass;
use crate::deadline::Deadline;

/// Handshakes under way at once; more connections are closed at the door.
const HANDSHAKES_MAX: usize = 64;
/// Connections that the kernel may hold for us.
const CONNECTIONS_WAITING: i32 = 128;
/// How long a stranger may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one address is tried before the next one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// Why there is no connection: every address that was tried.
#[derive(Debug, thiserror::Error)]
pub struct DialError {
    /// In the order of trying; at least one, unless no address was given.
    pub attempts: Vec<Attempt>,
}

/// One address that was tried.
#[derive(Debug, thiserror::Error)]
#[error("{address}: {why}")]
pub struct Attempt {
    /// Where.
    pub address: SocketAddr,
    /// What came of it.
    #[source]
    pub why: Unmet,
}

/// Why an address did not do.
#[derive(Debug, thiserror::Error)]
pub enum Unmet {
    /// It did not answer.
    #[error("{0}; check that this address is routed and the process lives")]
    Unreachable(io::Error),
    /// It answered and one of us refused the other.
    #[error(transparent)]
    Refused(#[from] AuthError),
}

impl fmt::Display for DialError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attempts.is_empty() {
            return formatter.write_str("no connection: the peer told no address");
        }
        formatter.write_str("no connection to ")?;
        for (at, attempt) in self.attempts.iter().enumerate() {
            write!(formatter, "{}{attempt}", if at > 0 { "; to " } else { "" })?;
        }
        Ok(())
    }
}

impl DialError {
    /// Somebody broke off in the middle of the handshake: it may only be busy.
    pub fn broken_off(&self) -> Option<&io::Error> {
        self.refusals().find_map(|error| match error {
            AuthError::Broken { source, .. } => Some(source),
            _ => None,
        })
    }

    /// Somebody answered who is not whom we want.
    pub fn stranger(&self) -> Option<&AuthError> {
        self.refusals().find(|error| !matches!(error, AuthError::Broken { .. }))
    }

    fn refusals(&self) -> impl Iterator<Item = &AuthError> {
        self.attempts.iter().filter_map(|attempt| match &attempt.why {
            Unmet::Refused(error) => Some(error),
            Unmet::Unreachable(_) => None,
        })
    }
}

/// What happened at a port.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Connections that proved who they are.
    pub admitted: AtomicU64,
    /// Connections that did not, or came while too many were at it.
    pub refused: AtomicU64,
}

/// A port that admits only those who hold the key.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    counters: Arc<PortCounters>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Listens on `address` (port 0: a free one; `::`: IPv4 too) and hands every admitted connection to `admit`,
    /// on a thread of its own; `admit` must end soon.
    ///
    /// # Errors
    /// `AddrInUse` and its like, or no thread.
    pub fn open(
        address: SocketAddr,
        key: Key,
        context: String,
        class: TrafficClass,
        admit: impl Fn(TcpStream, SocketAddr) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = listen(address)?;
        let address = listener.local_addr()?;
        let counters = Arc::new(PortCounters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let door = Arc::new(Door {
            key,
            context,
            class,
            counters: counters.clone(),
            busy: AtomicUsize::new(0),
            admit: Box::new(admit),
        });
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("fabric-port".into())
            .spawn(move || door.keep(&listener, &stopped))?;
        Ok(Self { address, counters, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What happened so far.
    pub fn counters(&self) -> &PortCounters {
        &self.counters
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The thread sits in accept: a connection of our own wakes it.
        let mut own = self.address;
        if own.ip().is_unspecified() {
            // `::` listens to both families, and not every machine has `::1`.
            own.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        let woken = TcpStream::connect_timeout(&own, Duration::from_secs(1)).is_ok();
        if let (true, Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip() != IpAddr::from(Ipv6Addr::UNSPECIFIED) {
        return TcpListener::bind(address);
    }
    let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_only_v6(false)?;
    socket.bind(&address.into())?;
    socket.listen(CONNECTIONS_WAITING)?;
    Ok(socket.into())
}

struct Door {
    key: Key,
    context: String,
    class: TrafficClass,
    counters: Arc<PortCounters>,
    busy: AtomicUsize,
    admit: Box<dyn Fn(TcpStream, SocketAddr) + Send + Sync>,
}

impl Door {
    fn keep(self: Arc<Self>, listener: &TcpListener, stop: &AtomicBool) {
        loop {
            let accepted = listener.accept();
            if stop.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok((stream, from)) => self.clone().knock(stream, from),
                // Out of descriptors, or a connection that was gone at once: not a reason to end.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn knock(self: Arc<Self>, stream: TcpStream, from: SocketAddr) {
        if self.busy.fetch_add(1, Ordering::AcqRel) >= HANDSHAKES_MAX {
            self.refuse(from, "too many handshakes at once");
            self.busy.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let door = self.clone();
        let spawned =
            std::thread::Builder::new().name("fabric-handshake".into()).spawn(move || {
                door.check(stream, from);
                door.busy.fetch_sub(1, Ordering::AcqRel);
            });
        if spawned.is_err() {
            self.refuse(from, "no thread for the handshake");
            self.busy.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn check(&self, stream: TcpStream, from: SocketAddr) {
        let deadline = Deadline::after(HANDSHAKE_TIMEOUT);
        let checked =
            prepare(&stream, self.class).map_err(|error| error.to_string()).and_then(|()| {
                auth::accept(&stream, &self.key, &self.context, deadline)
                    .map_err(|error| error.to_string())
            });
        match checked {
            Ok(()) => {
                self.counters.admitted.fetch_add(1, Ordering::Relaxed);
                (self.admit)(stream, from);
            }
            Err(why) => self.refuse(from, &why),
        }
    }

    fn refuse(&self, from: SocketAddr, why: &str) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%from, context = %self.context, why, "connection refused");
    }
}

/// Connects to the first of `addresses` at which somebody answers who holds the key for `context`.
/// Strangers are passed by: two machines may have one address in networks of their own.
///
/// # Errors
/// [`DialError`].
pub fn dial(
    addresses: &[SocketAddr],
    key: &Key,
    context: &str,
    class: TrafficClass,
    deadline: Deadline,
) -> Result<TcpStream, DialError> {
    let mut attempts = Vec::new();
    for &address in addresses {
        match try_one(address, key, context, class, deadline) {
            Ok(stream) => return Ok(stream),
            Err(why) => attempts.push(Attempt { address, why }),
        }
    }
    Err(DialError { attempts })
}

fn try_one(
    address: SocketAddr,
    key: &Key,
    context: &str,
    class: TrafficClass,
    deadline: Deadline,
) -> Result<TcpStream, Unmet> {
    let left = deadline.remaining().ok_or(io::ErrorKind::TimedOut);
    let stream = left
        .map_err(io::Error::from)
        .and_then(|left| TcpStream::connect_timeout(&address, left.min(ATTEMPT_TIMEOUT)))
        .and_then(|stream| prepare(&stream, class).map(|()| stream))
        .map_err(Unmet::Unreachable)?;
    // A stranger may say nothing for ever.
    auth::dial(&stream, key, context, deadline.within(HANDSHAKE_TIMEOUT))?;
    Ok(stream)
}

fn prepare(stream: &TcpStream, class: TrafficClass) -> io::Result<()> {
    stream.set_nodelay(true)?;
    class.apply(stream)?;
    Ok(())
}

#[cfg(test)]
#[path = "tcp_test.rs"]
mod tests;
