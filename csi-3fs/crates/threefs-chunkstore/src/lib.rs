//! Chunk files that survive a kill at any moment: [`ChunkStore`] and [`FileChunkStore`].

mod blocks;
mod budget;
mod checksums;
pub mod disk;
mod index;
mod log;
mod plan;
mod redo;
mod room;
mod store;

pub use budget::DiskBudget;
pub use room::{Room, RoomReady, RoomWait};
pub use store::{FileChunkStore, StoreConfig};

use threefs_core::chunk::{ChunkMetas, ChunkState, StoreUpdate, Which};
use threefs_core::error::StoreError;
use threefs_core::forgotten::InodeRange;
use threefs_core::ids::{ChainVersion, ChunkId, ChunkVersion, StoreId};

/// Room on a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes that hold content, pending or committed.
    pub used_bytes: u64,
    /// Bytes that all stores of the disk may hold together.
    pub capacity_bytes: u64,
}

/// Bytes of one state of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOutcome {
    /// The state that was read.
    pub state: ChunkState,
    /// The bytes asked for; fewer where the chunk ends.
    pub bytes: Vec<u8>,
}

/// The chunks of one target. All methods block and may be called from many threads at once;
/// two updates of one chunk at the same time are the caller's mistake (the replica prevents it).
pub trait ChunkStore: ChunkMetas + Send + Sync + 'static {
    /// Reads `length` bytes from `offset` on, verified against their checksums.
    ///
    /// # Errors
    /// `NotFound` where there is no such state or the chunk is removed, `Corrupt`, `Io`.
    fn read(
        &self,
        chunk: ChunkId,
        which: Which,
        offset: u32,
        length: u32,
    ) -> Result<ReadOutcome, StoreError>;

    /// Asks for the room of the copy that `update` makes, as a request of `class`
    /// (`threefs_core::message::class`). Never blocks: `ready` is called once, perhaps before this
    /// returns, with the room; or with `NoSpace`, if there would not be enough even without any
    /// other update in flight. If it was not called yet, the wait's name for [`Self::expire`].
    fn reserve(
        &self,
        update: &StoreUpdate,
        payload_bytes: usize,
        class: u8,
        ready: RoomReady,
    ) -> Option<RoomWait> {
        let _ = (update, payload_bytes, class);
        ready(Ok(Room::default()));
        None
    }

    /// Ends a wait: its `ready` gets `NoSpace`, unless it was called already.
    fn expire(&self, wait: RoomWait) {
        let _ = wait;
    }

    /// As [`Self::apply`], in room that [`Self::reserve`] has given for this update.
    ///
    /// # Errors
    /// As [`Self::apply`].
    fn apply_in(
        &self,
        update: &StoreUpdate,
        payload: &[u8],
        room: Room,
    ) -> Result<ChunkState, StoreError> {
        drop(room);
        self.apply(update, payload)
    }

    /// Makes a pending state, durably: when this returns, it survives a loss of power. A pending
    /// state that was there before is replaced. `payload` is the update's own bytes. Waits for room,
    /// boundedly, where other updates in flight hold it. Returns the pending state.
    ///
    /// # Errors
    /// `NotFound` (the inode is forgotten), `NoSpace`, `Corrupt` (a partial write met damaged old content), `Io`: nothing has changed.
    fn apply(&self, update: &StoreUpdate, payload: &[u8]) -> Result<ChunkState, StoreError>;

    /// Flips the pending state `version` to committed, atomically. Durable with the next
    /// [`Self::apply`] or [`Self::flush`]; lost by a crash before that, it leaves the update
    /// pending, which the protocol rolls forward. Committing what is committed already succeeds.
    ///
    /// # Errors
    /// `NotFound` where no such state is pending, `Io`.
    fn commit(
        &self,
        chunk: ChunkId,
        version: ChunkVersion,
        chain_version: ChainVersion,
    ) -> Result<ChunkState, StoreError>;

    /// As [`Self::commit`], where that waits for nothing: no disk, no other thread that waits for
    /// one. `None`: nothing was done, and [`Self::commit`] has to be called where waiting is allowed.
    fn commit_at_once(
        &self,
        _chunk: ChunkId,
        _version: ChunkVersion,
        _chain_version: ChainVersion,
    ) -> Option<Result<ChunkState, StoreError>> {
        None
    }

    /// Drops everything about a chunk, its version too. Durable when it returns.
    ///
    /// # Errors
    /// `Io`.
    fn forget(&self, chunk: ChunkId) -> Result<(), StoreError>;

    /// Drops everything about a chunk that was removed by `version`, and raises the floor of
    /// versions to it. Durable like a commit.
    ///
    /// # Errors
    /// `Io`.
    fn purge(&self, chunk: ChunkId, version: ChunkVersion) -> Result<(), StoreError>;

    /// Drops everything about the chunks of these inodes and refuses updates of them from then on,
    /// and raises the floor of versions. Durable when it returns.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    fn forget_inodes(
        &self,
        inodes: &[InodeRange],
        version_floor: ChunkVersion,
    ) -> Result<(), StoreError>;

    /// Makes everything so far durable.
    ///
    /// # Errors
    /// `Io`.
    fn flush(&self) -> Result<(), StoreError>;

    /// Which store this is: the same for as long as its log lives.
    fn id(&self) -> StoreId;

    /// Chunks that are known, removed ones too.
    fn chunks(&self) -> u64;

    /// Bytes that hold content, pending or committed.
    fn used_bytes(&self) -> u64;

    /// Room used and left.
    fn space(&self) -> Space;
}
