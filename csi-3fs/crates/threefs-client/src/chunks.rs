//! One read or update of one chunk, over as many attempts as its deadline allows.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use fabric::BoxFuture;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, FaultCode, NotAfter, Payload, RpcError, decode, encode};
use threefs_core::checksum::Checksum;
use threefs_core::chunk::ContentChange;
use threefs_core::error::{Remedy, StorageError};
use threefs_core::ids::{ChainId, ChunkId, InodeId, NodeId, RequestTag, TargetId};
use threefs_core::message::{
    Address, ReadDone, ReadRequest, StorageReply, StorageRequest, StorageResult, UpdateRequest,
    Updated,
};
use threefs_core::routing::{ChainTarget, RoutingInfo};
use threefs_core::terms;

use crate::Client;
use crate::config::BUSY_PATIENCE;
use crate::error::{Attempts, ClientError};
use crate::metadata::CallError;
use crate::patience::Patience;

/// Pause before the same request goes to the same place again.
const RETRY_PAUSE: Duration = Duration::from_millis(2);
/// How long to wait for newer routing before the known one is tried again.
const ROUTING_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause after a refusal as overload.
const OVERLOAD_PAUSE_MAX: Duration = Duration::from_millis(320);
/// Rounds over all serving replicas, each of which found damage, before the chunk counts as lost:
/// a repair under way needs a moment.
const CORRUPT_ROUNDS: u32 = 5;

/// Where a chunk lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub chain: ChainId,
    pub chunk: ChunkId,
    pub chunk_bytes: u32,
}

/// What an operation tells about itself in errors.
pub(crate) type What = Arc<str>;

impl Client {
    /// Brings one update into force on all serving replicas. Exactly once, whatever happens.
    pub(crate) fn update<'a>(
        &'a self,
        what: &'a What,
        place: Place,
        change: ContentChange,
        payload: Bytes,
        patience: impl Into<Patience>,
    ) -> BoxFuture<'a, Result<Updated, ClientError>> {
        Box::pin(self.update_now(what, place, change, payload, patience.into()))
    }

    async fn update_now(
        &self,
        what: &What,
        place: Place,
        change: ContentChange,
        payload: Bytes,
        patience: Patience,
    ) -> Result<Updated, ClientError> {
        let tag = self.0.channels.take();
        let result = self.update_tagged(what, place, change, payload, tag, &patience).await;
        // After an error a copy may still be on its way: the channel is given up.
        if matches!(result, Ok(_) | Err(ClientError::NotReserved { .. })) {
            self.0.channels.answered(tag);
        }
        result
    }

    async fn update_tagged(
        &self,
        what: &What,
        place: Place,
        change: ContentChange,
        payload: Bytes,
        tag: RequestTag,
        patience: &Patience,
    ) -> Result<Updated, ClientError> {
        let payload_checksum = Checksum::of(&payload);
        let Place { chain, chunk, chunk_bytes } = place;
        let ask = |to| {
            StorageRequest::Update(UpdateRequest {
                to,
                chunk,
                tag,
                change,
                payload_checksum,
                chunk_bytes,
            })
        };
        let mut attempts = Attempts::of(&**what);
        match self.ask_head(chain, &mut attempts, payload, patience, ask).await? {
            Some((_, StorageReply::Updated(updated))) => Ok(updated),
            Some((who, other)) => Err(ClientError::unexpected(&who, &other)),
            None => Err(attempts.unavailable(self.0.config.timeout)),
        }
    }

    /// Asks the head of a chain until it answers, whoever the head is by then. Gives its name and
    /// answer, or `None` at the deadline.
    pub(crate) async fn ask_head(
        &self,
        chain: ChainId,
        attempts: &mut Attempts,
        payload: Bytes,
        patience: &Patience,
        ask: impl Fn(Address) -> StorageRequest,
    ) -> Result<Option<(String, StorageReply)>, ClientError> {
        let mut overload = Overload::default();
        while !patience.over() {
            // Later attempts may have a later end, never an earlier one: nothing that was sent may
            // begin once the operation has failed.
            let deadline = patience.deadline();
            let not_after = NotAfter { lease: self.0.lease.clone(), end: deadline };
            let Some(routing) = self.0.routing.newest(attempts, deadline).await? else {
                break;
            };
            let Some((to, head)) = head(&routing, chain, attempts) else {
                self.0.routing.newer_than(routing.version, deadline.within(ROUTING_PAUSE)).await;
                continue;
            };
            let request = ask(to);
            let options = CallOptions {
                not_after: matches!(request, StorageRequest::Update(_)).then_some(&not_after),
                class: request.class(),
                idle_timeout: Some(self.0.config.update_attempt_timeout),
            };
            let attempt = deadline.within(self.0.config.update_attempt_timeout * BUSY_PATIENCE);
            let payload = payload.clone().into();
            let call = self.call(&routing, head.node, &request, payload, attempt, options);
            let other_head = self
                .0
                .routing
                .until(|now| now.chain(chain).is_none_or(|chain| chain.head() != Some(&head)));
            let who = who(&routing, &head);
            let result = tokio::select! {
                result = call => result,
                // The head was replaced while we waited for it: the new one knows the tag.
                () = other_head => {
                    attempts.doubt();
                    attempts.failed(&who, "it was replaced while the answer was awaited");
                    continue;
                }
            };
            match attempts.call(result)? {
                Ok((Ok(reply), _)) => return Ok(Some((who, reply))),
                Ok((Err(error), _)) => {
                    // The head may have it, and pass it on later.
                    attempts.doubt();
                    self.after_refusal(&routing, &who, error, attempts, deadline).await?;
                }
                Err(error) if is_overloaded(&error) => {
                    attempts.failed(&who, &error);
                    overload.pause(deadline).await;
                }
                Err(error) => {
                    attempts.rpc(&who, &error)?;
                    let pause = deadline.within(ROUTING_PAUSE);
                    self.0.routing.newer_than(routing.version, pause).await;
                }
            }
        }
        Ok(None)
    }

    async fn after_refusal(
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
                self.0.routing.newer_than(routing.version, deadline.within(ROUTING_PAUSE)).await;
            }
            Remedy::RetryAfterWait | Remedy::OtherReplica => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        attempts.failed(who, error);
        Ok(())
    }

    /// Reads a part of one chunk from any serving replica; `None` where there is no such chunk.
    pub(crate) fn read<'a>(
        &'a self,
        what: &'a What,
        place: Place,
        offset: u32,
        length: u32,
        patience: impl Into<Patience>,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ClientError>> {
        Box::pin(self.read_now(what, place, offset, length, patience.into()))
    }

    async fn read_now(
        &self,
        what: &What,
        place: Place,
        offset: u32,
        length: u32,
        patience: Patience,
    ) -> Result<Option<Bytes>, ClientError> {
        let mut attempts = Attempts::of(&**what);
        let mut timeout = self.0.config.read_attempt_timeout;
        let mut turn = self.0.read_turn.fetch_add(1, Relaxed);
        let mut damaged: u32 = 0;
        let mut overload = Overload::default();
        while !patience.over() {
            let deadline = patience.deadline();
            let Some(routing) = self.0.routing.newest(&mut attempts, deadline).await? else {
                break;
            };
            let Some((to, replica, replicas)) = self.replica(&routing, place.chain, turn) else {
                attempts.failed(&place.chain.to_string(), "no target of it is SERVING");
                self.0.routing.newer_than(routing.version, deadline.within(ROUTING_PAUSE)).await;
                continue;
            };
            turn = turn.wrapping_add(1);
            let who = who(&routing, &replica);
            let request =
                StorageRequest::Read(ReadRequest { to, chunk: place.chunk, offset, length });
            let options = CallOptions {
                not_after: None,
                class: request.class(),
                idle_timeout: Some(timeout),
            };
            let attempt = deadline.within(timeout * BUSY_PATIENCE);
            let payload = Payload::empty();
            let call = self.call(&routing, replica.node, &request, payload, attempt, options);
            match attempts.call(call.await)? {
                // Chunks have bytes: what has none was removed, or never was.
                Ok((Ok(StorageReply::Read(done)), _)) if done.chunk_length == 0 => return Ok(None),
                Ok((Ok(StorageReply::Read(done)), payload)) => match checked(done, payload) {
                    Ok(payload) => return Ok(Some(payload)),
                    Err(detail) => attempts.failed(&who, detail),
                },
                Ok((Ok(other), _)) => return Err(ClientError::unexpected(&who, &other)),
                Ok((Err(StorageError::ChunkNotFound { .. }), _)) => return Ok(None),
                Ok((Err(error @ StorageError::ChunkCorrupt { .. }), _)) => {
                    attempts.failed(&who, error);
                    damaged += 1;
                    if damaged >= replicas * CORRUPT_ROUNDS {
                        return Err(attempts.corrupt(place.chunk));
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
                        self.0.routing.newer_than(routing.version, pause).await;
                    }
                }
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }

    /// One attempt at one node.
    async fn call(
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
        let shown = self.0.metadata.shown(file, deadline).await?;
        let (peer, message) = (self.0.peers.at(address), encode(&(request, shown))?);
        let result = peer.call_with(message, payload, deadline, options).await;
        if matches!(&result, Err(error) if refuses_capability(error)) {
            self.0.metadata.forget_capability(file);
        }
        match &result {
            Ok(_) => self.0.peers.trust(node),
            // It answers, and has much to do.
            Err(error) if is_overloaded(error) => {}
            Err(_) => self.0.peers.suspect(node),
        }
        let reply = result?;
        Ok((decode(&reply.message)?, reply.payload.into_bytes()))
    }

    /// A serving replica for the attempt `turn`, those that lately answered first; and how many
    /// serve.
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

/// The file that a client's request is about; it writes bytes of it below the end.
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

/// What was shown may be what the server does not take.
fn refuses_capability(error: &RpcError) -> bool {
    let RpcError::Faulted { fault, .. } = error else { return false };
    matches!(fault.code, FaultCode::BadRequest | FaultCode::Expired | FaultCode::Forbidden)
}

/// The server refused because it has too much to do: nothing is wrong with it.
fn is_overloaded(error: &RpcError) -> bool {
    matches!(error, RpcError::Faulted { fault, .. } if fault.code == FaultCode::Overloaded)
}

/// Pauses between attempts that are refused as overload: they double, so that refusals cost the
/// server less than the work that it is busy with.
struct Overload(Duration);

impl Default for Overload {
    fn default() -> Self {
        Self(Duration::from_millis(5))
    }
}

impl Overload {
    async fn pause(&mut self, deadline: Deadline) {
        // Not all at the same moment.
        let pause = self.0.mul_f64(rand::random_range(0.5..1.5));
        tokio::time::sleep_until(deadline.within(pause).instant().into()).await;
        self.0 = (self.0 * 2).min(OVERLOAD_PAUSE_MAX);
    }
}

fn head(
    routing: &RoutingInfo,
    chain: ChainId,
    attempts: &mut Attempts,
) -> Option<(Address, ChainTarget)> {
    let known = routing.chain(chain);
    let Some((known, head)) = known.and_then(|known| Some((known, *known.head()?))) else {
        attempts.failed(&chain.to_string(), describe(routing, chain));
        return None;
    };
    Some((Address { chain, chain_version: known.version, target: head.target }, head))
}

fn checked(done: ReadDone, payload: Bytes) -> Result<Bytes, String> {
    let got = Checksum::of(&payload);
    if payload.len() != done.length as usize || got != done.checksum {
        return Err(format!(
            "{} bytes with checksum {got} arrived, {} with {} were sent",
            payload.len(),
            done.length,
            done.checksum
        ));
    }
    Ok(payload)
}

fn who(routing: &RoutingInfo, place: &ChainTarget) -> String {
    name_of(place.target, place.node, routing.address(place.node).unwrap_or("unknown address"))
}

fn name_of(target: TargetId, node: NodeId, address: &str) -> String {
    format!("{target} on {node} at {address}")
}

fn describe(routing: &RoutingInfo, chain: ChainId) -> String {
    let Some(known) = routing.chain(chain) else {
        return "it is not in the routing".into();
    };
    let states: Vec<String> =
        known.targets.iter().map(|it| format!("{} {}", it.target, it.state)).collect();
    format!("no target of it is SERVING ({})", states.join(", "))
}
