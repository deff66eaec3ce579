//! The cluster manager: who is alive, which chains there are and in which state their targets are.
//!
//! One mgmtd is the primary: it holds a lease row with a fencing epoch, and every transaction that
//! changes anything re-validates that row inside itself. Heartbeats live in memory, decisions in
//! the store; a decision is published only after it is durable. The rules of chains are
//! `threefs_core::chain::advance`; nothing here knows better.

mod client;
mod config;
mod growth;
mod heartbeat;
mod manager;
mod model;
mod ops;
mod placement;
pub mod protocol;
mod rebalance;
mod registration;
mod rows;
mod service;
mod view;

pub use client::{MgmtdClient, MgmtdClientError, RoutingFollower};
pub use config::{Bootstrap, FIRST_TABLE, MgmtdConfig, Timers};
pub use manager::Manager;
pub use model::Model;
pub use protocol::{
    ClusterStatus, ForeignStore, MgmtdError, MgmtdReply, MgmtdRequest, MgmtdResult, NodeStatus,
    Promotion, RebalancePlan,
};
pub use rebalance::PlannedMove;
pub use registration::{Claim, MetaRegistered, MetaRegistration};
pub use service::{Mgmtd, MgmtdRunError, run};
