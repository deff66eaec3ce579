//! Memory of GPUs for the collective engine: brought and taken by the copy engines, chunk by chunk.
//!
//! ```text
//! caller's stream ─event─▶ D2H stream ─▶ pinned block ─▶ engine ─▶ pinned block ─▶ H2D stream
//!                             (copies)      arrived ▲       ▼ delivered    (copies)
//!                                            └──── worker: one thread per device ────┘
//! ```
//! - [`cuda`]: the driver API, loaded when first asked for; no GPU is a state, not a fault.
//! - [`gdr`], `windows`: small copies, which the processor makes itself where GDRCopy is there.
//! - `context`, `arena`, `numa`: the device, its pinned memory and where that lies.
//! - `cursor`: which bytes are copied next (pure). `job`: one operation. `worker`: the thread.
//! - [`device`]: what callers use.
//!
//! Absent on purpose: kernels (the list of functions has no launch in it), link-time dependencies,
//! and any wait without an end. A block and the caller's memory belong to the copies until these are
//! known to have ended, however the operation itself ended.

mod arena;
mod context;
pub mod cuda;
mod cursor;
pub mod device;
mod error;
pub mod gdr;
mod handle;
mod job;
pub mod numa;
mod settled;
pub mod windows;
mod worker;

pub use cuda::Cuda;
pub use device::{Counters, Device, Memory, Range, Settings};
pub use error::DeviceError;
pub use handle::DeviceWork;
