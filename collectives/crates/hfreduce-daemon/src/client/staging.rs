//! Staging of a rank's buffers in the arena that it shares with the daemon.

use std::ops::Range;
use std::sync::Arc;

use fabric::arena::{Arena, ArenaError, Block};
use hfreduce_kernels::Store;

use crate::protocol::Region;
use hfreduce_core::Fingerprint;
use hfreduce_engine::operation::{Buffer, Operation, Transfer};

/// Size of blocks for buffers that are not registered, so that they can be reused; smaller blocks
/// have a power of two of pages.
const STEP_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
/// Maximum bytes of free blocks that are kept.
const FREE_BYTES_MAX: usize = 256 << 20;
/// Maximum number of free blocks.
const FREE_BLOCKS_MAX: usize = 64;
const STREAM_FROM_BYTES: usize = 4 << 20;

/// Blocks in the arena for buffers that are not registered.
pub struct BufferStager {
    arena: Arc<Arena>,
    /// Free blocks, the most recently used last.
    free: Vec<Block>,
}

/// Location of the buffers of one operation.
pub struct StagedOperation {
    input: Place,
    output: Place,
}

enum Place {
    /// The caller's buffer is registered.
    Registered(Region),
    Staged(Block, usize),
    /// The same as the input.
    Same,
}

impl BufferStager {
    pub fn new(arena: Arc<Arena>) -> Self {
        Self { arena, free: Vec::new() }
    }

    /// Copies an operation's input into the arena, and allocates its output.
    ///
    /// # Errors
    /// The arena is exhausted.
    pub fn stage(
        &mut self,
        operation: &Operation,
        rank: u32,
    ) -> Result<StagedOperation, ArenaError> {
        let input = self.place(&operation.input)?;
        let output = match operation.output.is(&operation.input) {
            true => Place::Same,
            false => self.place(&operation.output)?,
        };
        let Fingerprint { kind, root, .. } = operation.fingerprint;
        let staged = StagedOperation { input, output };
        if kind.reads_input(root == rank) && !operation.input.is_pipelined() {
            staged.copy_in(operation, 0..operation.input.bytes());
        }
        Ok(staged)
    }

    /// Returns the blocks of an operation.
    pub fn release(&mut self, staged: StagedOperation) {
        for place in [staged.input, staged.output] {
            if let Place::Staged(block, _) = place {
                self.free.push(block);
            }
        }
        let free = |blocks: &[Block]| blocks.iter().map(Block::bytes).sum::<usize>();
        while self.free.len() > FREE_BLOCKS_MAX || free(&self.free) > FREE_BYTES_MAX {
            self.free.remove(0);
        }
    }

    /// Revokes the memory of operations from a daemon that does not answer: its writes become
    /// ineffective.
    pub fn abandon<'a>(&self, staged: impl Iterator<Item = &'a StagedOperation>) {
        let registered = staged.filter_map(|staged| match (&staged.input, &staged.output) {
            (_, Place::Registered(region)) | (Place::Registered(region), Place::Same) => {
                Some(*region)
            }
            _ => None,
        });
        // The first call retires the arena: its blocks are not reused.
        for region in std::iter::once(Region::default()).chain(registered) {
            if let Err(error) = self.arena.revoke(region.offset, region.bytes) {
                tracing::error!(%error, "cannot revoke memory from hfreduced");
            }
        }
    }

    fn place(&mut self, buffer: &Buffer) -> Result<Place, ArenaError> {
        let bytes = buffer.bytes();
        if bytes == 0 {
            return Ok(Place::Registered(Region::default()));
        }
        let region = buffer.contiguous(0, bytes).and_then(|place| self.arena.find(place, bytes));
        if let Some(region) = region.filter(|region| region.whole_pages) {
            return Ok(Place::Registered(Region { offset: region.offset, bytes }));
        }
        let whole = match bytes < STEP_BYTES {
            true => bytes.next_power_of_two().max(PAGE_BYTES),
            false => bytes.next_multiple_of(STEP_BYTES),
        };
        let fits = |block: &Block| block.bytes() >= whole && block.bytes() <= whole * 2;
        let block = match self.free.iter().rposition(fits) {
            Some(at) => self.free.remove(at),
            None => self.arena.allocate(whole)?,
        };
        Ok(Place::Staged(block, bytes))
    }
}

impl StagedOperation {
    /// Copies a range of the input into the arena.
    pub fn copy_in(&self, operation: &Operation, range: Range<usize>) {
        let Place::Staged(block, _) = &self.input else { return };
        copy(&operation.input, (range.start, range.len()), block, |memory, staged, count| {
            // SAFETY: `count` bytes of the caller's buffer and of a block that is exclusive.
            unsafe { hfreduce_kernels::copy_raw(store(count), memory, staged, count) };
        });
    }

    /// Copies the output of a completed operation to the caller: all that this rank receives, from
    /// byte `from`.
    pub fn copy_out(&self, operation: &Operation, from: usize, rank: u32) {
        if operation.fingerprint.kind.uses_trees() {
            return self.copy_out_range(operation, from..operation.output.bytes(), rank);
        }
        let received = operation.transfers.iter().filter(|transfer| !transfer.sends);
        for Transfer { offset, bytes, .. } in received {
            self.copy_out_range(operation, *offset..offset + bytes, rank);
        }
    }

    /// Copies a final range of the output.
    pub fn copy_out_range(&self, operation: &Operation, range: Range<usize>, rank: u32) {
        let block = match (&self.input, &self.output) {
            (_, Place::Staged(block, _)) | (Place::Staged(block, _), Place::Same) => block,
            _ => return,
        };
        let Fingerprint { kind, root, .. } = operation.fingerprint;
        if kind.writes_output(root == rank) {
            copy(&operation.output, (range.start, range.len()), block, |memory, staged, count| {
                // SAFETY: as above; these bytes are final.
                unsafe { hfreduce_kernels::copy_raw(store(count), staged, memory, count) };
            });
        }
    }

    /// Input and output in the arena.
    pub fn regions(&self) -> (Region, Region) {
        let input = self.input.region().unwrap_or_default();
        (input, self.output.region().unwrap_or(input))
    }

    /// True if no buffer was copied.
    pub fn is_in_place(&self) -> bool {
        ![&self.input, &self.output].into_iter().any(|place| matches!(place, Place::Staged(..)))
    }
}

impl Place {
    fn region(&self) -> Option<Region> {
        match self {
            Self::Registered(region) => Some(*region),
            Self::Staged(block, bytes) => {
                Some(Region { offset: block.offset() as u64, bytes: *bytes })
            }
            Self::Same => None,
        }
    }
}

/// Large copies bypass the caches.
fn store(bytes: usize) -> Store {
    if bytes >= STREAM_FROM_BYTES { Store::Streaming } else { Store::Cached }
}

/// Calls `each` for each piece of a range of a buffer, with its address in the block.
fn copy(
    buffer: &Buffer,
    (offset, bytes): (usize, usize),
    block: &Block,
    each: impl Fn(*mut u8, *mut u8, usize),
) {
    let mut staged = block.base().wrapping_add(offset);
    for (memory, count) in buffer.ranges(offset, bytes) {
        each(memory, staged, count);
        staged = staged.wrapping_add(count);
    }
}
