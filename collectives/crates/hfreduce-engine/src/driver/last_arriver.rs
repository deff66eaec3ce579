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

use super::fault::Fault;
use super::node::Node;
use super::operations::Active;
use super::slots::Slots;
use hfreduce_core::geometry::CHUNK_BYTES_MIN;
use hfreduce_core::{Chunk, DType, Fingerprint, Kind, ReduceOp};

/// Operations up to this size have one chunk.
const SMALL_BYTES: u64 = CHUNK_BYTES_MIN as u64;

/// State of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The slot is in use.
    Blocked,
    /// Another rank arrives later.
    Counted,
    /// This rank was the last and has published the result.
    Last,
}

/// True if the last arriver reduces the operation; equal on all ranks.
pub(super) fn is_used(node: &Node, fingerprint: &Fingerprint) -> bool {
    let combines = fingerprint.kind.reduces() || fingerprint.kind == Kind::Barrier;
    combines && fingerprint.size_bytes() <= SMALL_BYTES && node.is_alone() && node.locals() > 1
}

/// Contributes to a chunk of a small operation, and reduces it if this rank is the last.
pub(super) fn arrive(
    node: &Node,
    active: &mut Active,
    (number, chunk): (u64, &Chunk),
    slots: &mut Slots,
) -> Result<Arrival, Fault> {
    if !slots.take(node, number) {
        return Ok(Arrival::Blocked);
    }
    let local = node.local();
    let input = &active.operation.input;
    let direct = input.contiguous(chunk.input_offset, chunk.bytes);
    // The input of the last arriver is read in place.
    let own = direct.filter(|_| node.shm.lacks_last_arrival(number)).unwrap_or_else(|| {
        let place = node.shm.input(local, number);
        // SAFETY: the slot is free and exclusive until this rank has arrived; it holds
        // `chunk.bytes`.
        unsafe { input.gather(chunk.input_offset, chunk.bytes, place) };
        place
    });
    if !node.shm.arrive(number, local) {
        return Ok(Arrival::Counted);
    }
    for other in 0..node.locals() {
        active.verify(node, other)?;
    }
    if chunk.bytes > 0 {
        reduce(node, active, (number, chunk), own)?;
    }
    node.shm.complete_reduction(number, local);
    Ok(Arrival::Last)
}

fn reduce(
    node: &Node,
    active: &Active,
    (number, chunk): (u64, &Chunk),
    own: *const u8,
) -> Result<(), Fault> {
    let fingerprint = active.operation.fingerprint;
    let (Some(dtype), Some(op)) =
        (DType::from_code(fingerprint.dtype), ReduceOp::from_code(fingerprint.op))
    else {
        return Err(node.unknown_codes());
    };
    let place = |local| match local == node.local() {
        true => own,
        false => node.shm.input(local, number).cast_const(),
    };
    let inputs: Vec<*const u8> = (0..node.locals()).map(place).collect();
    (0..node.locals()).for_each(|local| node.count_taken(local, chunk.bytes));
    let world = node.identity().placement.world_size() as u64;
    let pass = Pass {
        dtype,
        op: op.kernel(),
        inputs: &inputs,
        wide: &[],
        output: node.shm.result(number),
        to: Width::Narrow,
        numel: chunk.bytes / dtype.size_bytes(),
        divisor: if op == ReduceOp::Average { world } else { 1 },
    };
    // SAFETY: all ranks have contributed and reuse their slots only after the counter is reset;
    // this rank's slot, or its caller's memory, stays as long. Until then the result slot is
    // exclusive.
    unsafe { pass.run(Store::Cached) }.map_err(|error| node.kernel_fault(&error))
}

/// True if the result of a chunk is available.
pub(super) fn is_reduced(node: &Node, active: &mut Active, number: u64) -> Result<bool, Fault> {
    match node.shm.reduced_by(number) {
        Some(local) => active.verify(node, local).map(|()| true),
        None => Ok(false),
    }
}

/// The rank that delays the result of chunk `number`, with a description.
pub(super) fn waiting_for(node: &Node, number: u64) -> (String, Option<u32>) {
    let ranks = node.identity().locals();
    let late = |local: &usize| node.shm.staged(*local) <= number;
    let (what, local) = match (node.shm.reducer(number), (0..ranks.len()).find(late)) {
        (Some(local), _) => ("the result from", local),
        (None, Some(local)) => ("the input of", local),
        (None, None) => ("", node.local()),
    };
    (format!("waiting for {what} rank {}", ranks[local]), Some(ranks[local]))
}
