//! The collective engine: a pure core and its drivers.
//!
//! ```text
//! endpoint ── connects ranks ──▶ communicator ── submits ──▶ drivers::progress
//!                                                              │  ▲
//!                          chunks, credits, failure:  core ◀───┘  │ bytes: drivers::{segment, link, p2p}
//! ```
//! [`core`] decides what is reduced, sent and published, in which order, and who is to blame; it
//! knows no clock, socket, thread or byte of payload. The drivers move bytes and ask it.
//! Absent on purpose: anything that depends on the order of arrival, and any wait without an end.

mod atomics;
pub mod communicator;
pub mod core;
pub mod daemon;
mod driver;
pub mod endpoint;
pub mod error;
pub mod flight;
mod fork_guard;
mod message_socket;
pub mod operation;
pub mod placement;
mod share;
pub mod shm;
pub mod watermarks;
mod work;

pub use communicator::{Communicator, WaitError, Work};
pub use core::Determinism;
pub use driver::priority::Priority;
pub use driver::wire;
pub use endpoint::{
    Endpoint, Member, Newcomer, Options, STREAMS_MAX, TransportKind, check_descriptors,
    descriptors_needed,
};
pub use error::{AbortReason, CollectiveError, ErrorKind};
pub use fabric::arena::Block;
pub use operation::{Buffer, DType, Kind, Operation, ReduceOp, fused_shape};
pub use placement::Placement;
pub use share::Share;
pub use watermarks::Watermarks;
pub use work::Callback;
