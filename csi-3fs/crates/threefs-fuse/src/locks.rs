//! Locks of this mount over other mounts: the lock session of the mount and the files with locks.
//!
//! The metadata service holds the locks. They last as long as the mount renews its session. Writes
//! to files with locks require the lease of the session, as those of a mount with a claim require
//! the claim's (see `claim`); reads of them check it before and after. Once the session is lost,
//! other mounts may hold its locks: the files have errors until this mount has closed them.

mod deferred;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{BootInstant, Lease};
use threefs_core::ids::InodeId;
use tokio::sync::{Notify, Semaphore, watch};

use crate::journal::Journal;
use deferred::Deferred;

/// Maximum number of requests of a mount that wait for locks.
const WAITS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Validity {
    Until(BootInstant),
    Lost,
}

/// The lock session of the mount.
pub(crate) struct LockSession {
    pub number: u64,
    pub lease: Lease,
    validity: watch::Sender<Validity>,
}

impl LockSession {
    pub(crate) fn new(number: u64, until: BootInstant) -> Self {
        let (lease, validity) = (Lease::default(), watch::Sender::new(Validity::Until(until)));
        lease.renew_until(until);
        Self { number, lease, validity }
    }

    pub(crate) fn renew(&self, until: BootInstant) {
        self.validity.send_if_modified(|validity| {
            let valid = *validity != Validity::Lost;
            if valid {
                *validity = Validity::Until(until);
                self.lease.renew_until(until);
            }
            valid
        });
    }

    /// Waits until the session is certainly valid.
    pub(crate) async fn wait_valid(&self, deadline: Deadline) -> Result<(), Errno> {
        let mut validity = self.validity.subscribe();
        loop {
            match *validity.borrow_and_update() {
                Validity::Until(until) if BootInstant::now() < until => return Ok(()),
                Validity::Until(_) => {}
                Validity::Lost => return Err(Errno::IO),
            }
            let changed = validity.changed();
            if tokio::time::timeout_at(deadline.instant().into(), changed).await.is_err() {
                return Err(Errno::TIMEDOUT);
            }
        }
    }

    /// Returns once the session is lost.
    pub(crate) async fn lost(&self) {
        let mut validity = self.validity.subscribe();
        // The sender lives as long as this session.
        let _ = validity.wait_for(|validity| *validity == Validity::Lost).await;
    }

    fn revoke(&self) {
        self.lease.revoke();
        self.validity.send_replace(Validity::Lost);
    }
}

/// A file with locks, or with requests in progress.
#[derive(Default)]
struct LockedFile {
    requests: usize,
    /// Requests that were granted or wait, since the file was added.
    granted: u64,
}

#[derive(Default)]
struct State {
    session: Option<Arc<LockSession>>,
    files: HashMap<InodeId, LockedFile>,
    lost: HashSet<InodeId>,
    unused_since: Option<Instant>,
}

pub(crate) struct Locks {
    /// Whether the kernel sends lock requests.
    pub enabled: bool,
    state: Mutex<State>,
    /// Whether any file has locks or has lost them.
    any: AtomicBool,
    /// Held while a session is started.
    pub starting: tokio::sync::Mutex<()>,
    pub started: Notify,
    pub waits: Semaphore,
    pub deferred: Deferred,
    /// The log names the refusal of an older service once.
    pub refusal_logged: AtomicBool,
}

/// A request for a lock in progress; dropping it ends it.
pub(crate) struct Request<'a> {
    locks: &'a Locks,
    journal: &'a Journal,
    inode: InodeId,
}

impl Locks {
    /// Continues the session of a previous daemon, which is valid again once it is renewed.
    pub(crate) fn open(journal: &Journal, enabled: bool) -> Self {
        let mut state = State::default();
        if let Some(number) = journal.lock_session() {
            state.session = Some(Arc::new(LockSession::new(number, BootInstant::now())));
        }
        for (inode, lost) in journal.locked_files() {
            if lost || state.session.is_none() {
                state.lost.insert(inode);
            } else {
                state.files.insert(inode, LockedFile { requests: 0, granted: 1 });
            }
        }
        let any = !state.files.is_empty() || !state.lost.is_empty();
        let started = Notify::new();
        if state.session.is_some() {
            started.notify_one();
        }
        Self {
            enabled,
            state: Mutex::new(state),
            any: AtomicBool::new(any),
            starting: tokio::sync::Mutex::default(),
            started,
            waits: Semaphore::new(WAITS_MAX),
            deferred: Deferred::default(),
            refusal_logged: AtomicBool::new(false),
        }
    }

    pub(crate) fn session(&self) -> Option<Arc<LockSession>> {
        self.state().session.clone()
    }

    /// Uses a session from now on, recorded for the next daemon.
    pub(crate) fn start(&self, journal: &Journal, session: &Arc<LockSession>) {
        journal.set_lock_session(Some(session.number));
        let mut state = self.state();
        state.session = Some(Arc::clone(session));
        state.unused_since = Some(Instant::now());
        drop(state);
        self.started.notify_one();
    }

    /// The session whose lease I/O of a file requires; EIO if the file has lost its locks.
    pub(crate) fn required(&self, inode: InodeId) -> Result<Option<Arc<LockSession>>, Errno> {
        if !self.any.load(SeqCst) {
            return Ok(None);
        }
        let state = self.state();
        if state.lost.contains(&inode) {
            return Err(Errno::IO);
        }
        let locked = state.files.get(&inode).is_some_and(|file| file.granted > 0);
        Ok(if locked { state.session.clone() } else { None })
    }

    /// Whether a close of the file may release locks.
    pub(crate) fn is_locked(&self, inode: InodeId) -> bool {
        self.any.load(SeqCst) && self.state().files.contains_key(&inode)
    }

    /// Starts a request for a lock; `None`: too many files have locks.
    pub(crate) fn request<'a>(
        &'a self,
        journal: &'a Journal,
        inode: InodeId,
    ) -> Option<Request<'a>> {
        let mut state = self.state();
        if !journal.add_locked(inode) {
            return None;
        }
        state.files.entry(inode).or_default().requests += 1;
        self.any.store(true, SeqCst);
        Some(Request { locks: self, journal, inode })
    }

    /// Number of requests granted so far, for [`Locks::released`].
    pub(crate) fn granted(&self, inode: InodeId) -> u64 {
        self.state().files.get(&inode).map_or(0, |file| file.granted)
    }

    /// The mount held no lock of a file at a time after `granted` requests were granted.
    pub(crate) fn released(&self, journal: &Journal, inode: InodeId, granted: u64) {
        let mut state = self.state();
        if let Some(file) = state.files.get_mut(&inode)
            && file.granted == granted
        {
            file.granted = 0;
        }
        self.remove_unused(&mut state, journal, inode);
    }

    fn remove_unused(&self, state: &mut State, journal: &Journal, inode: InodeId) {
        let unused = |file: &LockedFile| file.requests == 0 && file.granted == 0;
        if state.files.get(&inode).is_some_and(unused) {
            state.files.remove(&inode);
            journal.remove_locked(inode);
        }
        if state.files.is_empty() {
            state.unused_since.get_or_insert_with(Instant::now);
            self.any.store(!state.lost.is_empty(), SeqCst);
        } else {
            state.unused_since = None;
        }
    }

    /// Gives up the session if no file has had locks for this long.
    pub(crate) fn take_unused(
        &self,
        journal: &Journal,
        unused: Duration,
    ) -> Option<Arc<LockSession>> {
        let mut state = self.state();
        let is_unused = state.files.is_empty()
            && state.unused_since.is_none_or(|since| since.elapsed() >= unused);
        let session = if is_unused { state.session.take() } else { None };
        if session.is_some() {
            journal.set_lock_session(None);
        }
        session
    }

    /// The session has ended at the metadata service. Returns the files that have lost their locks.
    pub(crate) fn lose(&self, journal: &Journal, session: &LockSession) -> Vec<InodeId> {
        let mut state = self.state();
        // Before the files are released from it: an I/O that starts now must see one of both.
        session.revoke();
        if state.session.as_ref().is_none_or(|current| current.number != session.number) {
            return Vec::new();
        }
        journal.lose_locked();
        journal.set_lock_session(None);
        state.session = None;
        self.deferred.clear();
        let lost: Vec<InodeId> = state.files.drain().map(|(inode, _)| inode).collect();
        state.lost.extend(&lost);
        lost
    }

    /// A file is not open any more.
    pub(crate) fn closed(&self, journal: &Journal, inode: InodeId) {
        if !self.any.load(SeqCst) {
            return;
        }
        let mut state = self.state();
        if state.lost.remove(&inode) {
            journal.remove_locked(inode);
            self.any.store(!state.files.is_empty() || !state.lost.is_empty(), SeqCst);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Request<'_> {
    /// The request was granted, or waits.
    pub(crate) fn granted(&self) {
        if let Some(file) = self.locks.state().files.get_mut(&self.inode) {
            file.granted += 1;
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut state = self.locks.state();
        if let Some(file) = state.files.get_mut(&self.inode) {
            file.requests = file.requests.saturating_sub(1);
        }
        self.locks.remove_unused(&mut state, self.journal, self.inode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(7);

    fn valid() -> Arc<LockSession> {
        Arc::new(LockSession::new(5, BootInstant::now().after(Duration::from_secs(60))))
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(20))
    }

    #[tokio::test]
    async fn io_of_a_locked_file_requires_the_session_until_the_last_lock_is_released() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let locks = Locks::open(&journal, true);
        locks.start(&journal, &valid());
        let refused = locks.request(&journal, FILE).unwrap();
        assert!(locks.required(FILE).unwrap().is_none(), "it has no lock yet");
        drop(refused);
        assert!(!locks.is_locked(FILE) && journal.locked_files().is_empty());
        let request = locks.request(&journal, FILE).unwrap();
        request.granted();
        drop(request);
        assert!(locks.required(FILE).unwrap().is_some());
        assert!(locks.required(InodeId(8)).unwrap().is_none());
        let granted = locks.granted(FILE);
        let request = locks.request(&journal, FILE).unwrap();
        request.granted();
        locks.released(&journal, FILE, granted);
        drop(request);
        assert!(locks.is_locked(FILE), "another request was granted meanwhile");
        assert!(locks.take_unused(&journal, Duration::ZERO).is_none());
        locks.released(&journal, FILE, locks.granted(FILE));
        assert!(!locks.is_locked(FILE) && journal.locked_files().is_empty());
        assert!(locks.take_unused(&journal, Duration::from_secs(60)).is_none());
        assert!(locks.take_unused(&journal, Duration::ZERO).is_some());
        assert!(journal.lock_session().is_none() && locks.session().is_none());
    }

    #[tokio::test]
    async fn a_lost_session_means_errors_until_the_file_is_closed_also_for_a_later_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let journal = Journal::open(Some(&path), InodeId(1), true).unwrap();
        let (locks, session) = (Locks::open(&journal, true), valid());
        locks.start(&journal, &session);
        locks.request(&journal, FILE).unwrap().granted();
        assert_eq!(session.wait_valid(soon()).await, Ok(()));
        // A later daemon waits for the first renewal.
        let next = Journal::open(Some(&path), InodeId(1), false).unwrap();
        let resumed = Locks::open(&next, true).required(FILE).unwrap().unwrap();
        assert_eq!(resumed.wait_valid(soon()).await, Err(Errno::TIMEDOUT));
        resumed.renew(BootInstant::now().after(Duration::from_secs(60)));
        assert_eq!(resumed.wait_valid(soon()).await, Ok(()));
        assert_eq!(locks.lose(&journal, &session), [FILE]);
        assert_eq!(session.wait_valid(soon()).await, Err(Errno::IO));
        session.renew(BootInstant::now().after(Duration::from_secs(60)));
        assert_eq!(session.wait_valid(soon()).await, Err(Errno::IO), "it stays lost");
        assert_eq!(locks.required(FILE).err(), Some(Errno::IO));
        let next = Journal::open(Some(&path), InodeId(1), false).unwrap();
        let resumed = Locks::open(&next, true);
        assert!(resumed.session().is_none());
        assert_eq!(resumed.required(FILE).err(), Some(Errno::IO));
        resumed.closed(&next, FILE);
        assert!(resumed.required(FILE).unwrap().is_none() && next.locked_files().is_empty());
    }

    #[test]
    fn the_files_with_locks_are_bounded() {
        let journal = Journal::open(None, InodeId(1), true).unwrap();
        let locks = Locks::open(&journal, true);
        let max = crate::journal::LOCKED_MAX as u64;
        let requests: Vec<_> =
            (1..=max).map(|inode| locks.request(&journal, InodeId(inode)).unwrap()).collect();
        assert!(locks.request(&journal, InodeId(max + 1)).is_none());
        assert!(locks.request(&journal, InodeId(max)).is_some(), "it has room already");
        drop(requests);
        assert!(locks.request(&journal, InodeId(max + 1)).is_some());
    }
}
