//! Storage service: startup and shutdown.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::auth::keys::Keys;
use fabric::class::TrafficClass;
use fabric::deadline::Deadline;
use fabric::rpc::{Server, ServerConfig, Shutdown};
use fabric::tls::ServiceTls;
use threefs_core::disks::Found;
use threefs_core::fence::FenceTable;
use threefs_core::ids::{NodeId, RoutingVersion};
use threefs_mgmtd::MgmtdClient;
use tokio::sync::watch;

use crate::config::StorageConfig;
use crate::disk::Shared;
use crate::disks::Disks;
use crate::error::StorageServiceError;
use crate::nodes::Nodes;
use crate::peers::Peers;
use crate::port::Port;
use crate::watcher::Watcher;
use crate::{admission, found};

const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval in which a new cluster is recognized.
const STATUS_INTERVAL: Duration = Duration::from_millis(200);

/// Serves until shutdown is requested or another process replaces this one.
///
/// # Errors
/// It cannot start, or was replaced.
pub fn run(
    config: StorageConfig,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), StorageServiceError>> {
    Box::pin(serve(config, shutdown))
}

async fn serve(config: StorageConfig, shutdown: Shutdown) -> Result<(), StorageServiceError> {
    let service = NodeId(config.node_id);
    if service != service.service() {
        return Err(StorageServiceError::NodeId(config.node_id));
    }
    let watcher = start_watcher(&config, service)?;
    let keys = Keys::read(&config.key_file)?;
    let tls = ServiceTls { enabled: config.tls, transition: config.tls_transition };
    let credentials = tls.credentials(&keys);
    let mut server_config = ServerConfig::new(crate::CONTEXT, &keys);
    server_config.tls = tls.accepts();
    server_config.class = TrafficClass::Storage;
    server_config.budgets = admission::budgets(config.memory_bytes);
    server_config.calls_per_connection_max = admission::CALLS_OF_CONNECTION_MAX;
    let server = Server::bind(&config.listen, server_config).await?;
    let address = config.advertise.clone().unwrap_or_else(|| server.address().to_string());
    let mgmtd = MgmtdClient::new(&config.mgmtd, &credentials);
    let call_timeout = Duration::from_millis(config.call_timeout_ms);
    let peers = Arc::new(Peers::new(&credentials, call_timeout));
    tracing::info!(
        node = %service, address, location = %config.location, "storage service is listening"
    );

    let follower = mgmtd.follow();
    let (nodes, routing) = (Arc::new(Nodes::default()), follower.receiver());
    let (drained, closing) = Shutdown::new();
    let port = Port { nodes: Arc::clone(&nodes), routing: routing.clone(), keys };
    let mut port = std::pin::pin!(server.serve(port, closing));
    let is_new_cluster = watch::Sender::new(false);
    let (table, fences) = watch::channel(Arc::<FenceTable>::default());
    let fence_client = mgmtd.clone();
    let follow_fences = fence_client.follow_fences(|changed| {
        table.send_modify(|table| Arc::make_mut(table).add(&changed));
    });
    let shared =
        Shared { config, service, address, peers, mgmtd, routing, fences, is_new_cluster, nodes };
    let shared = Arc::new(shared);
    let disks = Disks::new(Arc::clone(&shared), watcher);
    tokio::select! {
        () = &mut port => return Ok(()),
        () = recognize_new_cluster(&shared) => return Ok(()),
        () = follow_fences => return Ok(()),
        ended = disks.serve(shutdown) => ended?,
    }
    drained.request();
    port.await;
    Ok(())
}

/// Asks mgmtd whether it knows any node, until it publishes a routing. Never returns.
async fn recognize_new_cluster(shared: &Shared) {
    let mut routing = shared.routing.clone();
    let is_published = async {
        let _ = routing.wait_for(|routing| routing.version > RoutingVersion(0)).await;
    };
    let ask = async {
        loop {
            let status = shared.mgmtd.status(Deadline::after(STATUS_TIMEOUT)).await;
            let is_new = status.is_ok_and(|status| status.routing_version == RoutingVersion(0));
            shared
                .is_new_cluster
                .send_if_modified(|known| std::mem::replace(known, is_new) != is_new);
            tokio::time::sleep(STATUS_INTERVAL).await;
        }
    };
    tokio::select! {
        () = is_published => std::future::pending().await,
        () = ask => {}
    }
}

/// Starts to look at the paths. A single folder is created; if it cannot be used, the service ends.
fn start_watcher(config: &StorageConfig, service: NodeId) -> Result<Watcher, StorageServiceError> {
    let data = |path: &Path, reason: String| StorageServiceError::Data {
        path: path.display().to_string(),
        reason,
    };
    let mut paths = vec![config.data.clone()];
    for disk in &config.disks {
        if paths.contains(disk) {
            return Err(data(disk, "it is listed twice".into()));
        }
        paths.push(disk.clone());
    }
    if config.disks.is_empty() {
        let path = &config.data;
        found::prepare_only(path, service).map_err(|error| data(path, error.to_string()))?;
        if let Found::Unknown(reason) | Found::Nothing(reason) = found::look(path) {
            return Err(data(path, reason));
        }
    }
    Watcher::start(&paths, service).map_err(|error| data(&config.data, error.to_string()))
}
