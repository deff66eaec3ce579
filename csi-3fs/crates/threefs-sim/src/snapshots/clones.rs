//! Clones: a new volume whose directories copy the names of a snapshot when they are used, and in
//! the background.

use super::files::Content;
use super::meta::{Base, Kind, Meta, Name, Tree, Version};
use super::storage::{Origin, Storage};
use super::{Id, Mutation, Slot};

/// Names copied by one background transaction.
const PAGE: usize = 2;

impl Meta {
    /// A writable clone of a snapshot: one inode.
    pub fn clone_snapshot(&mut self, slot: Slot) -> Option<Id> {
        let directory = self.snapshots.get(&slot)?.volume;
        Some(self.make_volume(Some(Base { slot, directory, copied: String::new() })))
    }

    fn base(&self, directory: Id) -> Option<&Base> {
        match &self.inodes.get(&directory)?.kind {
            Kind::Directory { base } => base.as_ref(),
            Kind::File { .. } => None,
        }
    }

    /// Copies one name with its inode; a directory gets its names later.
    pub fn copy_name(&mut self, storage: &Storage, directory: Id, name: &str) -> Option<Id> {
        let Base { slot, directory: source, .. } = *self.base(directory)?;
        let volume = self.inodes.get(&directory)?.volume;
        let original = self.name_in(slot, source, name)?;
        let (is_file, links) = match self.inode_in(slot, original)? {
            Version { kind: Kind::File { .. }, links, .. } => (true, *links),
            Version { links, .. } => (false, *links),
        };
        let keeps_links = links > 1 && is_file && self.mutation != Mutation::SplitLinks;
        let known = self.copies.get(&(volume, original)).copied().filter(|_| keeps_links);
        // As old as the clone: a change of the current epoch would be newer than its snapshots.
        let since = 1;
        let id = match known {
            Some(id) => id,
            None => {
                let kind = self.copied_kind(storage, slot, original)?;
                let id = self.fresh();
                // The other names are copied later; until then they keep the file alive.
                let links = if keeps_links { links } else { 1 };
                self.insert(id, Version { kind, volume, links, since });
                if keeps_links {
                    self.copies.insert((volume, original), id);
                }
                id
            }
        };
        self.names.insert((directory, name.to_owned()), Name { inode: Some(id), since });
        Some(id)
    }

    fn copied_kind(&mut self, storage: &Storage, slot: Slot, original: Id) -> Option<Kind> {
        if let Kind::Directory { .. } = self.inode_in(slot, original)?.kind {
            let base = Base { slot, directory: original, copied: String::new() };
            return Some(Kind::Directory { base: Some(base) });
        }
        let Content { mut origins, length, .. } = self.content_in(storage, slot, original)?;
        let at = self.snapshots.get(&slot)?.epoch;
        let end = match self.mutation {
            Mutation::ShowBeyondLength => u64::MAX,
            _ => length,
        };
        for origin in &mut origins {
            origin.end = origin.end.min(end);
        }
        origins.insert(0, Origin { inode: original, at, end });
        Some(Kind::File { length, open: false, cut: false, origins })
    }

    /// Copies some names of a clone in the background; returns whether there was one.
    pub fn copy_some(&mut self, storage: &Storage, volume: Id) -> bool {
        let of_volume = self.inodes.iter().filter(|(_, version)| version.volume == volume);
        let Some((directory, base)) = of_volume.into_iter().find_map(|(id, version)| {
            let Kind::Directory { base: Some(base) } = &version.kind else { return None };
            Some((*id, base.clone()))
        }) else {
            return false;
        };
        let names = self.list(Tree::In(base.slot), base.directory);
        let page: Vec<String> =
            names.into_keys().filter(|name| *name > base.copied).take(PAGE).collect();
        for name in &page {
            let key = (directory, name.clone());
            match self.names.get(&key).map(|row| row.inode) {
                None => {
                    self.copy_name(storage, directory, name);
                }
                // It was removed from the clone, which needs no row once the names are copied.
                Some(None) => {
                    self.names.remove(&key);
                }
                Some(Some(_)) => {}
            }
        }
        if let Some(version) = self.inodes.get_mut(&directory) {
            let rest = page.len() == PAGE;
            let copied = page.last().cloned().unwrap_or_default();
            let base = rest.then_some(Base { copied, ..base });
            version.kind = Kind::Directory { base };
        }
        true
    }

    /// Whether all names of a clone are copied.
    pub fn is_whole(&self, volume: Id) -> bool {
        let mut of_volume = self.inodes.values().filter(|version| version.volume == volume);
        !of_volume.any(|version| matches!(version.kind, Kind::Directory { base: Some(_) }))
    }
}
