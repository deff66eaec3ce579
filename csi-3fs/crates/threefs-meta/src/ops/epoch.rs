//! The epoch of a volume, and the epochs of files.

use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::{Epoch, InodeId};
use threefs_kv::{KvError, Operation, Transaction};

use super::{OpError, view};
use crate::protocol::MetaReply;
use crate::rows::history::{self as keys, VolumeRow};
use crate::rows::{self, SCHEMA, SCHEMA_WITH_SNAPSHOTS};

/// `MetaQuery::Epochs`.
pub(crate) struct Epochs<'a> {
    pub inodes: &'a [InodeId],
}

impl Operation for Epochs<'_> {
    type Output = MetaReply;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<MetaReply, OpError> {
        let mut places = Vec::with_capacity(self.inodes.len());
        for id in self.inodes {
            let row = view::inode(txn, *id).await?.filter(|row| !row.dead);
            places.push(match row {
                Some(row) => Some(place_of(txn, *id, row.inode.quota).await?),
                None => None,
            });
        }
        Ok(MetaReply::Epochs(places))
    }
}

/// Volume and epoch of the chunks of a file; of a file of a snapshot, those of the snapshot.
pub(crate) async fn place_of(
    txn: &mut Transaction,
    id: InodeId,
    volume: Option<InodeId>,
) -> Result<VolumeEpoch, OpError> {
    let epoch = epoch(txn, volume).await?;
    let count = match view::split(id) {
        Some((number, raw)) => view::epoch_of(txn, number, raw).await?.unwrap_or(epoch.count),
        None => epoch.count,
    };
    Ok(VolumeEpoch { volume, epoch: Epoch { count, ..epoch } })
}

/// See [`has_snapshots`].
pub(crate) struct HasSnapshots;

impl Operation for HasSnapshots {
    type Output = bool;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<bool, OpError> {
        Ok(has_snapshots(txn).await?)
    }
}

/// Whether a volume of the tree has, or had, snapshots, or the first one is being created.
pub(crate) async fn has_snapshots(txn: &mut Transaction) -> Result<bool, KvError> {
    let value = txn.snapshot_get(SCHEMA).await?;
    let schema: Option<u64> = value.map(|value| rows::decode(SCHEMA, &value)).transpose()?;
    Ok(schema == Some(SCHEMA_WITH_SNAPSHOTS))
}

/// The epoch of a volume, which the transaction requires when it commits. Read from its snapshot, so
/// every change of an earlier epoch is in the snapshot, too.
pub(crate) async fn epoch(
    txn: &mut Transaction,
    volume: Option<InodeId>,
) -> Result<Epoch, KvError> {
    let Some(volume) = volume else { return Ok(Epoch::default()) };
    let key = keys::epoch(volume);
    let counter = match txn.snapshot_get(&key).await? {
        None => 0,
        Some(bytes) => i64::from_le_bytes(
            bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a counter"))?,
        ),
    };
    txn.require_at_most(&key, counter);
    Ok(keys::epoch_of_counter(counter))
}

/// The newest epoch that a snapshot of a volume shows.
pub(crate) async fn newest(txn: &mut Transaction, volume: InodeId) -> Result<Option<u32>, KvError> {
    let row: Option<VolumeRow> = rows::read(txn, &keys::volume_snapshots(volume)).await?;
    Ok(row.and_then(|row| row.newest))
}
