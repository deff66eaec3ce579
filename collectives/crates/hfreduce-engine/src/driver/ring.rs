//! Ring accumulation: where ranks share CPUs, the ranks of a node add their inputs in turn to one
//! accumulator per chunk, instead of copying them to an owner that reduces them all.
//!
//! ```text
//! rank 0   waits for the slot, copies its contribution into it    ─▶ rank 1
//! rank r   waits for rank r - 1, adds its contribution            ─▶ rank r + 1
//! last     the same, divides for an average                       ─▶ every rank copies the result
//! ```
//! Ranks that share CPUs run sequentially anyway. The data in use is then one slot per chunk
//! instead of one per rank, which stays in the nearest caches. The order of additions is that of an
//! owner, and so are the bits: sums of short types stay wide until the last rank rounds them.
//!
//! Rank 0 decides whether an operation uses the ring: it does unless the memory of rank 0 is
//! registered. The other ranks read the decision from the segment before they contribute.
//!
//! A rank that waits for its turn sleeps until then, while an earlier rank holds a chunk that it
//! lacks: its turn comes without more slots, and results of the same operation can wait. So a rank
//! is woken about once for each segment of slots that is passed on.

use hfreduce_kernels::{Pass, Store, Width};

use super::fault::Fault;
use super::node::Node;
use super::operations::{Active, Operations, ReduceAlgorithm};
use super::slots::Slots;
use hfreduce_core::{Chunk, DType, Determinism, Fingerprint, ReduceOp};
use hfreduce_shm::segment::{REGISTERED_MAX, Registered, WAIT_END, WAIT_RESULT, WAIT_TURN};

/// Below this size all inputs fit the caches together, and ranks need not wait for each other.
const RING_FROM_BYTES: u64 = 1 << 20;
/// Number of segments into which the slots are divided, so that several ranks work at the same
/// time.
const PARTS: u64 = 8;
/// Minimum number of chunks per segment: the next rank is not woken for a single chunk.
const PART_MIN: u64 = 2;

/// This rank's part in the ring.
#[derive(Debug, Default)]
pub(super) struct Ring {
    /// This rank waits for its turn, or for the decision of rank 0.
    pub wants_turn: bool,
    /// Memory in which a fragmented input is gathered: not in a slot, since a rank that waits for
    /// its turn waits for nothing else.
    pieces: Vec<u8>,
}

impl Ring {
    /// Contributes to a chunk; false if it is not this rank's turn.
    pub fn take_turn(
        &mut self,
        node: &Node,
        active: &mut Active,
        (number, chunk): (u64, &Chunk),
        slots: &mut Slots,
    ) -> Result<bool, Fault> {
        match node.local().checked_sub(1) {
            None if !slots.take_of(node, number, active.ring_slots(node)) => return Ok(false),
            Some(before) if node.shm.staged(before) <= number => {
                self.wants_turn = true;
                return Ok(false);
            }
            Some(before) => active.verify(node, before)?,
            None => {}
        }
        self.add(node, active, number, chunk)?;
        Ok(true)
    }

    /// Adds this rank's input to the accumulator, or initializes it.
    fn add(
        &mut self,
        node: &Node,
        active: &Active,
        number: u64,
        chunk: &Chunk,
    ) -> Result<(), Fault> {
        let identity = node.identity();
        let (local, last) = (identity.local(), identity.locals().len() - 1);
        let operation = &active.operation;
        let fingerprint = &operation.fingerprint;
        let (Some(dtype), Some(op), Some(widens)) = (
            DType::from_code(fingerprint.dtype),
            ReduceOp::from_code(fingerprint.op),
            widens(fingerprint),
        ) else {
            return Err(node.unknown_codes());
        };
        let sum = active.accumulator(node, number);
        let input = &operation.input;
        if local == 0 && !widens {
            // SAFETY: the slot is free and exclusive until this chunk is staged; it holds
            // `chunk.bytes`.
            unsafe { input.gather(chunk.input_offset, chunk.bytes, sum) };
            return Ok(());
        }
        let own = input.contiguous(chunk.input_offset, chunk.bytes).unwrap_or_else(|| {
            self.pieces.resize(node.shm.shape().slot_bytes, 0);
            let place = self.pieces.as_mut_ptr();
            // SAFETY: exclusive, and as long as a slot, which holds the chunk.
            unsafe { input.gather(chunk.input_offset, chunk.bytes, place) };
            place
        });
        let (sum_so_far, both, own_alone) =
            ([sum.cast_const()], [sum.cast_const(), own.cast_const()], [own.cast_const()]);
        let (inputs, wide): (&[_], &[_]) = match (local, widens) {
            (0, _) => (&own_alone, &[]),
            (_, true) => (&own_alone, &sum_so_far),
            (_, false) => (&both, &[]),
        };
        if let Some(before) = local.checked_sub(1) {
            let element = if widens { dtype.wide().size_bytes() } else { dtype.size_bytes() };
            node.count_taken(before, chunk.bytes / dtype.size_bytes() * element);
        }
        let divides = op == ReduceOp::Average && local == last;
        let pass = Pass {
            dtype,
            op: op.kernel(),
            inputs,
            wide,
            output: sum,
            to: if widens && local < last { Width::Wide } else { Width::Narrow },
            numel: chunk.bytes / dtype.size_bytes(),
            divisor: if divides { identity.placement.world_size() as u64 } else { 1 },
        };
        // SAFETY: the previous rank has passed the accumulator on, or the slot is free: it is
        // exclusive until this chunk is staged, and holds the partial sum (see `start`). The input
        // is the caller's memory, or a local buffer. The output is the first of `inputs` or of
        // `wide`, or overlaps neither.
        unsafe { pass.run(Store::Cached) }.map_err(|error| node.kernel_fault(&error))
    }

    /// True if this rank will contribute whether it reads results or not, and no rank waits for
    /// that: the results are of the operation to which it still has to contribute.
    pub fn is_turn_certain(&self, node: &Node, operations: &Operations, staged: u64) -> bool {
        let oldest = operations.active.front().is_some_and(|active| staged < active.end());
        self.wants_turn && oldest && node.shm.staged(0) > staged
    }
}

/// If an operation may use the ring, the size of its partial sums relative to its elements; equal
/// on all ranks of the node.
pub(super) fn widening(node: &Node, fingerprint: &Fingerprint) -> Option<usize> {
    let large = fingerprint.kind.reduces() && fingerprint.size_bytes() >= RING_FROM_BYTES;
    let dtype = DType::from_code(fingerprint.dtype)
        .filter(|_| large && node.identity().ring_accumulation)?;
    let widens = widens(fingerprint)?;
    Some(if widens { dtype.wide().size_bytes() / dtype.size_bytes() } else { 1 })
}

/// Whether the operation at this position uses the ring; `None` until rank 0 has decided.
pub(super) fn is_used(node: &Node, at: usize, active: &mut Active) -> Option<bool> {
    let (ordinal, sequence) = (active.ordinal, active.work.sequence);
    let local = node.local();
    let published = match active.algorithm {
        ReduceAlgorithm::Owner | ReduceAlgorithm::LastArriver => return Some(false),
        ReduceAlgorithm::Ring => return Some(true),
        ReduceAlgorithm::Undecided => node.shm.registered(0, ordinal, sequence),
    };
    let chosen = match published {
        Some(published) => published.input.is_none(),
        // Too many operations were in progress when it started.
        None if local == 0 && at < REGISTERED_MAX => {
            node.shm.register(0, ordinal, sequence, Registered::default());
            true
        }
        None => return None,
    };
    active.algorithm = if chosen { ReduceAlgorithm::Ring } else { ReduceAlgorithm::Owner };
    if chosen {
        active.registered = Registered::default();
    } else if local == 0 {
        node.wake_all(WAIT_TURN);
    }
    Some(chosen)
}

/// True if this many chunks are worth waking the next rank while this one continues.
pub(super) fn fills_segment(node: &Node, active: &Active, chunks: u64) -> bool {
    chunks >= (active.ring_slots(node) / PARTS).max(PART_MIN)
}

/// Notifies the waiting ranks after chunks of the ring were staged and fenced.
pub(super) fn notify_next(node: &Node) {
    let next = node.local() + 1;
    if next < node.locals() {
        return node.wake(next, WAIT_TURN);
    }
    for local in 0..node.locals() {
        node.wake(local, WAIT_RESULT | WAIT_END);
    }
}

/// True if the result of a chunk is available.
pub(super) fn is_reduced(node: &Node, active: &mut Active, number: u64) -> Result<bool, Fault> {
    let last = node.locals() - 1;
    if last == node.local() {
        return Ok(true);
    }
    if node.shm.staged(last) <= number {
        return Ok(false);
    }
    active.verify(node, last).map(|()| true)
}

/// The rank that delays the result of chunk `number`, with a description.
pub(super) fn waiting_for(node: &Node, slots: &Slots, number: u64) -> (String, Option<u32>) {
    let ranks = node.identity().locals();
    let late = |local: &usize| node.shm.staged(*local) <= number;
    let (what, local) = match (0..ranks.len()).find(late) {
        Some(0) if slots.is_wanted => {
            let full = |local: &usize| node.shm.released(*local);
            ("to take its results", (0..ranks.len()).min_by_key(full).unwrap_or(0))
        }
        Some(local) => ("to add its input", local),
        None => ("", node.local()),
    };
    (format!("waiting for rank {} {what}", ranks[local]), Some(ranks[local]))
}

/// True if partial sums are wider than the elements, so that each is rounded once, as an owner's
/// are. An owner's pass starts with the inputs and ends with the wide sums; additions and
/// multiplications have the same bits in either order. `None`: invalid operation.
fn widens(fingerprint: &Fingerprint) -> Option<bool> {
    let (dtype, op) = (DType::from_code(fingerprint.dtype)?, ReduceOp::from_code(fingerprint.op)?);
    Some(Determinism { stable: false, wide: true }.of(fingerprint.kind, dtype, op).wide)
}
