//! Where the cluster is, and how much a client asks of it at once.

use std::time::Duration;

use fabric::auth::credentials::Credentials;
use fabric::class::TrafficClass;
use fabric::rpc::{ConnectionConfig, PoolConfig};
use rand::TryRngCore;
use threefs_core::ids::ClientId;

/// Name of the storage service; both sides of a connection sign it.
pub const STORAGE_CONTEXT: &str = threefs_storage::CONTEXT;

/// A replica that answers other calls is waited for so many times as long as a silent one: a queue
/// gets no shorter when those who wait in it leave and come back.
pub(crate) const BUSY_PATIENCE: u32 = 8;

/// How a client lives.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Addresses of mgmtd, each host:port.
    pub mgmtd: Vec<String>,
    /// Address of the metadata service.
    pub meta: String,
    /// What is proved to the services: the cluster's key, or a ticket.
    pub credentials: Credentials,
    /// Whether it manages volumes: it sees and changes reserved attributes, and its paths lead
    /// through no symbolic link.
    pub control_plane: bool,
    /// How long an operation may make no progress before it fails with `Unavailable`. A batch of
    /// chunks makes progress whenever one of them ends.
    pub timeout: Duration,
    /// Chunk operations in flight at most, over all operations.
    pub operations_in_flight_max: usize,
    /// Payload bytes in flight at most.
    pub bytes_in_flight_max: usize,
    /// How long a replica may be silent before a read is asked of another one; one that answers
    /// other calls meanwhile is waited for `BUSY_PATIENCE` times as long. It doubles with each
    /// attempt, so a slow cluster is not asked to death.
    pub read_attempt_timeout: Duration,
    /// As `read_attempt_timeout`, before an update is sent again under its tag.
    pub update_attempt_timeout: Duration,
}

impl ClientConfig {
    /// Usual bounds.
    pub fn new(mgmtd: Vec<String>, meta: String, credentials: impl Into<Credentials>) -> Self {
        Self {
            mgmtd,
            meta,
            credentials: credentials.into(),
            control_plane: false,
            timeout: Duration::from_secs(30),
            operations_in_flight_max: 64,
            bytes_in_flight_max: 32 << 20,
            read_attempt_timeout: Duration::from_millis(500),
            update_attempt_timeout: Duration::from_secs(5),
        }
    }

    /// How storage services are connected to.
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

/// One life of a client. From the system's generator: processes that were forked from one another
/// share the state of any other generator, and two lives under one id would take each other's
/// updates for retries.
pub(crate) fn draw_client_id() -> ClientId {
    let mut bytes = [0; 16];
    if rand::rngs::OsRng.try_fill_bytes(&mut bytes).is_err() {
        // A system without entropy: time and process are the best that is left.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |elapsed| elapsed.as_nanos());
        let random = nanoseconds << 64 | u128::from(std::process::id()) << 32;
        return ClientId::with_incarnation(random, 0);
    }
    ClientId::with_incarnation(u128::from_le_bytes(bytes), 0)
}
