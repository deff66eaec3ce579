//! Handles of operations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TIMEOUT_MAX;
use super::progress::Inner;
use crate::work::{Callback, WorkState};
use hfreduce_core::error::{AbortReason, CollectiveError, ErrorKind};
use hfreduce_shm::watermarks::Watermarks;

/// Handle of one operation.
#[derive(Clone)]
pub struct Work {
    pub(super) state: Arc<WorkState>,
    pub(super) inner: Arc<Inner>,
}

/// Why a wait returned without a completed operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] CollectiveError),
    /// The timeout of the wait has passed; the operation continues.
    #[error(
        "{operation} #{sequence} is not complete after {waited:?}; it continues until its deadline"
    )]
    StillRunning {
        /// The operation.
        operation: String,
        /// Its sequence number.
        sequence: u64,
        /// The time waited.
        waited: Duration,
    },
}

impl Work {
    /// Waits until the operation has ended, for `timeout` at most (its deadline ends it anyway).
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let started = Instant::now();
        // The driver ends every operation soon after its deadline; the margin is for an overloaded
        // machine.
        let last = self.state.deadline.max(started) + Duration::from_secs(60);
        let until = timeout.map_or(last, |timeout| last.min(started + timeout.min(TIMEOUT_MAX)));
        if self.inner.is_ours() {
            self.inner.wait(started, until, || self.state.is_done());
        } else if !self.state.is_done() {
            return Err(WaitError::Failed(self.inner.forked(&self.state.fingerprint.describe())));
        }
        match self.state.result() {
            Some(result) => Ok(result?),
            None => Err(WaitError::StillRunning {
                operation: self.state.fingerprint.describe(),
                sequence: self.state.sequence,
                waited: started.elapsed(),
            }),
        }
    }

    /// False in a forked child, where nothing can complete the operation.
    pub fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    /// Runs `callback` once the operation has ended, or now if it has. It runs on a thread that
    /// moves data: it must neither wait nor call the communicator. The caller need not wait: the
    /// background thread completes the operation.
    pub fn on_end(&self, callback: Callback) {
        self.state.on_end(callback);
        if !self.state.is_done() && self.inner.is_ours() {
            self.inner.shared.notify();
            self.inner.wake_background();
        }
    }

    /// The same for a caller that moves the data: the background thread is not woken.
    pub fn when_ended(&self, callback: Callback) {
        self.state.on_end(callback);
    }

    /// True if the operation should have ended long ago: a bug in the engine, or a starved process.
    pub fn is_overdue(&self) -> bool {
        !self.is_done() && Instant::now() > self.state.deadline + Duration::from_secs(60)
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// The error, if the operation failed.
    pub fn error(&self) -> Option<CollectiveError> {
        self.state.result()?.err()
    }

    /// Reports that the bytes before `end` of its pipelined input have arrived.
    pub fn arrived(&self, watermarks: &Watermarks, end: usize) {
        if !self.inner.is_ours() {
            return; // Memory and doorbell belong to the parent.
        }
        watermarks.arrive(end);
        self.inner.shared.notify();
    }

    /// Aborts the communicator on every rank because the memory of this operation cannot be copied;
    /// names this rank. Does not wait.
    pub fn abort(&self, kind: ErrorKind, detail: &str) {
        self.inner.abort(kind, detail);
    }

    /// The error of this operation for a failure of this rank outside the engine.
    pub fn failure(&self, kind: ErrorKind, phase: &str, detail: &str) -> CollectiveError {
        let identity = &self.inner.shared.identity;
        let node = identity.placement.node_name(identity.rank);
        let operation = self.state.fingerprint.describe();
        let cause = AbortReason::new(kind, identity.rank, detail).with_peer(identity.rank, node);
        let cause = cause.during(&operation, self.state.sequence as i64, phase);
        CollectiveError {
            job: identity.job.as_str().into(),
            rank: identity.rank,
            node: node.into(),
            operation,
            sequence: self.state.sequence as i64,
            phase: phase.to_owned(),
            cause: Box::new(cause),
            flight_record: None,
        }
    }

    /// Description of the operation, as in errors.
    pub fn describe(&self) -> String {
        self.state.fingerprint.describe()
    }

    /// Deadline of the operation.
    pub fn deadline(&self) -> Instant {
        self.state.deadline
    }

    /// The sender of a receive from any rank, once known.
    pub fn source(&self) -> Option<u32> {
        self.state.source()
    }

    /// Sequence number.
    pub fn sequence(&self) -> u64 {
        self.state.sequence
    }
}
