//! New operations of a schedule: on contents and on names.

use rand::Rng;
use rand::seq::IteratorRandom;

use super::reference::{Entry, Write};
use super::schedule::Schedule;
use super::tasks::{File, Task, World};
use super::{CHUNK_BLOCKS, CHUNKS, Id};

const CLIENTS: u64 = 3;

/// A place in a live tree, in the model and in the reference.
#[derive(Clone, Debug)]
struct Place {
    directory: Id,
    counterpart: Id,
}

impl Schedule {
    /// A random directory of a random volume.
    fn place(&mut self) -> Option<Place> {
        let (volume, root) = self.roots.iter().choose(&mut self.rng)?;
        let mut place = Place { directory: *volume, counterpart: *root };
        for _ in 0..2 {
            let names = self.world.reference.list(place.counterpart);
            let inside = names.into_iter().filter_map(|(name, entry)| match entry {
                Entry::Directory(id) => Some((name, id)),
                Entry::File(_) => None,
            });
            let Some((name, id)) = inside.choose(&mut self.rng) else { break };
            if self.rng.random_bool(0.5) {
                break;
            }
            let directory = self.inode(&place, &name)?;
            place = Place { directory, counterpart: id };
        }
        Some(place)
    }

    fn inode(&mut self, place: &Place, name: &str) -> Option<Id> {
        let World { meta, storage, .. } = &mut self.world;
        meta.lookup(storage, place.directory, name)
    }

    /// Whether an operation or a report of this file is in progress.
    fn is_busy(&self, inode: Id, only_truncations: bool) -> bool {
        self.tasks.values().any(|task| match task {
            Task::Truncate { of, .. } => of.inode == inode,
            Task::Write { of, .. } => of.inode == inode && !only_truncations,
            Task::Report { inode: of, .. } => *of == inode && !only_truncations,
            Task::Read { .. } | Task::Create { .. } => false,
        })
    }

    pub(super) fn start_operation(&mut self) -> Option<()> {
        let place = self.place()?;
        let names = self.world.reference.list(place.counterpart);
        let files = names.into_iter().filter_map(|(name, entry)| match entry {
            Entry::File(file) => Some((name, file)),
            Entry::Directory(_) => None,
        });
        let (name, file) = files.choose(&mut self.rng)?;
        let inode = self.inode(&place, &name)?;
        let of = File { client: self.rng.random_range(0..CLIENTS), inode, file };
        let start = self.world.now;
        let value = self.world.reference.fresh();
        match self.rng.random_range(0..10) {
            0..6 if !self.is_busy(inode, true) => {
                let (index, at) =
                    (self.rng.random_range(0..CHUNKS), self.rng.random_range(0..CHUNK_BLOCKS));
                let (count, at) =
                    (self.rng.random_range(1..=CHUNK_BLOCKS - at), index * CHUNK_BLOCKS + at);
                let (to, cut, end) = (at + count, None, None);
                let write = Write { file, from: at, to, start, cut, end, zeros: false };
                self.world.reference.writes.insert(value, write);
                self.add(Task::Write { of, at, count, value, tag: value, sent: false });
            }
            6..9 => {
                // Mostly where something happens.
                let written = self.tasks.values().filter_map(|task| match task {
                    Task::Write { of: file, at, .. } if file.inode == inode => Some(*at),
                    _ => None,
                });
                let block = written.choose(&mut self.rng);
                let any = self.rng.random_range(0..CHUNKS * CHUNK_BLOCKS);
                self.add(Task::Read { of, block: block.unwrap_or(any), start });
            }
            9 if !self.is_busy(inode, false) => {
                let to = self.rng.random_range(0..=CHUNKS * CHUNK_BLOCKS);
                let (from, cut, end) = (to, None, None);
                let write = Write { file, from, to: u64::MAX, start, cut, end, zeros: true };
                self.world.reference.writes.insert(value, write);
                self.add(Task::Truncate { of, to, value, handle: None, index: 0, sent: false });
            }
            _ => {}
        }
        Some(())
    }

    pub(super) fn change_names(&mut self) -> Option<()> {
        let place = self.place()?;
        let name = ["a", "b", "c", "d"].into_iter().choose(&mut self.rng)?;
        let key = (place.counterpart, name.to_owned());
        let Some(entry) = self.world.reference.names.get(&key).copied() else {
            return self.make(&place, name);
        };
        let inode = self.inode(&place, name)?;
        match (entry, self.rng.random_range(0..4)) {
            (Entry::File(_), 0) if !self.is_busy(inode, false) => {
                self.world.meta.unlink(place.directory, name, inode)?;
                self.world.reference.names.remove(&key);
            }
            (Entry::Directory(id), 0) if self.world.reference.list(id).is_empty() => {
                self.world.meta.unlink(place.directory, name, inode)?;
                self.world.reference.names.remove(&key);
            }
            (Entry::File(_), 1) => {
                let free = self.free_name(&place)?;
                self.world.meta.link(inode, place.directory, free)?;
                self.world.reference.names.insert((place.counterpart, free.to_owned()), entry);
            }
            (_, 2) => {
                let free = self.free_name(&place)?;
                let (from, to) = ((place.directory, name), (place.directory, free));
                self.world.meta.rename(from, to, inode)?;
                self.world.reference.names.remove(&key);
                self.world.reference.names.insert((place.counterpart, free.to_owned()), entry);
            }
            _ => {}
        }
        Some(())
    }

    fn free_name(&mut self, place: &Place) -> Option<&'static str> {
        let taken = self.world.reference.list(place.counterpart);
        ["a", "b", "c", "d", "e"]
            .into_iter()
            .filter(|it| !taken.contains_key(*it))
            .choose(&mut self.rng)
    }

    fn make(&mut self, place: &Place, name: &str) -> Option<()> {
        let is_file = self.rng.random_bool(0.7);
        self.world.meta.make(place.directory, name, is_file)?;
        let id = self.world.reference.fresh();
        let entry = if is_file { Entry::File(id) } else { Entry::Directory(id) };
        self.world.reference.names.insert((place.counterpart, name.to_owned()), entry);
        Some(())
    }
}
