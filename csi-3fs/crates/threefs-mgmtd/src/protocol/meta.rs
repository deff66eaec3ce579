//! Registration of the store of a metadata service.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClusterId, TreeId};

/// Registration request of a metadata service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaRegistration {
    /// The tree in the store.
    pub tree: TreeId,
    /// Number of times the store was opened, made durable before the registration: a copy of an
    /// earlier state has a lower number.
    pub generation: u64,
    /// Id of the process, to recognize a repeated request.
    pub process: u128,
    /// The cluster of the last registration.
    pub cluster: Option<ClusterId>,
    /// Why this store may differ from the registered one.
    pub claim: Claim,
}

/// Why a metadata store may differ from the registered one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// It does not differ.
    #[default]
    Continues,
    /// An operator has restored it from a dump of the registered tree.
    Restored,
    /// An operator has decided that it replaces the registered one, whatever its content.
    Adopted,
}

/// Reply to an accepted registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaRegistered {
    /// This cluster.
    pub cluster: ClusterId,
    /// The new generation of the store.
    pub generation: u64,
    /// Number of stores adopted so far. Each adopted store allocates inodes in a separate range,
    /// because the numbers used by the replaced one are unknown.
    pub adoptions: u32,
}
