//! What can go wrong for a caller. Retryable errors never come this far: they end as
//! [`ClientError::Unavailable`] when the deadline passes.

use std::time::Duration;

use fabric::rpc::{Executed, Fault, FaultCode, RpcError};
use threefs_core::error::StorageError;
use threefs_core::ids::{ChainId, ChunkId, TargetId};
use threefs_core::layout::LayoutError;
use threefs_meta::MetaError;

use crate::metadata::CallError;

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The metadata service said no: not found, exists …
    #[error("{0}")]
    Meta(MetaError),
    /// A storage target is full.
    #[error(
        "{what}: no space left on {target}; remove files or add capacity, then try again \
         (`threefs status` shows the fullest targets)"
    )]
    NoSpace {
        /// The operation and its place.
        what: String,
        /// The full target.
        target: TargetId,
    },
    /// Every serving replica of the chunk is damaged.
    #[error(
        "{what}: {chunk} is damaged on every serving replica ({detail}); restore the file from its source"
    )]
    Corrupt {
        /// The operation and its place.
        what: String,
        /// The chunk.
        chunk: ChunkId,
        /// What the last replica said.
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
    /// The file was removed or replaced while it was open; what it held is gone.
    #[error("`{path}` was removed or replaced while it was open; open it again")]
    Stale {
        /// As it was opened.
        path: String,
    },
    /// The deadline passed.
    #[error(
        "{what}: no end within {:.1} s; {who} did not answer as needed: {detail}. \
         Look at `threefs status`, or give a longer timeout",
        deadline.as_secs_f64()
    )]
    Unavailable {
        /// The operation and its place.
        what: String,
        /// The service that was waited for last.
        who: String,
        /// The whole time given.
        deadline: Duration,
        /// What it, or the connection to it, said last.
        detail: String,
    },
    /// The peer holds another key, or is no 3FS service.
    #[error("{detail}")]
    Refused {
        /// What the handshake said.
        detail: String,
    },
    /// The right to change anything was lost to somebody else.
    #[error("{what}: another node has what only one may have; open it again on that node")]
    Fenced {
        /// The operation and its place.
        what: String,
    },
    /// Bytes that are not reserved, or not any more: another client cut the file, or the reservation
    /// ended because this client was not heard for long. Some of them may have been written, and
    /// nothing of it happens later.
    #[error("{what}: the range is not reserved; reserve it and write again")]
    NotReserved {
        /// The operation and its place.
        what: String,
    },
    /// An argument is wrong; nothing was done.
    #[error("{detail}")]
    InvalidArgument {
        /// Which, its value and the remedy.
        detail: String,
    },
    /// A peer answered what makes no sense: versions differ, or there is a bug.
    #[error("{who} answered what makes no sense: {detail}; do all services run the same version?")]
    Protocol {
        /// The service.
        who: String,
        /// What it said.
        detail: String,
    },
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

/// What an operation remembers over its attempts, to tell at its end who did not answer.
#[derive(Debug)]
pub(crate) struct Attempts {
    what: String,
    who: String,
    detail: String,
    /// One of them may have had its effect, or may have it yet.
    in_doubt: bool,
}

impl Attempts {
    /// None made yet.
    pub(crate) fn of(what: impl Into<String>) -> Self {
        let (who, detail) = ("mgmtd".into(), "no attempt was made".into());
        Self { what: what.into(), who, detail, in_doubt: false }
    }

    /// One more has failed.
    pub(crate) fn failed(&mut self, who: &str, detail: impl ToString) {
        (self.who, self.detail) = (who.into(), detail.to_string());
    }

    /// One more was sent, and it is not known that it has no effect.
    pub(crate) fn doubt(&mut self) {
        self.in_doubt = true;
    }

    /// The result of a call, unless it could not be made and must be prepared again. Not where an
    /// earlier attempt is in doubt: its copy could come after what is written instead, and undo what was
    /// written later. None comes after the deadline.
    pub(crate) fn call<T>(
        &mut self,
        result: Result<T, CallError>,
    ) -> Result<Result<T, RpcError>, ClientError> {
        match result {
            Ok(done) => Ok(Ok(done)),
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

    /// A failed call: an error if repeating it is of no use.
    pub(crate) fn rpc(&mut self, who: &str, error: &RpcError) -> Result<(), ClientError> {
        self.failed(who, error);
        match error {
            // Expired credentials are renewed meanwhile, or the last error says so.
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

    /// A refusal by a storage service that no retry can change.
    pub(crate) fn refused(&self, who: &str, error: StorageError) -> ClientError {
        match error {
            StorageError::NoSpace { target } => {
                ClientError::NoSpace { what: self.what.clone(), target }
            }
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
    fn what_is_not_reserved_is_not_prepared_again_while_an_attempt_is_in_doubt() {
        let not_reserved = || Err::<(), _>(CallError::NotReserved);
        let timed_out = |sent: bool| {
            let (context, peer, waited_ms) = ("storage".into(), "here".into(), 1);
            Err::<(), _>(CallError::Rpc(RpcError::TimedOut { context, peer, waited_ms, sent }))
        };
        let mut attempts = Attempts::of("write");
        attempts.call(timed_out(false)).unwrap().unwrap_err();
        let refused = attempts.call(not_reserved()).unwrap_err();
        assert!(matches!(refused, ClientError::NotReserved { .. }), "{refused}");
        attempts.call(timed_out(true)).unwrap().unwrap_err();
        let error = attempts.call(not_reserved()).unwrap().unwrap_err();
        assert_eq!(attempts.rpc("meta", &error), Ok(()), "it is tried until the deadline");
        let mut attempts = Attempts::of("write");
        attempts.doubt();
        attempts.call(not_reserved()).unwrap().unwrap_err();
    }
}
