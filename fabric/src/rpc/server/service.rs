//! Interface between a server and its service.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::reply_memory::ReplyMemory;
use crate::auth::ticket::Grant;
use crate::boot_instant::BootInstant;
use crate::deadline::Deadline;
use crate::fault::{Fault, FaultCode};
use crate::rpc::message::{Reply, decode};

/// A call, as passed to its handler.
#[derive(Debug)]
pub struct Call {
    /// The encoded request, to be decoded with [`decode`].
    pub message: Bytes,
    /// Raw bytes that accompany the message.
    pub payload: Bytes,
    /// Time at which the caller stops waiting. The handler is not cancelled then; a handler whose
    /// work would be wasted checks the deadline itself.
    pub deadline: Deadline,
    /// Time after which the call must not be started, if the caller set one. The server has checked
    /// it; a handler that queues calls checks it again.
    pub expires: Option<BootInstant>,
    /// The peer that sent the call.
    pub peer: Peer,
    /// Access that the connection has proved.
    pub grant: Grant,
    /// The class that the caller declared, which selected the budget.
    pub class: u8,
    /// Memory for the reply. A handler with large replies reserves it first.
    pub reply_memory: ReplyMemory,
}

/// The peer of an authenticated connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// An id that is unique among the connections of this server.
    pub connection: u64,
}

/// Handler of the calls of one port. Handlers of one connection run concurrently.
pub trait Service: Send + Sync + 'static {
    /// Handles one call. Errors that the caller interprets belong in the reply's message; a
    /// [`Fault`] reports that the call itself could not be served.
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send;
}

impl<S: Service> Service for Arc<S> {
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send {
        S::handle(self, call)
    }
}

/// Decodes a request inside a handler; a request that cannot be decoded is a fault of the caller.
///
/// # Errors
/// [`Fault`] with [`FaultCode::BadRequest`].
pub fn decode_request<T: DeserializeOwned>(call: &Call) -> Result<T, Fault> {
    decode(&call.message)
        .map_err(|error| Fault { code: FaultCode::BadRequest, detail: error.to_string() })
}
