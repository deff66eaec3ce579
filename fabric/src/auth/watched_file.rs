//! Watched file: a small file that is read again when it changes.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::AuthError;

/// Maximum age of the content when it is used. Rotation waits minutes between its steps, and
/// reading a file of a few hundred bytes takes microseconds.
const POLL: Duration = Duration::from_secs(1);
/// Maximum length of a file; longer files contain neither keys nor a ticket.
const FILE_BYTES_MAX: u64 = 16 << 10;

pub(super) type Parse<T> = fn(&Path, &[u8]) -> Result<T, AuthError>;

/// Parsed content of a file. The file is checked when the content is used, at most once a second:
/// no thread is needed, and an unused file costs nothing. If the file becomes unusable, the last
/// valid content remains in use.
pub(super) struct WatchedFile<T> {
    path: PathBuf,
    parse: Parse<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    read_at: Instant,
    content: Vec<u8>,
    value: Arc<T>,
    /// The last read failed; logged once.
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

    /// The content, at most one second old.
    pub(super) fn current(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.read_at.elapsed() >= POLL {
            state.read_at = Instant::now();
            self.reload(&mut state);
        }
        Arc::clone(&state.value)
    }

    /// As [`WatchedFile::current`], but reads the file now.
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
                tracing::info!(path = %self.path.display(), "reloaded credentials");
                (state.content, state.value) = (content, Arc::new(value));
                state.failing = false;
            }
            Err(error) => {
                if !state.failing {
                    tracing::warn!(%error, "failed to reload credentials; keeping the previous ones");
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
        return Err(bad(format!("not a key file: more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(content)
}
