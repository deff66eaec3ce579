//! RPC client of the metadata services.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::auth::credentials::Credentials;
use fabric::deadline::Deadline;
use fabric::rpc::{
    CallOptions, ConnectionConfig, Executed, Lease, NotAfter, Payload, Pool, PoolConfig, RpcError,
    decode, encode,
};
use threefs_core::ids::ClientId;

use crate::identity::Identity;
use crate::protocol::{
    CONTEXT, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult, RequestId,
    ServiceRole, Versioned,
};

/// Timeout of one attempt; a restarting service replies to the next one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the first attempt if another service can answer; it doubles up to `ATTEMPT_TIMEOUT`
/// once all services have been tried.
const FIRST_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between attempts while no service is available; it doubles up to `PAUSE_MAX`.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A change without effect, whose answer can be stored in place of another's.
const NO_CHANGE: MetaChange = MetaChange::ReportLengths { reports: Vec::new(), ends: Vec::new() };

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum MetaClientError {
    /// The call did not reach the service, or its reply did not arrive before the deadline. A
    /// change may have been executed.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// The service refused the call.
    #[error(transparent)]
    Refused(#[from] MetaError),
    /// It is unknown whether the change was made: its last attempt got no reply. Earlier attempts
    /// were refused.
    #[error(
        "the change may have been made: its last attempt got no reply ({last}); check before you repeat it; \
         earlier attempts were refused: {refusal}"
    )]
    Unknown {
        /// Error of the last attempt.
        last: Box<RpcError>,
        /// Why the service refused the earlier attempts.
        refusal: Box<MetaError>,
    },
}

/// A client of the metadata services of a cluster, which share one store. Uses one of them until it
/// does not answer, then the next one, until the deadline; changes are executed once, however often
/// and through whichever services they are sent. Clones share connections and identity.
#[derive(Clone)]
pub struct MetaClient(Arc<Inner>);

struct Inner {
    pools: Vec<Pool>,
    /// Counts changes of the service in use, which is this number modulo the number of services.
    switches: AtomicUsize,
    /// Lease that changes require.
    lease: Lease,
    client: ClientId,
    next: AtomicU64,
    unfinished: Mutex<BTreeSet<u64>>,
}

impl MetaClient {
    /// A client of the services at these addresses (`host:port`). `client` is one incarnation of a
    /// client: a restarted program uses another.
    pub fn new<C: Clone + Into<Credentials>>(
        addresses: &[String],
        credentials: &C,
        client: ClientId,
    ) -> Self {
        Self::with_lease(addresses, credentials, client, Lease::default())
    }

    /// As [`MetaClient::new`], with a lease that changes require: none starts after it has expired.
    pub fn with_lease<C: Clone + Into<Credentials>>(
        addresses: &[String],
        credentials: &C,
        client: ClientId,
        lease: Lease,
    ) -> Self {
        let credentials: Credentials = credentials.clone().into();
        let pool = |address: &String| {
            let connection = ConnectionConfig::new(CONTEXT, &credentials);
            Pool::new(address, PoolConfig::new(connection))
        };
        let pools: Vec<Pool> = addresses.iter().map(pool).collect();
        // Clients start at different services.
        let first = (client.base() % pools.len().max(1) as u128) as usize;
        let (next, unfinished) = (AtomicU64::new(1), Mutex::default());
        let switches = AtomicUsize::new(first);
        Self(Arc::new(Inner { pools, switches, lease, client, next, unfinished }))
    }

    /// Changes whenever another service is used from now on. A new service does not know which files
    /// the client has open.
    pub fn switches(&self) -> usize {
        self.0.switches.load(SeqCst)
    }

    /// Sends a query as root.
    ///
    /// # Errors
    /// [`MetaClientError::Refused`] with the reason, or no reply before the deadline.
    pub async fn query(
        &self,
        query: MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        self.query_as(&Identity::ROOT, query, deadline).await
    }

    /// Sends a query for a caller.
    ///
    /// # Errors
    /// As [`MetaClient::query`].
    pub async fn query_as(
        &self,
        caller: &Identity,
        query: MetaQuery,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        self.ask(&MetaRequest::Query { caller: caller.clone(), query }, &self.0.lease, deadline)
            .await
    }

    /// Makes a change as root, once.
    ///
    /// # Errors
    /// [`MetaClientError::Refused`]: nothing was changed. No reply before the deadline: unknown.
    pub async fn change(
        &self,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        self.change_as(&Identity::ROOT, change, &self.0.lease, deadline).await
    }

    /// Makes a change for a caller, once.
    ///
    /// # Errors
    /// As [`MetaClient::change`].
    pub async fn change_as(
        &self,
        caller: &Identity,
        change: MetaChange,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let unfinished = Unfinished::start(&self.0);
        self.change_under(unfinished.id(), caller, change, lease, deadline).await
    }

    /// Makes a change with a request id of the caller, so that it stays one change across restarts
    /// of a program. All ids of one client must come from one source.
    ///
    /// # Errors
    /// As [`MetaClient::change`].
    pub async fn change_with(
        &self,
        id: RequestId,
        caller: &Identity,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        self.change_under(id, caller, change, &self.0.lease, deadline).await
    }

    /// As [`MetaClient::change_with`], with another lease that the change requires.
    ///
    /// # Errors
    /// As [`MetaClient::change`].
    pub async fn change_under(
        &self,
        id: RequestId,
        caller: &Identity,
        change: MetaChange,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let request = MetaRequest::Change { id, caller: caller.clone(), change };
        self.ask(&request, lease, deadline).await
    }

    /// Asks each service for its role, in the order of the addresses.
    pub async fn role_of_each(
        &self,
        deadline: Deadline,
    ) -> Vec<Result<ServiceRole, MetaClientError>> {
        let mut tasks = Vec::new();
        for pool in &self.0.pools {
            let pool = pool.clone();
            tasks.push(tokio::spawn(async move {
                let query = MetaQuery::Role;
                let request = MetaRequest::Query { caller: Identity::ROOT, query };
                let message = encode(&Versioned::of(&request))?;
                let options = CallOptions::default();
                let reply = pool.call_with(message, Payload::empty(), deadline, options).await?;
                match decode::<MetaResult>(&reply.message)?? {
                    MetaReply::Role(role) => Ok(role),
                    _ => {
                        Err(MetaError::Unavailable { detail: "it sent another reply".into() }
                            .into())
                    }
                }
            }));
        }
        let mut results = Vec::with_capacity(tasks.len());
        for task in tasks {
            results.push(task.await.unwrap_or_else(|_| Err(no_address().into())));
        }
        results
    }

    fn ask<'a>(
        &'a self,
        request: &'a MetaRequest,
        lease: &'a Lease,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<MetaReply, MetaClientError>> {
        Box::pin(self.ask_inner(request, lease, deadline))
    }

    async fn ask_inner(
        &self,
        request: &MetaRequest,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let changes = matches!(request, MetaRequest::Change { .. });
        let not_after = changes.then(|| NotAfter { lease: lease.clone(), end: deadline });
        let message = encode(&Versioned::of(request))?;
        let services = self.0.pools.len();
        let (mut attempts, mut pause, mut failures) = (0, PAUSE, Failures::default());
        loop {
            let switches = self.0.switches.load(SeqCst);
            let Some(pool) = self.0.pools.get(switches % services.max(1)) else {
                return Err(no_address().into());
            };
            let attempt = deadline.within(attempt_timeout(attempts, services));
            let options = CallOptions { not_after: not_after.as_ref(), ..CallOptions::default() };
            let reply = pool.call_with(message.clone(), Payload::empty(), attempt, options).await;
            match reply.and_then(|reply| decode::<MetaResult>(&reply.message)) {
                Ok(Ok(reply)) => return Ok(reply),
                Ok(Err(error)) if !error.retryable() => {
                    return self.refused(request, error, failures.lost, lease, deadline).await;
                }
                Err(error) if !error.retryable() => {
                    return Err(match failures.refusal {
                        Some(refusal) if deadline.passed() => refusal.into(),
                        _ => error.into(),
                    });
                }
                // The answers of a volume have reached their bound: also for other services.
                Ok(Err(error @ MetaError::AnswersFull { .. })) => failures.refused(error),
                Ok(Err(error)) => {
                    failures.refused(error);
                    // The service may not know the outcome of a commit.
                    failures.lost |= changes;
                    pause = PAUSE;
                    self.switch(switches);
                }
                Err(error) => {
                    failures.failed(error, changes);
                    self.switch(switches);
                }
            }
            attempts += 1;
            let wait = if attempts % services == 0 { pause } else { Duration::ZERO };
            match deadline.remaining() {
                Some(remaining) if remaining > wait => tokio::time::sleep(wait).await,
                // Retries end one pause before the deadline.
                _ => return Err(failures.last()),
            }
            if !wait.is_zero() {
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    /// Reports a refusal. If an earlier attempt may still be in flight, an answer is stored in its
    /// place first: it could succeed later, when other changes have removed the reason.
    async fn refused(
        &self,
        request: &MetaRequest,
        refusal: MetaError,
        lost: bool,
        lease: &Lease,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let MetaRequest::Change { id, caller, change } = request else {
            return Err(refusal.into());
        };
        if !lost || *change == NO_CHANGE {
            return Err(refusal.into());
        }
        let nothing = MetaRequest::Change { id: *id, caller: caller.clone(), change: NO_CHANGE };
        match self.ask(&nothing, lease, deadline).await {
            Ok(MetaReply::Inodes(inodes)) if inodes.is_empty() => Err(refusal.into()),
            // The earlier attempt has succeeded: its answer is repeated.
            Ok(_) => self.ask(request, lease, deadline).await,
            // The store is full, or the service already refuses this change in any case.
            Err(MetaClientError::Refused(error)) if !error.retryable() => Err(refusal.into()),
            Err(unknown) => Err(unknown),
        }
    }

    /// Uses the next service, unless another call has switched already.
    fn switch(&self, from: usize) {
        if self.0.pools.len() > 1 {
            let to = from.wrapping_add(1);
            let _ = self.0.switches.compare_exchange(from, to, SeqCst, SeqCst);
        }
    }
}

/// Timeout of an attempt. With several services, a silent one must not use up the deadline.
fn attempt_timeout(attempts: usize, services: usize) -> Duration {
    if services <= 1 {
        return ATTEMPT_TIMEOUT;
    }
    let rounds = u32::try_from(attempts / services).unwrap_or(u32::MAX).min(8);
    (FIRST_ATTEMPT_TIMEOUT * 2u32.pow(rounds)).min(ATTEMPT_TIMEOUT)
}

fn no_address() -> RpcError {
    RpcError::Unreachable {
        context: CONTEXT.into(),
        peer: "(none)".into(),
        detail: "no address of a metadata service is configured".into(),
    }
}

/// Failed attempts of a call.
#[derive(Default)]
struct Failures {
    /// Why a service has refused the call: more useful at the deadline than "no reply".
    refusal: Option<MetaError>,
    /// A later attempt at a change that may have been executed.
    perhaps: Option<RpcError>,
    last: Option<RpcError>,
    /// An attempt at a change may still be executed.
    lost: bool,
}

impl Failures {
    fn refused(&mut self, error: MetaError) {
        *self = Self { refusal: Some(error), lost: self.lost, ..Self::default() };
    }

    fn failed(&mut self, error: RpcError, changes: bool) {
        match changes && error.executed() == Executed::Perhaps {
            true => (self.perhaps, self.lost) = (Some(error), true),
            false => self.last = Some(error),
        }
    }

    /// The error at the deadline.
    fn last(self) -> MetaClientError {
        match (self.refusal, self.perhaps) {
            (Some(refusal), Some(last)) => {
                let (last, refusal) = (Box::new(last), Box::new(refusal));
                MetaClientError::Unknown { last, refusal }
            }
            (Some(refusal), None) => refusal.into(),
            (None, Some(error)) => error.into(),
            (None, None) => self.last.unwrap_or_else(no_address).into(),
        }
    }
}

/// A change without a reply so far. It is dropped when its call ends, because an ended call is
/// never retried with the same sequence.
struct Unfinished<'a> {
    inner: &'a Inner,
    sequence: u64,
    finished_below: u64,
}

impl<'a> Unfinished<'a> {
    fn start(inner: &'a Inner) -> Self {
        let mut unfinished = inner.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = inner.next.fetch_add(1, Relaxed);
        unfinished.insert(sequence);
        let finished_below = unfinished.first().copied().unwrap_or(sequence);
        Self { inner, sequence, finished_below }
    }

    fn id(&self) -> RequestId {
        let (client, sequence) = (self.inner.client, self.sequence);
        RequestId { client, sequence, finished_below: self.finished_below }
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let mut unfinished = self.inner.unfinished.lock().unwrap_or_else(PoisonError::into_inner);
        unfinished.remove(&self.sequence);
    }
}
