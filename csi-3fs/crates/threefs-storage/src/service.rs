//! Storage service: startup and shutdown.

use std::sync::Arc;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::auth::AuthError;
use fabric::auth::keys::Keys;
use fabric::class::TrafficClass;
use fabric::rpc::{Server, ServerConfig, ServerError, Shutdown};
use fabric::tls::ServiceTls;
use threefs_chunkstore::DiskBudget;
use threefs_mgmtd::{MgmtdClient, MgmtdError};
use tokio::task::JoinSet;

use crate::admission;
use crate::config::StorageConfig;
use crate::context::NodeContext;
use crate::heartbeat;
use crate::identity::{self, draw_incarnation};
use crate::membership::Memberships;
use crate::node::Node;
use crate::peers::Peers;
use crate::port::Port;
use crate::store::{self, Disk};

/// Error that ended a storage service or kept it from starting.
#[derive(Debug, thiserror::Error)]
pub enum StorageServiceError {
    /// The key file cannot be used.
    #[error(transparent)]
    Key(#[from] AuthError),
    /// The port cannot be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The data folder cannot be used.
    #[error("data folder `{path}`: {reason}")]
    Data {
        /// Path of the folder.
        path: String,
        /// Error of the operating system.
        reason: String,
    },
    /// Another process serves this node, or its data belongs to another cluster.
    #[error(transparent)]
    Replaced(#[from] MgmtdError),
}

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
    std::fs::create_dir_all(&config.data).map_err(|error| StorageServiceError::Data {
        path: config.data.display().to_string(),
        reason: error.to_string(),
    })?;
    let budget = DiskBudget::of_folder(&config.data, config.capacity_bytes).map_err(|error| {
        StorageServiceError::Data {
            path: config.data.display().to_string(),
            reason: error.to_string(),
        }
    })?;
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
    let drain_timeout = Duration::from_millis(config.drain_ms);
    let call_timeout = Duration::from_millis(config.call_timeout_ms);
    let mut context = NodeContext::new(Peers::new(&credentials, call_timeout));
    let unreadable = |error: std::io::Error| StorageServiceError::Data {
        path: config.data.display().to_string(),
        reason: error.to_string(),
    };
    let data = identity::read(&config.data).map_err(unreadable)?;
    context.memberships = Memberships::read(&config.data).map_err(unreadable)?;
    let location = config.location.clone();
    let disk = Disk { budget, open: Arc::new(store::open) };
    let node = Arc::new(Node::new(config, draw_incarnation(), context, disk, data));
    tracing::info!(node = %node.id, address, %location, "storage service is listening");

    node.open_recorded();
    // Aborted when this function returns.
    let mut follow = JoinSet::new();
    follow.spawn(heartbeat::follow(Arc::clone(&node), mgmtd.clone()));
    let (drained, closing) = Shutdown::new();
    let port = server.serve(Port { node: Arc::clone(&node), keys }, closing);
    let drain = async {
        shutdown.requested().await;
        if !drain_timeout.is_zero() {
            node.drain(drain_timeout).await;
        }
        drained.request();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = port => Ok(()),
        replaced = heartbeat::send(Arc::clone(&node), mgmtd, address, location) => Err(replaced.into()),
        () = drain => Ok(()),
    }
}
