//! This rank's part inside its node: contribute chunks, combine those it owns, deliver results.

use super::{Active, Driver, Submission};
use crate::board::{FOR_INPUT, FOR_RESULT, FOR_SLOT};
use crate::cause::{Cause, CauseKind};
use crate::core::{Action, Chunk, Geometry, Kind, Stage, Who};
use crate::operation::{Buffer, DType, ReduceOp};
use hfreduce_kernels::{Pass, Store, Width};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Chunks from here on belong to large operations: the caller does not read their first results
/// before the last ones have pushed them out of the caches, so the copy goes past those.
const STREAM_FROM_BYTES: usize = 128 << 10;

impl Driver {
    /// A call has come: give it its chunks and tell the node.
    pub(super) fn begin(&mut self, call: Submission) {
        let Submission { operation, work } = call;
        if let Some(error) = self.shared.error(Some(&work), "being called") {
            self.shared.did_not_end(&work);
            work.fail(error);
            return;
        }
        let local = self.shared.identity.local();
        let print = operation.print;
        if !matches!(print.kind, Kind::Send | Kind::Recv) {
            self.board.enter(local, work.sequence, &print);
            if let Some(trunk) = &mut self.trunk
                && let Err((link, why)) = trunk.core.start(work.sequence, print)
            {
                self.mesh.adopt(operation, work);
                self.violated_on(link, why);
                return;
            }
        }
        if !print.kind.uses_trees() {
            self.begin_mesh(operation, work);
            return;
        }
        let world = self.shared.identity.placement.world_size();
        let geometry = Geometry::new(&print, world, self.board.shape().slot_bytes);
        let first = self.next_chunk;
        self.next_chunk += u64::from(geometry.chunks());
        self.shared.recorder.cut(work.flight, geometry.chunks());
        self.active.push_back(Active { operation, work, geometry, first, verified: 0 });
        self.refuse_the_departed();
    }

    /// Contributes to chunks as far as slots are free.
    pub(super) fn stage(&mut self) -> bool {
        let mut moved = false;
        self.wants_slot = false;
        let identity_local = self.shared.identity.local();
        while self.next_stage < self.next_chunk {
            let number = self.next_stage;
            if !self.board.slot_is_free(number) {
                self.wants_slot = true;
                break;
            }
            let Some((at, chunk)) = self.find(number) else { break };
            let owner = self.shared.identity.owner_of(chunk.index);
            if chunk.source.includes(self.shared.identity.rank) {
                let input = &self.active[at].operation.input;
                if !input.has_arrived(chunk.input_offset + chunk.bytes) {
                    break; // Whoever brings it rings.
                }
                self.contribute(at, number, &chunk, owner == identity_local);
            }
            self.next_stage += 1;
            self.record_progress(at);
            self.board.stage(identity_local, self.next_stage);
            moved = true;
            if owner == identity_local {
                self.activate(at, &chunk);
            } else {
                self.wake(owner, FOR_INPUT);
            }
        }
        moved
    }

    fn contribute(&self, at: usize, number: u64, chunk: &Chunk, owned: bool) {
        let input = &self.active[at].operation.input;
        let place = match chunk.source {
            // A lone contribution is the result already.
            Who::Rank(_) => self.place(number, at, chunk),
            // The owner reads its own contribution where it is.
            Who::All if owned && input.contiguous(chunk.input_offset, chunk.bytes).is_some() => {
                return;
            }
            Who::All => self.board.input(self.shared.identity.local(), number),
        };
        // SAFETY: the slot is free and ours until it is staged (see the board's protocol), or the
        // place is the caller's own output; both hold `chunk.bytes`.
        unsafe { gather(input, chunk.input_offset, chunk.bytes, place) };
    }

    fn activate(&mut self, at: usize, chunk: &Chunk) {
        let sequence = self.active[at].work.sequence;
        let root = chunk.root().map(|rank| self.shared.identity.placement.node_of(rank));
        let Some(trunk) = &mut self.trunk else { return };
        trunk.unready.push_back(self.active[at].first + u64::from(chunk.index));
        if let Err((link, why)) = trunk.core.activate(sequence, *chunk, root) {
            self.violated_on(link, why);
            return;
        }
        self.act();
    }

    /// Combines the owned chunks whose local contributions are all there.
    pub(super) fn combine(&mut self) -> bool {
        let Some(trunk) = &self.trunk else { return false };
        if trunk.unready.is_empty() {
            return false;
        }
        let staged: Vec<u64> =
            (0..self.board.shape().locals).map(|local| self.board.staged(local)).collect();
        let mut moved = false;
        let mut next = 0;
        while let Some(number) = self.trunk.as_ref().and_then(|t| t.unready.get(next)).copied() {
            let Some((at, chunk)) = self.find(number) else { break };
            match self.contributions(at, number, &chunk, &staged) {
                Contributions::Missing => next += 1,
                Contributions::NotNeeded => self.ready(next, None),
                Contributions::There => {
                    self.ready(next, Some((self.active[at].work.sequence, chunk.index)));
                    moved = true;
                }
                Contributions::Broken => return true,
            }
        }
        moved
    }

    fn ready(&mut self, at: usize, key: Option<(u64, u32)>) {
        if let Some(trunk) = &mut self.trunk {
            trunk.unready.remove(at);
            if let Some(key) = key {
                trunk.core.local_ready(key);
            }
        }
        self.act();
    }

    fn contributions(
        &mut self,
        at: usize,
        number: u64,
        chunk: &Chunk,
        staged: &[u64],
    ) -> Contributions {
        let identity = &self.shared.identity;
        let contributors = match chunk.source {
            Who::All => 0..staged.len(),
            Who::Rank(rank) if identity.placement.node_of(rank) == identity.node() => {
                let local = identity.placement.local_of(rank);
                local..local + 1
            }
            Who::Rank(_) => return Contributions::NotNeeded,
        };
        if staged[contributors.clone()].iter().any(|chunks| *chunks <= number) {
            return Contributions::Missing;
        }
        for local in contributors {
            if !self.verify(at, local) {
                return Contributions::Broken;
            }
        }
        Contributions::There
    }

    /// Compares the operation of a local rank with ours; false if everything ends because of it.
    pub(super) fn verify(&mut self, at: usize, local: usize) -> bool {
        let active = &mut self.active[at];
        if active.verified & (1 << local) != 0 {
            return true;
        }
        let (sequence, ours) = (active.work.sequence, active.operation.print);
        match self.board.print(local, sequence) {
            Some(theirs) if theirs != ours => {
                self.local_mismatch(local, sequence, ours, theirs);
                false
            }
            found => {
                if found.is_some() {
                    active.verified |= 1 << local;
                }
                true
            }
        }
    }

    /// Does what the core wants, in its order.
    pub(super) fn act(&mut self) {
        while let Some(action) = self.trunk.as_mut().and_then(|trunk| trunk.core.poll()) {
            match action {
                Action::Reduce { key, partials } => {
                    let Some((at, chunk, number)) = self.find_key(key) else { continue };
                    self.reduce(at, &chunk, number, &partials);
                }
                Action::Move { key, from } => {
                    let Some((at, chunk, number)) = self.find_key(key) else { continue };
                    let place = self.place(number, at, &chunk);
                    if let Some(trunk) = &self.trunk {
                        let source = trunk.partial(&from);
                        // SAFETY: the slot holds this chunk and the place is ours (the core says
                        // so); they are different allocations of at least `chunk.bytes`.
                        unsafe { std::ptr::copy_nonoverlapping(source, place, chunk.bytes) };
                    }
                }
                Action::Send { link, key, tree, stage } => {
                    if let Some(trunk) = &mut self.trunk {
                        trunk.due(link, key, tree, stage);
                    }
                }
                Action::Publish { key } => {
                    if let Some((_, _, number)) = self.find_key(key)
                        && self.board.shape().locals > 1
                    {
                        self.board.publish(number);
                        self.wake_all(FOR_RESULT);
                    }
                }
                Action::Done { key } => {
                    if let Some((_, chunk, number)) = self.find_key(key)
                        && let Some(trunk) = &mut self.trunk
                    {
                        trunk.finished.insert(number);
                        // Where nothing was published, the others wait to reuse the slot.
                        if self.board.shape().locals > 1 && !chunk.spreads() {
                            self.board.publish(number);
                            self.wake_all(FOR_RESULT);
                        }
                    }
                }
                Action::Flood { .. } => {}
            }
        }
    }

    fn reduce(
        &mut self,
        at: usize,
        chunk: &Chunk,
        number: u64,
        partials: &[crate::core::tree::Partial],
    ) {
        if chunk.source != Who::All || chunk.bytes == 0 {
            return; // A lone contribution was put there when it was staged.
        }
        let Some(trunk) = &self.trunk else { return };
        let root = chunk.root().map(|rank| self.shared.identity.placement.node_of(rank));
        let last = trunk.core.flows().is_root(chunk.tree, chunk.hung_at(root));
        let stage = if last { Stage::Down } else { Stage::Up };
        let place = self.place_in(stage, number, at, chunk);
        let operation = &self.active[at].operation;
        let own = self.shared.identity.local();
        let direct = operation.input.contiguous(chunk.input_offset, chunk.bytes);
        let mut inputs: Vec<*const u8> = Vec::with_capacity(self.board.shape().locals + 3);
        for local in 0..self.board.shape().locals {
            inputs.push(match direct {
                Some(direct) if local == own => direct,
                _ => self.board.input(local, number),
            });
        }
        let mut wide = Vec::new();
        let sums = if chunk.is_wide() { &mut wide } else { &mut inputs };
        sums.extend(partials.iter().map(|partial| trunk.partial(partial)));
        let print = operation.print;
        let (Some(dtype), Some(op)) =
            (DType::from_code(print.dtype), ReduceOp::from_code(print.op))
        else {
            return; // Checked when the operation was made.
        };
        let numel = chunk.bytes / dtype.size_bytes();
        let scaled = op == ReduceOp::Average && last;
        let world = self.shared.identity.placement.world_size() as u64;
        let divisor = if scaled { world } else { 1 };
        let to = if chunk.is_wide() && !last { Width::Wide } else { Width::Narrow };
        let alone = inputs.len() == 1 && wide.is_empty() && !scaled;
        let (op, output) = (op.kernel(), place);
        let pass = Pass { dtype, op, inputs: &inputs, wide: &wide, output, to, numel, divisor };
        let result = if alone && to == Width::Narrow && inputs[0] == place.cast_const() {
            Ok(())
        } else {
            // SAFETY: every input was contributed and stays until its slot is released, every partial
            // sum sits in a slot of the pool, the place is ours; each holds what the chunk has there. The
            // place is input 0 itself, where elements are as long, or apart from all of them.
            unsafe { pass.run(Store::Cached) }
        };
        if let Err(error) = result {
            self.fail(
                Cause::new(CauseKind::Invalid, self.shared.identity.rank, error.to_string()),
                None,
            );
        }
    }

    /// Copies results to the caller and lets go of their slots, in order.
    pub(super) fn deliver(&mut self) -> bool {
        let mut moved = false;
        while self.next_deliver < self.next_stage {
            let number = self.next_deliver;
            let Some((at, chunk)) = self.find(number) else { break };
            let owner = self.shared.identity.owner_of(chunk.index);
            if owner == self.shared.identity.local() {
                let finished = self.trunk.as_mut().is_some_and(|t| t.finished.remove(&number));
                if !finished {
                    break;
                }
            } else if !self.board.is_published(number) {
                break;
            } else if !self.verify(at, owner) {
                return true;
            }
            self.hand_over(at, &chunk, number);
            if self.board.release(number) {
                self.wake_all(FOR_SLOT);
            }
            self.next_deliver += 1;
            self.record_progress(at);
            moved = true;
            self.shared.counters.chunks.fetch_add(1, Ordering::Relaxed);
            if self.next_deliver == self.active[at].end() {
                self.complete();
            }
        }
        moved
    }

    fn hand_over(&self, at: usize, chunk: &Chunk, number: u64) {
        let rank = self.shared.identity.rank;
        let operation = &self.active[at].operation;
        let own = chunk.source == Who::Rank(rank) && operation.print.kind == Kind::Broadcast;
        if !chunk.sink.includes(rank) || own {
            return;
        }
        let place = self.place(number, at, chunk);
        // SAFETY: the result is published and its slot not yet released by us; the caller's memory
        // is ours until the operation has ended.
        unsafe { scatter(place, &operation.output, chunk.output_offset, chunk.bytes) };
        operation.output.deliver(chunk.output_offset + chunk.bytes);
    }

    fn complete(&mut self) {
        if let Some(done) = self.active.pop_front() {
            self.shared.counters.operations.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            self.count_allreduce(&done, now);
            self.shared.recorder.finished(done.work.flight, false, now);
            done.work.complete();
            self.shared.room.call();
        }
    }

    /// Overlapping operations count their common time once.
    fn count_allreduce(&mut self, done: &Active, now: Instant) {
        let print = &done.operation.print;
        if print.kind != Kind::Allreduce {
            return;
        }
        let since = self.reduced_until.map_or(done.work.began(), |end| end.max(done.work.began()));
        let nanoseconds = now.saturating_duration_since(since).as_nanos();
        let counters = &self.shared.counters;
        let bytes = print.count.saturating_mul(u64::from(print.element_bytes));
        counters.reduced_bytes.fetch_add(bytes, Ordering::Relaxed);
        let nanoseconds = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        counters.reducing_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        self.reduced_until = Some(now);
    }

    /// Where the result of a chunk belongs: in the caller's memory where nobody else needs it.
    pub(super) fn place(&self, number: u64, at: usize, chunk: &Chunk) -> *mut u8 {
        if self.board.shape().locals == 1 && chunk.sink.includes(self.shared.identity.rank) {
            let output = &self.active[at].operation.output;
            if let Some(place) = output.contiguous(chunk.output_offset, chunk.bytes) {
                return place;
            }
        }
        self.board.result(number)
    }

    /// Where what travels in a stage is: a partial sum that is longer than the result has no room in
    /// the caller's memory.
    pub(super) fn place_in(&self, stage: Stage, number: u64, at: usize, chunk: &Chunk) -> *mut u8 {
        if stage == Stage::Up && chunk.is_wide() {
            return self.board.result(number);
        }
        self.place(number, at, chunk)
    }

    /// The operation and chunk with this number.
    pub(super) fn find(&self, number: u64) -> Option<(usize, Chunk)> {
        let at = self.active.iter().position(|active| number < active.end())?;
        let active = &self.active[at];
        let index = number.checked_sub(active.first)?;
        Some((at, active.geometry.chunk(index as u32)))
    }

    /// The same by operation and chunk.
    pub(super) fn find_key(&self, key: (u64, u32)) -> Option<(usize, Chunk, u64)> {
        let at = self.active.iter().position(|active| active.work.sequence == key.0)?;
        let active = &self.active[at];
        Some((at, active.geometry.chunk(key.1), active.first + u64::from(key.1)))
    }
}

enum Contributions {
    Missing,
    NotNeeded,
    There,
    Broken,
}

/// # Safety
/// `place` must be writable for `bytes`; the buffer's promise covers the rest.
unsafe fn gather(from: &Buffer, offset: usize, bytes: usize, place: *mut u8) {
    let mut at = place;
    for (memory, count) in from.ranges(offset, bytes) {
        if memory.addr().abs_diff(at.addr()) >= count {
            // SAFETY: `count` bytes lie in the range and still fit the place, and do not overlap.
            unsafe { hfreduce_kernels::copy_raw(Store::Cached, memory, at, count) };
        } else if memory != at {
            // SAFETY: the same; memmove, as an output may overlap the input it is made from.
            unsafe { std::ptr::copy(memory, at, count) };
        }
        at = at.wrapping_add(count);
    }
}

/// # Safety
/// `place` must be readable for `bytes`; the buffer's promise covers the rest.
unsafe fn scatter(place: *const u8, into: &Buffer, offset: usize, bytes: usize) {
    let mut at = place;
    for (memory, count) in into.ranges(offset, bytes) {
        if memory.cast_const() == at {
            // Made where it belongs.
        } else if bytes >= STREAM_FROM_BYTES {
            // SAFETY: `count` bytes lie in the range; a result that is not made in the caller's
            // memory lies in the board, which is apart from it.
            unsafe { hfreduce_kernels::copy_raw(Store::Streaming, at, memory, count) };
        } else {
            // SAFETY: as in `gather`.
            unsafe { std::ptr::copy(at, memory, count) };
        }
        at = at.wrapping_add(count);
    }
}
