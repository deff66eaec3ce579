//! Exclusive claim of a mount: renewed while the mount is served. Without a recent renewal, no
//! request is served. See `threefs_client::Claim`.
//!
//! Requests in flight are fenced where they arrive: the client's `Lease` lets changes and updates
//! pass while the claim is held, and each carries the time until which it may be started. So an
//! operation may take its full timeout, across any number of renewals, and no part of it is
//! executed once another node may hold the claim.

use std::time::Duration;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{BootInstant, Claim, Client, ClientError, Lease, Renewal};
use tokio::sync::watch;

/// Renewals per validity period of a renewal.
const RENEWALS: u32 = 4;
/// Pause between attempts while the metadata service does not answer.
const PAUSE: Duration = Duration::from_millis(500);

/// Claim configuration of a daemon.
#[derive(Clone, Debug)]
pub struct ClaimConfig {
    /// The directory that is claimed.
    pub path: String,
    /// This node.
    pub holder: String,
    /// Validity of a renewal, from the time of its request.
    pub valid: Duration,
}

#[derive(Clone, Debug)]
enum State {
    Held { until: BootInstant },
    Lost,
}

/// Whether this mount may be served now.
pub(crate) struct Gate {
    state: watch::Receiver<State>,
}

impl Gate {
    /// Claims the mount, and renews the claim until the gate is dropped. Returns the holder if
    /// another node has the claim. A mount that was served before (`resume`) does not take over a
    /// lost claim: another node may have held it, and the kernel may still hold older writes.
    pub(crate) async fn open(
        client: &Client,
        config: ClaimConfig,
        resume: bool,
    ) -> Result<Result<Self, String>, ClientError> {
        let (requested, lease) = (BootInstant::now(), client.lease().clone());
        let claim = if resume {
            let previous = Claim { holder: config.holder.clone(), beat: 0 };
            match client.renew_claim(&config.path, &previous).await? {
                Renewal::Held(claim) => claim,
                Renewal::Lost(holder) => {
                    lease.revoke();
                    return Ok(Err(holder_name(holder)));
                }
            }
        } else {
            client.claim(&config.path, &config.holder, None).await?
        };
        if claim.holder != config.holder {
            return Ok(Err(claim.holder));
        }
        let until = requested.after(config.valid);
        lease.renew_until(until);
        let (sender, state) = watch::channel(State::Held { until });
        tokio::spawn(renew(client.clone(), config, claim, sender, lease));
        Ok(Ok(Self { state }))
    }

    /// A gate that never opens: another node holds the claim.
    pub(crate) fn closed() -> Self {
        Self { state: watch::channel(State::Lost).1 }
    }

    /// Whether the claim is certainly held now.
    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.state.borrow(), State::Held { until } if BootInstant::now() < until)
    }

    /// Waits until the claim is certainly held; EIO if it is lost or its state stays unknown until
    /// the deadline.
    pub(crate) async fn wait_open(&self, deadline: Deadline) -> Result<(), Errno> {
        let mut state = self.state.clone();
        loop {
            match *state.borrow_and_update() {
                State::Held { until } if BootInstant::now() < until => return Ok(()),
                State::Held { .. } => {}
                State::Lost => return Err(Errno::IO),
            }
            match tokio::time::timeout_at(deadline.instant().into(), state.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(Errno::IO),
            }
        }
    }

    /// Returns once the claim is lost for good.
    pub(crate) async fn wait_lost(&self) {
        let mut state = self.state.clone();
        if state.wait_for(|state| matches!(state, State::Lost)).await.is_err() {
            // The renewal task has ended: the daemon is shutting down.
            std::future::pending::<()>().await;
        }
    }
}

fn holder_name(claim: Option<Claim>) -> String {
    claim.map_or_else(|| "none".into(), |claim| claim.holder)
}

async fn renew(
    client: Client,
    config: ClaimConfig,
    mut claim: Claim,
    state: watch::Sender<State>,
    lease: Lease,
) {
    let ClaimConfig { path, valid, .. } = &config;
    let mut pause = *valid / RENEWALS;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = state.closed() => return,
        }
        let requested = BootInstant::now();
        match client.renew_claim(path, &claim).await {
            Ok(Renewal::Held(renewed)) => {
                claim = renewed;
                let until = requested.after(*valid);
                lease.renew_until(until);
                state.send_replace(State::Held { until });
                // Measured from the request: a reply may have taken longer than a pause.
                pause = (*valid / RENEWALS).saturating_sub(BootInstant::now().since(requested));
            }
            Ok(Renewal::Lost(holder)) => {
                tracing::error!(path, by = holder_name(holder), "lost the claim on this volume");
                lease.revoke();
                state.send_replace(State::Lost);
                return;
            }
            Err(error) => {
                tracing::warn!(path, %error, "could not renew the claim");
                pause = PAUSE;
            }
        }
    }
}
