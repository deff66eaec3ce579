//! Authentication errors; each message states the remedy.

use std::io;

/// Reason why authentication failed, on either side.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// The peer uses another protocol.
    #[error(
        "`{context}`: the peer does not speak this protocol (its first bytes are {first:02x?}); check the address and port"
    )]
    NotOurProtocol {
        /// The service that was addressed.
        context: String,
        /// The first bytes received.
        first: [u8; 8],
    },
    /// The proof is invalid: another key, or another service.
    #[error(
        "`{context}`: the peer holds another key or is another service; check that both sides read the same key file"
    )]
    WrongKey {
        /// The service that was addressed.
        context: String,
    },
    /// The connection failed or the deadline passed.
    #[error("`{context}`: the handshake failed: {source}")]
    Broken {
        /// The service that was addressed.
        context: String,
        /// The I/O error.
        source: io::Error,
    },
    /// The peer uses the handshake of an older version.
    #[error(
        "`{context}`: the peer speaks the handshake of an older version (FFAUTH01); run the same version on both sides"
    )]
    OldProtocol {
        /// The service that was addressed.
        context: String,
    },
    /// Only one side uses TLS, or a proxy between the two terminates it.
    #[error("`{context}`: {source}")]
    Tls {
        /// The service that was addressed.
        context: String,
        /// The mismatch.
        source: TlsError,
    },
    /// The peer names a key that is not in the local ring.
    #[error(
        "`{context}`: the peer uses key {id}, which this side does not hold; add it to the key file, or renew the peer's credential"
    )]
    UnknownKey {
        /// The service that was addressed.
        context: String,
        /// The key that the peer named.
        id: u32,
    },
    /// A ticket is malformed.
    #[error(
        "`{context}`: invalid ticket: {reason}; issue a new one with `threefs credential issue`"
    )]
    BadTicket {
        /// The service that was addressed.
        context: String,
        /// Reason why the ticket is invalid.
        reason: String,
    },
    /// A ticket has expired.
    #[error("`{context}`: the credential for `{path}` has expired; renew it")]
    Expired {
        /// The service that was addressed.
        context: String,
        /// Path of the ticket's volume, or the credential's file.
        path: String,
    },
    /// A ticket is for another cluster.
    #[error("`{context}`: the credential is for cluster `{ticket}`, this is cluster `{here}`")]
    OtherCluster {
        /// The service that was addressed.
        context: String,
        /// The cluster that the ticket names.
        ticket: String,
        /// Cluster of the service.
        here: String,
    },
    /// The key file is unusable.
    #[error("key file `{path}`: {reason}")]
    BadKey {
        /// Path of the key file.
        path: String,
        /// Reason why the file is unusable.
        reason: String,
    },
}

/// Reason why a connection does not meet the TLS requirement of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// At the service: it requires TLS, and the peer does not use it.
    #[error(
        "the peer connects without TLS, which this service requires; set `tls: true` in the peer's cluster.json or service configuration"
    )]
    PlainPeer,
    /// At the service: it does not use TLS, and the peer requires it.
    #[error(
        "the peer connects with TLS, and this service runs without; set `tls: true` in this service's configuration, or `tls: false` in the peer's"
    )]
    UnexpectedTls,
    /// At the client: the service requires TLS.
    #[error(
        "the service requires TLS; set `tls: true` in the cluster.json or service configuration of this side"
    )]
    Required,
    /// At the client: the service does not use TLS.
    #[error(
        "the service runs without TLS, which this side requires; set `tls: true` in the service's configuration"
    )]
    NotServed,
    /// The peer's proof belongs to another TLS connection or to another key.
    #[error(
        "the peer's proof does not belong to this TLS connection: the peer holds another key, is another service, or a proxy between the two terminates TLS; check that both sides read the same key file and that nothing relays the connection"
    )]
    NotBound,
}
