//! Directory quotas: every inode is charged to one quota and to those above it.
//!
//! A directory with a quota owns everything below it up to the next directory with one. Each inode
//! names its owner, so charging needs no lookup. Counters are bounded additions: the commit of the
//! change checks them, so no race can exceed a limit.
//!
//! Bytes that a file no longer needs stay charged for minutes (see `recount`). Of those, up to an
//! eighth of the limit counts as excess, in addition to the limit, so that released bytes can be
//! used at once. The rest counts as used.
//!
//! A name is always in a directory of its inode's quota. Changes that would violate this for more
//! inodes than one transaction can update are refused, like moves between file systems.

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Transaction};

use crate::ops::{OpError, RecountContext, epoch};
use crate::protocol::{
    METADATA_BYTES_MIN, METADATA_BYTES_PER_INODE, MetaError, NAME_ROW_BYTES, ROOT,
};
use crate::rows::{self, InodeRow, REMOVED};

/// At most this fraction of a quota's byte limit may count as excess.
const EXCESS_PART: i64 = 8;

/// Amounts that count for a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    pub bytes: i64,
    pub excess: i64,
    pub inodes: i64,
    pub metadata: i64,
}

impl Charge {
    /// The charge of one inode.
    pub(crate) fn of(row: &InodeRow) -> Self {
        Self {
            bytes: count(row.charged_end.saturating_sub(row.excess)),
            excess: count(row.excess),
            inodes: 1,
            metadata: count(row.metadata_bytes),
        }
    }

    /// The sum, if it does not overflow.
    pub(crate) fn plus(self, other: Self) -> Option<Self> {
        Some(Self {
            bytes: self.bytes.checked_add(other.bytes)?,
            excess: self.excess.checked_add(other.excess)?,
            inodes: self.inodes.checked_add(other.inodes)?,
            metadata: self.metadata.checked_add(other.metadata)?,
        })
    }

    fn negated(self) -> Self {
        Self {
            bytes: -self.bytes,
            excess: -self.excess,
            inodes: -self.inodes,
            metadata: -self.metadata,
        }
    }

    /// The increase of an inode's charge.
    pub(crate) fn since(self, before: Self) -> Self {
        let Self { bytes, excess, inodes, metadata } = before;
        Self {
            bytes: self.bytes - bytes,
            excess: self.excess - excess,
            inodes: self.inodes - inodes,
            metadata: self.metadata - metadata,
        }
    }
}

/// The charge of a name.
pub(crate) fn name_bytes(name: &str) -> i64 {
    count(name.len() as u64 + NAME_ROW_BYTES)
}

/// Changes the metadata bytes of an inode and of its quota.
pub(crate) async fn charge_metadata(
    txn: &mut Transaction,
    row: &mut InodeRow,
    more: i64,
) -> Result<(), OpError> {
    row.metadata_bytes = row.metadata_bytes.saturating_add_signed(more);
    if !row.charged {
        return Ok(());
    }
    let owner = owner(txn, row).await?;
    charge(txn, owner, Charge { metadata: more, ..Charge::default() }).await
}

pub(crate) fn count(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The limit of metadata bytes for a limit of inodes.
pub(crate) fn metadata_max(inodes_max: Option<u64>) -> Option<u64> {
    let bytes = inodes_max?.saturating_mul(METADATA_BYTES_PER_INODE);
    Some(bytes.saturating_add(METADATA_BYTES_MIN))
}

/// The quota that an inode itself counts for: for a directory with a quota, the one above it.
pub(crate) async fn owner(
    txn: &mut Transaction,
    row: &InodeRow,
) -> Result<Option<InodeId>, OpError> {
    match row.inode.quota {
        Some(quota) if quota == row.inode.id => {
            let own = rows::read_quota(txn, quota).await?;
            Ok(own.and_then(|own| own.above))
        }
        quota => Ok(quota),
    }
}

/// Charges a quota and all above it. The commit is refused if a limit is exceeded.
pub(crate) async fn charge(
    txn: &mut Transaction,
    quota: Option<InodeId>,
    charge: Charge,
) -> Result<(), OpError> {
    add(txn, quota, charge, limit).await
}

/// As [`charge`], ignoring limits: the charged bytes are known to exist.
pub(crate) async fn charge_unbounded(
    txn: &mut Transaction,
    quota: Option<InodeId>,
    charge: Charge,
) -> Result<(), OpError> {
    add(txn, quota, charge, |_| i64::MAX).await
}

async fn add(
    txn: &mut Transaction,
    quota: Option<InodeId>,
    charge: Charge,
    bound: fn(Option<u64>) -> i64,
) -> Result<(), OpError> {
    let mut next = quota;
    while let Some(id) = next {
        // The quota of a removed directory no longer counts.
        let Some(row) = rows::read_quota(txn, id).await? else { break };
        if charge.bytes != 0 {
            txn.bounded_add(&rows::quota_bytes(id), charge.bytes, bound(row.bytes()));
        }
        if charge.excess != 0 {
            // Bounded when it becomes excess; a file that moves into a quota has none.
            txn.bounded_add(&rows::quota_excess(id), charge.excess, i64::MAX);
        }
        if charge.inodes != 0 {
            txn.bounded_add(&rows::quota_inodes(id), charge.inodes, bound(row.inodes_max));
        }
        if charge.metadata != 0 {
            let max = bound(metadata_max(row.inodes_max));
            txn.bounded_add(&rows::quota_metadata(id), charge.metadata, max);
        }
        next = row.above;
    }
    Ok(())
}

/// Moves up to `bytes` used bytes to excess, as far as this quota and all above it have room, and
/// returns how many. The room is read from a snapshot: if concurrent changes used it up, the commit
/// fails with `OverBound` and the change is repeated without excess.
pub(crate) async fn make_excess(
    txn: &mut Transaction,
    quota: Option<InodeId>,
    bytes: u64,
) -> Result<u64, OpError> {
    let (mut next, mut room) = (quota, count(bytes));
    let mut quotas = Vec::new();
    while let Some(id) = next {
        let Some(row) = rows::read_quota(txn, id).await? else { break };
        let key = rows::quota_excess(id);
        let used = txn.snapshot_get(&key).await?;
        let used = used.map_or(Ok(0), |bytes| counter(&key, bytes))?;
        // One change may end sessions of many files.
        let used = used.saturating_add(txn.pending_bounded_add(&key));
        let max = limit(row.bytes()) / EXCESS_PART;
        room = room.min(max.saturating_sub(used));
        next = row.above;
        quotas.push((id, max));
    }
    if room <= 0 {
        return Ok(0);
    }
    for (id, max) in quotas {
        txn.bounded_add(&rows::quota_bytes(id), -room, i64::MAX);
        txn.bounded_add(&rows::quota_excess(id), room, max);
    }
    Ok(room.unsigned_abs())
}

/// Releases the charge of an inode.
pub(crate) async fn release(txn: &mut Transaction, row: &InodeRow) -> Result<(), OpError> {
    let owner = owner(txn, row).await?;
    charge(txn, owner, Charge::of(row).negated()).await
}

fn limit(max: Option<u64>) -> i64 {
    max.map_or(i64::MAX, |max| i64::try_from(max).unwrap_or(i64::MAX))
}

/// Current usage of a quota. Conflicts with concurrent charges.
pub(crate) async fn current_use(txn: &mut Transaction, quota: InodeId) -> Result<Charge, OpError> {
    let mut read = async |key: Vec<u8>| -> Result<i64, KvError> {
        let bytes = txn.get(&key).await?;
        bytes.map_or(Ok(0), |bytes| counter(&key, bytes))
    };
    Ok(Charge {
        bytes: read(rows::quota_bytes(quota)).await?,
        excess: read(rows::quota_excess(quota)).await?,
        inodes: read(rows::quota_inodes(quota)).await?,
        metadata: read(rows::quota_metadata(quota)).await?,
    })
}

/// Bytes and inodes that count for a quota, without conflicts with concurrent charges.
pub(crate) async fn snapshot_use(
    txn: &mut Transaction,
    quota: InodeId,
) -> Result<(i64, i64), OpError> {
    let mut read = async |key: Vec<u8>| -> Result<i64, KvError> {
        let bytes = txn.snapshot_get(&key).await?;
        bytes.map_or(Ok(0), |bytes| counter(&key, bytes))
    };
    let bytes = read(rows::quota_bytes(quota)).await?;
    let excess = read(rows::quota_excess(quota)).await?;
    Ok((bytes.saturating_add(excess), read(rows::quota_inodes(quota)).await?))
}

fn counter(key: &[u8], bytes: Vec<u8>) -> Result<i64, KvError> {
    let bytes = bytes.try_into().map_err(|_| KvError::bad_row(key, "not a counter"))?;
    Ok(i64::from_le_bytes(bytes))
}

/// Moves the charge of an inode to the quota of its new directory.
pub(crate) async fn move_to(
    txn: &mut Transaction,
    row: &mut InodeRow,
    new: Option<InodeId>,
    path: &str,
    context: &RecountContext,
) -> Result<(), OpError> {
    let old = owner(txn, row).await?;
    if old == new {
        return Ok(());
    }
    let mut released = Charge::of(row);
    let crosses = |reason: &str| {
        let (path, reason) = (path.to_owned(), reason.to_owned());
        Err(MetaError::CrossQuota { path, reason }.into())
    };
    let mut new_charge = released;
    if row.inode.quota == Some(row.inode.id) {
        let inside = current_use(txn, row.inode.id).await?;
        new_charge.bytes += inside.bytes;
        new_charge.excess += inside.excess;
        new_charge.inodes += inside.inodes;
        new_charge.metadata += inside.metadata;
        released = new_charge;
        if let Some(mut own) = rows::read_quota(txn, row.inode.id).await? {
            own.above = new;
            rows::write(txn, &rows::quota(row.inode.id), &own)?;
        }
    } else if has_epochs(txn, [old, new]).await? {
        return crosses("one of the volumes has had snapshots");
    } else if row.inode.is_directory() {
        let names = KeyRange::prefix(&rows::dentries(row.inode.id));
        if !txn.range(&names, 1).await?.is_empty() {
            return crosses("the directory is not empty");
        }
        row.inode.quota = new;
    } else {
        if row.inode.links > 1 {
            return crosses("the file has other names");
        }
        row.inode.quota = new;
        if new.is_none() {
            row.end_max = u64::MAX;
        }
        // The new quota may have no room for it.
        row.excess = 0;
        new_charge = Charge::of(row);
    }
    charge(txn, old, released.negated()).await?;
    charge(txn, new, new_charge).await?;
    let unneeded = row.charged_end.saturating_sub(row.needed_end());
    if new.is_some() && unneeded > 0 && context.excess_allowed {
        row.excess = make_excess(txn, new, unneeded).await?;
    }
    Ok(())
}

/// Whether one of the volumes has ever had a snapshot: then chunks and rows have its epochs.
async fn has_epochs(txn: &mut Transaction, volumes: [Option<InodeId>; 2]) -> Result<bool, OpError> {
    for volume in volumes {
        if epoch::epoch(txn, volume).await?.count > 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Removes a directory with a quota from the tree: its whole charge is released from those above.
pub(crate) async fn detach(txn: &mut Transaction, row: &InodeRow) -> Result<(), OpError> {
    let own = match row.inode.quota {
        Some(quota) if quota == row.inode.id => rows::read_quota(txn, quota).await?,
        _ => None,
    };
    let Some(mut own) = own else {
        return release(txn, row).await;
    };
    let mut all = current_use(txn, row.inode.id).await?;
    all.inodes += 1;
    all.metadata += count(row.metadata_bytes);
    charge(txn, own.above, all.negated()).await?;
    own.above = None;
    Ok(rows::write(txn, &rows::quota(row.inode.id), &own)?)
}

/// Clears the quota rows of a removed directory.
pub(crate) fn clear(txn: &mut Transaction, directory: InodeId) {
    txn.clear(&rows::quota(directory));
    txn.clear(&rows::quota_bytes(directory));
    txn.clear(&rows::quota_excess(directory));
    txn.clear(&rows::quota_inodes(directory));
    txn.clear(&rows::quota_metadata(directory));
}

/// The error for a counter that would exceed its limit.
pub(crate) fn exceeded(key: &[u8], value: i64, delta: i64, max: i64) -> MetaError {
    let directory = rows::inode_of_key(key).unwrap_or(if key.is_empty() { ROOT } else { REMOVED });
    let what = match key.get(..4) {
        Some(rows::QUOTA_INODES) => "inodes",
        Some(rows::QUOTA_METADATA) => "bytes of names, attributes, link targets and write sessions",
        _ => "bytes",
    };
    MetaError::QuotaExceeded { directory, what: what.into(), used: value, more: delta, max }
}
