//! Who may speak: a mutual challenge and response over a shared key, before the first operation.
//!
//! ```text
//! dialer    -> "FFAUTH01" dialer-nonce                                        40 bytes
//! acceptor  -> acceptor-nonce HMAC(key, "acceptor" context nonces)            64 bytes
//! dialer    -> greeting HMAC(key, "dialer" context nonces greeting)            length + 32 bytes
//! acceptor  -> 0x06                                                            1 byte
//! ```
//! Nonces are fresh on both sides, so nothing can be replayed; the role is part of what is signed,
//! so nothing can be reflected; the context names the service, so a proof for one port is worth
//! nothing on another. A service may have a greeting of fixed length, in which the dialer says what the
//! connection is for: it is part of what is signed, so nobody on the path can change it. What follows
//! the handshake is neither signed nor encrypted. Comparisons take constant time. Messages have fixed lengths: a stranger
//! can make us read 40 bytes and a greeting, no more.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use hmac::{Hmac, Mac};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::Sha256;

use crate::deadline::{Deadline, Timed};
use crate::tls::TlsError;

const MAGIC: &[u8; 8] = b"FFAUTH01";
/// Length of the dialer's first message.
pub const HELLO_BYTES: usize = 40;
/// Length of the acceptor's answer.
pub const CHALLENGE_BYTES: usize = 64;
/// Length of the dialer's proof.
pub const PROOF_BYTES: usize = 32;
/// The acceptor's last word.
pub const WELCOME: u8 = 0x06;
/// The shortest key that is taken, in bytes.
pub const KEY_BYTES_MIN: usize = 16;

/// Why a peer was not let in, or did not let us in.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The peer speaks something else.
    #[error(
        "`{context}`: the peer does not speak this protocol (it began with {first:02x?}); check the address and port"
    )]
    NotOurProtocol {
        /// The service that was spoken to.
        context: String,
        /// The first bytes received.
        first: [u8; 8],
    },
    /// The proof does not fit: another key, or another service.
    #[error(
        "`{context}`: the peer holds another key or is another service; check that both sides read the same key file"
    )]
    WrongKey {
        /// The service that was spoken to.
        context: String,
    },
    /// The connection broke or the deadline passed.
    #[error("`{context}`: the handshake broke off: {source}")]
    Broken {
        /// The service that was spoken to.
        context: String,
        /// What the socket said.
        source: io::Error,
    },
    /// The peer speaks the handshake of an older version.
    #[error(
        "`{context}`: the peer speaks the handshake of an older version (FFAUTH01); run the same version on both sides"
    )]
    OldProtocol {
        /// The service that was addressed.
        context: String,
    },
    /// One side uses TLS and the other does not, or something between the two terminates it.
    #[error("`{context}`: {source}")]
    Tls {
        /// The service that was addressed.
        context: String,
        /// What does not fit.
        source: TlsError,
    },
    /// The peer names a key that is not in this ring.
    #[error(
        "`{context}`: the peer uses key {id}, which this side does not hold; add it to the key file, or renew the peer's credential"
    )]
    UnknownKey {
        /// The service that was addressed.
        context: String,
        /// The key that the peer named.
        id: u32,
    },
    /// A ticket cannot be read.
    #[error(
        "`{context}`: invalid ticket: {reason}; issue a new one with `threefs credential issue`"
    )]
    BadTicket {
        /// The service that was addressed.
        context: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A ticket is past its expiry.
    #[error("`{context}`: the credential for `{path}` has expired; renew it")]
    Expired {
        /// The service that was addressed.
        context: String,
        /// The path of the ticket's volume, or the credential's file.
        path: String,
    },
    /// A ticket is for another cluster.
    #[error("`{context}`: the credential is for cluster `{ticket}`, this is cluster `{here}`")]
    OtherCluster {
        /// The service that was addressed.
        context: String,
        /// The cluster that the ticket names.
        ticket: String,
        /// The cluster of the service.
        here: String,
    },
    /// The key file cannot be used.
    #[error("key file `{path}`: {reason}")]
    BadKey {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// A shared secret. Its bytes never reach a log.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(…)")
    }
}

impl Key {
    /// A key from raw bytes.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] when it has fewer than [`KEY_BYTES_MIN`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AuthError> {
        if bytes.len() < KEY_BYTES_MIN {
            return Err(AuthError::BadKey {
                path: "(in memory)".into(),
                reason: format!("{} bytes; at least {KEY_BYTES_MIN} are needed", bytes.len()),
            });
        }
        Ok(Self(bytes.to_vec()))
    }

    /// A key from a file; white space around it does not count.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] when the file cannot be read or holds too little.
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let bad = |reason: String| AuthError::BadKey { path: path.display().to_string(), reason };
        let bytes = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        Self::from_bytes(bytes.trim_ascii()).map_err(|error| match error {
            AuthError::BadKey { reason, .. } => bad(reason),
            other => other,
        })
    }

    fn proof(&self, role: &str, context: &str, nonces: &Nonces, greeting: &[u8]) -> Hmac<Sha256> {
        let parts = [role.as_bytes(), context.as_bytes(), &nonces.dialer, &nonces.acceptor];
        // Whether a service has one is part of its protocol, so none needs no length.
        match greeting {
            [] => self.mac(&parts),
            _ => self.mac(&[parts.as_slice(), &[greeting]].concat()),
        }
    }

    /// HMAC-SHA256 over parts, each preceded by its length, so that no two lists of parts agree.
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC takes keys of every length, so this cannot fail; an empty key would only fail to match.
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&self.0)
            .unwrap_or_else(|_| <Hmac<Sha256> as Mac>::new(&Default::default()));
        for part in parts {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }

    /// A key for one purpose, derived from this one. Neither it nor keys of other purposes can be
    /// computed from it.
    pub fn derive(&self, purpose: &str, info: &[u8]) -> Self {
        let derived = self.mac(&[b"derive", purpose.as_bytes(), info]).finalize();
        Self(derived.into_bytes().to_vec())
    }

    /// Whether `derived` is what `derive` gives for this purpose; in constant time.
    pub(crate) fn has_derived(&self, purpose: &str, info: &[u8], derived: &Self) -> bool {
        let mac = self.mac(&[b"derive", purpose.as_bytes(), info]);
        mac.verify_slice(&derived.0).is_ok()
    }

    /// Whether it is the same secret.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// The secret itself, for the file of a credential.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[derive(Clone, Copy)]
struct Nonces {
    dialer: [u8; 32],
    acceptor: [u8; 32],
}

/// The side that connects. Pure: the caller brings the nonce and moves the bytes.
pub struct Dialer {
    key: Key,
    context: String,
    nonce: [u8; 32],
}

impl Dialer {
    /// Begins; returns the first message.
    pub fn new(key: &Key, context: &str, nonce: [u8; 32]) -> (Self, [u8; HELLO_BYTES]) {
        let mut hello = [0; HELLO_BYTES];
        hello[..8].copy_from_slice(MAGIC);
        hello[8..].copy_from_slice(&nonce);
        (Self { key: key.clone(), context: context.into(), nonce }, hello)
    }

    /// Checks the acceptor's proof and returns ours.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`].
    pub fn answer(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<[u8; PROOF_BYTES], AuthError> {
        self.answer_greeting(challenge, &[])
    }

    /// The same for a service with a greeting, which is sent before the proof.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`].
    pub fn answer_greeting(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
        greeting: &[u8],
    ) -> Result<[u8; PROOF_BYTES], AuthError> {
        let (nonce, proof) = challenge.split_at(32);
        let mut nonces = Nonces { dialer: self.nonce, acceptor: [0; 32] };
        nonces.acceptor.copy_from_slice(nonce);
        self.key
            .proof("acceptor", &self.context, &nonces, &[])
            .verify_slice(proof)
            .map_err(|_| AuthError::WrongKey { context: self.context.clone() })?;
        let proof = self.key.proof("dialer", &self.context, &nonces, greeting);
        Ok(proof.finalize().into_bytes().into())
    }
}

/// The side that listens. Pure, like [`Dialer`].
pub struct Acceptor {
    key: Key,
    context: String,
    nonces: Nonces,
}

impl Acceptor {
    /// Reads the dialer's first message; returns the challenge to send.
    ///
    /// # Errors
    /// [`AuthError::NotOurProtocol`].
    pub fn new(
        key: &Key,
        context: &str,
        hello: &[u8; HELLO_BYTES],
        nonce: [u8; 32],
    ) -> Result<(Self, [u8; CHALLENGE_BYTES]), AuthError> {
        if &hello[..8] != MAGIC {
            let mut first = [0; 8];
            first.copy_from_slice(&hello[..8]);
            return Err(AuthError::NotOurProtocol { context: context.into(), first });
        }
        let mut nonces = Nonces { dialer: [0; 32], acceptor: nonce };
        nonces.dialer.copy_from_slice(&hello[8..]);
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..32].copy_from_slice(&nonce);
        let proof = key.proof("acceptor", context, &nonces, &[]).finalize().into_bytes();
        challenge[32..].copy_from_slice(&proof);
        Ok((Self { key: key.clone(), context: context.into(), nonces }, challenge))
    }

    /// Checks the dialer's proof; on success the caller sends [`WELCOME`].
    ///
    /// # Errors
    /// [`AuthError::WrongKey`].
    pub fn check(&self, proof: &[u8; PROOF_BYTES]) -> Result<(), AuthError> {
        self.check_greeting(&[], proof)
    }

    /// The same for a service with a greeting.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`], also for another greeting than the one that was signed.
    pub fn check_greeting(
        &self,
        greeting: &[u8],
        proof: &[u8; PROOF_BYTES],
    ) -> Result<(), AuthError> {
        self.key
            .proof("dialer", &self.context, &self.nonces, greeting)
            .verify_slice(proof)
            .map_err(|_| AuthError::WrongKey { context: self.context.clone() })
    }
}

/// A fresh nonce from the system's generator.
///
/// Not from a generator of this process: forked siblings would share its state.
///
/// # Errors
/// What the system says when it has no randomness to give.
pub fn nonce() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Authenticates a connection that we opened, and says what it is for. Blocking; the stream's time-outs
/// are reset after.
///
/// # Errors
/// Any [`AuthError`] but `BadKey`.
pub fn dial(
    stream: &TcpStream,
    key: &Key,
    context: &str,
    greeting: &[u8],
    deadline: Deadline,
) -> Result<(), AuthError> {
    timed(stream, context, deadline, |mut stream| {
        let (dialer, hello) = Dialer::new(key, context, nonce().map_err(broken(context))?);
        stream.write_all(&hello).map_err(broken(context))?;
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).map_err(broken(context))?;
        let proof = dialer.answer_greeting(&challenge, greeting)?;
        stream.write_all(&[greeting, &proof[..]].concat()).map_err(broken(context))?;
        let mut welcome = [0; 1];
        // A refused proof shows as a closed connection: the acceptor owes strangers no reason.
        stream.read_exact(&mut welcome).map_err(broken(context))?;
        match welcome {
            [WELCOME] => Ok(()),
            _ => Err(AuthError::WrongKey { context: context.into() }),
        }
    })
}

fn timed(
    stream: &TcpStream,
    context: &str,
    deadline: Deadline,
    handshake: impl FnOnce(Timed<'_>) -> Result<(), AuthError>,
) -> Result<(), AuthError> {
    handshake(Timed::new(stream, deadline))?;
    stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None))
        .map_err(broken(context))
}

fn broken(context: &str) -> impl Fn(io::Error) -> AuthError + '_ {
    move |source| AuthError::Broken { context: context.into(), source }
}

#[cfg(test)]
#[path = "auth_test.rs"]
mod tests;
