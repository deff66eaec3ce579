//! Storage service: RPC port, startup and shutdown.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::auth::AuthError;
use fabric::auth::capability::Presented;
use fabric::auth::keys::Keys;
use fabric::boot_instant::BootInstant;
use fabric::class::TrafficClass;
use fabric::rpc::{
    Call, Fault, Reply, Server, ServerConfig, ServerError, Service, Shutdown, decode_request,
};
use fabric::tls::ServiceTls;
use threefs_chunkstore::DiskBudget;
use threefs_core::error::StorageError;
use threefs_core::message::{StorageRequest, verify_payload};
use threefs_mgmtd::{MgmtdClient, MgmtdError};
use tokio::task::JoinSet;

use crate::access;
use crate::admission;
use crate::config::StorageConfig;
use crate::context::NodeContext;
use crate::heartbeat;
use crate::identity::{self, draw_incarnation};
use crate::node::Node;
use crate::peers::Peers;
use crate::store::{self, Disk};

/// Maximum payload of a reply: one chunk.
const REPLY_BYTES_MAX: u32 = 64 << 20;
/// Expected payload of a repair: a chunk of the usual size. Larger chunks are rare and brief.
const REPAIR_BYTES: usize = 4 << 20;
/// Encoded size of a chunk's metadata: two states with all their tags.
const META_BYTES: usize = 2_048;
const METAS_MAX: u32 = 1_024;
/// Encoded size of a chunk's index and length.
const CHUNK_BYTES: usize = 10;
const CHUNKS_MAX: u32 = 4_096;

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
    let context = NodeContext::new(Peers::new(&credentials, call_timeout));
    let data = identity::read(&config.data).map_err(|error| StorageServiceError::Data {
        path: config.data.display().to_string(),
        reason: error.to_string(),
    })?;
    let disk = Disk { budget, open: Arc::new(store::open) };
    let node = Arc::new(Node::new(config, draw_incarnation(), context, disk, data));
    tracing::info!(node = %node.id, address, "storage service is listening");

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
        replaced = heartbeat::send(Arc::clone(&node), mgmtd, address) => Err(replaced.into()),
        () = drain => Ok(()),
    }
}

/// Wall clock time, which expiry times of credentials use.
fn unix_now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// Approximate maximum size of a long reply; short replies are bounded by the number of calls.
fn reply_bytes(request: &StorageRequest) -> Option<usize> {
    match request {
        StorageRequest::Read(read) => Some(read.length.min(REPLY_BYTES_MAX) as usize),
        StorageRequest::Repair(_) => Some(REPAIR_BYTES),
        StorageRequest::SyncMetas(query) => Some(query.limit.min(METAS_MAX) as usize * META_BYTES),
        StorageRequest::QueryChunks(query) => {
            Some((query.limit.min(CHUNKS_MAX) as usize + 1) * CHUNK_BYTES)
        }
        _ => None,
    }
}

struct Port {
    node: Arc<Node>,
    keys: Keys,
}

impl Service for Port {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let (request, shown): (StorageRequest, Presented) = decode_request(&call)?;
        let (capability, now) = (shown.capability()?, unix_now_s());
        let routing = || self.node.context.routing();
        let (grant, payload_bytes) = (&call.grant, call.payload.len());
        access::permit(grant, &request, payload_bytes, capability, &self.keys, now, routing)?;
        if request.class() != call.class {
            let (sent, class) = (call.class, request.class());
            // A caller of protocol version 1 sends no class, and only updates and reads.
            if sent != 0 {
                return Err(Fault::bad_request(format!(
                    "class {sent} for a request of class {class}"
                )));
            }
        }
        // Before the disk is read: data is not read until it can be sent soon.
        if let Some(bytes) = reply_bytes(&request) {
            call.reply_memory.reserve(bytes).await?;
        }
        let (result, payload) = self.answer(request, call.payload, call.expires).await;
        Reply::with_payload(&result, payload.into())
    }
}

impl Port {
    async fn answer(
        &self,
        request: StorageRequest,
        payload: Bytes,
        expires: Option<BootInstant>,
    ) -> crate::target::Response {
        let id = request.to().target;
        let Some(target) = self.node.target(id) else {
            return (Err(StorageError::WrongTarget { target: id }), Bytes::new());
        };
        if let Err(error) = verify_payload(&request, &payload) {
            return (Err(error), Bytes::new());
        }
        target.request(request, payload, expires).await
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::checksum::Checksum;
    use threefs_core::chunk::{ChunkMeta, ChunkState, TagWindow};
    use threefs_core::ids::{
        ChainId, ChainVersion, ChannelId, ChunkId, ChunkVersion, ClientId, InodeId, RequestTag,
        TargetId,
    };
    use threefs_core::message::{
        Address, LastChunk, QueryChunks, StorageReply, StorageResult, SyncMetas, SyncSession,
    };

    use super::*;

    fn encoded(reply: StorageReply) -> usize {
        let reply: StorageResult = Ok(reply);
        fabric::rpc::encode(&reply).unwrap().len()
    }

    /// A peer that does not read replies must not fill the memory with lists of chunks.
    #[test]
    fn the_longest_lists_fit_their_reservation() {
        let (chain, target) = (ChainId(u32::MAX), TargetId(u64::MAX));
        let to = Address { chain, chain_version: ChainVersion(u32::MAX), target };
        let inode = InodeId(u64::MAX);
        let query = QueryChunks { to, inode, after: None, limit: u32::MAX };
        let chunks = vec![LastChunk { index: u32::MAX, length: u32::MAX }; CHUNKS_MAX as usize + 1];
        let reply = StorageReply::Chunks { chunks, last: false };
        assert!(encoded(reply) <= reply_bytes(&StorageRequest::QueryChunks(query)).unwrap() + 16);

        let mut tags = TagWindow::default();
        for channel in 0..64 {
            let client = ClientId(u128::MAX - channel);
            let channel = ChannelId(u32::MAX - channel as u32);
            let tag = RequestTag { client, channel, sequence: u64::MAX };
            tags = tags.with(tag, ChunkVersion(u64::MAX));
        }
        let state = ChunkState {
            version: ChunkVersion(u64::MAX),
            chain_version: ChainVersion(u32::MAX),
            length: u32::MAX,
            checksum: Checksum(u32::MAX),
            removed: true,
            tags,
        };
        let chunk = ChunkId::new(inode, u32::MAX);
        let meta = ChunkMeta { chunk, committed: state.clone(), pending: Some(state) };
        let metas = vec![meta; METAS_MAX as usize];
        let session = SyncSession::default();
        let query = SyncMetas { to, session, after: None, limit: u32::MAX };
        let reply = StorageReply::Metas { metas, last: false };
        assert!(encoded(reply) <= reply_bytes(&StorageRequest::SyncMetas(query)).unwrap() + 16);
    }
}
