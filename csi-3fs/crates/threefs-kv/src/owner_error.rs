//! Why a service refuses a store.

use crate::owner_row::{Fingerprint, Fingerprints};

/// The store of another cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// None of the keys of this service owns it.
    #[error(
        "the store at `{store}`{cluster} is owned by the key {owners}, and this service has the key \
         {ours} (fingerprints): give every cluster its own --etcd-prefix or --data. If the key of this \
         cluster was replaced while its services were stopped, run `threefs {service} rekey --yes`",
        cluster = of_cluster(*.cluster),
        owners = Fingerprint::list(owners),
        ours = Fingerprint::list(ours)
    )]
    OtherKey {
        /// The store's folder or address.
        store: String,
        /// `mgmtd` or `meta`.
        service: &'static str,
        /// The cluster that has written it, if it is known.
        cluster: Option<u128>,
        /// Fingerprints of its owner's keys.
        owners: Fingerprints,
        /// Fingerprints of this service's keys.
        ours: Fingerprints,
    },
    /// The store has no owner, because an earlier version wrote it, and is of another cluster.
    #[error(
        "the store at `{store}`{cluster} was written by an earlier version, which recorded no owner, \
         and {peer} belongs to cluster-{peer_cluster:032x}: give every cluster its own --etcd-prefix or \
         --data. If the store belongs to this cluster, run `threefs {service} rekey --yes`",
        cluster = of_cluster(Some(*.cluster))
    )]
    OtherCluster {
        /// The store's folder or address.
        store: String,
        /// `mgmtd` or `meta`.
        service: &'static str,
        /// The cluster of the store.
        cluster: u128,
        /// A service with this service's key.
        peer: String,
        /// The cluster of that service.
        peer_cluster: u128,
    },
    /// The row of the owner is invalid.
    #[error(
        "the store at `{store}` has an invalid row OWNR, which names its owner: {detail}. Use the \
         version that wrote it, or load a backup; if the store belongs to this cluster, run \
         `threefs {service} rekey --yes`"
    )]
    Invalid {
        /// The store's folder or address.
        store: String,
        /// `mgmtd` or `meta`.
        service: &'static str,
        /// The error.
        detail: String,
    },
}

fn of_cluster(cluster: Option<u128>) -> String {
    cluster.map(|cluster| format!(" of cluster-{cluster:032x}")).unwrap_or_default()
}
