//! `crate::auth` moved over a tokio stream.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::auth::{
    Acceptor, AuthError, CHALLENGE_BYTES, Dialer, HELLO_BYTES, Key, PROOF_BYTES, WELCOME, nonce,
};
use crate::deadline::Deadline;

/// Authenticates a connection that we opened.
pub(super) async fn dial(
    stream: &mut TcpStream,
    key: &Key,
    context: &str,
    deadline: Deadline,
) -> Result<(), AuthError> {
    within(context, deadline, async {
        let (dialer, hello) = Dialer::new(key, context, nonce().map_err(broken(context))?);
        stream.write_all(&hello).await.map_err(broken(context))?;
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).await.map_err(broken(context))?;
        stream.write_all(&dialer.answer(&challenge)?).await.map_err(broken(context))?;
        let mut welcome = [0; 1];
        stream.read_exact(&mut welcome).await.map_err(broken(context))?;
        if welcome == [WELCOME] {
            return Ok(());
        }
        Err(AuthError::WrongKey { context: context.into() })
    })
    .await
}

/// What became of a connection that we accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    /// The other side holds the key.
    Authenticated,
    /// It left before its first byte: a probe that only asks whether the port is open.
    Silent,
}

/// Authenticates a connection that we accepted.
pub(super) async fn accept(
    stream: &mut TcpStream,
    key: &Key,
    context: &str,
    deadline: Deadline,
) -> Result<Accepted, AuthError> {
    within(context, deadline, async {
        let mut hello = [0; HELLO_BYTES];
        // A probe may also reset the connection instead of closing it.
        let begun = stream.read(&mut hello).await.unwrap_or(0);
        if begun == 0 {
            return Ok(Accepted::Silent);
        }
        stream.read_exact(&mut hello[begun..]).await.map_err(broken(context))?;
        let (acceptor, challenge) =
            Acceptor::new(key, context, &hello, nonce().map_err(broken(context))?)?;
        stream.write_all(&challenge).await.map_err(broken(context))?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof).await.map_err(broken(context))?;
        acceptor.check(&proof)?;
        stream.write_all(&[WELCOME]).await.map_err(broken(context))?;
        Ok(Accepted::Authenticated)
    })
    .await
}

async fn within<T>(
    context: &str,
    deadline: Deadline,
    handshake: impl Future<Output = Result<T, AuthError>>,
) -> Result<T, AuthError> {
    match tokio::time::timeout_at(deadline.instant().into(), handshake).await {
        Ok(result) => result,
        Err(_) => Err(broken(context)(std::io::ErrorKind::TimedOut.into())),
    }
}

fn broken(context: &str) -> impl Fn(std::io::Error) -> AuthError + '_ {
    move |source| AuthError::Broken { context: context.into(), source }
}
