//! Truncation in three steps: start, cut the chunks, finish.
//!
//! The first transaction writes the new length, a higher truncate version and a `TRIM` row, and the
//! reply to the client. Then the chunks are cut, and then the row is removed. The file cannot be opened
//! for writing or grown in between: the cut, repeated after a crash, would remove newer data.

use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{Operation, Transaction};

use crate::identity::Identity;
use crate::ops::file::length::{check_length, not_a_file, recharge};
use crate::ops::file::written_rows;
use crate::ops::history::Owner;
use crate::ops::locks::check_truncation;
use crate::ops::lookup::{FinalSymlink, find};
use crate::ops::volume::recount;
use crate::ops::{Inputs, OpError, load, store};
use crate::permission::WRITE;
use crate::protocol::{At, InodeKind, MetaError, MetaReply};
use crate::rows::{self, TrimRow};
use crate::written::chunks_of;

/// The first step of `MetaChange::SetLength`, with its reply. A `TRIM` row marks the pending cut.
pub(crate) struct StartTrim<'a> {
    pub caller: &'a Identity,
    pub client: ClientId,
    pub at: &'a At,
    pub length: u64,
    pub inputs: Inputs,
}

impl Operation for StartTrim<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut row = find(txn, self.caller, self.at, FinalSymlink::Follow).await?;
        let (id, owner) = (row.inode.id, Owner::of(&row));
        if !row.inode.is_directory() {
            self.caller.check(&row.inode, WRITE, &self.at.path)?;
        }
        let InodeKind::File { length, reserved, truncate_version, layout, content, written } =
            &mut row.inode.kind
        else {
            return Err(match row.inode.is_directory() {
                true => MetaError::IsADirectory { path: self.at.path.clone() }.into(),
                false => not_a_file(&row),
            });
        };
        check_length(self.length, layout)?;
        if txn.get(&rows::trim(id)).await?.is_some() {
            return Err(OpError::TrimPending(id));
        }
        check_truncation(txn, id, self.client).await?;
        let cuts = self.length < *length || self.length < *reserved || self.length == 0;
        if cuts {
            *truncate_version += 1;
            // Writers see the new version and reserve again.
            *reserved = 0;
            let trim = TrimRow { length: self.length, truncate_version: *truncate_version };
            rows::write(txn, &rows::trim(id), &trim)?;
        }
        *length = self.length;
        *content += 1;
        written.cut(self.length, layout.chunk_bytes);
        if written.has_more() {
            written_rows::cut(txn, owner, chunks_of(self.length, layout.chunk_bytes)).await?;
            written.set_more(self.length > 0);
        }
        row.end_max = row.end_max.max(self.length);
        row.inode.modified = self.inputs.now;
        row.inode.changed = self.inputs.now;
        if row.charged || self.length > 0 {
            recharge(txn, &mut row).await?;
        }
        if cuts {
            recount::queue_recount(txn, &mut row, &self.inputs.recount_context()).await?;
        }
        store(txn, &mut row).await?;
        Ok(MetaReply::Inode(row.inode))
    }
}

/// A pending truncation: its row, the layout, and the end of the file's chunks.
pub(crate) struct ReadTrim(pub InodeId);

impl Operation for ReadTrim {
    type Output = Option<(TrimRow, Layout, u64)>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let Some(trim) = rows::read(txn, &rows::trim(self.0)).await? else { return Ok(None) };
        let row = load(txn, self.0, "").await?;
        match row.inode.kind {
            InodeKind::File { layout, .. } => Ok(Some((trim, layout, row.end_max))),
            _ => Ok(None),
        }
    }
}

/// Removes the row of a truncation whose chunks are cut.
pub(crate) struct FinishTrim {
    pub inode: InodeId,
    /// The completed truncation. The row of a later one stays.
    pub truncate_version: u64,
}

impl Operation for FinishTrim {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let key = rows::trim(self.inode);
        let pending = rows::read::<TrimRow>(txn, &key).await?;
        if pending.is_some_and(|trim| trim.truncate_version == self.truncate_version) {
            txn.clear(&key);
        }
        Ok(())
    }
}
