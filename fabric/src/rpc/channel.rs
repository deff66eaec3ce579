//! Authenticated stream over a TCP connection: TLS if configured, then `super::handshake`.
//!
//! Neither side falls back to the other mode. A service peeks at the first byte to determine the
//! mode. It sends a peer of the wrong mode one fatal TLS alert, which clients of both modes
//! understand.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::handshake::{self, PeerAuth, broken, within};
use super::local::Accepted;
use super::stream::{Metered, Stream};
use crate::auth::credentials::Credential;
use crate::auth::handshake::{Hello, MAGIC_BYTES};
use crate::auth::keys::KeyRing;
use crate::auth::{AuthError, TlsError};
use crate::deadline::Deadline;
use crate::tls::{
    Accepts, HANDSHAKE_RECORD, MISMATCH, UNAUTHENTICATED_BYTES_MAX, binding, client_context,
    is_mismatch, server_context,
};

/// Authenticates an outgoing connection, with or without TLS.
pub(super) async fn dial(
    mut stream: TcpStream,
    over_tls: bool,
    credential: &Credential,
    context: &str,
    deadline: Deadline,
) -> Result<Stream, AuthError> {
    if !over_tls {
        handshake::dial(&mut stream, credential, context, &[], deadline).await?;
        return Ok(Stream::Plain(stream));
    }
    let connect = async {
        let (config, name) = client_context().map_err(tls_failure(context))?;
        let metered = Metered::new(stream, UNAUTHENTICATED_BYTES_MAX);
        match TlsConnector::from(config).connect(name, metered).await {
            Ok(stream) => Ok(Box::new(TlsStream::Client(stream))),
            Err(error) if is_mismatch(&error) => {
                Err(AuthError::Tls { context: context.into(), source: TlsError::NotServed })
            }
            Err(error) => Err(broken(context)(error)),
        }
    };
    let mut stream = within(context, deadline, connect).await?;
    let binding = binding(&stream).map_err(tls_failure(context))?;
    handshake::dial(&mut stream, credential, context, &binding, deadline).await?;
    stream.get_mut().0.authenticated();
    Ok(Stream::Tls(stream))
}

/// Result of accepting a connection.
pub(super) enum Incoming {
    /// The peer has proved that it holds a key or a ticket.
    Authenticated(Stream, PeerAuth),
    /// The peer disconnected before its first byte, as a probe of the port does.
    Silent,
    /// The peer has authenticated, and no shared memory is left for it: it will use TCP.
    NoMemory,
}

impl From<Accepted> for Incoming {
    fn from(accepted: Accepted) -> Self {
        match accepted {
            Accepted::Connected(link, peer_auth) => {
                Self::Authenticated(Stream::Local(link.into()), peer_auth)
            }
            Accepted::Silent => Self::Silent,
            Accepted::NoMemory => Self::NoMemory,
        }
    }
}

/// The modes that a service accepts, and its contexts.
pub(super) struct Acceptor {
    accepts: Accepts,
    tls: Option<TlsAcceptor>,
}

impl Acceptor {
    pub(super) fn new(accepts: Accepts) -> Result<Self, rustls::Error> {
        let context = accepts.tls().then(server_context).transpose()?;
        Ok(Self { accepts, tls: context.map(TlsAcceptor::from) })
    }

    /// Authenticates an incoming connection.
    pub(super) async fn accept(
        &self,
        mut stream: TcpStream,
        ring: &KeyRing,
        cluster: &str,
        context: &str,
        deadline: Deadline,
    ) -> Result<Incoming, AuthError> {
        let mut first = [0; 1];
        let peek = async { Ok(stream.peek(&mut first).await.unwrap_or(0)) };
        // A probe may also reset the connection instead of closing it.
        if within(context, deadline, peek).await? == 0 {
            return Ok(Incoming::Silent);
        }
        let is_tls = first[0] == HANDSHAKE_RECORD;
        let tls_error = |source| AuthError::Tls { context: context.into(), source };
        match (is_tls, &self.tls) {
            (true, Some(acceptor)) => {
                let metered = Metered::new(stream, UNAUTHENTICATED_BYTES_MAX);
                let accept = async { acceptor.accept(metered).await.map_err(broken(context)) };
                let stream = within(context, deadline, accept).await?;
                let mut stream = Box::new(TlsStream::Server(stream));
                let binding = binding(&stream).map_err(tls_failure(context))?;
                let handshake =
                    handshake::accept(&mut stream, ring, cluster, context, &binding, deadline);
                let Some(peer_auth) = handshake.await? else { return Ok(Incoming::Silent) };
                stream.get_mut().0.authenticated();
                Ok(Incoming::Authenticated(Stream::Tls(stream), peer_auth))
            }
            (true, None) => {
                refuse(&mut stream, deadline).await;
                Err(tls_error(TlsError::UnexpectedTls))
            }
            (false, _) if self.accepts.plain() => {
                let handshake =
                    handshake::accept(&mut stream, ring, cluster, context, &[], deadline);
                let Some(peer_auth) = handshake.await? else { return Ok(Incoming::Silent) };
                Ok(Incoming::Authenticated(Stream::Plain(stream), peer_auth))
            }
            (false, _) => {
                let mut first = [0; MAGIC_BYTES];
                let read = async {
                    stream.read_exact(&mut first).await.map(drop).map_err(broken(context))
                };
                within(context, deadline, read).await?;
                Hello::check_magic(context, first)?;
                refuse(&mut stream, deadline).await;
                Err(tls_error(TlsError::PlainPeer))
            }
        }
    }
}

/// Sends the alert. Reads what the peer has sent first: closing with unread bytes would reset the
/// connection and lose the alert.
async fn refuse(stream: &mut TcpStream, deadline: Deadline) {
    let refuse = async {
        stream.write_all(&MISMATCH).await?;
        stream.shutdown().await?;
        let mut rest = stream.take(UNAUTHENTICATED_BYTES_MAX as u64);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    // Ignored: the peer may have disconnected.
    let _ = tokio::time::timeout_at(deadline.instant().into(), refuse).await;
}

fn tls_failure(context: &str) -> impl Fn(rustls::Error) -> AuthError + '_ {
    move |error| broken(context)(io::Error::other(error))
}
