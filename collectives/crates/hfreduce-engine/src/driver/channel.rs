//! The channel that this rank owns: its chunks, from the contributions of all ranks of the node over
//! the trees to complete results.
//!
//! In the order in which a chunk moves: `activate` → `combine` → `act`, which executes the actions of
//! the core (reduce, send, publish) → `flush` to the neighbors, `receive` from them.

use std::collections::{HashSet, VecDeque};

use super::fault::Fault;
use super::node::Node;
use super::operations::{Operations, ReduceAlgorithm};
use super::reduce::{self, Scratch};
use super::slots::Slots;
use super::tree_links::{Flushed, TreeLinks};
use hfreduce_core::error::AbortReason;
use hfreduce_core::{Action, Chunk, Ranks};
use hfreduce_shm::segment::{WAIT_END, WAIT_RESULT};
use hfreduce_transport::poller::Ready;
use hfreduce_transport::transport::DESCRIPTOR_SHIFT;
use hfreduce_transport::wire::Head;

/// See the module's text.
pub(super) struct Channel {
    pub tree: TreeLinks,
    /// The next chunk to activate.
    pub next: u64,
    /// Owned chunks that wait for local contributions.
    unready: VecDeque<u64>,
    /// Owned chunks that are active, in order, and whether their results are complete.
    unpublished: VecDeque<(u64, bool)>,
    /// Owned chunks that the core has finished and that are not delivered here yet.
    pub finished: HashSet<u64>,
    scratch: Scratch,
}

/// Contributions to an owned chunk.
enum Contributions {
    Missing,
    NotNeeded,
    Complete,
}

impl Channel {
    pub fn new(tree: TreeLinks) -> Self {
        Self {
            tree,
            next: 0,
            unready: VecDeque::new(),
            unpublished: VecDeque::new(),
            finished: HashSet::new(),
            scratch: Scratch::default(),
        }
    }

    /// Activates owned chunks to which this rank has contributed, as many as there are slots.
    /// `staged`: number of chunks to which this rank has contributed.
    pub fn activate(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        staged: u64,
        slots: &mut Slots,
    ) -> Result<bool, Fault> {
        // Completed operations may have left chunks of other owners behind.
        let first = operations.active.front().map_or(staged, |active| active.first);
        let from = self.next.max(first);
        self.next = from;
        while self.next < staged && self.tree.core.active() < node.shm.shape().slots {
            let number = self.next;
            let Some((at, chunk)) = operations.find(number) else { break };
            if operations.active[at].algorithm == ReduceAlgorithm::Owner
                && node.identity().owner_of(chunk.index) == node.local()
            {
                if !node.is_alone() && !slots.take(node, number) {
                    break;
                }
                self.start(node, operations, at, (number, &chunk))?;
            }
            self.next += 1;
        }
        Ok(self.next > from)
    }

    fn start(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        at: usize,
        (number, chunk): (u64, &Chunk),
    ) -> Result<(), Fault> {
        let sequence = operations.active[at].work.sequence;
        self.unready.push_back(number);
        self.unpublished.push_back((number, false));
        self.tree
            .core
            .activate(sequence, *chunk, root_node(node, chunk))
            .map_err(|(link, why)| self.tree.violation(node, link, why))?;
        self.act(node, operations)
    }

    /// Reduces the owned chunks to which all local ranks have contributed.
    pub fn combine(
        &mut self,
        node: &Node,
        operations: &mut Operations,
        slots: &mut Slots,
    ) -> Result<bool, Fault> {
        let mut moved = false;
        let mut next = 0;
        while let Some(number) = self.unready.get(next).copied() {
            let Some((at, chunk)) = operations.find(number) else { break };
            match contributions(node, operations, at, (number, &chunk), slots)? {
                Contributions::Missing => next += 1,
                Contributions::NotNeeded => {
                    self.unready.remove(next);
                    self.act(node, operations)?;
                }
                Contributions::Complete => {
                    self.unready.remove(next);
                    let sequence = operations.active[at].work.sequence;
                    self.tree.core.local_ready((sequence, chunk.index));
                    self.act(node, operations)?;
                    moved = true;
                }
            }
            // An abort must not wait for the remaining chunks.
            if moved && node.shm.is_aborted() {
                break;
            }
        }
        Ok(moved)
    }

    /// Executes the actions of the core, in order.
    fn act(&mut self, node: &Node, operations: &mut Operations) -> Result<(), Fault> {
        while let Some(action) = self.tree.core.poll() {
            match action {
                Action::Reduce { key, partials } => {
                    let Some((at, chunk, number)) = operations.find_key(key) else { continue };
                    let rooted_at = chunk.rooted_at(root_node(node, &chunk));
                    let last = self.tree.core.flows().is_root(chunk.tree, rooted_at);
                    let partials = partials.iter().map(|partial| self.tree.partial(partial));
                    let active = &operations.active[at];
                    active.under_way.progress();
                    self.scratch.reduce(node, active, (number, &chunk), partials, last)?;
                }
                Action::Move { key, from } => {
                    let Some((at, chunk, number)) = operations.find_key(key) else { continue };
                    let active = &operations.active[at];
                    active.under_way.progress();
                    let place = active.place(node, number, &chunk);
                    let source = self.tree.partial(&from);
                    // SAFETY: the slot holds this chunk and the destination is exclusive
                    // (guaranteed by the core); they are different allocations of at least
                    // `chunk.bytes`.
                    unsafe { std::ptr::copy_nonoverlapping(source, place, chunk.bytes) };
                }
                Action::Send { link, key, tree, stage } => self.tree.due(link, key, tree, stage),
                Action::Publish { key } => {
                    let Some((at, chunk, number)) = operations.find_key(key) else { continue };
                    if !node.is_alone() {
                        reduce::spread(node, &operations.active[at], number, &chunk)?;
                    }
                    self.publish(node, operations, number);
                }
                Action::Done { key } => {
                    if let Some((_, _, number)) = operations.find_key(key) {
                        self.finished.insert(number);
                        // Without a result at this node, other ranks wait for the slot, or for
                        // their memory.
                        self.publish(node, operations, number);
                    }
                }
                Action::Abort { .. } => {}
            }
        }
        if !(node.is_alone() && node.is_crowded) {
            operations.wake_waiting(node);
        }
        Ok(())
    }

    /// Marks the result of an owned chunk complete. Results are published in the order of the
    /// chunks.
    fn publish(&mut self, node: &Node, operations: &mut Operations, number: u64) {
        if let Ok(at) = self.unpublished.binary_search_by_key(&number, |(number, _)| *number) {
            self.unpublished[at].1 = true;
        }
        let mut last = None;
        let local = node.local();
        while let Some((number, true)) = self.unpublished.front().copied() {
            self.unpublished.pop_front();
            last = Some(number);
            let ended = operations.find(number).is_some_and(|(at, _)| {
                operations.active[at].last_of(local, node.identity()) == Some(number)
            });
            operations.pending_wakeups |= if ended { WAIT_RESULT | WAIT_END } else { WAIT_RESULT };
        }
        if let Some(number) = last {
            node.shm.publish(local, number + 1);
        }
    }

    /// Sends what is due to the neighbors; true if there was anything.
    pub fn flush(&mut self, node: &Node, operations: &mut Operations) -> Result<bool, Fault> {
        let mut moved = false;
        for at in 0..self.tree.link_count() {
            while self.tree.load(node, at, operations) {
                moved = true;
                if !self.flush_link(node, at, operations)? {
                    break;
                }
            }
        }
        Ok(moved)
    }

    /// Sends as much as possible; false if the transport takes no more.
    fn flush_link(
        &mut self,
        node: &Node,
        at: usize,
        operations: &mut Operations,
    ) -> Result<bool, Fault> {
        let flushed = self.tree.flush(node, at);
        self.act(node, operations)?;
        if flushed == Flushed::Failed {
            // Frames that the peer had sent, including its close frame or reason, are handled
            // before the error.
            self.receive_all(node, at, operations)?;
        }
        Ok(flushed == Flushed::TakesMore)
    }

    /// Aborts the links: memory of callers is not accessed after this. `from`: the link that
    /// reported the reason.
    pub fn abort(&mut self, node: &Node, cause: &AbortReason, from: Option<usize>) {
        self.tree.abort(node, cause, from);
        self.unready.clear();
        self.finished.clear();
    }

    /// Handles an event of a tree link.
    pub fn receive(
        &mut self,
        node: &Node,
        index: usize,
        event: Ready,
        operations: &mut Operations,
    ) -> Result<(), Fault> {
        let (link, line) = (index & ((1 << DESCRIPTOR_SHIFT) - 1), index >> DESCRIPTOR_SHIFT);
        let writable = self.tree.woken(link, line, event);
        if event.readable {
            self.receive_all(node, link, operations)?;
        }
        if writable {
            self.flush_link(node, link, operations)?;
        }
        Ok(())
    }

    fn receive_all(
        &mut self,
        node: &Node,
        link: usize,
        operations: &mut Operations,
    ) -> Result<(), Fault> {
        while self.tree.receive(node, link, operations)? {
            self.act(node, operations)?;
        }
        Ok(())
    }

    /// Sends a heartbeat with the oldest operation over every idle link.
    pub fn beat(
        &mut self,
        node: &Node,
        head: &Head,
        operations: &mut Operations,
    ) -> Result<(), Fault> {
        for at in 0..self.tree.link_count() {
            if self.tree.beat(at, head) {
                self.flush_link(node, at, operations)?;
            }
        }
        Ok(())
    }
}

/// The node of the root rank of a chunk.
fn root_node(node: &Node, chunk: &Chunk) -> Option<usize> {
    chunk.root().map(|rank| node.identity().placement.node_of(rank))
}

fn contributions(
    node: &Node,
    operations: &mut Operations,
    at: usize,
    (number, chunk): (u64, &Chunk),
    slots: &mut Slots,
) -> Result<Contributions, Fault> {
    let identity = node.identity();
    let contributors = match chunk.source {
        Ranks::All => 0..node.locals(),
        Ranks::One(rank) if identity.placement.node_of(rank) == identity.node() => {
            let local = identity.placement.local_of(rank);
            local..local + 1
        }
        Ranks::One(_) => return Ok(Contributions::NotNeeded),
    };
    if contributors.clone().any(|local| node.shm.staged(local) <= number) {
        return Ok(Contributions::Missing);
    }
    let active = &mut operations.active[at];
    for local in contributors {
        active.verify(node, local)?;
    }
    // All ranks have published their registered memory, since all have contributed.
    if active.others.is_empty() && active.operation.fingerprint.kind.reduces() {
        let (ordinal, sequence) = (active.ordinal, active.work.sequence);
        let registered_by = |local| node.shm.registered(local, ordinal, sequence);
        let others = (0..node.locals()).map(|local| registered_by(local).unwrap_or_default());
        active.others = others.collect();
    }
    let slot =
        chunk.source == Ranks::All && node.is_alone() && reduce::takes_slot(node, active, chunk);
    if slot && !slots.take(node, number) {
        return Ok(Contributions::Missing);
    }
    Ok(Contributions::Complete)
}
