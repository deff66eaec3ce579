//! Append leases of this mount. The holder of a file's lease is the only mount that appends to it, so
//! it knows the end of the file. It keeps the lease until another mount asks for it, or the file has
//! not been appended to for a while. The lease ends with the mount's lock session, whose lease all
//! appends require: see `locks`.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use threefs_core::ids::InodeId;
use tokio::sync::Notify;

use crate::journal::Journal;
use crate::locks::LockSession;

/// An unused lease is released after this time.
const UNUSED: Duration = Duration::from_secs(60);
/// After a lease was recalled it is not requested for this time: longer than the interval at which
/// several metadata services notice that it is free, so that a truncation gets its turn, and each of
/// several appending mounts keeps the lease for more than one append.
pub(crate) const TURN: Duration = Duration::from_millis(150);
/// A daemon that takes over releases no lease for this time: the kernel resends the append whose
/// daemon died, which must find its place.
const TAKEOVER: Duration = Duration::from_secs(10);

/// The lease of a file.
pub(crate) struct AppendLease {
    /// Held by an append, a release, and a truncation by this mount.
    pub turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

struct State {
    /// The lock session in which the lease is held.
    session: Option<Arc<LockSession>>,
    /// The session in which a previous daemon may hold the lease, or may wait for it.
    former: Option<u64>,
    used: Instant,
    /// Not to be requested before.
    request_after: Instant,
    /// Not to be released before.
    release_after: Instant,
}

#[derive(Default)]
pub(crate) struct Appends {
    files: Mutex<HashMap<InodeId, Arc<AppendLease>>>,
    /// Files whose leases are being released.
    releasing: Mutex<HashSet<InodeId>>,
    /// Too many files have leases, and another one is wanted.
    full: AtomicBool,
    /// A lease was requested or released, or room is wanted.
    pub changed: Notify,
    /// The log names the refusal of an older service once.
    pub refusal_logged: AtomicBool,
}

impl AppendLease {
    fn new(former: Option<u64>, release_after: Instant) -> Self {
        let (session, now) = (None, Instant::now());
        let state = State { session, former, used: now, request_after: now, release_after };
        Self { turn: tokio::sync::Mutex::default(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session in which the lease is held.
    pub(crate) fn session(&self) -> Option<Arc<LockSession>> {
        self.state().session.clone()
    }

    /// The session in which a previous daemon may hold the lease.
    pub(crate) fn former(&self) -> Option<u64> {
        self.state().former
    }

    pub(crate) fn hold(&self, session: &Arc<LockSession>) {
        self.state().session = Some(Arc::clone(session));
    }

    pub(crate) fn note_use(&self) {
        self.state().used = Instant::now();
    }

    /// The lease is not held from now on.
    pub(crate) fn give_up(&self) {
        let mut state = self.state();
        (state.session, state.former) = (None, None);
        state.request_after = Instant::now() + TURN;
    }

    pub(crate) fn request_after(&self) -> Instant {
        self.state().request_after
    }

    pub(crate) fn release_after(&self) -> Instant {
        self.state().release_after
    }
}

impl Appends {
    /// Continues with the leases of a previous daemon, whose session continues.
    pub(crate) fn open(journal: &Journal) -> Self {
        let appends = Self::default();
        for inode in journal.appended_files() {
            let lease = AppendLease::new(journal.lock_session(), Instant::now() + TAKEOVER);
            appends.files().insert(inode, Arc::new(lease));
        }
        appends
    }

    pub(crate) fn get(&self, inode: InodeId) -> Option<Arc<AppendLease>> {
        self.files().get(&inode).cloned()
    }

    /// The lease of a file, which may not be held yet; `None`: too many files have leases.
    pub(crate) fn add(&self, journal: &Journal, inode: InodeId) -> Option<Arc<AppendLease>> {
        let mut files = self.files();
        if let Some(lease) = files.get(&inode) {
            return Some(Arc::clone(lease));
        }
        if !journal.add_appended(inode) {
            return None;
        }
        let lease = Arc::new(AppendLease::new(None, Instant::now()));
        files.insert(inode, Arc::clone(&lease));
        drop(files);
        self.changed.notify_one();
        Some(lease)
    }

    /// Removes a lease that is neither held nor used.
    pub(crate) fn remove_free(&self, journal: &Journal, inode: InodeId) {
        let mut files = self.files();
        let Some(lease) = files.get(&inode) else { return };
        // Others may have it in hand and request it.
        if Arc::strong_count(lease) == 1 && lease.session().is_none() {
            files.remove(&inode);
            journal.remove_appended(inode);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files().is_empty()
    }

    /// The session has ended, and with it its leases.
    pub(crate) fn lose(&self, session: u64) {
        for lease in self.files().values() {
            let mut state = lease.state();
            if state.session.as_ref().is_some_and(|held| held.number == session) {
                state.session = None;
            }
            if state.former == Some(session) {
                state.former = None;
            }
        }
    }

    /// Leases that were not used for a while.
    pub(crate) fn unused(&self) -> Vec<InodeId> {
        let files = self.files();
        let unused = files.iter().filter(|(_, lease)| lease.state().used.elapsed() > UNUSED);
        unused.map(|(inode, _)| *inode).collect()
    }

    pub(crate) fn request_room(&self) {
        self.full.store(true, SeqCst);
        self.changed.notify_one();
    }

    /// The lease to release for another file.
    pub(crate) fn take_surplus(&self) -> Option<InodeId> {
        if self.full.swap(false, SeqCst) { self.least_used() } else { None }
    }

    fn least_used(&self) -> Option<InodeId> {
        let files = self.files();
        let oldest = files.iter().min_by_key(|(_, lease)| lease.state().used);
        oldest.map(|(inode, _)| *inode)
    }

    /// Starts a release; false if it is being released.
    pub(crate) fn start_release(&self, inode: InodeId) -> bool {
        self.releasing_mut().insert(inode)
    }

    pub(crate) fn end_release(&self, inode: InodeId) {
        self.releasing_mut().remove(&inode);
        self.changed.notify_one();
    }

    pub(crate) fn releasing(&self) -> Vec<InodeId> {
        self.releasing_mut().iter().copied().collect()
    }

    fn files(&self) -> MutexGuard<'_, HashMap<InodeId, Arc<AppendLease>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn releasing_mut(&self) -> MutexGuard<'_, HashSet<InodeId>> {
        self.releasing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
