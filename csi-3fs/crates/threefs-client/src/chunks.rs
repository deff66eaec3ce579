//! Calls of storage services for one chunk: reads, choice of replica, retries until the deadline.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, FaultCode, Payload, RpcError, decode, encode};
use threefs_core::checksum::Checksum;
use threefs_core::error::{Remedy, StorageError};
use threefs_core::ids::{ChainId, ChunkId, InodeId, NodeId, TargetId};
use threefs_core::layout::{Layout, LayoutError};
use threefs_core::message::{
    Address, ReadDone, ReadRequest, StorageReply, StorageRequest, StorageResult,
};
use threefs_core::routing::{ChainTarget, RoutingInfo};
use threefs_core::terms;

use crate::Client;
use crate::config::BUSY_TIMEOUT_FACTOR;
use crate::error::{Attempts, ClientError};
use crate::metadata::CallError;
use crate::progress::ProgressTimeout;

/// Pause before a request is retried at the same target.
const RETRY_PAUSE: Duration = Duration::from_millis(2);
/// How long to wait for newer routing before retrying with the current one.
pub(crate) const ROUTING_PAUSE: Duration = Duration::from_millis(50);
/// Maximum pause after an overload error.
const OVERLOAD_PAUSE_MAX: Duration = Duration::from_millis(320);
/// Rounds over all serving replicas, all of them damaged, before the chunk counts as corrupt: a
/// repair in progress needs a moment.
const CORRUPT_ROUNDS: u32 = 5;

/// Location of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLocation {
    pub chain: ChainId,
    pub chunk: ChunkId,
    pub chunk_bytes: u32,
}

/// Name of an operation, for errors.
pub(crate) type OperationName = Arc<str>;

impl Client {
    pub(crate) async fn after_refusal(
        &self,
        routing: &RoutingInfo,
        who: &str,
        error: StorageError,
        attempts: &mut Attempts,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        match error.remedy() {
            Remedy::GiveUp => return Err(attempts.refused(who, error)),
            Remedy::RefreshRouting => {
                self.0.routing.wait_newer(routing.version, deadline.within(ROUTING_PAUSE)).await;
            }
            Remedy::RetryAfterWait | Remedy::OtherReplica => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        attempts.failed(who, error);
        Ok(())
    }

    /// Reads a part of one chunk from any serving replica; `None` if the chunk does not exist.
    pub(crate) fn read<'a>(
        &'a self,
        what: &'a OperationName,
        location: ChunkLocation,
        offset: u32,
        length: u32,
        patience: impl Into<ProgressTimeout>,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ClientError>> {
        Box::pin(self.read_now(what, location, offset, length, patience.into()))
    }

    async fn read_now(
        &self,
        what: &OperationName,
        location: ChunkLocation,
        offset: u32,
        length: u32,
        patience: ProgressTimeout,
    ) -> Result<Option<Bytes>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        let mut timeout = self.0.config.read_attempt_timeout;
        let mut turn = self.0.read_turn.fetch_add(1, Relaxed);
        let mut damaged: u32 = 0;
        let mut overload = Overload::default();
        while !patience.expired() {
            let deadline = patience.deadline();
            let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? else {
                break;
            };
            let Some((to, replica, replicas)) = self.replica(&routing, location.chain, turn) else {
                attempts.failed(&location.chain.to_string(), "it has no SERVING target");
                self.0.routing.wait_newer(routing.version, deadline.within(ROUTING_PAUSE)).await;
                continue;
            };
            turn = turn.wrapping_add(1);
            let who = who(&routing, &replica);
            let request =
                StorageRequest::Read(ReadRequest { to, chunk: location.chunk, offset, length });
            let options = CallOptions {
                not_after: None,
                class: request.class(),
                idle_timeout: Some(timeout),
            };
            let attempt = deadline.within(timeout * BUSY_TIMEOUT_FACTOR);
            let payload = Payload::empty();
            let call = self.call(&routing, replica.node, &request, payload, attempt, options);
            match attempts.call(call.await)? {
                // An empty chunk was removed, or never existed.
                Ok((Ok(StorageReply::Read(read)), _)) if read.chunk_length == 0 => return Ok(None),
                Ok((Ok(StorageReply::Read(read)), payload)) => match verify(read, payload) {
                    Ok(payload) => return Ok(Some(payload)),
                    Err(detail) => attempts.failed(&who, detail),
                },
                Ok((Ok(other), _)) => return Err(ClientError::unexpected(&who, &other)),
                Ok((Err(StorageError::ChunkNotFound { .. }), _)) => return Ok(None),
                Ok((Err(error @ StorageError::ChunkCorrupt { .. }), _)) => {
                    attempts.failed(&who, error);
                    damaged += 1;
                    if damaged >= replicas * CORRUPT_ROUNDS {
                        return Err(attempts.corrupt(location.chunk));
                    }
                    if damaged.is_multiple_of(replicas) {
                        tokio::time::sleep(ROUTING_PAUSE).await;
                    }
                }
                Ok((Err(error), _)) => {
                    self.after_refusal(&routing, &who, error, &mut attempts, deadline).await?;
                }
                Err(error) if is_overloaded(&error) => {
                    attempts.failed(&who, &error);
                    overload.pause(deadline).await;
                }
                Err(error) => {
                    attempts.rpc(&who, &error)?;
                    timeout *= 2;
                    if replicas == 1 {
                        let pause = deadline.within(ROUTING_PAUSE);
                        self.0.routing.wait_newer(routing.version, pause).await;
                    }
                }
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }

    /// Makes one attempt at one node.
    pub(crate) async fn call(
        &self,
        routing: &RoutingInfo,
        node: NodeId,
        request: &StorageRequest,
        payload: Payload,
        deadline: Deadline,
        options: CallOptions<'_>,
    ) -> Result<(StorageResult, Bytes), CallError> {
        let address = routing.address(node).unwrap_or_default();
        let file = file_of(request, payload.len());
        let presented = self.0.metadata.capability_for(file, deadline).await?;
        let (peer, message) = (self.0.peers.at(address), encode(&(request, presented))?);
        let result = peer.call_with(message, payload, deadline, options).await;
        if matches!(&result, Err(error) if refuses_capability(error)) {
            self.0.metadata.forget_capability(file);
        }
        match &result {
            Ok(_) => self.0.peers.trust(node),
            // The node answers, but is overloaded.
            Err(error) if is_overloaded(error) => {}
            Err(_) => self.0.peers.suspect(node),
        }
        let reply = result?;
        Ok((decode(&reply.message)?, reply.payload.into_bytes()))
    }

    /// Selects a serving replica for attempt number `turn`, preferring nodes that have answered
    /// recently; also returns the number of serving replicas.
    fn replica(
        &self,
        routing: &RoutingInfo,
        chain: ChainId,
        turn: usize,
    ) -> Option<(Address, ChainTarget, u32)> {
        let chain = routing.chain(chain)?;
        let serving: Vec<ChainTarget> = chain.serving().copied().collect();
        let trusted: Vec<ChainTarget> =
            serving.iter().filter(|it| !self.0.peers.is_suspected(it.node)).copied().collect();
        let candidates = if trusted.is_empty() { &serving } else { &trusted };
        let replica = *candidates.get(turn % candidates.len().max(1))?;
        let to = Address { chain: chain.id, chain_version: chain.version, target: replica.target };
        Some((to, replica, serving.len() as u32))
    }
}

/// The file of a request, and the end of the bytes that it writes.
fn file_of(request: &StorageRequest, payload_bytes: usize) -> Option<(InodeId, u64)> {
    match request {
        StorageRequest::Update(update) => {
            Some((update.chunk.inode, terms::end_of(update, payload_bytes)))
        }
        StorageRequest::Read(read) => Some((read.chunk.inode, 0)),
        StorageRequest::QueryChunks(query) => Some((query.inode, 0)),
        StorageRequest::QueryLastChunk(query) => Some((query.inode, 0)),
        _ => None,
    }
}

/// Whether the server may have rejected the capability.
fn refuses_capability(error: &RpcError) -> bool {
    let RpcError::Faulted { fault, .. } = error else { return false };
    matches!(fault.code, FaultCode::BadRequest | FaultCode::Expired | FaultCode::Forbidden)
}

/// Whether the server rejected the request because of overload.
pub(crate) fn is_overloaded(error: &RpcError) -> bool {
    matches!(error, RpcError::Faulted { fault, .. } if fault.code == FaultCode::Overloaded)
}

/// Exponential pauses between attempts rejected because of overload, so that rejections cost the
/// server less than its work.
pub(crate) struct Overload(Duration);

impl Default for Overload {
    fn default() -> Self {
        Self(Duration::from_millis(5))
    }
}

impl Overload {
    pub(crate) async fn pause(&mut self, deadline: Deadline) {
        // Jitter, so that clients do not retry at the same time.
        let pause = self.0.mul_f64(rand::random_range(0.5..1.5));
        tokio::time::sleep_until(deadline.within(pause).instant().into()).await;
        self.0 = (self.0 * 2).min(OVERLOAD_PAUSE_MAX);
    }
}

pub(crate) fn head(
    routing: &RoutingInfo,
    chain: ChainId,
    attempts: &mut Attempts,
) -> Option<(Address, ChainTarget)> {
    let current = routing.chain(chain);
    let Some((current, head)) = current.and_then(|current| Some((current, *current.head()?)))
    else {
        attempts.failed(&chain.to_string(), describe(routing, chain));
        return None;
    };
    Some((Address { chain, chain_version: current.version, target: head.target }, head))
}

fn verify(read: ReadDone, payload: Bytes) -> Result<Bytes, String> {
    let got = Checksum::of(&payload);
    if payload.len() != read.length as usize || got != read.checksum {
        return Err(format!(
            "received {} bytes with checksum {got}, expected {} bytes with {}",
            payload.len(),
            read.length,
            read.checksum
        ));
    }
    Ok(payload)
}

pub(crate) fn who(routing: &RoutingInfo, location: &ChainTarget) -> String {
    name_of(
        location.target,
        location.node,
        routing.address(location.node).unwrap_or("unknown address"),
    )
}

fn name_of(target: TargetId, node: NodeId, address: &str) -> String {
    format!("{target} on {node} at {address}")
}

fn describe(routing: &RoutingInfo, chain: ChainId) -> String {
    let Some(current) = routing.chain(chain) else {
        return "the chain is not in the routing".into();
    };
    let states: Vec<String> =
        current.targets.iter().map(|it| format!("{} {}", it.target, it.state)).collect();
    format!("it has no SERVING target ({})", states.join(", "))
}

impl Client {
    /// The chains of a layout. Waits for routing that includes the layout's chain table.
    pub(crate) async fn chains(
        &self,
        what: &OperationName,
        layout: &Layout,
        deadline: Deadline,
    ) -> Result<Vec<ChainId>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        while let Some(routing) = self.0.routing.current(&mut attempts, deadline).await? {
            match layout.resolve(&routing) {
                Err(error @ LayoutError::NoTable { .. }) if !deadline.passed() => {
                    attempts.failed("mgmtd", error);
                    self.0.routing.wait_newer(routing.version, deadline).await;
                }
                Err(LayoutError::NoTable { .. }) => break,
                resolved => return Ok(resolved?),
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }
}
