//! Members of the next epoch, as a caller lists them.

use serde::{Deserialize, Serialize};

/// A member of the next epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Member {
    /// A rank of the present epoch.
    Rank(u32),
    /// A newcomer, by its [`Newcomer::info`](crate::Newcomer::info).
    Newcomer(Vec<u8>),
}
