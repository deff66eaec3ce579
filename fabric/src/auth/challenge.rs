//! Mutual challenge-response authentication over a shared key, before the first operation.
//!
//! ```text
//! dialer    -> "FFAUTH01" dialer-nonce                                        40 bytes
//! acceptor  -> acceptor-nonce HMAC(key, "acceptor" context nonces)            64 bytes
//! dialer    -> greeting HMAC(key, "dialer" context nonces greeting)            length + 32 bytes
//! acceptor  -> 0x06                                                            1 byte
//! ```
//! Nonces are fresh on both sides, which prevents replay. The signed data includes the role, which
//! prevents reflection, and the context, which names the service, so that a proof for one port is
//! invalid on another. A service may define a greeting of fixed length, in which the dialer states
//! the purpose of the connection: it is signed, so it cannot be changed on the path. The data that
//! follows the handshake is neither signed nor encrypted. Comparisons take constant time. Messages
//! have fixed lengths: an unauthenticated peer can make this side read 40 bytes and a greeting, not
//! more.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::error::AuthError;
use super::key::{Key, nonce};
use crate::deadline::{Deadline, Timed};

const MAGIC: &[u8; 8] = b"FFAUTH01";
/// Length of the dialer's first message.
pub const HELLO_BYTES: usize = 40;
/// Length of the acceptor's answer.
pub const CHALLENGE_BYTES: usize = 64;
/// Length of the dialer's proof.
pub const PROOF_BYTES: usize = 32;
/// The acceptor's final message.
pub const WELCOME: u8 = 0x06;

impl Key {
    fn proof(&self, role: &str, context: &str, nonces: &Nonces, greeting: &[u8]) -> Hmac<Sha256> {
        let parts = [role.as_bytes(), context.as_bytes(), &nonces.dialer, &nonces.acceptor];
        // The protocol of a service defines whether it has a greeting, so an empty one needs no
        // length.
        match greeting {
            [] => self.mac(&parts),
            _ => self.mac(&[parts.as_slice(), &[greeting]].concat()),
        }
    }
}

#[derive(Clone, Copy)]
struct Nonces {
    dialer: [u8; 32],
    acceptor: [u8; 32],
}

/// The connecting side. Pure: the caller supplies the nonce and transfers the messages.
pub struct Dialer {
    key: Key,
    context: String,
    nonce: [u8; 32],
}

impl Dialer {
    /// Starts the handshake; returns the first message.
    pub fn new(key: &Key, context: &str, nonce: [u8; 32]) -> (Self, [u8; HELLO_BYTES]) {
        let mut hello = [0; HELLO_BYTES];
        hello[..8].copy_from_slice(MAGIC);
        hello[8..].copy_from_slice(&nonce);
        (Self { key: key.clone(), context: context.into(), nonce }, hello)
    }

    /// Verifies the acceptor's proof and returns the dialer's.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`].
    pub fn answer(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<[u8; PROOF_BYTES], AuthError> {
        self.answer_greeting(challenge, &[])
    }

    /// As [`Dialer::answer`], for a service with a greeting, which is sent before the proof.
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

/// The listening side. Pure, like [`Dialer`].
pub struct Acceptor {
    key: Key,
    context: String,
    nonces: Nonces,
}

impl Acceptor {
    /// Parses the dialer's first message; returns the challenge to send.
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

    /// Verifies the dialer's proof; on success the caller sends [`WELCOME`].
    ///
    /// # Errors
    /// [`AuthError::WrongKey`].
    pub fn check(&self, proof: &[u8; PROOF_BYTES]) -> Result<(), AuthError> {
        self.check_greeting(&[], proof)
    }

    /// As [`Acceptor::check`], for a service with a greeting.
    ///
    /// # Errors
    /// [`AuthError::WrongKey`], also if the greeting differs from the signed one.
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

/// Authenticates an outgoing connection and sends its greeting. Blocks; the stream's timeouts are
/// reset afterwards.
///
/// # Errors
/// Any [`AuthError`] except `BadKey`.
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
        // A refused proof appears as a closed connection: the acceptor sends no reason to
        // unauthenticated peers.
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
#[path = "challenge_test.rs"]
mod tests;
