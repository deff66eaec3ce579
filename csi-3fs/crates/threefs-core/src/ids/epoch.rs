//! Epochs of volumes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One epoch of a volume: creating a snapshot ends it.
///
/// It names its volume, so a replica knows the volume of each version of a chunk that was made after
/// the first snapshot, from its id alone.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch {
    /// Number of the volume, given before its first snapshot and never reused. 0 in the epoch before
    /// that, which is the same for all volumes.
    pub volume: u32,
    /// Number of epochs of the volume that have ended.
    pub count: u32,
}

impl Epoch {
    /// Greater than every epoch.
    pub const MAX: Self = Self { volume: u32::MAX, count: u32::MAX };

    /// Epoch number `count` of a volume.
    #[must_use]
    pub const fn new(volume: u32, count: u32) -> Self {
        Self { volume, count }
    }

    /// The preceding value; `None` for the epoch before the first snapshot.
    #[must_use]
    pub fn before(self) -> Option<Self> {
        match self.count.checked_sub(1) {
            Some(count) => Some(Self { count, ..self }),
            None => Some(Self::new(self.volume.checked_sub(1)?, u32::MAX)),
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.volume, self.count)
    }
}
