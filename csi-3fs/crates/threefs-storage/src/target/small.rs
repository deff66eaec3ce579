//! Small updates: applied one after the other by the thread that processes their events, and made
//! durable together with those of other targets of the disk (`crate::flushes`).

use std::sync::Arc;

use bytes::Bytes;
use threefs_chunkstore::{ChunkStore, Staged};
use threefs_core::error::StoreError;
use threefs_core::replica::{Event, OpId};

use super::actions::Change;
use super::{Incoming, Target};
use crate::flushes::FlushTarget;

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
        for change in changes {
            // Otherwise it waits for space, and is applied by a separate thread.
            let Some(reservation) = self.reserve(&change) else { continue };
            let mut prepare = change.prepare_call();
            let Change { op, update, payload, payload_checksum, .. } = change;
            let mut send = || self.start_calls(prepare.take().into_iter().collect());
            let result = reservation.and_then(|reservation| {
                self.store.stage(&update, &payload, payload_checksum, reservation, &mut send)
            });
            let unsent = prepare.is_some();
            match result {
                Ok(update) => staged.push((op, update)),
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

    fn flushed(self: Arc<Self>, staged: Vec<(OpId, Staged)>, result: &Result<(), StoreError>) {
        if self.store.compaction_is_due() {
            // Each update copies a slice, as those that are applied alone.
            let (target, slices) = (Arc::clone(&self), staged.len());
            self.workers.run(move || (0..slices).for_each(|_| target.store.compact()));
        }
        let applied = staged.into_iter().map(|(op, staged)| {
            let result = result.clone().map(|()| staged.state);
            Incoming::Event(Event::Applied { op, result, unsent: false })
        });
        if self.queue_all(applied) {
            let work = self.process_all();
            self.run_elsewhere(work.job);
            self.apply_together(work.changes);
        }
    }

    fn settle(self: Arc<Self>, staged: Vec<(OpId, Staged)>, number: u64) {
        let target = Arc::clone(&self);
        self.workers.run(move || {
            let result = target.store.settle(number);
            target.flushed(staged, &result);
        });
    }
}
