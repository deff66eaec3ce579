//! Authentication errors, with the remedy in each message.

use std::io;

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

/// Why a connection does not have the TLS that one side asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// At the service: it requires TLS, the peer uses none.
    #[error(
        "the peer connects without TLS, which this service requires; set `tls: true` in the peer's cluster.json or service configuration"
    )]
    PlainPeer,
    /// At the service: it has no TLS, the peer requires it.
    #[error(
        "the peer connects with TLS, and this service runs without; set `tls: true` in this service's configuration, or `tls: false` in the peer's"
    )]
    UnexpectedTls,
    /// At the client: the service requires TLS.
    #[error(
        "the service requires TLS; set `tls: true` in the cluster.json or service configuration of this side"
    )]
    Required,
    /// At the client: the service has no TLS.
    #[error(
        "the service runs without TLS, which this side requires; set `tls: true` in the service's configuration"
    )]
    NotServed,
    /// The proof of the peer belongs to another TLS connection, or to another key.
    #[error(
        "the peer's proof does not belong to this TLS connection: the peer holds another key, is another service, or a proxy between the two terminates TLS; check that both sides read the same key file and that nothing relays the connection"
    )]
    NotBound,
}
