//! Faults: errors that the server returns instead of a reply.

use serde::{Deserialize, Serialize};

/// Why the server could not serve a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultCode {
    /// The message is not valid for this service.
    BadRequest,
    /// More calls or bytes are in flight than the server admits; the call was not executed. Back
    /// off.
    Overloaded,
    /// The server is shutting down; the call was not executed.
    ShuttingDown,
    /// The handler panicked; the call may have been executed in part.
    Internal,
    /// The call was guarded and arrived too late; it was not executed.
    Expired,
    /// The caller's credential does not permit the call; it was not executed.
    Forbidden,
}

/// An error of the server itself, independent of the type of the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code:?}: {detail}")]
pub struct Fault {
    /// Machine-readable code.
    pub code: FaultCode,
    /// Human-readable detail.
    pub detail: String,
}

impl Fault {
    /// A guarded call that arrived too late.
    pub fn expired() -> Self {
        let detail = "it arrived after its not-after time";
        Self { code: FaultCode::Expired, detail: detail.into() }
    }

    /// The caller's credential does not permit the call.
    pub fn forbidden(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::Forbidden, detail: detail.into() }
    }

    /// A message that is not valid for this service.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::BadRequest, detail: detail.into() }
    }

    /// A handler that panicked.
    pub fn internal(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::Internal, detail: detail.into() }
    }
}
