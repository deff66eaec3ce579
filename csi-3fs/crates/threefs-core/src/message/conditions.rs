//! Conditions of updates.

use serde::{Deserialize, Serialize};

use crate::ids::{ChunkVersion, InodeId};

/// The volume of a file, as an update of it names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamedVolume {
    /// It is not named: clients of earlier releases, and clients that know of no fence.
    #[default]
    Unnamed,
    /// The file counts for no quota.
    NoVolume,
    /// The directory with the quota.
    Volume(InodeId),
}

impl From<Option<InodeId>> for NamedVolume {
    fn from(volume: Option<InodeId>) -> Self {
        volume.map_or(Self::NoVolume, Self::Volume)
    }
}

/// Conditions under which an update is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateConditions {
    /// The epoch in its chunk id has not ended in this volume.
    pub volume: NamedVolume,
    /// This is the committed version of the chunk.
    pub at: Option<ChunkVersion>,
}

impl UpdateConditions {
    /// Only the committed version of the chunk.
    #[must_use]
    pub fn at(version: ChunkVersion) -> Self {
        Self { at: Some(version), ..Self::default() }
    }
}
