//! Owner of the metadata store, and adoption of a store without an owner, which an earlier version
//! wrote.

use std::time::Duration;

use fabric::auth::keys::Keys;
use fabric::deadline::Deadline;
use threefs_core::ids::{ClusterId, RoutingVersion};
use threefs_kv::{Entry, KvError, Owner, Store, StoreConfig};
use threefs_mgmtd::{Claim, MgmtdClient};

use crate::rows::{self, CLAIM, CLUSTER};
use crate::tree::Tree;

/// Timeout of one attempt to reach mgmtd.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Pause between attempts, and between two checks of the owner's row.
const PERIOD: Duration = Duration::from_secs(1);
/// Attempts between two log lines.
const ATTEMPTS_PER_LINE: u32 = 10;

/// The cluster with these keys, as the owner of a metadata store.
pub fn owner(keys: &Keys, store: &StoreConfig) -> Owner {
    Owner::new(crate::DUMP_KIND, CLUSTER, keys.clone(), store.name())
}

/// Checks the owner of a store. One without an owner is adopted if the mgmtd with a key of this
/// cluster serves the store's cluster, or if the store has no cluster, or an operator has adopted it.
///
/// # Errors
/// Another cluster owns it, or the store fails.
pub(crate) async fn enter(
    owner: &Owner,
    store: &Store,
    mgmtd: &MgmtdClient,
) -> Result<(), KvError> {
    let Entry::Unowned(cluster) = owner.enter(store).await? else { return Ok(()) };
    if let Some(cluster) = cluster
        && rows::read::<Claim>(&mut store.begin().await?, CLAIM).await? != Some(Claim::Adopted)
    {
        let served = cluster_of(mgmtd).await;
        if served != ClusterId(cluster) {
            return Err(owner.other_cluster(cluster, "mgmtd".into(), served.0));
        }
    }
    owner.adopt(store).await
}

/// The cluster that mgmtd serves; waits for it.
async fn cluster_of(mgmtd: &MgmtdClient) -> ClusterId {
    let mut attempts = 0;
    loop {
        let routing =
            mgmtd.routing(RoutingVersion(0), Duration::ZERO, Deadline::after(ATTEMPT)).await;
        let error = match routing {
            Ok(Some(routing)) => return routing.cluster,
            Ok(None) => "it has no nodes yet".into(),
            Err(error) => error.to_string(),
        };
        if attempts % ATTEMPTS_PER_LINE == 0 {
            tracing::warn!(
                error,
                "the store was written by an earlier version, which recorded no owner; waiting for \
                 mgmtd to compare its cluster"
            );
        }
        attempts += 1;
        tokio::time::sleep(PERIOD).await;
    }
}

/// Checks that this cluster owns the store; the collector lets the row follow the key file.
pub(crate) async fn keep(owner: &Owner, tree: &Tree) -> KvError {
    loop {
        tokio::time::sleep(PERIOD).await;
        if let Err(error) = owner.keep(&tree.store, tree.services.collector().is_ok()).await {
            return error;
        }
    }
}
