//! Cluster manager: failure detection, chains and target states.
//!
//! One mgmtd is the primary: it holds a lease row with a fencing epoch, and every transaction that
//! changes anything validates that row. Heartbeats are in memory, decisions in the store; a
//! decision is published only after it is durable. The rules of chains are
//! `threefs_core::chain::advance`.

mod changes;
mod client;
mod config;
mod domains;
mod drain_change;
mod drains;
mod fences;
mod growth;
mod heartbeat;
mod hold;
mod manager;
mod meta_services;
mod model;
mod move_report;
mod ops;
mod ownership;
mod pace;
mod placement;
pub mod protocol;
mod refusal;
mod registration;
mod report;
mod restore;
mod rows;
mod service;
mod starts;
mod takeover;
mod term;
mod view;

pub use client::{
    HeartbeatResult, Heartbeats, MgmtdClient, MgmtdClientError, NodeReport, RoutingFollower,
};
pub use config::{Bootstrap, FIRST_TABLE, MgmtdConfig, Timers};
pub use drain_change::DrainChange;
pub use manager::Manager;
pub use model::Model;
pub use move_report::{MoveReport, MoveStatus, Wait, WaitCause, WaitingMove};
pub use ownership::owner;
pub use placement::PlannedMove;
pub use protocol::{
    Claim, ClusterStatus, ForeignStore, MetaRegistered, MetaRegistration, MgmtdError, MgmtdReply,
    MgmtdRequest, MgmtdResult, NodeStatus, Promotion, RebalancePlan,
};
pub use report::{
    DomainReport, DomainViolation, UnconfirmedChain, UnconfirmedReport, UnknownTarget,
};
pub use restore::{DUMP_KIND, restore};
pub use rows::CLUSTER as CLUSTER_ROW;
pub use service::{Mgmtd, MgmtdRunError, run};
pub use takeover::{LeaseState, LeaseWatch};
pub use threefs_kv::StoreConfig;
