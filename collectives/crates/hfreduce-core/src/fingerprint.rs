//! Fingerprint of an operation: what all ranks must agree on, in 24 bytes that are sent with every
//! frame.

use super::determinism::Determinism;
use super::kind::Kind;

/// Length of an encoded fingerprint.
pub const FINGERPRINT_BYTES: usize = 24;

/// What all ranks must agree on about one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The kind of operation.
    pub kind: Kind,
    /// Code of the element type.
    pub dtype: u8,
    /// Bytes of one element.
    pub element_bytes: u8,
    /// Code of the reduction operator; 0 if the operation does not reduce.
    pub op: u8,
    /// The root; 0 if the operation has none.
    pub root: u32,
    /// Elements of one block; 0 where ranks may differ.
    pub count: u64,
    /// Digest of the array sizes of a fused call; 0 for a single buffer.
    pub shape: u64,
    /// Determinism modes beyond the default.
    pub modes: Determinism,
}

/// The reduction operator and the modes share a byte.
const MODES_AT: u32 = 6;

impl Fingerprint {
    /// Bytes of the counted elements: of a buffer, or of one rank's block.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.count.saturating_mul(u64::from(self.element_bytes))
    }

    /// Encodes the fingerprint.
    #[inline]
    pub fn encode(&self) -> [u8; FINGERPRINT_BYTES] {
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The encoded bytes as little-endian words.
    #[inline]
    pub fn words(&self) -> [u64; FINGERPRINT_BYTES / 8] {
        let op = self.op | self.modes.code() << MODES_AT;
        let what = u32::from_le_bytes([self.kind as u8, self.dtype, self.element_bytes, op]);
        [u64::from(what) | u64::from(self.root) << 32, self.count, self.shape]
    }

    /// Decodes a fingerprint; `None` for an unknown kind.
    pub fn decode(bytes: &[u8; FINGERPRINT_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Some(Self {
            kind: Kind::from_code(bytes[0])?,
            dtype: bytes[1],
            element_bytes: bytes[2],
            op: bytes[3] & ((1 << MODES_AT) - 1),
            modes: Determinism::from_code(bytes[3] >> MODES_AT),
            root: (word(0) >> 32) as u32,
            count: word(8),
            shape: word(16),
        })
    }

    /// Describes everything that ranks can disagree on, for messages.
    pub fn describe(&self) -> String {
        let dtype = crate::DType::from_code(self.dtype).map_or("?", |d| d.name());
        let op = crate::ReduceOp::from_code(self.op).map_or("?", |o| o.name());
        let name = self.kind.name();
        let fused = if self.shape == 0 { "" } else { ", fused" };
        let modes = match self.modes.code() {
            0 => String::new(),
            _ => format!(", {}", self.modes),
        };
        match self.kind {
            Kind::Allreduce | Kind::ReduceScatter => {
                format!("{name}({} × {dtype}, {op}{modes}{fused})", self.count)
            }
            Kind::Reduce => {
                format!("{name}({} × {dtype}, {op}{modes}, root {})", self.count, self.root)
            }
            Kind::Broadcast | Kind::Gather | Kind::Scatter => {
                format!("{name}({} × {dtype}, root {})", self.count, self.root)
            }
            Kind::Allgather | Kind::Send | Kind::Recv => {
                format!("{name}({} × {dtype})", self.count)
            }
            Kind::Alltoall if self.count > 0 => {
                format!("{name}({} × {dtype} between these two)", self.count)
            }
            Kind::Alltoall => format!("{name}({dtype})"),
            Kind::Barrier => format!("{name}()"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_survives_its_encoding() {
        for kind in Kind::ALL {
            let fingerprint = Fingerprint {
                kind,
                dtype: 1,
                element_bytes: 2,
                op: 4,
                root: 0xdead_beef,
                count: u64::MAX - 3,
                shape: 17,
                modes: Determinism::from_code(kind as u8),
            };
            assert_eq!(Fingerprint::decode(&fingerprint.encode()), Some(fingerprint));
            assert_eq!(fingerprint.words().map(u64::to_le_bytes).concat(), fingerprint.encode());
        }
        assert_eq!(Fingerprint::decode(&[255; FINGERPRINT_BYTES]), None);
    }
}
