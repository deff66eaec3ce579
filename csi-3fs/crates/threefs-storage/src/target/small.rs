//! Small updates: applied one after the other by the thread that processes their events, and made
//! durable together with those of other targets of the disk (`crate::flushes`).

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use threefs_chunkstore::ChunkStore;
use threefs_core::error::StoreError;
use threefs_core::replica::Event;

use super::actions::Change;
use super::{Incoming, Target};
use crate::flushes::{FlushTarget, StagedUpdate};

/// Larger updates are applied by separate threads, which write their data at the same time.
const SMALL_BYTES_MAX: usize = 8 << 10;

/// Whether an update is applied by the thread that processes its event.
pub(super) fn is_small(payload: &Bytes) -> bool {
    payload.len() <= SMALL_BYTES_MAX
}

impl Target {
    /// Applies small updates, and makes them durable.
    pub(super) fn apply_together(self: &Arc<Self>, changes: Vec<Change>) {
        let mut staged = Vec::with_capacity(changes.len());
        let is_worth_messages = self.context.flushes.load.is_worth_messages();
        for change in changes {
            // Otherwise it waits for space, and is applied by a separate thread.
            let Some(reservation) = self.reserve(&change) else { continue };
            let is_optional = change.prepare.as_ref().is_some_and(|it| it.is_optional);
            let mut prepare = change.prepare_call();
            let Change { op, update, payload, payload_checksum, .. } = change;
            let mut send = || {
                if is_worth_messages || !is_optional {
                    self.start_calls(prepare.take().into_iter().collect());
                }
            };
            let result = reservation.and_then(|reservation| {
                self.store.stage(&update, &payload, payload_checksum, reservation, &mut send)
            });
            let unsent = prepare.is_some();
            match result {
                Ok(update) => staged.push(StagedUpdate { op, staged: update, unsent }),
                Err(error) => self.handle(Event::Applied { op, result: Err(error), unsent }),
            }
        }
        if !staged.is_empty() {
            self.context.flushes.flush(Arc::clone(self) as _, staged);
        }
    }
}

impl FlushTarget for Target {
    fn store(&self) -> &dyn ChunkStore {
        &*self.store
    }

    fn flushed(self: Arc<Self>, staged: Vec<StagedUpdate>, result: &Result<(), StoreError>) {
        if self.store.compaction_is_due() {
            // Each update copies a slice, as those that are applied alone.
            let (target, slices) = (Arc::clone(&self), staged.len());
            self.workers.run(move || (0..slices).for_each(|_| target.store.compact()));
        }
        let applied = staged.into_iter().map(|StagedUpdate { op, staged, unsent }| {
            let result = result.clone().map(|()| staged.state);
            Incoming::Event(Event::Applied { op, result, unsent })
        });
        if self.queue_all(applied) {
            let work = self.process_all();
            self.run_elsewhere(work.job);
            self.apply_together(work.changes);
        }
    }

    fn settle(self: Arc<Self>, staged: Vec<StagedUpdate>, number: u64) {
        let target = Arc::clone(&self);
        self.workers.run(move || {
            let started_at = Instant::now();
            let result = target.store.settle(number);
            target.context.flushes.load.flushed(started_at.elapsed());
            target.flushed(staged, &result);
        });
    }
}

#[cfg(test)]
#[path = "small_test.rs"]
mod tests;
