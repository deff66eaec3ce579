//! RPC port: checks a request's credential, class and payload, reserves memory for its reply, and
//! passes it to its target.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use fabric::auth::capability::{Capability, Presented};
use fabric::auth::keys::Keys;
use fabric::auth::ticket::Grant;
use fabric::boot_instant::BootInstant;
use fabric::rpc::{Call, Fault, FaultCode, Reply, Service, decode_request};
use threefs_core::error::StorageError;
use threefs_core::message::{StorageReply, StorageRequest, StorageResult, check_payload, class};
use threefs_core::routing::RoutingInfo;
use threefs_core::scrub::DAMAGED_LISTED_MAX;
use threefs_core::terms::{FileTerms, TermsError, file_of};
use tokio::sync::watch;

use crate::nodes::Nodes;
use crate::target::Response;

/// Maximum payload of a reply: one chunk.
const REPLY_BYTES_MAX: u32 = 64 << 20;
/// Expected payload of a repair: a chunk of the usual size. Larger chunks are rare and brief.
const REPAIR_BYTES: usize = 4 << 20;
/// Encoded size of a chunk's metadata: two states with all their tags.
const META_BYTES: usize = 2_048;
const METAS_MAX: u32 = 1_024;
/// Encoded size of a chunk's index and length.
const CHUNK_BYTES: usize = 10;
/// Encoded size of a version.
const VERSION_BYTES: usize = 10;
const CHUNKS_MAX: u32 = 4_096;
/// Encoded size of a chunk's summary.
const STATE_BYTES: usize = 42;
const STATES_MAX: u32 = 1_024;
/// Encoded size of the status of a scrub: two lists of chunks, and the counts of two passes.
const SCRUB_BYTES: usize = 2 * DAMAGED_LISTED_MAX * 15 + 512;

/// The RPC port of a service.
pub(crate) struct Port {
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) routing: watch::Receiver<Arc<RoutingInfo>>,
    pub(crate) keys: Keys,
}

impl Service for Port {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let (request, presented): (StorageRequest, Presented) = decode_request(&call)?;
        let (capability, now) = (presented.capability()?, unix_now_s());
        let routing = || Arc::clone(&self.routing.borrow());
        let (grant, payload_bytes) = (&call.grant, call.payload.len());
        permit(grant, &request, payload_bytes, capability, &self.keys, now, routing)?;
        if request.class() != call.class {
            let (call_class, class) = (call.class, request.class());
            // A caller of protocol version 1 sends no class, and only updates and reads.
            if call_class != 0 || matches!(request, StorageRequest::ReadMany(_)) {
                return Err(Fault::bad_request(format!(
                    "class {call_class} for a request of class {class}"
                )));
            }
        }
        // Before memory is reserved, so that no larger list of reads waits for it.
        if let StorageRequest::ReadMany(reads) = &request
            && let Err(error) = reads.check()
        {
            let refused: StorageResult = Err(error);
            return Reply::with_payload(&refused, Bytes::new().into());
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
    ) -> Response {
        let id = request.to().target;
        let Some(target) = self.nodes.target(id) else {
            return (Err(StorageError::WrongTarget { target: id }), Bytes::new());
        };
        if let Err(error) = check_payload(&request, &payload) {
            return (Err(error), Bytes::new());
        }
        if let StorageRequest::Scrub(_, scrub) = request {
            return (Ok(StorageReply::Scrub(Box::new(target.scrub(scrub.start)))), Bytes::new());
        }
        if request.class() != class::QUERY {
            target.context.requests.fetch_add(1, Relaxed);
        }
        target.request(request, payload, expires).await
    }
}

/// Checks that the credential may make the request: a volume credential may make client requests for
/// files that the metadata service gave it a capability for, may update only the bytes that the
/// capability's terms name, and of a file of a snapshot may only read its epoch. Requests between replicas require the cluster's key.
fn permit(
    grant: &Grant,
    request: &StorageRequest,
    payload_bytes: usize,
    capability: Option<&Capability>,
    keys: &Keys,
    now_unix_s: u64,
    routing: impl FnOnce() -> Arc<RoutingInfo>,
) -> Result<(), Fault> {
    let Some(ticket) = grant.ticket() else { return Ok(()) };
    let Some(inode) = file_of(request) else {
        return grant.require_service("a request of the services");
    };
    let update = request.update();
    let write = update.is_some();
    let Some(capability) = capability else {
        return Err(Fault::forbidden(format!("no capability for {inode}")));
    };
    if write && ticket.read_only {
        return Err(Fault::forbidden(format!("the credential for `{}` is read-only", ticket.path)));
    }
    capability.check(&keys.current(), ticket, inode.0, write, now_unix_s)?;
    let terms = || {
        FileTerms::decode(capability.terms()).map_err(|error| {
            Fault::bad_request(format!("invalid terms of the capability: {error}"))
        })
    };
    match (update, request) {
        (Some((update, conditions)), _) => {
            let update = (update, conditions.volume);
            terms()?.check(update, payload_bytes, &routing(), now_unix_s).map_err(fault)
        }
        (None, StorageRequest::ReadUpTo(read)) => {
            terms()?.check_read_up_to(read.chunk).map_err(fault)
        }
        (None, _) => Ok(()),
    }
}

fn fault(error: TermsError) -> Fault {
    let code = if error.is_recoverable() { FaultCode::Expired } else { FaultCode::Forbidden };
    Fault { code, detail: error.to_string() }
}

/// Wall clock time, which expiry times of credentials use.
fn unix_now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// Approximate maximum size of a long reply; short replies are bounded by the number of calls.
fn reply_bytes(request: &StorageRequest) -> Option<usize> {
    match request {
        StorageRequest::Read(read) | StorageRequest::ReadUpTo(read) => {
            Some(read.length.min(REPLY_BYTES_MAX) as usize)
        }
        // Its limits have been checked.
        StorageRequest::ReadMany(reads) => Some(reads.charged_bytes() as usize),
        StorageRequest::Repair(_) => Some(REPAIR_BYTES),
        StorageRequest::SyncMetas(query) => Some(query.limit.min(METAS_MAX) as usize * META_BYTES),
        StorageRequest::QueryChunks(query) => {
            Some((query.limit.min(CHUNKS_MAX) as usize + 1) * CHUNK_BYTES)
        }
        StorageRequest::QueryVersions(query) => {
            Some((query.limit.min(CHUNKS_MAX) as usize + 1) * (CHUNK_BYTES + VERSION_BYTES))
        }
        StorageRequest::QueryStates(_, query) => {
            Some(query.limit.min(STATES_MAX) as usize * STATE_BYTES)
        }
        StorageRequest::Scrub(..) => Some(SCRUB_BYTES),
        _ => None,
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
    use threefs_core::message::{Address, LastChunk, QueryChunks, SyncMetas, SyncSession};
    use threefs_core::scrub::{ChunkSummary, Pass, QueryStates, ScrubStatus};

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
        let chunk = (LastChunk { index: u32::MAX, length: u32::MAX }, ChunkVersion(u64::MAX));
        let chunks = vec![chunk; CHUNKS_MAX as usize + 1];
        let reply = StorageReply::ChunkVersions { chunks, last: false };
        let request = StorageRequest::QueryVersions(query);
        assert!(encoded(reply) <= reply_bytes(&request).unwrap() + 16);

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
        let metas = vec![meta.clone(); METAS_MAX as usize];
        let session = SyncSession::default();
        let query = SyncMetas { to, session, after: None, limit: u32::MAX };
        let reply = StorageReply::Metas { metas, last: false };
        assert!(encoded(reply) <= reply_bytes(&StorageRequest::SyncMetas(query)).unwrap() + 16);

        let summary = ChunkSummary { pending: true, ..ChunkSummary::from(&meta) };
        let states = vec![summary; STATES_MAX as usize];
        let query = QueryStates { after: None, last: chunk, limit: u32::MAX };
        let request = StorageRequest::QueryStates(to, query);
        let reply = StorageReply::States(states);
        assert!(encoded(reply) <= reply_bytes(&request).unwrap() + 16);
        let pass = Pass {
            started_unix_s: u64::MAX,
            finished_unix_s: u64::MAX,
            chunks: u64::MAX,
            bytes: u64::MAX,
            damaged: u64::MAX,
            repaired: u64::MAX,
            different: u64::MAX,
        };
        let status = ScrubStatus {
            running: Some(pass),
            last: Some(pass),
            total: pass,
            due_unix_s: Some(u64::MAX),
            used_bytes: u64::MAX,
            damaged: u64::MAX,
            damaged_chunks: vec![chunk; DAMAGED_LISTED_MAX],
            different: u64::MAX,
            different_chunks: vec![chunk; DAMAGED_LISTED_MAX],
        };
        assert!(encoded(StorageReply::Scrub(Box::new(status))) <= SCRUB_BYTES);
    }
}
