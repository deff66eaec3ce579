//! This rank's part inside its node: starts operations, contributes chunks and delivers results.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::fault::Fault;
use super::last_arriver::{self, Arrival};
use super::node::Node;
use super::operations::{Active, Operations, ReduceAlgorithm};
use super::registered::registered_buffers;
use super::ring::{self, Ring};
use super::slots::Slots;
use crate::operation::Operation;
use crate::work::WorkState;
use hfreduce_core::{Chunk, Geometry, Kind, Ranks};
use hfreduce_shm::segment::{REGISTERED_MAX, Registered, WAIT_INPUT, WAIT_RESULT};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// Number of chunks to which this rank has contributed.
    pub staged: u64,
    /// Number of chunks whose results this rank has taken.
    pub delivered: u64,
    pub slots: Slots,
    pub ring: Ring,
}

/// Starts an operation along the trees: assigns its chunks and publishes its registered memory.
pub(super) fn start(
    node: &Node,
    operations: &mut Operations,
    operation: Operation,
    work: Arc<WorkState>,
) {
    let identity = node.identity();
    let fingerprint = operation.fingerprint;
    let ring = ring::widening(node, &fingerprint);
    // A slot also holds a partial sum of the ring.
    let widening = ring.filter(|_| !fingerprint.modes.wide).unwrap_or(1);
    let world = identity.placement.world_size();
    let geometry = Geometry::new(&fingerprint, world, node.shm.shape().slot_bytes / widening);
    let (first, ordinal) = (operations.chunks, operations.next_ordinal);
    operations.chunks += u64::from(geometry.chunks());
    operations.next_ordinal += 1;
    node.shared.recorder.cut(work.flight, geometry.chunks());
    let mut registered = Registered::default();
    let small = last_arriver::is_used(node, &fingerprint);
    if !small && operations.active.len() < REGISTERED_MAX {
        registered = registered_buffers(&node.arenas, &operation, identity.rank);
        node.shm.register(node.local(), ordinal, work.sequence, registered);
    }
    let algorithm = match (small, ring) {
        (true, _) => ReduceAlgorithm::LastArriver,
        (false, Some(_)) => ReduceAlgorithm::Undecided,
        (false, None) => ReduceAlgorithm::Owner,
    };
    operations.active.push_back(Active {
        operation,
        work,
        geometry,
        first,
        verified: 0,
        ordinal,
        registered,
        others: Vec::new(),
        algorithm,
        under_way: identity.share.priority_levels.start(identity.priority),
    });
}

impl Local {
    /// Contributes to chunks, as far as slots are free where they are needed; true if to any.
    pub fn stage(&mut self, node: &Node, operations: &mut Operations) -> Result<bool, Fault> {
        let from = self.staged;
        let local = node.local();
        let (mut notified, mut concerns_others) = (from, false);
        (self.slots.is_wanted, self.ring.wants_turn) = (false, false);
        while self.staged < operations.chunks {
            let number = self.staged;
            let Some((at, chunk)) = operations.find(number) else { break };
            let active = &mut operations.active[at];
            let brings = chunk.source.includes(node.rank());
            if brings && !active.operation.input.has_arrived(chunk.input_end()) {
                break; // Its producer notifies this rank.
            }
            let Some(round) = ring::is_used(node, at, active) else {
                self.ring.wants_turn = true;
                break; // Rank 0 notifies this rank.
            };
            if round && !self.ring.take_turn(node, active, (number, &chunk), &mut self.slots)? {
                break;
            }
            let small = active.algorithm == ReduceAlgorithm::LastArriver;
            concerns_others |= !small;
            if small {
                match last_arriver::arrive(node, active, (number, &chunk), &mut self.slots)? {
                    Arrival::Blocked => break,
                    Arrival::Counted => {}
                    Arrival::Last => operations.pending_wakeups |= WAIT_RESULT,
                }
            }
            let active = &operations.active[at];
            let copies = !round && !small && brings && is_copied(node, active, &chunk);
            if copies {
                if !self.slots.take(node, number) {
                    break;
                }
                contribute(node, active, number, &chunk);
            }
            self.staged += 1;
            self.record_progress(node, active);
            if copies {
                node.shm.stage(local, self.staged);
            }
            let calls = match round {
                true => ring::fills_segment(node, active, self.staged - notified),
                false => copies && !node.is_crowded,
            };
            if calls {
                node.shm.stage(local, self.staged);
                self.notify_owners(node, operations, notified);
                notified = self.staged;
            }
        }
        if self.staged == from {
            return Ok(false);
        }
        node.shm.stage(local, self.staged);
        if concerns_others {
            self.notify_owners(node, operations, notified);
        }
        self.release_slots(node, operations);
        Ok(true)
    }

    /// Wakes the owners of chunks from `from` to which all ranks have contributed.
    fn notify_owners(&self, node: &Node, operations: &Operations, from: u64) {
        let identity = node.identity();
        let channels = identity.channels.min(node.locals());
        if from == self.staged || node.locals() == 1 {
            return;
        }
        node.shm.full_fence();
        let ready = node.shm.staged_by_all();
        let mut notified = 0_usize;
        let mut round = false;
        for number in from..self.staged {
            let Some((at, chunk)) = operations.find(number) else { break };
            match operations.active[at].algorithm {
                ReduceAlgorithm::Ring => {
                    round = true;
                    continue;
                }
                ReduceAlgorithm::LastArriver => continue, // It notifies the others itself.
                ReduceAlgorithm::Owner | ReduceAlgorithm::Undecided => {}
            }
            // A single contribution waits for no other.
            if number < ready || chunk.source == Ranks::One(identity.rank) {
                let owner = identity.owner_of(chunk.index);
                if notified & (1 << owner) == 0 {
                    notified |= 1 << owner;
                    node.wake(owner, WAIT_INPUT);
                }
            }
            if notified.count_ones() as usize == channels {
                break;
            }
        }
        if round {
            ring::notify_next(node);
        }
    }

    /// Copies results to the caller and releases their slots, in order; true if the oldest
    /// operation has ended. `finished` takes the result of a chunk that this rank owns, if it is
    /// complete.
    pub fn deliver(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        mut finished: impl FnMut(u64) -> bool,
    ) -> Result<bool, Fault> {
        while self.delivered < self.staged {
            let number = self.delivered;
            let Some((at, chunk)) = operations.find(number) else { break };
            let active = &mut operations.active[at];
            let owner = node.identity().owner_of(chunk.index);
            let available = match active.algorithm {
                ReduceAlgorithm::Ring => ring::is_reduced(node, active, number)?,
                ReduceAlgorithm::LastArriver => last_arriver::is_reduced(node, active, number)?,
                _ if owner == node.local() => finished(number),
                _ if node.shm.published(owner) <= number => false,
                _ => active.verify(node, owner).map(|()| true)?,
            };
            if !available {
                break;
            }
            hand_over(node, active, &chunk, number);
            self.delivered += 1;
            active.under_way.progress();
            self.record_progress(node, active);
            node.shared.counters.chunks.fetch_add(1, Ordering::Relaxed);
            let ends = self.delivered == active.end();
            if ends || !node.is_crowded {
                self.release_slots(node, operations);
            }
            if ends {
                return Ok(true);
            }
        }
        self.release_slots(node, operations);
        Ok(false)
    }

    /// Releases the slots of delivered chunks, and of those after them that this rank does not use.
    fn release_slots(&mut self, node: &Node, operations: &Operations) {
        let from = self.slots.released.max(self.delivered);
        let unused = |number: &u64| {
            operations.find(*number).is_some_and(|(at, chunk)| {
                let active = &operations.active[at];
                let owned = node.identity().owner_of(chunk.index) == node.local();
                let rank = node.rank();
                let copies = chunk.source.includes(rank) && is_copied(node, active, &chunk);
                let out = active.registered.output;
                let shared = active.algorithm != ReduceAlgorithm::Owner;
                !(shared || owned || copies || (chunk.sink.includes(rank) && out.is_none()))
            })
        };
        let through = (from..self.staged).find(|number| !unused(number)).unwrap_or(self.staged);
        self.slots.release(node, through);
    }

    /// Records the progress of an operation along the trees: one store per chunk.
    fn record_progress(&self, node: &Node, active: &Active) {
        let through = |next: u64| next.clamp(active.first, active.end()) - active.first;
        let (contributed, delivered) = (through(self.staged), through(self.delivered));
        node.shared.recorder.progress(active.work.flight, contributed as u32, delivered as u32);
    }

    /// True if the oldest operation waits for this rank's own input.
    pub fn lacks_input(&self, node: &Node, operations: &Operations) -> bool {
        operations.find(self.staged).is_some_and(|(at, chunk)| {
            let input = &operations.active[at].operation.input;
            at == 0
                && chunk.source.includes(node.rank())
                && !input.has_arrived(chunk.input_offset + chunk.bytes)
        })
    }
}

/// True if this rank's contribution uses a slot.
fn is_copied(node: &Node, active: &Active, chunk: &Chunk) -> bool {
    let input = &active.operation.input;
    let owned = node.identity().owner_of(chunk.index) == node.local();
    match chunk.source {
        Ranks::One(_) => true,
        // The owner reads its own input in place.
        Ranks::All if owned => input.contiguous(chunk.input_offset, chunk.bytes).is_none(),
        Ranks::All => active.registered.input.is_none(),
    }
}

fn contribute(node: &Node, active: &Active, number: u64, chunk: &Chunk) {
    let place = match chunk.source {
        // A single contribution is the result.
        Ranks::One(_) => active.place(node, number, chunk),
        Ranks::All => node.shm.input(node.local(), number),
    };
    // SAFETY: the slot is free and exclusive until it is staged (see the segment's protocol), or
    // the destination is the caller's output; both hold `chunk.bytes`.
    unsafe { active.operation.input.gather(chunk.input_offset, chunk.bytes, place) };
}

fn hand_over(node: &Node, active: &Active, chunk: &Chunk, number: u64) {
    let rank = node.rank();
    let operation = &active.operation;
    let own = chunk.source == Ranks::One(rank) && operation.fingerprint.kind == Kind::Broadcast;
    if !chunk.sink.includes(rank) || own {
        return;
    }
    node.count_taken(made_by(node, active, chunk, number), chunk.bytes);
    if !active.is_in_its_place(node, chunk) {
        let place = active.place(node, number, chunk);
        // SAFETY: the result is published and its slot not yet released; the caller's memory is
        // exclusive until the operation ends.
        unsafe { operation.output.scatter(chunk.output_offset, chunk.bytes, place) };
    }
    operation.output.deliver(chunk.output_offset + chunk.bytes);
}

/// The local rank whose memory has the result of a chunk, or that has written it in place.
fn made_by(node: &Node, active: &Active, chunk: &Chunk, number: u64) -> usize {
    if let Some(source) = chunk.source.single().and_then(|rank| node.local_of(rank)) {
        return source; // A single contribution is the result.
    }
    match active.algorithm {
        ReduceAlgorithm::Owner | ReduceAlgorithm::Undecided => {
            node.identity().owner_of(chunk.index)
        }
        ReduceAlgorithm::Ring => node.locals() - 1,
        ReduceAlgorithm::LastArriver => node.shm.reduced_by(number).unwrap_or(node.local()),
    }
}
