//! Small operations, which the last arriver reduces.
//!
//! ```text
//! every rank   waits for the slot, copies its contribution into its own, counts itself in
//! the last     adds all of them in the order of the ranks into the result slot   ─▶ every rank copies it
//! ```
//! An owner would have to run once to contribute and again once all have contributed: where ranks
//! share CPUs, that is one context switch after the other before any rank has a result. With a last
//! arriver each rank has to run once: a rank that runs after the last one finds the result and
//! continues with the next operation. The order of additions is that of an owner, and so are the
//! bits.
//!
//! Only for groups of one node, and only for sizes that are cheaper to copy than to look up:
//! registered memory is treated as private.

use hfreduce_kernels::{Pass, Store, Width};

use super::Driver;
use super::node::gather;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::geometry::CHUNK_BYTES_MIN;
use hfreduce_core::{Chunk, Fingerprint, Kind};
use hfreduce_core::{DType, ReduceOp};
use hfreduce_shm::segment::WAIT_RESULT;

/// Operations up to this size have one chunk.
const SMALL_BYTES: u64 = CHUNK_BYTES_MIN as u64;

impl Driver {
    /// True if the last arriver reduces the operation; equal on all ranks.
    pub(super) fn is_small(&self, fingerprint: &Fingerprint) -> bool {
        let combines = fingerprint.kind.reduces() || fingerprint.kind == Kind::Barrier;
        let alone = self.shared.identity.placement.nodes().len() == 1;
        combines && fingerprint.size_bytes() <= SMALL_BYTES && alone && self.shm.shape().locals > 1
    }

    /// Contributes to a chunk of a small operation, and reduces it if this rank is the last; false
    /// if the slot is in use, or after a failure.
    pub(super) fn arrive(&mut self, at: usize, number: u64, chunk: &Chunk) -> bool {
        if !self.slot_is_free(number) {
            self.wants_slot = true;
            return false;
        }
        let local = self.shared.identity.local();
        let input = &self.active[at].operation.input;
        let direct = input.contiguous(chunk.input_offset, chunk.bytes);
        // The input of the last arriver is read in place.
        let own = direct.filter(|_| self.shm.lacks_last_arrival(number)).unwrap_or_else(|| {
            let place = self.shm.input(local, number);
            // SAFETY: the slot is free and exclusive until this rank has arrived; it holds
            // `chunk.bytes`.
            unsafe { gather(input, chunk.input_offset, chunk.bytes, place) };
            place
        });
        if !self.shm.arrive(number, local) {
            return true;
        }
        for other in 0..self.shm.shape().locals {
            if !self.verify(at, other) {
                return false;
            }
        }
        if chunk.bytes > 0 && !self.reduce_arrivals(at, number, chunk, own) {
            return false;
        }
        self.shm.complete_reduction(number, local);
        self.pending_wakeups |= WAIT_RESULT;
        true
    }

    fn reduce_arrivals(&mut self, at: usize, number: u64, chunk: &Chunk, own: *const u8) -> bool {
        let fingerprint = self.active[at].operation.fingerprint;
        let (Some(dtype), Some(op)) =
            (DType::from_code(fingerprint.dtype), ReduceOp::from_code(fingerprint.op))
        else {
            return false; // Checked when the operation was made.
        };
        let identity = &self.shared.identity;
        let place = |local| match local == identity.local() {
            true => own,
            false => self.shm.input(local, number).cast_const(),
        };
        let inputs: Vec<*const u8> = (0..self.shm.shape().locals).map(place).collect();
        let world = identity.placement.world_size() as u64;
        let pass = Pass {
            dtype,
            op: op.kernel(),
            inputs: &inputs,
            wide: &[],
            output: self.shm.result(number),
            to: Width::Narrow,
            numel: chunk.bytes / dtype.size_bytes(),
            divisor: if op == ReduceOp::Average { world } else { 1 },
        };
        // SAFETY: all ranks have contributed and reuse their slots only after the counter is reset;
        // this rank's slot, or its caller's memory, stays as long. Until then the result slot is
        // exclusive.
        if let Err(error) = unsafe { pass.run(Store::Cached) } {
            let rank = self.shared.identity.rank;
            self.fail(AbortReason::new(ErrorKind::Invalid, rank, error.to_string()), None);
            return false;
        }
        true
    }

    /// True if the result of a chunk is available; false, after a failure, if the rank that
    /// computed it runs another operation.
    pub(super) fn is_reduced(&mut self, at: usize, number: u64) -> bool {
        let made_by = self.shm.reduced_by(number);
        made_by.is_some_and(|local| self.verify(at, local))
    }

    /// The rank that delays the next result, with a description.
    pub(super) fn waiting_for_last_arriver(&self) -> (String, Option<u32>) {
        let ranks = self.shared.identity.locals();
        let number = self.next_deliver;
        let late = |local: &usize| self.shm.staged(*local) <= number;
        let (what, local) = match (self.shm.reducer(number), (0..ranks.len()).find(late)) {
            (Some(local), _) => ("the result from", local),
            (None, Some(local)) => ("the input of", local),
            (None, None) => ("", self.shared.identity.local()),
        };
        (format!("waiting for {what} rank {}", ranks[local]), Some(ranks[local]))
    }
}
