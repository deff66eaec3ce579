//! Pace of a scrub: pauses between its reads.

use std::time::Duration;

/// A read counts for at least this many bytes: small chunks cost a seek.
const READ_BYTES_MIN: u64 = 64 << 10;
/// Factor of the pause while clients use the node.
const BUSY_FACTOR: u32 = 4;

/// Limits of a scrub.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Maximum rate of a node, over all its targets.
    pub bytes_per_second: u64,
}

impl Pace {
    /// The pause after a read of `bytes` that took `duration`: the reads stay below the rate, use
    /// the disk for at most half of the time, and a quarter of that while it is `busy`.
    #[must_use]
    pub fn pause(&self, bytes: u64, duration: Duration, busy: bool) -> Duration {
        let cost = bytes.max(READ_BYTES_MIN) as f64 / self.bytes_per_second.max(1) as f64;
        let due = Duration::try_from_secs_f64(cost).unwrap_or(Duration::MAX);
        let factor = if busy { BUSY_FACTOR } else { 1 };
        let cycle = due.max(duration.saturating_mul(2)).saturating_mul(factor);
        cycle.saturating_sub(duration)
    }
}
