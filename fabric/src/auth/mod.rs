//! Authentication of peers, before the first operation of a connection.
//!
//! Ports of the collectives use a shared key (`challenge`, blocking). Remote calls use the key ring
//! of the cluster or a ticket (`handshake`, `keys`, `ticket`, `credentials`). `capability` grants a
//! ticket's holder access to single objects at another service.

pub mod capability;
mod challenge;
pub mod credentials;
mod error;
pub mod handshake;
mod key;
mod key_ring;
pub mod keys;
pub mod ticket;
mod watched_file;

pub use challenge::{Acceptor, CHALLENGE_BYTES, Dialer, HELLO_BYTES, PROOF_BYTES, WELCOME, dial};
pub use error::{AuthError, TlsError};
pub use key::{KEY_BYTES_MIN, Key, nonce};
