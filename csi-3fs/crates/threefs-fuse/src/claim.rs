//! The claim of a mount that only one node may have: renewed while the mount is served; without a
//! renewal that is young enough nothing is served. See `threefs_client::Claim`.
//!
//! What the daemon has asked for meanwhile is fenced where it arrives: the client's `Lease` lets
//! changes and updates pass while the claim is held, and each says until when it may be begun. So
//! an operation lasts as long as its own time, over any number of renewals, and nothing of it
//! happens once another node may have the claim.

use std::time::Duration;

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{BootInstant, Claim, Client, ClientError, Lease, Renewal};
use tokio::sync::watch;

/// Renewals in the time for which one is trusted.
const RENEWALS: u32 = 4;
/// Between attempts while the metadata service does not answer.
const PAUSE: Duration = Duration::from_millis(500);

/// What a daemon is told about its claim.
#[derive(Clone, Debug)]
pub struct ClaimConfig {
    /// The directory that is claimed.
    pub path: String,
    /// This node.
    pub holder: String,
    /// How long a renewal is trusted, from when it was asked for.
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
    /// Claims, and renews until the gate is dropped. Who has the claim if it is not to be had. A
    /// mount that was served before (`resume`) takes no claim that is gone: another node may have
    /// had it, and the kernel may still have to write what it was told before that.
    pub(crate) async fn open(
        client: &Client,
        config: ClaimConfig,
        resume: bool,
    ) -> Result<Result<Self, String>, ClientError> {
        let (asked, lease) = (BootInstant::now(), client.lease().clone());
        let claim = if resume {
            let known = Claim { holder: config.holder.clone(), beat: 0 };
            match client.renew_claim(&config.path, &known).await? {
                Renewal::Held(claim) => claim,
                Renewal::Lost(found) => {
                    lease.revoke();
                    return Ok(Err(named(found)));
                }
            }
        } else {
            client.claim(&config.path, &config.holder, None).await?
        };
        if claim.holder != config.holder {
            return Ok(Err(claim.holder));
        }
        let until = asked.after(config.valid);
        lease.renew_until(until);
        let (sender, state) = watch::channel(State::Held { until });
        tokio::spawn(renew(client.clone(), config, claim, sender, lease));
        Ok(Ok(Self { state }))
    }

    /// A gate that never opens: somebody else has the claim.
    pub(crate) fn lost() -> Self {
        Self { state: watch::channel(State::Lost).1 }
    }

    /// Whether the claim is certainly held now.
    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.state.borrow(), State::Held { until } if BootInstant::now() < until)
    }

    /// Waits until the claim is certainly held; EIO when it is lost or that cannot be known in time.
    pub(crate) async fn pass(&self, deadline: Deadline) -> Result<(), Errno> {
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

    /// Ends when the claim is lost for good.
    pub(crate) async fn lost_for_good(&self) {
        let mut state = self.state.clone();
        if state.wait_for(|state| matches!(state, State::Lost)).await.is_err() {
            // Nobody renews it any more: the daemon ends.
            std::future::pending::<()>().await;
        }
    }
}

fn named(found: Option<Claim>) -> String {
    found.map_or_else(|| "nobody".into(), |claim| claim.holder)
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
        let asked = BootInstant::now();
        match client.renew_claim(path, &claim).await {
            Ok(Renewal::Held(renewed)) => {
                claim = renewed;
                let until = asked.after(*valid);
                lease.renew_until(until);
                state.send_replace(State::Held { until });
                // Counted from when it was asked: an answer may have taken longer than a pause.
                pause = (*valid / RENEWALS).saturating_sub(BootInstant::now().since(asked));
            }
            Ok(Renewal::Lost(found)) => {
                tracing::error!(path, by = named(found), "the claim on this volume is lost");
                lease.revoke();
                state.send_replace(State::Lost);
                return;
            }
            Err(error) => {
                tracing::warn!(path, %error, "the claim could not be renewed");
                pause = PAUSE;
            }
        }
    }
}
