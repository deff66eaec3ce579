//! Lengths: growing by reports, cutting in two steps.
//!
//! A cut first writes the new length, a higher truncate version and a `TRIM` row; then the chunks
//! are cut; then the row goes. Nobody opens the file for writing or grows it in between, or the
//! cut, repeated after a crash, would take what was written since.

use threefs_core::ids::InodeId;
use threefs_core::layout::Layout;
use threefs_kv::{Operation, Transaction};

use super::walk::{Last, find};
use super::{Given, OpError, load, store};
use crate::protocol::{At, InodeKind, LengthReport, MetaError, MetaReply};
use crate::rows::{self, InodeRow, TrimRow};

/// `MetaChange::ReportLengths`.
pub(crate) struct ReportLengths<'a> {
    pub reports: &'a [LengthReport],
    pub given: Given,
}

impl Operation for ReportLengths<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut inodes = Vec::with_capacity(self.reports.len());
        for report in self.reports {
            match grow(txn, report, &self.given).await {
                Ok(row) => inodes.push(Ok(row.inode)),
                Err(OpError::Refused(error)) => inodes.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        Ok(MetaReply::Inodes(inodes))
    }
}

/// Applies one report if it is of the current truncate version and the file is shorter.
pub(super) async fn grow(
    txn: &mut Transaction,
    report: &LengthReport,
    given: &Given,
) -> Result<InodeRow, OpError> {
    let mut row = load(txn, report.inode, "").await?;
    let InodeKind::File { length, truncate_version, .. } = &mut row.inode.kind else {
        return Err(not_a_file(&row));
    };
    if report.truncate_version != *truncate_version {
        return Ok(row);
    }
    if txn.get(&rows::trim(report.inode)).await?.is_some() {
        return Err(OpError::TrimPending(report.inode));
    }
    *length = report.length.max(*length);
    // Also when it did not grow: something was written.
    row.inode.modified = given.now;
    row.inode.changed = given.now;
    store(txn, &row)?;
    Ok(row)
}

/// The first step of `MetaChange::SetLength`.
pub(crate) struct BeginTrim<'a> {
    pub at: &'a At,
    pub length: u64,
    pub given: Given,
}

impl Operation for BeginTrim<'_> {
    type Output = InodeId;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<InodeId, OpError> {
        let mut row = find(txn, self.at, Last::Follow).await?;
        let id = row.inode.id;
        let InodeKind::File { length, truncate_version, .. } = &mut row.inode.kind else {
            return Err(match row.inode.is_directory() {
                true => MetaError::IsADirectory { path: self.at.path.clone() }.into(),
                false => not_a_file(&row),
            });
        };
        if txn.get(&rows::trim(id)).await?.is_some() {
            return Err(OpError::TrimPending(id));
        }
        if self.length < *length || self.length == 0 {
            *truncate_version += 1;
            let trim = TrimRow { length: self.length, truncate_version: *truncate_version };
            rows::write(txn, &rows::trim(id), &trim)?;
        }
        *length = self.length;
        row.inode.modified = self.given.now;
        row.inode.changed = self.given.now;
        store(txn, &row)?;
        Ok(id)
    }
}

/// What a truncation still has to cut.
pub(crate) struct ReadTrim(pub InodeId);

impl Operation for ReadTrim {
    type Output = Option<(TrimRow, Layout)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let Some(trim) = rows::read(txn, &rows::trim(self.0)).await? else { return Ok(None) };
        match load(txn, self.0, "").await?.inode.kind {
            InodeKind::File { layout, .. } => Ok(Some((trim, layout))),
            _ => Ok(None),
        }
    }
}

/// The chunks are cut. Answers with the inode, so that it can be the answer of the whole change.
pub(crate) struct FinishTrim(pub InodeId);

impl Operation for FinishTrim {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let row = load(txn, self.0, "").await?;
        txn.clear(&rows::trim(self.0));
        Ok(MetaReply::Inode(row.inode))
    }
}

fn not_a_file(row: &InodeRow) -> OpError {
    MetaError::Invalid {
        field: "inode".into(),
        value: row.inode.id.to_string(),
        reason: "it is not a file".into(),
    }
    .into()
}
