//! Limits of chunk operations: how many run concurrently, and how long they may make no progress.
//!
//! An operation ends at a fixed deadline, or when it makes no progress: a batch of any size may take
//! any time as long as its parts complete, since its deadline counts from the last completed part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Client;
use crate::error::ClientError;

/// Limits the operations in flight. Shared by all operations of a client.
#[derive(Clone)]
pub(crate) struct Window {
    operations: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    bytes_max: usize,
    progress: Arc<Progress>,
}

/// Permit for one chunk operation, released when dropped.
pub(crate) struct Permit {
    _operation: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

impl Window {
    pub(crate) fn new(operations_max: usize, bytes_max: usize) -> Self {
        Self {
            operations: Arc::new(Semaphore::new(operations_max)),
            bytes: Arc::new(Semaphore::new(bytes_max)),
            bytes_max,
            progress: Arc::new(Progress::start()),
        }
    }

    /// Waits for a permit as long as earlier operations make progress. A single operation larger
    /// than the window gets all of it. `None` after the deadline.
    pub(crate) async fn acquire(&self, bytes: usize, patience: &ProgressTimeout) -> Option<Permit> {
        let bytes = u32::try_from(bytes.min(self.bytes_max)).unwrap_or(u32::MAX);
        let (operations, all_bytes) = (Arc::clone(&self.operations), Arc::clone(&self.bytes));
        let mut permit = std::pin::pin!(async move {
            // Fails only if the semaphore is closed, which never happens.
            let _operation = operations.acquire_owned().await.ok()?;
            Some(Permit { _operation, _bytes: all_bytes.acquire_many_owned(bytes).await.ok()? })
        });
        loop {
            let deadline = patience.deadline_with(&self.progress);
            match tokio::time::timeout_at(deadline.instant().into(), &mut permit).await {
                Ok(permit) => return permit,
                Err(_) if patience.deadline_with(&self.progress).passed() => return None,
                Err(_) => {}
            }
        }
    }
}

impl Client {
    /// Records that a chunk operation has succeeded.
    pub(crate) fn record_progress(&self, patience: &ProgressTimeout) {
        patience.record_progress();
        self.0.window.progress.record_progress();
    }
}

/// The result of a task.
pub(crate) fn task_result<T>(
    finished: Result<Result<T, ClientError>, tokio::task::JoinError>,
) -> Result<T, ClientError> {
    finished.unwrap_or_else(|error| {
        Err(ClientError::Protocol {
            who: "a task of this client".into(),
            detail: error.to_string(),
        })
    })
}

/// Time of the last progress.
#[derive(Debug)]
pub(crate) struct Progress {
    start: Instant,
    last_ms: AtomicU64,
}

impl Progress {
    /// Starts now.
    pub(crate) fn start() -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    /// Records that a part has completed.
    pub(crate) fn record_progress(&self) {
        self.last_ms.fetch_max(self.start.elapsed().as_millis() as u64, Relaxed);
    }

    /// The deadline `timeout` after the last progress.
    pub(crate) fn deadline(&self, timeout: Duration) -> Deadline {
        let end = Duration::from_millis(self.last_ms.load(Relaxed)) + timeout;
        Deadline::after(end.saturating_sub(self.start.elapsed()))
    }
}

/// Timeout of an operation, see the module. Clones belong to the same operation.
#[derive(Clone, Debug)]
pub(crate) enum ProgressTimeout {
    /// The caller's deadline.
    Until(Deadline),
    /// This long after the last progress of the operation.
    Progress(Arc<Progress>, Duration),
}

impl From<Deadline> for ProgressTimeout {
    fn from(deadline: Deadline) -> Self {
        Self::Until(deadline)
    }
}

impl ProgressTimeout {
    /// Timeout of an operation that starts now.
    pub(crate) fn start(timeout: Duration) -> Self {
        Self::Progress(Arc::new(Progress::start()), timeout)
    }

    /// The deadline if no more progress is made. It never moves backwards.
    pub(crate) fn deadline(&self) -> Deadline {
        match self {
            Self::Until(deadline) => *deadline,
            Self::Progress(progress, timeout) => progress.deadline(*timeout),
        }
    }

    /// Whether the deadline has passed.
    pub(crate) fn expired(&self) -> bool {
        self.deadline().passed()
    }

    /// Records that a part of the operation has completed.
    pub(crate) fn record_progress(&self) {
        if let Self::Progress(progress, _) = self {
            progress.record_progress();
        }
    }

    /// The deadline while waiting for other operations, whose progress counts too.
    pub(crate) fn deadline_with(&self, first: &Progress) -> Deadline {
        match self {
            Self::Until(deadline) => *deadline,
            Self::Progress(own, timeout) => own.deadline(*timeout).max(first.deadline(*timeout)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_moves_the_deadline_and_a_fixed_one_stays() {
        let timeout = Duration::from_millis(40);
        let patience = ProgressTimeout::start(timeout);
        std::thread::sleep(Duration::from_millis(20));
        let before = patience.deadline();
        patience.record_progress();
        assert!(patience.deadline() > before);
        std::thread::sleep(Duration::from_millis(60));
        assert!(patience.expired());
        let other = Progress::start();
        assert!(
            !patience.deadline_with(&other).passed(),
            "the other operation still makes progress"
        );
        let fixed = ProgressTimeout::from(Deadline::after(timeout));
        let end = fixed.deadline();
        fixed.record_progress();
        assert_eq!((fixed.deadline(), fixed.deadline_with(&other)), (end, end));
    }
}
