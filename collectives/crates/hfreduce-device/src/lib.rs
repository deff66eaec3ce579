//! GPU memory for the collective engine: copied by the copy engines, chunk by chunk.
//!
//! ```text
//! caller's stream ─event─▶ D2H stream ─▶ pinned block ─▶ engine ─▶ pinned block ─▶ H2D stream
//!                             (copies)      arrived ▲       ▼ delivered    (copies)
//!                                            └──── worker: one thread per device ────┘
//! ```
//! - [`cuda`]: the driver API, loaded at the first use; a missing GPU is not an error.
//! - [`gdr`], `windows`: small copies, which the processor makes itself if GDRCopy is available.
//! - `context`, `arena`, `numa`: the device, its pinned memory and its NUMA placement.
//! - `cursor`: the next bytes to copy (pure). `job`: one operation. `worker`: the thread.
//! - [`device`]: the public interface.
//!
//! Deliberately absent: kernels (the list of functions contains no launch), link-time dependencies, and
//! unbounded waits. A block and the caller's memory are reserved for the copies until these are known to have
//! ended, however the operation itself ended.

mod arena;
mod context;
mod counters;
pub mod cuda;
mod cursor;
pub mod device;
mod error;
pub mod gdr;
mod handle;
mod job;
mod memory;
pub mod numa;
mod settled;
pub mod windows;
mod worker;

pub use counters::Counters;
pub use cuda::Cuda;
pub use device::{Device, Settings};
pub use error::DeviceError;
pub use handle::DeviceWork;
pub use memory::Range;
