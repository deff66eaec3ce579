//! Reduction of one owned chunk, from the inputs of all ranks to every destination of its result.

use hfreduce_kernels::{Pass, Store, Width};

use super::fault::Fault;
use super::node::Node;
use super::operations::Active;
use super::registered::invalid_memory;
use crate::operation::STREAM_FROM_BYTES;
use hfreduce_core::{Chunk, DType, Ranks, ReduceOp, Stage};
use hfreduce_shm::segment::Registered;

/// Bytes that are reduced at a time before they are copied to several destinations: they stay in
/// the second-level cache, next to the same amount of every input.
const SCRATCH_BYTES: usize = 16 << 10;

/// Page-aligned memory for that: no cache line is loaded in two halves.
#[derive(Debug)]
pub(super) struct Scratch(Vec<Page>);

#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct Page {
    _memory: [u8; 4096],
}

impl Default for Scratch {
    fn default() -> Self {
        Self(vec![Page { _memory: [0; 4096] }; SCRATCH_BYTES / size_of::<Page>()])
    }
}

/// A destination of a result.
#[derive(Debug, Clone, Copy)]
struct Target {
    place: *mut u8,
    /// The engine does not read the result from it again.
    last: bool,
}

impl Scratch {
    /// Reduces the contributions of all ranks and writes the result to every destination that this
    /// rank writes. `partials`: the partial sums of neighbors; `last`: the result is complete.
    pub(super) fn reduce(
        &mut self,
        node: &Node,
        active: &Active,
        (number, chunk): (u64, &Chunk),
        partials: impl Iterator<Item = *const u8>,
        last: bool,
    ) -> Result<(), Fault> {
        if chunk.source != Ranks::All || chunk.bytes == 0 {
            return Ok(()); // A single contribution was stored when it was staged.
        }
        let own = node.local();
        let fingerprint = active.operation.fingerprint;
        let (Some(dtype), Some(op)) =
            (DType::from_code(fingerprint.dtype), ReduceOp::from_code(fingerprint.op))
        else {
            return Err(node.unknown_codes());
        };
        let mut inputs: Vec<*const u8> = Vec::with_capacity(node.locals() + 3);
        for local in 0..node.locals() {
            let input = input_of(node, active, local, (number, chunk));
            inputs.push(input.ok_or_else(|| invalid_memory(node, local))?);
            node.count_taken(local, chunk.bytes);
        }
        let mut wide = Vec::new();
        let sums = if chunk.is_wide() { &mut wide } else { &mut inputs };
        sums.extend(partials);
        let stage = if last { Stage::Down } else { Stage::Up };
        let scaled = op == ReduceOp::Average && last;
        let world = node.identity().placement.world_size() as u64;
        let divisor = if scaled { world } else { 1 };
        let mut targets = Vec::new();
        if !node.is_alone() || node.locals() == 1 {
            let place = active.place_in(stage, node, number, chunk);
            targets.push(Target { place, last: false });
        } else {
            if takes_slot(node, active, chunk) {
                targets.push(Target { place: node.shm.result(number), last: false });
            }
            final_targets(node, active, chunk, true, &mut targets)
                .map_err(|local| invalid_memory(node, local))?;
        }
        let in_place = active.others.iter().any(|other| *other != Registered::default());
        if in_place && !node.shm.start_peer_access(own) {
            return Err(Fault::Recorded);
        }
        let pass = Pass {
            dtype,
            op: op.kernel(),
            inputs: &inputs,
            wide: &wide,
            output: std::ptr::null_mut(),
            to: if chunk.is_wide() && !last { Width::Wide } else { Width::Narrow },
            numel: chunk.bytes / dtype.size_bytes(),
            divisor,
        };
        // SAFETY: every input was contributed and stays until its slot is released or its operation
        // ends, every partial sum is in a slot of the pool; each holds the bytes of the chunk. The
        // destinations are exclusive: a free slot, or memory that its rank has registered for this
        // result. They are inputs of this chunk, element by element, or do not overlap any input.
        let done = unsafe { self.run(&pass, &targets) };
        if in_place {
            node.shm.end_peer_access(own);
        }
        done.map_err(|error| node.kernel_fault(&error))
    }

    /// Runs a kernel with several destinations: in pieces, each read from memory once.
    ///
    /// # Safety
    /// As for [`Pass::run`] for each destination as its output, which may also start where any
    /// input does. With several destinations, or one of a caller's, the pass has no wide inputs or
    /// output.
    unsafe fn run(
        &mut self,
        pass: &Pass<'_>,
        targets: &[Target],
    ) -> Result<(), hfreduce_kernels::KernelError> {
        if let [target] = targets
            && !target.last
        {
            let alone = pass.inputs.len() == 1 && pass.wide.is_empty() && pass.divisor == 1;
            if alone && pass.to == Width::Narrow && pass.inputs[0] == target.place.cast_const() {
                return Ok(());
            }
            // SAFETY: guaranteed by the caller.
            return unsafe { Pass { output: target.place, ..*pass }.run(Store::Cached) };
        }
        let scratch: *mut u8 = self.0.as_mut_ptr().cast();
        let size = pass.dtype.size_bytes();
        let (bytes, mut inputs) = (pass.numel * size, pass.inputs.to_vec());
        // Inputs that were just read are in the caches, and writing them there is cheaper.
        let streams = |target: &Target| {
            let read = pass.inputs.contains(&target.place.cast_const());
            target.last && bytes >= STREAM_FROM_BYTES && !read
        };
        let mut offset = 0;
        while offset < bytes {
            let piece = (bytes - offset).min(SCRATCH_BYTES);
            let part = Pass { inputs: &inputs, output: scratch, numel: piece / size, ..*pass };
            // SAFETY: this piece of all inputs is valid (guaranteed by the caller); the scratch
            // memory is exclusive.
            unsafe { part.run(Store::Cached)? };
            for target in targets {
                // SAFETY: the destination holds this piece, and no input uses it anymore.
                unsafe { target.fill(scratch, offset, piece, streams(target)) };
            }
            inputs.iter_mut().for_each(|input| *input = input.wrapping_add(piece));
            offset += piece;
        }
        Ok(())
    }
}

/// In a group of one node: true if a rank copies this result from its slot.
pub(super) fn takes_slot(node: &Node, active: &Active, chunk: &Chunk) -> bool {
    let own = node.local();
    let output = &active.operation.output;
    sinks(node, chunk).any(|local| match local == own {
        true => output.contiguous(chunk.output_offset, chunk.bytes).is_none(),
        false => active.other(local).output.is_none(),
    })
}

/// The local ranks that receive this result.
fn sinks(node: &Node, chunk: &Chunk) -> impl Iterator<Item = usize> {
    let ranks = node.identity().locals().iter().enumerate();
    let sink = chunk.sink;
    ranks.filter(move |(_, rank)| sink.includes(**rank)).map(|(local, _)| local)
}

/// Address of a local rank's contribution; `None` if it registered invalid memory.
fn input_of(
    node: &Node,
    active: &Active,
    local: usize,
    (number, chunk): (u64, &Chunk),
) -> Option<*const u8> {
    let own = node.local();
    let direct = active.operation.input.contiguous(chunk.input_offset, chunk.bytes);
    if let (true, Some(direct)) = (local == own, direct) {
        return Some(direct);
    }
    match active.other(local).input {
        Some(offset) if local != own => {
            let offset = offset.checked_add(chunk.input_offset as u64)?;
            node.arenas.at(local, offset, chunk.bytes).map(<*mut u8>::cast_const)
        }
        _ => Some(node.shm.input(local, number)),
    }
}

/// The memory of callers into which this rank writes the result: registered buffers, and its own if
/// `own_too`. An error names a rank that registered invalid memory.
fn final_targets(
    node: &Node,
    active: &Active,
    chunk: &Chunk,
    own_too: bool,
    targets: &mut Vec<Target>,
) -> Result<(), usize> {
    let own = node.local();
    for local in sinks(node, chunk) {
        let registered = active.other(local).output;
        let place = if local == own {
            let is_written = own_too || registered.is_some();
            let output = &active.operation.output;
            is_written.then(|| output.contiguous(chunk.output_offset, chunk.bytes)).flatten()
        } else if let Some(offset) = registered {
            let offset = offset.checked_add(chunk.output_offset as u64);
            let place = offset.and_then(|offset| node.arenas.at(local, offset, chunk.bytes));
            Some(place.ok_or(local)?)
        } else {
            None
        };
        targets.extend(place.map(|place| Target { place, last: true }));
    }
    Ok(())
}

/// Copies a result from its slot to the registered memory of this node's ranks.
pub(super) fn spread(
    node: &Node,
    active: &Active,
    number: u64,
    chunk: &Chunk,
) -> Result<(), Fault> {
    if chunk.source != Ranks::All || node.locals() == 1 || chunk.bytes == 0 {
        return Ok(());
    }
    let mut targets = Vec::new();
    final_targets(node, active, chunk, false, &mut targets)
        .map_err(|local| invalid_memory(node, local))?;
    if targets.is_empty() {
        return Ok(());
    }
    let own = node.local();
    if !node.shm.start_peer_access(own) {
        return Err(Fault::Recorded);
    }
    let result = node.shm.result(number);
    for target in &targets {
        // SAFETY: the slot holds the result, the destination was registered for it; they do not
        // overlap.
        unsafe { target.fill(result, 0, chunk.bytes, chunk.bytes >= STREAM_FROM_BYTES) };
    }
    node.shm.end_peer_access(own);
    Ok(())
}

impl Target {
    /// Copies `bytes` bytes to `offset` in the destination.
    ///
    /// # Safety
    /// Both must hold that many bytes and not overlap.
    unsafe fn fill(&self, from: *const u8, offset: usize, bytes: usize, streams: bool) {
        let store = if streams { Store::Streaming } else { Store::Cached };
        // SAFETY: guaranteed by the caller.
        unsafe { hfreduce_kernels::copy_raw(store, from, self.place.add(offset), bytes) };
    }
}
