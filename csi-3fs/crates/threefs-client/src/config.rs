//! Client configuration: addresses, credentials, limits and timeouts.

use std::time::Duration;

use fabric::auth::credentials::Credentials;
use fabric::class::TrafficClass;
use fabric::rpc::{ConnectionConfig, PoolConfig};
use rand::TryRngCore;
use threefs_core::ids::ClientId;
use threefs_core::location::Location;

/// Name of the storage service; both sides of a connection sign it.
pub const STORAGE_CONTEXT: &str = threefs_storage::CONTEXT;

/// Timeout factor for a replica that answers other calls, compared with a silent one: retrying does
/// not shorten a queue.
pub(crate) const BUSY_TIMEOUT_FACTOR: u32 = 8;

/// Configuration of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Addresses of mgmtd, each host:port.
    pub mgmtd: Vec<String>,
    /// Addresses of the metadata services, each host:port.
    pub meta: Vec<String>,
    /// Credentials for the services: the cluster's key, or a ticket.
    pub credentials: Credentials,
    /// Whether the client manages volumes: it can read and change reserved attributes, and its
    /// paths do not follow symbolic links.
    pub control_plane: bool,
    /// Zone, rack and host of the client: near replicas are preferred for reads. Default: unknown.
    pub location: Location,
    /// How long an operation may make no progress before it fails with `Unavailable`. A batch of
    /// chunks makes progress whenever one of them completes.
    pub timeout: Duration,
    /// Maximum number of chunk operations in flight, over all operations.
    pub operations_in_flight_max: usize,
    /// Maximum number of payload bytes in flight.
    pub bytes_in_flight_max: usize,
    /// How long a replica may be silent before a read is sent to another one; multiplied by
    /// `BUSY_TIMEOUT_FACTOR` for one that answers other calls. Doubles with each attempt, so a slow
    /// cluster is not overloaded.
    pub read_attempt_timeout: Duration,
    /// As `read_attempt_timeout`, before an update is resent under its tag.
    pub update_attempt_timeout: Duration,
}

impl ClientConfig {
    /// Configuration with default limits.
    pub fn new(mgmtd: Vec<String>, meta: Vec<String>, credentials: impl Into<Credentials>) -> Self {
        Self {
            mgmtd,
            meta,
            credentials: credentials.into(),
            control_plane: false,
            location: Location::default(),
            timeout: Duration::from_secs(30),
            operations_in_flight_max: 64,
            bytes_in_flight_max: 32 << 20,
            read_attempt_timeout: Duration::from_millis(500),
            update_attempt_timeout: Duration::from_secs(5),
        }
    }

    /// Configuration of the connections to storage services.
    pub(crate) fn storage_pool(&self) -> PoolConfig {
        let mut connection = ConnectionConfig::new(STORAGE_CONTEXT, &self.credentials);
        connection.class = TrafficClass::Storage;
        connection.connect_timeout = Duration::from_secs(1);
        PoolConfig {
            connections_max: 2,
            backoff_max: Duration::from_millis(200),
            ..PoolConfig::new(connection)
        }
    }
}

/// Draws the id of a client. From the operating system's generator: forked processes share the
/// state of other generators, and two clients under one id would take each other's updates for
/// retries.
pub(crate) fn draw_client_id() -> ClientId {
    let mut bytes = [0; 16];
    if rand::rngs::OsRng.try_fill_bytes(&mut bytes).is_err() {
        // Without entropy: use time and process id.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |elapsed| elapsed.as_nanos());
        let random = nanoseconds << 64 | u128::from(std::process::id()) << 32;
        return ClientId::with_incarnation(random, 0);
    }
    ClientId::with_incarnation(u128::from_le_bytes(bytes), 0)
}
