//! The RPC client of the metadata service against a scripted service.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

mod calls;

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Call, Fault, Reply, Server, ServerConfig, Service, Shutdown, ShutdownHandle};
use threefs_core::ids::ClientId;
use threefs_meta::protocol::CONTEXT;
use threefs_meta::{At, MetaClient, MetaClientError, MetaError, MetaResult};

use calls::Calls;

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

/// The whole time passes if the service refuses every attempt.
fn deadline() -> Deadline {
    Deadline::after(Duration::from_secs(8))
}

/// Refuses the first call with a reason, and all later ones as expired.
#[derive(Default)]
struct Late(AtomicU64);

impl Service for Late {
    async fn handle(&self, _call: Call) -> Result<Reply, Fault> {
        if self.0.fetch_add(1, SeqCst) > 0 {
            return Err(Fault::expired());
        }
        let refusal: MetaResult = Err(MetaError::Unavailable { detail: "no chains yet".into() });
        Reply::of(&refusal)
    }
}

async fn serve(service: impl Service) -> (MetaClient, ShutdownHandle) {
    let config = ServerConfig::new(CONTEXT, key());
    let server = Server::bind("127.0.0.1:0", config).await.unwrap();
    let client = MetaClient::new(&[server.address().to_string()], &key(), ClientId(1));
    let (handle, shutdown) = Shutdown::new();
    tokio::spawn(server.serve(service, shutdown));
    (client, handle)
}

/// The service's clock decides whether an attempt has expired, possibly shortly before the client's
/// deadline.
#[tokio::test]
async fn an_expired_last_attempt_does_not_hide_the_reason_of_earlier_refusals() {
    let (client, _keep) = serve(Late::default()).await;
    let error = client.create(At::path("/file"), true, deadline()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Refused(MetaError::Unavailable { .. })), "{error}");
    assert!(error.to_string().contains("no chains yet"), "{error}");
}

/// Without an earlier refusal, only the fault is known.
#[tokio::test]
async fn an_expired_first_attempt_reports_the_expiry() {
    let (client, _keep) = serve(Late(AtomicU64::new(1))).await;
    let error = client.create(At::path("/file"), true, deadline()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Rpc(_)), "{error}");
    assert!(
        error.to_string().contains("too late") || error.to_string().contains("Expired"),
        "{error}"
    );
}

/// Refuses the first call with a reason, and does not answer later ones.
#[derive(Default)]
struct Silent(AtomicU64);

impl Service for Silent {
    async fn handle(&self, _call: Call) -> Result<Reply, Fault> {
        if self.0.fetch_add(1, SeqCst) > 0 {
            return std::future::pending().await;
        }
        let refusal: MetaResult = Err(MetaError::Unavailable { detail: "no chains yet".into() });
        Reply::of(&refusal)
    }
}

/// A change that was refused first may have been executed last.
#[tokio::test]
async fn a_change_whose_last_attempt_got_no_answer_is_not_reported_as_refused() {
    let (client, _keep) = serve(Silent::default()).await;
    let soon = || Deadline::after(Duration::from_secs(1));
    let error = client.create(At::path("/file"), true, soon()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Unknown { .. }), "{error}");
    for part in ["may have been made", "no chains yet"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // A query changes nothing: the refusal is more useful.
    let (client, _keep) = serve(Silent::default()).await;
    let error = client.stat(At::path("/file"), soon()).await.unwrap_err();
    assert!(matches!(&error, MetaClientError::Refused(_)), "{error}");
}
