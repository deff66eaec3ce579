//! Key files: the keys of a cluster.
//!
//! A key file contains one key, or one or two lines `ID:KEY`. A bare key has the id 0, and `0:KEY`
//! with the same text is the same key, so that rotation can start from it. A process reads the file
//! again when it changes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::error::AuthError;
use super::key::Key;
use super::key_ring::KEYS_MAX;
pub use super::key_ring::KeyRing;
use super::ticket::SealedTicket;
use super::watched_file::WatchedFile;

impl KeyRing {
    /// Parses the content of a key file.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] with the line and the reason. Messages never contain a key.
    pub fn parse(path: &Path, content: &[u8]) -> Result<Self, AuthError> {
        let bad = |reason: String| AuthError::BadKey { path: path.display().to_string(), reason };
        let with_path = |error: AuthError| match error {
            AuthError::BadKey { reason, .. } => bad(reason),
            other => other,
        };
        if SealedTicket::is_text(content) {
            let reason = "it holds a ticket, and the cluster's key is needed here";
            return Err(bad(reason.into()));
        }
        let content = content.trim_ascii();
        let lines: Vec<&[u8]> = content
            .split(|byte| *byte == b'\n')
            .map(<[u8]>::trim_ascii)
            .filter(|line| !line.is_empty())
            .collect();
        if !lines.iter().any(|line| split_id(line).is_some()) {
            return Key::from_bytes(content).map(Self::of).map_err(with_path);
        }
        let mut keys: Vec<(u32, Key)> = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            let bad_line = |reason: &str| bad(format!("line {}: {reason}", number + 1));
            let (id, key) = split_id(line)
                .ok_or_else(|| bad_line("expected `ID:KEY`, for example `1:` and 64 hex digits"))?;
            let id: u32 = std::str::from_utf8(id)
                .ok()
                .and_then(|id| id.parse().ok())
                .ok_or_else(|| bad_line("the id must be a number below 2^32"))?;
            if !key.iter().all(u8::is_ascii_graphic) {
                return Err(bad_line("the key must be printable characters without blanks"));
            }
            if keys.iter().any(|(other_id, _)| *other_id == id) {
                return Err(bad_line(&format!("id {id} is used twice")));
            }
            let key = Key::from_bytes(key).map_err(with_path)?;
            keys.push((id, key));
        }
        if keys.len() > KEYS_MAX {
            let count = keys.len();
            return Err(bad(format!("{count} keys; at most {KEYS_MAX}: remove the oldest")));
        }
        Ok(Self::new(keys))
    }
}

/// Parses `ID:KEY`, if the line starts with digits and a colon.
fn split_id(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let (id, key) = (&line[..colon], &line[colon + 1..]);
    (!id.is_empty() && id.iter().all(u8::is_ascii_digit)).then_some((id, key))
}

/// The current keys of a cluster. Clones share the content of the file.
#[derive(Clone)]
pub struct Keys(Source);

#[derive(Clone)]
enum Source {
    Fixed(Arc<KeyRing>),
    File(Arc<WatchedFile<KeyRing>>),
}

impl Keys {
    /// Keys that follow the changes of a file.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] if the file cannot be read or contains no keys.
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let watched = WatchedFile::open(path, KeyRing::parse)?;
        Ok(Self(Source::File(Arc::new(watched))))
    }

    /// The current ring; at most one second older than the file.
    pub fn current(&self) -> Arc<KeyRing> {
        match &self.0 {
            Source::Fixed(ring) => Arc::clone(ring),
            Source::File(watched) => watched.current(),
        }
    }

    #[cfg(test)]
    pub(crate) fn read_now(&self) {
        if let Source::File(watched) = &self.0 {
            watched.read_now();
        }
    }
}

impl From<KeyRing> for Keys {
    fn from(ring: KeyRing) -> Self {
        Self(Source::Fixed(Arc::new(ring)))
    }
}

impl From<Key> for Keys {
    fn from(key: Key) -> Self {
        KeyRing::of(key).into()
    }
}

impl From<&Key> for Keys {
    fn from(key: &Key) -> Self {
        key.clone().into()
    }
}

impl From<&Keys> for Keys {
    fn from(keys: &Keys) -> Self {
        keys.clone()
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.current().fmt(formatter)
    }
}

#[cfg(test)]
#[path = "keys_test.rs"]
mod tests;
