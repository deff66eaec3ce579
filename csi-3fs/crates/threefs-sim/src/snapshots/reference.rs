//! The reference: whole trees, copied for each snapshot and clone, and the writes of each block.

use std::collections::BTreeMap;

use super::{Id, Slot, Tag};

/// A file in the reference. Copies of its inode in clones are other files.
pub type FileId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    File(FileId),
    Directory(Id),
}

/// A write, or a truncation, which writes zeros from its length on.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    pub file: FileId,
    pub from: u64,
    pub to: u64,
    pub start: u64,
    /// When the metadata had the new length, for a truncation.
    pub cut: Option<u64>,
    /// When it was acknowledged.
    pub end: Option<u64>,
    pub zeros: bool,
}

/// A value of a block that a client read.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    pub start: u64,
    pub end: u64,
    pub value: Tag,
}

/// The names of a tree: directory (of the reference) and name.
pub type Names = BTreeMap<(Id, String), Entry>;

#[derive(Debug)]
pub struct ReferenceSnapshot {
    pub root: Id,
    pub names: Names,
    /// When it was committed: what it shows is exactly what there was then.
    pub at: u64,
    /// Length and blocks as first seen: they never change.
    pub seen: BTreeMap<FileId, (u64, Vec<Tag>)>,
}

#[derive(Debug, Default)]
pub struct Reference {
    next: u64,
    pub names: Names,
    pub writes: BTreeMap<Tag, Write>,
    /// What a file of a clone had at its creation.
    pub initial: BTreeMap<FileId, (u64, Vec<Tag>)>,
    pub snapshots: BTreeMap<Slot, ReferenceSnapshot>,
    /// What sequential reads of each block saw.
    pub observed: BTreeMap<(FileId, u64), Vec<Observation>>,
}

impl Reference {
    pub fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn list(&self, directory: Id) -> BTreeMap<String, Entry> {
        let from = (directory, String::new());
        let names = self.names.range(from..).take_while(|((parent, _), _)| *parent == directory);
        names.map(|((_, name), entry)| (name.clone(), *entry)).collect()
    }

    /// Names below a root.
    pub fn tree(&self, root: Id) -> Names {
        let mut tree = Names::new();
        let mut directories = vec![root];
        while let Some(directory) = directories.pop() {
            for (name, entry) in self.list(directory) {
                if let Entry::Directory(id) = entry {
                    directories.push(id);
                }
                tree.insert((directory, name), entry);
            }
        }
        tree
    }

    /// Adds a writable copy of a snapshot; returns its root.
    pub fn clone_snapshot(&mut self, slot: Slot) -> Option<Id> {
        let snapshot = self.snapshots.get(&slot)?;
        let (root, names, seen) = (snapshot.root, snapshot.names.clone(), snapshot.seen.clone());
        let mut copies: BTreeMap<u64, u64> = BTreeMap::new();
        let mut copy = |next: &mut u64, id: u64| {
            *copies.entry(id).or_insert_with(|| {
                *next += 1;
                *next
            })
        };
        let copied_root = copy(&mut self.next, root);
        for ((directory, name), entry) in names {
            let directory = copy(&mut self.next, directory);
            let entry = match entry {
                Entry::Directory(id) => Entry::Directory(copy(&mut self.next, id)),
                Entry::File(file) => {
                    let copied = copy(&mut self.next, file);
                    self.initial.insert(copied, seen.get(&file)?.clone());
                    Entry::File(copied)
                }
            };
            self.names.insert((directory, name), entry);
        }
        Some(copied_root)
    }

    /// Why a block cannot have this value for an observer between `start` and `end`.
    pub fn refute(&self, at: (FileId, u64), value: Tag, start: u64, end: u64) -> Option<String> {
        let (file, block) = at;
        let writes = || {
            let of_block =
                |write: &&Write| write.file == file && (write.from..write.to).contains(&block);
            self.writes.values().filter(of_block)
        };
        // A write is superseded if another one started after its end and ended before the start.
        let current = |written_at: Option<u64>| {
            let written_at = written_at.unwrap_or(u64::MAX);
            !writes().any(|it| it.start > written_at && it.end.is_some_and(|at| at < start))
        };
        let initial = self.initial_value(at);
        if value == initial && current(Some(0)) {
            return None;
        }
        let known = self.writes.iter().any(|(tag, it)| {
            it.file == file
                && (it.from..it.to).contains(&block)
                && (*tag == value || (it.zeros && value == 0))
                && it.start <= end
                && current(it.end)
        });
        (!known).then(|| {
            let all: Vec<_> = self.writes.iter().filter(|(_, it)| it.file == file).collect();
            format!(
                "block {block} of file {file} has value {value} between {start} and {end}; \
                 initially {initial}, writes: {all:?}"
            )
        })
    }

    pub fn initial_value(&self, (file, block): (FileId, u64)) -> Tag {
        let initial = self.initial.get(&file);
        initial.and_then(|(_, blocks)| blocks.get(block as usize).copied()).unwrap_or_default()
    }
}
