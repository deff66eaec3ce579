//! Progress timeouts: an operation ends at a fixed deadline, or when it makes no progress.
//!
//! A batch of any size may take any time as long as its parts complete: its deadline counts from
//! the last completed part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;

/// Time of the last progress.
#[derive(Debug)]
pub(crate) struct Progress {
    started: Instant,
    last_ms: AtomicU64,
}

impl Progress {
    /// Starts now.
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    /// Records that a part has completed.
    pub(crate) fn record_progress(&self) {
        self.last_ms.fetch_max(self.started.elapsed().as_millis() as u64, Relaxed);
    }

    /// The deadline `timeout` after the last progress.
    pub(crate) fn deadline(&self, timeout: Duration) -> Deadline {
        let end = Duration::from_millis(self.last_ms.load(Relaxed)) + timeout;
        Deadline::after(end.saturating_sub(self.started.elapsed()))
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
