//! Checks of a cluster before its first use: the bounds of its members, and that it is the one that
//! served this store.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, SortOrder, SortTarget, Txn, TxnOp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::batch::{Bounds, Shared};
use super::config::EtcdConfig;
use super::members::{CALL_TIMEOUT, CallError, Members, RESTORED};
use super::rows::{Rows, signed, unsigned};
use crate::KvError;

/// Required `--max-txn-ops`.
const OPERATIONS: usize = 8192;
/// Required `--max-request-bytes`.
const REQUEST_BYTES: usize = 8 << 20;
/// A member accepts messages that are larger than its maximum request by this.
const MESSAGE_OVERHEAD: usize = 512 << 10;
/// Marker rows of lanes that are kept.
const LANES_KEPT: usize = 4096;
/// Time for the cluster to reply.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The cluster that served a store last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    format: u32,
    cluster: u64,
    /// The raft index then: a restored cluster starts again at a low one.
    raft_index: u64,
}

const FORMAT: u32 = 1;

/// Connects to a cluster.
///
/// # Errors
/// No member replies, a bound is too low, or the cluster is not the one that served the store.
pub(crate) async fn open(config: EtcdConfig) -> Result<Shared, KvError> {
    let (options, rows) = (config.connect_options()?, Rows::new(&config.prefix));
    let members = Arc::new(Members::new(config.name(), config.endpoints, options));
    let deadline = Instant::now() + TIMEOUT;
    check_identity(&members, &rows, config.accept_restored, deadline).await?;
    remove_old_lanes(&members, &rows, deadline).await?;
    for member in 0..members.len() {
        check_bounds(&members, &rows, member).await?;
    }
    // Room for the marker and the encoding.
    let bounds = Bounds { operations: OPERATIONS, bytes: REQUEST_BYTES - (64 << 10) };
    Ok(Shared { members, rows, bounds, stamps: AtomicU64::new(0) })
}

/// Records the cluster again: a backup then contains a recent raft index.
///
/// # Errors
/// As [`open`].
pub(crate) async fn record(members: &Members, rows: &Rows) -> Result<(), KvError> {
    check_identity(members, rows, false, Instant::now() + CALL_TIMEOUT).await
}

/// Removes marker rows of lanes, oldest first, so that those of ended processes do not accumulate.
/// The marker of a commit whose outcome is being decided is among the newest.
async fn remove_old_lanes(
    members: &Members,
    rows: &Rows,
    deadline: Instant,
) -> Result<(), KvError> {
    let prefix = rows.internal("lane/");
    let read = members.any(members.preferred(), deadline, |mut client, _| {
        let options = GetOptions::new()
            .with_prefix()
            .with_keys_only()
            .with_sort(SortTarget::Mod, SortOrder::Descend);
        let prefix = prefix.clone();
        async move { client.get(prefix, Some(options)).await }
    });
    let (mut reply, member) = read.await.map_err(|error| members.error(error))?;
    for row in reply.take_kvs().into_iter().skip(LANES_KEPT) {
        let unchanged = Compare::mod_revision(row.key(), CompareOp::Equal, row.mod_revision());
        let txn = Txn::new().when([unchanged]).and_then([TxnOp::delete(row.key(), None)]);
        let removed =
            members.call(member, CALL_TIMEOUT, |mut client| async move { client.txn(txn).await });
        removed.await.map_err(|error| members.error(error))?;
    }
    Ok(())
}

async fn check_identity(
    members: &Members,
    rows: &Rows,
    accept_restored: bool,
    deadline: Instant,
) -> Result<(), KvError> {
    let key = rows.internal("identity");
    loop {
        let floor = members.newest();
        let read = members.any(members.preferred(), deadline, |mut client, _| {
            let key = key.clone();
            async move { Ok((client.get(key, None).await?, client.status().await?)) }
        });
        let ((mut reply, status), _) = read.await.map_err(|error| members.error(error))?;
        members.observe(reply.header(), floor)?;
        let cluster = reply.header().map_or(0, |header| header.cluster_id());
        let now = Identity { format: FORMAT, cluster, raft_index: status.raft_index() };
        let row = reply.take_kvs().pop();
        let revision = row.as_ref().map_or(0, |row| unsigned(row.mod_revision()));
        if let Some(row) = row {
            let before = crate::rows::decode(&key, row.value())?;
            check_same(members, &before, &now, accept_restored)
                .map_err(|error| members.fail(error))?;
        }
        if write_identity(members, &key, revision, &now, deadline).await? {
            return Ok(());
        }
    }
}

fn check_same(
    members: &Members,
    before: &Identity,
    now: &Identity,
    accept_restored: bool,
) -> Result<(), KvError> {
    if before.format != FORMAT {
        let format = before.format;
        let detail = format!("its format is {format}, this program knows {FORMAT}; update it");
        return Err(members.broken(detail));
    }
    let same = before.cluster == now.cluster && before.raft_index <= now.raft_index;
    if same || accept_restored {
        return Ok(());
    }
    Err(members.broken(format!(
        "the store was last served by cluster {:x} at raft index {}, this is cluster {:x} at {}: \
         {RESTORED}",
        before.cluster, before.raft_index, now.cluster, now.raft_index
    )))
}

/// Records the cluster; false if another process has done so meanwhile.
async fn write_identity(
    members: &Members,
    key: &[u8],
    revision: u64,
    identity: &Identity,
    deadline: Instant,
) -> Result<bool, KvError> {
    let value = postcard::to_allocvec(identity)
        .map_err(|error| KvError::bad_row(key, format!("cannot be encoded: {error}")))?;
    let txn = Txn::new()
        .when([Compare::mod_revision(key, CompareOp::Equal, signed(revision))])
        .and_then([TxnOp::put(key, value, None)]);
    let sent = members.any(members.preferred(), deadline, |mut client, _| {
        let txn = txn.clone();
        async move { client.txn(txn).await }
    });
    match sent.await {
        Ok((reply, _)) => Ok(reply.succeeded()),
        // Reads and deletions are possible nevertheless.
        Err(CallError::NoSpace(detail)) => {
            tracing::error!(detail, "etcd is out of space");
            Ok(true)
        }
        Err(error) => Err(members.error(error)),
    }
}

/// Checks the bounds of a member by reads of their size. A member that does not reply is skipped:
/// it may be down.
async fn check_bounds(members: &Members, rows: &Rows, member: usize) -> Result<(), KvError> {
    let endpoint = members.endpoint(member);
    let mut key = rows.internal("bounds");
    let read =
        TxnOp::get(key.clone(), Some(GetOptions::new().with_count_only().with_serializable()));
    let many = Txn::new().and_then(vec![read; OPERATIONS]);
    let called =
        members.call(member, CALL_TIMEOUT, |mut client| async move { client.txn(many).await });
    if let Err(CallError::Refused(error)) = called.await {
        return Err(if error.to_string().contains("too many operations") {
            let option = format!("--max-txn-ops={OPERATIONS}");
            members.broken(format!("{endpoint}: start it with {option} ({error})"))
        } else {
            error
        });
    }
    key.resize(REQUEST_BYTES + MESSAGE_OVERHEAD - 1024, b'/');
    let called = members.call(member, CALL_TIMEOUT, |mut client| async move {
        client.get(key, Some(GetOptions::new().with_count_only().with_serializable())).await
    });
    if let Err(CallError::Refused(error)) = called.await {
        return Err(if error.to_string().contains("larger than max") {
            let option = format!("--max-request-bytes={REQUEST_BYTES}");
            members.broken(format!("{endpoint}: start it with {option} ({error})"))
        } else {
            error
        });
    }
    Ok(())
}
