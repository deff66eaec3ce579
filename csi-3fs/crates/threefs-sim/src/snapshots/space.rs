//! Background work that frees space: rows and chunks that no snapshot, clone or live file shows.

use std::collections::{BTreeMap, BTreeSet};

use super::meta::{Kind, Meta};
use super::storage::Storage;
use super::{Epoch, Id, Mutation, Slot};

impl Meta {
    /// Removes the name of a snapshot.
    pub fn remove_snapshot(&mut self, slot: Slot) {
        if let Some(snapshot) = self.snapshots.get_mut(&slot) {
            snapshot.removed = true;
        }
    }

    /// Drops rows that no snapshot shows any more.
    pub fn sweep(&mut self) {
        let removed: Vec<Slot> =
            self.snapshots.iter().filter(|(_, it)| it.removed).map(|(slot, _)| *slot).collect();
        for slot in removed {
            if self.mutation == Mutation::IgnoreClones || !self.is_used(slot) {
                self.drop_snapshot(slot);
            }
        }
        let of = |volume: &Id| (*volume, self.shown(*volume));
        let shown: BTreeMap<Id, BTreeSet<Epoch>> = self.volumes.keys().map(of).collect();
        let shows = |volume, since, end| {
            let epochs: Option<&BTreeSet<Epoch>> = shown.get(&volume);
            epochs.is_some_and(|epochs| epochs.range(since..end).next().is_some())
        };
        self.old_inodes.retain(|(_, end), old| shows(old.volume, old.since, *end));
        // The product's rows name their volume.
        self.old_names
            .retain(|(.., end), old| shown.keys().any(|volume| shows(*volume, old.since, *end)));
    }

    /// Whether a clone copies names of a snapshot, or shows chunks of it.
    fn is_used(&self, slot: Slot) -> bool {
        let Some(snapshot) = self.snapshots.get(&slot) else { return false };
        let versions = self.inodes.values().chain(self.old_inodes.values());
        let uses = |kind: &Kind| match kind {
            Kind::Directory { base } => base.as_ref().is_some_and(|base| base.slot == slot),
            Kind::File { origins, .. } => origins.iter().any(|origin| {
                origin.at == snapshot.epoch
                    && self.volumes_of.get(&origin.inode) == Some(&snapshot.volume)
            }),
        };
        versions.into_iter().any(|version| uses(&version.kind))
    }

    /// Epochs of the snapshots of a volume.
    pub fn shown(&self, volume: Id) -> BTreeSet<Epoch> {
        let of_volume = self.snapshots.values().filter(|it| it.volume == volume);
        of_volume.map(|it| it.epoch).collect()
    }

    /// Files that neither a tree nor a snapshot has: their chunks can go.
    pub fn forgotten(&self, storage: &Storage) -> Vec<Id> {
        let has_old = |id: Id| {
            let old = self.old_inodes.range((id, 0)..=(id, Epoch::MAX)).next().is_some();
            old && self.mutation != Mutation::DropRemoved
        };
        let all = storage.inodes().into_iter();
        // An origin keeps its snapshot, which keeps the row.
        all.filter(|id| !self.inodes.contains_key(id) && !has_old(*id)).collect()
    }
}
