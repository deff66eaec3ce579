//! How long an operation goes on: to a fixed deadline, or as long as it makes progress.
//!
//! A batch of any size may take any time as long as its parts keep ending: its deadline counts from
//! the last one that ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;

/// When something last moved.
#[derive(Debug)]
pub(crate) struct Progress {
    started: Instant,
    last_ms: AtomicU64,
}

impl Progress {
    /// It starts now.
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    /// A part has ended well.
    pub(crate) fn moved(&self) {
        self.last_ms.fetch_max(self.started.elapsed().as_millis() as u64, Relaxed);
    }

    /// The deadline of whoever gives up `timeout` after the last progress.
    pub(crate) fn deadline(&self, timeout: Duration) -> Deadline {
        let end = Duration::from_millis(self.last_ms.load(Relaxed)) + timeout;
        Deadline::after(end.saturating_sub(self.started.elapsed()))
    }
}

/// See the module. Clones belong to the same operation.
#[derive(Clone, Debug)]
pub(crate) enum Patience {
    /// The caller's deadline.
    Until(Deadline),
    /// So long after the last progress of the operation.
    Progress(Arc<Progress>, Duration),
}

impl From<Deadline> for Patience {
    fn from(deadline: Deadline) -> Self {
        Self::Until(deadline)
    }
}

impl Patience {
    /// For an operation that starts now.
    pub(crate) fn start(timeout: Duration) -> Self {
        Self::Progress(Arc::new(Progress::start()), timeout)
    }

    /// When it ends if nothing moves any more. It never moves to an earlier time.
    pub(crate) fn deadline(&self) -> Deadline {
        match self {
            Self::Until(deadline) => *deadline,
            Self::Progress(progress, timeout) => progress.deadline(*timeout),
        }
    }

    /// True once it is over.
    pub(crate) fn over(&self) -> bool {
        self.deadline().passed()
    }

    /// A part of the operation has ended well.
    pub(crate) fn moved(&self) {
        if let Self::Progress(progress, _) = self {
            progress.moved();
        }
    }

    /// The deadline while something else, which moves too, must come first.
    pub(crate) fn behind(&self, first: &Progress) -> Deadline {
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
        let patience = Patience::start(timeout);
        std::thread::sleep(Duration::from_millis(20));
        let before = patience.deadline();
        patience.moved();
        assert!(patience.deadline() > before);
        std::thread::sleep(Duration::from_millis(60));
        assert!(patience.over());
        let other = Progress::start();
        assert!(!patience.behind(&other).passed(), "what comes first still moves");
        let fixed = Patience::from(Deadline::after(timeout));
        let end = fixed.deadline();
        fixed.moved();
        assert_eq!((fixed.deadline(), fixed.behind(&other)), (end, end));
    }
}
