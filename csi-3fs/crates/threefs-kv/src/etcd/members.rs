//! Calls of the members of an etcd cluster, one connection each.
//!
//! The client's own balancer is not used: it sends requests to members that do not reply, and the
//! reader of a snapshot prefers the member that is known to have its revision.

use std::future::Future;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use etcd_client::{
    AlarmResponse, Client, CompactionResponse, ConnectOptions, Error, GetResponse, ResponseHeader,
    StatusResponse, TxnResponse, WatchStream,
};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::rows::unsigned;
use crate::KvError;

/// Timeout of a call to one member. An election takes one to three seconds, in which the next
/// member has to be asked several times.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after all members have failed.
const PAUSE: Duration = Duration::from_millis(50);

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    /// The request is invalid or not allowed; it was not executed.
    Refused(KvError),
    /// The space quota is exceeded. It may have been executed nevertheless.
    NoSpace(String),
    /// The revision has been compacted.
    Compacted,
    /// The reply exceeds the maximum message size.
    TooLong,
    /// No reply, or an error of the member: whether it was executed is unknown.
    Failed(String),
}

/// A reply, whose header names the cluster.
pub(crate) trait Reply {
    /// The header; `None` if the reply has none.
    fn header(&self) -> Option<&ResponseHeader>;
}

macro_rules! replies {
    ($($reply:ty),*) => {
        $(impl Reply for $reply {
            fn header(&self) -> Option<&ResponseHeader> {
                self.header()
            }
        })*
    };
}
replies!(AlarmResponse, CompactionResponse, GetResponse, StatusResponse, TxnResponse);

impl<A: Reply, B> Reply for (A, B) {
    fn header(&self) -> Option<&ResponseHeader> {
        self.0.header()
    }
}

/// Its messages are checked when they arrive.
impl Reply for WatchStream {
    fn header(&self) -> Option<&ResponseHeader> {
        None
    }
}

/// The members of a cluster.
pub(crate) struct Members {
    /// Name of the store in errors.
    name: String,
    members: Vec<Member>,
    options: ConnectOptions,
    /// Index of the member that replied last.
    preferred: AtomicUsize,
    cluster: OnceLock<u64>,
    newest: AtomicU64,
    failed: OnceLock<KvError>,
}

struct Member {
    endpoint: String,
    client: OnceCell<Client>,
}

impl Members {
    pub(crate) fn new(name: String, endpoints: Vec<String>, options: ConnectOptions) -> Self {
        let member = |endpoint| Member { endpoint, client: OnceCell::new() };
        Self {
            name,
            members: endpoints.into_iter().map(member).collect(),
            options,
            preferred: AtomicUsize::new(0),
            cluster: OnceLock::new(),
            newest: AtomicU64::new(0),
            failed: OnceLock::new(),
        }
    }

    /// Number of members.
    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn endpoint(&self, member: usize) -> &str {
        self.members.get(member).map_or("", |member| &member.endpoint)
    }

    /// The member that replied last.
    pub(crate) fn preferred(&self) -> usize {
        self.preferred.load(SeqCst)
    }

    /// Calls this member first.
    pub(crate) fn prefer(&self, member: usize) {
        self.preferred.store(member, SeqCst);
    }

    /// The highest revision in any reply.
    pub(crate) fn newest(&self) -> u64 {
        self.newest.load(SeqCst)
    }

    /// Calls one member once.
    pub(crate) async fn call<T: Reply, F: Future<Output = Result<T, Error>>>(
        &self,
        member: usize,
        timeout: Duration,
        call: impl FnOnce(Client) -> F,
    ) -> Result<T, CallError> {
        if let Some(error) = self.failed.get() {
            return Err(CallError::Refused(error.clone()));
        }
        let member = member % self.members.len();
        let Some(Member { endpoint, client }) = self.members.get(member) else {
            return Err(CallError::Failed("no members".into()));
        };
        let connect = || Client::connect([endpoint], Some(self.options.clone()));
        let called = tokio::time::timeout(timeout, async {
            call(client.get_or_try_init(connect).await?.clone()).await
        });
        match called.await {
            Ok(Ok(reply)) => {
                self.check_cluster(endpoint, reply.header()).map_err(CallError::Refused)?;
                self.prefer(member);
                Ok(reply)
            }
            Ok(Err(error)) => {
                if is_token_old(&error)
                    && let Some(client) = client.get()
                {
                    // The client itself renews only expired tokens.
                    let _ = tokio::time::timeout(timeout, client.refresh_token()).await;
                }
                Err(self.classify(endpoint, &error))
            }
            Err(_) => Err(CallError::Failed(format!("{endpoint} did not reply in {timeout:?}"))),
        }
    }

    /// Calls the members in turn until one replies, for calls that may be repeated. Starts with
    /// `first`.
    pub(crate) async fn any<T: Reply, F: Future<Output = Result<T, Error>>>(
        &self,
        first: usize,
        deadline: Instant,
        call: impl Fn(Client, usize) -> F,
    ) -> Result<(T, usize), CallError> {
        let mut attempts = 0;
        loop {
            let member = (first + attempts) % self.members.len();
            let failed =
                match self.call(member, CALL_TIMEOUT, |client| call(client, attempts)).await {
                    Ok(reply) => return Ok((reply, member)),
                    Err(CallError::Failed(detail)) => detail,
                    Err(error) => return Err(error),
                };
            attempts += 1;
            let pause = if attempts % self.members.len() == 0 { PAUSE } else { Duration::ZERO };
            if Instant::now() + pause >= deadline {
                return Err(CallError::Failed(failed));
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Checks the header of a linearizable reply to a call that was sent when `newest` was
    /// `floor`: the revision never decreases, unless the cluster was restored from a backup.
    ///
    /// # Errors
    /// The cluster was restored. All further calls fail.
    pub(crate) fn observe(
        &self,
        header: Option<&ResponseHeader>,
        floor: u64,
    ) -> Result<u64, KvError> {
        let Some(header) = header else {
            return Err(self.broken("a reply without a header; it is not from etcd".into()));
        };
        let revision = unsigned(header.revision());
        if revision < floor {
            let detail = format!("the revision went back from {floor} to {revision}: {RESTORED}");
            return Err(self.fail(self.broken(detail)));
        }
        self.newest.fetch_max(revision, SeqCst);
        Ok(revision)
    }

    /// Checks that a reply is from the cluster of all others.
    pub(crate) fn check_cluster(
        &self,
        endpoint: &str,
        header: Option<&ResponseHeader>,
    ) -> Result<(), KvError> {
        let Some(cluster) = header.map(ResponseHeader::cluster_id) else { return Ok(()) };
        let expected = *self.cluster.get_or_init(|| cluster);
        if cluster == expected {
            return Ok(());
        }
        let detail =
            format!("{endpoint} is of cluster {cluster:x}, not of {expected:x}: {RESTORED}");
        Err(self.fail(self.broken(detail)))
    }

    /// All further calls fail with this error, or with that of an earlier failure.
    pub(crate) fn fail(&self, error: KvError) -> KvError {
        self.failed.get_or_init(|| error).clone()
    }

    pub(crate) fn broken(&self, detail: String) -> KvError {
        KvError::Broken { store: self.name.clone(), detail }
    }

    pub(crate) fn unavailable(&self, detail: String) -> KvError {
        KvError::Unavailable { store: self.name.clone(), detail }
    }

    pub(crate) fn no_space(&self, detail: &str) -> KvError {
        let detail = format!(
            "{detail}; raise --quota-backend-bytes or run `etcdctl defrag --cluster`, then `etcdctl \
             alarm disarm`: removals are refused until then, too"
        );
        KvError::NoSpace { store: self.name.clone(), detail }
    }

    /// The error of a call for callers of the store: it was a read, or certainly not executed.
    pub(crate) fn error(&self, error: CallError) -> KvError {
        match error {
            CallError::Refused(error) => error,
            CallError::NoSpace(detail) => self.no_space(&detail),
            CallError::Compacted => KvError::TooOld { version: 0 },
            CallError::TooLong => self.unavailable("a row exceeds the maximum reply".into()),
            CallError::Failed(detail) => self.unavailable(detail),
        }
    }

    fn classify(&self, endpoint: &str, error: &Error) -> CallError {
        let detail = format!("{endpoint}: {error}");
        let Error::GRpcStatus(status) = error else {
            return match error {
                Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::InvalidMetadataValue(_) => {
                    CallError::Refused(self.broken(detail))
                }
                _ => CallError::Failed(detail),
            };
        };
        let message = status.message();
        let says = |part: &str| message.contains(part);
        match i32::from(status.code()) {
            _ if says("database space exceeded") => CallError::NoSpace(detail),
            _ if says("revision has been compacted") => CallError::Compacted,
            _ if says("decoded message length too large") => CallError::TooLong,
            _ if is_token_old(error) => CallError::Failed(detail),
            INVALID_ARGUMENT | PERMISSION_DENIED | UNAUTHENTICATED | UNIMPLEMENTED => {
                CallError::Refused(self.broken(detail))
            }
            RESOURCE_EXHAUSTED if says("larger than max") => {
                CallError::Refused(self.broken(detail))
            }
            _ => CallError::Failed(detail),
        }
    }
}

/// Whether users or roles have changed since the client's token was made.
fn is_token_old(error: &Error) -> bool {
    let Error::GRpcStatus(status) = error else { return false };
    status.message().contains("revision of auth store is old")
}

/// Codes of gRPC.
const INVALID_ARGUMENT: i32 = 3;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const UNIMPLEMENTED: i32 = 12;
const UNAUTHENTICATED: i32 = 16;

/// The remedy after a restore.
pub(crate) const RESTORED: &str = "it is another cluster or was restored from an older backup, so \
     acknowledged changes are missing; connect the cluster that served this store, or accept the \
     loss: stop all services of 3FS and start mgmtd and meta once with --etcd-accept-restored";
