//! Simulated chunk store with exactly the guarantees of the real one.
//!
//! A flush makes all earlier records durable, updates and commits. A crash keeps any prefix of the
//! unflushed records.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMeta, ChunkMetas, ChunkState, ContentChange, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::forgotten::{ForgottenInodes, InodeRange};
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, InodeId, StoreId};
use threefs_core::membership::MembershipRecord;

/// A state and its content.
#[derive(Clone, Debug, Default)]
pub struct Version {
    /// The state.
    pub state: ChunkState,
    /// The content.
    pub bytes: Bytes,
    /// Whether the chunk had no committed content before.
    pub fresh: bool,
}

/// One chunk.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    /// The committed version.
    pub committed: Version,
    /// The pending version.
    pub pending: Option<Version>,
    /// Whether the committed content is damaged.
    pub damaged: bool,
}

#[derive(Clone, Debug)]
enum Record {
    Pending(ChunkId, Version),
    Commit(ChunkId, ChunkVersion, ChainVersion),
    Forget(ChunkId),
    Purged(ChunkId, ChunkVersion),
    Gone(Vec<InodeRange>, ChunkVersion),
}

#[derive(Clone, Debug, Default)]
struct Contents {
    slots: BTreeMap<ChunkId, Slot>,
    forgotten: ForgottenInodes,
    version_floor: ChunkVersion,
}

/// State of a store's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Log {
    /// Readable.
    #[default]
    Sound,
    /// Unreadable until the operator restores it.
    Damaged,
    /// Permanently unreadable.
    Destroyed,
}

/// A simulated chunk store.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Id of the store.
    pub id: StoreId,
    live: Contents,
    durable: Contents,
    unflushed: Vec<Record>,
    /// State of its log.
    pub log: Log,
    /// Whether it has replaced a lost store.
    pub in_place_of_lost: bool,
    /// The membership record in its folder, durable once written.
    pub record: Option<MembershipRecord>,
}

impl Store {
    /// An empty store.
    #[must_use]
    pub fn new(id: StoreId) -> Self {
        Self { id, ..Self::default() }
    }

    /// An empty store that replaces a lost one.
    #[must_use]
    pub fn in_place_of_lost(id: StoreId) -> Self {
        Self { in_place_of_lost: true, ..Self::new(id) }
    }

    /// The content after an update.
    #[must_use]
    pub fn changed(before: &[u8], change: ContentChange, payload: &Bytes) -> Bytes {
        match change {
            ContentChange::Replace => payload.clone(),
            ContentChange::Remove => Bytes::new(),
            ContentChange::Truncate { length } => {
                let mut bytes = before.to_vec();
                bytes.resize(length as usize, 0);
                bytes.into()
            }
            ContentChange::Write { offset } => {
                let (offset, end) = (offset as usize, offset as usize + payload.len());
                let mut bytes = before.to_vec();
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset..end].copy_from_slice(payload);
                bytes.into()
            }
        }
    }

    /// Whether an update does not depend on damaged content.
    #[must_use]
    pub fn accepts(&self, update: &StoreUpdate) -> bool {
        let damaged = self.live.slots.get(&update.chunk).is_some_and(|slot| slot.damaged);
        !damaged || matches!(update.change, ContentChange::Replace | ContentChange::Remove)
    }

    /// Makes a pending state, not yet durable.
    ///
    /// # Errors
    /// `Corrupt`: the update requires old content that is damaged.
    pub fn apply(
        &mut self,
        update: &StoreUpdate,
        payload: &Bytes,
    ) -> Result<ChunkState, StoreError> {
        if self.live.forgotten.contains(update.chunk.inode) {
            return Err(StoreError::NotFound { chunk: update.chunk });
        }
        let slot = self.live.slots.get(&update.chunk);
        let needs_old =
            matches!(update.change, ContentChange::Write { .. } | ContentChange::Truncate { .. });
        if needs_old && slot.is_some_and(|slot| slot.damaged) {
            return Err(StoreError::Corrupt { chunk: update.chunk, block: 0 });
        }
        let fresh = needs_old && !slot.is_some_and(|slot| slot.committed.state.exists());
        let before = slot.map(|slot| slot.committed.bytes.clone()).unwrap_or_default();
        let bytes = Self::changed(&before, update.change, payload);
        let state = ChunkState {
            version: update.version,
            chain_version: update.chain_version,
            length: bytes.len() as u32,
            checksum: Checksum::of(&bytes),
            removed: update.change == ContentChange::Remove,
            tags: update.tags.clone(),
        };
        self.append(Record::Pending(update.chunk, Version { state: state.clone(), bytes, fresh }));
        Ok(state)
    }

    /// Makes everything so far durable.
    pub fn flush(&mut self) {
        for record in std::mem::take(&mut self.unflushed) {
            install(&mut self.durable, record);
        }
    }

    /// Commits the pending state, not yet durable.
    ///
    /// # Errors
    /// `NotFound`: the pending state does not exist.
    pub fn commit(
        &mut self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, StoreError> {
        let slot = self.live.slots.get(&chunk).ok_or(StoreError::NotFound { chunk })?;
        match &slot.pending {
            Some(pending) if pending.state.version == version => {}
            None if slot.committed.state.version == version => {
                return Ok(slot.committed.state.clone());
            }
            _ => return Err(StoreError::NotFound { chunk }),
        }
        self.append(Record::Commit(chunk, version, chain_version));
        Ok(self.live.slots.get(&chunk).map(|slot| slot.committed.state.clone()).unwrap_or_default())
    }

    /// Drops all state of a chunk, not yet durable.
    pub fn forget(&mut self, chunk: ChunkId) {
        self.append(Record::Forget(chunk));
    }

    /// Drops all state of a removed chunk, not yet durable.
    pub fn purge(&mut self, chunk: ChunkId, version: ChunkVersion) {
        self.append(Record::Purged(chunk, version));
    }

    /// Drops all chunks of these inodes and fences them, not yet durable.
    pub fn forget_inodes(&mut self, inodes: Vec<InodeRange>, version_floor: ChunkVersion) {
        self.append(Record::Gone(inodes, version_floor));
    }

    /// Reads the newest or the committed version of a chunk.
    ///
    /// # Errors
    /// `NotFound`, `Corrupt`.
    pub fn read(&self, chunk: ChunkId, which: Which) -> Result<Version, StoreError> {
        let slot = self.live.slots.get(&chunk).ok_or(StoreError::NotFound { chunk })?;
        match (&slot.pending, which) {
            (Some(pending), Which::Newest) => Ok(pending.clone()),
            _ if slot.damaged => Err(StoreError::Corrupt { chunk, block: 0 }),
            _ if slot.committed.state.exists() => Ok(slot.committed.clone()),
            _ => Err(StoreError::NotFound { chunk }),
        }
    }

    /// Power failure. `keep_count(n)` is the number of the `n` unflushed records that reached the disk.
    pub fn crash(&mut self, keep_count: impl FnOnce(usize) -> usize) {
        self.kill(keep_count);
        self.flush();
    }

    /// Death of the process. `keep_count(n)` is the number of the `n` unflushed records that it had
    /// written: they are in the page cache, so they are read again, and lost if the power fails
    /// before a flush.
    pub fn kill(&mut self, keep_count: impl FnOnce(usize) -> usize) {
        let keep = keep_count(self.unflushed.len());
        self.unflushed.truncate(keep);
        self.live = self.durable.clone();
        for record in &self.unflushed {
            install(&mut self.live, record.clone());
        }
    }

    /// A failed flush, as in the kernel: unflushed data is still read from the page cache and lost
    /// with it.
    pub fn forget_unflushed(&mut self) {
        self.unflushed.clear();
    }

    /// Flips a bit in the committed content of a chunk. False if there is none.
    pub fn damage(&mut self, chunk: ChunkId) -> bool {
        let Some(slot) = self.live.slots.get_mut(&chunk) else { return false };
        slot.damaged = slot.committed.state.exists() && slot.pending.is_none();
        slot.damaged
    }

    /// Repairs all damage.
    pub fn repair_all(&mut self) {
        self.live.slots.values_mut().for_each(|slot| slot.damaged = false);
    }

    /// All chunks.
    #[must_use]
    pub fn slots(&self) -> &BTreeMap<ChunkId, Slot> {
        &self.live.slots
    }

    fn append(&mut self, record: Record) {
        install(&mut self.live, record.clone());
        self.unflushed.push(record);
    }
}

fn install(contents: &mut Contents, record: Record) {
    let slots = &mut contents.slots;
    match record {
        Record::Pending(chunk, version) => {
            slots.entry(chunk).or_default().pending = Some(version);
        }
        Record::Commit(chunk, version, chain_version) => {
            if let Some(slot) = slots.get_mut(&chunk)
                && slot.pending.as_ref().is_some_and(|pending| pending.state.version == version)
                && let Some(mut pending) = slot.pending.take()
            {
                pending.state.chain_version = chain_version;
                slot.committed = pending;
                slot.damaged = false;
            }
        }
        Record::Forget(chunk) => {
            slots.remove(&chunk);
        }
        Record::Purged(chunk, version) => {
            slots.remove(&chunk);
            contents.version_floor = contents.version_floor.max(version);
        }
        Record::Gone(inodes, floor) => {
            contents.version_floor = contents.version_floor.max(floor);
            for range in inodes {
                slots.retain(|chunk, _| !range.contains(chunk.inode));
                contents.forgotten.insert(range);
            }
        }
    }
}

impl ChunkMetas for Store {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.live.slots.get(&chunk).map(|slot| meta(chunk, slot))
    }

    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        let mut versions = self.live.slots.range(chunk.first_version()..=chunk);
        versions.next_back().map(|(chunk, slot)| meta(*chunk, slot))
    }

    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta> {
        let lower = after.map_or(Bound::Unbounded, Bound::Excluded);
        if after.is_some_and(|after| after >= last) {
            return Vec::new();
        }
        let range = self.live.slots.range((lower, Bound::Included(last)));
        range.take(limit).map(|(chunk, slot)| meta(*chunk, slot)).collect()
    }

    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId> {
        let lower = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.live
            .slots
            .range((lower, Bound::Unbounded))
            .filter(|(_, slot)| slot.pending.is_some())
            .take(limit)
            .map(|(chunk, _)| *chunk)
            .collect()
    }

    fn is_forgotten(&self, inode: InodeId) -> bool {
        self.live.forgotten.contains(inode)
    }

    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange> {
        self.live.forgotten.ranges(after, limit)
    }

    fn version_floor(&self) -> ChunkVersion {
        self.live.version_floor
    }

    fn last_existing(&self, inode: InodeId) -> Option<ChunkMeta> {
        let range = self.live.slots.range(ChunkId::first_of(inode)..=ChunkId::last_of(inode));
        let committed = range.rev().filter(|(_, slot)| slot.committed.state.version.0 > 0);
        let mut newest = committed.scan(None, |seen: &mut Option<ChunkId>, (chunk, slot)| {
            let is_newest = seen.replace(*chunk).is_none_or(|seen| !seen.is_version_of(*chunk));
            Some((chunk, slot, is_newest))
        });
        newest
            .find(|(_, slot, is_newest)| *is_newest && slot.committed.state.exists())
            .map(|(chunk, slot, _)| meta(*chunk, slot))
    }
}

fn meta(chunk: ChunkId, slot: &Slot) -> ChunkMeta {
    ChunkMeta {
        chunk,
        committed: slot.committed.state.clone(),
        pending: slot.pending.as_ref().map(|pending| pending.state.clone()),
    }
}
