//! Crash-consistent chunk store: [`ChunkStore`] and its implementation [`FileChunkStore`].

mod accounting;
mod block_set;
mod blocks;
mod budget;
mod checksums;
pub mod disk;
pub mod flush;
mod index;
mod log;
mod plan;
mod redo;
mod store;
mod unverified;

pub use accounting::ReserveWait;
pub use budget::{DiskBudget, Reservation, ReserveCallback};
pub use store::{FileChunkStore, StoreConfig};

use threefs_core::checksum::Checksum;
use threefs_core::chunk::{ChunkMetas, ChunkState, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, StoreId};

use flush::Started;

/// Space of a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes of pending and committed content.
    pub used_bytes: u64,
    /// Maximum number of bytes that all stores of the disk may hold together.
    pub capacity_bytes: u64,
}

/// An update that is visible and not durable yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// The pending state.
    pub state: ChunkState,
    /// Number of its record, for [`ChunkStore::start_flush`] and [`ChunkStore::settle`].
    pub number: u64,
}

/// Bytes of one state of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOutcome {
    /// The state that was read.
    pub state: ChunkState,
    /// The requested bytes; fewer where the chunk ends.
    pub bytes: Vec<u8>,
    /// Checksum of `bytes`.
    pub checksum: Checksum,
}

/// Result of a verified read without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Verified bytes; fewer than requested where the chunk ends.
    pub bytes: u32,
    /// Length of the chunk.
    pub chunk_length: u32,
}

/// The chunks of one target. All methods block and may be called concurrently. Concurrent updates
/// of one chunk are an error of the caller; the replica prevents them.
pub trait ChunkStore: ChunkMetas + Send + Sync + 'static {
    /// Reads `length` bytes starting at `offset`, verified against their checksums.
    ///
    /// # Errors
    /// `NotFound` if the state does not exist or the chunk is removed, `Corrupt`, `Io`.
    fn read(
        &self,
        chunk: ChunkId,
        which: Which,
        offset: u32,
        length: u32,
    ) -> Result<ReadOutcome, StoreError>;

    /// As [`Self::read`] of the committed state, from the disk rather than from the page cache.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn verify(&self, chunk: ChunkId, offset: u32, length: u32) -> Result<Verified, StoreError> {
        let outcome = self.read(chunk, Which::Committed, offset, length)?;
        let (bytes, chunk_length) = (outcome.bytes.len() as u32, outcome.state.length);
        Ok(Verified { bytes, chunk_length })
    }

    /// Reserves space for the copy that `update` makes, as a request of `class`
    /// (`threefs_core::message::class`). Never blocks: `ready` is called once, perhaps before this
    /// returns, with the reservation, or with `NoSpace` if there would not be enough space even
    /// without other updates in flight. Returns the wait for [`Self::expire`] if `ready` was not
    /// called yet.
    fn reserve(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: ReserveCallback,
    ) -> Option<ReserveWait> {
        let _ = (update, payload_bytes, class);
        ready(Ok(Reservation::default()));
        None
    }

    /// Ends a wait: calls its `ready` with `NoSpace`, unless it was called already.
    fn expire(&self, wait: ReserveWait) {
        let _ = wait;
    }

    /// Creates a pending state, replacing an existing one; durable when this returns. `payload` is
    /// the update's data, `payload_checksum` its checksum from the sender, and `reservation` the
    /// space for this update from [`Self::reserve`]. `accepted` is called once the update is checked
    /// and has its blocks, before it is written: from then on only the disk can fail. Returns the
    /// pending state.
    ///
    /// # Errors
    /// `PayloadDamaged`, `NotFound` (the inode is forgotten), `NoSpace`, `Corrupt` (a partial write
    /// of damaged content), `Io`: nothing has changed.
    fn apply_in(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        payload_checksum: Checksum,
        reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<ChunkState, StoreError>;

    /// As [`Self::apply_in`], for a payload that needs no verification. If other updates in flight
    /// hold the space, waits for it up to a time limit.
    ///
    /// # Errors
    /// As [`Self::apply_in`].
    fn apply(&self, update: &StoreUpdate, payload: &[u8]) -> Result<ChunkState, StoreError> {
        self.apply_in(update, payload, Checksum::of(payload), Reservation::default(), &mut || ())
    }

    /// As [`Self::apply_in`], for a small update, which is not durable when this returns: several of
    /// them, also of other stores, share a flush ([`flush::flush_together`]).
    ///
    /// # Errors
    /// As [`Self::apply_in`].
    fn stage(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        payload_checksum: Checksum,
        reservation: Reservation,
        accepted: &mut dyn FnMut(),
    ) -> Result<Staged, StoreError> {
        let state = self.apply_in(update, payload, payload_checksum, reservation, accepted)?;
        Ok(Staged { state, number: 0 })
    }

    /// Starts to make all updates durable that were staged up to `number`.
    fn start_flush(&self, number: u64) -> Started<'_> {
        let _ = number;
        Started::Ended(Ok(()))
    }

    /// Returns once all updates are durable that were staged up to `number`.
    ///
    /// # Errors
    /// `Io`.
    fn settle(&self, number: u64) -> Result<(), StoreError> {
        let _ = number;
        Ok(())
    }

    /// Whether [`Self::compact`] has something to do. After staged updates it is called once for each
    /// of them.
    fn compaction_is_due(&self) -> bool {
        false
    }

    /// Does a part of the work of a compaction, which [`Self::apply_in`] does by itself.
    fn compact(&self) {}

    /// Commits the pending state `version`, atomically. Durable with the next [`Self::apply`] or
    /// [`Self::flush`]; a crash before that leaves the update pending, and the protocol rolls it
    /// forward. Committing a committed state succeeds.
    ///
    /// # Errors
    /// `NotFound` if this state is not pending, `Io`.
    fn commit(
        &self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, StoreError>;

    /// As [`Self::commit`], if it needs neither the disk nor a thread that waits for the disk.
    /// `None`: nothing was done; call [`Self::commit`] on a thread that may block.
    fn commit_at_once(
        &self,
        _chunk: ChunkId,
        _version: ChunkVersion,
        _chain_version: ChainVersion,
    ) -> Option<Result<ChunkState, StoreError>> {
        None
    }

    /// Removes everything about a chunk, including its version. Durable when it returns.
    ///
    /// # Errors
    /// `Io`.
    fn forget(&self, chunk: ChunkId) -> Result<(), StoreError>;

    /// Removes everything about a chunk that was removed by `version`, and raises the version floor
    /// to it. Durable like a commit.
    ///
    /// # Errors
    /// `Io`.
    fn purge(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), StoreError>;

    /// Removes everything about the chunks of these inodes, rejects later updates of them, and
    /// raises the version floor. Durable when it returns.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    fn forget_inodes(
        &self,
        inodes: &[InodeRange],
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError>;

    /// Makes all changes so far durable.
    ///
    /// # Errors
    /// `Io`.
    fn flush(&self) -> Result<(), StoreError>;

    /// Identity of the store, stable for the lifetime of its log.
    fn id(&self) -> StoreId;

    /// Number of chunks, including removed ones.
    fn chunks(&self) -> u64;

    /// Bytes of pending and committed content.
    fn used_bytes(&self) -> u64;

    /// Used space and capacity.
    fn space(&self) -> Space;
}
