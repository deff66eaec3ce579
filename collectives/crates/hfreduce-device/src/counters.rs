//! Counters of a device.

use std::sync::atomic::AtomicU64;

/// Counters of a device.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes copied from the GPU.
    pub down_bytes: AtomicU64,
    /// Bytes copied to the GPU.
    pub up_bytes: AtomicU64,
    /// Of these, the bytes that the processor copied with GDRCopy.
    pub by_processor_bytes: AtomicU64,
    /// Number of pauses of the worker while it waited for a copy.
    pub pauses: AtomicU64,
}
