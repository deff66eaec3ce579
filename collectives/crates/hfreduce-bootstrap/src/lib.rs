//! Joining a group: how its ranks find each other and connect.
//!
//! [`Settings`] has the address and the identity of the rank (from the environment, or set one by
//! one). [`Settings::join`] meets the other ranks and connects; [`Settings::join_through`] does so
//! through any [`Rendezvous`], an allgather of small values. [`Meeting`] is the one without torch's
//! store: rank 0 listens at the group's address and accepts only ranks that hold the key. Every wait
//! has a deadline, and absent ranks are named on every rank.
//!
//! The Python package joins in the same way: ranks of both can be in one group.

mod bundle;
mod error;
mod join;
mod meeting;
mod membership;
mod phases;
mod rendezvous;
mod settings;
mod topology;
pub mod variables;
mod wire;
mod world;

pub use bundle::{BundleError, blob_bytes_max, pack, unpack};
pub use error::{Disagreement, JoinError};
pub use join::Joined;
pub use meeting::{Meeting, MeetingError, Who};
pub use membership::Membership;
pub use rendezvous::{Exchanged, Rendezvous};
pub use settings::Settings;
pub use topology::{Place, Topology, TopologyError};
pub use variables::SettingError;
pub use wire::{PHASE_BYTES_MAX, VALUE_BYTES_MAX};
