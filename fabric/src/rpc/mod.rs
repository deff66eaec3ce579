//! Remote calls: many concurrent requests on one connection, each with its own deadline. A connection
//! uses TCP, or the memory of the machine if both processes are on one (`local`).
//!
//! A frame consists of a fixed header, a *message* (the typed request or reply, encoded with
//! postcard) and a *payload* (raw bytes that bypass serde and are not copied for framing). The
//! client authenticates first (`crate::auth::handshake`), by key or by ticket, and inside TLS if
//! both sides are configured for it (`crate::tls`). The lengths of a frame are checked against a
//! limit before memory is allocated. An invalid frame closes its connection and is counted and
//! logged; other connections are not affected.
//!
//! A call passes through `client::pool` (a connection), `client::call` (the call on it), `frame`,
//! `server::connection` (admission) and the handler of the service; its reply returns through
//! `client::connection`.
//!
//! Guarantees to a caller:
//! - every call returns by its deadline;
//! - [`RpcError::executed`] reports whether a failed call can have been executed;
//! - the server never cancels a handler: a call whose caller has disconnected still runs to
//!   completion;
//! - a call with a [`NotAfter`] is not started after that has expired, even if its frame was
//!   delayed;
//! - requests over [`DIRECT_BYTES_MAX`] are accepted when the server has memory for them, in fair
//!   order with other connections, and calls of one class never wait for memory of another class.
//!
//! Retries of calls that are not idempotent, and the semantics of services, are out of scope.

mod channel;
mod client;
mod error;
mod frame;
mod handshake;
mod lease;
mod local;
mod message;
mod not_after;
mod server;
mod shutdown;
mod stream;

pub use crate::fault::{Fault, FaultCode};
pub use client::{CallOptions, Connection, ConnectionConfig, Pool, PoolConfig, Pools};
pub use error::{Executed, RpcError, ServerError};
pub use frame::HEADER_BYTES;
pub use lease::Lease;
pub use message::{DIRECT_BYTES_MAX, Limits, Payload, Reply, decode, encode};
pub use not_after::NotAfter;
pub use server::{
    Budget, Call, Caller, Count, Counts, CreditRequest, Credits, DEFAULT_CLUSTER, Peer, ROWS_MAX,
    ReplyMemory, Server, ServerConfig, ServerStats, Service, Usage, decode_request,
};
pub use shutdown::{Shutdown, ShutdownHandle};

#[cfg(test)]
mod tests;
