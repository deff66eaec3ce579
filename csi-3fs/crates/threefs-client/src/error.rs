//! Errors of the client. Retryable errors are not returned: they end as
//! [`ClientError::Unavailable`] at the deadline.

use std::sync::Arc;
use std::time::Duration;

use fabric::rpc::{Executed, Fault, FaultCode, RpcError};
use threefs_core::error::StorageError;
use threefs_core::ids::{ChainId, ChunkId, TargetId};
use threefs_core::layout::LayoutError;
use threefs_meta::MetaError;

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The metadata service rejected the operation: not found, exists …
    #[error("{0}")]
    Meta(MetaError),
    /// A storage target is full.
    #[error(
        "{what}: no space left on {target}; remove files or add capacity, then try again \
         (`threefs status` shows the fullest targets)"
    )]
    NoSpace {
        /// The operation and its path.
        what: String,
        /// The full target.
        target: TargetId,
    },
    /// Every serving replica of the chunk is damaged.
    #[error(
        "{what}: {chunk} is damaged on every serving replica ({detail}); restore the file from its source"
    )]
    Corrupt {
        /// The operation and its path.
        what: String,
        /// The chunk.
        chunk: ChunkId,
        /// Error of the last replica.
        detail: String,
    },
    /// A chunk that was written and never removed does not exist: data was lost.
    #[error(
        "`{path}`: {chunk} was written and {chain} does not have it: data of this file is lost; \
         restore the file from its source"
    )]
    Lost {
        /// The file.
        path: String,
        /// The chunk.
        chunk: ChunkId,
        /// The chain that should have it.
        chain: ChainId,
    },
    /// The file was removed or replaced while it was open; its data is gone.
    #[error("`{path}` was removed or replaced while it was open; open it again")]
    Stale {
        /// Path at open.
        path: String,
    },
    /// The deadline passed.
    #[error(
        "{what}: not completed within {:.1} s; last error of {who}: {detail}. \
         See `threefs status`, or increase the timeout",
        deadline.as_secs_f64()
    )]
    Unavailable {
        /// The operation and its path.
        what: String,
        /// The last service called.
        who: String,
        /// The timeout.
        deadline: Duration,
        /// Last error of the service or its connection.
        detail: String,
    },
    /// The peer has another key, or is not a 3FS service.
    #[error("{detail}")]
    Refused {
        /// Error of the handshake.
        detail: String,
    },
    /// Another node has taken the exclusive claim.
    #[error("{what}: another node holds the exclusive claim; reopen the volume there")]
    Fenced {
        /// The operation and its path.
        what: String,
    },
    /// The range is not reserved, or no longer: another client truncated the file, or the
    /// reservation expired because this client was silent. Some bytes may have been written;
    /// nothing is written later.
    #[error("{what}: the range is not reserved; reserve it and write again")]
    NotReserved {
        /// The operation and its path.
        what: String,
    },
    /// The chunk has changed since its version was read; nothing was done.
    #[error("{what}: the chunk has changed meanwhile")]
    Changed {
        /// The operation and its path.
        what: String,
    },
    /// Invalid argument; nothing was done.
    #[error("{detail}")]
    InvalidArgument {
        /// The argument, its value and the remedy.
        detail: String,
    },
    /// Invalid reply of a peer: versions differ, or there is a bug.
    #[error("invalid reply from {who}: {detail}; check that all services run the same version")]
    Protocol {
        /// The service.
        who: String,
        /// Description of the reply.
        detail: String,
    },
}

impl From<MetaError> for ClientError {
    fn from(error: MetaError) -> Self {
        Self::Meta(error)
    }
}

impl From<LayoutError> for ClientError {
    fn from(error: LayoutError) -> Self {
        Self::InvalidArgument { detail: error.to_string() }
    }
}

impl ClientError {
    /// A reply of the wrong kind.
    pub(crate) fn unexpected(who: &str, reply: &impl std::fmt::Debug) -> Self {
        let mut detail = format!("{reply:?}");
        detail.truncate(200);
        Self::Protocol { who: who.into(), detail }
    }
}

/// Error of one attempt at one storage service.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The call failed.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// The call was not made: the range is not reserved, or its reservation has ended.
    #[error("the range is not reserved")]
    NotReserved,
}

/// Name of an operation, for errors.
pub(crate) type OperationName = Arc<str>;

/// Failed attempts of an operation, for its final error.
#[derive(Debug)]
pub(crate) struct Attempts {
    what: String,
    who: String,
    detail: String,
    /// An attempt may have taken effect, or may still.
    in_doubt: bool,
}

impl Attempts {
    /// No attempt made yet.
    pub(crate) fn of(what: impl Into<String>) -> Self {
        let (who, detail) = ("mgmtd".into(), "no attempt was made".into());
        Self { what: what.into(), who, detail, in_doubt: false }
    }

    /// Records a failed attempt.
    pub(crate) fn record_failure(&mut self, who: &str, detail: impl ToString) {
        (self.who, self.detail) = (who.into(), detail.to_string());
    }

    /// Records that an attempt was sent whose effect is unknown.
    pub(crate) fn mark_in_doubt(&mut self) {
        self.in_doubt = true;
    }

    /// Returns the result of a call, or `NotReserved` if it was not made and must be prepared
    /// again. If an earlier attempt is in doubt, the operation is retried instead: a late copy of
    /// that attempt could overwrite data written later. No copy takes effect after the deadline.
    pub(crate) fn call<T>(
        &mut self,
        result: Result<T, CallError>,
    ) -> Result<Result<T, RpcError>, ClientError> {
        match result {
            Ok(reply) => Ok(Ok(reply)),
            Err(CallError::Rpc(error)) => {
                self.in_doubt |= error.executed() == Executed::Perhaps;
                Ok(Err(error))
            }
            Err(CallError::NotReserved) if self.in_doubt => {
                let (code, detail) = (FaultCode::Expired, CallError::NotReserved.to_string());
                let (context, peer) = (threefs_meta::protocol::CONTEXT.into(), "meta".into());
                let fault = Fault { code, detail };
                Ok(Err(RpcError::Faulted { context, peer, fault }))
            }
            Err(CallError::NotReserved) => {
                Err(ClientError::NotReserved { what: self.what.clone() })
            }
        }
    }

    /// Records a failed call; an error if a retry cannot succeed.
    pub(crate) fn rpc(&mut self, who: &str, error: &RpcError) -> Result<(), ClientError> {
        self.record_failure(who, error);
        match error {
            // Expired credentials are renewed meanwhile, or the final error reports them.
            RpcError::Refused { .. } if error.retryable() => Ok(()),
            RpcError::Refused { .. } => Err(ClientError::Refused { detail: error.to_string() }),
            RpcError::Faulted { fault, .. } if fault.code == FaultCode::Forbidden => {
                Err(ClientError::Refused { detail: error.to_string() })
            }
            RpcError::TooLarge { .. } => {
                Err(ClientError::InvalidArgument { detail: error.to_string() })
            }
            RpcError::LeaseLost { .. } => Err(ClientError::Fenced { what: self.what.clone() }),
            RpcError::Codec { .. } => {
                Err(ClientError::Protocol { who: who.into(), detail: error.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// A permanent error of a storage service.
    pub(crate) fn refusal(&self, who: &str, error: StorageError) -> ClientError {
        match error {
            StorageError::NoSpace { target } => {
                ClientError::NoSpace { what: self.what.clone(), target }
            }
            StorageError::ChunkChanged { .. } => ClientError::Changed { what: self.what.clone() },
            StorageError::ChunkSizeMismatch { .. } | StorageError::InvalidRequest { .. } => {
                ClientError::InvalidArgument { detail: format!("{}: {error}", self.what) }
            }
            other => ClientError::Protocol { who: who.into(), detail: other.to_string() },
        }
    }

    /// All replicas of the chunk are damaged.
    pub(crate) fn corrupt(&self, chunk: ChunkId) -> ClientError {
        ClientError::Corrupt { what: self.what.clone(), chunk, detail: self.detail.clone() }
    }

    /// The deadline has passed.
    pub(crate) fn unavailable(self, deadline: Duration) -> ClientError {
        ClientError::Unavailable { what: self.what, who: self.who, deadline, detail: self.detail }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_reservation_is_not_renewed_while_an_attempt_is_in_doubt() {
        let not_reserved = || Err::<(), _>(CallError::NotReserved);
        let timed_out = |sent: bool| {
            let (context, peer, waited_ms) = ("storage".into(), "here".into(), 1);
            Err::<(), _>(CallError::Rpc(RpcError::TimedOut { context, peer, waited_ms, sent }))
        };
        let mut attempts = Attempts::of("write");
        attempts.call(timed_out(false)).unwrap().unwrap_err();
        let error = attempts.call(not_reserved()).unwrap_err();
        assert!(matches!(error, ClientError::NotReserved { .. }), "{error}");
        attempts.call(timed_out(true)).unwrap().unwrap_err();
        let error = attempts.call(not_reserved()).unwrap().unwrap_err();
        assert_eq!(attempts.rpc("meta", &error), Ok(()), "it is retried until the deadline");
        let mut attempts = Attempts::of("write");
        attempts.mark_in_doubt();
        attempts.call(not_reserved()).unwrap().unwrap_err();
    }
}
