//! Listener of the daemon: a socket at a path, and a thread per connection.

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

/// Time in which ranks are notified that the daemon stops.
const STOPS_WITHIN: Duration = Duration::from_secs(2);
/// Pause before the next `accept` when descriptors or memory are exhausted.
const SHORT_PAUSE: Duration = Duration::from_millis(50);
/// Address space for the registered memory of one user's ranks; a process has 128 TiB.
const USER_ADDRESS_BYTES_MAX: usize = 32 << 40;

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon uses the path.
    #[error("{path}: another hfreduced is listening; stop it or use another path")]
    Taken {
        /// Path of the socket.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{path}: {error}; use a path in a folder that this user can write to")]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
}

/// Configuration of a daemon.
#[derive(Clone, Debug)]
pub struct Rules {
    /// File mode of its socket, which decides which users may connect.
    pub mode: u32,
    /// Maximum number of ranks of one user; further ones are refused. All users together may have
    /// three times as many.
    pub ranks_max: usize,
    /// Maximum memory, in bytes, that the ranks of all users may cause the daemon to use. With a
    /// maximum, the ranks of one user may use half of it, of the descriptors and of the address
    /// space; without one, all of them.
    pub memory_max: Option<usize>,
    /// Maximum number of descriptors that the ranks of all users may use. Default: the hard limit
    /// of this process.
    pub descriptors_max: Option<usize>,
    /// Folders of the flight records and dumps of its ranks.
    pub folders: Folders,
}

/// `hfreduced`. Access is controlled by the folder and mode of its socket. Dropping it notifies the
/// connected ranks and removes the socket.
pub struct Daemon {
    path: PathBuf,
    listener: UnixListener,
    rules: Rules,
    places: Arc<ConnectionLimits>,
    stop: Arc<AtomicBool>,
    /// No connection could be accepted; logged once.
    short: AtomicBool,
}

impl Daemon {
    /// Listens at `path`; replaces a socket that no process listens at.
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
        // Bound under another name first, so that it is not visible before its mode is set.
        let mut new = path.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        let new = PathBuf::from(new);
        let listener_result = UnixListener::bind(&new).and_then(|listener| {
            std::fs::set_permissions(&new, std::fs::Permissions::from_mode(rules.mode))?;
            listener.set_nonblocking(true)?;
            std::fs::rename(&new, path)?;
            Ok(listener)
        });
        let listener = listener_result.map_err(|error| {
            let _ = std::fs::remove_file(&new);
            wrong(error)
        })?;
        let memory = rules.memory_max;
        let descriptors = rules.descriptors_max.unwrap_or_else(raise_descriptor_limit);
        let places = ConnectionLimits::new(rules.ranks_max, memory, descriptors);
        let path = path.to_owned();
        Ok(Self { path, listener, rules, places, stop: Arc::default(), short: false.into() })
    }

    /// Accepts connections for `time`.
    ///
    /// # Errors
    /// A system call failed.
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
                        tracing::warn!(%error, "cannot accept ranks for now");
                    }
                    std::thread::sleep(SHORT_PAUSE);
                }
                Err(error) => return Err(error),
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Ok(());
            }
            sleep(&mut [PollFd::new(&self.listener, PollFlags::IN)], remaining);
        }
    }

    /// Number of connected ranks.
    pub fn ranks(&self) -> usize {
        self.places.in_use()
    }

    fn let_in(&self, stream: UnixStream) {
        let user = socket_peercred(&stream).map_or(u32::MAX, |peer| peer.uid.as_raw());
        let place = match self.places.take(user) {
            Ok(place) => place,
            Err(detail) => {
                tracing::warn!(user, detail, "connection refused");
                return full(stream, detail);
            }
        };
        let registered_max =
            REGISTERED_BYTES_MAX.max(USER_ADDRESS_BYTES_MAX / self.rules.ranks_max.max(1));
        let (folders, share) = (self.rules.folders.clone(), place.share.clone());
        let terms = Terms { folders, share, registered_max };
        let stop = self.stop.clone();
        let run = move || {
            let _place = place;
            receive(stream, terms, &stop);
        };
        let thread = std::thread::Builder::new().name("hfreduced-rank".into());
        if let Err(error) = thread.spawn(run) {
            tracing::error!(%error, "cannot start a thread for a rank");
        }
    }
}

/// True if a resource is exhausted for now. Connected ranks continue; new ones are accepted once
/// resources are released.
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
