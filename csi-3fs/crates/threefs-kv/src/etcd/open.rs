//! Checks of a cluster before its first use: the bounds of its members, and that it is the one that
//! served this store.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse,
    TxnResponse,
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::batch::{Bounds, Shared};
use super::config::EtcdConfig;
use super::load_row;
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
    let (members, rows) = connect(&config)?;
    let deadline = Instant::now() + TIMEOUT;
    check_identity(&members, &rows, config.accept_restored, deadline).await?;
    remove_old_lanes(&members, &rows, deadline).await?;
    check_all_bounds(&members, &rows).await?;
    // Room for the marker and the encoding.
    let bounds = Bounds { operations: OPERATIONS, bytes: REQUEST_BYTES - (64 << 10) };
    Ok(Shared { members, rows, bounds, stamps: AtomicU64::new(0) })
}

/// The members of a cluster, which are connected when they are called first.
///
/// # Errors
/// The configuration is invalid.
pub(crate) fn connect(config: &EtcdConfig) -> Result<(Arc<Members>, Rows), KvError> {
    let options = config.connect_options()?;
    let members = Members::new(config.name(), config.endpoints.clone(), options);
    Ok((Arc::new(members), Rows::new(&config.prefix)))
}

/// Checks without a write that the cluster is the one that served the store last, and that the
/// store is complete.
///
/// # Errors
/// As [`open`].
pub(crate) async fn inspect(
    members: &Members,
    rows: &Rows,
    accept_restored: bool,
) -> Result<(), KvError> {
    let deadline = Instant::now() + TIMEOUT;
    let state = read_state(members, rows, deadline).await?;
    if let Some(before) = &state.before {
        check_same(members, before, &state.now, accept_restored)?;
    }
    Ok(())
}

/// Records the cluster again: a backup then contains a recent raft index.
///
/// # Errors
/// As [`open`].
pub(crate) async fn record(members: &Members, rows: &Rows) -> Result<(), KvError> {
    check_identity(members, rows, false, Instant::now() + CALL_TIMEOUT).await
}

/// Values of two rows of callers, read before anything is written.
///
/// # Errors
/// No member replies.
pub(crate) async fn peek(
    config: &EtcdConfig,
    keys: [&[u8]; 2],
) -> Result<[Option<Vec<u8>>; 2], KvError> {
    let (members, rows) = connect(config)?;
    let reads = Txn::new().and_then(keys.map(|key| TxnOp::get(rows.row(key), None)));
    let read = members.any(members.preferred(), Instant::now() + TIMEOUT, |mut client, _| {
        let reads = reads.clone();
        async move { client.txn(reads).await }
    });
    let (reply, _) = read.await.map_err(|error| members.error(error))?;
    Ok(first_rows(&reply).map(|row| row.map(|row| row.value().to_vec())))
}

/// The first row of each of two reads.
fn first_rows(reply: &TxnResponse) -> [Option<KeyValue>; 2] {
    let replies = reply.op_responses();
    [0, 1].map(|index| match replies.get(index) {
        Some(TxnOpResponse::Get(read)) => read.kvs().first().cloned(),
        _ => None,
    })
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
    loop {
        let state = read_state(members, rows, deadline).await?;
        if let Some(before) = &state.before {
            check_same(members, before, &state.now, accept_restored)
                .map_err(|error| members.fail(error))?;
        }
        if write_identity(members, rows, &state, deadline).await? {
            return Ok(());
        }
    }
}

/// What is recorded about a store, and the cluster that serves it now.
struct State {
    before: Option<Identity>,
    now: Identity,
    /// Revision of the recorded cluster, 0 if there is none.
    identity_revision: u64,
    /// Revision of the row of a load, 0 if there was none.
    load_revision: u64,
}

/// Reads the state of a store.
///
/// # Errors
/// No member replies, or a load is incomplete.
async fn read_state(members: &Members, rows: &Rows, deadline: Instant) -> Result<State, KvError> {
    let key = rows.internal("identity");
    let get = |name: &str| TxnOp::get(rows.internal(name), None);
    let reads = Txn::new().and_then([get("identity"), get(load_row::ROW)]);
    let floor = members.newest();
    let read = members.any(members.preferred(), deadline, |mut client, _| {
        let reads = reads.clone();
        async move { Ok((client.txn(reads).await?, client.status().await?)) }
    });
    let ((reply, status), _) = read.await.map_err(|error| members.error(error))?;
    members.observe(reply.header(), floor)?;
    let cluster = reply.header().map_or(0, |header| header.cluster_id());
    let [identity, load] = first_rows(&reply);
    if let Some(load) = &load {
        load_row::check_complete(members, load)?;
    }
    let revision =
        |row: &Option<KeyValue>| row.as_ref().map_or(0, |row| unsigned(row.mod_revision()));
    let before = identity.as_ref().map(|row| crate::rows::decode(&key, row.value())).transpose()?;
    Ok(State {
        before,
        now: Identity { format: FORMAT, cluster, raft_index: status.raft_index() },
        identity_revision: revision(&identity),
        load_revision: revision(&load),
    })
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

/// Records the cluster; false if another process has done so meanwhile, or has started to load a
/// dump.
async fn write_identity(
    members: &Members,
    rows: &Rows,
    state: &State,
    deadline: Instant,
) -> Result<bool, KvError> {
    let key = rows.internal("identity");
    let value = postcard::to_allocvec(&state.now)
        .map_err(|error| KvError::bad_row(&key, format!("cannot be encoded: {error}")))?;
    let unchanged =
        |key: Vec<u8>, revision| Compare::mod_revision(key, CompareOp::Equal, signed(revision));
    let txn = Txn::new()
        .when([
            unchanged(key.clone(), state.identity_revision),
            unchanged(rows.internal(load_row::ROW), state.load_revision),
        ])
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

/// Checks the bounds of all members.
///
/// # Errors
/// As [`open`].
pub(crate) async fn check_all_bounds(members: &Members, rows: &Rows) -> Result<(), KvError> {
    for member in 0..members.len() {
        check_bounds(members, rows, member).await?;
    }
    Ok(())
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
