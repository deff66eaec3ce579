//! The listening side: accepts connections, authenticates them, and ends with shutdown. What
//! happens on an authenticated connection is in `serving`.
//!
//! Connections that have not authenticated are in a separate small pool (`strangers`): however
//! many there are, they take no place of a member, and a newcomer is always heard.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::budget::{Budget, Budgets};
use super::channel::{Accepted, Door};
use super::frame::Limits;
use super::places::of_tickets;
use super::serving::Shared;
use super::strangers::Strangers;
use super::turns::{Turns, in_turn};
use super::{Peer, ServerError, Service, Shutdown};
use crate::class::TrafficClass;
use crate::deadline::Deadline;
use crate::keys::Keys;
use crate::tls::Accepts;

/// A peer that does not use its grant, sends nothing of a frame that it began, or takes nothing
/// while others wait for the memory of its replies, is not waited for longer than this.
const GRANT_TIMEOUT: Duration = Duration::from_secs(5);
/// The name of a cluster that was given none.
pub const DEFAULT_CLUSTER: &str = "default";

/// Bounds and timers of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The service's name; both sides sign it (`crate::auth`).
    pub context: String,
    /// The cluster's keys.
    pub keys: Keys,
    /// Whether connections have TLS.
    pub tls: Accepts,
    /// The cluster's name: tickets for another one are refused.
    pub cluster: String,
    /// Marks the sockets.
    pub class: TrafficClass,
    /// Largest frame taken.
    pub limits: Limits,
    /// Authenticated connections at once; more are closed at once. Holders of tickets have at most
    /// three quarters of them, and volumes with many connections three quarters of those.
    pub connections_max: usize,
    /// Authenticated connections of one address.
    pub connections_of_address_max: usize,
    /// Connections that have not authenticated; the oldest goes for a newcomer.
    pub strangers_max: usize,
    /// Those of one address.
    pub strangers_of_address_max: usize,
    /// Calls of each class in flight of one connection, and as many offers.
    pub calls_of_connection_max: usize,
    /// What is let in, by the class of the call.
    pub budgets: Vec<Budget>,
    /// Time to authenticate.
    pub handshake_timeout: Duration,
    /// How often a living connection's key is looked up: one whose key was removed is closed.
    pub key_poll: Duration,
    /// Time without a byte of a frame that was begun, or until a peer takes a byte of a reply.
    pub stall_timeout: Duration,
    /// Time until a grant is used. Its memory is given back then.
    pub grant_timeout: Duration,
    /// As `stall_timeout` for replies, while other calls wait for the memory that they hold.
    pub reply_stall_timeout: Duration,
    /// How long handlers may run on once shutdown is requested.
    pub drain_timeout: Duration,
}

impl ServerConfig {
    /// Usual bounds for a service of this name.
    pub fn new(context: impl Into<String>, keys: impl Into<Keys>) -> Self {
        Self {
            context: context.into(),
            keys: keys.into(),
            tls: Accepts::Plain,
            cluster: DEFAULT_CLUSTER.into(),
            class: TrafficClass::Other,
            limits: Limits::default(),
            connections_max: 4096,
            connections_of_address_max: 1024,
            strangers_max: 256,
            strangers_of_address_max: 16,
            calls_of_connection_max: 1024,
            budgets: vec![Budget::default()],
            handshake_timeout: Duration::from_secs(5),
            key_poll: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(30),
            grant_timeout: GRANT_TIMEOUT,
            reply_stall_timeout: Duration::from_secs(1),
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
    /// Connections that had not authenticated when newer ones took their place.
    pub evicted: AtomicU64,
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
    door: Door,
    stats: Arc<ServerStats>,
}

impl Server {
    /// Takes the port. Nobody is served before [`Server::serve`].
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn bind(address: &str, config: ServerConfig) -> Result<Self, ServerError> {
        let bind = |source| ServerError::Bind {
            context: config.context.clone(),
            address: address.into(),
            source,
        };
        let door = Door::new(config.tls).map_err(|error| ServerError::Tls {
            context: config.context.clone(),
            reason: error.to_string(),
        })?;
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        Ok(Self { config: Arc::new(config), listener, address, door, stats: Arc::default() })
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
        let doors = Arc::new(Doors::new(&self.config, self.door));
        let shared = Arc::new(Shared {
            service,
            budgets: Budgets::new(&self.config.budgets),
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
                Ok((stream, address)) => {
                    number += 1;
                    let peer = Peer { address, connection: number };
                    let (end, evicted) = oneshot::channel();
                    let loser = doors.strangers().enter(address.ip(), number, end);
                    shared.stats.evicted.fetch_add(u64::from(loser.is_some()), Relaxed);
                    // Dropping the loser's sender is what ends it.
                    drop(loser);
                    let (shared, doors) = (Arc::clone(&shared), Arc::clone(&doors));
                    connections.spawn(connection(shared, doors, stream, peer, evicted));
                }
                // Out of descriptors, most likely: wait for some to be given back.
                Err(error) => {
                    tracing::warn!(context = shared.config.context, %error, "accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(self.listener);
        let drained = shared.budgets.drained();
        if tokio::time::timeout(shared.config.drain_timeout, drained).await.is_err() {
            tracing::warn!(context = shared.config.context, "calls were cut off by shutdown");
        }
        connections.shutdown().await;
    }
}

/// Who is connected.
struct Doors {
    door: Door,
    /// Handshakes are computed one at a time: strangers occupy at most one thread.
    turns: Turns,
    strangers: Mutex<Strangers<oneshot::Sender<()>>>,
    members: Mutex<Members>,
    connections_max: usize,
    connections_of_address_max: usize,
}

/// A volume has few connections below one part in so many of those of tickets.
const FEW_PARTS: usize = 8;

#[derive(Default)]
struct Members {
    total: usize,
    of_tickets: usize,
    of_volume: HashMap<u64, usize>,
    of: HashMap<IpAddr, usize>,
}

impl Doors {
    fn new(config: &ServerConfig, door: Door) -> Self {
        let strangers = Strangers::new(config.strangers_max, config.strangers_of_address_max);
        Self {
            door,
            turns: Turns::default(),
            strangers: Mutex::new(strangers),
            members: Mutex::default(),
            connections_max: config.connections_max,
            connections_of_address_max: config.connections_of_address_max,
        }
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers<oneshot::Sender<()>>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for an authenticated connection, of a service or with a ticket of a volume, or `None`
    /// when its address or all places are full.
    fn admit(self: &Arc<Self>, address: IpAddr, volume: Option<u64>) -> Option<Member> {
        let mut members = self.members();
        let of_address = members.of.get(&address).copied().unwrap_or(0);
        if members.total >= self.connections_max
            || of_address >= self.connections_of_address_max
            || volume.is_some_and(|volume| !self.admits(&members, volume))
        {
            return None;
        }
        members.total += 1;
        if let Some(volume) = volume {
            members.of_tickets += 1;
            *members.of_volume.entry(volume).or_default() += 1;
        }
        *members.of.entry(address).or_default() += 1;
        Some(Member { doors: Arc::clone(self), address, volume })
    }

    /// The last places of tickets are for volumes that have few: one with many clients leaves some.
    fn admits(&self, members: &Members, volume: u64) -> bool {
        let all = of_tickets(self.connections_max);
        let few = (all / FEW_PARTS).max(1);
        let held = members.of_volume.get(&volume).copied().unwrap_or(0);
        members.of_tickets < of_tickets(all) || members.of_tickets < all && held < few
    }
}

/// A place of an authenticated connection, given back when it is dropped.
struct Member {
    doors: Arc<Doors>,
    address: IpAddr,
    volume: Option<u64>,
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut members = self.doors.members();
        members.total -= 1;
        if let Some(volume) = self.volume {
            members.of_tickets -= 1;
            if let Some(of_volume) = members.of_volume.get_mut(&volume) {
                *of_volume -= 1;
                if *of_volume == 0 {
                    members.of_volume.remove(&volume);
                }
            }
        }
        if let Some(of_address) = members.of.get_mut(&self.address) {
            *of_address -= 1;
            if *of_address == 0 {
                members.of.remove(&self.address);
            }
        }
    }
}

/// One connection from its first byte to its last.
async fn connection<S: Service>(
    shared: Arc<Shared<S>>,
    doors: Arc<Doors>,
    stream: TcpStream,
    peer: Peer,
    evicted: oneshot::Receiver<()>,
) {
    let (stats, config) = (&shared.stats, &shared.config);
    let context = &config.context;
    let deadline = Deadline::after(config.handshake_timeout);
    if let Err(error) = super::connection::prepare(&stream, config.class) {
        tracing::debug!(context, address = %peer.address, %error, "socket options");
    }
    let ring = config.keys.current();
    let handshake = doors.door.accept(stream, &ring, &config.cluster, context, deadline);
    let accepted = tokio::select! {
        accepted = in_turn(&doors.turns, handshake) => accepted,
        // The sender is dropped when another connection takes this one's place.
        _ = evicted => return,
    };
    doors.strangers().leave(peer.address.ip(), peer.connection);
    let (stream, proved) = match accepted {
        Ok(Accepted::Authenticated(stream, proved)) => (stream, proved),
        Ok(Accepted::Silent) => {
            stats.silent.fetch_add(1, Relaxed);
            tracing::debug!(context, address = %peer.address, "connection closed unused");
            return;
        }
        Err(error) => {
            // One line for a wrong key is useful; a flood of them would fill the log.
            let refused = stats.refused.fetch_add(1, Relaxed);
            if refused < 100 || refused.is_multiple_of(1000) {
                tracing::warn!(address = %peer.address, refused, %error, "connection refused");
            }
            return;
        }
    };
    let volume = proved.grant.ticket().map(|ticket| ticket.directory);
    let Some(_member) = doors.admit(peer.address.ip(), volume) else {
        stats.refused.fetch_add(1, Relaxed);
        tracing::warn!(
            context,
            address = %peer.address,
            "too many connections: at most {}, three quarters of them with tickets, and {} of one \
             address",
            config.connections_max,
            config.connections_of_address_max
        );
        return;
    };
    stats.connections.fetch_add(1, Relaxed);
    shared.serve(stream, peer, proved).await;
}
