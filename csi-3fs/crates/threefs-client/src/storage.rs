//! Calls of storage services: connections by address, one attempt, and the pauses between attempts.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric::deadline::Deadline;
use fabric::rpc::{CallOptions, FaultCode, Payload, Pools, RpcError, decode, encode};
use threefs_core::error::{Remedy, StorageError};
use threefs_core::ids::NodeId;
use threefs_core::message::{StorageRequest, StorageResult};
use threefs_core::routing::RoutingInfo;
use threefs_core::terms;

use crate::Client;
use crate::config::ClientConfig;
use crate::error::{Attempts, CallError, ClientError};

/// Pause before a request is retried at the same target.
const RETRY_PAUSE: Duration = Duration::from_millis(2);
/// Pause after a refusal because of the epoch.
const EPOCH_PAUSE: Duration = Duration::from_millis(10);
/// How long to wait for newer routing before retrying with the current one.
pub(crate) const ROUTING_PAUSE: Duration = Duration::from_millis(50);
/// Maximum pause after an overload error.
const OVERLOAD_PAUSE_MAX: Duration = Duration::from_millis(320);
/// How long a node that did not answer is deprioritized.
const SUSPICION: Duration = Duration::from_secs(1);

/// Connections to storage services, and the nodes that have recently not answered.
pub(crate) struct Peers {
    /// Addresses come from the routing, so there are few.
    pools: Pools,
    suspected: Mutex<HashMap<NodeId, Instant>>,
}

impl Peers {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        Self { pools: Pools::new(config.storage_pool()), suspected: Mutex::default() }
    }

    /// Records that the node did not answer.
    fn suspect(&self, node: NodeId) {
        self.suspected().insert(node, Instant::now() + SUSPICION);
    }

    /// Records that the node answered.
    fn trust(&self, node: NodeId) {
        self.suspected().remove(&node);
    }

    /// Whether other nodes should be preferred.
    pub(crate) fn is_suspected(&self, node: NodeId) -> bool {
        self.suspected().get(&node).is_some_and(|until| Instant::now() < *until)
    }

    fn suspected(&self) -> MutexGuard<'_, HashMap<NodeId, Instant>> {
        self.suspected.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Client {
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
        let end = request.update().map_or(0, |(update, _)| terms::end_of(update, payload.len()));
        let file = terms::file_of(request).map(|inode| (inode, end));
        let presented = self.0.metadata.capability_for(file, deadline).await?;
        let (peer, message) = (self.0.peers.pools.at(address), encode(&(request, presented))?);
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

    /// Handles an error reply: waits as its remedy asks, or returns it if a retry cannot succeed.
    pub(crate) async fn after_refusal(
        &self,
        routing: &RoutingInfo,
        who: &str,
        error: StorageError,
        attempts: &mut Attempts,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        match error.remedy() {
            Remedy::GiveUp => return Err(attempts.refusal(who, error)),
            Remedy::RefreshRouting => {
                self.0.routing.wait_newer(routing.version, deadline.within(ROUTING_PAUSE)).await;
            }
            Remedy::RenewEpoch => {
                if let Some(inode) = error.inode() {
                    self.0.metadata.renew_place(inode, deadline).await?;
                }
                // While a snapshot is created, the epoch stays the same.
                tokio::time::sleep_until(deadline.within(EPOCH_PAUSE).instant().into()).await;
            }
            Remedy::RetryAfterWait | Remedy::OtherReplica => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        attempts.record_failure(who, error);
        Ok(())
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
