//! The storage service: chunk replicas behind a port.
//!
//! Everything that decides is `threefs_core::replica`; here are its clock, sockets and threads.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | where it listens, where its data is, its timers |
//! | `access` | which requests a volume's credential may make |
//! | [`admission`] | how memory is divided between classes of requests |
//! | `target` | one replica, its store, its timer: events in, actions carried out |
//! | `workers` | the threads of one target |
//! | `peers` | calls to the storage services of other nodes |
//! | `node` | all targets of this node: routing, lease, requests by target |
//! | `identity` | the cluster that the data folder belongs to |
//! | `heartbeat` | the conversation with mgmtd |
//! | [`service`] | the port, and the life of the whole |
//!
//! Absent on purpose: any rule of replication, and any wait without an end.

mod access;
pub mod admission;
pub mod config;
mod heartbeat;
mod identity;
mod node;
mod peers;
pub mod service;
mod store;
mod target;
mod workers;

pub use config::StorageConfig;
pub use service::{StorageServiceError, run};

/// Name of the service; both sides of a connection sign it.
pub const CONTEXT: &str = "threefs/storage";
