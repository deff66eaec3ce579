//! Tickets: credentials for one directory, issued by a holder of the key ring.
//!
//! A ticket states its scope and expiry. It is not secret. Its secret is derived from a key of the
//! ring and the bytes of the ticket, so a service verifies both offline and stores no list. A
//! changed ticket has a different secret.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::AuthError;
use super::key::Key;
use super::key_ring::KeyRing;
use crate::fault::Fault;

/// Maximum length of an encoded ticket.
pub const TICKET_BYTES_MAX: usize = 1024;
/// Maximum length of a cluster's name.
pub const CLUSTER_BYTES_MAX: usize = 63;
/// Maximum length of a path in a ticket. The path is for messages: a longer one is truncated.
pub const PATH_BYTES_MAX: usize = 512;
/// Maximum length of a node's name, as in Kubernetes.
pub const NODE_BYTES_MAX: usize = 253;

/// Prefix of a credential file.
const PREFIX: &str = "ffticket1";
/// Version of the encoding.
const VERSION: u8 = 1;

/// The scope of a ticket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The cluster for which it is valid.
    pub cluster: String,
    /// Id of the key in the ring from which its secret is derived.
    pub key_id: u32,
    /// Inode of the directory to which its holder is confined.
    pub directory: u64,
    /// Path of that directory when the ticket was issued, for messages.
    pub path: String,
    /// Whether the holder has read-only access.
    pub read_only: bool,
    /// The node for which it was issued; empty for any node.
    pub node: String,
    /// Expiry, in seconds since 1970.
    pub expires_unix_s: u64,
}

impl Ticket {
    /// Encodes the ticket and derives its secret from the ring's signing key.
    ///
    /// # Errors
    /// [`AuthError::BadTicket`] if a field is too long.
    pub fn seal(mut self, ring: &KeyRing) -> Result<SealedTicket, AuthError> {
        let (key_id, key) = ring.signing();
        self.key_id = key_id;
        let mut end = self.path.len().min(PATH_BYTES_MAX);
        while !self.path.is_char_boundary(end) {
            end -= 1;
        }
        self.path.truncate(end);
        self.check().map_err(bad)?;
        let mut bytes = vec![VERSION];
        bytes.extend(postcard::to_allocvec(&self).map_err(|error| bad(error.to_string()))?);
        let secret = secret(key, &bytes);
        Ok(SealedTicket { ticket: self, bytes, secret })
    }

    /// Decodes a ticket. Only a proof with its secret shows that it is authentic.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > TICKET_BYTES_MAX {
            return Err(format!("{} bytes; at most {TICKET_BYTES_MAX}", bytes.len()));
        }
        let (version, rest) = bytes.split_first().ok_or("it is empty")?;
        if *version != VERSION {
            return Err(format!("version {version}; this side reads version {VERSION}"));
        }
        let ticket: Self = match postcard::take_from_bytes(rest) {
            Ok((ticket, [])) => ticket,
            Ok((_, rest)) => return Err(format!("{} trailing bytes", rest.len())),
            Err(error) => return Err(error.to_string()),
        };
        ticket.check()?;
        Ok(ticket)
    }

    fn check(&self) -> Result<(), String> {
        for (field, value, most) in [
            ("cluster", &self.cluster, CLUSTER_BYTES_MAX),
            ("path", &self.path, PATH_BYTES_MAX),
            ("node", &self.node, NODE_BYTES_MAX),
        ] {
            if value.len() > most || value.chars().any(char::is_control) {
                return Err(format!("{field}: at most {most} bytes, without control characters"));
            }
        }
        Ok(())
    }
}

/// Purpose for which tickets' secrets are derived.
const PURPOSE: &str = "ticket";

/// Derives the secret of an encoded ticket.
pub(crate) fn secret(key: &Key, ticket: &[u8]) -> Key {
    key.derive(PURPOSE, ticket)
}

/// A ticket with its secret: the content of a credential file.
#[derive(Clone)]
pub struct SealedTicket {
    ticket: Ticket,
    bytes: Vec<u8>,
    secret: Key,
}

impl SealedTicket {
    /// The scope of the ticket.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// True if a key of the ring sealed it. Does not check its expiry.
    pub fn is_genuine(&self, ring: &KeyRing) -> bool {
        let key = ring.get(self.ticket.key_id);
        key.is_some_and(|key| key.has_derived(PURPOSE, &self.bytes, &self.secret))
    }

    /// The encoded ticket, as sent.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn secret(&self) -> &Key {
        &self.secret
    }

    /// The content of a credential file: one line. It contains the secret.
    pub fn to_text(&self) -> String {
        format!("{PREFIX}:{}:{}\n", hex(&self.bytes), hex(self.secret.bytes()))
    }

    /// True if this is the content of a credential file, not of a key file.
    pub(crate) fn is_text(content: &[u8]) -> bool {
        content.trim_ascii_start().starts_with(PREFIX.as_bytes())
    }

    /// Parses the content of a credential file.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] with the path and the reason.
    pub fn parse(path: &Path, content: &[u8]) -> Result<Self, AuthError> {
        let bad = |reason: &str| AuthError::BadKey {
            path: path.display().to_string(),
            reason: format!("{reason}; issue a new one with `threefs credential issue`"),
        };
        let text = std::str::from_utf8(content.trim_ascii()).map_err(|_| bad("not text"))?;
        let mut parts = text.split(':');
        let (Some(PREFIX), Some(bytes), Some(secret), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(bad("not a ticket (expected `ffticket1:…:…`)"));
        };
        let bytes = unhex(bytes).ok_or_else(|| bad("the ticket is not hexadecimal"))?;
        let secret = unhex(secret).ok_or_else(|| bad("the secret is not hexadecimal"))?;
        let ticket = Ticket::decode(&bytes).map_err(|reason| bad(&reason))?;
        let secret = Key::from_bytes(&secret).map_err(|_| bad("the secret is too short"))?;
        Ok(Self { ticket, bytes, secret })
    }
}

impl fmt::Debug for SealedTicket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SealedTicket({:?})", self.ticket)
    }
}

/// Access that the peer of a connection has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// The peer holds the cluster's key.
    Service,
    /// The peer holds a ticket.
    Volume(Arc<Ticket>),
}

impl Grant {
    /// Refuses a peer that does not hold the cluster's key.
    ///
    /// # Errors
    /// [`Fault::forbidden`] with the requested operation.
    pub fn require_service(&self, what: &str) -> Result<(), Fault> {
        match self.ticket() {
            None => Ok(()),
            Some(ticket) => Err(Fault::forbidden(format!(
                "{what} needs the cluster's key; this credential is for `{}`",
                ticket.path
            ))),
        }
    }

    /// The ticket, if the peer holds one and not the key.
    pub fn ticket(&self) -> Option<&Ticket> {
        match self {
            Self::Service => None,
            Self::Volume(ticket) => Some(ticket),
        }
    }
}

fn bad(reason: String) -> AuthError {
    AuthError::BadTicket { context: "ticket".into(), reason }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
#[path = "ticket_test.rs"]
mod tests;
