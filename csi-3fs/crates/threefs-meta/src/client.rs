//! RPC client of the metadata service.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::auth::credentials::Credentials;
use fabric::deadline::Deadline;
use fabric::rpc::{ConnectionConfig, Executed, Lease, NotAfter, Pool, PoolConfig, RpcError};
use threefs_core::ids::ClientId;

use crate::identity::Identity;
use crate::protocol::{
    CONTEXT, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult, RequestId,
    Versioned,
};

/// Timeout of one attempt; a restarting service replies to the next one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between attempts while the service is unavailable.
const PAUSE: Duration = Duration::from_millis(50);

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

/// A client of the metadata service. Retries across restarts of the service until the deadline;
/// changes are executed once, however often they are sent. Clones share connections and identity.
#[derive(Clone)]
pub struct MetaClient(Arc<Inner>);

struct Inner {
    pool: Pool,
    /// Lease that changes require.
    lease: Lease,
    client: ClientId,
    next: AtomicU64,
    unfinished: Mutex<BTreeSet<u64>>,
}

impl MetaClient {
    /// A client of the service at `address` (`host:port`). `client` is one incarnation of a client:
    /// a restarted program uses another.
    pub fn new<C: Clone + Into<Credentials>>(
        address: impl Into<String>,
        credentials: &C,
        client: ClientId,
    ) -> Self {
        Self::with_lease(address, credentials, client, Lease::default())
    }

    /// As [`MetaClient::new`], with a lease that changes require: none starts after it has expired.
    pub fn with_lease<C: Clone + Into<Credentials>>(
        address: impl Into<String>,
        credentials: &C,
        client: ClientId,
        lease: Lease,
    ) -> Self {
        let connection = ConnectionConfig::new(CONTEXT, credentials.clone());
        let pool = Pool::new(address, PoolConfig::new(connection));
        let (next, unfinished) = (AtomicU64::new(1), Mutex::default());
        Self(Arc::new(Inner { pool, lease, client, next, unfinished }))
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
        self.ask(&MetaRequest::Query { caller: caller.clone(), query }, deadline).await
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
        self.change_as(&Identity::ROOT, change, deadline).await
    }

    /// Makes a change for a caller, once.
    ///
    /// # Errors
    /// As [`MetaClient::change`].
    pub async fn change_as(
        &self,
        caller: &Identity,
        change: MetaChange,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let unfinished = Unfinished::start(&self.0);
        self.change_with(unfinished.id(), caller, change, deadline).await
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
        self.ask(&MetaRequest::Change { id, caller: caller.clone(), change }, deadline).await
    }

    fn ask<'a>(
        &'a self,
        request: &'a MetaRequest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<MetaReply, MetaClientError>> {
        Box::pin(self.ask_inner(request, deadline))
    }

    async fn ask_inner(
        &self,
        request: &MetaRequest,
        deadline: Deadline,
    ) -> Result<MetaReply, MetaClientError> {
        let changes = matches!(request, MetaRequest::Change { .. });
        let not_after = changes.then(|| NotAfter { lease: self.0.lease.clone(), end: deadline });
        // Why the service has refused the call so far: more useful at the deadline than "no reply".
        let mut refusal: Option<MetaError> = None;
        loop {
            let message = Versioned::of(request);
            let attempt = self.0.pool.ask(&message, ATTEMPT_TIMEOUT, deadline, not_after.as_ref());
            let answer = match (attempt.await, refusal.take()) {
                (Ok(answer), _) => answer,
                (Err(last), Some(refusal))
                    if changes && last.retryable() && last.executed() == Executed::Perhaps =>
                {
                    let (last, refusal) = (Box::new(last), Box::new(refusal));
                    return Err(MetaClientError::Unknown { last, refusal });
                }
                // Retries end one pause before the deadline.
                (Err(late), Some(error)) if late.retryable() || deadline.passed() => Err(error),
                (Err(error), _) => return Err(error.into()),
            };
            match answer {
                MetaResult::Ok(reply) => return Ok(reply),
                Err(error) if error.retryable() => match deadline.remaining() {
                    Some(remaining) if remaining > PAUSE => {
                        refusal = Some(error);
                        tokio::time::sleep(PAUSE).await;
                    }
                    _ => return Err(error.into()),
                },
                Err(error) => return Err(error.into()),
            }
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
