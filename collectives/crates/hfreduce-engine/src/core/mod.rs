//! The pure core: which chunk is reduced, sent and published when, and who is to blame.
//!
//! Rules of these files: no clock, socket, thread, randomness or payload byte. Time arrives as a
//! number, payload is named by slot, and everything to be done is returned as an [`Action`].
//!
//! - [`determinism`]: what is promised about bits.
//! - [`geometry`]: an operation cut into chunks; a pure function of its fingerprint.
//! - [`flow`]: from where to where a chunk travels in a tree, seen from one node.
//! - [`credit`]: windows between two nodes.
//! - [`tree`]: the state machine of one node over all of them.
//! - [`pair`]: messages between two ranks.
//! - [`liveness`]: who has been silent for too long.
//! - [`reconfigure`]: how those who go on after a failure agree on who they are.
//!
//! Invariants: partial sums are combined in one order (own, then the neighbours as the plan lists
//! them), never in the order of arrival; the last credit of a window belongs to its oldest chunk,
//! so the oldest chunk of all can always move; after the first failure nothing is touched any more.

mod action;
pub mod credit;
pub mod determinism;
pub mod fingerprint;
pub mod flow;
pub mod geometry;
pub mod liveness;
pub mod pair;
pub mod reconfigure;
pub mod tree;

/// Collective operations that a rank has started and that it or another rank of its node has not
/// ended. Later ones are held back: with more, no more bytes would be under way (segment slots and
/// credits are far fewer), only more fingerprints would have to be kept.
pub const OUTSTANDING_MAX: usize = 512;

pub use determinism::Determinism;
pub use fingerprint::{FINGERPRINT_BYTES, Fingerprint, Kind};
pub use flow::{Flow, Flows};
pub use geometry::{Chunk, Geometry, Ranks};
pub use tree::{Action, DataHead, Place, Stage, TreeCore};

#[cfg(test)]
mod fuzz_test;
#[cfg(test)]
mod pair_test;
#[cfg(test)]
mod reconfigure_test;
