//! State of a target, for other modules of the service.

use threefs_core::heartbeat::LocalState;
use threefs_core::ids::{ChainId, TargetId};
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
