//! Operations of clients and creations of snapshots, one message or transaction at a time.

use std::collections::BTreeMap;

use super::files::Handle;
use super::meta::Meta;
use super::reference::{FileId, Observation, Reference};
use super::storage::{Change, Fenced, Storage, Update};
use super::{CHUNK_BLOCKS, CHUNKS, Epoch, Id, Mutation, NODES, Slot, Tag};

#[derive(Clone, Debug)]
pub struct File {
    pub client: u64,
    pub inode: Id,
    pub file: FileId,
}

#[derive(Clone, Debug)]
pub enum Task {
    Write {
        of: File,
        at: u64,
        count: u64,
        value: Tag,
        tag: Tag,
        sent: bool,
    },
    /// The write is acknowledged, and its length not reported yet.
    Report {
        inode: Id,
        end: u64,
    },
    Read {
        of: File,
        block: u64,
        start: u64,
    },
    Truncate {
        of: File,
        to: u64,
        value: Tag,
        handle: Option<Handle>,
        index: u64,
        sent: bool,
    },
    Create {
        slot: Slot,
        volume: Id,
        step: Step,
        fenced: Vec<bool>,
        resumed: bool,
    },
}

/// Next step of a creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    StoreFence,
    Fence,
    Commit,
}

/// Result of a step of a task.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    Continues,
    Ended,
    /// The creation of this snapshot of a volume is durable.
    Committed(Slot, Id),
}

/// What tasks work on.
#[derive(Debug)]
pub struct World {
    pub meta: Meta,
    pub storage: Storage,
    pub reference: Reference,
    /// Handles of clients that write.
    pub handles: BTreeMap<(u64, Id), Handle>,
    pub now: u64,
    pub mutation: Mutation,
}

impl World {
    /// Executes the next step of a task.
    pub fn advance(&mut self, number: u64, task: &mut Task) -> Result<Progress, String> {
        match task {
            Task::Write { of, at, count, value, tag, sent } => {
                let (of, change) = (of.clone(), (*at, *count, *value, *tag));
                match self.send_write(number, &of, change) {
                    Some(Err(Fenced)) => self.refused(task),
                    result => *sent = *sent || result.is_some(),
                }
                Ok(Progress::Continues)
            }
            Task::Report { inode, end } => {
                self.meta.report(*inode, *end);
                Ok(Progress::Ended)
            }
            Task::Read { of, block, start } => self.read(of, *block, *start),
            Task::Truncate { of, to, value, handle, index, sent } => {
                if handle.is_none() {
                    handle.clone_from(&self.meta.truncate(of.inode, *to));
                    if let Some(write) = self.reference.writes.get_mut(value) {
                        write.cut.get_or_insert(self.now);
                    }
                }
                let Some(handle) = handle.clone() else { return Ok(Progress::Continues) };
                match self.send_cut(number, of.inode, *to, handle, *index) {
                    Some(Err(Fenced)) => self.refused(task),
                    result => *sent = *sent || result.is_some(),
                }
                Ok(Progress::Continues)
            }
            Task::Create { slot, volume, step, fenced, resumed } => {
                Ok(self.create(*slot, *volume, step, fenced, *resumed))
            }
        }
    }

    /// `None`: not sent.
    fn send_write(
        &mut self,
        task: u64,
        of: &File,
        (at, count, value, tag): (u64, u64, Tag, Tag),
    ) -> Option<Result<(), Fenced>> {
        let (key, inode) = ((of.client, of.inode), of.inode);
        let cached = self.handles.get(&key).cloned();
        let handle = cached.or_else(|| self.meta.reserve(inode))?;
        self.handles.insert(key, handle.clone());
        let (index, at) = (at / CHUNK_BLOCKS, at % CHUNK_BLOCKS);
        let Handle { volume, epoch, origins } = handle;
        let change = Change::Write { at, count, value };
        let update = Update { task, tag, volume, epoch, inode, origins, index, change };
        Some(self.storage.deliver(update))
    }

    fn read(&mut self, of: &File, block: u64, start: u64) -> Result<Progress, String> {
        let Some(handle) = self.meta.open(of.inode) else { return Ok(Progress::Ended) };
        if !self.storage.serves(block / CHUNK_BLOCKS) {
            return Ok(Progress::Continues);
        }
        let value = self.storage.block(of.inode, Epoch::MAX, &handle.origins, block);
        let reads = self.reference.observed.entry((of.file, block)).or_default();
        reads.push(Observation { start, end: self.now, value });
        match self.reference.refute((of.file, block), value, start, self.now) {
            Some(why) => Err(format!("a read of client {}: {why}", of.client)),
            None => Ok(Progress::Ended),
        }
    }

    /// `None`: not sent.
    fn send_cut(
        &mut self,
        task: u64,
        inode: Id,
        to: u64,
        handle: Handle,
        index: u64,
    ) -> Option<Result<(), Fenced>> {
        // A late copy would cut newer data. The product names the version of the chunk to be cut.
        if self.storage.executes(task) {
            return None;
        }
        let Handle { volume, epoch, origins } = handle;
        let (tag, length) = (self.reference.fresh(), to.saturating_sub(index * CHUNK_BLOCKS));
        let change = Change::Cut { length };
        let update = Update { task, tag, volume, epoch, inode, origins, index, change };
        Some(self.storage.deliver(update))
    }

    /// The reply to an update arrives. Returns whether its task has ended, and its successor.
    pub fn answered(&mut self, task: &mut Task) -> (bool, Option<Task>) {
        match task {
            Task::Write { of, at, count, value, sent: true, .. } => {
                self.acknowledge(*value);
                (true, Some(Task::Report { inode: of.inode, end: *at + *count }))
            }
            Task::Truncate { of, value, index, sent, .. } if *sent => {
                (*index, *sent) = (*index + 1, false);
                if *index < CHUNKS {
                    return (false, None);
                }
                self.meta.finish_truncation(of.inode);
                self.acknowledge(*value);
                (true, None)
            }
            _ => (false, None),
        }
    }

    /// The update of a task was refused because of a newer epoch: it gets a new handle.
    pub fn refused(&mut self, task: &mut Task) {
        match task {
            Task::Write { of, tag, sent, .. } => {
                self.handles.remove(&(of.client, of.inode));
                *sent = false;
                if self.mutation == Mutation::NewTagAfterFence {
                    *tag = self.reference.fresh();
                }
            }
            Task::Truncate { handle, sent, .. } => (*handle, *sent) = (None, false),
            _ => {}
        }
    }

    fn acknowledge(&mut self, value: Tag) {
        if let Some(write) = self.reference.writes.get_mut(&value) {
            write.end = Some(self.now);
        }
    }

    fn create(
        &mut self,
        slot: Slot,
        volume: Id,
        step: &mut Step,
        fenced: &mut [bool],
        resumed: bool,
    ) -> Progress {
        let fence = self.meta.epoch(volume) + 1;
        match step {
            Step::StoreFence => {
                self.storage.store_fence(volume, fence);
                *step = match self.mutation {
                    Mutation::CommitFirst => Step::Commit,
                    Mutation::TrustCreator if resumed => Step::Commit,
                    _ => Step::Fence,
                };
            }
            Step::Fence => {
                for node in 0..NODES as usize {
                    if let Some(done) = fenced.get_mut(node)
                        && !*done
                    {
                        *done = self.storage.fence(node, volume, fence);
                        break;
                    }
                }
                if fenced.iter().all(|done| *done) {
                    *step = Step::Commit;
                }
            }
            Step::Commit => {
                self.meta.commit_snapshot(slot, volume);
                return Progress::Committed(slot, volume);
            }
        }
        Progress::Continues
    }
}
