//! The claim of a mount that only one node may have: renewed while the mount is served; without a
//! renewal that is young enough nothing is served. See `threefs_client::Claim`.

use std::time::{Duration, Instant};

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::{Claim, Client, ClientError, Renewal};
use tokio::sync::watch;

/// Renewals in the time for which one is trusted.
const RENEWALS: u32 = 4;
/// Between attempts while the metadata service does not answer.
const PAUSE: Duration = Duration::from_millis(500);

/// How long after its last trusted moment an operation may still be under way. Whoever wants the
/// claim waits longer.
const GRACE: Duration = Duration::from_secs(5);

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
    Held { until: Instant },
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
        let asked = Instant::now();
        let claim = if resume {
            let known = Claim { holder: config.holder.clone(), beat: 0 };
            match client.renew_claim(&config.path, &known).await? {
                Renewal::Held(claim) => claim,
                Renewal::Lost(found) => return Ok(Err(named(found))),
            }
        } else {
            client.claim(&config.path, &config.holder, None).await?
        };
        if claim.holder != config.holder {
            return Ok(Err(claim.holder));
        }
        let (sender, state) = watch::channel(State::Held { until: asked + config.valid });
        tokio::spawn(renew(client.clone(), config, claim, sender));
        Ok(Ok(Self { state }))
    }

    /// A gate that never opens: somebody else has the claim.
    pub(crate) fn lost() -> Self {
        Self { state: watch::channel(State::Lost).1 }
    }

    /// Whether the claim is certainly held now.
    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.state.borrow(), State::Held { until } if Instant::now() < until)
    }

    /// Waits until the claim is certainly held and gives the time by which what is done under it
    /// must have ended; EIO when it is lost or that cannot be known in time.
    pub(crate) async fn pass(&self, deadline: Deadline) -> Result<Deadline, Errno> {
        let mut state = self.state.clone();
        loop {
            match *state.borrow_and_update() {
                State::Held { until } => {
                    let left = until.saturating_duration_since(Instant::now());
                    if !left.is_zero() {
                        return Ok(deadline.within(left + GRACE));
                    }
                }
                State::Lost => return Err(Errno::IO),
            }
            match tokio::time::timeout_at(deadline.instant().into(), state.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(Errno::IO),
            }
        }
    }
}

fn named(found: Option<Claim>) -> String {
    found.map_or_else(|| "nobody".into(), |claim| claim.holder)
}

async fn renew(client: Client, config: ClaimConfig, mut claim: Claim, state: watch::Sender<State>) {
    let ClaimConfig { path, valid, .. } = &config;
    let mut pause = *valid / RENEWALS;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = state.closed() => return,
        }
        let asked = Instant::now();
        match client.renew_claim(path, &claim).await {
            Ok(Renewal::Held(renewed)) => {
                claim = renewed;
                state.send_replace(State::Held { until: asked + *valid });
                pause = *valid / RENEWALS;
            }
            Ok(Renewal::Lost(found)) => {
                tracing::error!(path, by = named(found), "the claim on this volume is lost");
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
