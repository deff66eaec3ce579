//! Fences of volumes: stored, published, and confirmed by the heartbeats of storage services.

use std::time::Duration;

use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::ids::FencesVersion;
use threefs_core::time::Millis;
use tokio::sync::MutexGuard;

use crate::manager::{Manager, Role, deadline};
use crate::ops::{EnableSnapshots, FencesPublished, RaiseFence};
use crate::protocol::{MgmtdError, MgmtdReply, WAIT_MS_MAX};
use crate::refusal::Refusal;
use crate::service::Handler;
use crate::view::Report;

/// Time between two checks of a fence that waits. Not after each heartbeat: there are thousands in a
/// second.
const CHECK: Duration = Duration::from_millis(20);

impl Manager {
    /// Handles a heartbeat of a node that knows fences.
    pub(crate) async fn fenced_heartbeat(
        &self,
        report: Report,
        now: Millis,
    ) -> Result<MgmtdReply, MgmtdError> {
        let reply = self.heartbeat_with(report, now).await?;
        // Read afterwards: a newer version only asks for more.
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        let (version, required) = (view.fences_version(), view.fences_required());
        // It changes without a fence, too: in a new era.
        self.fences.send_if_modified(|published| {
            let is_newer = version > *published;
            *published = version.max(*published);
            is_newer
        });
        Ok(MgmtdReply::FencedHeartbeat(reply, required))
    }

    /// Stores a fence; returns the version that contains it.
    pub(crate) async fn raise_fence(
        &self,
        raised: &VolumeFence,
        now: Millis,
    ) -> Result<FencesVersion, MgmtdError> {
        let mut role = self.role.lock().await;
        self.enable_snapshots_in(&mut role, now).await?;
        let view = self.view(&mut role, now)?;
        if view.unpublished {
            // It takes another call of a metadata service.
            return Err(MgmtdError::Starting { remaining_ms: self.timers.node_failure_ms });
        }
        self.store_fence(&mut role, raised, now).await
    }

    async fn store_fence(
        &self,
        role: &mut MutexGuard<'_, Role>,
        raised: &VolumeFence,
        now: Millis,
    ) -> Result<FencesVersion, MgmtdError> {
        let view = self.view(role, now)?;
        view.check_fence(raised)?;
        let raise = RaiseFence { fence: view.fence, raised };
        let result = self.store.transact(deadline(), &raise).await;
        let row = match result {
            Ok(Ok(row)) => row,
            Ok(Err(refusal)) => return Err(refusal),
            Err(error) => {
                return self.reply_or_step_down(role, Err(Refusal::Op(error)));
            }
        };
        let version = row.version;
        if let Some(before) = view.fences.insert(row.fence.volume, row.clone())
            && before == row
        {
            return Ok(version);
        }
        let fence = &row.fence;
        tracing::info!(volume = %fence.volume, epoch = %fence.epoch, "fence raised");
        self.fences.send_modify(|published| *published = version.max(*published));
        Ok(version)
    }

    /// Stores that the cluster has snapshots, once all live storage services know fences.
    pub(crate) async fn enable_snapshots(&self, now: Millis) -> Result<(), MgmtdError> {
        let mut role = self.role.lock().await;
        self.enable_snapshots_in(&mut role, now).await
    }

    async fn enable_snapshots_in(
        &self,
        role: &mut MutexGuard<'_, Role>,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let view = self.view(role, now)?;
        if view.snapshots {
            return Ok(());
        }
        view.check_all_know_fences(&self.timers, now)?;
        let enable = EnableSnapshots(view.fence);
        let enabled = self.store.transact(deadline(), &enable).await;
        self.reply_or_step_down(role, enabled.map_err(Refusal::Op))?;
        self.view(role, now)?.snapshots = true;
        tracing::info!("the cluster has snapshots: services of earlier releases are refused");
        Ok(())
    }

    /// Stores fences of a metadata service with all it has, in parts. From the last one on, leases count
    /// again after a restore.
    pub(crate) async fn publish_fences(
        &self,
        era: u32,
        fences: &[VolumeFence],
        is_last: bool,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        if era != view.routing.version.era() {
            // They may have been read before a creation that a lost store of mgmtd has fenced.
            return Err(MgmtdError::OtherEra { era, newest: view.routing.version.era() });
        }
        if !fences.is_empty() {
            self.enable_snapshots_in(&mut role, now).await?;
        }
        for fence in fences {
            if self.view(&mut role, now)?.has_fence(fence) {
                continue;
            }
            match self.store_fence(&mut role, fence, now).await {
                // Its updates stay refused; others must not wait for it.
                Err(error @ MgmtdError::InvalidFence { .. }) => tracing::error!("{error}"),
                stored => drop(stored?),
            }
        }
        if is_last {
            self.end_publication(&mut role, now).await?;
        }
        Ok(())
    }

    /// A metadata service has published all its fences.
    pub(crate) async fn end_publication(
        &self,
        role: &mut MutexGuard<'_, Role>,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        let view = self.view(role, now)?;
        if !view.unpublished {
            return Ok(());
        }
        let published = FencesPublished(view.fence);
        let published = self.store.transact(deadline(), &published).await;
        self.reply_or_step_down(role, published.map_err(Refusal::Op))?;
        self.view(role, now)?.unpublished = false;
        tracing::info!("the epochs of volumes are published: leases count again");
        Ok(())
    }

    pub(crate) async fn fences_after(
        &self,
        known: FencesVersion,
        now: Millis,
    ) -> Result<Option<Fences>, MgmtdError> {
        let mut role = self.role.lock().await;
        Ok(self.view(&mut role, now)?.fences_after(known))
    }

    pub(crate) async fn fences_wait_for(
        &self,
        version: FencesVersion,
        now: Millis,
    ) -> Result<Option<String>, MgmtdError> {
        let mut role = self.role.lock().await;
        Ok(self.view(&mut role, now)?.fences_wait_for(&self.timers, version, now))
    }
}

impl Handler {
    /// The fences that have changed since `known`, or nothing after the wait.
    pub(crate) async fn fences(
        &self,
        known: FencesVersion,
        wait_ms: u64,
    ) -> Result<Option<Fences>, MgmtdError> {
        let mut changes = self.manager.fences.subscribe();
        let now = self.manager.fences_after(known, self.clock.now()).await?;
        if now.is_some() {
            return Ok(now);
        }
        let newer = changes.wait_for(|version| *version > known);
        let wait = Duration::from_millis(wait_ms.min(WAIT_MS_MAX));
        tokio::select! {
            _ = tokio::time::timeout(wait, newer) => {}
            () = self.shutdown.requested() => {}
        }
        self.manager.fences_after(known, self.clock.now()).await
    }

    /// Raises a fence; what it waits for at the end of the wait.
    pub(crate) async fn raise_fence(
        &self,
        fence: &VolumeFence,
        wait_ms: u64,
    ) -> Result<Option<String>, MgmtdError> {
        let version = self.manager.raise_fence(fence, self.clock.now()).await?;
        let wait = Duration::from_millis(wait_ms.min(WAIT_MS_MAX));
        let end = tokio::time::Instant::now() + wait;
        loop {
            let waits = self.manager.fences_wait_for(version, self.clock.now()).await?;
            if waits.is_none() || tokio::time::Instant::now() >= end {
                return Ok(waits);
            }
            let next = end.min(tokio::time::Instant::now() + CHECK);
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.shutdown.requested() => return Ok(waits),
            }
        }
    }
}
