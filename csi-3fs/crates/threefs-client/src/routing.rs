//! Routing: where the chunks of a file are, and the head of each chain.
//!
//! Kept up to date by one long poll, so that changes arrive when they are published and operations
//! do not query mgmtd.

use std::sync::Arc;
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::ids::{ChainId, ChunkId, Epoch, RoutingVersion};
use threefs_core::layout::{ChunkSpan, Layout, LayoutError};
use threefs_core::message::Address;
use threefs_core::routing::{ChainTarget, RoutingInfo};
use threefs_mgmtd::{MgmtdClient, MgmtdClientError, RoutingFollower};

use crate::Client;
use crate::config::ClientConfig;
use crate::error::{Attempts, ClientError, OperationName};
use crate::files::FileHandle;

/// Timeout of a direct query to mgmtd before the followed routing is checked again.
const ASK: Duration = Duration::from_millis(500);

/// Follows mgmtd until dropped.
pub(crate) struct Routing {
    pub(crate) mgmtd: MgmtdClient,
    follower: RoutingFollower,
    names: String,
}

impl Routing {
    /// Starts to follow.
    pub(crate) fn follow(config: &ClientConfig) -> Self {
        let mgmtd = MgmtdClient::new(&config.mgmtd, &config.credentials);
        let follower = mgmtd.follow();
        Self { mgmtd, follower, names: format!("mgmtd at {}", config.mgmtd.join(", ")) }
    }

    /// Current routing; waits for the first one, `None` at the deadline.
    pub(crate) async fn current(
        &self,
        attempts: &mut Attempts,
        deadline: Deadline,
    ) -> Result<Option<Arc<RoutingInfo>>, ClientError> {
        loop {
            let now = self.follower.now();
            if now.version > RoutingVersion(0) {
                return Ok(Some(now));
            }
            if deadline.passed() {
                return Ok(None);
            }
            // Queried only for the reason of the delay; the follower delivers the routing.
            let query = deadline.within(ASK);
            match self.mgmtd.routing(RoutingVersion(0), Duration::ZERO, query).await {
                Ok(_) => attempts.record_failure(&self.names, "mgmtd has no routing yet"),
                Err(error) => self.record_failure(attempts, error)?,
            }
            let pause = deadline.within(Duration::from_millis(50));
            self.follower.wait_for(pause, |it| it.version > RoutingVersion(0)).await;
        }
    }

    /// Waits for routing newer than `current`, at most until `pause`.
    pub(crate) async fn wait_newer(&self, current: RoutingVersion, pause: Deadline) {
        self.follower.wait_for(pause, |it| it.version > current).await;
    }

    /// Returns when `expired` holds for some routing.
    pub(crate) async fn until(&self, expired: impl Fn(&RoutingInfo) -> bool) {
        let mut receiver = self.follower.receiver();
        if receiver.wait_for(|now| expired(now)).await.is_err() {
            // The follower has ended: the client is shutting down, and this future with it.
            std::future::pending::<()>().await;
        }
    }

    /// Records a failed call to mgmtd; an error if a retry cannot succeed.
    pub(crate) fn record_failure(
        &self,
        attempts: &mut Attempts,
        error: MgmtdClientError,
    ) -> Result<(), ClientError> {
        match error {
            MgmtdClientError::Rpc(error) => attempts.rpc(&self.names, &error),
            MgmtdClientError::Refused(error) => {
                attempts.record_failure(&self.names, error);
                Ok(())
            }
            unexpected @ MgmtdClientError::Unexpected { .. } => Err(ClientError::Protocol {
                who: self.names.clone(),
                detail: unexpected.to_string(),
            }),
        }
    }
}

/// Location of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLocation {
    pub chain: ChainId,
    /// Of a file of a snapshot: with the epoch of the snapshot.
    pub chunk: ChunkId,
    pub chunk_bytes: u32,
}

/// A range of one chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkRange {
    pub location: ChunkLocation,
    pub offset: u32,
    pub length: u32,
}

impl Client {
    /// Splits a range of a file into ranges of its chunks, in order.
    pub(crate) async fn locate(
        &self,
        what: &OperationName,
        file: &FileHandle,
        offset: u64,
        length: u64,
        deadline: Deadline,
    ) -> Result<Vec<ChunkRange>, ClientError> {
        let chains = self.chains(what, &file.layout, deadline).await?;
        let epoch = match file.is_in_snapshot() {
            true => self.snapshot_epoch(file, deadline).await?,
            false => Epoch::default(),
        };
        let located = |ChunkSpan { index, offset, length }| {
            // A resolved layout has at least one chain.
            let chain = chains.get(index as usize % chains.len().max(1));
            let location = ChunkLocation {
                chain: chain.copied().unwrap_or_default(),
                chunk: ChunkId::new(file.inode, index).in_epoch(epoch),
                chunk_bytes: file.layout.chunk_bytes,
            };
            ChunkRange { location, offset, length }
        };
        Ok(file.layout.spans(offset, length)?.into_iter().map(located).collect())
    }

    /// The epoch of the snapshot of a file, which the handle keeps.
    async fn snapshot_epoch(
        &self,
        file: &FileHandle,
        deadline: Deadline,
    ) -> Result<Epoch, ClientError> {
        if let Some(epoch) = file.epoch.get() {
            return Ok(*epoch);
        }
        let epoch = self.0.metadata.learn_place(file.inode, deadline).await?.epoch;
        Ok(*file.epoch.get_or_init(|| epoch))
    }

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
                    attempts.record_failure("mgmtd", error);
                    self.0.routing.wait_newer(routing.version, deadline).await;
                }
                Err(LayoutError::NoTable { .. }) => break,
                resolved => return Ok(resolved?),
            }
        }
        Err(attempts.unavailable(self.0.config.timeout))
    }
}

/// The head of a chain and its address; `None`, with the reason in `attempts`, without a serving
/// target.
pub(crate) fn head(
    routing: &RoutingInfo,
    chain: ChainId,
    attempts: &mut Attempts,
) -> Option<(Address, ChainTarget)> {
    let current = routing.chain(chain);
    let Some((current, head)) = current.and_then(|current| Some((current, *current.head()?)))
    else {
        attempts.record_failure(&chain.to_string(), describe(routing, chain));
        return None;
    };
    Some((Address { chain, chain_version: current.version, target: head.target }, head))
}

/// Name of a target, for errors.
pub(crate) fn who(routing: &RoutingInfo, ChainTarget { target, node, .. }: &ChainTarget) -> String {
    let address = routing.address(*node).unwrap_or("unknown address");
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
