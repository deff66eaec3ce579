//! Wire format of frames between ranks: a head of 64 bytes and a payload whose length is checked
//! first.
//!
//! ```text
//!  0 magic "HFR1"   4 kind   5 tree   6 stage   7 acked
//!  8 sequence       16 chunk            20 payload bytes
//! 24 fingerprint                        48 credits   52 waiting for rank + 1   56 tag
//! ```
//! A mapped payload does not follow: it is in the sender's segment, at offset `tag` - 1, and the
//! receiver returns in `acked` the number of such payloads that it has copied, in their order. For
//! a piece of a message between ranks of one node, `tag` - 1 is the sender's message slot.

use hfreduce_core::FINGERPRINT_BYTES;
use hfreduce_core::credit::CLASSES;
use hfreduce_core::error::REASON_BYTES_MAX;
use hfreduce_core::matching::EAGER_BYTES_MAX;
use hfreduce_core::{DataHead, Determinism, Fingerprint, Kind, Stage};

/// Size of a head.
pub const HEAD_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"HFR1";
/// Maximum size of a piece of a message between two ranks.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A chunk that travels through a tree.
    Data(DataHead),
    /// Credits only.
    Credit,
    /// Heartbeat: the oldest operation in progress at the sender (none: `u64::MAX`) and the rank
    /// that it waits for.
    Heartbeat {
        /// Its sequence number.
        sequence: u64,
        /// Its fingerprint.
        fingerprint: Fingerprint,
        /// The rank that the sender waits for.
        waiting_for: Option<u32>,
    },
    /// The communicator is aborted; the payload is the reason.
    Abort,
    /// The sender closes the communicator.
    Close {
        /// The first operation that it will not start.
        next: u64,
    },
    /// Point-to-point: offers a message. The payload, if any, is the whole message.
    Offer {
        /// The sender's number of the message on this connection.
        message: u64,
        /// The tag that a receive must have.
        tag: u64,
        /// Length of the message.
        bytes: u64,
        /// The sender's fingerprint of the operation.
        fingerprint: Fingerprint,
    },
    /// Point-to-point: requests an offered message.
    Grant {
        /// Number of the message.
        message: u64,
    },
    /// Point-to-point: the next piece of a message.
    Piece {
        /// Number of the message.
        message: u64,
    },
    /// The sender's segment was delivered to the receiver's socket and may be mapped.
    MappingOffer {
        /// The token that was sent with its descriptor.
        token: u64,
    },
    /// The receiver's segment is mapped: from now on it may send offsets instead of payloads.
    MappingReady,
}

/// Head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The frame.
    pub frame: Frame,
    /// Credits returned with it.
    pub credits: [u8; CLASSES],
    /// Number of mapped payloads that the sender of this frame has copied.
    pub acked: u8,
    /// Length of the payload.
    pub payload_bytes: usize,
    /// Offset of the payload in the sender's segment, or its message slot, if the payload does not
    /// follow.
    pub mapped: Option<u64>,
}

const NOTHING: Fingerprint = Fingerprint {
    kind: Kind::Barrier,
    dtype: 0,
    element_bytes: 1,
    op: 0,
    root: 0,
    count: 0,
    shape: 0,
    modes: Determinism::DEFAULT,
};

impl Head {
    /// A head without payload and credits.
    #[inline]
    pub fn bare(frame: Frame) -> Self {
        Self { frame, credits: [0; CLASSES], acked: 0, payload_bytes: 0, mapped: None }
    }

    /// Heartbeat of a rank without operations.
    #[inline]
    pub fn idle() -> Self {
        Self::bare(Frame::Heartbeat { sequence: u64::MAX, fingerprint: NOTHING, waiting_for: None })
    }

    /// Encodes the head.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let kind;
        let (mut tree, mut stage) = (0, 0);
        let (mut sequence, mut chunk, mut waiting, mut tag) = (0_u64, 0_u32, 0_u32, 0_u64);
        let mut fingerprint = NOTHING;
        match self.frame {
            Frame::Data(head) => {
                (kind, tree, stage) = (1, head.tree as u8, head.stage as u8);
                (sequence, chunk, fingerprint) = (head.sequence, head.chunk, head.fingerprint);
                tag = self.mapped.map_or(0, |offset| offset + 1);
            }
            Frame::Credit => kind = 2,
            Frame::Heartbeat { sequence: oldest, fingerprint: what, waiting_for } => {
                (kind, sequence, fingerprint) = (3, oldest, what);
                waiting = waiting_for.map_or(0, |rank| rank + 1);
            }
            Frame::Abort => kind = 4,
            Frame::Close { next } => (kind, sequence) = (5, next),
            Frame::Offer { message, tag: pair, bytes, fingerprint: what } => {
                (kind, sequence, tag, fingerprint) = (6, message, pair, what);
                chunk = (bytes >> 32) as u32;
                waiting = bytes as u32;
            }
            Frame::Grant { message } => (kind, sequence) = (7, message),
            Frame::Piece { message } => {
                (kind, sequence) = (8, message);
                tag = self.mapped.map_or(0, |slot| slot + 1);
            }
            Frame::MappingOffer { token } => (kind, tag) = (9, token),
            Frame::MappingReady => kind = 10,
        }
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&[kind, tree, stage, self.acked]);
        bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&chunk.to_le_bytes());
        bytes[20..24].copy_from_slice(&(self.payload_bytes as u32).to_le_bytes());
        bytes[24..48].copy_from_slice(&fingerprint.encode());
        bytes[48..52].copy_from_slice(&self.credits);
        bytes[52..56].copy_from_slice(&waiting.to_le_bytes());
        bytes[56..].copy_from_slice(&tag.to_le_bytes());
        bytes
    }

    /// Decodes a head; `slot_bytes` bounds the payload of a chunk.
    ///
    /// # Errors
    /// Describes what is invalid.
    pub fn decode(bytes: &[u8; HEAD_BYTES], slot_bytes: usize) -> Result<Self, String> {
        if bytes[..4] != MAGIC {
            return Err(format!("a frame starts with {:02x?}, not with HFR1", &bytes[..4]));
        }
        let mut fingerprint = [0; FINGERPRINT_BYTES];
        fingerprint.copy_from_slice(&bytes[24..48]);
        let fingerprint = Fingerprint::decode(&fingerprint)
            .ok_or_else(|| format!("unknown operation kind {}", bytes[24]))?;
        let sequence = long(bytes, 8);
        let (chunk, payload_bytes) = (short(bytes, 16), short(bytes, 20) as usize);
        let (waiting, tag) = (short(bytes, 52), long(bytes, 56));
        let mut mapped = None;
        let (frame, payload_bytes_max) = match bytes[4] {
            1 => {
                mapped = tag.checked_sub(1);
                (Frame::Data(data_head(bytes, fingerprint, payload_bytes)?), slot_bytes)
            }
            2 => (Frame::Credit, 0),
            3 => {
                let waiting_for = waiting.checked_sub(1);
                (Frame::Heartbeat { sequence, fingerprint, waiting_for }, 0)
            }
            4 => (Frame::Abort, REASON_BYTES_MAX),
            5 => (Frame::Close { next: sequence }, 0),
            6 => {
                let bytes = u64::from(chunk) << 32 | u64::from(waiting);
                let eager = bytes.min(EAGER_BYTES_MAX) as usize;
                if payload_bytes != 0 && payload_bytes as u64 != bytes {
                    return Err(format!("{payload_bytes} of {bytes} bytes come with an offer"));
                }
                (Frame::Offer { message: sequence, tag, bytes, fingerprint }, eager)
            }
            7 => (Frame::Grant { message: sequence }, 0),
            8 => {
                mapped = tag.checked_sub(1);
                (Frame::Piece { message: sequence }, PIECE_BYTES_MAX)
            }
            9 => (Frame::MappingOffer { token: tag }, 0),
            10 => (Frame::MappingReady, 0),
            other => return Err(format!("unknown frame kind {other}")),
        };
        if payload_bytes > payload_bytes_max {
            return Err(format!("a payload of {payload_bytes} bytes, over {payload_bytes_max}"));
        }
        let mut credits = [0; CLASSES];
        credits.copy_from_slice(&bytes[48..52]);
        Ok(Self { frame, credits, acked: bytes[7], payload_bytes, mapped })
    }
}

fn data_head(
    bytes: &[u8; HEAD_BYTES],
    fingerprint: Fingerprint,
    payload_bytes: usize,
) -> Result<DataHead, String> {
    let stage = match bytes[6] {
        0 => Stage::Up,
        1 => Stage::Down,
        other => return Err(format!("invalid stage {other}")),
    };
    if bytes[5] > 1 {
        return Err(format!("invalid tree {}", bytes[5]));
    }
    Ok(DataHead {
        sequence: long(bytes, 8),
        chunk: short(bytes, 16),
        tree: usize::from(bytes[5]),
        stage,
        bytes: payload_bytes,
        fingerprint,
    })
}

fn short(bytes: &[u8; HEAD_BYTES], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn long(bytes: &[u8; HEAD_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_frame_survives_its_encoding() {
        let fingerprint = Fingerprint { count: 77, root: 3, ..NOTHING };
        let data = DataHead {
            sequence: 9,
            chunk: 4,
            tree: 1,
            stage: Stage::Down,
            bytes: 640,
            fingerprint,
        };
        let frames = [
            (Frame::Data(data), 640),
            (Frame::Credit, 0),
            (Frame::Heartbeat { sequence: 3, fingerprint, waiting_for: Some(0) }, 0),
            (Frame::Heartbeat { sequence: 3, fingerprint, waiting_for: None }, 0),
            (Frame::Abort, 100),
            (Frame::Close { next: 12 }, 0),
            (Frame::Offer { message: 1, tag: u64::MAX, bytes: 5 << 33 | 17, fingerprint }, 0),
            (Frame::Grant { message: 1 }, 0),
            (Frame::Piece { message: 1 }, PIECE_BYTES_MAX),
            (Frame::MappingOffer { token: u64::MAX }, 0),
            (Frame::MappingReady, 0),
        ];
        for (frame, payload_bytes) in frames {
            let credits = [1, 2, 3, 255];
            let head = Head { frame, credits, acked: 9, payload_bytes, mapped: None };
            assert_eq!(Head::decode(&head.encode(), 640), Ok(head));
        }
        let mapped = Head { payload_bytes: 640, mapped: Some(0), ..Head::bare(Frame::Data(data)) };
        assert_eq!(Head::decode(&mapped.encode(), 640), Ok(mapped));
        let piece = Head { mapped: Some(7), ..Head::bare(Frame::Piece { message: 3 }) };
        assert_eq!(Head::decode(&piece.encode(), 640), Ok(piece));
    }

    #[test]
    fn an_oversized_payload_is_refused_before_memory_is_allocated() {
        let head = Head { payload_bytes: usize::MAX >> 40, ..Head::bare(Frame::Abort) };
        assert!(Head::decode(&head.encode(), 640).unwrap_err().contains("over"));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_a_frame_never_a_panic(mut bytes in any::<[u8; 32]>(), tail in any::<[u8; 32]>()) {
            bytes[..4].copy_from_slice(&MAGIC);
            bytes[4] %= 12;
            let mut head = [0; HEAD_BYTES];
            head[..32].copy_from_slice(&bytes);
            head[32..].copy_from_slice(&tail);
            if let Ok(read) = Head::decode(&head, 4096) {
                prop_assert!(read.payload_bytes <= PIECE_BYTES_MAX);
            }
        }
    }
}
