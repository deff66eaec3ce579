//! CRC32C (Castagnoli) of bytes, and of two byte strings joined.

use serde::{Deserialize, Serialize};

/// CRC32C of some bytes. The checksum of nothing is 0.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Checksum(pub u32);

impl Checksum {
    /// The checksum of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(crc32c::crc32c(bytes))
    }

    /// The checksum of `a` followed by `b`, where `self` belongs to `a` and `other` to `b`.
    #[must_use]
    pub fn followed_by(self, other: Self, other_bytes: usize) -> Self {
        Self(crc32c::crc32c_combine(self.0, other.0, other_bytes))
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_vector_and_joining() {
        assert_eq!(Checksum::of(b"123456789"), Checksum(0xe306_9283));
        assert_eq!(Checksum::of(b""), Checksum(0));
        assert_eq!(
            Checksum::of(b"12345").followed_by(Checksum::of(b"6789"), 4),
            Checksum::of(b"123456789")
        );
        assert_eq!(Checksum::of(b"12").followed_by(Checksum::of(b""), 0), Checksum::of(b"12"));
    }
}
