//! A heartbeat, with what newer storage services send with it.

use threefs_core::heartbeat::{FenceReport, Heartbeat, SeenRouting};
use threefs_core::location::Location;

/// A heartbeat with what newer storage services send with it.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub heartbeat: Heartbeat,
    pub location: Option<Location>,
    pub seen: Option<SeenRouting>,
    /// `None`: an earlier release, which does not know fences.
    pub fences: Option<FenceReport>,
}

impl Report {
    /// A heartbeat of the earliest storage services.
    pub(crate) fn of(heartbeat: Heartbeat) -> Self {
        Self { heartbeat, location: None, seen: None, fences: None }
    }
}
