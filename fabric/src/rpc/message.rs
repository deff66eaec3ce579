//! Messages and payloads of calls and replies, and their encoding.

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::RpcError;
use crate::fault::Fault;

/// Requests up to this size (message and payload) are always taken. Larger ones are offered first
/// and sent when the server has reserved memory: a round trip, which is little beside their transfer.
/// One of medium size at a time is sent without an offer; a server without free memory skips it.
pub const DIRECT_BYTES_MAX: usize = 8 << 10;

/// Raw bytes beside a message, in any number of parts that are written one after the other
/// without being joined.
#[derive(Clone, Debug, Default)]
pub struct Payload(Vec<Bytes>);

impl Payload {
    /// No bytes.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Total length.
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// True when there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    /// The parts in order.
    pub fn into_parts(self) -> Vec<Bytes> {
        self.0
    }

    /// One contiguous buffer: free for one part, a copy for several.
    pub fn into_bytes(mut self) -> Bytes {
        match self.0.len() {
            0 => Bytes::new(),
            1 => self.0.remove(0),
            _ => {
                let mut joined = BytesMut::with_capacity(self.len());
                self.0.iter().for_each(|part| joined.extend_from_slice(part));
                joined.freeze()
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

/// What a handler answers, and what a caller gets.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// The encoded answer.
    pub message: Bytes,
    /// Raw bytes beside it. On the caller's side it is always one part.
    pub payload: Payload,
}

impl Reply {
    /// A reply that is one encoded value.
    ///
    /// # Errors
    /// [`Fault`] when the value cannot be encoded, which is a bug of its type.
    pub fn of<T: Serialize>(value: &T) -> Result<Self, Fault> {
        Self::with_payload(value, Payload::empty())
    }

    /// A reply that is one encoded value with raw bytes beside it.
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
/// [`RpcError::Codec`] when the type cannot be encoded, which is a bug of the type.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, RpcError> {
    postcard::to_allocvec(value)
        .map(Bytes::from)
        .map_err(|error| RpcError::Codec { what: "encoding", detail: error.to_string() })
}

/// Decodes a message; bytes left over are an error, because they mean another version.
///
/// # Errors
/// [`RpcError::Codec`] when the bytes are not such a value.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RpcError> {
    let codec = |detail: String| RpcError::Codec { what: "decoding", detail };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(codec(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(codec(error.to_string())),
    }
}
