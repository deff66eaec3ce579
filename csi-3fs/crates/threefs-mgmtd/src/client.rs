//! RPC client of mgmtd.

mod fences;
mod heartbeats;

pub use heartbeats::{HeartbeatResult, Heartbeats, NodeReport};

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fabric::auth::credentials::Credentials;
use fabric::deadline::Deadline;
use fabric::rpc::FaultCode::{self, BadRequest, Forbidden};
use fabric::rpc::{ConnectionConfig, Pool, PoolConfig, RpcError};
use threefs_core::heartbeat::{Heartbeat, HeartbeatReply};
use threefs_core::ids::{NodeId, RoutingVersion, TargetId};
use threefs_core::routing::RoutingInfo;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::drain_change::DrainChange;
use crate::move_report::MoveReport;
use crate::protocol::{
    CONTEXT, ClusterStatus, MetaRegistered, MetaRegistration, MgmtdError, MgmtdReply, MgmtdRequest,
    MgmtdResult, Promotion, RebalancePlan, WAIT_MS_MAX,
};
use crate::report::{DomainReport, UnconfirmedReport};

/// Timeout of one attempt at a call that does not wait.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts while mgmtd has no primary.
const PAUSE: Duration = Duration::from_millis(50);
/// Time for which calls avoid an mgmtd that did not reply, if there are others.
const SILENCE: Duration = Duration::from_secs(1);
/// Duration of one long poll of [`MgmtdClient::follow`].
const POLL: Duration = Duration::from_secs(10);
/// The same if another mgmtd can answer: a stopped primary is noticed after a poll.
const POLL_OF_SEVERAL: Duration = Duration::from_secs(2);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum MgmtdClientError {
    /// The call did not reach mgmtd, or its reply did not arrive.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// mgmtd refused the call.
    #[error(transparent)]
    Refused(#[from] MgmtdError),
    /// The reply does not match the request: mgmtd has another version.
    #[error("mgmtd sent {reply_text}, expected {expected}; do both sides run the same version?")]
    Unexpected {
        /// The expected kind of reply.
        expected: &'static str,
        /// The reply, shortened.
        reply_text: String,
    },
}

/// A client of all mgmtds of a cluster. Finds the primary and retries until the deadline. Clones
/// share connections.
#[derive(Clone)]
pub struct MgmtdClient(Arc<Inner>);

struct Inner {
    pools: Vec<Pool>,
    /// Until when calls avoid each mgmtd.
    silent_until: Mutex<Vec<Option<Instant>>>,
    /// The mgmtd that the next call asks first.
    next: AtomicUsize,
    /// The mgmtd that replied last.
    primary: watch::Sender<usize>,
}

impl MgmtdClient {
    /// A client of the mgmtds at these addresses (`host:port`). Connects at the first call.
    pub fn new<C: Clone + Into<Credentials>>(addresses: &[String], credentials: &C) -> Self {
        let credentials: Credentials = credentials.clone().into();
        let pool = |address: &String| {
            let connection = ConnectionConfig::new(CONTEXT, &credentials);
            Pool::new(address, PoolConfig::new(connection))
        };
        let pools = addresses.iter().map(pool).collect();
        let silent_until = Mutex::new(vec![None; addresses.len()]);
        let (next, (primary, _)) = (AtomicUsize::new(0), watch::channel(0));
        Self(Arc::new(Inner { pools, silent_until, next, primary }))
    }

    /// Sends a heartbeat to each mgmtd until one accepts it, without retries: the next heartbeat of
    /// the caller is the retry.
    ///
    /// # Errors
    /// [`MgmtdError::Replaced`] means that the caller must exit.
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

    fn poll(&self) -> Duration {
        if self.0.pools.len() > 1 { POLL_OF_SEVERAL } else { POLL }
    }

    /// Failure domains of the cluster; `None` if mgmtd is older than this request, or if a volume's
    /// credential does not permit it.
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn domains(
        &self,
        deadline: Deadline,
    ) -> Result<Option<DomainReport>, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Domains, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::Domains(report)) => Ok(Some(report)),
            Ok(other) => Err(unexpected("domains", &other)),
            Err(error) if refused(&error, &[BadRequest, Forbidden]) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The limit of the bytes per second that moves copy, after it is set if one is given; 0 = none.
    /// `None` if mgmtd is older than this request, and thus has no limit.
    ///
    /// # Errors
    /// No primary replied before the deadline, or mgmtd is too old to set it.
    pub async fn move_rate(
        &self,
        bytes_per_second: Option<u64>,
        deadline: Deadline,
    ) -> Result<Option<u64>, MgmtdClientError> {
        let request = MgmtdRequest::MoveRate { bytes_per_second };
        match self.ask(&request, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::MoveRate(bytes_per_second)) => Ok(Some(bytes_per_second)),
            Ok(other) => Err(unexpected("the rate of moves", &other)),
            Err(error) if bytes_per_second.is_none() && refused(&error, &[BadRequest]) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Routing newer than `known_version`, waiting up to `wait` for it; `None` if there is none.
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn routing(
        &self,
        known_version: RoutingVersion,
        wait: Duration,
        deadline: Deadline,
    ) -> Result<Option<RoutingInfo>, MgmtdClientError> {
        let wait = deadline.remaining().unwrap_or_default().min(wait);
        let wait_ms = (wait.as_millis() as u64).min(WAIT_MS_MAX);
        match self.ask(&MgmtdRequest::Routing { known_version, wait_ms }, wait, deadline).await? {
            MgmtdReply::Routing(routing) => Ok(routing),
            other => Err(unexpected("routing", &other)),
        }
    }

    /// Status of the cluster.
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn status(&self, deadline: Deadline) -> Result<ClusterStatus, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Status, Duration::ZERO, deadline).await? {
            MgmtdReply::Status(status) => Ok(status),
            other => Err(unexpected("status", &other)),
        }
    }

    /// The plan that balances all nodes; with `apply`, it is started.
    ///
    /// # Errors
    /// No primary replied before the deadline, or the request is invalid.
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

    /// The plan after a change of the drained nodes; with `apply`, the change is made. An older
    /// mgmtd gets the list of all drained nodes: concurrent changes may then be lost.
    ///
    /// # Errors
    /// No primary replied before the deadline, or the request is invalid.
    pub async fn drain(
        &self,
        apply: bool,
        change: DrainChange,
        deadline: Deadline,
    ) -> Result<RebalancePlan, MgmtdClientError> {
        let request = MgmtdRequest::Drain { apply, change: change.clone() };
        match self.ask(&request, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::Plan(plan)) => Ok(plan),
            Ok(other) => Err(unexpected("a plan", &other)),
            Err(error) if refused(&error, &[BadRequest]) => {
                let before = self.rebalance(false, None, deadline).await?.leaving;
                let leaving = change.apply(before.into_iter().collect()).into_iter().collect();
                self.rebalance(apply, Some(leaving), deadline).await
            }
            Err(error) => Err(error),
        }
    }

    /// Moves in progress, and with `plan` why others wait; `None` as for [`Self::domains`].
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn moves(
        &self,
        plan: bool,
        deadline: Deadline,
    ) -> Result<Option<MoveReport>, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Moves { plan }, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::Moves(report)) => Ok(Some(report)),
            Ok(other) => Err(unexpected("moves", &other)),
            Err(error) if refused(&error, &[BadRequest, Forbidden]) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Chains that wait after a restore; `None` as for [`Self::domains`].
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn unconfirmed(
        &self,
        deadline: Deadline,
    ) -> Result<Option<UnconfirmedReport>, MgmtdClientError> {
        match self.ask(&MgmtdRequest::Unconfirmed, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::Unconfirmed(report)) => Ok(Some(report)),
            Ok(other) => Err(unexpected("unconfirmed chains", &other)),
            Err(error) if refused(&error, &[BadRequest, Forbidden]) => Ok(None),
            Err(error) => Err(error),
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

    /// Registers the store of a metadata service. `has_snapshots`: an mgmtd of an earlier release, which
    /// ignores fences, must not accept it.
    ///
    /// # Errors
    /// No primary replied before the deadline, or the store does not belong to this cluster.
    pub async fn register_meta(
        &self,
        registration: MetaRegistration,
        has_snapshots: bool,
        deadline: Deadline,
    ) -> Result<MetaRegistered, MgmtdClientError> {
        let request = MgmtdRequest::RegisterMetaWithSnapshots(registration.clone());
        let reply = match self.ask(&request, Duration::ZERO, deadline).await {
            Err(error) if !has_snapshots && refused(&error, &[BadRequest]) => {
                let request = MgmtdRequest::RegisterMeta(registration);
                self.ask(&request, Duration::ZERO, deadline).await?
            }
            reply => reply?,
        };
        match reply {
            MgmtdReply::MetaRegistered(registered) => Ok(registered),
            other => Err(unexpected("a registration", &other)),
        }
    }

    /// Asks each mgmtd for its status, in the order of the addresses. Only the primary has one.
    pub async fn status_of_each(
        &self,
        deadline: Deadline,
    ) -> Vec<Result<ClusterStatus, MgmtdClientError>> {
        let mut tasks = Vec::new();
        for pool in &self.0.pools {
            let pool = pool.clone();
            tasks.push(tokio::spawn(async move {
                let request = &MgmtdRequest::Status;
                match pool.ask::<_, MgmtdResult>(request, ATTEMPT_TIMEOUT, deadline, None).await?? {
                    MgmtdReply::Status(status) => Ok(status),
                    other => Err(unexpected("status", &other)),
                }
            }));
        }
        let mut results = Vec::with_capacity(tasks.len());
        for task in tasks {
            results.push(task.await.unwrap_or_else(|_| Err(no_address_error())));
        }
        results
    }

    /// Keeps a copy of the routing up to date in the background, until the follower is dropped.
    pub fn follow(&self) -> RoutingFollower {
        let (sender, receiver) = watch::channel(Arc::new(RoutingInfo::default()));
        let client = self.clone();
        let poll = self.poll();
        let task = tokio::spawn(async move {
            let mut primary = client.0.primary.subscribe();
            loop {
                let known_version = sender.borrow().version;
                primary.borrow_and_update();
                let reply = tokio::select! {
                    reply = client.routing(known_version, poll, Deadline::after(poll * 2)) => reply,
                    // Another call has reached another primary: this one may wait for a stopped one.
                    _ = primary.changed() => continue,
                };
                match reply {
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
        let mut number = self.0.audible(self.0.next.load(Relaxed));
        loop {
            let Some(pool) = self.0.pools.get(number) else {
                return Err(no_address_error());
            };
            let attempt = deadline.within(wait + ATTEMPT_TIMEOUT);
            let reply =
                pool.ask::<_, MgmtdResult>(request, wait + ATTEMPT_TIMEOUT, attempt, None).await;
            self.0.heard(number, reply.as_ref().err());
            let error = match reply {
                Ok(Ok(reply)) => {
                    self.0.leads(number);
                    return Ok(reply);
                }
                Ok(Err(error)) if error.retryable() => MgmtdClientError::Refused(error),
                Ok(Err(error)) => return Err(error.into()),
                Err(error) if error.retryable() => error.into(),
                Err(error) => return Err(error.into()),
            };
            attempts += 1;
            // A call whose deadline is shorter than an attempt leaves the next one to the next call.
            let following = self.0.audible((number + 1) % count);
            let _ = self.0.next.compare_exchange(number, following, Relaxed, Relaxed);
            number = following;
            if deadline.remaining().is_none_or(|remaining| remaining <= PAUSE) {
                return Err(error);
            }
            if attempts % count == 0 {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

impl Inner {
    /// Records that an mgmtd replied as the primary.
    fn leads(&self, number: usize) {
        self.next.store(number, Relaxed);
        self.primary.send_if_modified(|primary| std::mem::replace(primary, number) != number);
    }

    /// Records whether an mgmtd has replied, also with an error.
    fn heard(&self, number: usize, error: Option<&RpcError>) {
        let is_silent = matches!(
            error,
            Some(RpcError::Unreachable { .. } | RpcError::Lost { .. } | RpcError::TimedOut { .. })
        );
        let until = is_silent.then(|| Instant::now() + SILENCE);
        let mut silent_until = self.silent_until.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(this) = silent_until.get_mut(number) {
            *this = until;
        }
    }

    /// The first mgmtd from `number` on that does not count as silent; `number` if all of them do.
    fn audible(&self, number: usize) -> usize {
        let now = Instant::now();
        let silent_until = self.silent_until.lock().unwrap_or_else(PoisonError::into_inner);
        let count = silent_until.len().max(1);
        let mut order = (number..number + count).map(|it| it % count);
        let is_silent = |it: &usize| {
            silent_until.get(*it).is_some_and(|until| until.is_some_and(|until| now < until))
        };
        order.find(|it| !is_silent(it)).unwrap_or(number)
    }
}

/// Whether mgmtd refused the request with one of these codes; `BadRequest` means that it does not
/// know it.
fn refused(error: &MgmtdClientError, codes: &[FaultCode]) -> bool {
    let MgmtdClientError::Rpc(RpcError::Faulted { fault, .. }) = error else { return false };
    codes.contains(&fault.code)
}

fn no_address_error() -> MgmtdClientError {
    MgmtdClientError::Rpc(RpcError::Unreachable {
        context: CONTEXT.into(),
        peer: "(none)".into(),
        detail: "no mgmtd address is configured".into(),
    })
}

fn unexpected(expected: &'static str, reply: &MgmtdReply) -> MgmtdClientError {
    let reply_text = format!("{reply:?}").chars().take(60).collect();
    MgmtdClientError::Unexpected { expected, reply_text }
}

/// A copy of the routing, updated in the background. Its first value is empty (version 0).
pub struct RoutingFollower {
    receiver: watch::Receiver<Arc<RoutingInfo>>,
    task: JoinHandle<()>,
}

impl RoutingFollower {
    /// The newest routing received.
    pub fn now(&self) -> Arc<RoutingInfo> {
        Arc::clone(&self.receiver.borrow())
    }

    /// A receiver for waiting for changes. It is closed when the follower is dropped.
    pub fn receiver(&self) -> watch::Receiver<Arc<RoutingInfo>> {
        self.receiver.clone()
    }

    /// The first routing that satisfies a condition, or `None` at the deadline.
    pub async fn wait_for(
        &self,
        deadline: Deadline,
        mut goal: impl FnMut(&RoutingInfo) -> bool,
    ) -> Option<Arc<RoutingInfo>> {
        let mut receiver = self.receiver.clone();
        let wait = receiver.wait_for(|routing| goal(routing));
        match tokio::time::timeout_at(deadline.instant().into(), wait).await {
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
