//! The daemon's door: a socket at a path, and a thread for everybody who comes.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::admission::{full, receive};
use super::sleep;
use crate::flight::Folders;

/// How long ranks have to hear that the daemon was told to stop.
const STOPS_WITHIN: Duration = Duration::from_secs(2);

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
    /// Ranks that are served at a time; more are refused.
    pub ranks_max: usize,
    /// Where the flight recorders of its ranks and their dumps are.
    pub folders: Folders,
}

/// `hfreduced`. Whoever may open its socket belongs to it; its folder and mode say who that is.
/// Dropped, it tells the ranks that it serves, and takes its socket away.
pub struct Daemon {
    path: PathBuf,
    listener: UnixListener,
    rules: Rules,
    sessions: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
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
        let (sessions, stop) = Default::default();
        Ok(Self { path: path.to_owned(), listener, rules, sessions, stop })
    }

    /// Lets in whoever comes, for so long.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn accept_for(&self, time: Duration) -> io::Result<()> {
        let until = Instant::now() + time;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.let_in(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
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
        self.sessions.load(Ordering::SeqCst)
    }

    fn let_in(&self, stream: UnixStream) {
        let place = Place::take(&self.sessions);
        if place.0.load(Ordering::SeqCst) > self.rules.ranks_max {
            let most = self.rules.ranks_max;
            tracing::warn!(most, "a connection was refused: all places are taken");
            full(stream, format!("all {most} places of hfreduced are taken (--ranks-max)"));
            return;
        }
        let (stop, folders) = (self.stop.clone(), self.rules.folders.clone());
        let run = move || {
            let _place = place;
            receive(stream, folders, &stop);
        };
        let thread = std::thread::Builder::new().name("hfreduced-rank".into());
        if let Err(error) = thread.spawn(run) {
            tracing::error!(%error, "no thread for a rank");
        }
    }
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

/// Counts a session as long as it lasts.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(sessions: &Arc<AtomicUsize>) -> Self {
        sessions.fetch_add(1, Ordering::SeqCst);
        Self(sessions.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
