//! How the ranks of a group find each other where there is no store of torch's.
//!
//! [`Meeting`] is one primitive: everybody brings a value, everybody leaves with all of them. Rank 0
//! listens at the group's address; only who holds the key is heard. Every wait has a deadline, and
//! who did not come is named on every rank. [`Settings`] says where and as whom (from the
//! environment, or given one by one), [`Settings::join`] goes there and connects.
//!
//! The Python package speaks the same words at a meeting: ranks of both can be in one group.

mod bundle;
mod join;
mod meeting;
mod settings;
mod topology;
pub mod variables;
mod wire;

pub use bundle::{BundleError, blob_bytes_max, pack, unpack};
pub use join::JoinError;
pub use meeting::{Meeting, MeetingError, Who};
pub use settings::Settings;
pub use topology::{Place, Topology, TopologyError};
pub use variables::SettingError;
pub use wire::{PHASE_BYTES_MAX, VALUE_BYTES_MAX};
