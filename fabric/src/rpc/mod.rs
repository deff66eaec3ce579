//! Remote calls over TCP: many requests in flight on one connection, each with its deadline.
//!
//! A frame is a fixed header, a *message* (what the call means, encoded with postcard) and a
//! *payload* (raw bytes that never pass through serde and are never copied to be framed). Whoever
//! connects authenticates first (`crate::handshake`), by key or by ticket, and inside TLS where both
//! sides are configured so (`crate::tls`). A frame's lengths are checked against a bound
//! before memory is taken for it; a frame that cannot be understood ends its connection, is counted
//! and logged, and disturbs nobody else.
//!
//! What a caller may rely on:
//! - every call ends by its deadline;
//! - [`RpcError::executed`] tells whether the other side can have acted on a failed call;
//! - the server never cancels a handler: a call whose caller has gone still runs to its end;
//! - a call with a [`Guard`] is not begun after that has ended, wherever its frame was until then;
//! - requests over [`DIRECT_BYTES_MAX`] are taken when the server has memory for them, in turn with
//!   other connections, and calls of one class never wait for memory that another class holds.
//!
//! Absent on purpose: retries of calls that are not idempotent, and any knowledge of services.

mod budget;
mod channel;
mod connection;
mod credit;
mod error;
mod frame;
mod guard;
mod handshake;
mod io;
mod places;
mod pool;
mod room;
mod server;
mod serving;
mod shutdown;
mod strangers;
mod stream;
mod turns;

use std::future::Future;
use std::net::SocketAddr;

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::deadline::Deadline;
use crate::moment::Moment;
use crate::ticket::Grant;

pub use budget::Budget;
pub use connection::{CallOptions, Connection, ConnectionConfig};
pub use credit::{Credits, Ticket};
pub use error::{Executed, Fault, FaultCode, RpcError, ServerError};
pub use frame::{HEADER_BYTES, Limits};
pub use guard::{Fence, Guard};
pub use pool::{Pool, PoolConfig};
pub use room::Room;
pub use server::{DEFAULT_CLUSTER, Server, ServerConfig, ServerStats};
pub use shutdown::{Shutdown, ShutdownHandle};

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

/// One call as its handler sees it.
#[derive(Debug)]
pub struct Call {
    /// What is asked, to be decoded with [`decode`].
    pub message: Bytes,
    /// Raw bytes beside it.
    pub payload: Bytes,
    /// When the caller stops waiting. Nothing stops the handler then: one that would still do
    /// work worth nothing looks for itself.
    pub deadline: Deadline,
    /// When it may not be begun any more, if its caller said so. The server has looked; a handler
    /// that lets calls wait looks again.
    pub expires: Option<Moment>,
    /// Who asks.
    pub peer: Peer,
    /// What the connection has proved that it may do.
    pub grant: Grant,
    /// Which budget it was admitted under: the caller's claim.
    pub class: u8,
    /// Memory for the reply. A handler whose replies are large reserves it first.
    pub room: Room,
}

/// The other end of an authenticated connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// A number that is unique among the connections of this server.
    pub connection: u64,
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

/// What answers the calls of one port. Handlers of one connection run concurrently.
pub trait Service: Send + Sync + 'static {
    /// Answers one call. Errors that the caller should understand belong into the reply's message;
    /// a [`Fault`] says that the call itself could not be served.
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send;
}

impl<S: Service> Service for std::sync::Arc<S> {
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send {
        S::handle(self, call)
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

/// Decodes a request inside a handler: what cannot be decoded is the caller's fault.
///
/// # Errors
/// [`Fault`] with [`FaultCode::BadRequest`].
pub fn decode_request<T: DeserializeOwned>(call: &Call) -> Result<T, Fault> {
    decode(&call.message)
        .map_err(|error| Fault { code: FaultCode::BadRequest, detail: error.to_string() })
}

#[cfg(test)]
#[path = "guarded_test.rs"]
mod guarded_tests;
#[cfg(test)]
#[path = "identity_test.rs"]
mod identity_tests;
#[cfg(test)]
#[path = "load_test.rs"]
mod load_tests;
#[cfg(test)]
#[path = "rpc_test.rs"]
mod tests;
#[cfg(test)]
#[path = "tls_test.rs"]
mod tls_tests;
