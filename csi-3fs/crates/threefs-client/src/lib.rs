//! The native client of 3FS: routing, exactly-once chunk updates, batches, files by path.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | addresses, key, bounds |
//! | [`error`] | what can go wrong, with who did not answer |
//! | `routing` | the newest routing, kept by one long poll |
//! | `channels` | tags that make updates exactly-once |
//! | `chunks` | one read or update of one chunk, over any number of attempts |
//! | `batch` | many of them, within bounds |
//! | `patience` | deadlines that count from the last progress |
//! | `capabilities` | what a client with a ticket shows the storage services |
//! | `metadata` | calls of the metadata service, each executed once |
//! | `files` | paths, lengths, batches of (path, offset, bytes) |
//! | `volumes` | quotas, attributes, owners |
//! | `claims` | which node may use a directory |
//! | `inodes` | files by their inodes, for a mount |
//! | `absent` | chunks that do not exist: holes, removed files, lost data |
//! | `holes` | punching holes |
//! | `breaker` | chains that background work leaves alone |
//! | `trim` | cutting and removing chunks, for the metadata service |
//! | [`status`] | the cluster as one value, for people and for JSON |
//!
//! Every operation ends when it has made no progress for the client's timeout. A retry is always the same request under the
//! same tag or id, so nothing is ever executed twice.

mod absent;
mod batch;
mod breaker;
mod capabilities;
mod channels;
mod chunks;
mod claims;
pub mod config;
pub mod error;
mod files;
mod holes;
mod inodes;
mod metadata;
mod patience;
mod peers;
mod ranges;
mod routing;
pub mod status;
mod trim;
mod volumes;

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
pub use files::{FileHandle, ReadPlan, ReadRange, WriteRange};
pub use volumes::Space;

use batch::Window;
use breaker::Breakers;
use channels::Channels;
use metadata::Metadata;
use peers::Peers;
use routing::Routing;

/// A client of one cluster. Clones share everything. Must live inside a tokio runtime.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    id: ClientId,
    config: ClientConfig,
    routing: Routing,
    /// What every change and update needs.
    lease: Lease,
    metadata: Arc<Metadata>,
    /// For claims: they are what gives the right.
    claims: Metadata,
    channels: Channels,
    peers: Peers,
    window: Window,
    /// For removals in the background.
    breakers: Mutex<Breakers>,
    /// Spreads reads over replicas.
    read_turn: AtomicUsize,
}

impl Client {
    /// Nothing is sent yet but the first question for routing, in the background.
    pub fn start(config: ClientConfig) -> Self {
        let id = config::draw_client_id();
        let lease = Lease::default();
        let identity = if config.control_plane { Identity::CONTROL_PLANE } else { Identity::ROOT };
        Self(Arc::new(Inner {
            id,
            routing: Routing::follow(&config),
            metadata: Arc::new(Metadata::new(&config, id, lease.clone(), identity)),
            // Under an id of its own: each counts its changes by itself.
            claims: Metadata::new(
                &config,
                config::draw_client_id(),
                Lease::default(),
                Identity::CONTROL_PLANE,
            ),
            lease,
            channels: Channels::new(id),
            peers: Peers::new(&config),
            window: Window::new(config.operations_in_flight_max, config.bytes_in_flight_max),
            breakers: Mutex::default(),
            read_turn: AtomicUsize::new(0),
            config,
        }))
    }

    /// The right that all changes and updates of this client need, but claims. Open until somebody
    /// says something else.
    pub fn lease(&self) -> &Lease {
        &self.0.lease
    }

    /// The deadline of an operation that begins now.
    fn deadline(&self) -> Deadline {
        Deadline::after(self.0.config.timeout)
    }
}

#[cfg(test)]
mod cluster_test;
#[cfg(test)]
mod credential_test;
#[cfg(test)]
mod recount_test;
