//! Reads of an audit: pages of inodes with the chunks that must exist, and inodes that do not exist.

mod shown;

pub(crate) use shown::AuditShown;

use std::collections::HashSet;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Operation, Transaction};

use crate::ops::OpError;
use crate::ops::file::written_rows;
use crate::protocol::{
    AUDIT_RANGES_MAX, AuditAnswer, AuditedFile, BATCH_MAX, InodeKind, MetaReply, WrittenCursor,
};
use crate::rows::{self, CLUSTER, DentryRow, InodeRow};

/// `AuditQuery::Files`. From a snapshot: it conflicts with no change.
pub(crate) struct AuditFiles {
    pub after: InodeId,
    pub limit: u32,
}

impl Operation for AuditFiles {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let limit = (self.limit as usize).clamp(1, BATCH_MAX);
        let range = KeyRange::prefix(rows::INODES).after(&rows::inode(self.after));
        let page = txn.snapshot_range(&range, limit).await?;
        let more = page.len() == limit;
        let (mut inodes, mut files) = (Vec::with_capacity(page.len()), Vec::new());
        for (key, value) in &page {
            let row = InodeRow::decode(key, value)?;
            inodes.push(row.inode.id);
            // What only snapshots show is in `AuditShown`.
            if row.dead || row.parked {
                continue;
            }
            if let InodeKind::File { layout, written, .. } = row.inode.kind
                && (!written.is_empty() || written.has_more())
            {
                files.push(AuditedFile { inode: row.inode.id, layout, written });
            }
        }
        Ok(MetaReply::Audit(AuditAnswer::Files { inodes, files, more }))
    }
}

/// `AuditQuery::Written`.
pub(crate) struct AuditWritten {
    pub inode: InodeId,
    pub after: Option<WrittenCursor>,
}

impl Operation for AuditWritten {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let (written, next) =
            written_rows::page_after(txn, self.inode, self.after, AUDIT_RANGES_MAX).await?;
        Ok(MetaReply::Audit(AuditAnswer::Written { written, next }))
    }
}

/// Names that one query reads.
const NAMES_READ: usize = 16_384;
/// Names in an answer; the next query continues after the last one.
pub(crate) const NAMES_MAX: usize = 2048;

/// `AuditQuery::Names`.
pub(crate) struct AuditNames<'a> {
    pub inodes: &'a [InodeId],
    pub after: Option<&'a (InodeId, String)>,
}

impl Operation for AuditNames<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut range = KeyRange::prefix(rows::NAMES);
        if let Some((directory, name)) = self.after {
            range = range.after(&rows::dentry(*directory, name));
        }
        let inodes: HashSet<InodeId> = self.inodes.iter().copied().collect();
        let page = txn.snapshot_range(&range, NAMES_READ).await?;
        let (mut names, mut last) = (Vec::new(), None);
        for (key, value) in &page {
            let entry = DentryRow::decode(key, value)?;
            let directory = rows::inode_of_key(key)?;
            let name = key.get(12..).unwrap_or_default();
            let name = String::from_utf8(name.to_vec())
                .map_err(|_| KvError::bad_row(key, "the name is not UTF-8"))?;
            if inodes.contains(&entry.inode) {
                names.push((entry.inode, directory, name.clone()));
            }
            last = Some((directory, name));
            if names.len() == NAMES_MAX {
                return Ok(MetaReply::Audit(AuditAnswer::Names { names, next: last }));
            }
        }
        let next = last.filter(|_| page.len() == NAMES_READ);
        Ok(MetaReply::Audit(AuditAnswer::Names { names, next }))
    }
}

/// `AuditQuery::Unknown`.
pub(crate) struct AuditUnknown<'a>(pub &'a [InodeId]);

impl Operation for AuditUnknown<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let cluster = rows::read(txn, CLUSTER).await?;
        let mut inodes = Vec::new();
        for inode in self.0 {
            // Any row counts: what cannot be decoded is not unknown.
            if txn.get(&rows::inode(*inode)).await?.is_none() {
                inodes.push(*inode);
            }
        }
        Ok(MetaReply::Audit(AuditAnswer::Unknown { cluster, inodes }))
    }
}
