//! The collective engine: a pure core and its drivers.
//!
//! ```text
//! endpoint ── connects ranks ──▶ communicator ── submits ──▶ drivers::progress
//!                                                              │  ▲
//!                          chunks, credits, failure:  core ◀───┘  │ bytes: drivers::{board, link, mesh}
//! ```
//! [`core`] decides what is reduced, sent and published, in which order, and who is to blame; it
//! knows no clock, socket, thread or byte of payload. The drivers move bytes and ask it.
//! Absent on purpose: anything that depends on the order of arrival, and any wait without an end.

mod atomics;
pub mod board;
pub mod cause;
pub mod communicator;
pub mod core;
pub mod daemon;
mod drivers;
pub mod endpoint;
pub mod flight;
mod line;
pub mod operation;
pub mod pace;
pub mod placement;
mod process;
mod share;
mod work;

pub use cause::{Cause, CauseKind, CollectiveError};
pub use communicator::{Communicator, WaitError, Work};
pub use core::Determinism;
pub use drivers::priority::Priority;
pub use drivers::wire;
pub use endpoint::{
    Carrier, Endpoint, Member, Newcomer, Options, STREAMS_MAX, check_descriptors,
    descriptors_needed,
};
pub use fabric::arena::Block;
pub use operation::{Buffer, DType, Kind, Operation, ReduceOp, fused_shape};
pub use pace::Pace;
pub use placement::Placement;
pub use share::Share;
pub use work::Callback;
