//! One disk of a service: it is opened, served as a node until its path no longer shows it, and
//! closed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fabric::rpc::Shutdown;
use threefs_chunkstore::DiskBudget;
use threefs_core::disks::{DiskId, DiskIdentity};
use threefs_core::error::StoreError;
use threefs_core::fence::FenceTable;
use threefs_core::heartbeat::DataFolder;
use threefs_core::ids::NodeId;
use threefs_core::routing::RoutingInfo;
use threefs_mgmtd::{MgmtdClient, MgmtdError};
use tokio::sync::watch;

use crate::config::StorageConfig;
use crate::context::NodeContext;
use crate::identity::{self, draw_incarnation};
use crate::membership::Memberships;
use crate::node::Node;
use crate::nodes::Nodes;
use crate::peers::Peers;
use crate::store::{self, Disk, OpenStore};
use crate::{found, heartbeat};

/// Pause before a disk that could not be used is tried again.
const PAUSE: Duration = Duration::from_secs(5);
/// Interval in which it is checked whether all stores of a disk are closed.
const CLOSING: Duration = Duration::from_millis(20);
/// Longest wait for stores that hang.
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// What the disks of a service share.
pub(crate) struct Shared {
    pub(crate) config: StorageConfig,
    /// The service: its first node.
    pub(crate) service: NodeId,
    /// The address of the port.
    pub(crate) address: String,
    pub(crate) peers: Arc<Peers>,
    pub(crate) mgmtd: MgmtdClient,
    pub(crate) routing: watch::Receiver<Arc<RoutingInfo>>,
    /// Fences of volumes.
    pub(crate) fences: watch::Receiver<Arc<FenceTable>>,
    /// mgmtd has replied that it knows no node. It publishes no routing then.
    pub(crate) is_new_cluster: watch::Sender<bool>,
    pub(crate) nodes: Arc<Nodes>,
}

/// Why serving a disk has ended.
pub(crate) enum End {
    /// Its path no longer shows it, or the service shuts down.
    Stopped,
    /// mgmtd has refused it permanently.
    Refused(MgmtdError),
    /// It cannot be opened.
    Unusable(String),
}

/// Serves a disk; returns once its stores are closed, or one of them hangs.
pub(crate) async fn run(
    shared: Arc<Shared>,
    path: PathBuf,
    identity: DiskIdentity,
    stop: Shutdown,
) -> End {
    let opened = tokio::select! {
        opened = open(&shared, &path, &identity) => opened,
        () = stop.requested() => return End::Stopped,
    };
    let node = match opened {
        Ok(node) => Arc::new(node),
        Err(error) => {
            let _ = tokio::time::timeout(PAUSE, stop.requested()).await;
            return End::Unusable(error.to_string());
        }
    };
    tracing::info!(?path, node = %node.id, "serving a disk");
    shared.nodes.insert(Arc::clone(&node));
    node.open_recorded();
    let end = {
        let (mgmtd, address) = (shared.mgmtd.clone(), shared.address.clone());
        let location = shared.config.location.clone();
        tokio::select! {
            refusal = heartbeat::send(Arc::clone(&node), mgmtd, address, location) => {
                End::Refused(refusal)
            }
            () = heartbeat::follow(Arc::clone(&node), shared.routing.clone()) => End::Stopped,
            () = heartbeat::follow_fences(Arc::clone(&node), shared.fences.clone()) => {
                End::Stopped
            }
            () = leave(&node, &shared.config, &stop) => End::Stopped,
        }
    };
    shared.nodes.remove(node.id);
    close(node).await;
    end
}

/// Returns when every target has left its chain, once this is requested.
async fn leave(node: &Node, config: &StorageConfig, stop: &Shutdown) {
    stop.requested().await;
    node.drain(Duration::from_millis(config.drain_ms)).await;
}

/// Reads what a disk has, on a separate thread: it may hang.
async fn open(shared: &Shared, path: &Path, disk: &DiskIdentity) -> io::Result<Node> {
    let (folder, id) = (path.to_owned(), disk.disk.clone());
    let capacity_bytes = shared.config.capacity_bytes;
    let read = tokio::task::spawn_blocking(move || -> io::Result<_> {
        found::check(&folder, &id)?;
        let budget = DiskBudget::of_folder(&folder, capacity_bytes)?;
        Ok((budget, identity::read(&folder)?, Memberships::read(&folder)?))
    });
    let (budget, data, memberships) = read.await.map_err(io::Error::other)??;
    let mut context = NodeContext::new(Arc::clone(&shared.peers));
    context.memberships = memberships;
    Ok(node(&shared.config, path, disk, context, budget, data))
}

fn node(
    config: &StorageConfig,
    path: &Path,
    disk: &DiskIdentity,
    context: NodeContext,
    budget: Arc<DiskBudget>,
    data: DataFolder,
) -> Node {
    let config = StorageConfig { node_id: disk.node.0, data: path.to_owned(), ..config.clone() };
    let open = opener(path.to_owned(), disk.disk.clone());
    Node::new(config, draw_incarnation(), context, Disk { budget, open }, data)
}

/// Opens stores of a disk while its path shows it.
fn opener(path: PathBuf, disk: DiskId) -> Arc<OpenStore> {
    Arc::new(move |folder: &Path, budget: Arc<DiskBudget>| {
        is_there(&path, &disk)?;
        let store = store::open(folder, budget)?;
        // It may have been removed meanwhile.
        is_there(&path, &disk)?;
        Ok(store)
    })
}

fn is_there(path: &Path, disk: &DiskId) -> Result<(), StoreError> {
    found::check(path, disk).map_err(|error| StoreError::Io {
        operation: format!("find its disk at {}", path.display()),
        reason: error.to_string(),
    })
}

/// Drops the targets; returns when their stores are closed, or after a while if one hangs. Each store
/// is locked while it is open, so that it is opened again only once its operations have ended.
async fn close(node: Arc<Node>) {
    node.close();
    let context = Arc::downgrade(&node.context);
    drop(node);
    let closed = async {
        // Operations in flight, and openings, hold it.
        while context.strong_count() > 0 {
            tokio::time::sleep(CLOSING).await;
        }
    };
    let _ = tokio::time::timeout(CLOSING_MAX, closed).await;
}

#[cfg(test)]
mod tests {
    use threefs_core::disks::Found;

    use super::*;

    #[test]
    fn no_store_is_created_below_a_lost_mount_or_on_another_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        found::adopt(&path, NodeId(3)).unwrap();
        let Found::Disk(disk) = found::look(&path) else { panic!() };
        let open = opener(path.clone(), disk.disk);
        let target = path.join("target-1");
        drop(open(&target, Arc::default()).unwrap());
        std::fs::rename(&path, folder.path().join("away")).unwrap();
        assert!(open(&target, Arc::default()).is_err());
        assert!(!path.exists());
        found::adopt(&path, NodeId(3)).unwrap();
        assert!(open(&target, Arc::default()).is_err());
        assert!(!target.exists());
    }
}
