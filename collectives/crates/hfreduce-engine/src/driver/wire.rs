//! Frames between nodes: a head of 64 bytes, then a payload whose length was checked first.
//!
//! ```text
//!  0 magic "HFR1"   4 kind   5 tree   6 stage   7 returned
//!  8 sequence       16 chunk            20 payload bytes
//! 24 fingerprint                        48 credits   52 waiting for rank + 1   56 tag
//! ```
//! A payload that is lent does not follow: it lies in the sender's segment, at `tag` - 1, and the
//! receiver says in `acked` how many such it has copied, in the order in which they came. For a
//! piece of a message between ranks of one node `tag` - 1 is the sender's message slot in their segment.

use crate::core::FINGERPRINT_BYTES;
use crate::core::credit::CLASSES;
use crate::core::pair::EAGER_BYTES_MAX;
use crate::core::{DataHead, Determinism, Fingerprint, Kind, Stage};
use crate::error::REASON_BYTES_MAX;

/// Length of a head.
pub const HEAD_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"HFR1";
/// The longest piece of a message between two ranks.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A chunk on its way through a tree.
    Data(DataHead),
    /// Credits alone.
    Credit,
    /// A sign of life: the oldest operation under way here (none: `u64::MAX`), and whom we wait for.
    Heartbeat {
        /// Its number.
        sequence: u64,
        /// What it is.
        fingerprint: Fingerprint,
        /// The rank that is waited for.
        waiting_for: Option<u32>,
    },
    /// Everything ends: the payload says why.
    Abort,
    /// The sender takes leave and will not begin this operation or a later one.
    Close {
        /// The first operation that it will not begin.
        next: u64,
    },
    /// Between two ranks: I have so many bytes for you under this tag. A payload is all of them.
    Offer {
        /// The sender's number for this message on this connection.
        message: u64,
        /// What pairs it with a receive.
        tag: u64,
        /// The length of the whole message.
        bytes: u64,
        /// What the sender thinks the operation is.
        fingerprint: Fingerprint,
    },
    /// Between two ranks: send that message now.
    Grant {
        /// Its number.
        message: u64,
    },
    /// Between two ranks: the next piece of that message.
    Piece {
        /// Its number.
        message: u64,
    },
    /// The sender's segment came to our socket, with this token: we may map it.
    MappingOffer {
        /// What the descriptor came with.
        token: u64,
    },
    /// Your segment is mapped: from now on say where a chunk lies instead of sending it.
    MappingReady,
}

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// What it is.
    pub frame: Frame,
    /// Credits that travel with it.
    pub credits: [u8; CLASSES],
    /// Lent payloads that the sender of this frame has copied.
    pub acked: u8,
    /// Length of the payload.
    pub payload_bytes: usize,
    /// Where in the sender's segment the payload lies, if it does not follow: an offset, or a message slot.
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
    pub fn bare(frame: Frame) -> Self {
        Self { frame, credits: [0; CLASSES], acked: 0, payload_bytes: 0, mapped: None }
    }

    /// A sign of life of somebody who does nothing.
    pub fn idle() -> Self {
        Self::bare(Frame::Heartbeat { sequence: u64::MAX, fingerprint: NOTHING, waiting_for: None })
    }

    /// As bytes.
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

    /// From bytes; `slot_bytes` bounds a chunk's payload.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn decode(bytes: &[u8; HEAD_BYTES], slot_bytes: usize) -> Result<Self, String> {
        if bytes[..4] != MAGIC {
            return Err(format!("a frame begins with {:02x?}, not with HFR1", &bytes[..4]));
        }
        let mut fingerprint = [0; FINGERPRINT_BYTES];
        fingerprint.copy_from_slice(&bytes[24..48]);
        let fingerprint = Fingerprint::decode(&fingerprint)
            .ok_or_else(|| format!("operation kind {} does not exist", bytes[24]))?;
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
            other => return Err(format!("frame kind {other} does not exist")),
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
        other => return Err(format!("stage {other} does not exist")),
    };
    if bytes[5] > 1 {
        return Err(format!("tree {} does not exist", bytes[5]));
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
    fn a_payload_that_is_too_long_is_refused_before_memory_is_taken() {
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
