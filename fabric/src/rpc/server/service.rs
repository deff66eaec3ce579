//! The interface between a server and the service behind it.

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
    pub expires: Option<BootInstant>,
    /// Who asks.
    pub peer: Peer,
    /// What the connection has proved that it may do.
    pub grant: Grant,
    /// Which budget it was admitted under: the caller's claim.
    pub class: u8,
    /// Memory for the reply. A handler whose replies are large reserves it first.
    pub reply_memory: ReplyMemory,
}

/// The other end of an authenticated connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// A number that is unique among the connections of this server.
    pub connection: u64,
}

/// What answers the calls of one port. Handlers of one connection run concurrently.
pub trait Service: Send + Sync + 'static {
    /// Answers one call. Errors that the caller should understand belong into the reply's message;
    /// a [`Fault`] says that the call itself could not be served.
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send;
}

impl<S: Service> Service for Arc<S> {
    fn handle(&self, call: Call) -> impl Future<Output = Result<Reply, Fault>> + Send {
        S::handle(self, call)
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
