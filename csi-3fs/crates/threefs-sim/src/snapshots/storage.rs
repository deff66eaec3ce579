//! Storage nodes: chunks, fences, updates in progress.

use std::collections::{BTreeMap, BTreeSet};

use super::{CHUNK_BLOCKS, CHUNKS, Epoch, Id, Mutation, NODES, Tag};

/// A file in a snapshot that a file of a clone is a copy of: its bytes below `end` are read where
/// the copy has no chunk.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    pub inode: Id,
    pub at: Epoch,
    pub end: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Chunk {
    pub blocks: [Tag; CHUNK_BLOCKS as usize],
    /// Stored blocks, as the length of a chunk.
    pub length: u64,
    /// Updates that it has. A real chunk keeps the recent ones.
    tags: BTreeSet<Tag>,
    volume: Id,
}

/// What an update does to its chunk.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    Write {
        at: u64,
        count: u64,
        value: Tag,
    },
    /// Cuts the chunk, if it exists.
    Cut {
        length: u64,
    },
}

#[derive(Clone, Debug)]
pub struct Update {
    /// The task that waits for the reply.
    pub task: u64,
    pub tag: Tag,
    pub volume: Id,
    pub epoch: Epoch,
    pub inode: Id,
    pub origins: Vec<Origin>,
    pub index: u64,
    pub change: Change,
}

/// An update is refused: its volume has a newer epoch, so the client needs a new handle.
#[derive(Clone, Copy, Debug)]
pub struct Fenced;

#[derive(Debug)]
pub struct Node {
    pub up: bool,
    /// Whether messages of creators arrive; those of clients do.
    pub reachable: bool,
    /// Versions of chunks: inode, index, epoch.
    chunks: BTreeMap<(Id, u64, Epoch), Chunk>,
    /// Updates of earlier epochs are refused.
    fences: BTreeMap<Id, Epoch>,
    shown: BTreeMap<Id, Shown>,
    executing: Vec<Update>,
}

/// Epochs of the snapshots of a volume, complete below an epoch.
#[derive(Debug)]
struct Shown {
    below: Epoch,
    epochs: BTreeSet<Epoch>,
}

#[derive(Debug)]
pub struct Storage {
    pub nodes: Vec<Node>,
    /// Durable, at mgmtd.
    fences: BTreeMap<Id, Epoch>,
    mutation: Mutation,
}

impl Storage {
    pub fn new(mutation: Mutation) -> Self {
        let node = || Node {
            up: true,
            reachable: true,
            chunks: BTreeMap::new(),
            fences: BTreeMap::new(),
            shown: BTreeMap::new(),
            executing: Vec::new(),
        };
        let nodes = (0..NODES).map(|_| node()).collect();
        Self { nodes, fences: BTreeMap::new(), mutation }
    }

    fn node(&self, index: u64) -> Option<&Node> {
        self.nodes.get((index % NODES) as usize)
    }

    fn node_of(&mut self, index: u64) -> Option<&mut Node> {
        self.nodes.get_mut((index % NODES) as usize)
    }

    /// An update arrives: refused, or executed later. Lost if the node is down.
    pub fn deliver(&mut self, update: Update) -> Result<(), Fenced> {
        let accepts_all = self.mutation == Mutation::AcceptOldEpochs;
        let Some(node) = self.node_of(update.index).filter(|node| node.up) else { return Ok(()) };
        let fence = node.fences.get(&update.volume).copied().unwrap_or_default();
        if update.epoch < fence && !accepts_all {
            return Err(Fenced);
        }
        node.executing.push(update);
        Ok(())
    }

    /// Whether a node executes an update of this task.
    pub fn executes(&self, task: u64) -> bool {
        self.nodes.iter().any(|node| node.executing.iter().any(|update| update.task == task))
    }

    /// Number of updates that a node executes.
    pub fn executing(&self, node: usize) -> usize {
        self.nodes.get(node).map_or(0, |node| node.executing.len())
    }

    /// Completes an update; returns its task, which gets the reply, and whether it was made.
    pub fn complete(&mut self, node: usize, number: usize) -> Option<(u64, Result<(), Fenced>)> {
        let mutation = self.mutation;
        let node = self.nodes.get_mut(node)?;
        if number >= node.executing.len() {
            return None;
        }
        let update = node.executing.remove(number);
        let result = node.apply(&update, mutation);
        Some((update.task, result))
    }

    /// Makes a fence durable at mgmtd.
    pub fn store_fence(&mut self, volume: Id, epoch: Epoch) {
        let fence = self.fences.entry(volume).or_default();
        *fence = epoch.max(*fence);
    }

    /// Whether a node refuses updates of earlier epochs from now on, and executes none. A node that
    /// does not serve gets the fence before it does.
    pub fn fence(&mut self, node: usize, volume: Id, epoch: Epoch) -> bool {
        let mutation = self.mutation;
        let Some(node) = self.nodes.get_mut(node) else { return true };
        if !node.up {
            return true;
        }
        if !node.reachable {
            return mutation == Mutation::SkipUnreachable;
        }
        let fence = node.fences.entry(volume).or_default();
        *fence = epoch.max(*fence);
        let old = |update: &Update| update.volume == volume && update.epoch < epoch;
        mutation == Mutation::FenceWithoutDrain || !node.executing.iter().any(old)
    }

    /// A crash. Updates in progress are pending on other replicas: the next head commits them
    /// (`completes`) or drops them. It does so before the chain serves again.
    pub fn crash(&mut self, node: usize, completes: bool) {
        let mutation = self.mutation;
        let Some(node) = self.nodes.get_mut(node) else { return };
        node.up = false;
        node.fences.clear();
        node.shown.clear();
        if mutation == Mutation::ResolveLater {
            return;
        }
        for update in std::mem::take(&mut node.executing) {
            if completes {
                // Without a reply: its client sends it again.
                let _ = node.apply(&update, mutation);
            }
        }
    }

    pub fn restart(&mut self, node: usize) {
        let fences = match self.mutation {
            Mutation::ServeWithoutFences => BTreeMap::new(),
            _ => self.fences.clone(),
        };
        let Some(node) = self.nodes.get_mut(node) else { return };
        (node.up, node.reachable) = (true, true);
        node.fences = fences;
    }

    /// A block of a file: of the newest version up to an epoch.
    pub fn block(&self, id: Id, at: Epoch, origins: &[Origin], block: u64) -> Tag {
        let (index, place) = (block / CHUNK_BLOCKS, block % CHUNK_BLOCKS);
        let chunk = self.node(index).and_then(|node| node.shown(id, index, at, origins));
        chunk.and_then(|chunk| chunk.blocks.get(place as usize).copied()).unwrap_or_default()
    }

    /// Whether the node of a chunk can answer.
    pub fn serves(&self, index: u64) -> bool {
        self.node(index).is_some_and(|node| node.up)
    }

    /// End of the stored blocks of a file in an epoch.
    pub fn end(&self, id: Id, at: Epoch, origins: &[Origin]) -> u64 {
        let ends = (0..CHUNKS).filter_map(|index| {
            let chunk = self.node(index)?.shown(id, index, at, origins)?;
            (chunk.length > 0).then_some(index * CHUNK_BLOCKS + chunk.length)
        });
        ends.max().unwrap_or_default()
    }

    /// Inodes with chunks.
    pub fn inodes(&self) -> BTreeSet<Id> {
        self.nodes.iter().flat_map(|node| node.chunks.keys().map(|(id, ..)| *id)).collect()
    }

    /// Drops the chunks of removed files.
    pub fn forget(&mut self, inodes: &[Id]) {
        for node in self.nodes.iter_mut().filter(|node| node.up) {
            node.chunks.retain(|(id, ..), _| !inodes.contains(id));
        }
    }

    /// Sends the epochs of a volume's snapshots to a node, complete below an epoch.
    pub fn send_shown(&mut self, node: usize, volume: Id, below: Epoch, epochs: BTreeSet<Epoch>) {
        if let Some(node) = self.nodes.get_mut(node).filter(|node| node.up && node.reachable) {
            node.shown.insert(volume, Shown { below, epochs });
        }
    }

    /// Drops versions of chunks that no snapshot shows. Each node decides alone.
    pub fn drop_versions(&mut self, node: usize) {
        let mutation = self.mutation;
        let Some(node) = self.nodes.get_mut(node).filter(|node| node.up) else { return };
        let keys: Vec<_> = node.chunks.iter().map(|(key, chunk)| (*key, chunk.volume)).collect();
        for (first, second) in keys.iter().zip(keys.iter().skip(1)) {
            let (((id, index, since), volume), ((next_id, next_index, end), _)) = (first, second);
            if (id, index) != (next_id, next_index) {
                continue;
            }
            let Some(shown) = node.shown.get(volume) else { continue };
            // A snapshot that it does not list yet may show the version.
            let is_known = *end <= shown.below || mutation == Mutation::TrustOldList;
            let is_shown = shown.epochs.range(*since..*end).next().is_some();
            if is_known && (!is_shown || mutation == Mutation::DropShown) {
                node.chunks.remove(&(*id, *index, *since));
            }
        }
    }
}

impl Node {
    /// A chunk in an epoch.
    fn shown(&self, id: Id, index: u64, at: Epoch, origins: &[Origin]) -> Option<Chunk> {
        if let Some((_, chunk)) = self.chunks.range((id, index, 0)..=(id, index, at)).next_back() {
            return Some(chunk.clone());
        }
        origins.iter().find_map(|origin| {
            let versions = (origin.inode, index, 0)..=(origin.inode, index, origin.at);
            let mut chunk = self.chunks.range(versions).next_back()?.1.clone();
            chunk.cut(origin.end.saturating_sub(index * CHUNK_BLOCKS));
            Some(chunk)
        })
    }

    /// Makes an update, in the version of its epoch. The fence does not exclude that there is a
    /// newer one: a creation that fenced some of the nodes may have been aborted.
    fn apply(&mut self, update: &Update, mutation: Mutation) -> Result<(), Fenced> {
        let Update { inode, index, .. } = *update;
        let current = self.shown(inode, index, Epoch::MAX, &update.origins);
        let newest = self.chunks.range((inode, index, 0)..=(inode, index, Epoch::MAX)).next_back();
        let newest = newest.map(|((.., epoch), _)| *epoch);
        let is_newer = newest.is_some_and(|newest| newest > update.epoch);
        if is_newer && mutation != Mutation::IgnoreNewerVersion {
            return Err(Fenced);
        }
        let in_place = match update.change {
            Change::Write { .. } => mutation == Mutation::WriteInPlace,
            Change::Cut { .. } => mutation == Mutation::CutInPlace,
        };
        let epoch = newest.filter(|_| in_place).unwrap_or(update.epoch);
        let mut chunk = match (current, update.change) {
            (Some(chunk), _) if newest == Some(epoch) => chunk,
            (Some(chunk), Change::Cut { .. }) => chunk,
            (Some(chunk), _) if mutation == Mutation::ForgetTags => {
                Chunk { tags: BTreeSet::new(), ..chunk }
            }
            (Some(chunk), _) if mutation == Mutation::WriteWithoutCopy => {
                Chunk { tags: chunk.tags, ..Chunk::default() }
            }
            (Some(chunk), _) => chunk,
            (None, Change::Cut { .. }) => return Ok(()),
            (None, _) => Chunk::default(),
        };
        if !chunk.tags.insert(update.tag) {
            return Ok(());
        }
        match update.change {
            Change::Write { at, count, value } => chunk.write(at, count, value),
            Change::Cut { length } => chunk.cut(length),
        }
        chunk.volume = update.volume;
        self.chunks.insert((inode, index, epoch), chunk);
        Ok(())
    }
}

impl Chunk {
    fn write(&mut self, at: u64, count: u64, value: Tag) {
        for block in at..at + count {
            if let Some(place) = self.blocks.get_mut(block as usize) {
                *place = value;
            }
        }
        self.length = self.length.max(at + count);
    }

    fn cut(&mut self, length: u64) {
        self.length = self.length.min(length);
        for (block, value) in (0..).zip(&mut self.blocks) {
            if block >= length {
                *value = 0;
            }
        }
    }
}
