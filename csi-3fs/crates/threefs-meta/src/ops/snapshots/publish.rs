//! The fences of all volumes, for mgmtd after a restore of its store.

use threefs_core::fence::VolumeFence;
use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, Operation, Transaction};

use super::fence_of;
use crate::ops::OpError;
use crate::rows;
use crate::rows::history::{self as keys, VolumeRow};

/// Some volumes with their fences, in the order of the inodes.
pub(crate) struct ListFences {
    /// The last volume of the part before.
    pub after: Option<InodeId>,
    pub limit: usize,
}

impl Operation for ListFences {
    /// The fences, and the last volume if others may follow.
    type Output = (Vec<VolumeFence>, Option<InodeId>);
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        let all = KeyRange::prefix(keys::VOLUMES);
        let range = match self.after {
            Some(last) => {
                KeyRange::new([keys::volume_snapshots(last).as_slice(), &[0]].concat(), all.end)
            }
            None => all,
        };
        let page = txn.snapshot_range(&range, self.limit).await?;
        let (mut fences, mut last) = (Vec::new(), None);
        for (key, value) in &page {
            let volume = rows::inode_of_key(key)?;
            let row: VolumeRow = rows::decode(key, value)?;
            let mut fence = fence_of(txn, volume).await?;
            // It may commit at any time: a lost mgmtd has confirmed its fence.
            if let Some(creation) = row.creating {
                fence.epoch = fence.epoch.max(creation.next);
                fence.shown.volume = fence.epoch.volume;
            }
            if fence.epoch.volume > 0 {
                fences.push(fence);
            }
            last = Some(volume);
        }
        Ok((fences, last.filter(|_| page.len() == self.limit)))
    }
}
