//! TCP connections between processes of the project, with authentication and a traffic class.
//!
//! A listener has one thread, which runs all handshakes without blocking on any
//! ([`super::listener`]): a silent peer delays no other. A connection that fails the handshake is
//! closed and counted; the service does not see it.

mod handshake_table;
mod listener;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use self::listener::{GREETING_BYTES_MAX, HANDSHAKE_TIMEOUT, Listener};
use crate::auth::{self, AuthError, Key};
use crate::class::TrafficClass;
use crate::deadline::Deadline;

/// Listen backlog: a rank group of this size may connect at the same time.
const CONNECTIONS_WAITING: i32 = 1024;
/// Timeout of one address before the next one is tried.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// No connection could be made. Lists every address that was tried.
#[derive(Debug, thiserror::Error)]
pub struct DialError {
    /// In the order of the attempts; empty only if no address was given.
    pub attempts: Vec<Attempt>,
}

/// A failed attempt to connect to one address.
#[derive(Debug, thiserror::Error)]
#[error("{address}: {why}")]
pub struct Attempt {
    /// The address.
    pub address: SocketAddr,
    /// The error.
    #[source]
    pub why: AttemptError,
}

/// Reason why an attempt failed.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// The address did not answer.
    #[error("{0}; check that this address is routable and the process is running")]
    Unreachable(io::Error),
    /// The peer answered, and one side refused the other.
    #[error(transparent)]
    Refused(#[from] AuthError),
}

impl fmt::Display for DialError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.attempts.is_empty() {
            return formatter.write_str("no connection: the peer published no address");
        }
        formatter.write_str("no connection to ")?;
        for (at, attempt) in self.attempts.iter().enumerate() {
            write!(formatter, "{}{attempt}", if at > 0 { "; to " } else { "" })?;
        }
        Ok(())
    }
}

impl DialError {
    /// The error of a peer that disconnected during the handshake: it may only be overloaded.
    pub fn interrupted(&self) -> Option<&io::Error> {
        self.refusals().find_map(|error| match error {
            AuthError::Broken { source, .. } => Some(source),
            _ => None,
        })
    }

    /// An address did not answer, not even with a refusal: the node is down, or the backlog of the
    /// listener is full.
    pub fn timed_out(&self) -> bool {
        self.attempts.iter().any(|attempt| match &attempt.why {
            AttemptError::Unreachable(error) => error.kind() == io::ErrorKind::TimedOut,
            AttemptError::Refused(_) => false,
        })
    }

    /// The error of a peer that answered and failed authentication.
    pub fn rejection(&self) -> Option<&AuthError> {
        self.refusals().find(|error| !matches!(error, AuthError::Broken { .. }))
    }

    fn refusals(&self) -> impl Iterator<Item = &AuthError> {
        self.attempts.iter().filter_map(|attempt| match &attempt.why {
            AttemptError::Refused(error) => Some(error),
            AttemptError::Unreachable(_) => None,
        })
    }
}

/// Counters of a port.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Authenticated connections.
    pub admitted: AtomicU64,
    /// Connections that failed authentication or were evicted by newer ones.
    pub refused: AtomicU64,
}

/// A port that admits only peers that hold the key.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    counters: Arc<PortCounters>,
    stop: Arc<AtomicBool>,
    wakeup: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Listens on `address` (port 0: any free port; `::`: also IPv4) and passes every admitted
    /// connection to `admit` on a separate thread, with its greeting of `greeting_bytes` bytes (at
    /// most 64; dialers of the service send the same length). `admit` must return soon.
    ///
    /// # Errors
    /// `AddrInUse` and similar errors, or a failure to start the thread.
    pub fn open(
        address: SocketAddr,
        key: Key,
        context: String,
        class: TrafficClass,
        greeting_bytes: usize,
        admit: impl Fn(TcpStream, SocketAddr, &[u8]) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let greeting_bytes = greeting_bytes.min(GREETING_BYTES_MAX);
        let listener = listen(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let counters = Arc::new(PortCounters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let wakeup = Arc::new(rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )?);
        let admit = Box::new(admit);
        let handler =
            Listener { key, context, class, greeting_bytes, counters: counters.clone(), admit };
        let (handler, stop_flag, notified) = (Arc::new(handler), stop.clone(), wakeup.clone());
        let thread = std::thread::Builder::new()
            .name("fabric-port".into())
            .spawn(move || handler.run(&listener, &notified, &stop_flag))?;
        Ok(Self { address, counters, stop, wakeup, thread: Some(thread) })
    }

    /// Local address of the port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counters of the port.
    pub fn counters(&self) -> &PortCounters {
        &self.counters
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let notified = rustix::io::write(&*self.wakeup, &1_u64.to_ne_bytes()).is_ok();
        if let (true, Some(thread)) = (notified, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.ip() == IpAddr::from(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false)?;
    }
    // As in the standard library: a port that was just closed can be reopened.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(CONNECTIONS_WAITING)?;
    Ok(socket.into())
}

/// Connects to the first of `addresses` at which a peer proves that it holds the key for `context`.
/// Other peers are skipped: two nodes may have the same address in separate networks. `greeting`
/// states the purpose of the connection and has the length that the service expects.
///
/// # Errors
/// [`DialError`].
pub fn dial(
    addresses: &[SocketAddr],
    key: &Key,
    context: &str,
    class: TrafficClass,
    greeting: &[u8],
    deadline: Deadline,
) -> Result<TcpStream, DialError> {
    let mut attempts = Vec::new();
    for &address in addresses {
        match try_one(address, key, context, class, greeting, deadline) {
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
    greeting: &[u8],
    deadline: Deadline,
) -> Result<TcpStream, AttemptError> {
    let remaining = deadline.remaining().ok_or(io::ErrorKind::TimedOut);
    let stream = remaining
        .map_err(io::Error::from)
        .and_then(|remaining| TcpStream::connect_timeout(&address, remaining.min(ATTEMPT_TIMEOUT)))
        .and_then(|stream| prepare(&stream, class).map(|()| stream))
        .map_err(AttemptError::Unreachable)?;
    // A peer that has not authenticated may stay silent.
    auth::dial(&stream, key, context, greeting, deadline.within(HANDSHAKE_TIMEOUT))?;
    Ok(stream)
}

pub(crate) fn prepare(stream: &TcpStream, class: TrafficClass) -> io::Result<()> {
    stream.set_nodelay(true)?;
    class.apply(stream)?;
    Ok(())
}

#[cfg(test)]
#[path = "tcp_test.rs"]
mod tests;
