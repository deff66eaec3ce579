//! Remote calls over TCP: many requests in flight on one connection, each with its deadline.
//!
//! A frame is a fixed header, a *message* (what the call means, encoded with postcard) and a
//! *payload* (raw bytes that never pass through serde and are never copied to be framed). Whoever
//! connects authenticates first (`crate::auth::handshake`), by key or by ticket, and inside TLS where both
//! sides are configured so (`crate::tls`). A frame's lengths are checked against a bound
//! before memory is taken for it; a frame that cannot be understood ends its connection, is counted
//! and logged, and disturbs nobody else.
//!
//! What a caller may rely on:
//! - every call ends by its deadline;
//! - [`RpcError::executed`] tells whether the other side can have acted on a failed call;
//! - the server never cancels a handler: a call whose caller has gone still runs to its end;
//! - a call with a [`NotAfter`] is not begun after that has ended, wherever its frame was until then;
//! - requests over [`DIRECT_BYTES_MAX`] are taken when the server has memory for them, in turn with
//!   other connections, and calls of one class never wait for memory that another class holds.
//!
//! Absent on purpose: retries of calls that are not idempotent, and any knowledge of services.

mod channel;
mod client;
mod error;
mod frame;
mod handshake;
mod io;
mod lease;
mod message;
mod not_after;
mod server;
mod shutdown;
mod stream;

pub use crate::fault::{Fault, FaultCode};
pub use client::{CallOptions, Connection, ConnectionConfig, Pool, PoolConfig};
pub use error::{Executed, RpcError, ServerError};
pub use frame::{HEADER_BYTES, Limits};
pub use lease::Lease;
pub use message::{DIRECT_BYTES_MAX, Payload, Reply, decode, encode};
pub use not_after::NotAfter;
pub use server::{
    Budget, Call, CreditRequest, Credits, DEFAULT_CLUSTER, Peer, ReplyMemory, Server, ServerConfig,
    ServerStats, Service, decode_request,
};
pub use shutdown::{Shutdown, ShutdownHandle};

#[cfg(test)]
mod tests;
