//! Report of moves: those in progress, and why others wait.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ChainId, NodeId};

/// Moves of replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    /// Nodes that are drained.
    pub leaving: Vec<NodeId>,
    /// Replicas being moved.
    pub under_way: Vec<MoveStatus>,
    /// Planned moves that do not start now, at most [`MoveReport::WAITING_MAX`] of them; empty if
    /// the plan was not requested.
    pub waiting: Vec<WaitingMove>,
    /// Number of those moves.
    pub waiting_total: u32,
}

impl MoveReport {
    /// Maximum number of waiting moves in a report.
    pub const WAITING_MAX: usize = 100;
}

/// A replica that is being moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStatus {
    /// Its chain.
    pub chain: ChainId,
    /// Its node.
    pub from: NodeId,
    /// The destination node.
    pub to: NodeId,
    /// Bytes of the replica on the destination.
    pub copied_bytes: u64,
    /// Why it makes no progress; `None` = it does.
    pub stalled: Option<Wait>,
}

/// A planned move that does not start now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingMove {
    /// The chain.
    pub chain: ChainId,
    /// The node of the replica.
    pub from: NodeId,
    /// The destination node; `None` if no node may receive it.
    pub to: Option<NodeId>,
    /// What it waits for.
    pub wait: Wait,
}

/// What a move waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The kind of cause.
    pub cause: WaitCause,
    /// The cause, with a remedy if there is one.
    pub detail: String,
}

impl Wait {
    pub(crate) fn new(cause: WaitCause, detail: impl Into<String>) -> Self {
        Self { cause, detail: detail.into() }
    }
}

/// Causes of waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitCause {
    /// The destination node is dead.
    DeadNode,
    /// The destination cannot store the data.
    Disk,
    /// Another replica of the chain does not serve.
    Replica,
    /// No other node may receive the replica.
    NoPlace,
    /// The capacity of a node is unknown.
    Capacity,
    /// The limit of the bytes per second.
    Rate,
    /// As many replicas as allowed are being moved.
    Others,
    /// Another move of the chain comes first.
    Order,
    /// mgmtd balances on request only.
    Request,
}
