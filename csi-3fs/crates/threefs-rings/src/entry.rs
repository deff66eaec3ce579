//! Encoding of ring entries: fixed sizes, little endian.

/// Bytes of a submission.
pub const SUBMISSION_BYTES: usize = 40;
/// Bytes of a completion.
pub const COMPLETION_BYTES: usize = 16;

/// One I/O, as the caller requests it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submission {
    /// Index by which the caller recognizes the completion; below the ring's number of entries.
    pub slot: u32,
    /// Number of the registered memory.
    pub region: u32,
    /// Number of the registered file.
    pub file: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Offset in the memory.
    pub memory_offset: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Bytes to read or write.
    pub length: u64,
}

impl Submission {
    /// Bytes of the submission in the ring.
    pub fn encode(&self) -> [u8; SUBMISSION_BYTES] {
        let mut bytes = [0; SUBMISSION_BYTES];
        for (at, value) in [(0, self.slot), (4, self.region), (8, self.file), (12, self.reserved)] {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (at, value) in [(16, self.memory_offset), (24, self.file_offset), (32, self.length)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// The submission of these bytes; any bytes are a submission, which [`crate::check`] validates.
    pub fn decode(bytes: &[u8; SUBMISSION_BYTES]) -> Self {
        Self {
            slot: word(bytes, 0),
            region: word(bytes, 4),
            file: word(bytes, 8),
            reserved: word(bytes, 12),
            memory_offset: long(bytes, 16),
            file_offset: long(bytes, 24),
            length: long(bytes, 32),
        }
    }
}

/// Result of one I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The submission's slot.
    pub slot: u32,
    /// Bytes that were read or written, or a negative errno.
    pub result: i64,
}

impl Completion {
    /// Bytes of the completion in the ring.
    pub fn encode(&self) -> [u8; COMPLETION_BYTES] {
        let mut bytes = [0; COMPLETION_BYTES];
        bytes[..4].copy_from_slice(&self.slot.to_le_bytes());
        bytes[8..].copy_from_slice(&self.result.to_le_bytes());
        bytes
    }

    /// The completion of these bytes.
    pub fn decode(bytes: &[u8; COMPLETION_BYTES]) -> Self {
        Self { slot: word(bytes, 0), result: long(bytes, 8) as i64 }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
