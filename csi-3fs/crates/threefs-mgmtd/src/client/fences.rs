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

    /// Stores that the cluster has snapshots; see [`MgmtdRequest::EnableSnapshots`].
    ///
    /// # Errors
    /// [`MgmtdError::Outdated`], also if mgmtd is of an earlier release. Others as for any call.
    pub async fn enable_snapshots(&self, deadline: Deadline) -> Result<(), MgmtdClientError> {
        match self.ask(&MgmtdRequest::EnableSnapshots, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::SnapshotsEnabled) => Ok(()),
            Ok(other) => Err(unexpected("an acknowledgment", &other)),
            Err(error) if refused(&error, &[BadRequest]) => {
                Err(MgmtdError::Outdated { service: "mgmtd".into() }.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Publishes some of the fences of all volumes; see [`MgmtdRequest::PublishFences`].
    ///
    /// # Errors
    /// [`MgmtdError::OtherEra`], [`MgmtdError::Outdated`]. Others as for any call.
    pub async fn publish_fences(
        &self,
        era: u32,
        fences: Vec<VolumeFence>,
        is_last: bool,
        deadline: Deadline,
    ) -> Result<(), MgmtdClientError> {
        let request = MgmtdRequest::PublishFences { era, fences, is_last };
        match self.ask(&request, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::FencesPublished) => Ok(()),
            Ok(other) => Err(unexpected("an acknowledgment", &other)),
            Err(error) if refused(&error, &[BadRequest]) => {
                Err(MgmtdError::Outdated { service: "mgmtd".into() }.into())
            }
            Err(error) => Err(error),
        }
    }

    /// All fences of volumes, for a metadata service; none if mgmtd is of an earlier release.
    ///
    /// # Errors
    /// No primary replied before the deadline.
    pub async fn fences(&self, deadline: Deadline) -> Result<Vec<VolumeFence>, MgmtdClientError> {
        let request = MgmtdRequest::Fences { known_version: FencesVersion(0), wait_ms: 0 };
        match self.ask(&request, Duration::ZERO, deadline).await {
            Ok(MgmtdReply::Fences(fences)) => Ok(fences.map(|it| it.volumes).unwrap_or_default()),
            Ok(other) => Err(unexpected("fences", &other)),
            Err(error) if refused(&error, &[BadRequest]) => Ok(Vec::new()),
            Err(error) => Err(error),
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
