//! Rows of the metadata store with their history, and the transactions on names.

use std::collections::{BTreeMap, BTreeSet};

use super::storage::{Origin, Storage};
use super::{Epoch, Id, Mutation, Slot};

#[derive(Clone, Debug)]
pub enum Kind {
    File {
        length: u64,
        /// Whether a client may have written chunks that it has not reported.
        open: bool,
        /// A truncation whose chunks are not cut yet.
        cut: bool,
        /// In a clone, what is read where it has no chunk.
        origins: Vec<Origin>,
    },
    Directory {
        /// What a directory of a clone still has to copy.
        base: Option<Base>,
    },
}

/// A directory in a snapshot whose names are not all copied yet.
#[derive(Clone, Debug)]
pub struct Base {
    pub slot: Slot,
    pub directory: Id,
    /// Names up to here are copied.
    pub copied: String,
}

/// An inode; in the history, as it was until the epoch in the key.
#[derive(Clone, Debug)]
pub struct Version {
    pub kind: Kind,
    pub volume: Id,
    pub links: u32,
    /// The epoch of its first state like this.
    pub since: Epoch,
}

#[derive(Clone, Copy, Debug)]
pub struct Name {
    /// `None`: removed from a clone before it was copied.
    pub inode: Option<Id>,
    pub since: Epoch,
}

#[derive(Clone, Debug)]
pub struct Volume {
    pub epoch: Epoch,
    /// The snapshot that is being created.
    pub creating: Option<Slot>,
    /// The newest epoch whose rows must be kept.
    newest: Epoch,
}

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub volume: Id,
    pub epoch: Epoch,
    /// Its name is gone; its rows are kept while a clone copies them.
    pub removed: bool,
}

#[derive(Debug)]
pub struct Meta {
    next: Id,
    pub volumes: BTreeMap<Id, Volume>,
    pub inodes: BTreeMap<Id, Version>,
    pub names: BTreeMap<(Id, String), Name>,
    pub old_inodes: BTreeMap<(Id, Epoch), Version>,
    pub old_names: BTreeMap<(Id, String, Epoch), Name>,
    pub snapshots: BTreeMap<Slot, Snapshot>,
    /// The volume of each inode, also of removed ones.
    pub volumes_of: BTreeMap<Id, Id>,
    /// Copies of files with several names: clone and inode in the snapshot.
    pub copies: BTreeMap<(Id, Id), Id>,
    pub mutation: Mutation,
}

/// Where names are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tree {
    Live,
    In(Slot),
}

impl Meta {
    pub fn new(mutation: Mutation) -> Self {
        Self {
            next: 1,
            volumes: BTreeMap::new(),
            inodes: BTreeMap::new(),
            names: BTreeMap::new(),
            old_inodes: BTreeMap::new(),
            old_names: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            volumes_of: BTreeMap::new(),
            copies: BTreeMap::new(),
            mutation,
        }
    }

    pub fn fresh(&mut self) -> Id {
        self.next += 1;
        self.next
    }

    pub fn make_volume(&mut self, base: Option<Base>) -> Id {
        let id = self.fresh();
        self.volumes.insert(id, Volume { epoch: 1, creating: None, newest: 0 });
        let kind = Kind::Directory { base };
        self.insert(id, Version { kind, volume: id, links: 1, since: 1 });
        id
    }

    pub fn insert(&mut self, id: Id, version: Version) {
        self.volumes_of.insert(id, version.volume);
        self.inodes.insert(id, version);
    }

    pub fn epoch(&self, volume: Id) -> Epoch {
        self.volumes.get(&volume).map_or(0, |volume| volume.epoch)
    }

    fn newest(&self, volume: Id) -> Epoch {
        self.volumes.get(&volume).map_or(0, |volume| volume.newest)
    }

    /// An inode to be changed, after its state was kept for the snapshots that show it.
    pub fn change(&mut self, id: Id) -> Option<&mut Version> {
        let volume = self.inodes.get(&id)?.volume;
        let (epoch, newest) = (self.epoch(volume), self.newest(volume));
        let forgets = self.mutation == Mutation::ForgetInodes;
        let version = self.inodes.get_mut(&id)?;
        if version.since <= newest && !forgets {
            self.old_inodes.insert((id, epoch), version.clone());
        }
        if version.since < epoch {
            version.since = epoch;
        }
        Some(version)
    }

    /// Sets or removes a name, after its state was kept for the snapshots that show it.
    fn set_name(&mut self, directory: Id, name: &str, inode: Option<Id>) {
        let Some(volume) = self.inodes.get(&directory).map(|version| version.volume) else {
            return;
        };
        let (epoch, newest) = (self.epoch(volume), self.newest(volume));
        let key = (directory, name.to_owned());
        if let Some(old) = self.names.get(&key).copied()
            && old.since <= newest
            && old.inode.is_some()
            && self.mutation != Mutation::ForgetNames
        {
            self.old_names.insert((directory, name.to_owned(), epoch), old);
        }
        let hides = self.uncopied(directory, name) && self.mutation != Mutation::CopyRemoved;
        match inode {
            None if !hides => {
                self.names.remove(&key);
            }
            inode => {
                self.names.insert(key, Name { inode, since: epoch });
            }
        }
    }

    /// Whether a name of a clone's directory may still have to be copied.
    fn uncopied(&self, directory: Id, name: &str) -> bool {
        match self.inodes.get(&directory).map(|version| &version.kind) {
            Some(Kind::Directory { base: Some(base) }) => name > base.copied.as_str(),
            _ => false,
        }
    }

    pub fn make(&mut self, directory: Id, name: &str, is_file: bool) -> Option<Id> {
        let volume = self.inodes.get(&directory)?.volume;
        let (id, since) = (self.fresh(), self.epoch(volume));
        let kind = if is_file {
            Kind::File { length: 0, open: false, cut: false, origins: Vec::new() }
        } else {
            Kind::Directory { base: None }
        };
        self.insert(id, Version { kind, volume, links: 1, since });
        self.change(directory)?;
        self.set_name(directory, name, Some(id));
        Some(id)
    }

    pub fn link(&mut self, id: Id, directory: Id, name: &str) -> Option<()> {
        self.change(id)?.links += 1;
        self.change(directory)?;
        self.set_name(directory, name, Some(id));
        Some(())
    }

    /// Removes a name; the inode with its last one.
    pub fn unlink(&mut self, directory: Id, name: &str, id: Id) -> Option<()> {
        let version = self.change(id)?;
        version.links -= 1;
        if version.links == 0 {
            self.inodes.remove(&id);
        }
        self.change(directory)?;
        self.set_name(directory, name, None);
        Some(())
    }

    /// Moves a name to a place without one.
    pub fn rename(&mut self, from: (Id, &str), to: (Id, &str), id: Id) -> Option<()> {
        self.change(id)?;
        self.change(from.0)?;
        self.change(to.0)?;
        self.set_name(from.0, from.1, None);
        self.set_name(to.0, to.1, Some(id));
        Some(())
    }

    /// The inode of a name.
    pub fn lookup(&mut self, storage: &Storage, directory: Id, name: &str) -> Option<Id> {
        if let Some(row) = self.names.get(&(directory, name.to_owned())) {
            return row.inode;
        }
        if !self.uncopied(directory, name) {
            return None;
        }
        self.copy_name(storage, directory, name)
    }

    /// The names of a directory that is not a clone's, or of a snapshot's.
    pub fn list(&self, tree: Tree, directory: Id) -> BTreeMap<String, Id> {
        let from = (directory, String::new());
        let current = self.names.range(from..).take_while(|((parent, _), _)| *parent == directory);
        let mut names: BTreeSet<&str> = current.map(|((_, name), _)| name.as_str()).collect();
        if tree != Tree::Live {
            let from = (directory, String::new(), 0);
            let old = self.old_names.range(from..);
            let old = old.take_while(|((parent, ..), _)| *parent == directory);
            names.extend(old.map(|((_, name, _), _)| name.as_str()));
        }
        let all = names.into_iter().filter_map(|name| {
            let inode = match tree {
                Tree::Live => self.names.get(&(directory, name.to_owned()))?.inode?,
                Tree::In(slot) => self.name_in(slot, directory, name)?,
            };
            Some((name.to_owned(), inode))
        });
        all.collect()
    }

    /// A name in a snapshot.
    pub fn name_in(&self, slot: Slot, directory: Id, name: &str) -> Option<Id> {
        let at = self.snapshots.get(&slot)?.epoch;
        let current = self.names.get(&(directory, name.to_owned()));
        if let Some(current) = current
            && (current.since <= at || self.mutation == Mutation::IgnoreAge)
        {
            return current.inode;
        }
        let after = (directory, name.to_owned(), at + 1);
        let (key, old) = self.old_names.range(after..).next()?;
        (key.0 == directory && key.1 == name && old.since <= at).then_some(old.inode)?
    }

    /// An inode in a snapshot.
    pub fn inode_in(&self, slot: Slot, id: Id) -> Option<&Version> {
        let at = self.snapshots.get(&slot)?.epoch;
        if let Some(current) = self.inodes.get(&id).filter(|current| current.since <= at) {
            return Some(current);
        }
        let (key, old) = self.old_inodes.range((id, at + 1)..).next()?;
        (key.0 == id && old.since <= at).then_some(old)
    }

    /// The last transaction of a creation: the snapshot is the end of the current epoch.
    pub fn commit_snapshot(&mut self, slot: Slot, volume: Id) {
        let Some(row) = self.volumes.get_mut(&volume) else { return };
        if row.creating != Some(slot) {
            return;
        }
        let snapshot = Snapshot { volume, epoch: row.epoch, removed: false };
        row.newest = row.epoch;
        row.epoch += 1;
        row.creating = None;
        self.snapshots.insert(slot, snapshot);
    }

    /// Ends a creation without a snapshot. Some nodes may refuse the epoch that the volume had.
    pub fn abort_snapshot(&mut self, slot: Slot, volume: Id) {
        let keeps = self.mutation == Mutation::KeepEpoch;
        let Some(row) = self.volumes.get_mut(&volume) else { return };
        if row.creating == Some(slot) {
            row.creating = None;
            row.epoch += u64::from(!keeps);
        }
    }

    /// Forgets a snapshot whose rows are not needed any more.
    pub fn drop_snapshot(&mut self, slot: Slot) {
        let Some(snapshot) = self.snapshots.remove(&slot) else { return };
        let of_volume = self.snapshots.values().filter(|it| it.volume == snapshot.volume);
        let newest = of_volume.map(|it| it.epoch).max().unwrap_or_default();
        if let Some(volume) = self.volumes.get_mut(&snapshot.volume) {
            volume.newest = newest;
        }
    }
}
