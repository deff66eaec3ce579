//! Failed calls of the manager.

use crate::ops::OpError;
use crate::protocol::MgmtdError;

/// A call that failed: refused, or an error of an operation.
pub(crate) enum Refusal {
    Answer(MgmtdError),
    Op(OpError),
}

impl From<MgmtdError> for Refusal {
    fn from(error: MgmtdError) -> Self {
        Self::Answer(error)
    }
}

impl From<OpError> for Refusal {
    fn from(error: OpError) -> Self {
        Self::Op(error)
    }
}
