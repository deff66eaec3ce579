//! What a call gives back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Inner, TIMEOUT_MAX};
use crate::error::{AbortReason, CollectiveError, ErrorKind};
use crate::watermarks::Watermarks;
use crate::work::{Callback, WorkState};

/// A handle of one operation.
#[derive(Clone)]
pub struct Work {
    pub(super) state: Arc<WorkState>,
    pub(super) inner: Arc<Inner>,
}

/// How a wait ended without the operation having ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] CollectiveError),
    /// The time given to the wait passed; the operation goes on.
    #[error(
        "{operation} #{sequence} is not done after {waited:?}; it goes on until its own deadline"
    )]
    StillRunning {
        /// The operation.
        operation: String,
        /// Its number.
        sequence: u64,
        /// The time waited.
        waited: Duration,
    },
}

impl Work {
    /// Waits until the operation has ended, at most `timeout` (its own deadline ends it anyway).
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let started = Instant::now();
        // The driver ends every operation soon after its deadline; the margin is for a machine
        // that is too busy to run it.
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

    /// Runs `callback` once the operation has ended, at once if it has. It runs on a thread that
    /// moves data: it must neither wait nor call the communicator. The caller need not wait: the
    /// background thread completes the operation.
    pub fn on_end(&self, callback: Callback) {
        self.state.on_end(callback);
        if !self.state.is_done() && self.inner.is_ours() {
            self.inner.shared.notify();
            self.inner.wake_background();
        }
    }

    /// The same for a caller that moves the data itself: the background thread is left alone.
    pub(crate) fn when_ended(&self, callback: Callback) {
        self.state.on_end(callback);
    }

    /// True if it should have ended long ago: the engine has a fault, or gets no processor.
    pub fn is_overdue(&self) -> bool {
        !self.is_done() && Instant::now() > self.state.deadline + Duration::from_secs(60)
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        self.state.is_done()
    }

    /// Why it failed, if it did.
    pub fn error(&self) -> Option<CollectiveError> {
        self.state.result()?.err()
    }

    /// Says that the bytes before `end` of its paced input are there.
    pub fn arrived(&self, watermarks: &Watermarks, end: usize) {
        if !self.inner.is_ours() {
            return; // The parent's memory and doorbell.
        }
        watermarks.arrive(end);
        self.inner.shared.notify();
    }

    /// Breaks the communicator on every rank: the memory of this operation cannot be brought or
    /// taken away, and this rank is to blame. Waits for nobody.
    pub fn abort(&self, kind: ErrorKind, detail: &str) {
        self.inner.abort(kind, detail);
    }

    /// The error of this operation on this rank for what befell it outside the engine.
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

    /// What it is, as errors say it.
    pub fn describe(&self) -> String {
        self.state.fingerprint.describe()
    }

    /// When it gives up.
    pub fn deadline(&self) -> Instant {
        self.state.deadline
    }

    /// Who sent what a receive from anybody was given, once it is known.
    pub fn source(&self) -> Option<u32> {
        self.state.source()
    }

    /// Its number in the communicator.
    pub fn sequence(&self) -> u64 {
        self.state.sequence
    }
}
