//! Quota limits: setting those of a directory, and reporting limits and usage.

use std::collections::{BTreeMap, HashMap};

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Operation, Transaction};

use crate::identity::Identity;
use crate::ops::lookup::{FinalSymlink, find, not_a_directory};
use crate::ops::quota::{Charge, current_use, metadata_max, owner};
use crate::ops::{Inputs, OpError, epoch, history, load, refuse_snapshot, store};
use crate::protocol::{At, MetaError, MetaReply, QuotaUse};
use crate::rows::{self, DentryRow, InodeRow, QuotaRow};

/// Inodes that a directory may contain when it gets its first quota.
pub(crate) const ADOPT_MAX: usize = 1000;

/// `MetaChange::SetQuota`.
pub(crate) struct SetQuota<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
    pub bytes_max: Option<u64>,
    pub inodes_max: Option<u64>,
    pub inputs: Inputs,
}

impl Operation for SetQuota<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let path = &self.at.path;
        if !self.caller.is_root() {
            let reason = "only root sets quotas".into();
            return Err(MetaError::NotPermitted { path: path.clone(), reason }.into());
        }
        let mut row = find(txn, self.caller, self.at, FinalSymlink::Follow).await?;
        if !row.inode.is_directory() {
            return Err(not_a_directory(self.at));
        }
        let id = row.inode.id;
        refuse_snapshot(id, path)?;
        let above = match row.inode.quota {
            Some(quota) if quota == id => owner(txn, &row).await?,
            above => {
                refuse_shown(txn, &row, path).await?;
                let below = adopt(txn, id, above, path).await?;
                row.inode.quota = Some(id);
                row.inode.changed = self.inputs.now;
                store(txn, &mut row).await?;
                if below.inodes > 0 {
                    history::note_joined(txn, id, self.inputs.now);
                }
                txn.set(&rows::quota_bytes(id), below.bytes.to_le_bytes());
                txn.set(&rows::quota_excess(id), below.excess.to_le_bytes());
                txn.set(&rows::quota_inodes(id), below.inodes.to_le_bytes());
                txn.set(&rows::quota_metadata(id), below.metadata.to_le_bytes());
                above
            }
        };
        let trash_seconds = rows::read_quota(txn, id).await?.map_or(0, |quota| quota.trash_seconds);
        let (bytes_max, inodes_max) = (self.bytes_max, self.inodes_max);
        let quota = QuotaRow { bytes_max, inodes_max, above, trash_seconds };
        rows::write(txn, &rows::quota(id), &quota)?;
        let used = current_use(txn, id).await?;
        Ok(MetaReply::Quotas(vec![quota_use(id, &quota, used)]))
    }
}

/// In a volume that has had snapshots, only an empty directory that none of them shows becomes a
/// volume: rows and chunks have epochs of the volume that they are in.
async fn refuse_shown(txn: &mut Transaction, row: &InodeRow, path: &str) -> Result<(), OpError> {
    let Some(volume) = row.inode.quota else { return Ok(()) };
    if epoch::epoch(txn, Some(volume)).await?.count == 0 {
        return Ok(());
    }
    let id = row.inode.id;
    let newest = epoch::newest(txn, volume).await?;
    let is_shown =
        newest.is_some_and(|newest| row.since <= newest) || history::has_formers(txn, id).await?;
    let names = KeyRange::prefix(&rows::dentries(id));
    if is_shown || !txn.range(&names, 1).await?.is_empty() {
        let reason = "it is in a volume that has had snapshots; create an empty directory".into();
        return Err(MetaError::CrossQuota { path: path.into(), reason }.into());
    }
    Ok(())
}

/// Moves everything below a directory to its new quota; returns the charge.
async fn adopt(
    txn: &mut Transaction,
    directory: InodeId,
    old: Option<InodeId>,
    path: &str,
) -> Result<Charge, OpError> {
    let too_much = || MetaError::Invalid {
        field: "path".into(),
        value: path.into(),
        reason: format!("the files below it exceed {} bytes; remove sparse ones", i64::MAX),
    };
    let mut total = Charge::default();
    let mut names_seen: HashMap<InodeId, u32> = HashMap::new();
    let mut files: BTreeMap<InodeId, InodeRow> = BTreeMap::new();
    let mut open = vec![directory];
    let mut entries = 0;
    while let Some(parent) = open.pop() {
        let names = KeyRange::prefix(&rows::dentries(parent));
        let page = txn.range(&names, ADOPT_MAX + 1).await?;
        entries += page.len();
        if entries > ADOPT_MAX {
            return Err(MetaError::Invalid {
                field: "path".into(),
                value: path.into(),
                reason: format!(
                    "it contains more than {ADOPT_MAX} names; set the quota of a directory before \
                     it is filled, and move the files into it"
                ),
            }
            .into());
        }
        for (key, value) in page {
            let entry = DentryRow::decode(&key, &value)?;
            let mut row = load(txn, entry.inode, path).await?;
            if !row.inode.is_directory() {
                *names_seen.entry(entry.inode).or_default() += 1;
                files.insert(entry.inode, row);
                continue;
            }
            total = total.plus(Charge::of(&row)).ok_or_else(too_much)?;
            if row.inode.quota == Some(entry.inode) {
                let inside = current_use(txn, entry.inode).await?;
                total = total.plus(inside).ok_or_else(too_much)?;
                if let Some(mut own) = rows::read_quota(txn, entry.inode).await? {
                    own.above = Some(directory);
                    rows::write(txn, &rows::quota(entry.inode), &own)?;
                }
                continue;
            }
            row.inode.quota = Some(directory);
            store(txn, &mut row).await?;
            open.push(entry.inode);
        }
    }
    for (id, mut row) in files {
        if names_seen.get(&id) != Some(&row.inode.links) || row.inode.quota != old {
            let reason = format!("{id} below it has a name outside of it");
            return Err(MetaError::CrossQuota { path: path.into(), reason }.into());
        }
        total = total.plus(Charge::of(&row)).ok_or_else(too_much)?;
        row.inode.quota = Some(directory);
        store(txn, &mut row).await?;
    }
    Ok(total)
}

/// `MetaQuery::Quotas`.
pub(crate) struct Quotas<'a> {
    pub caller: &'a Identity,
    pub at: &'a At,
}

impl Operation for Quotas<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = find(txn, self.caller, self.at, FinalSymlink::Follow).await?;
        let mut quotas = Vec::new();
        let mut next = row.inode.quota;
        while let Some(id) = next {
            let Some(quota) = rows::read_quota(txn, id).await? else { break };
            quotas.push(quota_use(id, &quota, current_use(txn, id).await?));
            next = quota.above;
        }
        Ok(MetaReply::Quotas(quotas))
    }
}

fn quota_use(directory: InodeId, quota: &QuotaRow, used: Charge) -> QuotaUse {
    // A counter is never below 0: each charge is released once.
    QuotaUse {
        directory,
        bytes_max: quota.bytes_max,
        bytes_used: u64::try_from(used.bytes).unwrap_or(0),
        inodes_max: quota.inodes_max,
        inodes_used: u64::try_from(used.inodes).unwrap_or(0),
        metadata_max: metadata_max(quota.inodes_max),
        metadata_used: u64::try_from(used.metadata).unwrap_or(0),
    }
}
