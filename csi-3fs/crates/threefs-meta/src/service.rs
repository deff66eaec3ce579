//! The metadata service: RPC server, capabilities and background tasks.

pub(crate) mod ownership;
mod publication;
pub(crate) mod registration;
mod reply_size;
pub(crate) mod scope;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use fabric::BoxFuture;
use fabric::auth::capability::Capability;
use fabric::auth::keys::Keys;
use fabric::auth::ticket::Ticket;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Budget, Call, Fault, Reply, Server, ServerConfig, ServerError, Service, Shutdown,
};
use threefs_core::ids::InodeId;
use threefs_core::terms::{FileTerms, WRITE_LIFETIME_S};
use threefs_kv::{KvError, Owner, Store};
use threefs_mgmtd::{MgmtdClient, MgmtdError, RoutingFollower};

use crate::chunk_trimmer::ChunkTrimmer;
use crate::config::MetaConfig;
use crate::protocol::{
    CONTEXT, Inode, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult,
    decode_request,
};
use crate::restore;
use crate::service::ownership::owner;
use crate::service::registration::{RegistrationError, register};
use crate::service::reply_size::reply_bytes;
use crate::service::scope::outside;
use crate::tree::{Tree, check_batch, now};

/// Memory for long replies that clients have not received yet.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// Why a metadata service stopped.
#[derive(Debug, thiserror::Error)]
pub enum MetaRunError {
    /// The store cannot be opened, belongs to another cluster, or failed such that only a restart
    /// recovers.
    #[error(transparent)]
    Store(#[from] KvError),
    /// The tree in the store cannot be used.
    #[error(transparent)]
    Tree(#[from] MetaError),
    /// The store does not belong to the cluster.
    #[error(transparent)]
    Refused(#[from] MgmtdError),
    /// The port is not available.
    #[error(transparent)]
    Listen(#[from] ServerError),
    /// Another service over the store has removed this one. A new start is a new service.
    #[error(
        "this metadata service did not renew its row in the store in time, and another one has \
         removed it; it must be restarted"
    )]
    Removed,
}

/// A metadata service with an open store and a bound port that is not serving yet.
pub struct Meta {
    server: Server,
    tree: Arc<Tree>,
    keys: Keys,
    mgmtd: MgmtdClient,
    owner: Owner,
    routing: RoutingFollower,
}

/// Runs a metadata service until shutdown. `trimmer` drops chunks; the caller builds it on the
/// storage client.
///
/// # Errors
/// [`MetaRunError`].
pub fn run(
    config: MetaConfig,
    trimmer: Arc<dyn ChunkTrimmer>,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), MetaRunError>> {
    Box::pin(async {
        // Opening may wait for mgmtd.
        let meta = tokio::select! {
            opened = Meta::open(config, trimmer) => opened?,
            () = shutdown.requested() => return Ok(()),
        };
        meta.serve(shutdown).await
    })
}

impl Meta {
    /// Opens the store, binds the port and starts to follow the routing.
    ///
    /// # Errors
    /// [`MetaRunError`].
    pub async fn open(
        config: MetaConfig,
        trimmer: Arc<dyn ChunkTrimmer>,
    ) -> Result<Self, MetaRunError> {
        let owner = owner(&config.key, &config.store);
        let store = Store::open_owned(config.store.clone(), &owner).await?;
        Self::open_on(store, config, trimmer).await
    }

    /// As [`Meta::open`], on a store that is open already and that other services may share.
    ///
    /// # Errors
    /// [`MetaRunError`].
    pub async fn open_on(
        store: Store,
        config: MetaConfig,
        trimmer: Arc<dyn ChunkTrimmer>,
    ) -> Result<Self, MetaRunError> {
        let mut server = ServerConfig::new(CONTEXT, config.key.clone());
        server.tls = config.tls.accepts();
        server.budgets = vec![Budget { reply_bytes_max: REPLY_BYTES_MAX, ..Budget::default() }];
        let server = Server::bind(&config.listen, server).await?;
        let mgmtd = MgmtdClient::new(&config.mgmtd, &config.tls.credentials(&config.key));
        let owner = owner(&config.key, &config.store);
        ownership::enter(&owner, &store, &mgmtd).await?;
        if config.store.accepts_restored() {
            restore::mark_restored(&store).await?;
        }
        let routing = mgmtd.follow();
        let tree = Tree::open(store, config.tree, routing.receiver(), trimmer).await?;
        let tree = tree.with_fences(Arc::new(mgmtd.clone()));
        let keys = config.key;
        Ok(Self { server, tree: Arc::new(tree), keys, mgmtd, owner, routing })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Registers the store with mgmtd and serves until shutdown. Calls are answered with
    /// `Unavailable` until then.
    ///
    /// # Errors
    /// [`MetaRunError::Store`] when the store needs a restart, [`MetaRunError::Refused`] when it does
    /// not belong to the cluster.
    pub fn serve(self, shutdown: Shutdown) -> BoxFuture<'static, Result<(), MetaRunError>> {
        Box::pin(self.serve_inner(shutdown))
    }

    async fn serve_inner(self, shutdown: Shutdown) -> Result<(), MetaRunError> {
        let registered = Arc::new(AtomicBool::new(false));
        let handler = Handler {
            tree: Arc::clone(&self.tree),
            keys: self.keys,
            registered: Arc::clone(&registered),
        };
        let background = async {
            // Garbage collection must wait as well: the chunks may belong to another tree's files.
            register(&self.tree.store, &self.mgmtd).await?;
            registered.store(true, SeqCst);
            let work = async {
                if let Err(error) = self.tree.finish_all_trims().await {
                    tracing::warn!(%error, "pending truncations could not be completed");
                }
                tokio::join!(
                    self.tree.run_gc(),
                    self.tree.run_recounts(),
                    self.tree.run_lock_expiry(),
                    self.tree.run_trash_expiry(),
                    self.tree.run_snapshots()
                )
            };
            // At once: storage services may wait for it.
            let routing = self.routing.receiver();
            tokio::join!(publication::run(&self.tree.store, &self.mgmtd, routing), work);
            Ok(())
        };
        tokio::select! {
            () = self.server.serve(handler, shutdown) => Ok(()),
            error = self.tree.store_failed() => Err(error.into()),
            error = ownership::keep(&self.owner, &self.tree) => Err(error.into()),
            () = self.tree.removed_by_another() => Err(MetaRunError::Removed),
            ended = background => ended,
        }
    }
}

impl From<RegistrationError> for MetaRunError {
    fn from(error: RegistrationError) -> Self {
        match error {
            RegistrationError::Refused(error) => Self::Refused(error),
            RegistrationError::Store(error) => Self::Store(error),
        }
    }
}

struct Handler {
    tree: Arc<Tree>,
    keys: Keys,
    registered: Arc<AtomicBool>,
}

impl Handler {
    /// Signs the capabilities that a ticket holder presents to the storage services.
    async fn capabilities(
        &self,
        ticket: &Ticket,
        inodes: &[InodeId],
        deadline: Deadline,
    ) -> Result<Vec<Option<Capability>>, MetaError> {
        check_batch("inodes", inodes.len())?;
        // The time is taken before the lookup: later decreases wait for the whole capability
        // lifetime.
        let now_unix_s = now().0.unsigned_abs() / 1_000_000_000;
        let scope = InodeId(ticket.directory);
        let sides = self.tree.sides(scope, inodes, deadline).await?;
        if let Some(inode) = sides.outside.first() {
            return Err(outside(*inode, scope));
        }
        let until_unix_s = now_unix_s + WRITE_LIFETIME_S;
        let terms = self.tree.terms(inodes, until_unix_s, deadline).await?;
        let signed = inodes.iter().zip(terms).map(|(inode, terms)| {
            let terms = terms.filter(|_| sides.inside.contains(inode));
            terms.map(|terms| self.sign(ticket, *inode, &terms, now_unix_s)).transpose()
        });
        signed.collect()
    }

    /// Adds capabilities to a reply about files that may be written further, which saves a request.
    /// They cover the current state of the files: the reply may be that of an earlier attempt.
    async fn with_capabilities(
        &self,
        ticket: &Ticket,
        reply: MetaReply,
        deadline: Deadline,
    ) -> MetaResult {
        let MetaReply::Inodes(inodes) = reply else { return Ok(reply) };
        let files: Vec<InodeId> = inodes.iter().flatten().map(|inode| inode.id).collect();
        let mut signed = self.capabilities(ticket, &files, deadline).await?.into_iter();
        let of_file = |inode: &Result<Inode, MetaError>| {
            inode.as_ref().ok().and_then(|_| signed.next().flatten())
        };
        let capabilities = inodes.iter().map(of_file).collect();
        Ok(MetaReply::Reserved { inodes, capabilities })
    }

    fn sign(
        &self,
        ticket: &Ticket,
        inode: InodeId,
        terms: &FileTerms,
        now_unix_s: u64,
    ) -> Result<Capability, MetaError> {
        let terms = terms.encode();
        let terms = terms.map_err(|error| MetaError::Damaged { detail: error.to_string() })?;
        Ok(Capability::sign(&self.keys.current(), ticket, inode.0, terms, now_unix_s))
    }
}

impl Service for Handler {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request = decode_request(&call.message)?;
        if !self.registered.load(SeqCst) {
            let detail = "the store is not registered with mgmtd yet".into();
            let refusal: MetaResult = Err(MetaError::Unavailable { detail });
            return Reply::of(&refusal);
        }
        // Before the reply is built: clients that do not receive replies must not exhaust the
        // memory.
        match reply_bytes(&request) {
            0 => {}
            bytes => call.reply_memory.reserve(bytes).await?,
        }
        let result = match (&request, call.grant.ticket()) {
            (
                MetaRequest::Query { query: MetaQuery::Capabilities { inodes }, .. },
                Some(ticket),
            ) => {
                // Boxed, like the next: thousands of calls may be in progress, and few are of this
                // kind.
                let signed = Box::pin(self.capabilities(ticket, inodes, call.deadline)).await;
                signed.map(MetaReply::Capabilities)
            }
            (MetaRequest::Change { change: MetaChange::Reserve { .. }, .. }, Some(ticket)) => {
                let reply = self.tree.answer_for(&call.grant, request, call.deadline).await;
                match reply {
                    Ok(reply) => {
                        Box::pin(self.with_capabilities(ticket, reply, call.deadline)).await
                    }
                    refusal => refusal,
                }
            }
            _ => self.tree.answer_for(&call.grant, request, call.deadline).await,
        };
        Reply::of(&result)
    }
}
