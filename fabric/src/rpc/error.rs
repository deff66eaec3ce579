//! What can go wrong with a call, and whether the other side can have acted on it.

use std::io;

use crate::auth::AuthError;
use crate::fault::{Fault, FaultCode};

/// Whether a failed call can have had its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// It was never handed to a handler: asking again is safe, whatever the call does.
    No,
    /// The request may have been executed, or may still be: only an idempotent call may be repeated.
    Perhaps,
}

/// Why a call has no reply.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// No connection could be made.
    #[error("`{context}` at {peer} cannot be reached: {detail}")]
    Unreachable {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// What the system said.
        detail: String,
    },
    /// The peer is somebody else, or holds another key. Asking again will not help.
    #[error("`{context}` at {peer}: {source}")]
    Refused {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// Why.
        source: AuthError,
    },
    /// The connection ended while the reply was awaited.
    #[error("`{context}` at {peer}: the connection ended before the reply: {detail}")]
    Lost {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// What the connection said last.
        detail: String,
    },
    /// The deadline passed. `sent` tells whether the request had been handed over.
    #[error("`{context}` at {peer}: no reply after {waited_ms} ms")]
    TimedOut {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// How long this call waited.
        waited_ms: u64,
        /// Whether the request was handed to the connection.
        sent: bool,
    },
    /// The server refused the call.
    #[error("`{context}` at {peer} refused: {fault}")]
    Faulted {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// Why.
        fault: Fault,
    },
    /// The request is larger than the connection takes; nothing was sent.
    #[error(
        "`{context}`: {part} of {bytes} bytes is over the bound of {bytes_max}; split the request"
    )]
    TooLarge {
        /// The service.
        context: String,
        /// `message` or `payload`.
        part: &'static str,
        /// Its length.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// The right that the call needs was lost (see [`super::Lease`]); nothing was sent.
    #[error("`{context}` at {peer}: the right to ask for this was lost to somebody else")]
    LeaseLost {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
    },
    /// A message does not fit its type: the two sides are of different versions.
    #[error("{what} a message: {detail}; do both sides run the same version?")]
    Codec {
        /// `encoding` or `decoding`.
        what: &'static str,
        /// What postcard said.
        detail: String,
    },
}

impl RpcError {
    /// Whether the call can have had its effect.
    pub fn executed(&self) -> Executed {
        match self {
            Self::Unreachable { .. }
            | Self::Refused { .. }
            | Self::TooLarge { .. }
            | Self::LeaseLost { .. } => Executed::No,
            Self::TimedOut { sent: false, .. } => Executed::No,
            Self::Faulted { fault, .. } if fault.code != FaultCode::Internal => Executed::No,
            Self::Codec { what: "encoding", .. } => Executed::No,
            _ => Executed::Perhaps,
        }
    }

    /// Whether the same call may go well later without anybody changing anything.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Faulted { fault, .. } => {
                matches!(
                    fault.code,
                    FaultCode::Overloaded | FaultCode::ShuttingDown | FaultCode::Expired
                )
            }
            // Somebody renews it, or it is a matter of seconds between clocks.
            Self::Refused { source: AuthError::Expired { .. }, .. } => true,
            Self::Refused { .. }
            | Self::TooLarge { .. }
            | Self::LeaseLost { .. }
            | Self::Codec { .. } => false,
        }
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error(
        "`{context}` cannot listen on {address}: {source}; choose another port or stop what holds it"
    )]
    Bind {
        /// The service.
        context: String,
        /// Where it should have listened.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// TLS cannot be set up.
    #[error("`{context}` cannot use TLS: {reason}")]
    Tls {
        /// The service.
        context: String,
        /// Why.
        reason: String,
    },
}
