//! Joining a group: how its ranks find each other and connect.
//!
//! [`Settings`] has the address and the identity of the rank (from the environment, or set one by
//! one). [`Settings::join`] exchanges endpoints with the other ranks and connects;
//! [`Settings::join_through`] does so through any [`Rendezvous`], an allgather of small values.
//! [`TcpRendezvous`] needs no store of torch: rank 0 listens at the group's address and accepts only
//! ranks that hold the key. Every wait has a deadline, and absent ranks are named on every rank.
//!
//! The Python package joins in the same way: ranks of both can be in one group.

mod bundle;
mod error;
mod join;
mod membership;
mod phases;
mod rendezvous;
mod settings;
mod tcp_rendezvous;
mod topology;
pub mod variables;
mod wire;
mod world;

pub use bundle::{BundleError, blob_bytes_max, pack, unpack};
pub use error::{Disagreement, JoinError};
pub use join::Joined;
pub use membership::Membership;
pub use rendezvous::{Exchanged, Rendezvous};
pub use settings::Settings;
pub use tcp_rendezvous::{RankIdentity, TcpRendezvous, TcpRendezvousError};
pub use topology::{Place, Topology, TopologyError};
pub use variables::SettingError;
pub use wire::{PHASE_BYTES_MAX, VALUE_BYTES_MAX};
