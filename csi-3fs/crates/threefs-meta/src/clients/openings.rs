//! Openings of files in progress.
//!
//! A service that checks which removed files its clients have open must know every opening that may
//! have read a file before its removal: it waits for those in progress.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fabric::deadline::Deadline;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Openings {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    running: BTreeSet<u64>,
}

/// An opening in progress; it ends when this is dropped.
pub(crate) struct Opening<'a> {
    openings: &'a Openings,
    number: u64,
}

impl Openings {
    /// To be called before the file is read, and held until the open file is recorded.
    pub(crate) fn start(&self) -> Opening<'_> {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.running.insert(number);
        Opening { openings: self, number }
    }

    /// Waits for all openings that have started so far; returns false at the deadline.
    pub(crate) async fn wait_for_current(&self, deadline: Deadline) -> bool {
        let until = self.state().next;
        let wait = async {
            loop {
                let ended = self.ended.notified();
                tokio::pin!(ended);
                ended.as_mut().enable();
                if self.state().running.first().is_none_or(|first| *first >= until) {
                    return;
                }
                ended.await;
            }
        };
        tokio::time::timeout_at(deadline.instant().into(), wait).await.is_ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.openings.state().running.remove(&self.number);
        self.openings.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_check_waits_for_earlier_openings_and_not_for_later_ones() {
        let openings = Openings::default();
        let soon = || Deadline::after(Duration::from_secs(60));
        assert!(openings.wait_for_current(soon()).await);
        let first = openings.start();
        let past = Deadline::after(Duration::from_millis(1));
        assert!(!openings.wait_for_current(past).await);
        let (waited, later) = tokio::join!(openings.wait_for_current(soon()), async {
            let later = openings.start();
            drop(first);
            later
        });
        assert!(waited);
        drop(later);
    }
}
