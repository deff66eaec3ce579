//! Volume and epoch of files, which updates name once a volume has a fence.
//!
//! They are learnt from capabilities, and from the metadata service when a storage service refuses an
//! update. Without them an update names no volume: in a cluster without fences that is accepted, also
//! by earlier releases. They are forgotten after the lifetime of a permission to write: a file may have
//! moved to another volume before its first snapshot.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fabric::boot_instant::BootInstant;
use threefs_core::fence::VolumeEpoch;
use threefs_core::ids::{ChunkId, ChunkVersion, Epoch, InodeId};
use threefs_core::message::{StorageRequest, UpdateConditions, UpdateRequest};
use threefs_core::terms::WRITE_LIFETIME_S;

/// Maximum number of files. Beyond it, all are forgotten.
const FILES_MAX: usize = 65_536;

/// Volume and epoch of files.
#[derive(Default)]
pub(crate) struct Places(Mutex<HashMap<InodeId, Place>>);

#[derive(Clone, Copy)]
struct Place {
    place: VolumeEpoch,
    learnt_at: BootInstant,
}

impl Places {
    /// Records what the metadata service has answered. Answers may arrive in another order.
    pub(crate) fn learn(&self, inode: InodeId, place: VolumeEpoch) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if places.len() >= FILES_MAX {
            places.clear();
        }
        let known = places.get(&inode).map(|known| known.place);
        let is_older =
            |known: VolumeEpoch| known.volume == place.volume && known.epoch > place.epoch;
        if !known.is_some_and(is_older) {
            places.insert(inode, Place { place, learnt_at: BootInstant::now() });
        }
    }

    fn get(&self, inode: InodeId, now: BootInstant) -> Option<VolumeEpoch> {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = *places.get(&inode)?;
        if now.since(known.learnt_at) >= Duration::from_secs(WRITE_LIFETIME_S) {
            places.remove(&inode);
            return None;
        }
        Some(known.place)
    }

    /// The request for an update of a chunk, whatever its epoch; with `at`, only of this committed
    /// version.
    pub(crate) fn request(
        &self,
        update: UpdateRequest,
        at: Option<ChunkVersion>,
        now: BootInstant,
    ) -> StorageRequest {
        let in_epoch = |epoch: Epoch| -> ChunkId { update.chunk.in_epoch(epoch) };
        match (self.get(update.chunk.inode, now), at) {
            (Some(VolumeEpoch { volume, epoch }), at) => {
                let update = UpdateRequest { chunk: in_epoch(epoch), ..update };
                StorageRequest::UpdateIf(update, UpdateConditions { volume: volume.into(), at })
            }
            (None, Some(at)) => StorageRequest::UpdateAt(update, at),
            (None, None) => StorageRequest::Update(update),
        }
    }
}

#[cfg(test)]
mod tests {
    use threefs_core::checksum::Checksum;
    use threefs_core::chunk::ContentChange;
    use threefs_core::ids::{ChainId, ChainVersion, RequestTag, TargetId};
    use threefs_core::message::{Address, NamedVolume};

    use super::*;

    const FILE: InodeId = InodeId(7);

    fn update() -> UpdateRequest {
        let (chain, chain_version, target) = (ChainId(1), ChainVersion(1), TargetId(1));
        UpdateRequest {
            to: Address { chain, chain_version, target },
            chunk: ChunkId::new(FILE, 3),
            tag: RequestTag::default(),
            change: ContentChange::Remove,
            payload_checksum: Checksum(0),
            chunk_bytes: 4096,
        }
    }

    #[test]
    fn an_update_names_what_was_learnt_until_it_may_be_outdated() {
        let (places, now) = (Places::default(), BootInstant::now());
        assert_eq!(places.request(update(), None, now), StorageRequest::Update(update()));
        let at = ChunkVersion(5);
        assert_eq!(places.request(update(), Some(at), now), StorageRequest::UpdateAt(update(), at));
        let of = |count| VolumeEpoch { volume: Some(InodeId(40)), epoch: Epoch::new(3, count) };
        places.learn(FILE, of(2));
        places.learn(FILE, of(1));
        let conditions =
            UpdateConditions { volume: NamedVolume::Volume(InodeId(40)), at: Some(at) };
        let chunk = update().chunk.in_epoch(Epoch::new(3, 2));
        let expected = StorageRequest::UpdateIf(UpdateRequest { chunk, ..update() }, conditions);
        assert_eq!(places.request(update(), Some(at), now), expected);
        let later = now.after(Duration::from_secs(WRITE_LIFETIME_S + 1));
        assert_eq!(places.request(update(), None, later), StorageRequest::Update(update()));
    }

    #[test]
    fn a_file_that_has_moved_to_another_volume_takes_its_epoch() {
        let (places, now) = (Places::default(), BootInstant::now());
        places.learn(FILE, VolumeEpoch { volume: Some(InodeId(40)), epoch: Epoch::default() });
        places.learn(FILE, VolumeEpoch::default());
        let conditions = UpdateConditions { volume: NamedVolume::NoVolume, at: None };
        let expected = StorageRequest::UpdateIf(update(), conditions);
        assert_eq!(places.request(update(), None, now), expected);
    }
}
