//! This rank's part inside its node: contributes chunks and delivers results.

use super::registered::registered_buffers;
use super::{Active, Driver, Identity, ReduceAlgorithm, Submission};
use crate::operation::Buffer;
use hfreduce_core::{Chunk, Geometry, Kind, Ranks, Stage};
use hfreduce_kernels::Store;
use hfreduce_shm::segment::{REGISTERED_MAX, Registered, WAIT_INPUT, WAIT_SLOT};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Chunks from this size belong to large operations: the caller does not read their first results
/// before the last ones have evicted them from the caches, so the copy bypasses those.
pub(super) const STREAM_FROM_BYTES: usize = 128 << 10;

impl Driver {
    /// Starts an operation: assigns its chunks and publishes it to the node.
    pub(super) fn begin(&mut self, call: Submission) {
        let Submission { operation, work } = call;
        if let Some(error) = self.shared.error(Some(&work), "being called") {
            self.shared.record_unended(&work);
            work.fail(error);
            return;
        }
        let local = self.shared.identity.local();
        let fingerprint = operation.fingerprint;
        if !matches!(fingerprint.kind, Kind::Send | Kind::Recv) {
            self.shm.enter(local, work.sequence, &fingerprint);
            if let Some(tree_links) = &mut self.tree_links
                && let Err((link, why)) = tree_links.core.start(work.sequence, fingerprint)
            {
                self.p2p.adopt(operation, work);
                self.violated_on(link, why);
                return;
            }
        }
        if !fingerprint.kind.uses_trees() {
            self.start_p2p(operation, work);
            return;
        }
        let world = self.shared.identity.placement.world_size();
        let ring = self.ring_widening(&fingerprint);
        // A slot also holds a partial sum of the ring.
        let widening = ring.filter(|_| !fingerprint.modes.wide).unwrap_or(1);
        let geometry = Geometry::new(&fingerprint, world, self.shm.shape().slot_bytes / widening);
        let first = self.next_chunk;
        self.next_chunk += u64::from(geometry.chunks());
        self.shared.recorder.cut(work.flight, geometry.chunks());
        let ordinal = self.next_ordinal;
        self.next_ordinal += 1;
        let mut registered = Registered::default();
        let small = self.is_small(&fingerprint);
        if !small && self.active.len() < REGISTERED_MAX {
            registered = registered_buffers(&self.arenas, &operation, self.shared.identity.rank);
            self.shm.register(local, ordinal, work.sequence, registered);
        }
        let others = Vec::new();
        let (first, verified) = (first, 0);
        let algorithm = match (small, ring) {
            (true, _) => ReduceAlgorithm::LastArriver,
            (false, Some(_)) => ReduceAlgorithm::Undecided,
            (false, None) => ReduceAlgorithm::Owner,
        };
        self.active.push_back(Active {
            operation,
            work,
            geometry,
            first,
            verified,
            ordinal,
            registered,
            others,
            algorithm,
            _under_way: self
                .shared
                .identity
                .share
                .priority_levels
                .begin(self.shared.identity.priority),
        });
        self.fail_if_peer_closed();
    }

    /// Contributes to chunks, as far as slots are free where they are needed.
    pub(super) fn stage(&mut self) -> bool {
        let from = self.next_stage;
        let local = self.shared.identity.local();
        let (mut notified, mut concerns_others) = (from, false);
        (self.wants_slot, self.wants_turn) = (false, false);
        while self.next_stage < self.next_chunk {
            let number = self.next_stage;
            let Some((at, chunk)) = self.find(number) else { break };
            let owned = self.shared.identity.owner_of(chunk.index) == local;
            let brings = chunk.source.includes(self.shared.identity.rank);
            if brings && !self.active[at].operation.input.has_arrived(chunk.input_end()) {
                break; // Its producer notifies this rank.
            }
            let Some(round) = self.uses_ring(at) else {
                self.wants_turn = true;
                break; // Rank 0 notifies this rank.
            };
            if round && !self.take_turn(at, number, &chunk) {
                break;
            }
            let small = self.active[at].algorithm == ReduceAlgorithm::LastArriver;
            concerns_others |= !small;
            if small && !self.arrive(at, number, &chunk) {
                break;
            }
            let copies = !round && !small && brings && self.is_copied(at, &chunk, owned);
            if copies {
                if !self.slot_is_free(number) {
                    self.wants_slot = true;
                    break;
                }
                self.contribute(at, number, &chunk);
            }
            self.next_stage += 1;
            self.record_progress(at);
            if copies {
                self.shm.stage(local, self.next_stage);
            }
            let calls = match round {
                true => self.fills_segment(at, self.next_stage - notified),
                false => copies && !self.is_crowded(),
            };
            if calls {
                self.shm.stage(local, self.next_stage);
                self.notify_owners(notified);
                notified = self.next_stage;
            }
        }
        if self.next_stage == from {
            return false;
        }
        self.shm.stage(local, self.next_stage);
        if concerns_others {
            self.notify_owners(notified);
        }
        self.let_go();
        true
    }

    /// The first staged chunk from `number` whose slot this rank uses.
    fn past_unused_slots(&self, number: u64) -> u64 {
        let Identity { rank, .. } = self.shared.identity;
        let local = self.shared.identity.local();
        let unused = |number: &u64| {
            self.find(*number).is_some_and(|(at, chunk)| {
                let owned = self.shared.identity.owner_of(chunk.index) == local;
                let copies = chunk.source.includes(rank) && self.is_copied(at, &chunk, owned);
                let out = self.active[at].registered.output;
                let shared = self.active[at].algorithm != ReduceAlgorithm::Owner;
                !(shared || owned || copies || (chunk.sink.includes(rank) && out.is_none()))
            })
        };
        (number..self.next_stage).find(|number| !unused(number)).unwrap_or(self.next_stage)
    }

    /// Wakes the owners of chunks from `from` to which all ranks have contributed.
    fn notify_owners(&self, from: u64) {
        let channels = self.shared.identity.channels.min(self.shm.shape().locals);
        if from == self.next_stage || self.shm.shape().locals == 1 {
            return;
        }
        self.shm.full_fence();
        let ready = self.shm.staged_by_all();
        let mut notified = 0_usize;
        let mut round = false;
        for number in from..self.next_stage {
            let Some((at, chunk)) = self.find(number) else { break };
            match self.active[at].algorithm {
                ReduceAlgorithm::Ring => {
                    round = true;
                    continue;
                }
                ReduceAlgorithm::LastArriver => continue, // It notifies the others itself.
                ReduceAlgorithm::Owner | ReduceAlgorithm::Undecided => {}
            }
            // A single contribution waits for no other.
            if number < ready || chunk.source == Ranks::One(self.shared.identity.rank) {
                let owner = self.shared.identity.owner_of(chunk.index);
                if notified & (1 << owner) == 0 {
                    notified |= 1 << owner;
                    self.wake(owner, WAIT_INPUT);
                }
            }
            if notified.count_ones() as usize == channels {
                break;
            }
        }
        if round {
            self.notify_next();
        }
    }

    pub(super) fn slot_is_free(&mut self, number: u64) -> bool {
        self.is_free(number, self.shm.shape().slots as u64)
    }

    /// True if the slots of the chunk `slots` before this one are free.
    pub(super) fn is_free(&mut self, number: u64, slots: u64) -> bool {
        if number >= self.free_below + slots {
            self.free_below = self.shm.released_by_all();
        }
        number < self.free_below + slots
    }

    /// True if this rank's contribution uses a slot.
    fn is_copied(&self, at: usize, chunk: &Chunk, owned: bool) -> bool {
        let active = &self.active[at];
        let input = &active.operation.input;
        match chunk.source {
            Ranks::One(_) => true,
            // The owner reads its own input in place.
            Ranks::All if owned => input.contiguous(chunk.input_offset, chunk.bytes).is_none(),
            Ranks::All => active.registered.input.is_none(),
        }
    }

    fn contribute(&self, at: usize, number: u64, chunk: &Chunk) {
        let input = &self.active[at].operation.input;
        let place = match chunk.source {
            // A single contribution is the result.
            Ranks::One(_) => self.place(number, at, chunk),
            Ranks::All => self.shm.input(self.shared.identity.local(), number),
        };
        // SAFETY: the slot is free and exclusive until it is staged (see the segment's protocol),
        // or the destination is the caller's output; both hold `chunk.bytes`.
        unsafe { gather(input, chunk.input_offset, chunk.bytes, place) };
    }

    /// Copies results to the caller and releases their slots, in order.
    pub(super) fn deliver(&mut self) -> bool {
        let from = self.next_deliver;
        while self.next_deliver < self.next_stage {
            let number = self.next_deliver;
            let Some((at, chunk)) = self.find(number) else { break };
            let owner = self.shared.identity.owner_of(chunk.index);
            let algorithm = self.active[at].algorithm;
            if algorithm == ReduceAlgorithm::Ring {
                if !self.is_ring_reduced(at, number) {
                    break;
                }
            } else if algorithm == ReduceAlgorithm::LastArriver {
                if !self.is_reduced(at, number) {
                    break;
                }
            } else if owner == self.shared.identity.local() {
                let finished = self.tree_links.as_mut().is_some_and(|t| t.finished.remove(&number));
                if !finished {
                    break;
                }
            } else if self.shm.published(owner) <= number {
                break;
            } else if !self.verify(at, owner) {
                return true;
            }
            self.hand_over(at, &chunk, number);
            self.next_deliver += 1;
            self.record_progress(at);
            self.shared.counters.chunks.fetch_add(1, Ordering::Relaxed);
            let ends = self.next_deliver == self.active[at].end();
            if ends || !self.is_crowded() {
                self.let_go();
            }
            if ends {
                self.complete();
            }
        }
        self.let_go();
        self.next_deliver != from
    }

    /// Publishes the released slots; wakes the ranks that wait for slots if all ranks have released
    /// some.
    fn let_go(&mut self) {
        let through = self.past_unused_slots(self.released.max(self.next_deliver));
        if self.released == through {
            return;
        }
        let before = std::mem::replace(&mut self.released, through);
        self.shm.release(self.shared.identity.local(), self.released);
        if self.shm.shape().locals == 1 {
            return;
        }
        self.shm.full_fence();
        // The other ranks' counters change with every operation: they are read only if a rank
        // sleeps.
        let locals = 0..self.shm.shape().locals;
        let asleep = |local| self.shm.sleeps_for(local, WAIT_SLOT);
        if locals.clone().any(asleep) && self.shm.released_by_all() > before {
            for local in locals {
                self.wake(local, WAIT_SLOT);
            }
        }
    }

    fn hand_over(&self, at: usize, chunk: &Chunk, number: u64) {
        let rank = self.shared.identity.rank;
        let operation = &self.active[at].operation;
        let own = chunk.source == Ranks::One(rank) && operation.fingerprint.kind == Kind::Broadcast;
        if !chunk.sink.includes(rank) || own {
            return;
        }
        if !self.is_in_its_place(at, chunk) {
            let place = self.place(number, at, chunk);
            // SAFETY: the result is published and its slot not yet released; the caller's memory is
            // exclusive until the operation ends.
            unsafe { scatter(place, &operation.output, chunk.output_offset, chunk.bytes) };
        }
        operation.output.deliver(chunk.output_offset + chunk.bytes);
    }

    fn complete(&mut self) {
        if let Some(done) = self.active.pop_front() {
            let counters = &self.shared.counters;
            counters.operations.fetch_add(1, Ordering::Relaxed);
            if done.is_made_in_place(self.shared.identity.rank) {
                let bytes = done.operation.input.bytes() as u64;
                counters.in_place_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            if done.algorithm == ReduceAlgorithm::Ring {
                let bytes = done.operation.input.bytes() as u64;
                counters.ring_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            let now = Instant::now();
            counters.count_allreduce(&done.work, &mut self.reduced_until, now);
            self.shared.recorder.finished(done.work.flight, false, now);
            self.publish_ended();
            done.work.complete();
            self.shared.waiters.wake_all();
        }
    }

    /// Destination of the result of a chunk: the caller's memory if no other rank needs it.
    pub(super) fn place(&self, number: u64, at: usize, chunk: &Chunk) -> *mut u8 {
        if self.active[at].algorithm == ReduceAlgorithm::Ring {
            return self.accumulator(at, number);
        }
        if self.shm.shape().locals == 1 && chunk.sink.includes(self.shared.identity.rank) {
            let output = &self.active[at].operation.output;
            if let Some(place) = output.contiguous(chunk.output_offset, chunk.bytes) {
                return place;
            }
        }
        self.shm.result(number)
    }

    /// Address of the payload of a stage: a partial sum that is longer than the result does not fit
    /// the caller's memory.
    pub(super) fn place_in(&self, stage: Stage, number: u64, at: usize, chunk: &Chunk) -> *mut u8 {
        if stage == Stage::Up && chunk.is_wide() {
            return self.shm.result(number);
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

    /// The same, by operation and chunk.
    pub(super) fn find_key(&self, key: (u64, u32)) -> Option<(usize, Chunk, u64)> {
        let at = self.active.iter().position(|active| active.work.sequence == key.0)?;
        let active = &self.active[at];
        Some((at, active.geometry.chunk(key.1), active.first + u64::from(key.1)))
    }
}

/// # Safety
/// `place` must be writable for `bytes`; the buffer's promise covers the rest.
pub(super) unsafe fn gather(from: &Buffer, offset: usize, bytes: usize, place: *mut u8) {
    let mut at = place;
    for (memory, count) in from.ranges(offset, bytes) {
        if memory.addr().abs_diff(at.addr()) >= count {
            // SAFETY: `count` bytes are in the range and still fit the destination, and do not
            // overlap.
            unsafe { hfreduce_kernels::copy_raw(Store::Cached, memory, at, count) };
        } else if memory != at {
            // SAFETY: the same; memmove, as an output may overlap its input.
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
            // Written in place.
        } else if bytes >= STREAM_FROM_BYTES {
            // SAFETY: `count` bytes are in the range; a result that is not written in the caller's
            // memory is in the segment, which does not overlap it.
            unsafe { hfreduce_kernels::copy_raw(Store::Streaming, at, memory, count) };
        } else {
            // SAFETY: as in `gather`.
            unsafe { std::ptr::copy(at, memory, count) };
        }
        at = at.wrapping_add(count);
    }
}
