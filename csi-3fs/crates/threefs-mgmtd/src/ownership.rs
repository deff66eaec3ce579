//! Owner of the store of mgmtd, and adoption of a store without an owner, which an earlier version
//! wrote.
//!
//! The key alone does not show whose store it is: another cluster may have the same prefix. Storage
//! nodes know the cluster of their data, and only those of this cluster can send heartbeats. So mgmtd
//! adopts the store once a node reports data of the store's cluster, and is neither primary nor
//! standby before. A store that knows no node protects no data, and is adopted at once.

use std::time::Duration;

use fabric::auth::keys::Keys;
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClusterId, NodeId};
use threefs_kv::{Entry, KeyRange, KvError, Owner, Store, StoreConfig};
use tokio::sync::watch;

use crate::manager::{Manager, Role};
use crate::protocol::MgmtdRequest;
use crate::rows::{CLUSTER, NODES};

/// Time between two looks at the owner's row.
const PERIOD: Duration = Duration::from_secs(1);
/// Looks between two log lines.
const LOOKS_PER_LINE: u32 = 10;

/// The cluster with these keys, as the owner of a store of mgmtd.
pub fn owner(keys: &Keys, store: &StoreConfig) -> Owner {
    Owner::new("mgmtd", CLUSTER, keys.clone(), store.name())
}

/// Checks that this cluster owns the store; the primary lets the row follow the key file.
pub(crate) async fn keep_owner(manager: &Manager, owner: &Owner) -> KvError {
    loop {
        tokio::time::sleep(PERIOD).await;
        if let Err(error) = owner.keep(&manager.store, manager.is_primary().await).await {
            return error;
        }
    }
}

impl Manager {
    /// Becomes the primary only while this cluster owns the store.
    #[must_use]
    pub fn owned_by(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Whether it is the primary, as far as it knows.
    async fn is_primary(&self) -> bool {
        matches!(*self.role.lock().await, Role::Primary(_))
    }
}

/// A node with data, and their cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    node: NodeId,
    cluster: ClusterId,
}

/// A store that waits for adoption.
pub(crate) struct Adoption {
    cluster: ClusterId,
    report: watch::Sender<Option<Report>>,
}

impl Adoption {
    /// Checks the owner of a store; `None` once this cluster owns it.
    ///
    /// # Errors
    /// Another cluster owns it, or the store fails.
    pub(crate) async fn enter(owner: &Owner, store: &Store) -> Result<Option<Self>, KvError> {
        let cluster = match owner.enter(store).await? {
            Entry::Owned => return Ok(None),
            Entry::Unowned(cluster) => cluster.map(ClusterId),
        };
        if let Some(cluster) = cluster
            && has_nodes(store).await?
        {
            return Ok(Some(Self { cluster, report: watch::channel(None).0 }));
        }
        owner.adopt(store).await?;
        Ok(None)
    }

    /// Takes the report of a node with a key of this cluster.
    pub(crate) fn observe(&self, request: &MgmtdRequest) {
        let (MgmtdRequest::Heartbeat(heartbeat)
        | MgmtdRequest::LocatedHeartbeat { heartbeat, .. }
        | MgmtdRequest::SeenHeartbeat { heartbeat, .. }
        | MgmtdRequest::FencedHeartbeat { heartbeat, .. }) = request
        else {
            return;
        };
        let Heartbeat { node, data: DataFolder::Of(cluster), .. } = *heartbeat else { return };
        self.report.send_if_modified(|report| {
            // A node of another cluster does not replace one of this cluster.
            let replaces = report.is_none_or(|report| report.cluster != self.cluster);
            if replaces {
                *report = Some(Report { node, cluster });
            }
            replaces
        });
    }

    /// Waits until the store can be adopted, and adopts it.
    ///
    /// # Errors
    /// It belongs to another cluster, or the store fails such that only a restart recovers.
    pub(crate) async fn complete(&self, owner: &Owner, store: &Store) -> Result<(), KvError> {
        let mut report = self.report.subscribe();
        for look in 0u32.. {
            let reported = report.wait_for(Option::is_some);
            let reported = tokio::time::timeout(PERIOD, reported).await;
            let reported = reported.ok().and_then(Result::ok).and_then(|report| *report);
            let entered = match reported {
                Some(Report { node, cluster }) if cluster != self.cluster => {
                    return Err(owner.other_cluster(self.cluster.0, node.to_string(), cluster.0));
                }
                Some(Report { node, cluster }) => {
                    tracing::info!(%node, %cluster, "a storage node has data of the store's cluster");
                    owner.adopt(store).await.map(|()| Entry::Owned)
                }
                // Another mgmtd of this cluster may have adopted it.
                None => owner.enter(store).await,
            };
            match entered {
                Ok(Entry::Owned) => return Ok(()),
                Ok(Entry::Unowned(_)) => {}
                Err(error @ (KvError::Owner(_) | KvError::Broken { .. })) => return Err(error),
                Err(error) => tracing::warn!(%error, "the owner of the store is not known"),
            }
            if look % LOOKS_PER_LINE == 0 {
                tracing::warn!(
                    cluster = %self.cluster,
                    "the store was written by an earlier version, which recorded no owner; waiting \
                     for a storage node with data of its cluster. If the store belongs to this \
                     cluster and no node has data, stop mgmtd and run `threefs mgmtd rekey --yes`"
                );
            }
        }
        Ok(())
    }
}

async fn has_nodes(store: &Store) -> Result<bool, KvError> {
    let mut txn = store.begin().await?;
    Ok(!txn.snapshot_range(&KeyRange::prefix(NODES), 1).await?.is_empty())
}
