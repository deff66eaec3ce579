//! The daemon's door: a socket at a path, and a thread for everybody who comes.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::socket_peercred;

use super::admission::{Terms, full, receive};
use super::descriptors::raise_descriptor_limit;
use super::limits::ConnectionLimits;
use crate::protocol::sleep;
use hfreduce_engine::endpoint::REGISTERED_BYTES_MAX;
use hfreduce_shm::flight::Folders;

/// How long ranks have to hear that the daemon was told to stop.
const STOPS_WITHIN: Duration = Duration::from_secs(2);
/// Pause before the next `accept` where descriptors or memory are short.
const SHORT_PAUSE: Duration = Duration::from_millis(50);
/// Addresses for the registered memory of one user's ranks: a process has 128 TiB.
const ADDRESS_BYTES: usize = 32 << 40;

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another one is there.
    #[error("{path}: another hfreduced listens there already; stop it or give another path")]
    Taken {
        /// Where.
        path: PathBuf,
    },
    /// What the kernel says.
    #[error("{path}: {error}; give a path in a folder that this user may write to")]
    Io {
        /// Where.
        path: PathBuf,
        /// What it says.
        error: io::Error,
    },
}

/// What a daemon is told when it starts.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Who may open its socket, as chmod has it.
    pub mode: u32,
    /// Ranks of one user that are served at a time; more are refused. All users together have
    /// three times as many places.
    pub ranks_max: usize,
    /// Bytes of memory that the ranks of all users may cause it to use. With it, the ranks of one user
    /// may use half of these, of the descriptors and of the addresses; without it, all of them.
    pub memory_max: Option<usize>,
    /// Descriptors that the ranks of all users may use. By default this process's hard limit.
    pub descriptors_max: Option<usize>,
    /// Where the flight recorders of its ranks and their dumps are.
    pub folders: Folders,
}

/// `hfreduced`. Whoever may open its socket belongs to it; its folder and mode say who that is.
/// Dropped, it tells the ranks that it serves, and takes its socket away.
pub struct Daemon {
    path: PathBuf,
    listener: UnixListener,
    rules: Rules,
    places: Arc<ConnectionLimits>,
    stop: Arc<AtomicBool>,
    /// No connection could be accepted; said once.
    short: AtomicBool,
}

impl Daemon {
    /// Listens at `path`, where a socket that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind(path: &Path, rules: Rules) -> Result<Self, ListenError> {
        let wrong = |error| ListenError::Io { path: path.to_owned(), error };
        match UnixStream::connect(path) {
            Ok(_) => return Err(ListenError::Taken { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(wrong(error)),
        }
        // Under another name first: nobody finds it before its mode is right.
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(new);
        let made = UnixListener::bind(&new).and_then(|listener| {
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(rules.mode))?;
            listener.set_nonblocking(true)?;
            std::fs::rename(&new, path)?;
            Ok(listener)
        });
        let listener = made.map_err(|error| {
            let _ = std::fs::remove_file(&new);
            wrong(error)
        })?;
        let memory = rules.memory_max;
        let descriptors = rules.descriptors_max.unwrap_or_else(raise_descriptor_limit);
        let places = ConnectionLimits::new(rules.ranks_max, memory, descriptors);
        let path = path.to_owned();
        Ok(Self { path, listener, rules, places, stop: Arc::default(), short: false.into() })
    }

    /// Lets in whoever comes, for so long.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn accept_for(&self, time: Duration) -> io::Result<()> {
        let until = Instant::now() + time;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    self.short.store(false, Ordering::Relaxed);
                    self.let_in(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if is_short(&error) => {
                    if !self.short.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, "no rank can be let in for now");
                    }
                    std::thread::sleep(SHORT_PAUSE);
                }
                Err(error) => return Err(error),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            sleep(&mut [PollFd::new(&self.listener, PollFlags::IN)], left);
        }
    }

    /// How many ranks have a place.
    pub fn ranks(&self) -> usize {
        self.places.taken()
    }

    fn let_in(&self, stream: UnixStream) {
        let user = socket_peercred(&stream).map_or(u32::MAX, |peer| peer.uid.as_raw());
        let place = match self.places.take(user) {
            Ok(place) => place,
            Err(detail) => {
                tracing::warn!(user, detail, "a connection was refused");
                return full(stream, detail);
            }
        };
        let registered_max = REGISTERED_BYTES_MAX.max(ADDRESS_BYTES / self.rules.ranks_max.max(1));
        let (folders, share) = (self.rules.folders.clone(), place.share.clone());
        let terms = Terms { folders, share, registered_max };
        let stop = self.stop.clone();
        let run = move || {
            let _place = place;
            receive(stream, terms, &stop);
        };
        let thread = std::thread::Builder::new().name("hfreduced-rank".into());
        if let Err(error) = thread.spawn(run) {
            tracing::error!(%error, "no thread for a rank");
        }
    }
}

/// Whether resources ran out for now. Ranks that are served go on; new ones are accepted once some are
/// released.
fn is_short(error: &io::Error) -> bool {
    use libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let until = Instant::now() + STOPS_WITHIN;
        while self.ranks() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = std::fs::remove_file(&self.path);
    }
}
