//! Configuration of mgmtd.

use fabric::auth::keys::Keys;
use fabric::tls::ServiceTls;
use threefs_core::ids::TableId;
use threefs_kv::StoreConfig;

/// The chain table created at bootstrap.
pub const FIRST_TABLE: TableId = TableId(1);

/// Configuration of an mgmtd.
#[derive(Clone, Debug)]
pub struct MgmtdConfig {
    /// `host:port` to listen on.
    pub listen: String,
    /// `host:port` that others connect to; defaults to the listen address.
    pub advertise: Option<String>,
    /// The cluster keys.
    pub key: Keys,
    /// TLS of connections.
    pub tls: ServiceTls,
    /// The store.
    pub store: StoreConfig,
    /// The initial chains.
    pub bootstrap: Bootstrap,
    /// Whether to add chains and move replicas automatically; otherwise on request only.
    pub rebalance: bool,
    /// Intervals and timeouts.
    pub timers: Timers,
}

/// The initial chains of a new cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// Chains are created once this many storage services have registered a disk.
    pub nodes: u32,
    /// Targets of a chain, each on another node.
    pub replicas: u32,
    /// Chains whose first target is on a given node. Each node then has `replicas *
    /// chains_per_node` targets.
    pub chains_per_node: u32,
}

impl Bootstrap {
    /// Validates the configuration.
    ///
    /// # Errors
    /// A sentence that names the field and the value.
    pub fn check(&self) -> Result<(), String> {
        let Self { nodes, replicas, chains_per_node } = *self;
        if replicas == 0 || replicas > nodes {
            return Err(format!(
                "replicas is {replicas}: must be from 1 to the number of storage nodes ({nodes})"
            ));
        }
        if chains_per_node == 0 || nodes.saturating_mul(chains_per_node) > 5_000 {
            return Err(format!(
                "chains_per_node is {chains_per_node}: must be at least 1, with at most 5000 \
                 chains in total over {nodes} nodes"
            ));
        }
        Ok(())
    }
}

/// Intervals and timeouts, in milliseconds of a monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// T: a node without a heartbeat for this time is dead. Nodes stop serving after T/2.
    pub node_failure_ms: u64,
    /// A primary that has not renewed its lease for this time may be replaced.
    pub primary_lease_ms: u64,
    /// Interval between scans. Heartbeats that change something are handled at once.
    pub scan_ms: u64,
}

impl Timers {
    /// For one machine: a dead node is detected within about a second.
    pub fn one_machine() -> Self {
        Self { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 }
    }

    /// The lease granted with each heartbeat.
    pub fn node_lease_ms(&self) -> u64 {
        self.node_failure_ms / 2
    }
}
