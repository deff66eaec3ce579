//! A small operation: whoever contributes last adds up.
//!
//! ```text
//! every rank   waits for the slot, copies its contribution into its own, counts itself in
//! the last     adds all of them in the order of the ranks into the result slot   ─▶ everybody copies it
//! ```
//! An owner would have to run once to contribute and once more when all have: where ranks share
//! processors that is one change of process after the other before anybody has a result. This way
//! each rank has to run once: whoever runs after the last finds the sum, and goes on to the next
//! operation. The order of the additions is an owner's, and so are the bits.
//!
//! Only in a job of one node, and only for what is sooner copied than looked up: registered memory
//! counts as private.

use hfreduce_kernels::{Pass, Store, Width};

use super::Driver;
use super::node::gather;
use crate::core::geometry::CHUNK_BYTES_MIN;
use crate::core::{Chunk, Fingerprint, Kind};
use crate::error::{AbortReason, ErrorKind};
use crate::operation::{DType, ReduceOp};
use crate::shm::WAIT_RESULT;

/// Up to this an operation is one chunk.
const SMALL_BYTES: u64 = CHUNK_BYTES_MIN as u64;

impl Driver {
    /// True if whoever contributes last to an operation adds it up; every rank says the same.
    pub(super) fn is_small(&self, fingerprint: &Fingerprint) -> bool {
        let combines = fingerprint.kind.reduces() || fingerprint.kind == Kind::Barrier;
        let alone = self.shared.identity.placement.nodes().len() == 1;
        combines && fingerprint.size_bytes() <= SMALL_BYTES && alone && self.shm.shape().locals > 1
    }

    /// Contributes to a chunk of a small operation, and adds it up if nobody else has to come; false
    /// if its slot is taken, or if all has ended.
    pub(super) fn arrive(&mut self, at: usize, number: u64, chunk: &Chunk) -> bool {
        if !self.slot_is_free(number) {
            self.wants_slot = true;
            return false;
        }
        let local = self.shared.identity.local();
        let input = &self.active[at].operation.input;
        let direct = input.contiguous(chunk.input_offset, chunk.bytes);
        // Who comes last is read where he is.
        let own = direct.filter(|_| self.shm.lacks_last_arrival(number)).unwrap_or_else(|| {
            let place = self.shm.input(local, number);
            // SAFETY: the slot is free and ours until we have answered; it holds `chunk.bytes`.
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
        // SAFETY: everybody has contributed and nobody takes his slot back before we close the roll;
        // ours, or our caller's memory, stays as long. Until then the result's slot is ours alone.
        if let Err(error) = unsafe { pass.run(Store::Cached) } {
            let rank = self.shared.identity.rank;
            self.fail(AbortReason::new(ErrorKind::Invalid, rank, error.to_string()), None);
            return false;
        }
        true
    }

    /// True if the result of a chunk of a small operation is there; false, with everything at an end,
    /// if who made it runs something else.
    pub(super) fn is_reduced(&mut self, at: usize, number: u64) -> bool {
        let made_by = self.shm.reduced_by(number);
        made_by.is_some_and(|local| self.verify(at, local))
    }

    /// Who keeps the next result from coming, in words.
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
