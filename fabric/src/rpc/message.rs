//! Messages and payloads of calls and replies, and their encoding.

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::RpcError;
use crate::fault::Fault;

/// Requests up to this size (message and payload) are always accepted. A larger request is offered
/// first and sent when the server has reserved memory: one round trip, which is short compared with
/// the transfer. One medium-sized request at a time is sent without an offer; a server without free
/// memory refuses it.
pub const DIRECT_BYTES_MAX: usize = 8 << 10;

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

/// Raw bytes that accompany a message, in any number of parts, which are written in order without
/// being joined.
#[derive(Clone, Debug, Default)]
pub struct Payload(Vec<Bytes>);

impl Payload {
    /// An empty payload.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Total length.
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// True if the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    /// The parts, in order.
    pub fn into_parts(self) -> Vec<Bytes> {
        self.0
    }

    /// One contiguous buffer: no copy for one part, a copy for several.
    pub fn into_bytes(mut self) -> Bytes {
        match self.0.len() {
            0 => Bytes::new(),
            1 => self.0.remove(0),
            _ => {
                let mut bytes = BytesMut::with_capacity(self.len());
                self.0.iter().for_each(|part| bytes.extend_from_slice(part));
                bytes.freeze()
            }
        }
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self(if bytes.is_empty() { Vec::new() } else { vec![bytes] })
    }
}

impl From<Vec<Bytes>> for Payload {
    fn from(parts: Vec<Bytes>) -> Self {
        Self(parts)
    }
}

/// The reply of a handler to a caller.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The encoded message.
    pub message: Bytes,
    /// Raw bytes that accompany the message. At the caller they are always one part.
    pub payload: Payload,
}

impl Reply {
    /// A reply with a message and no payload.
    ///
    /// # Errors
    /// [`Fault`] if the value cannot be encoded, which is a bug of its type.
    pub fn of<T: Serialize>(value: &T) -> Result<Self, Fault> {
        Self::with_payload(value, Payload::empty())
    }

    /// A reply with a message and a payload.
    ///
    /// # Errors
    /// As [`Reply::of`].
    pub fn with_payload<T: Serialize>(value: &T, payload: Payload) -> Result<Self, Fault> {
        let message = encode(value).map_err(|error| Fault::internal(error.to_string()))?;
        Ok(Self { message, payload })
    }
}

/// Encodes a message.
///
/// # Errors
/// [`RpcError::Codec`] if the type cannot be encoded, which is a bug of the type.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, RpcError> {
    postcard::to_allocvec(value)
        .map(Bytes::from)
        .map_err(|error| RpcError::Codec { what: "encoding", detail: error.to_string() })
}

/// Decodes a message; trailing bytes are an error, because they indicate another version.
///
/// # Errors
/// [`RpcError::Codec`] if the bytes are not a value of the type.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RpcError> {
    let codec = |detail: String| RpcError::Codec { what: "decoding", detail };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(codec(format!("{} trailing bytes", rest.len()))),
        Err(error) => Err(codec(error.to_string())),
    }
}
