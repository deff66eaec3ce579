//! Bounds, timers and counters of a server.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::budget::Budget;
use crate::auth::keys::Keys;
use crate::class::TrafficClass;
use crate::rpc::frame::Limits;
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
    pub connections_per_address_max: usize,
    /// Connections that have not authenticated; the oldest goes for a newcomer.
    pub unauthenticated_max: usize,
    /// Those of one address.
    pub unauthenticated_per_address_max: usize,
    /// Calls of each class in flight of one connection, and as many offers.
    pub calls_per_connection_max: usize,
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
            connections_per_address_max: 1024,
            unauthenticated_max: 256,
            unauthenticated_per_address_max: 16,
            calls_per_connection_max: 1024,
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
    /// NotAfter calls that came too late.
    pub expired: AtomicU64,
}
