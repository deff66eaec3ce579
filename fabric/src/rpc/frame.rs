//! Fixed-size frame header: encoding and decoding. Pure.
//!
//! ```text
//!  0 magic "FFR1"      4 version   5 kind   6 class  7 zero  8 request id (8)
//! 16 message bytes (4)  20 payload bytes (4)  24 time in ms (4)  28 crc32c of the message (4)
//! 32 crc32c of bytes 0..32
//! ```
//! All numbers are little endian. The payload has no checksum: a sender of file data also sends the
//! checksum of the data, which outlives the connection.

const MAGIC: [u8; 4] = *b"FFR1";
/// An older caller uses neither classes (it sends zero, the first class) nor offers: its requests
/// are served as memory allows.
const VERSION: u8 = 1;

/// Length of every frame's header.
pub const HEADER_BYTES: usize = 36;

/// Frame limits of one side. Checked before memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum length of a message.
    pub message_bytes_max: usize,
    /// Maximum length of a payload.
    pub payload_bytes_max: usize,
}

impl Default for Limits {
    /// A message of 4 MiB holds a routing table of tens of thousands of chains; a payload of
    /// 64 MiB is the largest file chunk.
    fn default() -> Self {
        Self { message_bytes_max: 4 << 20, payload_bytes_max: (64 << 20) + 4096 }
    }
}

/// Type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A call. Time: how long the caller waits.
    Request = 1,
    /// A reply. Time: the server's clock of this connection (`not_after`), 0 if it has none.
    Reply = 2,
    /// An encoded `Fault` instead of a reply. Time: as for a reply.
    Fault = 3,
    /// A guarded call: must be started before the server's clock of this connection reaches its
    /// time.
    NotAfter = 4,
    /// Request-to-send: announces the lengths of a request that is too large to be sent without a
    /// grant. Header only. Time: as for a request.
    Offer = 5,
    /// Clear-to-send: the server has reserved memory for an offered request. Header only.
    Grant = 6,
    /// The caller timed out before it used its grant. Header only.
    Decline = 7,
}

impl Kind {
    /// True if message and payload follow the header; otherwise the lengths only announce them.
    pub(super) fn has_body(self) -> bool {
        !matches!(self, Self::Offer | Self::Grant | Self::Decline)
    }
}

/// Fields of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    /// The server's budget that the call counts against (`budget`).
    pub class: u8,
    pub request_id: u64,
    pub message_bytes: usize,
    pub payload_bytes: usize,
    /// The meaning depends on the kind.
    pub time_ms: u32,
    pub message_crc: u32,
}

/// Reason why a header is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("not a frame: the first bytes are {first:02x?}")]
    Garbage { first: [u8; 4] },
    #[error("frame version {version}, this side speaks {VERSION}")]
    Version { version: u8 },
    #[error("unknown frame kind {kind}")]
    Kind { kind: u8 },
    #[error("the header's checksum is {found:08x}, not {expected:08x}")]
    HeaderChecksum { found: u32, expected: u32 },
    #[error("the message's checksum is {found:08x}, not {expected:08x}")]
    MessageChecksum { found: u32, expected: u32 },
    #[error("{part} of {bytes} bytes exceeds the limit of {bytes_max}")]
    TooLarge { part: &'static str, bytes: usize, bytes_max: usize },
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[6] = self.class;
        bytes[8..16].copy_from_slice(&self.request_id.to_le_bytes());
        // Both lengths were checked against `Limits`, which are far below 4 GiB.
        bytes[16..20].copy_from_slice(&(self.message_bytes as u32).to_le_bytes());
        bytes[20..24].copy_from_slice(&(self.payload_bytes as u32).to_le_bytes());
        bytes[24..28].copy_from_slice(&self.time_ms.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.message_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..32]);
        bytes[32..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, FrameError> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[..4] != MAGIC {
            return Err(FrameError::Garbage { first: [bytes[0], bytes[1], bytes[2], bytes[3]] });
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version { version: bytes[4] });
        }
        let (found, expected) = (word(32), crc32c::crc32c(&bytes[..32]));
        if found != expected {
            return Err(FrameError::HeaderChecksum { found, expected });
        }
        let kind = match bytes[5] {
            1 => Kind::Request,
            2 => Kind::Reply,
            3 => Kind::Fault,
            4 => Kind::NotAfter,
            5 => Kind::Offer,
            6 => Kind::Grant,
            7 => Kind::Decline,
            kind => return Err(FrameError::Kind { kind }),
        };
        let header = Self {
            kind,
            class: bytes[6],
            request_id: u64::from(word(8)) | u64::from(word(12)) << 32,
            message_bytes: word(16) as usize,
            payload_bytes: word(20) as usize,
            time_ms: word(24),
            message_crc: word(28),
        };
        header.within(limits)?;
        Ok(header)
    }

    pub(super) fn within(&self, limits: &Limits) -> Result<(), FrameError> {
        for (part, bytes, bytes_max) in [
            ("message", self.message_bytes, limits.message_bytes_max),
            ("payload", self.payload_bytes, limits.payload_bytes_max),
        ] {
            if bytes > bytes_max {
                return Err(FrameError::TooLarge { part, bytes, bytes_max });
            }
        }
        Ok(())
    }

    pub(super) fn check_message(&self, message: &[u8]) -> Result<(), FrameError> {
        let expected = crc32c::crc32c(message);
        if self.message_crc == expected {
            return Ok(());
        }
        Err(FrameError::MessageChecksum { found: self.message_crc, expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            kind: Kind::Request,
            class: 3,
            request_id: 0x0102_0304_0506_0708,
            message_bytes: 10,
            payload_bytes: 20,
            time_ms: 30,
            message_crc: 40,
        }
    }

    #[test]
    fn a_header_survives_a_round_trip() {
        assert_eq!(Header::decode(&header().encode(), &Limits::default()), Ok(header()));
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes, &Limits::default()).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_length_over_the_bound_is_refused() {
        let limits = Limits { message_bytes_max: 9, payload_bytes_max: 20 };
        assert_eq!(
            Header::decode(&header().encode(), &limits),
            Err(FrameError::TooLarge { part: "message", bytes: 10, bytes_max: 9 })
        );
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut all = [0; HEADER_BYTES];
            all[..32].copy_from_slice(&bytes);
            prop_assert!(Header::decode(&all, &Limits::default()).is_err());
        }
    }
}
