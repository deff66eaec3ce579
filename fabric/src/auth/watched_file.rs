//! A small file that is read again when it changes.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::AuthError;

/// How old what was read may be when it is used. Rotation waits minutes between its steps, and a
/// file of some hundred bytes costs microseconds to read.
const POLL: Duration = Duration::from_secs(1);
/// Longer files hold neither keys nor a ticket.
const FILE_BYTES_MAX: u64 = 16 << 10;

pub(super) type Parse<T> = fn(&Path, &[u8]) -> Result<T, AuthError>;

/// The parsed content of a file. It is looked at when it is used, at most once a second: there is
/// no thread, and what nobody uses costs nothing. While the file cannot be used, the last content
/// that could stays in force.
pub(super) struct WatchedFile<T> {
    path: PathBuf,
    parse: Parse<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    read_at: Instant,
    content: Vec<u8>,
    value: Arc<T>,
    /// The file could not be used the last time; said once.
    failing: bool,
}

impl<T> WatchedFile<T> {
    pub(super) fn open(path: &Path, parse: Parse<T>) -> Result<Self, AuthError> {
        let content = read(path)?;
        let value = Arc::new(parse(path, &content)?);
        let state = State { read_at: Instant::now(), content, value, failing: false };
        Ok(Self { path: path.into(), parse, state: Mutex::new(state) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The content, at most a second old.
    pub(super) fn current(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.read_at.elapsed() >= POLL {
            state.read_at = Instant::now();
            self.reload(&mut state);
        }
        Arc::clone(&state.value)
    }

    /// As [`WatchedFile::current`], read now.
    #[cfg(test)]
    pub(super) fn read_now(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.reload(&mut state);
        Arc::clone(&state.value)
    }

    fn reload(&self, state: &mut State<T>) {
        let read = read(&self.path).and_then(|content| {
            if content == state.content {
                return Ok(None);
            }
            (self.parse)(&self.path, &content).map(|value| Some((content, value)))
        });
        match read {
            Ok(None) => state.failing = false,
            Ok(Some((content, value))) => {
                tracing::info!(path = %self.path.display(), "credentials were read again");
                (state.content, state.value) = (content, Arc::new(value));
                state.failing = false;
            }
            Err(error) => {
                if !state.failing {
                    tracing::warn!(%error, "credentials cannot be read again; the last ones stay");
                }
                state.failing = true;
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, AuthError> {
    let bad = |reason: String| AuthError::BadKey { path: path.display().to_string(), reason };
    let mut content = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content))
        .map_err(|error| bad(error.to_string()))?;
    if content.len() as u64 > FILE_BYTES_MAX {
        return Err(bad(format!("it has more than {FILE_BYTES_MAX} bytes; it is no key file")));
    }
    Ok(content)
}
