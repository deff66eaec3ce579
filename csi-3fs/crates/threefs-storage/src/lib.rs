//! Storage service: the chunk replicas of its disks, served over RPC.
//!
//! All replication decisions are made by `threefs_core::replica`; this crate provides its clock,
//! sockets and threads. It has no replication rules and no unbounded waits.
//! `docs/internals/write-path.md` follows a write through these modules.
//!
//! | module | content |
//! |---|---|
//! | [`config`] | configuration |
//! | [`service`] | startup and shutdown |
//! | `error` | errors that end it |
//! | `port` | RPC port: access control, memory for replies, the target of a request |
//! | [`admission`] | memory budgets by class of request |
//! | `disks` | which disks are served: each is a node of mgmtd |
//! | `watcher` | threads that look at the paths of the disks |
//! | `found` | what is found at a path; the identity of a disk |
//! | `disk` | one disk: opened, served, closed |
//! | `nodes` | the nodes that are served |
//! | `node` | targets of a disk: lifecycle, routing, lease |
//! | `target` | one replica, its store and timer: events in, actions executed |
//! | `flushes` | flushes of small updates, of all targets of a disk |
//! | `workers` | threads of one target |
//! | `context` | clock, peers and routing shared by the targets of a disk |
//! | `scrub` | state of a target's scrub |
//! | `scrubber` | verification and repair of stored chunks |
//! | `peers` | calls to the storage services of other nodes |
//! | `store` | space of a disk, and its stores |
//! | `identity` | incarnation, and cluster of the data folder |
//! | `heartbeat` | heartbeats to mgmtd, leases and routing from it |

pub mod admission;
pub mod config;
mod context;
mod disk;
mod disks;
mod error;
mod flushes;
mod found;
mod heartbeat;
mod identity;
mod load;
mod membership;
mod node;
mod nodes;
mod peers;
mod port;
mod scrub;
mod scrubber;
pub mod service;
mod store;
mod target;
mod watcher;
mod workers;

pub use config::StorageConfig;
pub use error::StorageServiceError;
pub use service::run;

/// Name of the service; both sides of a connection sign it.
pub const CONTEXT: &str = "threefs/storage";
