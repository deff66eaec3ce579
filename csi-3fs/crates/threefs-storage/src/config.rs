//! Configuration of a storage service.

use std::path::PathBuf;

use serde::Deserialize;
use threefs_core::location::Location;

/// Configuration of one storage service.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageConfig {
    /// Id of this service, which is the node id of its first disk; stable across restarts. At most
    /// 999,999: higher ones are those of further disks.
    pub node_id: u32,
    /// host:port to listen on.
    pub listen: String,
    /// host:port at which other services reach it. Default: `listen`. A name is resolved for every
    /// connection, so a service whose IP address changes keeps its name.
    #[serde(default)]
    pub advertise: Option<String>,
    /// Failure domains of this node, `ZONE/RACK/HOST`; unknown parts are empty. mgmtd places the
    /// replicas of a chain in different ones.
    #[serde(default)]
    pub location: Location,
    /// Addresses of mgmtd.
    pub mgmtd: Vec<String>,
    /// The cluster's key.
    pub key_file: PathBuf,
    /// Whether to use TLS for connections to other services, and require it for incoming ones.
    #[serde(default)]
    pub tls: bool,
    /// Whether to accept connections with and without TLS, while a cluster migrates from one to the
    /// other.
    #[serde(default)]
    pub tls_transition: bool,
    /// Folder of the first disk; each target has a subfolder.
    pub data: PathBuf,
    /// Folders of further disks. With any, each path may have any disk of this service, and one that
    /// is missing does not keep the others from being served.
    #[serde(default)]
    pub disks: Vec<PathBuf>,
    /// Maximum number of bytes that all targets of a disk may hold together; 0 = the size of the disk.
    #[serde(default)]
    pub capacity_bytes: u64,
    /// Memory for requests and replies in flight, over all classes (`admission`). The service's
    /// resident memory stays within 150 MiB of it.
    #[serde(default = "default_memory_bytes")]
    pub memory_bytes: usize,
    /// How long another replica may be silent before a call to it is retried. The timeout of a call
    /// to a replica that answers other calls meanwhile is eight times as long.
    #[serde(default = "default_call_timeout_ms")]
    pub call_timeout_ms: u64,
    /// A store operation that takes longer than this makes its target report itself OFFLINE.
    #[serde(default = "default_store_stall_ms")]
    pub store_stall_ms: u64,
    /// How long a target whose disk became full during a sync stays OFFLINE.
    #[serde(default = "default_full_wait_ms")]
    pub full_wait_ms: u64,
    /// How long a disk that ends waits for mgmtd to redirect its clients; 0 = no wait.
    /// Without the wait, clients notice only when the node is declared dead.
    #[serde(default)]
    pub drain_ms: u64,
    /// Seconds from the start of a scrub of a target to the start of the next; 0 = only on request.
    #[serde(default = "default_scrub_interval_s")]
    pub scrub_interval_s: u64,
    /// Bytes that the scrubs of all targets of a disk read per second at most; a quarter of that
    /// while clients use the disk.
    #[serde(default = "default_scrub_bytes_per_second")]
    pub scrub_bytes_per_second: u64,
}

fn default_scrub_interval_s() -> u64 {
    7 * 24 * 3_600
}

fn default_scrub_bytes_per_second() -> u64 {
    32 << 20
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
