//! Configuration of a metadata service.

use fabric::auth::keys::Keys;
use fabric::tls::ServiceTls;
use threefs_core::terms::WRITE_LIFETIME_S;
use threefs_kv::StoreConfig;

use crate::protocol::LayoutDefaults;

/// Configuration of the service.
#[derive(Clone, Debug)]
pub struct MetaConfig {
    /// `host:port` to listen on.
    pub listen: String,
    /// The cluster keys.
    pub key: Keys,
    /// TLS of connections.
    pub tls: ServiceTls,
    /// The store.
    pub store: StoreConfig,
    /// Addresses of the mgmtds (`host:port`).
    pub mgmtd: Vec<String>,
    /// The tree's settings.
    pub tree: TreeConfig,
}

/// Longer than the timeout of a client's operation.
pub const DEAD_GRACE_MS: u64 = 31_000;

/// Settings of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeConfig {
    /// Default layout of files; no field may be 0.
    pub layout: LayoutDefaults,
    /// How long clients that have looked up a file can still read it after its removal.
    pub gc_delay_ms: u64,
    /// Time from marking a file dead to dropping its chunks: longer than a client retries a write.
    pub dead_grace_ms: u64,
    /// Interval between garbage collection passes.
    pub gc_interval_ms: u64,
    /// Write sessions of a client end after this time without activity.
    pub session_timeout_ms: u64,
    /// Time from a decrease of a file's length or reservation to its recount: at least the write
    /// lifetime of a capability plus the longest transaction (30 s), the longest write (31 s) and
    /// the largest clock difference (20 s).
    pub recount_wait_ms: u64,
    /// How long answers are kept for clients that do not acknowledge them.
    pub answer_keep_ms: u64,
    /// Lock sessions of clients end after this time without renewal. Clients rely on a renewal for
    /// two thirds of it.
    pub lock_lease_ms: u64,
    /// A service over a shared store that has not renewed its row for this time is gone.
    pub service_lease_ms: u64,
}

impl Default for TreeConfig {
    fn default() -> Self {
        Self {
            layout: LayoutDefaults { chunk_bytes: 1 << 20, stripe: 16 },
            gc_delay_ms: 10_000,
            dead_grace_ms: DEAD_GRACE_MS,
            gc_interval_ms: 500,
            session_timeout_ms: 20 * 60 * 1000,
            recount_wait_ms: (WRITE_LIFETIME_S + 90) * 1000,
            answer_keep_ms: 60 * 60 * 1000,
            lock_lease_ms: 30_000,
            service_lease_ms: 10_000,
        }
    }
}
