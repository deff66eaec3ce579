//! Credentials that a process presents when it connects: the cluster's key, or a ticket.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::error::AuthError;
use super::key::Key;
use super::keys::{KeyRing, Keys};
use super::ticket::SealedTicket;
use super::watched_file::WatchedFile;

/// The current credential, and whether it requires TLS. Clones share the content of the file.
#[derive(Clone)]
pub struct Credentials {
    source: Source,
    over_tls: bool,
}

#[derive(Clone)]
enum Source {
    Keys(Keys),
    Fixed(Arc<Credential>),
    File(Arc<WatchedFile<Credential>>),
}

/// One credential.
#[derive(Clone, Debug)]
pub enum Credential {
    /// The cluster's keys; the first one signs.
    Keys(Arc<KeyRing>),
    /// A ticket and its secret.
    Ticket(Arc<SealedTicket>),
}

impl Credential {
    fn parse(path: &Path, content: &[u8]) -> Result<Self, AuthError> {
        if SealedTicket::is_text(content) {
            return Ok(Self::Ticket(Arc::new(SealedTicket::parse(path, content)?)));
        }
        Ok(Self::Keys(Arc::new(KeyRing::parse(path, content)?)))
    }

    /// True if a connection that was opened with `self` would be opened in the same way now.
    pub(crate) fn is_equivalent(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Keys(one), Self::Keys(other)) => {
                Arc::ptr_eq(one, other)
                    || (one.signing().0 == other.signing().0
                        && one.signing().1.bytes() == other.signing().1.bytes())
            }
            (Self::Ticket(one), Self::Ticket(other)) => {
                Arc::ptr_eq(one, other) || one.bytes() == other.bytes()
            }
            _ => false,
        }
    }
}

impl Credentials {
    fn of(source: Source) -> Self {
        Self { source, over_tls: false }
    }

    /// Loads a ticket or keys from a file. The file is read again when it changes.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] if the file cannot be read or contains neither.
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let watched = WatchedFile::open(path, Credential::parse)?;
        Ok(Self::of(Source::File(Arc::new(watched))))
    }

    /// The current credential; at most one second older than its file.
    pub fn current(&self) -> Credential {
        match &self.source {
            Source::Keys(keys) => Credential::Keys(keys.current()),
            Source::Fixed(credential) => (**credential).clone(),
            Source::File(watched) => (*watched.current()).clone(),
        }
    }

    /// Whether the credential is presented only over connections with TLS. Default: only over
    /// connections without TLS.
    #[must_use]
    pub fn over_tls(self, over_tls: bool) -> Self {
        Self { over_tls, ..self }
    }

    pub(crate) fn is_over_tls(&self) -> bool {
        self.over_tls
    }

    /// Source of the credential, for messages.
    pub fn origin(&self) -> String {
        match &self.source {
            Source::File(watched) => watched.path().display().to_string(),
            _ => "(in memory)".into(),
        }
    }

    #[cfg(test)]
    pub(crate) fn read_now(&self) {
        match &self.source {
            Source::Keys(keys) => keys.read_now(),
            Source::Fixed(_) => {}
            Source::File(watched) => drop(watched.read_now()),
        }
    }
}

impl From<Keys> for Credentials {
    fn from(keys: Keys) -> Self {
        Self::of(Source::Keys(keys))
    }
}

impl From<&Keys> for Credentials {
    fn from(keys: &Keys) -> Self {
        keys.clone().into()
    }
}

impl From<Key> for Credentials {
    fn from(key: Key) -> Self {
        Keys::from(key).into()
    }
}

impl From<&Key> for Credentials {
    fn from(key: &Key) -> Self {
        Keys::from(key).into()
    }
}

impl From<&Credentials> for Credentials {
    fn from(credentials: &Credentials) -> Self {
        credentials.clone()
    }
}

impl From<SealedTicket> for Credentials {
    fn from(ticket: SealedTicket) -> Self {
        Self::of(Source::Fixed(Arc::new(Credential::Ticket(Arc::new(ticket)))))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.current().fmt(formatter)
    }
}
