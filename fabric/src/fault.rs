//! Refusals of a service, below the meaning of any message.

use serde::{Deserialize, Serialize};

/// Why the server could not serve a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultCode {
    /// The message is not one of this service.
    BadRequest,
    /// More calls or bytes are in flight than the server takes; it was not executed. Back off.
    Overloaded,
    /// The server is going down; it was not executed.
    ShuttingDown,
    /// The handler broke; it may have been executed in part.
    Internal,
    /// The call was guarded and came too late; it was not executed.
    Expired,
    /// The caller's credential does not allow it; it was not executed.
    Forbidden,
}

/// A refusal by the server itself, below the meaning of any message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code:?}: {detail}")]
pub struct Fault {
    /// What kind.
    pub code: FaultCode,
    /// For a person.
    pub detail: String,
}

impl Fault {
    /// A guarded call that came too late.
    pub fn expired() -> Self {
        let detail = "it came after the moment until which its caller may have it begun";
        Self { code: FaultCode::Expired, detail: detail.into() }
    }

    /// The caller's credential does not allow the call.
    pub fn forbidden(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::Forbidden, detail: detail.into() }
    }

    /// A message that is not one of this service.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::BadRequest, detail: detail.into() }
    }

    /// A handler that broke.
    pub fn internal(detail: impl Into<String>) -> Self {
        Self { code: FaultCode::Internal, detail: detail.into() }
    }
}
