//! Handshake of remote calls: mutual challenge-response authentication by key or by ticket.
//!
//! ```text
//! dialer    -> "FFAUTH02" nonce key-id ticket-length 0 | ticket     48 bytes, then the ticket
//! acceptor  -> nonce proof                                          64 bytes
//! dialer    -> proof                                                32 bytes
//! acceptor  -> verdict                                               1 byte
//! ```
//! Without a ticket both sides prove a key of the ring. With a ticket both prove the ticket's
//! secret, which the acceptor derives from the ring (`crate::auth::ticket`). A proof is an HMAC
//! over its role, the service's name, the channel binding, the whole first message and the
//! acceptor's nonce, so it is invalid in another role, for another service, or in another
//! handshake. The ticket's length is checked before the ticket is read.
//!
//! Pure: the caller supplies the nonces and the time, and transfers the messages.

use std::sync::Arc;

use hmac::Mac;

use super::credentials::Credential;
use super::error::AuthError;
use super::error::TlsError;
use super::key::Key;
use super::keys::KeyRing;
use super::ticket::{self, Grant, TICKET_BYTES_MAX, Ticket};

const MAGIC: &[u8; 8] = b"FFAUTH02";
/// Magic number of `crate::auth::challenge`, which earlier versions of the services used.
const MAGIC_BEFORE: &[u8; 8] = b"FFAUTH01";
/// Length of the magic number, which is checked before more bytes are read.
pub const MAGIC_BYTES: usize = 8;
/// Length of the dialer's first message, without the ticket.
pub const HELLO_BYTES: usize = 48;
/// Length of the acceptor's answer.
pub const CHALLENGE_BYTES: usize = 64;
/// Length of the dialer's proof.
pub const PROOF_BYTES: usize = 32;

const WELCOME: u8 = 0x06;
const EXPIRED: u8 = 0x15;
const OTHER_CLUSTER: u8 = 0x16;

/// The data that both proofs cover.
struct Transcript {
    secret: Key,
    context: String,
    binding: Vec<u8>,
    hello: Vec<u8>,
}

impl Transcript {
    fn mac(&self, role: &str, nonce: &[u8]) -> impl Mac {
        let parts = [role.as_bytes(), self.context.as_bytes(), &self.binding, &self.hello, nonce];
        self.secret.mac(&parts)
    }

    fn proof(&self, role: &str, nonce: &[u8]) -> [u8; PROOF_BYTES] {
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(&self.mac(role, nonce).finalize().into_bytes());
        proof
    }

    fn verify(&self, role: &str, nonce: &[u8], proof: &[u8]) -> Result<(), AuthError> {
        self.mac(role, nonce).verify_slice(proof).map_err(|_| self.wrong_key())
    }

    /// An invalid proof has one of several causes, which this side cannot distinguish.
    fn wrong_key(&self) -> AuthError {
        let context = self.context.clone();
        if self.binding.is_empty() {
            return AuthError::WrongKey { context };
        }
        AuthError::Tls { context, source: TlsError::NotBound }
    }
}

fn service_secret(key: &Key) -> Key {
    key.derive("service", b"")
}

/// The connecting side.
pub struct Dialer {
    transcript: Transcript,
    ticket: Option<Ticket>,
}

impl Dialer {
    /// Starts the handshake; returns the first message. `binding` is the channel binding (a TLS
    /// exporter) of the underlying connection; empty without TLS.
    pub fn new(
        credential: &Credential,
        context: &str,
        binding: &[u8],
        nonce: [u8; 32],
    ) -> (Self, Vec<u8>) {
        let (secret, key_id, ticket) = match credential {
            Credential::Keys(ring) => {
                let (id, key) = ring.signing();
                (service_secret(key), id, None)
            }
            Credential::Ticket(sealed) => {
                (sealed.secret().clone(), sealed.ticket().key_id, Some(sealed))
            }
        };
        let bytes: &[u8] = ticket.map_or(&[], |sealed| sealed.bytes());
        let mut hello = Vec::with_capacity(HELLO_BYTES + bytes.len());
        hello.extend_from_slice(MAGIC);
        hello.extend_from_slice(&nonce);
        hello.extend_from_slice(&key_id.to_le_bytes());
        // A ticket has at most TICKET_BYTES_MAX bytes.
        hello.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
        hello.extend_from_slice(&[0, 0]);
        hello.extend_from_slice(bytes);
        let ticket = ticket.map(|sealed| sealed.ticket().clone());
        let (context, binding) = (context.into(), binding.into());
        let transcript = Transcript { secret, context, binding, hello: hello.clone() };
        (Self { transcript, ticket }, hello)
    }

    /// Verifies the acceptor's proof and returns the dialer's.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`], or [`TlsError::NotBound`] with a channel binding.
    pub fn answer(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<[u8; PROOF_BYTES], AuthError> {
        let (nonce, proof) = challenge.split_at(32);
        self.transcript.verify("acceptor", nonce, proof)?;
        Ok(self.transcript.proof("dialer", nonce))
    }

    /// Parses the acceptor's verdict.
    ///
    /// # Errors
    /// The reason for a refusal.
    pub fn conclude(&self, verdict: u8) -> Result<(), AuthError> {
        let context = self.transcript.context.clone();
        let ticket = self.ticket.as_ref();
        match (verdict, ticket) {
            (WELCOME, _) => Ok(()),
            (EXPIRED, Some(ticket)) => {
                Err(AuthError::Expired { context, path: ticket.path.clone() })
            }
            (OTHER_CLUSTER, Some(ticket)) => {
                let here = "another".into();
                Err(AuthError::OtherCluster { context, ticket: ticket.cluster.clone(), here })
            }
            _ => Err(self.transcript.wrong_key()),
        }
    }
}

/// The part of a dialer's first message that the acceptor reads before the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    bytes: [u8; HELLO_BYTES],
    key_id: u32,
    ticket_bytes: usize,
}

impl Hello {
    /// Checks the magic number.
    ///
    /// # Errors
    /// [`AuthError::OldProtocol`] or [`AuthError::NotOurProtocol`].
    pub fn check_magic(context: &str, first: [u8; MAGIC_BYTES]) -> Result<(), AuthError> {
        match &first {
            MAGIC => Ok(()),
            MAGIC_BEFORE => Err(AuthError::OldProtocol { context: context.into() }),
            _ => Err(AuthError::NotOurProtocol { context: context.into(), first }),
        }
    }

    /// Parses the fixed-length part.
    ///
    /// # Errors
    /// As [`Hello::check_magic`], or [`AuthError::BadTicket`] if the ticket is too long.
    pub fn parse(context: &str, bytes: [u8; HELLO_BYTES]) -> Result<Self, AuthError> {
        let mut first = [0; MAGIC_BYTES];
        first.copy_from_slice(&bytes[..MAGIC_BYTES]);
        Self::check_magic(context, first)?;
        let key_id = u32::from_le_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]);
        let ticket_bytes = usize::from(u16::from_le_bytes([bytes[44], bytes[45]]));
        let bad = |reason: String| AuthError::BadTicket { context: context.into(), reason };
        if ticket_bytes > TICKET_BYTES_MAX {
            return Err(bad(format!("{ticket_bytes} bytes; at most {TICKET_BYTES_MAX}")));
        }
        if bytes[46..] != [0, 0] {
            return Err(bad("reserved bytes are not zero: a newer version?".into()));
        }
        Ok(Self { bytes, key_id, ticket_bytes })
    }

    /// Length of the ticket that follows; 0 without a ticket.
    pub fn ticket_bytes(&self) -> usize {
        self.ticket_bytes
    }
}

/// The listening side.
pub struct Acceptor {
    transcript: Transcript,
    nonce: [u8; 32],
    key_id: u32,
    key_is_known: bool,
    ticket: Option<Ticket>,
}

impl Acceptor {
    /// Parses the dialer's first message; returns the challenge to send. `ticket` has the length
    /// that the hello announced.
    ///
    /// # Errors
    /// [`AuthError::BadTicket`].
    pub fn new(
        ring: &KeyRing,
        context: &str,
        binding: &[u8],
        hello: &Hello,
        ticket: &[u8],
        nonce: [u8; 32],
    ) -> Result<(Self, [u8; CHALLENGE_BYTES]), AuthError> {
        // The acceptor cannot prove a key that is not in the ring. It signs with one that is, and
        // the dialer finds the proof invalid.
        let (key, key_is_known) = match ring.get(hello.key_id) {
            Some(key) => (key, true),
            None => (ring.signing().1, false),
        };
        let (secret, decoded) = if ticket.is_empty() {
            (service_secret(key), None)
        } else {
            let bad = |reason| AuthError::BadTicket { context: context.into(), reason };
            let decoded = Ticket::decode(ticket).map_err(bad)?;
            if decoded.key_id != hello.key_id {
                return Err(bad(format!(
                    "it names key {}, the handshake key {}",
                    decoded.key_id, hello.key_id
                )));
            }
            (ticket::secret(key, ticket), Some(decoded))
        };
        let hello_bytes = [hello.bytes.as_slice(), ticket].concat();
        let (context, binding) = (context.into(), binding.into());
        let transcript = Transcript { secret, context, binding, hello: hello_bytes };
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..32].copy_from_slice(&nonce);
        challenge[32..].copy_from_slice(&transcript.proof("acceptor", &nonce));
        Ok((
            Self { transcript, nonce, key_id: hello.key_id, key_is_known, ticket: decoded },
            challenge,
        ))
    }

    /// The key id that the dialer named, if it is not in the local ring: the dialer will
    /// disconnect.
    pub fn unknown_key(&self) -> Option<AuthError> {
        let (context, id) = (self.transcript.context.clone(), self.key_id);
        (!self.key_is_known).then_some(AuthError::UnknownKey { context, id })
    }

    /// The key of the ring that the dialer used.
    pub fn key_id(&self) -> u32 {
        self.key_id
    }

    /// Verifies the dialer's proof, then its ticket. Returns the verdict to send: only a peer that
    /// has proved that it holds the ticket receives the reason for a refusal.
    pub fn check(
        self,
        proof: &[u8; PROOF_BYTES],
        cluster: &str,
        now_unix_s: u64,
    ) -> (Option<u8>, Result<Grant, AuthError>) {
        if let Some(unknown) = self.unknown_key() {
            return (None, Err(unknown));
        }
        if let Err(error) = self.transcript.verify("dialer", &self.nonce, proof) {
            return (None, Err(error));
        }
        let context = self.transcript.context;
        let Some(ticket) = self.ticket else { return (Some(WELCOME), Ok(Grant::Service)) };
        if ticket.cluster != cluster {
            let here = cluster.into();
            let error = AuthError::OtherCluster { context, ticket: ticket.cluster, here };
            return (Some(OTHER_CLUSTER), Err(error));
        }
        if ticket.expires_unix_s <= now_unix_s {
            return (Some(EXPIRED), Err(AuthError::Expired { context, path: ticket.path }));
        }
        (Some(WELCOME), Ok(Grant::Volume(Arc::new(ticket))))
    }
}

#[cfg(test)]
#[path = "handshake_test.rs"]
mod tests;
