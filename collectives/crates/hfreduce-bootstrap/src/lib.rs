//! Rendezvous of the ranks of a group without torch's store.
//!
//! [`Meeting`] is an allgather of one value per rank. Rank 0 listens at the group's address and
//! accepts only ranks that hold the key. Every wait has a deadline, and absent ranks are named on
//! every rank. [`Settings`] has the address and the identity of the rank (from the environment, or
//! set one by one); [`Settings::join`] meets the other ranks and connects.
//!
//! The Python package uses the same protocol: ranks of both can be in one group.

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
