//! Server side: accepts and authenticates connections until shutdown. Authenticated connections are
//! in `connection`.
//!
//! Unauthenticated connections have a separate small pool (`unauthenticated`): whatever their
//! number, they take no slot of a cluster member, and a new connection is always accepted.

mod budget;
mod call_slots;
mod config;
mod connection;
mod credit;
#[cfg(test)]
mod credit_test;
mod panics;
mod poll_mutex;
mod reply_memory;
mod service;
mod turns;
mod unauthenticated;
mod usage;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use self::budget::Budgets;
use self::call_slots::volume_limit;
use self::connection::Shared;
use self::poll_mutex::{PollMutex, poll_exclusive};
use self::unauthenticated::Unauthenticated;
use self::usage::UsageTable;
use super::channel::{Acceptor, Incoming};
use super::error::ServerError;
use super::local::{self, LocalListener, Opened};
use super::shutdown::Shutdown;
use super::stream::{Stream, prepare};
use crate::deadline::Deadline;

pub use self::budget::Budget;
pub use self::config::{DEFAULT_CLUSTER, ServerConfig, ServerStats};
pub use self::credit::{CreditRequest, Credits};
pub use self::reply_memory::ReplyMemory;
pub use self::service::{Call, Peer, Service, decode_request};
pub use self::usage::{Caller, Count, Counts, ROWS_MAX, Usage};
pub(super) use self::usage::{USAGE_CLASS, USAGE_REQUEST};

/// A bound server port.
pub struct Server {
    config: Arc<ServerConfig>,
    listener: TcpListener,
    local_listener: Option<LocalListener>,
    address: SocketAddr,
    acceptor: Acceptor,
    stats: Arc<ServerStats>,
}

impl Server {
    /// Binds the port. Connections are accepted only after [`Server::serve`] is called.
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn bind(address: &str, config: ServerConfig) -> Result<Self, ServerError> {
        let bind = |source| ServerError::Bind {
            context: config.context.clone(),
            address: address.into(),
            source,
        };
        let acceptor = Acceptor::new(config.tls).map_err(|error| ServerError::Tls {
            context: config.context.clone(),
            reason: error.to_string(),
        })?;
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let local_listener = open_local(address, &config);
        let (config, stats) = (Arc::new(config), Arc::default());
        Ok(Self { config, listener, local_listener, address, acceptor, stats })
    }

    /// Local address, with the actual port if port 0 was requested.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counters, which remain readable while the server runs.
    pub fn stats(&self) -> Arc<ServerStats> {
        Arc::clone(&self.stats)
    }

    /// Serves until shutdown, then waits up to `drain_timeout` for running handlers.
    pub async fn serve<S: Service>(self, service: S, shutdown: Shutdown) {
        let table = Arc::new(ConnectionTable::new(&self.config, self.acceptor));
        let shared = Arc::new(Shared {
            service,
            budgets: Budgets::new(&self.config.budgets),
            usage: UsageTable::new(self.config.budgets.len()),
            config: self.config,
            stats: self.stats,
        });
        let mut connections = JoinSet::new();
        let mut number = 0;
        // The address that a connection over TCP inside the machine would come from.
        let here = match self.address.ip() {
            ip if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, 0).into(),
            ip => (ip, 0).into(),
        };
        loop {
            let incoming = tokio::select! {
                () = shutdown.requested() => break,
                Some(_) = connections.join_next() => continue,
                incoming = self.listener.accept() => {
                    incoming.map(|(stream, address)| (Socket::Tcp(stream), address))
                }
                incoming = accept_local(self.local_listener.as_ref()) => {
                    incoming.map(|socket| (socket, here))
                }
            };
            match incoming {
                Ok((socket, address)) => {
                    number += 1;
                    let peer = Peer { address, connection: number };
                    let (end, evicted) = oneshot::channel();
                    let loser = table.unauthenticated().insert(address.ip(), number, end);
                    shared.stats.evicted.fetch_add(u64::from(loser.is_some()), Relaxed);
                    // Dropping the evicted connection's sender closes it.
                    drop(loser);
                    let (shared, table) = (Arc::clone(&shared), Arc::clone(&table));
                    connections.spawn(connection(shared, table, socket, peer, evicted));
                }
                // Most likely out of descriptors: wait until some are closed.
                Err(error) => {
                    tracing::warn!(context = shared.config.context, %error, "accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        // In this order: a successor that gets the port also gets the name.
        drop(self.local_listener);
        drop(self.listener);
        let drained = shared.budgets.drained();
        if tokio::time::timeout(shared.config.drain_timeout, drained).await.is_err() {
            tracing::warn!(context = shared.config.context, "shutdown aborted running calls");
        }
        connections.shutdown().await;
    }
}

/// The listener for clients of this machine; `None` if shared memory is not served.
fn open_local(address: SocketAddr, config: &ServerConfig) -> Option<LocalListener> {
    if !config.tls.plain() || config.local_bytes_max == 0 {
        return None;
    }
    let context = &config.context;
    LocalListener::open(address, config.local_bytes_max)
        .inspect_err(|error| {
            tracing::warn!(context, %address, %error, "no shared memory: local clients use TCP");
        })
        .ok()
}

/// A connection that has not authenticated.
enum Socket {
    Tcp(TcpStream),
    Local(UnixStream, Arc<Opened>),
}

async fn accept_local(listener: Option<&LocalListener>) -> io::Result<Socket> {
    match listener {
        Some(listener) => Ok(Socket::Local(listener.accept().await?, Arc::clone(&listener.opened))),
        None => std::future::pending().await,
    }
}

/// The open connections.
struct ConnectionTable {
    acceptor: Acceptor,
    /// Handshakes are computed one at a time: unauthenticated peers occupy at most one thread.
    handshakes: PollMutex,
    unauthenticated: Mutex<Unauthenticated<oneshot::Sender<()>>>,
    authenticated: Mutex<Authenticated>,
    connections_max: usize,
    connections_per_address_max: usize,
}

/// A volume has few connections if it has less than this fraction of those of tickets.
const FEW_PARTS: usize = 8;

#[derive(Default)]
struct Authenticated {
    total: usize,
    held_by_volumes: usize,
    by_volume: HashMap<u64, usize>,
    by_address: HashMap<IpAddr, usize>,
}

impl ConnectionTable {
    fn new(config: &ServerConfig, acceptor: Acceptor) -> Self {
        let unauthenticated = Unauthenticated::new(
            config.unauthenticated_max,
            config.unauthenticated_per_address_max,
        );
        Self {
            acceptor,
            handshakes: PollMutex::default(),
            unauthenticated: Mutex::new(unauthenticated),
            authenticated: Mutex::default(),
            connections_max: config.connections_max,
            connections_per_address_max: config.connections_per_address_max,
        }
    }

    fn unauthenticated(&self) -> MutexGuard<'_, Unauthenticated<oneshot::Sender<()>>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn authenticated(&self) -> MutexGuard<'_, Authenticated> {
        self.authenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for an authenticated connection, of a service or with a ticket of a volume, or `None`
    /// if the limit of its address or of the server is reached.
    fn admit(self: &Arc<Self>, address: IpAddr, volume: Option<u64>) -> Option<ConnectionSlot> {
        let mut authenticated = self.authenticated();
        let of_address = authenticated.by_address.get(&address).copied().unwrap_or(0);
        if authenticated.total >= self.connections_max
            || of_address >= self.connections_per_address_max
            || volume.is_some_and(|volume| !self.admits(&authenticated, volume))
        {
            return None;
        }
        authenticated.total += 1;
        if let Some(volume) = volume {
            authenticated.held_by_volumes += 1;
            *authenticated.by_volume.entry(volume).or_default() += 1;
        }
        *authenticated.by_address.entry(address).or_default() += 1;
        Some(ConnectionSlot { table: Arc::clone(self), address, volume })
    }

    /// The last slots for tickets are reserved for volumes with few connections: a volume with many
    /// clients leaves some free.
    fn admits(&self, authenticated: &Authenticated, volume: u64) -> bool {
        let all = volume_limit(self.connections_max);
        let few = (all / FEW_PARTS).max(1);
        let connections_of_volume = authenticated.by_volume.get(&volume).copied().unwrap_or(0);
        authenticated.held_by_volumes < volume_limit(all)
            || authenticated.held_by_volumes < all && connections_of_volume < few
    }
}

/// A slot of an authenticated connection, released when dropped.
struct ConnectionSlot {
    table: Arc<ConnectionTable>,
    address: IpAddr,
    volume: Option<u64>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut authenticated = self.table.authenticated();
        authenticated.total -= 1;
        if let Some(volume) = self.volume {
            authenticated.held_by_volumes -= 1;
            if let Some(of_volume) = authenticated.by_volume.get_mut(&volume) {
                *of_volume -= 1;
                if *of_volume == 0 {
                    authenticated.by_volume.remove(&volume);
                }
            }
        }
        if let Some(of_address) = authenticated.by_address.get_mut(&self.address) {
            *of_address -= 1;
            if *of_address == 0 {
                authenticated.by_address.remove(&self.address);
            }
        }
    }
}

/// Runs one connection from its first byte to its last.
async fn connection<S: Service>(
    shared: Arc<Shared<S>>,
    table: Arc<ConnectionTable>,
    socket: Socket,
    peer: Peer,
    evicted: oneshot::Receiver<()>,
) {
    let (stats, config) = (&shared.stats, &shared.config);
    let context = &config.context;
    let deadline = Deadline::after(config.handshake_timeout);
    let ring = config.keys.current();
    let handshake = async {
        match socket {
            Socket::Tcp(stream) => {
                if let Err(error) = prepare(&stream, config.class) {
                    tracing::debug!(context, address = %peer.address, %error, "socket options");
                }
                table.acceptor.accept(stream, &ring, &config.cluster, context, deadline).await
            }
            Socket::Local(socket, opened) => {
                local::accept(socket, &opened, &ring, &config.cluster, context, deadline)
                    .await
                    .map(Incoming::from)
            }
        }
    };
    let result = tokio::select! {
        result = poll_exclusive(&table.handshakes, handshake) => result,
        // The sender is dropped when another connection evicts this one.
        _ = evicted => return,
    };
    table.unauthenticated().remove(peer.address.ip(), peer.connection);
    let (stream, peer_auth) = match result {
        Ok(Incoming::Authenticated(stream, peer_auth)) => (stream, peer_auth),
        Ok(Incoming::Silent) => {
            stats.silent.fetch_add(1, Relaxed);
            tracing::debug!(context, address = %peer.address, "connection closed unused");
            return;
        }
        Ok(Incoming::NoMemory) => {
            tracing::debug!(context, "no shared memory left: a local client uses TCP");
            return;
        }
        Err(error) => {
            // One line for a wrong key is useful; one per attempt would flood the log.
            let refused = stats.refused.fetch_add(1, Relaxed);
            if refused < 100 || refused.is_multiple_of(1000) {
                tracing::warn!(address = %peer.address, refused, %error, "connection refused");
            }
            return;
        }
    };
    let volume = peer_auth.grant.ticket().map(|ticket| ticket.directory);
    let Some(_slot) = table.admit(peer.address.ip(), volume) else {
        stats.refused.fetch_add(1, Relaxed);
        tracing::warn!(
            context,
            address = %peer.address,
            "too many connections: at most {}, three quarters of them with tickets, and {} of one \
             address",
            config.connections_max,
            config.connections_per_address_max
        );
        return;
    };
    stats.connections.fetch_add(1, Relaxed);
    stats.local_connections.fetch_add(u64::from(matches!(stream, Stream::Local(_))), Relaxed);
    shared.serve(stream, peer, peer_auth).await;
}
