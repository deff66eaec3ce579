//! Flushes of small updates, of all targets of a disk.
//!
//! One thread at a time flushes, for all updates that have been applied. Those that are applied
//! meanwhile are flushed next, together. A thread that has applied updates while another one flushes
//! does not wait: the other one also processes their events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threefs_chunkstore::flush::flush_together;
use threefs_chunkstore::{ChunkStore, Staged};
use threefs_core::error::StoreError;
use threefs_core::replica::OpId;

use crate::load::Load;

/// A target whose updates are flushed.
pub(crate) trait FlushTarget: Send + Sync {
    /// The store of the updates.
    fn store(&self) -> &dyn ChunkStore;

    /// The flush of these updates has ended. Called by the thread that flushes for all targets.
    fn flushed(self: Arc<Self>, staged: Vec<StagedUpdate>, result: &Result<(), StoreError>);

    /// Another thread flushes the store, perhaps for long: a thread of the target waits for it.
    fn settle(self: Arc<Self>, staged: Vec<StagedUpdate>, number: u64);
}

/// An update that is applied and not durable yet.
pub(crate) struct StagedUpdate {
    pub(crate) op: OpId,
    pub(crate) staged: Staged,
    /// It was not sent to the successor (`Event::Applied`).
    pub(crate) unsent: bool,
}

/// Flushes of a disk.
#[derive(Default)]
pub(crate) struct Flushes {
    pub(crate) load: Load,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A thread flushes, and will take what waits.
    flushing: bool,
    /// Bounded by the calls in flight of the port.
    waiting: Vec<Waiting>,
}

/// Updates of one target that are not durable yet.
struct Waiting {
    target: Arc<dyn FlushTarget>,
    staged: Vec<StagedUpdate>,
}

impl Waiting {
    /// Number of the last record.
    fn number(&self) -> u64 {
        self.staged.iter().map(|update| update.staged.number).max().unwrap_or(0)
    }
}

impl Flushes {
    /// Makes updates durable and processes their events, unless another thread does.
    pub(crate) fn flush(&self, target: Arc<dyn FlushTarget>, staged: Vec<StagedUpdate>) {
        {
            let mut state = self.lock();
            state.add(target, staged);
            if std::mem::replace(&mut state.flushing, true) {
                return;
            }
        }
        let flushing = Flushing(self);
        while let Some(round) = self.next_round() {
            self.complete(round);
        }
        std::mem::forget(flushing);
    }

    /// All waiting updates; `None` ends the flushes of this thread.
    fn next_round(&self) -> Option<Vec<Waiting>> {
        let mut state = self.lock();
        let round = std::mem::take(&mut state.waiting);
        state.flushing = !round.is_empty();
        state.flushing.then_some(round)
    }

    fn complete(&self, round: Vec<Waiting>) {
        let flushed = {
            let stores: Vec<(&dyn ChunkStore, u64)> =
                round.iter().map(|waiting| (waiting.target.store(), waiting.number())).collect();
            flush_together(&stores)
        };
        if let Some(took) = flushed.took {
            self.load.flushed(took);
        }
        for (waiting, result) in round.into_iter().zip(flushed.results) {
            let number = waiting.number();
            match result {
                Some(result) => waiting.target.flushed(waiting.staged, &result),
                None => waiting.target.settle(waiting.staged, number),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, target: Arc<dyn FlushTarget>, mut staged: Vec<StagedUpdate>) {
        let mut waiting = self.waiting.iter_mut();
        let is_same = |other: &Arc<dyn FlushTarget>| {
            std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&target))
        };
        match waiting.find(|waiting| is_same(&waiting.target)) {
            Some(waiting) => waiting.staged.append(&mut staged),
            None => self.waiting.push(Waiting { target, staged }),
        }
    }
}

/// After a panic the next thread flushes. The updates of the round are lost; their targets report that
/// their stores do not respond.
struct Flushing<'a>(&'a Flushes);

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        self.0.lock().flushing = false;
    }
}

#[cfg(test)]
#[path = "flushes_test.rs"]
mod tests;
