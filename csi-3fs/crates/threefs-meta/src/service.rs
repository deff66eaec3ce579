//! The tree behind a port.

use std::net::SocketAddr;
use std::sync::Arc;

use fabric::BoxFuture;
use fabric::capability::Capability;
use fabric::deadline::Deadline;
use fabric::keys::Keys;
use fabric::rpc::{
    Call, Fault, Reply, Server, ServerConfig, ServerError, Service, Shutdown, decode_request,
};
use fabric::ticket::Ticket;
use threefs_core::ids::InodeId;
use threefs_kv::{EmbeddedConfig, KvError, Store};
use threefs_mgmtd::{MgmtdClient, RoutingFollower};

use crate::chunks::ChunkTrimmer;
use crate::config::MetaConfig;
use crate::protocol::{CONTEXT, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult};
use crate::scope::outside;
use crate::tree::{Tree, check_batch, now};

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
    keys: Keys,
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
        Ok(Self { server, tree: Arc::new(tree), keys: config.key, _routing: routing })
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
        let handler = Handler { tree: Arc::clone(&self.tree), keys: self.keys };
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

struct Handler {
    tree: Arc<Tree>,
    keys: Keys,
}

impl Handler {
    /// What the holder of a ticket shows the storage services.
    async fn capabilities(
        &self,
        ticket: &Ticket,
        inodes: &[InodeId],
        deadline: Deadline,
    ) -> MetaResult {
        check_batch("inodes", inodes.len())?;
        let scope = InodeId(ticket.directory);
        let sides = self.tree.sides(scope, inodes, deadline).await?;
        if let Some(inode) = sides.outside.first() {
            return Err(outside(*inode, scope));
        }
        let (ring, now) = (self.keys.current(), now().0 / 1_000_000_000);
        let signed = inodes.iter().map(|inode| {
            let sign = || Capability::sign(&ring, ticket, inode.0, now.unsigned_abs());
            sides.inside.contains(inode).then(sign)
        });
        Ok(MetaReply::Capabilities(signed.collect()))
    }
}

impl Service for Handler {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request: MetaRequest = decode_request(&call)?;
        let result = match (&request, call.grant.ticket()) {
            (
                MetaRequest::Query { query: MetaQuery::Capabilities { inodes }, .. },
                Some(ticket),
            ) => self.capabilities(ticket, inodes, call.deadline).await,
            _ => self.tree.answer_for(&call.grant, request, call.deadline).await,
        };
        Reply::of(&result)
    }
}
