//! Operations in progress at this rank, oldest first, and the window of outstanding ones: how far a
//! rank may be ahead of the others of its node.
//!
//! A caller may start any number of operations. The driver starts a collective operation once every
//! rank of the node has ended the one [`OUTSTANDING_MAX`] before it; later ones wait in `held`, in
//! order. So the fingerprints that ranks of a node compare are never overwritten by later ones, and
//! the state that an operation has in the driver and in the core is bounded. Point-to-point messages
//! are not held: a receive may be what lets another rank continue.
//!
//! Operations end oldest first along the trees, and a rank that has started the oldest operation
//! needs no later one to end it, so a held operation is always started or fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::fault::Fault;
use super::node::Node;
use super::shared::{Identity, Submission};
use crate::operation::Operation;
use crate::priority::UnderWay;
use crate::work::WorkState;
use hfreduce_core::{Chunk, Geometry, Kind, OUTSTANDING_MAX, Ranks, Stage};
use hfreduce_shm::segment::{Compared, Registered, WAIT_END, WAIT_WINDOW};

/// Ranks that wait for the window are woken once per this many operations: rarely enough to cost
/// nothing, and long before the other ranks need them.
const WAKE_EVERY: u64 = OUTSTANDING_MAX as u64 / 4;

/// Algorithm of a reduction inside a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReduceAlgorithm {
    /// Each chunk's owner reduces it. Also for operations that do not reduce.
    Owner,
    /// The ranks add in turn.
    Ring,
    /// Owner or ring: rank 0 has not decided yet.
    Undecided,
    /// The last arriver reduces.
    LastArriver,
}

/// An operation along the trees that this rank has started.
pub(super) struct Active {
    pub operation: Operation,
    pub work: Arc<WorkState>,
    pub geometry: Geometry,
    /// Number of its first chunk, over all operations.
    pub first: u64,
    /// Local ranks whose fingerprint is equal.
    pub verified: u128,
    /// Number of the operation along the trees.
    pub ordinal: u64,
    /// Buffers of this rank that other ranks access in place.
    pub registered: Registered,
    /// The same of every local rank, once an owner needs it.
    pub others: Vec<Registered>,
    /// The algorithm inside the node.
    pub algorithm: ReduceAlgorithm,
    /// Counts the operation for other communicators of the process.
    pub under_way: UnderWay,
}

impl Active {
    /// The number after its last chunk's.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.geometry.chunks())
    }

    /// The last of its chunks that local rank `owner` owns, if any.
    pub fn last_of(&self, owner: usize, identity: &Identity) -> Option<u64> {
        let chunks = self.geometry.chunks();
        let last = (0..chunks).rev().find(|index| identity.owner_of(*index) == owner)?;
        Some(self.first + u64::from(last))
    }

    /// Compares the operation of a local rank that has contributed with this rank's.
    pub fn verify(&mut self, node: &Node, local: usize) -> Result<(), Fault> {
        if self.verified & (1 << local) != 0 {
            return Ok(());
        }
        let (sequence, fingerprint) = (self.work.sequence, self.operation.fingerprint);
        match node.shm.compare(local, sequence, fingerprint) {
            Compared::Equal => {
                self.verified |= 1 << local;
                Ok(())
            }
            Compared::Differs(other) => {
                Err(node.local_mismatch(local, sequence, fingerprint, other))
            }
            Compared::Absent(latest) => {
                Err(node.local_absent(local, (sequence, fingerprint), latest))
            }
        }
    }

    /// Destination of the result of a chunk: the caller's memory if no other rank needs it.
    pub fn place(&self, node: &Node, number: u64, chunk: &Chunk) -> *mut u8 {
        if self.algorithm == ReduceAlgorithm::Ring {
            return self.accumulator(node, number);
        }
        if node.locals() == 1
            && chunk.sink.includes(node.rank())
            && let Some(place) = self.operation.output.contiguous(chunk.output_offset, chunk.bytes)
        {
            return place;
        }
        node.shm.result(number)
    }

    /// Address of the payload of a stage: a partial sum that is longer than the result does not fit
    /// the caller's memory.
    pub fn place_in(&self, stage: Stage, node: &Node, number: u64, chunk: &Chunk) -> *mut u8 {
        if stage == Stage::Up && chunk.is_wide() {
            return node.shm.result(number);
        }
        self.place(node, number, chunk)
    }

    /// Number of accumulators of the ring. A short operation uses the result slots: reusing the
    /// same few slots keeps them in the nearest caches.
    pub fn ring_slots(&self, node: &Node) -> u64 {
        let shape = node.shm.shape();
        let short = self.geometry.chunks() as usize <= shape.slots;
        (if short { shape.slots } else { shape.ring_slots }) as u64
    }

    /// Address of the accumulator of a chunk in the ring.
    pub fn accumulator(&self, node: &Node, number: u64) -> *mut u8 {
        match self.ring_slots(node) > node.shm.shape().slots as u64 {
            true => node.shm.ring_slot(number),
            false => node.shm.result(number),
        }
    }

    /// Registered memory of a local rank for this operation.
    pub fn other(&self, local: usize) -> Registered {
        self.others.get(local).copied().unwrap_or_default()
    }

    /// True if this rank handles no result but the last: all are written in place.
    pub fn is_made_in_place(&self, rank: u32) -> bool {
        let fingerprint = &self.operation.fingerprint;
        let sinks = fingerprint.kind != Kind::Reduce || fingerprint.root == rank;
        self.registered.input.is_some() && (self.registered.output.is_some() || !sinks)
    }

    /// True if this rank's result of an owned or registered chunk was written in place.
    pub fn is_in_its_place(&self, node: &Node, chunk: &Chunk) -> bool {
        let Active { registered, operation, algorithm, .. } = self;
        if *algorithm != ReduceAlgorithm::Owner {
            return false;
        }
        let owned = node.identity().owner_of(chunk.index) == node.local();
        let is_result = owned && chunk.source == Ranks::All && node.is_alone();
        chunk.source == Ranks::All && registered.output.is_some()
            || is_result
                && node.locals() > 1
                && operation.output.contiguous(chunk.output_offset, chunk.bytes).is_some()
    }
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Operations {
    /// Operations along the trees that this rank has started.
    pub active: VecDeque<Active>,
    /// Collective calls that wait for the window.
    pub waiting: VecDeque<Submission>,
    /// Number of chunks of all operations that this rank has started.
    pub chunks: u64,
    /// Ordinal of the next operation along the trees.
    pub next_ordinal: u64,
    /// Events since the last notification that other ranks may sleep on.
    pub pending_wakeups: u32,
    /// Every operation below this one has ended at this rank.
    ended: u64,
    ended_by_all: u64,
    /// When the last allreduce ended.
    reduced_until: Option<Instant>,
}

impl Operations {
    /// True while operations along the trees are in progress or calls wait for the window.
    pub fn is_busy(&self) -> bool {
        !self.active.is_empty() || !self.waiting.is_empty()
    }

    /// True if a collective call has to wait for the window.
    pub fn must_wait(&mut self, node: &Node, sequence: u64) -> bool {
        !self.waiting.is_empty() || !self.has_room(node, sequence)
    }

    /// The oldest waiting call, if the window has room for it.
    pub fn next_waiting(&mut self, node: &Node) -> Option<Submission> {
        let sequence = self.waiting.front()?.work.sequence;
        if self.has_room(node, sequence) { self.waiting.pop_front() } else { None }
    }

    fn has_room(&mut self, node: &Node, sequence: u64) -> bool {
        let most = OUTSTANDING_MAX as u64;
        if sequence >= self.ended_by_all + most {
            self.ended_by_all = node.shm.ended_by_all();
        }
        sequence < self.ended_by_all + most
    }

    /// The operation and chunk with this number.
    pub fn find(&self, number: u64) -> Option<(usize, Chunk)> {
        let at = self.active.iter().position(|active| number < active.end())?;
        let active = &self.active[at];
        let index = number.checked_sub(active.first)?;
        Some((at, active.geometry.chunk(index as u32)))
    }

    /// The same, by operation and chunk.
    pub fn find_key(&self, key: (u64, u32)) -> Option<(usize, Chunk, u64)> {
        let at = self.active.iter().position(|active| active.work.sequence == key.0)?;
        let active = &self.active[at];
        Some((at, active.geometry.chunk(key.1), active.first + u64::from(key.1)))
    }

    /// Completes the oldest operation along the trees. `oldest`: the oldest collective operation
    /// that uses point-to-point messages.
    pub fn complete(&mut self, node: &Node, oldest: Option<u64>) {
        let Some(done) = self.active.pop_front() else { return };
        let counters = &node.shared.counters;
        let bytes = done.operation.input.bytes() as u64;
        if done.is_made_in_place(node.rank()) {
            counters.in_place_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        if done.algorithm == ReduceAlgorithm::Ring {
            counters.ring_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        let now = Instant::now();
        counters.count_allreduce(&done.work, &mut self.reduced_until, now);
        counters.operations.fetch_add(1, Ordering::Relaxed);
        node.shared.recorder.finished(done.work.flight, false, now);
        self.publish_ended(node, oldest);
        done.work.complete();
        node.shared.waiters.wake_all();
    }

    /// Publishes which operations have ended, after the end of a collective operation; `oldest` as
    /// for `complete`.
    pub fn publish_ended(&mut self, node: &Node, oldest: Option<u64>) {
        let tree = self.active.front().map(|active| active.work.sequence);
        let oldest = tree.into_iter().chain(oldest).min();
        let local = node.local();
        // Operations start in order: no later one is below the oldest that is active.
        let below = oldest.unwrap_or_else(|| node.shm.entered(local)).max(self.ended);
        let before = std::mem::replace(&mut self.ended, below);
        node.shm.end(local, below);
        if node.locals() > 1 && before / WAKE_EVERY != below / WAKE_EVERY {
            node.wake_all(WAIT_WINDOW);
        }
    }

    /// Wakes the ranks that wait for results. Of several owners, the last one to end an operation
    /// wakes those that wait for its end.
    pub fn wake_waiting(&mut self, node: &Node) {
        let reasons = std::mem::take(&mut self.pending_wakeups);
        if reasons == 0 || node.locals() == 1 {
            return;
        }
        node.shm.full_fence();
        let identity = node.identity();
        let owners = 0..identity.channels.min(node.locals());
        let ended = reasons & WAIT_END != 0
            && self.active.front().is_some_and(|active| {
                owners.clone().all(|owner| {
                    let last = active.last_of(owner, identity);
                    last.is_none_or(|last| node.shm.published(owner) > last)
                })
            });
        let reasons = if ended { reasons } else { reasons & !WAIT_END };
        for local in 0..node.locals() {
            node.wake(local, reasons);
        }
    }

    /// What the oldest waiting operation waits for: a description, and the rank.
    pub fn waiting_for_window(&self, node: &Node) -> Option<(String, Option<u32>)> {
        self.waiting.front()?;
        let locals = node.identity().locals();
        let slowest = (0..locals.len()).min_by_key(|local| node.shm.ended(*local))?;
        let (rank, ended) = (locals[slowest], node.shm.ended(slowest));
        Some((format!("waiting for rank {rank} to end operation #{ended}"), Some(rank)))
    }
}
