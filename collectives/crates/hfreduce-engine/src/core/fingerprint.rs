//! What every rank must agree on about one operation, in 24 bytes that travel with every frame.

use super::determinism::Determinism;

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Everybody's sum to everybody.
    Allreduce = 0,
    /// The root's buffer to everybody.
    Broadcast = 1,
    /// Everybody's sum to the root.
    Reduce = 2,
    /// Everybody's block to everybody.
    Allgather = 3,
    /// Block r of everybody's sum to rank r.
    ReduceScatter = 4,
    /// Nobody leaves before everybody came.
    Barrier = 5,
    /// Everybody's block to the root.
    Gather = 6,
    /// Block r of the root's buffer to rank r.
    Scatter = 7,
    /// Block s of rank r to rank s.
    Alltoall = 8,
    /// One rank to another.
    Send = 9,
    /// The other side of it.
    Recv = 10,
}

impl Kind {
    /// Every kind, by number.
    pub const ALL: [Kind; 11] = [
        Kind::Allreduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Allgather,
        Kind::ReduceScatter,
        Kind::Barrier,
        Kind::Gather,
        Kind::Scatter,
        Kind::Alltoall,
        Kind::Send,
        Kind::Recv,
    ];

    /// Its name as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Allreduce => "allreduce",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::Allgather => "allgather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::Barrier => "barrier",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::Alltoall => "alltoall",
            Kind::Send => "send",
            Kind::Recv => "recv",
        }
    }

    /// True for the operations that combine values.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::Allreduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// True for the operations that travel along the trees; the others use direct connections.
    pub fn uses_trees(self) -> bool {
        (self as u8) <= Kind::Barrier as u8
    }
}

/// Length of an encoded fingerprint.
pub const FINGERPRINT_BYTES: usize = 24;

/// What every rank must agree on about one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Which operation.
    pub kind: Kind,
    /// The element type's number.
    pub dtype: u8,
    /// Bytes of one element.
    pub element_bytes: u8,
    /// The reduction's number (0 where nothing is reduced).
    pub op: u8,
    /// The root (0 where there is none).
    pub root: u32,
    /// Elements of one block (0 where ranks may differ).
    pub count: u64,
    /// A digest of the list of sizes of a fused call (0 for one buffer).
    pub shape: u64,
    /// What is promised about its bits, beyond the default.
    pub modes: Determinism,
}

/// The reduction's number and the modes share a byte.
const MODES_AT: u32 = 6;

impl Fingerprint {
    /// The bytes of what it counts: of a buffer, or of one rank's block where there are several.
    pub fn size_bytes(&self) -> u64 {
        self.count.saturating_mul(u64::from(self.element_bytes))
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; FINGERPRINT_BYTES] {
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The same bytes as little-endian words.
    pub fn words(&self) -> [u64; FINGERPRINT_BYTES / 8] {
        let op = self.op | self.modes.code() << MODES_AT;
        let what = u32::from_le_bytes([self.kind as u8, self.dtype, self.element_bytes, op]);
        [u64::from(what) | u64::from(self.root) << 32, self.count, self.shape]
    }

    /// From bytes; `None` for a kind that does not exist.
    pub fn decode(bytes: &[u8; FINGERPRINT_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Some(Self {
            kind: *Kind::ALL.get(usize::from(bytes[0]))?,
            dtype: bytes[1],
            element_bytes: bytes[2],
            op: bytes[3] & ((1 << MODES_AT) - 1),
            modes: Determinism::from_code(bytes[3] >> MODES_AT),
            root: (word(0) >> 32) as u32,
            count: word(8),
            shape: word(16),
        })
    }

    /// For messages: everything that can disagree.
    pub fn describe(&self) -> String {
        let dtype = crate::operation::DType::from_code(self.dtype).map_or("?", |d| d.name());
        let op = crate::operation::ReduceOp::from_code(self.op).map_or("?", |o| o.name());
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
