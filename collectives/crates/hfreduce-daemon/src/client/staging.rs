//! Where a rank's buffers are for the daemon: in the arena, or in a block of it while an operation runs.

use std::ops::Range;
use std::sync::Arc;

use fabric::arena::{Arena, ArenaError, Block};
use hfreduce_kernels::Store;

use crate::protocol::Region;
use hfreduce_core::Kind;
use hfreduce_engine::operation::{Buffer, Operation, Transfer};

/// Blocks for buffers that are not registered have a multiple of this, so that they serve again; those
/// for smaller buffers have a power of two of pages.
const STEP_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
/// Bytes of such blocks that are kept for the next operations.
const FREE_BYTES_MAX: usize = 256 << 20;
/// How many they may be.
const FREE_BLOCKS_MAX: usize = 64;
const STREAM_FROM_BYTES: usize = 4 << 20;

/// A rank's part of the memory that it shares with the daemon.
pub struct BufferStager {
    arena: Arc<Arena>,
    /// Blocks that no operation uses, the one used last at the end.
    free: Vec<Block>,
}

/// Where the buffers of one operation are.
pub struct StagedOperation {
    input: Place,
    output: Place,
}

enum Place {
    /// Where the caller has it.
    Registered(Region),
    Staged(Block, usize),
    /// Where the input is.
    Same,
}

impl BufferStager {
    pub fn new(arena: Arc<Arena>) -> Self {
        Self { arena, free: Vec::new() }
    }

    /// Brings an operation's input where the daemon finds it, and makes room for its output.
    ///
    /// # Errors
    /// There is too little memory.
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
        let fingerprint = &operation.fingerprint;
        let unread = fingerprint.kind == Kind::Recv
            || (fingerprint.kind == Kind::Broadcast && fingerprint.root != rank);
        let staged = StagedOperation { input, output };
        if !unread && !operation.input.is_pipelined() {
            staged.copy_in(operation, 0..operation.input.bytes());
        }
        Ok(staged)
    }

    /// Nobody uses its blocks any more.
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

    /// The daemon may still be at it and does not answer: what it writes from now on goes nowhere.
    pub fn abandon<'a>(&self, staged: impl Iterator<Item = &'a StagedOperation>) {
        let registered = staged.filter_map(|staged| match (&staged.input, &staged.output) {
            (_, Place::Registered(region)) | (Place::Registered(region), Place::Same) => {
                Some(*region)
            }
            _ => None,
        });
        // The first retires the arena: no block of it is anybody's again.
        for region in std::iter::once(Region::default()).chain(registered) {
            if let Err(error) = self.arena.revoke(region.offset, region.bytes) {
                tracing::error!(%error, "memory could not be taken back from hfreduced");
            }
        }
    }

    fn place(&mut self, buffer: &Buffer) -> Result<Place, ArenaError> {
        let bytes = buffer.bytes();
        if bytes == 0 {
            return Ok(Place::Registered(Region::default()));
        }
        let found = buffer.contiguous(0, bytes).and_then(|place| self.arena.find(place, bytes));
        if let Some(found) = found.filter(|found| found.whole_pages) {
            return Ok(Place::Registered(Region { offset: found.offset, bytes }));
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
    /// Brings a range of the input where the daemon finds it.
    pub fn copy_in(&self, operation: &Operation, range: Range<usize>) {
        let Place::Staged(block, _) = &self.input else { return };
        copy(&operation.input, (range.start, range.len()), block, |memory, staged, count| {
            // SAFETY: `count` bytes of the caller's and of a block that nobody else uses yet.
            unsafe { hfreduce_kernels::copy_raw(store(count), memory, staged, count) };
        });
    }

    /// Brings what is final of the output to the caller: all that arrives on this rank from the byte
    /// `from` on, once the operation has ended well.
    pub fn copy_out(&self, operation: &Operation, from: usize, rank: u32) {
        let fingerprint = &operation.fingerprint;
        if fingerprint.kind.uses_trees() {
            return self.copy_out_range(operation, from..operation.output.bytes(), rank);
        }
        let received = operation.transfers.iter().filter(|transfer| !transfer.sends);
        for Transfer { offset, bytes, .. } in received {
            self.copy_out_range(operation, *offset..offset + bytes, rank);
        }
    }

    /// The same of a range that is final.
    pub fn copy_out_range(&self, operation: &Operation, range: Range<usize>, rank: u32) {
        let block = match (&self.input, &self.output) {
            (_, Place::Staged(block, _)) | (Place::Staged(block, _), Place::Same) => block,
            _ => return,
        };
        let fingerprint = &operation.fingerprint;
        let arrives = match fingerprint.kind {
            Kind::Broadcast => fingerprint.root != rank,
            Kind::Reduce => fingerprint.root == rank,
            _ => true,
        };
        if arrives {
            copy(&operation.output, (range.start, range.len()), block, |memory, staged, count| {
                // SAFETY: as above; these bytes are final.
                unsafe { hfreduce_kernels::copy_raw(store(count), staged, memory, count) };
            });
        }
    }

    /// Input and output, as the daemon finds them.
    pub fn regions(&self) -> (Region, Region) {
        let input = self.input.region().unwrap_or_default();
        (input, self.output.region().unwrap_or(input))
    }

    /// True if no byte of it was copied.
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

/// What is larger than caches hold until it is read goes past them.
fn store(bytes: usize) -> Store {
    if bytes >= STREAM_FROM_BYTES { Store::Streaming } else { Store::Cached }
}

/// Hands each piece of a range of a buffer to `each`, with the place of the same bytes in the block.
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
