//! Options of connections and calls.

use std::time::Duration;

use crate::auth::credentials::Credentials;
use crate::class::TrafficClass;
use crate::rpc::message::Limits;
use crate::rpc::not_after::NotAfter;

/// Limits and timeouts of a connection.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// Name of the service; both sides sign it (`crate::auth`).
    pub context: String,
    /// The credential: the cluster's key, or a ticket. Also determines whether TLS is required.
    pub credentials: Credentials,
    /// Traffic class of the socket.
    pub class: TrafficClass,
    /// Frame limits in both directions.
    pub limits: Limits,
    /// Maximum calls in flight per class; further calls wait for a slot until their deadline.
    pub calls_in_flight_max: usize,
    /// Timeout of connecting and authenticating.
    pub connect_timeout: Duration,
    /// Timeout of the rest of a reply that has started to arrive, and of a peer that accepts no
    /// bytes.
    pub stall_timeout: Duration,
}

impl ConnectionConfig {
    /// The defaults for a service of this name.
    pub fn new(context: impl Into<String>, credentials: impl Into<Credentials>) -> Self {
        Self {
            context: context.into(),
            credentials: credentials.into(),
            class: TrafficClass::Other,
            limits: Limits::default(),
            calls_in_flight_max: 1024,
            connect_timeout: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(30),
        }
    }
}

/// Options of a call in addition to its bytes and its deadline.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallOptions<'a> {
    /// The server does not start the call once this has expired, even if its frame was delayed.
    pub not_after: Option<&'a NotAfter>,
    /// The server's budget that the call counts against.
    pub class: u8,
    /// Fails the call before its deadline if no frame arrives on the connection for this time. A
    /// server that is busy with other calls of this connection does not trigger it.
    pub idle_timeout: Option<Duration>,
}
