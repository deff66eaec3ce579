//! The engine of one rank: it moves the data of collective operations as the core decides.
//!
//! ```text
//! endpoint ── connects ranks ──▶ communicator ── submits ──▶ driver ── segments ──▶ hfreduce-shm
//!                                                              │ ╰── frames ──▶ hfreduce-transport
//!                                      chunks, credits, failures: hfreduce-core
//! ```
//! [`hfreduce_core`] decides which chunk is reduced, sent and published, in which order, and which
//! rank caused a failure; it has no clock, socket, thread or payload byte. The [`driver`] moves bytes
//! as it decides. Nothing depends on the order of arrival, and every wait has a deadline.
//!
//! `docs/internals/allreduce-path.md` follows an allreduce through these modules.

pub mod communicator;
#[doc(hidden)]
pub mod driver;
pub mod endpoint;
mod fork_guard;
pub mod member;
pub mod operation;
#[doc(hidden)]
pub mod priority;
pub mod share;
#[doc(hidden)]
pub mod work;

pub use communicator::{Call, Communicator, WaitError, Work};
pub use endpoint::{
    Endpoint, Newcomer, Options, STREAMS_MAX, TransportKind, check_descriptors, descriptors_needed,
};
pub use fabric::arena::Block;
pub use hfreduce_core::kind::Kind;
pub use hfreduce_core::{
    AbortReason, CollectiveError, DType, Determinism, ErrorKind, Placement, ReduceOp, fused_shape,
};
pub use hfreduce_shm::flight;
pub use hfreduce_shm::watermarks::Watermarks;
pub use member::Member;
pub use operation::{Buffer, Operation};
pub use priority::{NoPriority, Priority};
pub use share::Share;
pub use work::Callback;
