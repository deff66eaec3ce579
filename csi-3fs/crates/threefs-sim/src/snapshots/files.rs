//! Transactions on the content of files.

use super::meta::{Kind, Meta};
use super::storage::{Origin, Storage};
use super::{Epoch, Id, Mutation, Slot};

/// How a client writes a file until it is refused. Reads need no epoch: they are of the newest
/// version.
#[derive(Clone, Debug)]
pub struct Handle {
    pub volume: Id,
    pub epoch: Epoch,
    pub origins: Vec<Origin>,
}

/// What a snapshot shows of a file.
#[derive(Clone, Debug)]
pub struct Content {
    pub at: Epoch,
    pub origins: Vec<Origin>,
    pub length: u64,
}

impl Meta {
    /// A handle of an open file.
    pub fn open(&self, id: Id) -> Option<Handle> {
        let version = self.inodes.get(&id)?;
        let Kind::File { origins, .. } = &version.kind else { return None };
        let (volume, origins) = (version.volume, origins.clone());
        Some(Handle { volume, epoch: self.epoch(volume), origins })
    }

    /// A handle to write a file. `None` while a truncation is in progress.
    pub fn reserve(&mut self, id: Id) -> Option<Handle> {
        let Kind::File { open, cut, .. } = &mut self.change(id)?.kind else { return None };
        if *cut {
            return None;
        }
        *open = true;
        self.open(id)
    }

    /// A report of written blocks.
    pub fn report(&mut self, id: Id, end: u64) {
        if let Some(Kind::File { length, .. }) = self.change(id).map(|it| &mut it.kind) {
            *length = end.max(*length);
        }
    }

    /// Starts or continues a truncation.
    pub fn truncate(&mut self, id: Id, to: u64) -> Option<Handle> {
        let Kind::File { length, cut, .. } = &mut self.change(id)?.kind else { return None };
        (*length, *cut) = (to, true);
        self.open(id)
    }

    /// The chunks are cut.
    pub fn finish_truncation(&mut self, id: Id) {
        if let Some(Kind::File { cut, .. }) = self.change(id).map(|it| &mut it.kind) {
            *cut = false;
        }
    }

    /// The content of a file in a snapshot. A client may have written, and not reported, until the
    /// snapshot was made: the chunks show the length.
    pub fn content_in(&self, storage: &Storage, slot: Slot, id: Id) -> Option<Content> {
        let at = self.snapshots.get(&slot)?.epoch;
        let Kind::File { length, open, cut, origins } = &self.inode_in(slot, id)?.kind else {
            return None;
        };
        let stored_end = match self.mutation {
            Mutation::TrustReportedLength => 0,
            // Writers wait for the end of a truncation.
            _ if *cut && self.mutation != Mutation::CountUncut => 0,
            _ if *open || *cut => storage.end(id, at, origins),
            _ => 0,
        };
        Some(Content { at, origins: origins.clone(), length: stored_end.max(*length) })
    }
}
