//! Shared secrets: key files, message authentication codes and derived keys.

use std::fmt;
use std::io;
use std::path::Path;

use hmac::{Hmac, Mac};
use rand::TryRngCore;
use rand::rngs::OsRng;
use sha2::Sha256;

use super::error::AuthError;

/// Minimum length of a key, in bytes.
pub const KEY_BYTES_MIN: usize = 16;

/// A shared secret. Its bytes are never logged.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(…)")
    }
}

impl Key {
    /// Creates a key from raw bytes.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] if it has fewer than [`KEY_BYTES_MIN`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, AuthError> {
        if bytes.len() < KEY_BYTES_MIN {
            return Err(AuthError::BadKey {
                path: "(in memory)".into(),
                reason: format!("{} bytes; at least {KEY_BYTES_MIN} are needed", bytes.len()),
            });
        }
        Ok(Self(bytes.to_vec()))
    }

    /// Reads a key from a file; surrounding white space is ignored.
    ///
    /// # Errors
    /// [`AuthError::BadKey`] if the file cannot be read or is too short.
    pub fn read(path: &Path) -> Result<Self, AuthError> {
        let bad = |reason: String| AuthError::BadKey { path: path.display().to_string(), reason };
        let bytes = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        Self::from_bytes(bytes.trim_ascii()).map_err(|error| match error {
            AuthError::BadKey { reason, .. } => bad(reason),
            other => other,
        })
    }

    /// HMAC-SHA256 over parts. Each part is preceded by its length, so that different lists of
    /// parts differ.
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC accepts keys of any length, so this cannot fail; an empty key would only fail to
        // match.
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&self.0)
            .unwrap_or_else(|_| <Hmac<Sha256> as Mac>::new(&Default::default()));
        for part in parts {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        mac
    }

    /// Derives a key for one purpose. Neither this key nor keys of other purposes can be computed
    /// from it.
    pub fn derive(&self, purpose: &str, info: &[u8]) -> Self {
        let derived = self.mac(&[b"derive", purpose.as_bytes(), info]).finalize();
        Self(derived.into_bytes().to_vec())
    }

    /// Value by which a holder of this key recognizes it, for one purpose. The key cannot be computed
    /// from it.
    pub(super) fn fingerprint(&self, purpose: &str) -> [u8; 32] {
        self.mac(&[b"fingerprint", purpose.as_bytes()]).finalize().into_bytes().into()
    }

    /// True if `derived` equals the result of `derive` for this purpose; takes constant time.
    pub(crate) fn has_derived(&self, purpose: &str, info: &[u8], derived: &Self) -> bool {
        let mac = self.mac(&[b"derive", purpose.as_bytes(), info]);
        mac.verify_slice(&derived.0).is_ok()
    }

    /// True if both are the same secret.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// The raw secret, for a credential file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A new nonce from the system's random number generator.
///
/// Not from a generator in this process: forked processes would share its state.
///
/// # Errors
/// Returns the system's error if no randomness is available.
pub fn nonce() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}
