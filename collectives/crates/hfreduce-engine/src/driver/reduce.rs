//! Reduction of one owned chunk, from the inputs of all ranks to every destination of its result.

use hfreduce_kernels::{Pass, Store, Width};

use super::Driver;
use super::node::STREAM_FROM_BYTES;
use hfreduce_core::error::{AbortReason, ErrorKind};
use hfreduce_core::tree::Partial;
use hfreduce_core::{Chunk, Ranks, Stage};
use hfreduce_core::{DType, ReduceOp};
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

impl Driver {
    /// Reduces the contributions of all ranks and writes the result to every destination that this
    /// rank writes.
    pub(super) fn reduce(&mut self, at: usize, chunk: &Chunk, number: u64, partials: &[Partial]) {
        if chunk.source != Ranks::All || chunk.bytes == 0 {
            return; // A single contribution was stored when it was staged.
        }
        let own = self.shared.identity.local();
        let fingerprint = self.active[at].operation.fingerprint;
        let (Some(dtype), Some(op)) =
            (DType::from_code(fingerprint.dtype), ReduceOp::from_code(fingerprint.op))
        else {
            return; // Checked when the operation was made.
        };
        let mut inputs: Vec<*const u8> = Vec::with_capacity(self.shm.shape().locals + 3);
        for local in 0..self.shm.shape().locals {
            let Some(input) = self.input_of(at, local, number, chunk) else {
                return self.cannot_find(local);
            };
            inputs.push(input);
        }
        let Some(tree_links) = &self.tree_links else { return };
        let mut wide = Vec::new();
        let sums = if chunk.is_wide() { &mut wide } else { &mut inputs };
        sums.extend(partials.iter().map(|partial| tree_links.partial(partial)));
        let root = chunk.root().map(|rank| self.shared.identity.placement.node_of(rank));
        let last = tree_links.core.flows().is_root(chunk.tree, chunk.rooted_at(root));
        let stage = if last { Stage::Down } else { Stage::Up };
        let scaled = op == ReduceOp::Average && last;
        let world = self.shared.identity.placement.world_size() as u64;
        let divisor = if scaled { world } else { 1 };
        let mut targets = Vec::new();
        if !self.is_alone() || self.shm.shape().locals == 1 {
            targets.push(Target { place: self.place_in(stage, number, at, chunk), last: false });
        } else {
            if self.takes_slot(at, chunk) {
                targets.push(Target { place: self.shm.result(number), last: false });
            }
            if let Err(local) = self.final_targets(at, chunk, true, &mut targets) {
                return self.cannot_find(local);
            }
        }
        let in_place = self.active[at].others.iter().any(|other| *other != Registered::default());
        if in_place && !self.shm.begin_peer_access(own) {
            return self.check_abort_record();
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
        let done = unsafe { self.scratch.run(&pass, &targets) };
        if in_place {
            self.shm.end_peer_access(own);
        }
        if let Err(error) = done {
            let rank = self.shared.identity.rank;
            self.fail(AbortReason::new(ErrorKind::Invalid, rank, error.to_string()), None);
        }
    }

    /// Address of a local rank's contribution; `None` if it registered invalid memory.
    fn input_of(&self, at: usize, local: usize, number: u64, chunk: &Chunk) -> Option<*const u8> {
        let own = self.shared.identity.local();
        let direct = self.active[at].operation.input.contiguous(chunk.input_offset, chunk.bytes);
        if let (true, Some(direct)) = (local == own, direct) {
            return Some(direct);
        }
        match self.other(at, local).input {
            Some(offset) if local != own => {
                let offset = offset.checked_add(chunk.input_offset as u64)?;
                self.arenas.at(local, offset, chunk.bytes).map(<*mut u8>::cast_const)
            }
            _ => Some(self.shm.input(local, number)),
        }
    }

    /// The memory of callers into which this rank writes the result: registered buffers, and its
    /// own if `own_too`. An error names a rank that registered invalid memory.
    fn final_targets(
        &self,
        at: usize,
        chunk: &Chunk,
        own_too: bool,
        targets: &mut Vec<Target>,
    ) -> Result<(), usize> {
        let own = self.shared.identity.local();
        for local in self.sinks(chunk) {
            let registered = self.other(at, local).output;
            let place = if local == own {
                let is_written = own_too || registered.is_some();
                let output = &self.active[at].operation.output;
                is_written.then(|| output.contiguous(chunk.output_offset, chunk.bytes)).flatten()
            } else if let Some(offset) = registered {
                let offset = offset.checked_add(chunk.output_offset as u64);
                let place = offset.and_then(|offset| self.arenas.at(local, offset, chunk.bytes));
                Some(place.ok_or(local)?)
            } else {
                None
            };
            targets.extend(place.map(|place| Target { place, last: true }));
        }
        Ok(())
    }

    /// Copies a result from its slot to the registered memory of this node's ranks; false after an
    /// abort.
    pub(super) fn spread(&mut self, at: usize, chunk: &Chunk, number: u64) -> bool {
        if chunk.source != Ranks::All || self.shm.shape().locals == 1 || chunk.bytes == 0 {
            return true;
        }
        let mut targets = Vec::new();
        if let Err(local) = self.final_targets(at, chunk, false, &mut targets) {
            self.cannot_find(local);
            return false;
        }
        if targets.is_empty() {
            return true;
        }
        let own = self.shared.identity.local();
        if !self.shm.begin_peer_access(own) {
            self.check_abort_record();
            return false;
        }
        let result = self.shm.result(number);
        for target in &targets {
            // SAFETY: the slot holds the result, the destination was registered for it; they do not
            // overlap.
            unsafe { target.fill(result, 0, chunk.bytes, chunk.bytes >= STREAM_FROM_BYTES) };
        }
        self.shm.end_peer_access(own);
        true
    }
}

impl Target {
    /// Copies `bytes` bytes to `offset` in the destination.
    ///
    /// # Safety
    /// Both must hold that many bytes and not overlap.
    unsafe fn fill(&self, from: *const u8, offset: usize, bytes: usize, streams: bool) {
        let store = if streams { Store::Streaming } else { Store::Cached };
        // SAFETY: the caller's promise.
        unsafe { hfreduce_kernels::copy_raw(store, from, self.place.add(offset), bytes) };
    }
}

impl Scratch {
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
            // SAFETY: the caller's promise.
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
            // SAFETY: this piece of all inputs is valid (the caller's promise); the scratch memory
            // is exclusive.
            unsafe { part.run(Store::Cached)? };
            for target in targets {
                // SAFETY: the destination holds this piece, and no input needs it any more.
                unsafe { target.fill(scratch, offset, piece, streams(target)) };
            }
            inputs.iter_mut().for_each(|input| *input = input.wrapping_add(piece));
            offset += piece;
        }
        Ok(())
    }
}
