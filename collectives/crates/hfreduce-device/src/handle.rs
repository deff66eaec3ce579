//! Handle of an operation on a device's memory.

use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use hfreduce_engine::communicator::TIMEOUT_MAX;
use hfreduce_engine::{Callback, CollectiveError, ErrorKind, WaitError, Work};

use crate::error::DeviceError;
use crate::settled::{Failure, Settled};

/// Time that a failed operation waits for queued copies before its error is returned.
const DRAINING: Duration = Duration::from_secs(1);

/// Handle of one operation on a device's memory.
#[derive(Clone)]
pub struct DeviceWork {
    pub(crate) work: Work,
    pub(crate) settled: Arc<Settled>,
    pub(crate) worker: Thread,
    pub(crate) device: i32,
    pub(crate) grace_period: Duration,
}

impl DeviceWork {
    /// Waits until the result is in the device's memory, at most `timeout` (the operation's deadline ends it
    /// anyway): work that the caller queues after that, in any stream, reads the result.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), WaitError> {
        let started = Instant::now();
        match self.work.wait(timeout) {
            Err(WaitError::Failed(error)) => return Err(self.failed(error).into()),
            waited => waited?,
        }
        self.worker.unpark();
        let last = self.work.deadline() + self.grace_period;
        let until = timeout.map_or(last, |timeout| last.min(started + timeout.min(TIMEOUT_MAX)));
        match self.settled.wait(until, |state| state.end.is_some()) {
            Some(Ok(())) => Ok(()),
            Some(Err(Failure::Collective(error))) => Err(self.failed(error).into()),
            Some(Err(Failure::Device(error))) => {
                Err(self.failed(self.collective_error(&error)).into())
            }
            None if until < last => Err(WaitError::StillRunning {
                operation: self.work.describe(),
                sequence: self.work.sequence(),
                waited: started.elapsed(),
            }),
            None => {
                // The worker hangs in a call of the driver that does not return.
                let late = DeviceError::Late { what: "a call of the driver", device: self.device };
                let error = self.collective_error(&late);
                self.work.abort(late.kind(), &late.to_string());
                Err(self.failed(error).into())
            }
        }
    }

    fn collective_error(&self, error: &DeviceError) -> CollectiveError {
        self.work.failure(error.kind(), "copying to the GPU", &error.to_string())
    }

    /// Starts no further copy; queued copies get a moment to end.
    fn failed(&self, error: CollectiveError) -> CollectiveError {
        self.settled.end(Err(Failure::Collective(error.clone())));
        self.worker.unpark();
        self.settled.wait(Instant::now() + DRAINING, |state| state.drained);
        error
    }

    /// False in a forked child, where nothing can complete the operation.
    pub fn is_ours(&self) -> bool {
        self.work.is_ours()
    }

    /// Runs `callback` once the operation has ended, immediately if it has: see [`Work::on_end`].
    pub fn on_end(&self, callback: Callback) {
        self.settled.on_end(callback);
        self.worker.unpark();
    }

    /// The error of a wait in a process that did not start the operation.
    pub fn failure(&self, kind: ErrorKind, phase: &str, detail: &str) -> CollectiveError {
        self.work.failure(kind, phase, detail)
    }

    /// True once the operation has ended.
    pub fn is_done(&self) -> bool {
        self.settled.is_ended()
    }

    /// True once copies no longer access the operation's memory, whatever its result.
    pub fn is_drained(&self) -> bool {
        self.settled.state().drained
    }

    /// Waits until the operation is drained; false after the timeout.
    pub fn drain(&self, timeout: Duration) -> bool {
        self.settled.wait(Instant::now() + timeout.min(TIMEOUT_MAX), |state| state.drained);
        self.is_drained()
    }

    /// True if the operation should have ended long ago.
    pub fn is_overdue(&self) -> bool {
        !self.is_done() && self.work.is_overdue()
    }

    /// The error, if the operation failed.
    pub fn error(&self) -> Option<CollectiveError> {
        match self.settled.state().end.as_ref()?.as_ref().err()? {
            Failure::Collective(error) => Some(error.clone()),
            Failure::Device(error) => Some(self.collective_error(error)),
        }
    }

    /// The sender of a receive from any rank, once known.
    pub fn source(&self) -> Option<u32> {
        self.work.source()
    }

    /// The operation's number in the communicator.
    pub fn sequence(&self) -> u64 {
        self.work.sequence()
    }
}
