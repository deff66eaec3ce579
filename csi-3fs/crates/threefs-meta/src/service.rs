//! The tree behind a port.

use std::net::SocketAddr;
use std::sync::Arc;

use fabric::BoxFuture;
use fabric::rpc::{
    Call, Fault, Reply, Server, ServerConfig, ServerError, Service, Shutdown, decode_request,
};
use threefs_kv::{EmbeddedConfig, KvError, Store};
use threefs_mgmtd::{MgmtdClient, RoutingFollower};

use crate::chunks::ChunkTrimmer;
use crate::config::MetaConfig;
use crate::protocol::{CONTEXT, MetaError, MetaRequest};
use crate::tree::Tree;

/// Why a metadata service ended.
#[derive(Debug, thiserror::Error)]
pub enum MetaRunError {
    /// Its store cannot be opened, or failed in a way from which only a restart recovers.
    #[error(transparent)]
    Store(#[from] KvError),
    /// The tree in it cannot be used.
    #[error(transparent)]
    Tree(#[from] MetaError),
    /// Its port cannot be taken.
    #[error(transparent)]
    Listen(#[from] ServerError),
}

/// A metadata service that holds its store and its port and has not begun to serve.
pub struct Meta {
    server: Server,
    tree: Arc<Tree>,
    _routing: RoutingFollower,
}

/// Runs a metadata service until shutdown. `trimmer` takes chunks away; the caller makes it of the
/// storage client.
///
/// # Errors
/// [`MetaRunError`].
pub fn run(
    config: MetaConfig,
    trimmer: Arc<dyn ChunkTrimmer>,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), MetaRunError>> {
    Box::pin(async { Meta::open(config, trimmer).await?.serve(shutdown).await })
}

impl Meta {
    /// Opens the store, takes the port, begins to follow the routing.
    ///
    /// # Errors
    /// [`MetaRunError`].
    pub async fn open(
        config: MetaConfig,
        trimmer: Arc<dyn ChunkTrimmer>,
    ) -> Result<Self, MetaRunError> {
        let server =
            Server::bind(&config.listen, ServerConfig::new(CONTEXT, config.key.clone())).await?;
        let store = Store::embedded(EmbeddedConfig {
            path: config.store_path,
            map_bytes_max: config.map_bytes_max,
        })?;
        let routing = MgmtdClient::new(&config.mgmtd, &config.key).follow();
        let tree = Tree::open(store, config.tree, routing.receiver(), trimmer).await?;
        Ok(Self { server, tree: Arc::new(tree), _routing: routing })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Serves until shutdown.
    ///
    /// # Errors
    /// [`MetaRunError::Store`] when the store needs a restart.
    pub fn serve(self, shutdown: Shutdown) -> BoxFuture<'static, Result<(), MetaRunError>> {
        Box::pin(self.serve_now(shutdown))
    }

    async fn serve_now(self, shutdown: Shutdown) -> Result<(), MetaRunError> {
        let handler = Handler(Arc::clone(&self.tree));
        let background = async {
            if let Err(error) = self.tree.finish_all_trims().await {
                tracing::warn!(%error, "truncations of a former life");
            }
            self.tree.collect_for_ever().await;
        };
        tokio::select! {
            () = self.server.serve(handler, shutdown) => Ok(()),
            error = self.tree.store_failed() => Err(error.into()),
            () = background => Ok(()),
        }
    }
}

struct Handler(Arc<Tree>);

impl Service for Handler {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request: MetaRequest = decode_request(&call)?;
        Reply::of(&self.0.answer(request, call.deadline).await)
    }
}
