//! Calls for fences of volumes.

use std::time::Duration;

use fabric::deadline::Deadline;
use fabric::rpc::FaultCode::BadRequest;
use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::ids::FencesVersion;

use super::{MgmtdClient, MgmtdClientError, PAUSE, POLL, refused, unexpected};
use crate::protocol::{MgmtdError, MgmtdReply, MgmtdRequest};

/// Time to wait for the confirmation of a fence in one call: then another primary may have it.
const CONFIRMATION: Duration = Duration::from_secs(1);

impl MgmtdClient {
    /// Raises the fence of a volume: when this returns, no update of an earlier epoch of the volume is
    /// executed any more. May be repeated; the stored fence is never lowered.
    ///
    /// # Errors
    /// [`MgmtdError::FenceNotConfirmed`] at the deadline: the fence is stored, and some storage
    /// services apply it. Others as for any call.
    pub async fn raise_fence(
        &self,
        fence: VolumeFence,
        deadline: Deadline,
    ) -> Result<(), MgmtdClientError> {
        loop {
            let wait = deadline.remaining().unwrap_or_default().min(CONFIRMATION);
            let wait_ms = wait.as_millis() as u64;
            let request = MgmtdRequest::RaiseFence { fence: fence.clone(), wait_ms };
            match self.ask(&request, wait, deadline).await? {
                MgmtdReply::FenceRaised(None) => return Ok(()),
                MgmtdReply::FenceRaised(Some(waits_for)) => {
                    if deadline.remaining().is_none_or(|remaining| remaining <= PAUSE) {
                        let volume = fence.volume;
                        return Err(MgmtdError::FenceNotConfirmed { volume, waits_for }.into());
                    }
                }
                other => return Err(unexpected("a raised fence", &other)),
            }
        }
    }

    /// Passes the fences of volumes to `receive`, those that change after the first call. Never
    /// returns.
    pub async fn follow_fences(&self, mut receive: impl FnMut(Fences)) {
        let (mut known_version, poll) = (FencesVersion(0), self.poll());
        let mut primary = self.0.primary.subscribe();
        loop {
            primary.borrow_and_update();
            let request = MgmtdRequest::Fences { known_version, wait_ms: poll.as_millis() as u64 };
            let reply = tokio::select! {
                reply = self.ask(&request, poll, Deadline::after(poll * 2)) => reply,
                _ = primary.changed() => continue,
            };
            match reply {
                Ok(MgmtdReply::Fences(Some(fences))) => {
                    known_version = fences.version;
                    receive(fences);
                }
                Ok(MgmtdReply::Fences(None)) => {}
                // An earlier release of mgmtd has no fences.
                Err(error) if refused(&error, &[BadRequest]) => tokio::time::sleep(POLL).await,
                Err(error) => {
                    tracing::debug!(%error, "fences");
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(other) => {
                    tracing::debug!(?other, "unexpected reply to a query for fences");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}
