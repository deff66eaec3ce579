//! Native client of 3FS: routing, exactly-once chunk updates, batches, files by path.
//!
//! | module | content |
//! |---|---|
//! | [`config`] | addresses, credentials, limits, timeouts |
//! | [`error`] | errors, with the service that did not answer |
//! | `routing` | the chunks of a file and the heads of chains, kept by one long poll |
//! | `files` | paths and names |
//! | `write`, `read` | file ranges; quota reservations and length reports of writes |
//! | `gather` | small reads that are started at the same time |
//! | `read_batch` | small reads that share requests |
//! | `window` | limits of chunk operations: number, bytes, time without progress |
//! | `update` | exactly-once updates of a chunk |
//! | `storage` | calls of storage services: connections, one attempt, pauses |
//! | `absent` | absent chunks: holes, removed files, lost data |
//! | `holes` | hole punching |
//! | `capabilities` | capabilities that a client with a ticket presents |
//! | `metadata` | calls of the metadata service, each executed once |
//! | `volumes` | quotas, attributes, owners |
//! | `claims` | exclusive use of a directory |
//! | `inodes` | operations by inode, for a mount |
//! | `copy` | copies of trees by inode |
//! | `breaker` | chains that background work skips |
//! | `trim` | truncation and removal of chunks, for the metadata service |
//! | [`status`] | cluster status |
//! | [`scrub`] | scrubs of all targets |
//! | [`audit`] | chunks against the tree: leaked and missing ones |
//! | `repair` | corrections of counters of the metadata |
//! | [`usage`] | load of all services by their callers |
//!
//! `docs/internals/write-path.md` follows a write through these modules and the services.
//!
//! An operation fails once it has made no progress for the client's timeout. A retry is always the
//! same request under the same tag or id, so nothing is executed twice.

mod absent;
pub mod audit;
mod breaker;
mod capabilities;
mod claims;
pub mod config;
mod copy;
pub mod error;
mod files;
mod gather;
mod holes;
mod inodes;
mod metadata;
mod near;
mod places;
mod read;
mod read_batch;
mod repair;
mod routing;
pub mod scrub;
mod snapshots;
pub mod status;
mod storage;
mod trash;
mod trim;
mod update;
pub mod usage;
mod volumes;
mod window;
mod write;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

pub use fabric::boot_instant::BootInstant;
use fabric::deadline::Deadline;
pub use fabric::rpc::Lease;
use threefs_core::ids::ClientId;
use threefs_meta::Identity;

pub use claims::{Claim, Renewal};
pub use config::ClientConfig;
pub use error::ClientError;
pub use files::FileHandle;
pub use near::ReadBytes;
pub use read::{ReadPlan, ReadRange};
pub use read_batch::ReadBatch;
pub use trash::TrashPage;
pub use volumes::Space;
pub use write::WriteRange;

use breaker::Breakers;
use gather::Gather;
use metadata::Metadata;
use near::Near;
use read_batch::Batches;
use routing::Routing;
use storage::Peers;
use update::Channels;
use usage::UsageConnections;
use window::Window;

/// A replica is slow if a read takes longer than this fraction of the time after which it is sent to
/// another one.
const SLOW_PARTS: u32 = 4;

/// A client of one cluster, and the lease that its changes and updates require. Clones share all
/// state. Must be used inside a tokio runtime.
#[derive(Clone)]
pub struct Client(Arc<Inner>, Lease);

struct Inner {
    id: ClientId,
    config: ClientConfig,
    routing: Routing,
    metadata: Arc<Metadata>,
    /// For claims, which grant the lease and so do not require it.
    claims: Metadata,
    channels: Channels,
    peers: Peers,
    window: Window,
    /// For background removals.
    breakers: Mutex<Breakers>,
    /// Spreads reads over replicas.
    read_turn: AtomicUsize,
    near: Near,
    batches: Batches,
    gather: Gather,
    usage: UsageConnections,
}

impl Client {
    /// Starts a client, which requests the routing in the background.
    pub fn start(config: ClientConfig) -> Self {
        let id = config::draw_client_id();
        let lease = Lease::default();
        let identity = if config.control_plane { Identity::CONTROL_PLANE } else { Identity::ROOT };
        let inner = Inner {
            id,
            routing: Routing::follow(&config),
            metadata: Arc::new(Metadata::new(&config, id, lease.clone(), identity)),
            // Under a separate client id, because each counts its changes separately.
            claims: Metadata::new(
                &config,
                config::draw_client_id(),
                Lease::default(),
                Identity::CONTROL_PLANE,
            ),
            channels: Channels::new(id),
            peers: Peers::new(&config),
            window: Window::new(config.operations_in_flight_max, config.bytes_in_flight_max),
            breakers: Mutex::default(),
            read_turn: AtomicUsize::new(0),
            near: Near::new(config.location.clone(), config.read_attempt_timeout / SLOW_PARTS),
            batches: Batches::default(),
            gather: Gather::default(),
            usage: UsageConnections::new(&config),
            config,
        };
        Self(Arc::new(inner), lease)
    }

    /// Bytes read so far, by the distance of the replica.
    pub fn read_bytes(&self) -> ReadBytes {
        self.0.near.read_bytes()
    }

    /// The lease that all changes and updates of this client require, except claims. Held until it
    /// is revoked or given an end.
    pub fn lease(&self) -> &Lease {
        &self.1
    }

    /// The same client, whose updates of chunks and changes, except claims, require another lease.
    pub fn under(&self, lease: &Lease) -> Self {
        Self(Arc::clone(&self.0), lease.clone())
    }

    /// Deadline of an operation that starts now.
    fn deadline(&self) -> Deadline {
        Deadline::after(self.0.config.timeout)
    }
}

#[cfg(test)]
mod audit_test;
#[cfg(test)]
mod cluster_test;
#[cfg(test)]
mod credential_test;
#[cfg(test)]
mod fence_test;
#[cfg(test)]
mod read_batch_test;
#[cfg(test)]
mod recount_test;
#[cfg(test)]
mod trim_test;
