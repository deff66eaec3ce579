//! Fences of volumes: updates of epochs that have ended are refused (`crate::replica`).
//!
//! mgmtd stores them and sends them to all storage services. A lease counts only with the fences that
//! the reply to its heartbeat names, so a fence applies everywhere once each service has confirmed it
//! or its lease has ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, FencesVersion, InodeId};
use crate::shown::ShownEpochs;

/// The fence of a volume that has, or had, a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFence {
    /// The directory with the quota.
    pub volume: InodeId,
    /// Updates of earlier epochs are refused. It has the number of the volume.
    pub epoch: Epoch,
    /// The epochs that snapshots of the volume show.
    pub shown: ShownEpochs,
}

impl VolumeFence {
    /// Why no volume can have this fence.
    ///
    /// # Errors
    /// A text with the field and its value.
    pub fn check(&self) -> Result<(), String> {
        let Self { epoch, shown, .. } = self;
        if epoch.volume == 0 || epoch.count == 0 {
            return Err(format!("epoch {epoch}: an epoch after the first snapshot is expected"));
        }
        if shown.volume != epoch.volume || shown.below > epoch.count {
            let (volume, below) = (shown.volume, shown.below);
            return Err(format!(
                "epochs of volume {volume} below {below} are listed, the fence is {epoch}"
            ));
        }
        Ok(())
    }

    /// Both fences: of the same volume and number.
    #[must_use]
    pub fn merged(&self, other: &Self) -> Self {
        // Of two lists that are complete up to the same epoch, one may miss removals only.
        let newer = match self.shown.below.cmp(&other.shown.below) {
            std::cmp::Ordering::Less => other.shown.clone(),
            std::cmp::Ordering::Greater => self.shown.clone(),
            std::cmp::Ordering::Equal => {
                let counts = self.shown.counts.intersection(&other.shown.counts).copied();
                ShownEpochs { counts: counts.collect(), ..self.shown.clone() }
            }
        };
        Self { volume: self.volume, epoch: self.epoch.max(other.epoch), shown: newer }
    }
}

/// Volume and epoch of a file, according to the metadata service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeEpoch {
    /// The directory with the quota that the file counts for, if any.
    pub volume: Option<InodeId>,
    /// The current epoch of the volume.
    pub epoch: Epoch,
}

/// Fences of mgmtd, or those that have changed since an earlier version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fences {
    /// Their version.
    pub version: FencesVersion,
    /// In the order of the volumes.
    pub volumes: Vec<VolumeFence>,
}

/// The fences that a storage service knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FenceTable {
    version: FencesVersion,
    volumes: BTreeMap<InodeId, Arc<VolumeFence>>,
    /// By the number of the volume.
    numbers: BTreeMap<u32, InodeId>,
}

impl FenceTable {
    /// The version of mgmtd's fences that this table contains.
    #[must_use]
    pub fn version(&self) -> FencesVersion {
        self.version
    }

    /// Whether no volume has a fence.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty()
    }

    /// The fence of a volume.
    #[must_use]
    pub fn of(&self, volume: InodeId) -> Option<&Arc<VolumeFence>> {
        self.volumes.get(&volume)
    }

    /// The fence of the volume with this number ([`Epoch::volume`]).
    #[must_use]
    pub fn of_number(&self, number: u32) -> Option<&Arc<VolumeFence>> {
        self.of(*self.numbers.get(&number)?)
    }

    /// All fences.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<VolumeFence>> {
        self.volumes.values()
    }

    /// Adds newer fences. A fence is never lowered: a restored mgmtd may have lost some.
    pub fn add(&mut self, fences: &Fences) {
        self.version = self.version.max(fences.version);
        for fence in &fences.volumes {
            let merged = match self.volumes.get(&fence.volume) {
                Some(known) if known.epoch.volume == fence.epoch.volume => known.merged(fence),
                _ => fence.clone(),
            };
            self.numbers.insert(merged.epoch.volume, merged.volume);
            self.volumes.insert(merged.volume, Arc::new(merged));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(count: u32, below: u32, counts: &[u32]) -> VolumeFence {
        let shown = ShownEpochs { volume: 3, below, counts: counts.iter().copied().collect() };
        VolumeFence { volume: InodeId(7), epoch: Epoch::new(3, count), shown }
    }

    fn fences(version: u64, fence: VolumeFence) -> Fences {
        Fences { version: FencesVersion(version), volumes: vec![fence] }
    }

    #[test]
    fn a_fence_is_never_lowered_and_a_removed_snapshot_never_listed_again() {
        let mut table = FenceTable::default();
        assert!(table.is_empty());
        table.add(&fences(2, fence(3, 3, &[1])));
        table.add(&fences(1, fence(2, 2, &[1])));
        assert_eq!(table.version(), FencesVersion(2));
        assert_eq!(**table.of_number(3).unwrap(), fence(3, 3, &[1]));
        table.add(&fences(3, fence(3, 3, &[])));
        table.add(&fences(4, fence(3, 3, &[1])));
        assert_eq!(**table.of(InodeId(7)).unwrap(), fence(3, 3, &[]));
        table.add(&fences(5, fence(4, 4, &[3])));
        assert_eq!(**table.of(InodeId(7)).unwrap(), fence(4, 4, &[3]));
    }

    #[test]
    fn a_fence_is_of_an_epoch_after_a_snapshot_and_its_list_of_earlier_ones() {
        assert_eq!(fence(1, 1, &[0]).check(), Ok(()));
        assert!(fence(0, 0, &[]).check().is_err());
        assert!(fence(1, 2, &[]).check().is_err());
        let other = VolumeFence { epoch: Epoch::new(4, 1), ..fence(1, 1, &[]) };
        assert!(other.check().is_err());
    }
}
