//! Commits whose additions exceed a bound: refused, unless what they have read has changed since.
//!
//! Such a commit may exceed the bound only because of an earlier attempt at it, which another process
//! has executed: it is a conflict, and its next snapshot shows that attempt. Guards cannot find this,
//! because a refused commit is in no request.

use std::collections::{BTreeMap, BTreeSet};

use etcd_client::{Compare, Txn, TxnOp};
use tokio::time::Instant;

use super::lane::gets;
use super::members::{CALL_TIMEOUT, Members};
use super::rows::{Rows, observed};
use crate::guard::{Guard, guards_of};
use crate::{Commit, KvError};

/// A commit with its index in its batch, and the error with which it was refused.
pub(crate) type Refused<'a> = (usize, &'a Commit, KvError);

/// The final errors of refused commits, by index.
pub(crate) async fn verify(
    members: &Members,
    rows: &Rows,
    mut refused: Vec<Refused<'_>>,
) -> Vec<(usize, KvError)> {
    let over = |error: &KvError| matches!(error, KvError::OverBound { .. });
    let changed = changed(members, rows, refused.iter().filter(|it| over(&it.2))).await;
    for (index, _, error) in refused.iter_mut().filter(|it| over(&it.2)) {
        match &changed {
            Ok(commits) if commits.contains(index) => *error = KvError::Conflict,
            Ok(_) => {}
            Err(unavailable) => *error = unavailable.clone(),
        }
    }
    refused.into_iter().map(|(index, _, error)| (index, error)).collect()
}

/// The commits that have read rows which have changed since, found by one read.
async fn changed<'a>(
    members: &Members,
    rows: &Rows,
    refused: impl Iterator<Item = &'a Refused<'a>>,
) -> Result<BTreeSet<usize>, KvError> {
    let mut guards: BTreeMap<Guard, Vec<usize>> = BTreeMap::new();
    for (index, commit, _) in refused {
        for guard in guards_of(commit)? {
            guards.entry(guard).or_default().push(*index);
        }
    }
    let Some(first) = guards.keys().next() else { return Ok(BTreeSet::new()) };
    let compares: Vec<Compare> = guards.keys().map(|it| rows.compare(it)).collect();
    let reads: Vec<TxnOp> = guards.keys().map(|it| rows.observe(it, false)).collect();
    // Without a read, etcd would compare with the rows of one member, which may be old.
    let txn = Txn::new().when(compares).and_then([rows.observe(first, false)]).or_else(reads);
    let sent = members.any(members.preferred(), Instant::now() + CALL_TIMEOUT, |mut client, _| {
        let txn = txn.clone();
        async move { client.txn(txn).await }
    });
    let (reply, _) = sent.await.map_err(|error| members.error(error))?;
    if reply.succeeded() {
        return Ok(BTreeSet::new());
    }
    let replies = gets(&reply);
    if replies.len() != guards.len() {
        return Err(members.broken("a reply lacks reads".into()));
    }
    let violated = guards.iter().zip(&replies);
    let violated = violated.filter(|((guard, _), reply)| !guard.holds(&observed(guard, reply)));
    Ok(violated.flat_map(|((_, commits), _)| commits).copied().collect())
}
