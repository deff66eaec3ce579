//! The calling side of mgmtd.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use fabric::auth::credentials::Credentials;
use fabric::deadline::Deadline;
use fabric::rpc::{ConnectionConfig, Pool, PoolConfig, RpcError};
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::ids::{NodeId, RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::protocol::{
    CONTEXT, ClusterStatus, MgmtdError, MgmtdReply, MgmtdRequest, MgmtdResult, Promotion,
    RebalancePlan, WAIT_MS_MAX,
};
use crate::registration::{MetaRegistered, MetaRegistration};

/// One attempt at a call that does not wait for anything.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between attempts when nobody is primary.
const PAUSE: Duration = Duration::from_millis(50);
/// One long poll of [`MgmtdClient::follow`].
const POLL: Duration = Duration::from_secs(10);

/// Why mgmtd gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum MgmtdClientError {
    /// The call did not reach it, or its answer did not arrive.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// It refused.
    #[error(transparent)]
    Refused(#[from] MgmtdError),
    /// The answer does not fit the question: another version of the service.
    #[error("mgmtd answered {got} to a question for {expected}; do both sides run one version?")]
    Unexpected {
        /// What was asked for.
        expected: &'static str,
        /// What came, shortened.
        got: String,
    },
}

/// A client of all mgmtds of a cluster. Finds the primary; retries until the deadline. Clones share
/// connections.
#[derive(Clone)]
pub struct MgmtdClient(Arc<Inner>);

struct Inner {
    pools: Vec<Pool>,
    /// The one that answered last.
    primary: AtomicUsize,
}

impl MgmtdClient {
    /// A client of the mgmtds at these addresses (`host:port`). Connects when first asked.
    pub fn new<C: Clone + Into<Credentials>>(addresses: &[String], credentials: &C) -> Self {
        let credentials: Credentials = credentials.clone().into();
        let pool = |address: &String| {
            let connection = ConnectionConfig::new(CONTEXT, &credentials);
            Pool::new(address, PoolConfig::new(connection))
        };
        let pools = addresses.iter().map(pool).collect();
        Self(Arc::new(Inner { pools, primary: AtomicUsize::new(0) }))
    }

    /// Sends one heartbeat, once to each mgmtd until one takes it; the caller's next heartbeat is
    /// the retry.
    ///
    /// # Errors
    /// [`MgmtdError::Replaced`] means that the caller must end.
    pub async fn heartbeat(
        &self,
        heartbeat: Heartbeat,
        deadline: Deadline,
    ) -> Result<HeartbeatReply, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Heartbeat(heartbeat), Duration::ZERO, deadline).await? {
            MgmtdReply::Heartbeat(reply) => Ok(reply),
            other => Err(unexpected("a heartbeat", &other)),
        }
    }

    /// Routing newer than `known`, waiting up to `wait` for it; `None` when there is none.
    ///
    /// # Errors
    /// When no primary answers before the deadline.
    pub async fn routing(
        &self,
        known: RoutingVersion,
        wait: Duration,
        deadline: Deadline,
    ) -> Result<Option<RoutingInfo>, MgmtdClientError> {
        let wait = deadline.remaining().unwrap_or_default().min(wait);
        let wait_ms = (wait.as_millis() as u64).min(WAIT_MS_MAX);
        match self.ask(&MgmtdRequest::Routing { known, wait_ms }, wait, deadline).await? {
            MgmtdReply::Routing(routing) => Ok(routing),
            other => Err(unexpected("routing", &other)),
        }
    }

    /// How the cluster is.
    ///
    /// # Errors
    /// When no primary answers before the deadline.
    pub async fn status(&self, deadline: Deadline) -> Result<ClusterStatus, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Status, Duration::ZERO, deadline).await? {
            MgmtdReply::Status(status) => Ok(status),
            other => Err(unexpected("status", &other)),
        }
    }

    /// What has to move for all nodes to hold as much as the others; with `apply`, it begins.
    ///
    /// # Errors
    /// When no primary answers before the deadline, or a wish cannot be had.
    pub async fn rebalance(
        &self,
        apply: bool,
        leaving: Option<Vec<NodeId>>,
        deadline: Deadline,
    ) -> Result<RebalancePlan, MgmtdClientError> {
        let request = MgmtdRequest::Rebalance { apply, leaving };
        match self.ask(&request, Duration::ZERO, deadline).await? {
            MgmtdReply::Plan(plan) => Ok(plan),
            other => Err(unexpected("a plan", &other)),
        }
    }

    /// See [`MgmtdRequest::Promote`].
    ///
    /// # Errors
    /// Any [`MgmtdClientError`].
    pub async fn promote(
        &self,
        target: TargetId,
        apply: bool,
        deadline: Deadline,
    ) -> Result<Promotion, MgmtdClientError> {
        let request = MgmtdRequest::Promote { target, apply };
        match self.ask(&request, Duration::ZERO, deadline).await? {
            MgmtdReply::Promotion(promotion) => Ok(promotion),
            other => Err(unexpected("a promotion", &other)),
        }
    }

    /// Registers the store of a metadata service.
    ///
    /// # Errors
    /// When no primary answers before the deadline, or the store does not belong to this cluster.
    pub async fn register_meta(
        &self,
        registration: MetaRegistration,
        deadline: Deadline,
    ) -> Result<MetaRegistered, MgmtdClientError> {
        let request = MgmtdRequest::RegisterMeta(registration);
        match self.ask(&request, Duration::ZERO, deadline).await? {
            MgmtdReply::MetaRegistered(registered) => Ok(registered),
            other => Err(unexpected("a registration", &other)),
        }
    }

    /// Keeps a copy of the routing up to date in the background until the follower is dropped.
    pub fn follow(&self) -> RoutingFollower {
        let (sender, receiver) = watch::channel(Arc::new(RoutingInfo::default()));
        let client = self.clone();
        let task = tokio::spawn(async move {
            loop {
                let known = sender.borrow().version;
                match client.routing(known, POLL, Deadline::after(POLL * 2)).await {
                    Ok(Some(routing)) => drop(sender.send_replace(Arc::new(routing))),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::debug!(%error, "routing");
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        });
        RoutingFollower { receiver, task }
    }

    async fn ask(
        &self,
        request: &MgmtdRequest,
        wait: Duration,
        deadline: Deadline,
    ) -> Result<MgmtdReply, MgmtdClientError> {
        let count = self.0.pools.len().max(1);
        let mut attempts = 0;
        loop {
            let number = (self.0.primary.load(Relaxed) + attempts) % count;
            let Some(pool) = self.0.pools.get(number) else {
                return Err(unreachable_nobody());
            };
            let attempt = deadline.within(wait + ATTEMPT_TIMEOUT);
            let error = match pool
                .ask::<_, MgmtdResult>(request, wait + ATTEMPT_TIMEOUT, attempt, None)
                .await
            {
                Ok(Ok(reply)) => {
                    self.0.primary.store(number, Relaxed);
                    return Ok(reply);
                }
                Ok(Err(error)) if error.retryable() => MgmtdClientError::Refused(error),
                Ok(Err(error)) => return Err(error.into()),
                Err(error) if error.retryable() => error.into(),
                Err(error) => return Err(error.into()),
            };
            attempts += 1;
            if deadline.remaining().is_none_or(|left| left <= PAUSE) {
                return Err(error);
            }
            if attempts % count == 0 {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn unreachable_nobody() -> MgmtdClientError {
    MgmtdClientError::Rpc(RpcError::Unreachable {
        context: CONTEXT.into(),
        peer: "(none)".into(),
        detail: "no address of mgmtd is given".into(),
    })
}

fn unexpected(expected: &'static str, reply: &MgmtdReply) -> MgmtdClientError {
    let got = format!("{reply:?}").chars().take(60).collect();
    MgmtdClientError::Unexpected { expected, got }
}

/// A copy of the routing that follows mgmtd's. Its first value is empty (version 0).
pub struct RoutingFollower {
    receiver: watch::Receiver<Arc<RoutingInfo>>,
    task: JoinHandle<()>,
}

impl RoutingFollower {
    /// The newest routing that arrived.
    pub fn now(&self) -> Arc<RoutingInfo> {
        Arc::clone(&self.receiver.borrow())
    }

    /// For waiting for changes oneself. It ends when the follower is dropped.
    pub fn receiver(&self) -> watch::Receiver<Arc<RoutingInfo>> {
        self.receiver.clone()
    }

    /// The first routing that satisfies `wanted`, or `None` at the deadline.
    pub async fn wait_for(
        &self,
        deadline: Deadline,
        mut goal: impl FnMut(&RoutingInfo) -> bool,
    ) -> Option<Arc<RoutingInfo>> {
        let mut receiver = self.receiver.clone();
        let arrived = receiver.wait_for(|routing| goal(routing));
        match tokio::time::timeout_at(deadline.instant().into(), arrived).await {
            Ok(Ok(routing)) => Some(Arc::clone(&routing)),
            _ => None,
        }
    }
}

impl Drop for RoutingFollower {
    fn drop(&mut self) {
        self.task.abort();
    }
}
