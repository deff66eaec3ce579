//! State of a target, for other modules of the service.

use std::sync::PoisonError;

use threefs_core::heartbeat::LocalState;
use threefs_core::ids::{ChainId, ChunkId, TargetId};
use threefs_core::scrub::ScrubStatus;

use super::Target;

impl Target {
    pub(crate) fn id(&self) -> TargetId {
        self.config.target
    }

    pub(crate) fn chain(&self) -> ChainId {
        self.config.chain
    }

    /// Whether it was up to date after the last event.
    pub(crate) fn is_up_to_date(&self) -> bool {
        self.snapshot().report.state == LocalState::UpToDate
    }

    /// Whether this is a version of a chunk that no snapshot shows. Waits for the current event.
    pub(crate) fn hides(&self, chunk: ChunkId) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.replica.hides(&*self.store, chunk)
    }

    /// Whether the store has failed.
    pub(crate) fn has_failed(&self) -> bool {
        *self.failed.borrow()
    }

    /// Status of the scrub; starts a pass first if requested.
    pub(crate) fn scrub(&self, start: bool) -> ScrubStatus {
        if start {
            self.scrub.start();
        }
        let used_bytes = self.snapshot().usage.used_bytes;
        self.scrub.status(used_bytes)
    }
}
