//! Pure state machines of the collective engine: which chunk is reduced, sent and published when,
//! and which rank caused a failure.
//!
//! The modules use no clock, socket, thread, randomness or payload byte. Time is passed in as a
//! number, payload is identified by slot, and everything to be done is returned as an [`Action`].
//!
//! - [`kind`], [`fingerprint`], [`determinism`]: what ranks agree on about an operation.
//! - [`geometry`]: how an operation is split into chunks.
//! - [`flow`]: the route of a chunk through a tree, as seen from one node.
//! - [`credit`]: flow control between two nodes.
//! - [`tree`]: the state machine of one node for reductions along the trees.
//! - [`matching`]: point-to-point messages between two ranks.
//! - [`liveness`]: failure detection by silence.
//! - [`reconfigure`]: agreement on the members of the next epoch.
//! - [`placement`], [`error`]: ranks on nodes; errors.
//!
//! Invariants: partial sums are combined in one order (local, then the neighbors as the plan lists
//! them), never in the order of arrival; the last credit of a window belongs to its oldest chunk,
//! so the oldest of all chunks can always make progress; after the first failure no buffer is
//! accessed.

mod action;
pub mod credit;
pub mod determinism;
pub mod error;
pub mod fingerprint;
pub mod flow;
pub mod geometry;
pub mod kind;
pub mod liveness;
pub mod matching;
pub mod placement;
pub mod reconfigure;
mod reduce_op;
pub mod tree;

/// Maximum number of collective operations that a rank has started and that it, or another rank of
/// its node, has not finished. Later ones are held back: more would not put more bytes in flight
/// (slots and credits are far fewer), they would only require more fingerprints.
pub const OUTSTANDING_MAX: usize = 512;

pub use determinism::Determinism;
pub use error::{AbortReason, CollectiveError, ErrorKind};
pub use fingerprint::{FINGERPRINT_BYTES, Fingerprint};
pub use flow::{Flow, Flows, Stage};
pub use geometry::{Chunk, Geometry, Ranks};
pub use hfreduce_kernels::Dtype as DType;
pub use kind::Kind;
pub use placement::Placement;
pub use reduce_op::{ReduceOp, fused_shape};
pub use tree::{Action, DataHead, Place, TreeCore};

#[cfg(test)]
mod fuzz_test;
#[cfg(test)]
mod matching_test;
#[cfg(test)]
mod reconfigure_test;
