//! Where a storage service listens, where its data is, and its timers.

use std::path::PathBuf;

use serde::Deserialize;

/// Configuration of one storage service.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageConfig {
    /// This node; the same over restarts.
    pub node_id: u32,
    /// host:port to listen on.
    pub listen: String,
    /// host:port under which others reach it; without one, where it listens. A name is resolved at
    /// every connection, so a service whose IP address changes keeps its name.
    #[serde(default)]
    pub advertise: Option<String>,
    /// Addresses of mgmtd.
    pub mgmtd: Vec<String>,
    /// The cluster's key.
    pub key_file: PathBuf,
    /// Connect to other services with TLS, and require it of those that connect.
    #[serde(default)]
    pub tls: bool,
    /// Accept connections with and without TLS, while a cluster changes from one to the other.
    #[serde(default)]
    pub tls_transition: bool,
    /// Folder of the targets; each has a folder of its own in it.
    pub data: PathBuf,
    /// Bytes that all targets may hold together; 0 = what their disk has.
    #[serde(default)]
    pub capacity_bytes: u64,
    /// Memory for requests and replies in flight, over all classes (`admission`). The service's
    /// resident memory stays within 150 MiB of it.
    #[serde(default = "default_memory_bytes")]
    pub memory_bytes: usize,
    /// How long another replica may be silent before a call to it is made again. A call to a
    /// replica that answers other calls meanwhile is waited for eight times as long.
    #[serde(default = "default_call_timeout_ms")]
    pub call_timeout_ms: u64,
    /// A store operation that takes longer makes its target report itself OFFLINE.
    #[serde(default = "default_store_stall_ms")]
    pub store_stall_ms: u64,
    /// How long a target that ran full while it was synced stays away.
    #[serde(default = "default_full_wait_ms")]
    pub full_wait_ms: u64,
    /// How long a node that is asked to end waits for mgmtd to send its clients elsewhere; 0 =
    /// not at all. Without it they find out after the silence that makes a node dead.
    #[serde(default)]
    pub drain_ms: u64,
}

fn default_memory_bytes() -> usize {
    448 << 20
}

fn default_call_timeout_ms() -> u64 {
    2_000
}

fn default_store_stall_ms() -> u64 {
    10_000
}

fn default_full_wait_ms() -> u64 {
    5_000
}
