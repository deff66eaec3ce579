//! The chunks that this rank owns: from the contributions of all ranks to complete results.

use super::{Active, Driver, ReduceAlgorithm};
use hfreduce_core::{Action, Chunk, Ranks};
use hfreduce_shm::segment::{Compared, Registered, WAIT_END, WAIT_RESULT};

impl Driver {
    /// True if the group has one node: results are computed in place, or in their slots.
    pub(super) fn is_alone(&self) -> bool {
        self.tree_links.as_ref().is_none_or(|tree_links| tree_links.links.is_empty())
    }

    /// Activates owned chunks to which this rank has contributed, as many as there are slots.
    pub(super) fn activate(&mut self) -> bool {
        let Some(tree_links) = &self.tree_links else { return false };
        let from = self.next_activate;
        let local = self.shared.identity.local();
        let mut active = tree_links.core.active();
        // Completed operations may have left chunks of other owners behind.
        let first = self.active.front().map_or(self.next_stage, |active| active.first);
        self.next_activate = self.next_activate.max(first);
        while self.next_activate < self.next_stage && active < self.shm.shape().slots {
            let number = self.next_activate;
            let Some((at, chunk)) = self.find(number) else { break };
            if self.active[at].algorithm == ReduceAlgorithm::Owner
                && self.shared.identity.owner_of(chunk.index) == local
            {
                if !self.is_alone() && !self.slot_is_free(number) {
                    self.wants_slot = true;
                    break;
                }
                self.start_chunk(at, number, &chunk);
                active = self.tree_links.as_ref().map_or(0, |tree_links| tree_links.core.active());
            }
            self.next_activate += 1;
            if self.shared.broken.get().is_some() {
                return true;
            }
        }
        self.next_activate > from.max(first)
    }

    fn start_chunk(&mut self, at: usize, number: u64, chunk: &Chunk) {
        let sequence = self.active[at].work.sequence;
        let root = chunk.root().map(|rank| self.shared.identity.placement.node_of(rank));
        let Some(tree_links) = &mut self.tree_links else { return };
        tree_links.unready.push_back(number);
        self.unpublished.push_back((number, false));
        if let Err((link, why)) = tree_links.core.activate(sequence, *chunk, root) {
            self.violated_on(link, why);
            return;
        }
        self.act();
    }

    /// Reduces the owned chunks to which all local ranks have contributed.
    pub(super) fn combine(&mut self) -> bool {
        let mut moved = false;
        let mut next = 0;
        while let Some(number) = self.tree_links.as_ref().and_then(|t| t.unready.get(next)).copied()
        {
            let Some((at, chunk)) = self.find(number) else { break };
            match self.contributions(at, number, &chunk) {
                Contributions::Missing => next += 1,
                Contributions::NotNeeded => self.ready(next, None),
                Contributions::There => {
                    self.ready(next, Some((self.active[at].work.sequence, chunk.index)));
                    moved = true;
                }
                Contributions::Broken => return true,
            }
            // An abort must not wait for the remaining chunks.
            if moved && self.shm.is_aborted() {
                break;
            }
        }
        self.notify_published();
        moved
    }

    fn ready(&mut self, at: usize, key: Option<(u64, u32)>) {
        if let Some(tree_links) = &mut self.tree_links {
            tree_links.unready.remove(at);
            if let Some(key) = key {
                tree_links.core.local_ready(key);
            }
        }
        self.act();
    }

    fn contributions(&mut self, at: usize, number: u64, chunk: &Chunk) -> Contributions {
        let identity = &self.shared.identity;
        let contributors = match chunk.source {
            Ranks::All => 0..self.shm.shape().locals,
            Ranks::One(rank) if identity.placement.node_of(rank) == identity.node() => {
                let local = identity.placement.local_of(rank);
                local..local + 1
            }
            Ranks::One(_) => return Contributions::NotNeeded,
        };
        if contributors.clone().any(|local| self.shm.staged(local) <= number) {
            return Contributions::Missing;
        }
        for local in contributors {
            if !self.verify(at, local) {
                return Contributions::Broken;
            }
        }
        self.learn_registered(at);
        let slot = chunk.source == Ranks::All && self.is_alone() && self.takes_slot(at, chunk);
        if slot && !self.slot_is_free(number) {
            self.wants_slot = true;
            return Contributions::Missing;
        }
        Contributions::There
    }

    /// Reads the registered memory of all ranks: they have published it, since all have
    /// contributed.
    fn learn_registered(&mut self, at: usize) {
        let active = &mut self.active[at];
        if active.others.is_empty() && active.operation.fingerprint.kind.reduces() {
            let (ordinal, sequence) = (active.ordinal, active.work.sequence);
            let locals = 0..self.shm.shape().locals;
            let registered_by = |local| self.shm.registered(local, ordinal, sequence);
            active.others = locals.map(|local| registered_by(local).unwrap_or_default()).collect();
        }
    }

    /// In a group of one node: true if a rank copies this result from its slot.
    pub(super) fn takes_slot(&self, at: usize, chunk: &Chunk) -> bool {
        let own = self.shared.identity.local();
        let output = &self.active[at].operation.output;
        self.sinks(chunk).any(|local| match local == own {
            true => output.contiguous(chunk.output_offset, chunk.bytes).is_none(),
            false => self.other(at, local).output.is_none(),
        })
    }

    /// The local ranks that receive this result.
    pub(super) fn sinks(&self, chunk: &Chunk) -> impl Iterator<Item = usize> {
        let ranks = self.shared.identity.locals().iter().enumerate();
        let sink = chunk.sink;
        ranks.filter(move |(_, rank)| sink.includes(**rank)).map(|(local, _)| local)
    }

    pub(super) fn other(&self, at: usize, local: usize) -> Registered {
        self.active[at].others.get(local).copied().unwrap_or_default()
    }

    /// True if this rank's result of an owned or registered chunk was written in place.
    pub(super) fn is_in_its_place(&self, at: usize, chunk: &Chunk) -> bool {
        let Active { registered, operation, algorithm, .. } = &self.active[at];
        if *algorithm != ReduceAlgorithm::Owner {
            return false;
        }
        let identity = &self.shared.identity;
        let owned = identity.owner_of(chunk.index) == identity.local();
        let made = owned && chunk.source == Ranks::All && self.is_alone();
        chunk.source == Ranks::All && registered.output.is_some()
            || made
                && self.shm.shape().locals > 1
                && operation.output.contiguous(chunk.output_offset, chunk.bytes).is_some()
    }

    /// Compares the operation of a local rank that has contributed with this rank's; fails and
    /// returns false if they differ.
    pub(super) fn verify(&mut self, at: usize, local: usize) -> bool {
        let active = &mut self.active[at];
        if active.verified & (1 << local) != 0 {
            return true;
        }
        let (sequence, ours) = (active.work.sequence, active.operation.fingerprint);
        match self.shm.compare(local, sequence, ours) {
            Compared::Equal => {
                active.verified |= 1 << local;
                true
            }
            Compared::Differs(theirs) => {
                self.local_mismatch(local, sequence, ours, theirs);
                false
            }
            Compared::Absent(latest) => {
                self.local_absent(local, (sequence, ours), latest);
                false
            }
        }
    }

    /// Executes the actions of the core, in order.
    pub(super) fn act(&mut self) {
        while let Some(action) =
            self.tree_links.as_mut().and_then(|tree_links| tree_links.core.poll())
        {
            match action {
                Action::Reduce { key, partials } => {
                    let Some((at, chunk, number)) = self.find_key(key) else { continue };
                    self.reduce(at, &chunk, number, &partials);
                }
                Action::Move { key, from } => {
                    let Some((at, chunk, number)) = self.find_key(key) else { continue };
                    let place = self.place(number, at, &chunk);
                    if let Some(tree_links) = &self.tree_links {
                        let source = tree_links.partial(&from);
                        // SAFETY: the slot holds this chunk and the destination is exclusive
                        // (guaranteed by the core); they are different allocations of at least
                        // `chunk.bytes`.
                        unsafe { std::ptr::copy_nonoverlapping(source, place, chunk.bytes) };
                    }
                }
                Action::Send { link, key, tree, stage } => {
                    if let Some(tree_links) = &mut self.tree_links {
                        tree_links.due(link, key, tree, stage);
                    }
                }
                Action::Publish { key } => {
                    let Some((at, chunk, number)) = self.find_key(key) else { continue };
                    if self.is_alone() || self.spread(at, &chunk, number) {
                        self.publish(number);
                    }
                }
                Action::Done { key } => {
                    if let Some((_, _, number)) = self.find_key(key)
                        && let Some(tree_links) = &mut self.tree_links
                    {
                        tree_links.finished.insert(number);
                        // Without a result at this node, other ranks wait for the slot, or for
                        // their memory.
                        self.publish(number);
                    }
                }
                Action::Abort { .. } => {}
            }
        }
        if !(self.is_alone() && self.is_crowded()) {
            self.notify_published();
        }
    }

    /// Marks the result of an owned chunk complete. Results are published in the order of the
    /// chunks.
    fn publish(&mut self, number: u64) {
        if let Ok(at) = self.unpublished.binary_search_by_key(&number, |(number, _)| *number) {
            self.unpublished[at].1 = true;
        }
        let mut last = None;
        while let Some((number, true)) = self.unpublished.front().copied() {
            self.unpublished.pop_front();
            last = Some(number);
            let local = self.shared.identity.local();
            let ended = self.find(number).is_some_and(|(at, _)| {
                self.active[at].last_of(local, &self.shared.identity) == Some(number)
            });
            self.pending_wakeups |= if ended { WAIT_RESULT | WAIT_END } else { WAIT_RESULT };
        }
        if let Some(number) = last {
            self.shm.publish(self.shared.identity.local(), number + 1);
        }
    }

    /// Wakes the ranks that wait for published results. Of several owners, the last one to end an
    /// operation wakes those that wait for its end.
    fn notify_published(&mut self) {
        let reasons = std::mem::take(&mut self.pending_wakeups);
        if reasons == 0 || self.shm.shape().locals == 1 {
            return;
        }
        self.shm.full_fence();
        let identity = &self.shared.identity;
        let owners = 0..identity.channels.min(self.shm.shape().locals);
        let ended = reasons & WAIT_END != 0
            && self.active.front().is_some_and(|active| {
                owners.clone().all(|owner| {
                    let last = active.last_of(owner, identity);
                    last.is_none_or(|last| self.shm.published(owner) > last)
                })
            });
        let reasons = if ended { reasons } else { reasons & !WAIT_END };
        for local in 0..self.shm.shape().locals {
            self.wake(local, reasons);
        }
    }
}

enum Contributions {
    Missing,
    NotNeeded,
    There,
    Broken,
}
