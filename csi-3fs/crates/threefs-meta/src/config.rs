//! How a metadata service runs.

use std::path::PathBuf;

use fabric::auth::keys::Keys;
use fabric::tls::ServiceTls;
use threefs_core::terms::WRITE_LIFETIME_S;

use crate::protocol::LayoutDefaults;

/// Everything that the service is told at its start.
#[derive(Clone, Debug)]
pub struct MetaConfig {
    /// `host:port` to listen on.
    pub listen: String,
    /// The cluster's keys.
    pub key: Keys,
    /// Whether connections have TLS.
    pub tls: ServiceTls,
    /// Folder of the embedded store.
    pub store_path: PathBuf,
    /// The most that the store may ever hold; only address space until it is used.
    pub map_bytes_max: usize,
    /// Addresses of the mgmtds (`host:port`).
    pub mgmtd: Vec<String>,
    /// The tree's settings.
    pub tree: TreeConfig,
}

/// More than the time-out of a client's operation.
pub const DEAD_GRACE_MS: u64 = 31_000;

/// Settings of the tree itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeConfig {
    /// Layout of files whose directory says nothing; no field may be 0.
    pub layout: LayoutDefaults,
    /// How long a removed file can still be read by those who found it before.
    pub gc_delay_ms: u64,
    /// From when nobody can read it any more until its chunks go: longer than a client tries to
    /// write.
    pub dead_grace_ms: u64,
    /// Between two looks at what has been removed.
    pub gc_interval_ms: u64,
    /// Write sessions of a client that has not been heard for so long end.
    pub session_timeout_ms: u64,
    /// From when the length or the reservation of a file became less until the file is counted again:
    /// at least as long as a capability allows writes, and the longest transaction (30 s), the longest
    /// write (31 s) and the largest difference between clocks (20 s) together.
    pub recount_wait_ms: u64,
    /// Answers are kept so long for clients that never say that they got them.
    pub answer_keep_ms: u64,
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
        }
    }
}
