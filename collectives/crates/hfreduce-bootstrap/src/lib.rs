//! How the ranks of a group find each other where there is no store of torch's.
//!
//! [`Meeting`] is one primitive: everybody brings a value, everybody leaves with all of them. Rank 0
//! listens at the group's address; only who holds the key is heard. Every wait has a deadline, and
//! who did not come is named on every rank.

mod meeting;
mod wire;

pub use meeting::{Meeting, MeetingError, Who};
pub use wire::{PHASE_BYTES_MAX, VALUE_BYTES_MAX};
