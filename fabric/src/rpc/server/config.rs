//! Limits, timeouts and counters of a server.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::budget::Budget;
use crate::auth::keys::Keys;
use crate::class::TrafficClass;
use crate::rpc::message::Limits;
use crate::tls::Accepts;

/// Timeout for a peer that does not use its grant, that stops in the middle of a frame, or that
/// accepts no bytes while other calls wait for the memory of its replies.
const GRANT_TIMEOUT: Duration = Duration::from_secs(5);
/// Default of `local_bytes_max`: 63 connections.
const LOCAL_BYTES_MAX: usize = 64 << 20;
/// Default name of a cluster.
pub const DEFAULT_CLUSTER: &str = "default";

/// Limits and timeouts of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Name of the service; both sides sign it (`crate::auth`).
    pub context: String,
    /// The cluster's keys.
    pub keys: Keys,
    /// Whether connections use TLS.
    pub tls: Accepts,
    /// Name of the cluster: tickets for another cluster are refused.
    pub cluster: String,
    /// Traffic class of the sockets.
    pub class: TrafficClass,
    /// Frame limits.
    pub limits: Limits,
    /// Maximum number of authenticated connections; further ones are closed immediately. Holders of
    /// tickets have at most three quarters of them, and volumes with many connections three
    /// quarters of those.
    pub connections_max: usize,
    /// Maximum number of authenticated connections per address.
    pub connections_per_address_max: usize,
    /// Maximum number of unauthenticated connections; a new one evicts the oldest.
    pub unauthenticated_max: usize,
    /// Maximum number of unauthenticated connections per address.
    pub unauthenticated_per_address_max: usize,
    /// Memory shared with clients on this machine, for their connections. A user's processes get at
    /// most half of it. A client without shared memory uses TCP.
    pub local_bytes_max: usize,
    /// Maximum calls of each class in flight per connection, and maximum pending offers.
    pub calls_per_connection_max: usize,
    /// Admission budgets, by the class of the call.
    pub budgets: Vec<Budget>,
    /// Timeout of authentication.
    pub handshake_timeout: Duration,
    /// Interval at which the key of an open connection is looked up: a connection whose key was
    /// removed is closed.
    pub key_poll: Duration,
    /// Maximum time between bytes of a frame that has started, and until a peer accepts a byte of a
    /// reply.
    pub stall_timeout: Duration,
    /// Time until a grant must be used. Then its memory is released.
    pub grant_timeout: Duration,
    /// As `stall_timeout` for replies, while other calls wait for the memory that they hold.
    pub reply_stall_timeout: Duration,
    /// Time that running handlers have to complete after shutdown is requested.
    pub drain_timeout: Duration,
}

impl ServerConfig {
    /// The defaults for a service of this name.
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
            local_bytes_max: LOCAL_BYTES_MAX,
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

/// Counters of a server, for tests and metrics.
#[derive(Debug, Default)]
pub struct ServerStats {
    /// Authenticated connections.
    pub connections: AtomicU64,
    /// Those of them that use shared memory; the others use TCP.
    pub local_connections: AtomicU64,
    /// Connections that failed authentication or exceeded a limit.
    pub refused: AtomicU64,
    /// Unauthenticated connections that were evicted by newer ones.
    pub evicted: AtomicU64,
    /// Connections that the peer closed before its first byte, as port probes do.
    pub silent: AtomicU64,
    /// Connections that were closed because of invalid or stalled frames.
    pub broken: AtomicU64,
    /// Calls passed to the service.
    pub calls: AtomicU64,
    /// Calls refused because a budget was exhausted.
    pub overloaded: AtomicU64,
    /// Guarded calls that arrived too late.
    pub expired: AtomicU64,
}
