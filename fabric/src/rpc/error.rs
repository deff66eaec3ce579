//! Errors of calls, with whether the call can have been executed.

use std::io;

use crate::auth::AuthError;
use crate::fault::{Fault, FaultCode};

/// Whether a failed call can have been executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// No handler received the call: any call can be retried safely.
    No,
    /// The request may have been executed, or may still be: only idempotent calls may be retried.
    Perhaps,
}

/// Reason why a call has no reply.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// No connection could be made.
    #[error("`{context}` at {peer} cannot be reached: {detail}")]
    Unreachable {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// The system's error.
        detail: String,
    },
    /// Authentication failed: another service or another key. A retry will not succeed.
    #[error("`{context}` at {peer}: {source}")]
    Refused {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// The authentication error.
        source: AuthError,
    },
    /// The connection closed before the reply arrived.
    #[error("`{context}` at {peer}: the connection ended before the reply: {detail}")]
    Lost {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// Reason why the connection closed.
        detail: String,
    },
    /// The deadline passed. `sent` shows whether the request had been sent.
    #[error("`{context}` at {peer}: no reply after {waited_ms} ms")]
    TimedOut {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// Time that this call waited.
        waited_ms: u64,
        /// Whether the request was passed to the connection.
        sent: bool,
    },
    /// The server refused the call.
    #[error("`{context}` at {peer} refused: {fault}")]
    Faulted {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
        /// The fault.
        fault: Fault,
    },
    /// The request exceeds the frame limits; nothing was sent.
    #[error(
        "`{context}`: {part} of {bytes} bytes exceeds the limit of {bytes_max}; split the request"
    )]
    TooLarge {
        /// The service.
        context: String,
        /// `message` or `payload`.
        part: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        bytes_max: usize,
    },
    /// The lease that the call requires was lost (see [`super::Lease`]); nothing was sent.
    #[error("`{context}` at {peer}: another holder took over the lease")]
    LeaseLost {
        /// The service.
        context: String,
        /// Its address.
        peer: String,
    },
    /// A message does not match its type: the two sides run different versions.
    #[error("{what} a message: {detail}; do both sides run the same version?")]
    Codec {
        /// `encoding` or `decoding`.
        what: &'static str,
        /// The error of postcard.
        detail: String,
    },
}

impl RpcError {
    /// Whether the call can have been executed.
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

    /// True if the same call may succeed later without intervention.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } | Self::TimedOut { .. } => true,
            Self::Faulted { fault, .. } => {
                matches!(
                    fault.code,
                    FaultCode::Overloaded | FaultCode::ShuttingDown | FaultCode::Expired
                )
            }
            // The ticket is renewed automatically, or the clocks differ by seconds.
            Self::Refused { source: AuthError::Expired { .. }, .. } => true,
            Self::Refused { .. }
            | Self::TooLarge { .. }
            | Self::LeaseLost { .. }
            | Self::Codec { .. } => false,
        }
    }
}

/// Reason why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be bound.
    #[error(
        "`{context}` cannot listen on {address}: {source}; choose another port or stop what holds it"
    )]
    Bind {
        /// The service.
        context: String,
        /// The address to bind.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// TLS cannot be set up.
    #[error("`{context}` cannot use TLS: {reason}")]
    Tls {
        /// The service.
        context: String,
        /// The reason.
        reason: String,
    },
}
