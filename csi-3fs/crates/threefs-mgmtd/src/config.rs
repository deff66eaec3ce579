//! How an mgmtd runs.

use std::path::PathBuf;

use fabric::auth::keys::Keys;
use fabric::tls::ServiceTls;
use threefs_core::ids::TableId;

/// The chain table that bootstrap makes.
pub const FIRST_TABLE: TableId = TableId(1);

/// Everything that an mgmtd is told at its start.
#[derive(Clone, Debug)]
pub struct MgmtdConfig {
    /// `host:port` to listen on.
    pub listen: String,
    /// `host:port` under which others reach it; without one, where it listens.
    pub advertise: Option<String>,
    /// The cluster's keys.
    pub key: Keys,
    /// Whether connections have TLS.
    pub tls: ServiceTls,
    /// Folder of the embedded store.
    pub store_path: PathBuf,
    /// The chains to make when there are none.
    pub bootstrap: Bootstrap,
    /// Whether chains are added and replicas moved by itself when nodes come; else when asked.
    pub rebalance: bool,
    /// Pace and patience.
    pub timers: Timers,
}

/// The first chains of a new cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// Chains are made once so many nodes have registered.
    pub nodes: u32,
    /// Targets of a chain, each on another node.
    pub replicas: u32,
    /// Chains whose first target is on a given node. Each node then holds
    /// `replicas * chains_per_node` targets.
    pub chains_per_node: u32,
}

impl Bootstrap {
    /// What is wrong with it, if anything.
    ///
    /// # Errors
    /// A sentence that names the field and the value.
    pub fn check(&self) -> Result<(), String> {
        let Self { nodes, replicas, chains_per_node } = *self;
        if replicas == 0 || replicas > nodes {
            return Err(format!(
                "replicas is {replicas}: it must be from 1 to the number of storage nodes ({nodes})"
            ));
        }
        if chains_per_node == 0 || nodes.saturating_mul(chains_per_node) > 5_000 {
            return Err(format!(
                "chains_per_node is {chains_per_node}: it must be at least 1, and at most 5000 \
                 chains in all over {nodes} nodes"
            ));
        }
        Ok(())
    }
}

/// All in milliseconds of a monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// T: a node that has been silent for so long is dead. Nodes stop serving after T/2.
    pub node_failure_ms: u64,
    /// A primary that has not renewed for so long may be replaced.
    pub primary_lease_ms: u64,
    /// Between two looks at everything. Heartbeats that change something are acted on at once.
    pub scan_ms: u64,
}

impl Timers {
    /// For one machine: a dead node is noticed within about a second.
    pub fn one_machine() -> Self {
        Self { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 }
    }

    /// For a network of machines.
    pub fn many_machines() -> Self {
        Self { node_failure_ms: 10_000, primary_lease_ms: 15_000, scan_ms: 500 }
    }

    /// What a node is granted with each heartbeat.
    pub fn node_lease_ms(&self) -> u64 {
        self.node_failure_ms / 2
    }
}
