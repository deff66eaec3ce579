//! Rows of lock sessions.

use serde::{Deserialize, Serialize};
use threefs_core::ids::InodeId;

/// The lock session of a client. Its locks end with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockSessionRow {
    /// Number that the client has chosen.
    pub session: u64,
    /// Counts renewals.
    pub renewal: u64,
    /// It has ended; its locks are being released.
    pub ended: bool,
    /// The volume whose counter its rows count for.
    pub volume: InodeId,
}
