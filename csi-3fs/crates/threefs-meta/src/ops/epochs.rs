//! Volume and epoch of files.

use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::{Epoch, InodeId};
use threefs_kv::{Operation, Transaction};

use super::OpError;
use crate::protocol::MetaReply;
use crate::rows;

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
            let row = rows::read_inode(txn, *id).await?.filter(|row| !row.dead);
            places.push(row.map(|row| place_of(row.inode.quota)));
        }
        Ok(MetaReply::Epochs(places))
    }
}

/// A volume with its epoch: no volume has had a snapshot.
fn place_of(volume: Option<InodeId>) -> VolumeEpoch {
    VolumeEpoch { volume, epoch: Epoch::default() }
}
