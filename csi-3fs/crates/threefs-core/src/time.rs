//! Time as the core sees it: milliseconds of one monotonic clock, read by the driver.

use serde::{Deserialize, Serialize};

/// A moment of the driver's monotonic clock, in milliseconds. Only differences mean anything.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Millis(pub u64);

impl Millis {
    /// This moment plus `duration_ms`, saturating.
    #[must_use]
    pub fn after(self, duration_ms: u64) -> Self {
        Self(self.0.saturating_add(duration_ms))
    }

    /// Milliseconds since `earlier`, 0 if `earlier` lies in the future.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
