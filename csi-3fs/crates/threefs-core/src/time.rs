//! Time of the core: milliseconds of a monotonic clock, read by the driver.

use serde::{Deserialize, Serialize};

/// An instant of the driver's monotonic clock, in milliseconds. Only differences are meaningful.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Millis(pub u64);

impl Millis {
    /// This instant plus `duration_ms`, saturating.
    #[must_use]
    pub fn after(self, duration_ms: u64) -> Self {
        Self(self.0.saturating_add(duration_ms))
    }

    /// Milliseconds since `earlier`, 0 if `earlier` is in the future.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
