//! Releases of locks that no metadata service has answered in time. Their requests are answered; the
//! daemon repeats the releases, in order, until they are answered or the session is lost.

use std::collections::VecDeque;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_core::ids::InodeId;
use threefs_meta::LockChange;
use tokio::sync::watch;

/// Maximum number of releases. Locks of further ones end when the mount has closed the file.
const DEFERRED_MAX: usize = 16_384;

#[derive(Default)]
struct State {
    changes: VecDeque<(InodeId, LockChange)>,
    /// Number of releases deferred so far.
    total: u64,
}

#[derive(Default)]
pub(crate) struct Deferred(watch::Sender<State>);

impl Deferred {
    /// False: too many releases are deferred.
    pub(crate) fn push(&self, inode: InodeId, change: LockChange) -> bool {
        let mut accepted = true;
        self.0.send_if_modified(|state| {
            // A lock of this owner that was granted meanwhile is released, too.
            state.total += 1;
            let entry = (inode, change);
            let last = state.changes.iter().rev().find(|(deferred, _)| *deferred == inode);
            if last != Some(&entry) {
                accepted = state.changes.len() < DEFERRED_MAX;
                if accepted {
                    state.changes.push_back(entry);
                }
            }
            accepted
        });
        accepted
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().changes.is_empty()
    }

    /// The first release; waits for one.
    pub(crate) async fn first(&self) -> (InodeId, LockChange) {
        let mut changed = self.0.subscribe();
        loop {
            if let Some(first) = changed.borrow_and_update().changes.front() {
                return first.clone();
            }
            // The sender lives as long as this.
            let _ = changed.changed().await;
        }
    }

    /// The first release was answered.
    pub(crate) fn remove(&self, change: &(InodeId, LockChange)) {
        self.0.send_modify(|state| {
            // Not if all were dropped meanwhile.
            if state.changes.front() == Some(change) {
                state.changes.pop_front();
            }
        });
    }

    /// The session has ended, and with it all locks.
    pub(crate) fn clear(&self) {
        self.0.send_modify(|state| state.changes.clear());
    }

    /// Waits until no release of a file is deferred: it would end a lock that is granted before it.
    /// Returns the number of releases deferred so far.
    pub(crate) async fn wait(&self, inode: InodeId, deadline: Deadline) -> Result<u64, Errno> {
        let mut changed = self.0.subscribe();
        let none =
            changed.wait_for(|state| state.changes.iter().all(|(deferred, _)| *deferred != inode));
        match tokio::time::timeout_at(deadline.instant().into(), none).await {
            Ok(Ok(state)) => Ok(state.total),
            _ => Err(Errno::TIMEDOUT),
        }
    }

    /// Number of releases deferred so far.
    pub(crate) fn total(&self) -> u64 {
        self.0.borrow().total
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SESSION: u64 = 5;

    fn release(inode: u64) -> (InodeId, LockChange) {
        let inode = InodeId(inode);
        (inode, LockChange::ClearFile { session: SESSION, inode })
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(20))
    }

    #[tokio::test]
    async fn releases_are_executed_in_order_and_block_later_locks_of_their_file() {
        let deferred = Deferred::default();
        for (inode, change) in [release(7), release(8), release(7)] {
            assert!(deferred.push(inode, change));
        }
        assert_eq!(deferred.wait(InodeId(7), soon()).await, Err(Errno::TIMEDOUT));
        assert_eq!(deferred.wait(InodeId(9), soon()).await, Ok(3));
        assert_eq!(deferred.first().await, release(7));
        deferred.remove(&release(7));
        assert_eq!(deferred.wait(InodeId(7), soon()).await, Ok(3), "it was deferred once");
        assert_eq!(deferred.first().await, release(8));
        deferred.clear();
        deferred.remove(&release(8));
        assert!(deferred.is_empty());
        assert_eq!(deferred.total(), 3);
    }

    #[test]
    fn releases_are_bounded() {
        let deferred = Deferred::default();
        let push = |number: u64| {
            let (inode, change) = release(number);
            deferred.push(inode, change)
        };
        deferred.0.send_modify(|state| {
            state.changes.extend((0..DEFERRED_MAX as u64).map(release));
        });
        assert!(!push(DEFERRED_MAX as u64));
        assert!(push(1), "it is deferred already");
    }
}
