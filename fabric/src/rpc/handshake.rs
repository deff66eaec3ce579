//! `crate::auth::handshake` over a tokio stream.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::auth::credentials::Credential;
use crate::auth::handshake::{
    Acceptor, CHALLENGE_BYTES, Dialer, HELLO_BYTES, Hello, MAGIC_BYTES, PROOF_BYTES,
};
use crate::auth::keys::KeyRing;
use crate::auth::ticket::Grant;
use crate::auth::{AuthError, Key, TlsError, nonce};
use crate::deadline::Deadline;
use crate::tls::MISMATCH;

/// Result of the handshake of a connection.
pub(super) struct PeerAuth {
    pub grant: Grant,
    /// The key of the ring that authenticated it, and its id.
    pub key_id: u32,
    pub key: Key,
}

/// Authenticates an outgoing connection. `binding` is its TLS channel binding; empty without TLS.
pub(super) async fn dial(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    credential: &Credential,
    context: &str,
    binding: &[u8],
    deadline: Deadline,
) -> Result<(), AuthError> {
    within(context, deadline, async {
        let nonce = nonce().map_err(broken(context))?;
        let (dialer, hello) = Dialer::new(credential, context, binding, nonce);
        send(stream, &hello).await.map_err(broken(context))?;
        let mut challenge = [0; CHALLENGE_BYTES];
        let (first, rest) = challenge.split_at_mut(MISMATCH.len());
        stream.read_exact(first).await.map_err(broken(context))?;
        if let Err(error) = stream.read_exact(rest).await {
            // A challenge may start with these bytes, but it is longer.
            if binding.is_empty() && *first == MISMATCH {
                return Err(AuthError::Tls { context: context.into(), source: TlsError::Required });
            }
            return Err(broken(context)(error));
        }
        send(stream, &dialer.answer(&challenge)?).await.map_err(broken(context))?;
        let mut verdict = [0; 1];
        stream.read_exact(&mut verdict).await.map_err(broken(context))?;
        dialer.conclude(verdict[0])
    })
    .await
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// Authenticates an incoming connection. `binding` is its TLS channel binding; empty without TLS.
/// Returns `None` if the peer disconnects before its first byte.
pub(super) async fn accept(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ring: &KeyRing,
    cluster: &str,
    context: &str,
    binding: &[u8],
    deadline: Deadline,
) -> Result<Option<PeerAuth>, AuthError> {
    within(context, deadline, async {
        let mut hello = [0; HELLO_BYTES];
        // A probe may also reset the connection instead of closing it.
        let first_bytes = stream.read(&mut hello[..MAGIC_BYTES]).await.unwrap_or(0);
        if first_bytes == 0 {
            return Ok(None);
        }
        let (magic, rest) = hello.split_at_mut(MAGIC_BYTES);
        stream.read_exact(&mut magic[first_bytes..]).await.map_err(broken(context))?;
        let mut first = [0; MAGIC_BYTES];
        first.copy_from_slice(magic);
        // An older version sends fewer bytes, so waiting for a full hello would block.
        Hello::check_magic(context, first)?;
        stream.read_exact(rest).await.map_err(broken(context))?;
        let hello = Hello::parse(context, hello)?;
        let mut ticket = vec![0; hello.ticket_bytes()];
        stream.read_exact(&mut ticket).await.map_err(broken(context))?;
        let nonce = nonce().map_err(broken(context))?;
        let (acceptor, challenge) = Acceptor::new(ring, context, binding, &hello, &ticket, nonce)?;
        send(stream, &challenge).await.map_err(broken(context))?;
        let mut proof = [0; PROOF_BYTES];
        if let Err(error) = stream.read_exact(&mut proof).await {
            return Err(acceptor.unknown_key().unwrap_or_else(|| broken(context)(error)));
        }
        let key_id = acceptor.key_id();
        let key = ring.get(key_id).cloned();
        let (verdict, grant) = acceptor.check(&proof, cluster, unix_now().as_secs());
        if let Some(verdict) = verdict {
            send(stream, &[verdict]).await.map_err(broken(context))?;
        }
        let unknown = AuthError::UnknownKey { context: context.into(), id: key_id };
        let (grant, key) = (grant?, key.ok_or(unknown)?);
        Ok(Some(PeerAuth { grant, key_id, key }))
    })
    .await
}

/// Wall-clock time since 1970, for the expiry of tickets.
pub(super) fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(super) async fn within<T>(
    context: &str,
    deadline: Deadline,
    handshake: impl Future<Output = Result<T, AuthError>>,
) -> Result<T, AuthError> {
    match tokio::time::timeout_at(deadline.instant().into(), handshake).await {
        Ok(result) => result,
        Err(_) => Err(broken(context)(std::io::ErrorKind::TimedOut.into())),
    }
}

pub(super) fn broken(context: &str) -> impl Fn(std::io::Error) -> AuthError + '_ {
    move |source| AuthError::Broken { context: context.into(), source }
}
