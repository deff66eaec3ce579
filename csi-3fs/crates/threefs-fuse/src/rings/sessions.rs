//! All sessions of a mount, and limits: each registered region holds a descriptor of this daemon.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::session::{RegisteredFile, Session};

/// Maximum number of sessions of a user.
const SESSIONS_MAX: usize = 4096;
/// Maximum number of registered files of a user. A caller can register one descriptor any number of
/// times, which costs memory of this daemon only.
const FILES_MAX: usize = 1 << 18;
/// Part of this daemon's descriptors that all users' regions may hold, and of these that one user's
/// may hold.
const DESCRIPTORS_PART: u64 = 2;
const USER_PART: usize = 4;

#[derive(Default)]
pub(crate) struct Sessions {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    sessions: HashMap<u64, Arc<Session>>,
    /// Sessions and regions of each user.
    users: HashMap<u32, (usize, usize)>,
    regions: usize,
    /// Registered files of each user.
    files: HashMap<u32, usize>,
}

/// Maximum number of regions of one user.
fn users_memory_max() -> usize {
    regions_max() / USER_PART
}

fn regions_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 16);
    usize::try_from(limit / DESCRIPTORS_PART).unwrap_or(usize::MAX)
}

impl Sessions {
    /// Opens a session; returns its handle, below 2^32.
    ///
    /// # Errors
    /// `EMFILE`: too many sessions of this user.
    pub(crate) fn open(&self, user: u32) -> Result<u64, Errno> {
        let mut state = self.state();
        let (sessions, _) = state.users.entry(user).or_default();
        if *sessions >= SESSIONS_MAX {
            return Err(Errno::MFILE);
        }
        *sessions += 1;
        state.next = state.next % u64::from(u32::MAX) + 1;
        let handle = state.next;
        state.sessions.insert(handle, Arc::new(Session::new(user)));
        Ok(handle)
    }

    pub(crate) fn get(&self, handle: u64) -> Option<Arc<Session>> {
        self.state().sessions.get(&handle).cloned()
    }

    pub(crate) fn by_token(&self, token: &[u8; 16]) -> Option<Arc<Session>> {
        self.state().sessions.values().find(|session| session.token == *token).cloned()
    }

    /// Counts a region of a user.
    ///
    /// # Errors
    /// `EMFILE`: too many of this user. `ENFILE`: too many of all users.
    pub(crate) fn add_region(&self, user: u32) -> Result<(), Errno> {
        let mut state = self.state();
        if state.regions >= regions_max() {
            return Err(Errno::NFILE);
        }
        let (_, regions) = state.users.entry(user).or_default();
        if *regions >= users_memory_max() {
            return Err(Errno::MFILE);
        }
        *regions += 1;
        state.regions += 1;
        Ok(())
    }

    pub(crate) fn remove_regions(&self, user: u32, count: usize) {
        let mut state = self.state();
        state.regions = state.regions.saturating_sub(count);
        state.decrease(user, 0, count);
    }

    /// Counts a registered file of a user.
    ///
    /// # Errors
    /// `EMFILE`: too many.
    pub(crate) fn add_file(&self, user: u32) -> Result<(), Errno> {
        let mut state = self.state();
        let files = state.files.entry(user).or_default();
        if *files >= FILES_MAX {
            return Err(Errno::MFILE);
        }
        *files += 1;
        Ok(())
    }

    pub(crate) fn remove_files(&self, user: u32, count: usize) {
        self.state().decrease_files(user, count);
    }

    /// Ends a session; returns its files.
    pub(crate) fn close(&self, handle: u64) -> Vec<RegisteredFile> {
        let Some(session) = self.state().sessions.remove(&handle) else { return Vec::new() };
        let (regions, files) = session.close();
        let mut state = self.state();
        state.regions = state.regions.saturating_sub(regions);
        state.decrease(session.user, 1, regions);
        state.decrease_files(session.user, files.len());
        files
    }

    /// Ends all sessions.
    pub(crate) fn close_all(&self) -> Vec<RegisteredFile> {
        let handles: Vec<u64> = self.state().sessions.keys().copied().collect();
        handles.into_iter().flat_map(|handle| self.close(handle)).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn decrease_files(&mut self, user: u32, count: usize) {
        if let Some(files) = self.files.get_mut(&user) {
            *files = files.saturating_sub(count);
            if *files == 0 {
                self.files.remove(&user);
            }
        }
    }

    fn decrease(&mut self, user: u32, sessions: usize, regions: usize) {
        if let Some(counts) = self.users.get_mut(&user) {
            *counts = (counts.0.saturating_sub(sessions), counts.1.saturating_sub(regions));
            if *counts == (0, 0) {
                self.users.remove(&user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_limited_number_of_files() {
        let sessions = Sessions::default();
        for _ in 0..FILES_MAX {
            sessions.add_file(1).unwrap();
        }
        assert_eq!(sessions.add_file(1), Err(Errno::MFILE));
        assert_eq!(sessions.add_file(2), Ok(()), "another user");
        sessions.remove_files(1, 1);
        assert_eq!(sessions.add_file(1), Ok(()));
    }

    #[test]
    fn the_end_of_a_session_frees_its_files() {
        let sessions = Sessions::default();
        let handle = sessions.open(1).unwrap();
        let access = threefs_rings::Access { read: true, write: false };
        let file = RegisteredFile { inode: threefs_core::ids::InodeId(7), access };
        sessions.add_file(1).unwrap();
        sessions.get(handle).unwrap().add_file(file).unwrap();
        assert_eq!(sessions.close(handle).len(), 1);
        assert!(sessions.state().files.is_empty());
    }
}
