//! The session of this process with the daemon of a mount.

use std::collections::HashMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;
use threefs_rings::control::{Number, Register, SESSION_FILE, VERSION, VIRTUAL_DIRECTORY};

use crate::control;
use crate::fork;

/// Session of a mount; all rings and memory of this process for the mount share it.
pub struct Session {
    mount: PathBuf,
    fork: u64,
    live: Mutex<Arc<Live>>,
}

/// A session that one daemon knows.
pub(crate) struct Live {
    /// Differs between all sessions of this process.
    pub serial: u64,
    fork: u64,
    file: ManuallyDrop<File>,
    pub token: [u8; 16],
    /// User of the daemon.
    pub user: u32,
}

type Sessions = HashMap<PathBuf, Weak<Session>>;

static SESSIONS: Mutex<Option<Sessions>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Session {
    /// The session of a mount; opens it if there is none.
    ///
    /// # Errors
    /// `ENOENT` if the path is not a mount of 3FS with rings, `EPROTONOSUPPORT` if its daemon speaks
    /// another version.
    pub fn of(mount: &Path) -> Result<Arc<Self>, Errno> {
        let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let sessions = sessions.get_or_insert_with(HashMap::new);
        if let Some(session) = sessions.get(mount).and_then(Weak::upgrade)
            && session.check_fork().is_ok()
        {
            return Ok(session);
        }
        let live = Mutex::new(Arc::new(Live::open(mount)?));
        let session = Arc::new(Self { mount: mount.into(), fork: fork::generation(), live });
        sessions.retain(|_, other| other.strong_count() > 0);
        sessions.insert(mount.into(), Arc::downgrade(&session));
        Ok(session)
    }

    /// Path of the mount point.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// # Errors
    /// `EPERM`: this process is a fork of the one that opened the session.
    pub(crate) fn check_fork(&self) -> Result<(), Errno> {
        if self.fork == fork::generation() { Ok(()) } else { Err(Errno::PERM) }
    }

    pub(crate) fn live(&self) -> Arc<Live> {
        Arc::clone(&self.lock())
    }

    /// Opens a new session, unless another thread has already replaced `old`.
    pub(crate) fn renew(&self, old: &Live) -> Result<Arc<Live>, Errno> {
        let mut live = self.lock();
        if live.serial == old.serial {
            *live = Arc::new(Live::open(&self.mount)?);
        }
        Ok(Arc::clone(&live))
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live {
    fn open(mount: &Path) -> Result<Self, Errno> {
        let path = mount.join(VIRTUAL_DIRECTORY).join(SESSION_FILE);
        let file = File::open(path).map_err(|error| errno_of(&error))?;
        let about = control::session(&file)?;
        if about.version != VERSION {
            return Err(Errno::PROTONOSUPPORT);
        }
        fork::close_in_children(file.as_raw_fd());
        Ok(Self {
            serial: NEXT.fetch_add(1, Relaxed),
            fork: fork::generation(),
            file: ManuallyDrop::new(file),
            token: about.token,
            user: about.user,
        })
    }

    pub(crate) fn register(&self, request: &Register) -> Result<u32, Errno> {
        control::register(self, request)
    }

    /// Removes a registration; if it fails, the daemon does not have it any more.
    pub(crate) fn remove_region(&self, number: u32) {
        let _ = control::remove(self, Number::REGION, number);
    }

    /// As `remove_region`, for a file.
    pub(crate) fn remove_file(&self, number: u32) {
        let _ = control::remove(self, Number::FILE, number);
    }
}

impl AsRawFd for Live {
    fn as_raw_fd(&self) -> RawFd {
        // A forked child has closed it: the number may be another file there.
        if self.fork == fork::generation() { self.file.as_raw_fd() } else { -1 }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if self.fork == fork::generation() {
            fork::keep_in_children(self.file.as_raw_fd());
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// Numbers of one thing in the sessions that know it.
#[derive(Default)]
pub(crate) struct Numbers(Mutex<Vec<(Weak<Live>, u32)>>);

impl Numbers {
    /// The number in a session; `register` is called if there is none.
    pub(crate) fn get(
        &self,
        live: &Arc<Live>,
        register: impl FnOnce() -> Result<u32, Errno>,
    ) -> Result<u32, Errno> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = numbers.iter().find(|(other, _)| other.as_ptr() == Arc::as_ptr(live));
        if let Some((_, number)) = known {
            return Ok(*number);
        }
        let number = register()?;
        numbers.retain(|(other, _)| other.strong_count() > 0);
        numbers.push((Arc::downgrade(live), number));
        Ok(number)
    }

    /// All numbers in sessions that still exist.
    pub(crate) fn take(&self) -> Vec<(Arc<Live>, u32)> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = std::mem::take(&mut *numbers).into_iter();
        all.filter_map(|(live, number)| Some((live.upgrade()?, number))).collect()
    }
}

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
