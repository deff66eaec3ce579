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
    /// T: a node without a heartbeat for this time is dead. Nodes stop serving before.
    pub node_failure_ms: u64,
    /// A primary answers for this time after its last renewal, also while the store is unavailable.
    pub primary_lease_ms: u64,
    /// Interval between scans. Heartbeats that change something are handled at once.
    pub scan_ms: u64,
}

impl Timers {
    /// For one machine: a dead node is detected within about a second.
    pub fn one_machine() -> Self {
        Self { node_failure_ms: 1000, primary_lease_ms: 3000, scan_ms: 50 }
    }

    /// The lease granted with each heartbeat, 3/4 T: it ends before the node is declared dead if the
    /// rates of the two clocks differ by less than a third.
    #[must_use]
    pub fn node_lease_ms(&self) -> u64 {
        self.node_failure_ms.saturating_mul(3) / 4
    }

    /// A contender takes over from a primary that has not renewed its lease for this time, 0.3 T: then a
    /// node still has more than a third of its lease.
    #[must_use]
    pub fn takeover_ms(&self) -> u64 {
        (self.node_failure_ms.saturating_mul(3) / 10).min(self.primary_lease_ms)
    }

    /// Interval between renewals if another process can take over.
    #[must_use]
    pub fn renewal_ms(&self) -> u64 {
        self.takeover_ms() / 4
    }

    /// Time after a takeover after which all leases that a former primary granted have ended: it may have
    /// renewed just before the takeover, and answers for `primary_lease_ms` since then by its clock; the
    /// leases that it grants end within T. A quarter more is for the rates of the two clocks.
    #[must_use]
    pub fn settles_ms(&self) -> u64 {
        let answers_ms = self.primary_lease_ms.saturating_add(self.primary_lease_ms / 4);
        answers_ms.saturating_add(self.node_failure_ms)
    }
}
