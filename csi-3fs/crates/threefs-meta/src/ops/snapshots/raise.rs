//! Epochs of a tree that was restored from a dump: the lost tree may have had later ones, with chunks.
//! The fences of mgmtd are at least as high.

use threefs_core::fence::VolumeFence;
use threefs_kv::{Operation, Transaction};

use super::create::end_epoch;
use super::{hide, read_snapshots, read_volume};
use crate::ops::OpError;
use crate::rows::history as keys;
use crate::rows::{self, SCHEMA, SCHEMA_WITH_SNAPSHOTS};

/// Raises the epochs of volumes to fences, and the last number of a volume. May be repeated.
pub(crate) struct RaiseEpochs<'a>(pub &'a [VolumeFence]);

impl Operation for RaiseEpochs<'_> {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        let Some(highest) = self.0.iter().map(|fence| fence.epoch.volume).max() else {
            return Ok(());
        };
        rows::write(txn, SCHEMA, &SCHEMA_WITH_SNAPSHOTS)?;
        let last: u32 = rows::read(txn, keys::VOLUME_NUMBER).await?.unwrap_or_default();
        rows::write(txn, keys::VOLUME_NUMBER, &last.max(highest))?;
        for fence in self.0 {
            // A volume that is not in the dump has no rows, and its inode number is not used again.
            if txn.get(&rows::inode(fence.volume)).await?.is_some() {
                raise(txn, fence).await?;
            }
        }
        Ok(())
    }
}

async fn raise(txn: &mut Transaction, fence: &VolumeFence) -> Result<(), OpError> {
    let volume = fence.volume;
    let mut row = read_volume(txn, volume).await?;
    // Given up, as any creation whose epoch ends before its snapshot is made.
    let next = row.creating.take().map(|creation| creation.next).unwrap_or_default();
    end_epoch(txn, volume, fence.epoch.max(next)).await?;
    rows::write(txn, &keys::volume_snapshots(volume), &row)?;
    // Removed since the dump: storage services may have dropped what they show.
    let was_removed = |epoch| epoch < fence.shown.below && !fence.shown.counts.contains(&epoch);
    for (number, snapshot) in read_snapshots(txn, volume).await? {
        if !snapshot.removed && was_removed(snapshot.epoch) {
            tracing::info!(%volume, name = snapshot.name, "the snapshot was removed after the dump");
            hide(txn, volume, number, snapshot).await?;
        }
    }
    Ok(())
}
