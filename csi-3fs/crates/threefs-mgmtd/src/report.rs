//! Reports for operators: failure domains, and chains that wait after a restore.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ChainId, NodeId, TargetId};
use threefs_core::location::Level;

/// The domain rule of the cluster, and the chains that violate it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DomainReport {
    /// The outermost level at which all replicas of a chain are in different domains; `None`: they
    /// are on different nodes only.
    pub level: Option<Level>,
    /// Why not at an outer level.
    pub reasons: Vec<String>,
    /// Chains with more replicas in a domain than the rule allows; at most
    /// [`DomainReport::VIOLATIONS_MAX`] of them.
    pub violations: Vec<DomainViolation>,
    /// Number of those chains.
    pub violations_total: u32,
    /// Largest share of a failed node's load that one other node gets, relative to an even spread.
    pub failover_share: f64,
}

impl DomainReport {
    /// Maximum number of chains in a report.
    pub const VIOLATIONS_MAX: usize = 100;
}

/// A chain that violates the domain rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainViolation {
    /// The chain.
    pub chain: ChainId,
    /// Its nodes.
    pub nodes: Vec<NodeId>,
}

/// What waits, or is not known, because the store of mgmtd was restored from a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnconfirmedReport {
    /// Chains that no target leads yet.
    pub chains: Vec<UnconfirmedChain>,
    /// Targets that are not in the chain table. Their data is kept and not used.
    pub unknown_targets: Vec<UnknownTarget>,
}

/// A chain that no target leads yet, because it is not known which one has all its data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnconfirmedChain {
    /// The chain.
    pub chain: ChainId,
    /// What is missing.
    pub reason: String,
}

/// A target that joined its chain after the backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownTarget {
    /// The target.
    pub target: TargetId,
    /// Its node.
    pub node: NodeId,
    /// Its chain.
    pub chain: ChainId,
}
