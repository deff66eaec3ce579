//! Ring accumulation: where ranks share CPUs, the ranks of a node add their inputs in turn to one
//! accumulator per chunk, instead of copying them to an owner that reduces them all.
//!
//! ```text
//! rank 0   waits for the slot, copies its contribution into it    ─▶ rank 1
//! rank r   waits for rank r - 1, adds its contribution            ─▶ rank r + 1
//! last     the same, divides for an average                       ─▶ every rank copies the result
//! ```
//! Ranks that share CPUs run one after another anyway. The data in use is then one slot per chunk
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

use super::node::gather;
use super::{Active, Driver, ReduceAlgorithm};
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::{Chunk, Determinism, Fingerprint};
use hfreduce_core::{DType, ReduceOp};
use hfreduce_shm::segment::{REGISTERED_MAX, Registered, WAIT_END, WAIT_RESULT, WAIT_TURN};

/// Below this size all inputs fit the caches together, and ranks need not wait for each other.
const RING_FROM_BYTES: u64 = 1 << 20;
/// Number of segments into which the slots are divided, so that several ranks work at the same
/// time.
const PARTS: u64 = 8;
/// Minimum number of chunks per segment: the next rank is not woken for a single chunk.
const PART_MIN: u64 = 2;

impl Driver {
    /// If an operation may use the ring, the size of its partial sums relative to its elements;
    /// equal on all ranks of the node.
    pub(super) fn ring_widening(&self, fingerprint: &Fingerprint) -> Option<usize> {
        let large = fingerprint.kind.reduces() && fingerprint.size_bytes() >= RING_FROM_BYTES;
        let dtype = DType::from_code(fingerprint.dtype)
            .filter(|_| large && self.shared.identity.ring_accumulation)?;
        let widens = widens(fingerprint)?;
        Some(if widens { dtype.wide().size_bytes() / dtype.size_bytes() } else { 1 })
    }

    /// Whether the operation of the next chunk uses the ring; `None` until rank 0 has decided.
    pub(super) fn uses_ring(&mut self, at: usize) -> Option<bool> {
        let Active { algorithm, ordinal, ref work, .. } = self.active[at];
        let sequence = work.sequence;
        let local = self.shared.identity.local();
        let published = match algorithm {
            ReduceAlgorithm::Owner | ReduceAlgorithm::LastArriver => return Some(false),
            ReduceAlgorithm::Ring => return Some(true),
            ReduceAlgorithm::Undecided => self.shm.registered(0, ordinal, sequence),
        };
        let chosen = match published {
            Some(published) => published.input.is_none(),
            // Too many operations were in progress when it started.
            None if local == 0 && at < REGISTERED_MAX => {
                self.shm.register(0, ordinal, sequence, Registered::default());
                true
            }
            None => return None,
        };
        self.active[at].algorithm =
            if chosen { ReduceAlgorithm::Ring } else { ReduceAlgorithm::Owner };
        if chosen {
            self.active[at].registered = Registered::default();
        } else if local == 0 {
            self.wake_all(WAIT_TURN);
        }
        Some(chosen)
    }

    /// Contributes to a chunk of the ring; false if it is not this rank's turn.
    pub(super) fn take_turn(&mut self, at: usize, number: u64, chunk: &Chunk) -> bool {
        match self.shared.identity.local().checked_sub(1) {
            None if !self.is_free(number, self.slots_in_use(at)) => {
                self.wants_slot = true;
                false
            }
            Some(before) if self.shm.staged(before) <= number => {
                self.wants_turn = true;
                false
            }
            Some(before) => self.verify(at, before) && self.add(at, number, chunk),
            None => self.add(at, number, chunk),
        }
    }

    /// Number of accumulators of an operation. A short operation uses the result slots: reusing the
    /// same few slots keeps them in the nearest caches.
    fn slots_in_use(&self, at: usize) -> u64 {
        let shape = self.shm.shape();
        let short = self.active[at].geometry.chunks() as usize <= shape.slots;
        (if short { shape.slots } else { shape.ring_slots }) as u64
    }

    /// Address of the accumulator of a chunk.
    pub(super) fn accumulator(&self, at: usize, number: u64) -> *mut u8 {
        match self.slots_in_use(at) > self.shm.shape().slots as u64 {
            true => self.shm.ring_slot(number),
            false => self.shm.result(number),
        }
    }

    /// Adds this rank's input to the accumulator, or initializes it.
    fn add(&mut self, at: usize, number: u64, chunk: &Chunk) -> bool {
        let identity = &self.shared.identity;
        let (local, last) = (identity.local(), identity.locals().len() - 1);
        let Active { ref operation, .. } = self.active[at];
        let fingerprint = &operation.fingerprint;
        let (Some(dtype), Some(op), Some(widens)) = (
            DType::from_code(fingerprint.dtype),
            ReduceOp::from_code(fingerprint.op),
            widens(fingerprint),
        ) else {
            return false; // Checked when the operation was made.
        };
        let sum = self.accumulator(at, number);
        let input = &operation.input;
        if local == 0 && !widens {
            // SAFETY: the slot is free and exclusive until this chunk is staged; it holds
            // `chunk.bytes`.
            unsafe { gather(input, chunk.input_offset, chunk.bytes, sum) };
            return true;
        }
        let own = input.contiguous(chunk.input_offset, chunk.bytes).unwrap_or_else(|| {
            // Not in a slot: a rank that waits for its turn waits for nothing else.
            self.pieces.resize(self.shm.shape().slot_bytes, 0);
            let place = self.pieces.as_mut_ptr();
            // SAFETY: exclusive, and as long as a slot, which holds the chunk.
            unsafe { gather(input, chunk.input_offset, chunk.bytes, place) };
            place
        });
        let (sum_so_far, both, own_alone) =
            ([sum.cast_const()], [sum.cast_const(), own.cast_const()], [own.cast_const()]);
        let (inputs, wide): (&[_], &[_]) = match (local, widens) {
            (0, _) => (&own_alone, &[]),
            (_, true) => (&own_alone, &sum_so_far),
            (_, false) => (&both, &[]),
        };
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
        // exclusive until this chunk is staged, and holds the partial sum (see `begin`). The input
        // is the caller's memory, or a local buffer. The output is the first of `inputs` or of
        // `wide`, or overlaps neither.
        if let Err(error) = unsafe { pass.run(Store::Cached) } {
            let rank = self.shared.identity.rank;
            self.fail(AbortReason::new(ErrorKind::Invalid, rank, error.to_string()), None);
            return false;
        }
        true
    }

    /// True if this many chunks are worth waking the next rank while this one continues.
    pub(super) fn fills_segment(&self, at: usize, chunks: u64) -> bool {
        chunks >= (self.slots_in_use(at) / PARTS).max(PART_MIN)
    }

    /// Notifies the waiting ranks after chunks of the ring were staged and fenced.
    pub(super) fn notify_next(&self) {
        let next = self.shared.identity.local() + 1;
        if next < self.shm.shape().locals {
            return self.wake(next, WAIT_TURN);
        }
        for local in 0..self.shm.shape().locals {
            self.wake(local, WAIT_RESULT | WAIT_END);
        }
    }

    /// True if the result of a chunk is available; false, after a failure, if the last rank runs
    /// another operation.
    pub(super) fn is_ring_reduced(&mut self, at: usize, number: u64) -> bool {
        let last = self.shm.shape().locals - 1;
        last == self.shared.identity.local()
            || self.shm.staged(last) > number && self.verify(at, last)
    }

    /// True if this rank's turn comes whether it takes results or not, and no rank waits for those:
    /// they belong to the operation that it still has to contribute to.
    pub(super) fn turn_is_certain(&self) -> bool {
        let oldest = self.active.front().is_some_and(|active| self.next_stage < active.end());
        self.wants_turn && oldest && self.shm.staged(0) > self.next_stage
    }

    /// The rank that delays the next result, with a description.
    pub(super) fn waiting_for_ring(&self) -> (String, Option<u32>) {
        let ranks = self.shared.identity.locals();
        let late = |local: &usize| self.shm.staged(*local) <= self.next_deliver;
        let (what, local) = match (0..ranks.len()).find(late) {
            Some(0) if self.wants_slot => {
                let full = |local: &usize| self.shm.released(*local);
                ("to take its results", (0..ranks.len()).min_by_key(full).unwrap_or(0))
            }
            Some(local) => ("to add its input", local),
            None => ("", self.shared.identity.local()),
        };
        (format!("waiting for rank {} {what}", ranks[local]), Some(ranks[local]))
    }
}

/// True if partial sums are wider than the elements, so that each is rounded once, as an owner's
/// are. An owner's pass starts with the inputs and ends with the wide sums; additions and
/// multiplications have the same bits in either order. `None`: invalid operation.
fn widens(fingerprint: &Fingerprint) -> Option<bool> {
    let (dtype, op) = (DType::from_code(fingerprint.dtype)?, ReduceOp::from_code(fingerprint.op)?);
    Some(Determinism { stable: false, wide: true }.of(fingerprint.kind, dtype, op).wide)
}
