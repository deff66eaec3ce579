//! Scope of a credential: whether an inode is inside the credential's directory.
//!
//! A credential is for a directory with a quota. Every inode names its quota, and quotas name those
//! above them, so the check is a comparison for most inodes and never a path lookup.

use std::collections::BTreeSet;

use threefs_core::ids::InodeId;
use threefs_core::terms::FileTerms;
use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::{OpError, epoch, load, not_found, view};
use crate::protocol::{InodeKind, MetaError};
use crate::rows::{self, InodeRow};

/// Maximum depth of nested quotas.
const NESTED_MAX: usize = 64;

/// Refuses an inode outside the caller's scope.
pub(crate) async fn check(
    txn: &mut Transaction,
    caller: &Identity,
    id: InodeId,
    path: &str,
) -> Result<(), OpError> {
    let Some(scope) = caller.scope else { return Ok(()) };
    if is_removed(txn, scope).await? {
        return Err(not_found(path, scope));
    }
    let row = load(txn, id, path).await?;
    if contains(txn, scope, &row).await? {
        return Ok(());
    }
    Err(if id == scope { without_quota(scope) } else { outside(path, scope) })
}

/// Whether the directory was removed, collected or not. Its row changes rarely, so reading it
/// causes few conflicts.
async fn is_removed(txn: &mut Transaction, scope: InodeId) -> Result<bool, OpError> {
    let row = rows::read_inode(txn, scope).await?;
    Ok(row.is_none_or(|row| row.inode.links == 0))
}

async fn contains(txn: &mut Transaction, scope: InodeId, row: &InodeRow) -> Result<bool, OpError> {
    let mut next = row.inode.quota;
    for _ in 0..NESTED_MAX {
        match next {
            None => return Ok(false),
            Some(quota) if quota == scope => return Ok(true),
            Some(quota) => {
                next = rows::read_quota(txn, quota).await?.and_then(|above| above.above);
            }
        }
    }
    Ok(false)
}

/// Partitions inodes into those inside and outside the scope. Inodes that do not exist are in
/// neither set, and no inode is inside a removed directory.
pub(crate) struct PartitionByScope<'a> {
    pub scope: InodeId,
    pub inodes: &'a [InodeId],
}

/// See [`PartitionByScope`].
#[derive(Debug, Default)]
pub(crate) struct ScopePartition {
    pub inside: BTreeSet<InodeId>,
    pub outside: BTreeSet<InodeId>,
}

impl Operation for PartitionByScope<'_> {
    type Output = ScopePartition;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<ScopePartition, OpError> {
        let mut sides = ScopePartition::default();
        let scope_is_removed = is_removed(txn, self.scope).await?;
        for id in self.inodes {
            let row = view::inode(txn, *id).await?;
            let Some(row) = row else { continue };
            let inside = !scope_is_removed && contains(txn, self.scope, &row).await?;
            if inside { &mut sides.inside } else { &mut sides.outside }.insert(*id);
        }
        Ok(sides)
    }
}

/// `MetaQuery::Capabilities`: the end up to which files may be written, at most their charged end.
pub(crate) struct Terms<'a> {
    pub inodes: &'a [InodeId],
    pub until_unix_s: u64,
}

impl Operation for Terms<'_> {
    type Output = Vec<Option<FileTerms>>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        // Storage services of earlier releases refuse terms with a place.
        let with_places = epoch::has_snapshots(txn).await?;
        let mut terms = Vec::with_capacity(self.inodes.len());
        for id in self.inodes {
            let row = view::inode(txn, *id).await?.filter(|row| !row.dead);
            let Some(row) = row else {
                terms.push(None);
                continue;
            };
            let place = match with_places {
                true => Some(epoch::place_of(txn, *id, row.inode.quota).await?),
                false => None,
            };
            // Snapshots are read-only.
            let end = view::split(*id).map_or(row.needed_end(), |_| 0);
            let until_unix_s = self.until_unix_s;
            terms.push(match row.inode.kind {
                InodeKind::File { layout, .. } => {
                    Some(FileTerms { layout, end, until_unix_s, place })
                }
                _ => None,
            });
        }
        Ok(terms)
    }
}

pub(crate) fn outside(path: &str, scope: InodeId) -> OpError {
    let detail = format!("it is outside directory {scope}, which the credential is for");
    MetaError::PermissionDenied { path: path.into(), detail }.into()
}

fn without_quota(scope: InodeId) -> OpError {
    let detail = format!(
        "the credential is for directory {scope}, which has no quota; give it one first \
         (`set_quota`, without limits if there shall be none): it marks what is within the directory"
    );
    MetaError::PermissionDenied { path: "/".into(), detail }.into()
}
