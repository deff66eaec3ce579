//! Fences of volumes, and who has confirmed them.

use threefs_core::fence::{Fences, VolumeFence};
use threefs_core::heartbeat::TargetReport;
use threefs_core::ids::{FencesVersion, NodeId};
use threefs_core::routing::{Chain, ChainTarget, PublicState};
use threefs_core::time::Millis;

use super::{LastHeartbeat, Report, View};
use crate::config::Timers;
use crate::protocol::MgmtdError;
use crate::rows::FenceRow;

impl View {
    /// The version of the newest fence: a lease counts only with it.
    pub(crate) fn fences_version(&self) -> FencesVersion {
        let stored = self.fences.values().map(|row| row.version).max().unwrap_or_default();
        stored.max(FencesVersion::first_of(self.routing.version))
    }

    /// The version that a lease requires. After a restore none, until the fences are published: then no
    /// node has a version that is high enough.
    pub(crate) fn fences_required(&self) -> FencesVersion {
        if self.unpublished { FencesVersion(u64::MAX) } else { self.fences_version() }
    }

    /// Refuses a node of an earlier release if the cluster has snapshots, or may have them.
    pub(crate) fn check_knows_fences(&mut self, report: &Report) -> Result<(), MgmtdError> {
        if report.fences.is_some() || !(self.snapshots || self.unpublished) {
            return Ok(());
        }
        let node = report.heartbeat.node;
        let service = format!("the storage service of {node} at {}", report.heartbeat.address);
        let refusal = MgmtdError::Outdated { service };
        if self.outdated.insert(node) {
            tracing::error!("{refusal}");
        }
        Err(refusal)
    }

    /// Refuses the first snapshot while a live node does not know fences.
    pub(crate) fn check_all_know_fences(
        &self,
        timers: &Timers,
        now: Millis,
    ) -> Result<(), MgmtdError> {
        // Nodes that only the former primary knows may have leases.
        if let Some(remaining_ms) = self.former_leases_ms(now) {
            return Err(MgmtdError::Starting { remaining_ms });
        }
        let mut heartbeats = self.heartbeats.iter();
        let outdated = heartbeats
            .find(|(node, last)| last.fences.is_none() && self.is_alive(**node, timers, now));
        let Some((node, _)) = outdated else { return Ok(()) };
        let address = self.nodes.get(node).map(|row| row.info.address.as_str());
        let address = address.unwrap_or("an unknown address");
        let service = format!("the storage service of {node} at {address}");
        Err(MgmtdError::Outdated { service })
    }

    /// Whether the stored fence of a volume contains this one.
    pub(crate) fn has_fence(&self, fence: &VolumeFence) -> bool {
        self.fences.get(&fence.volume).is_some_and(|row| {
            row.fence.epoch.volume == fence.epoch.volume && row.fence.merged(fence) == row.fence
        })
    }

    /// The fences that have changed since `known`; all of them in another era.
    pub(crate) fn fences_after(&self, known: FencesVersion) -> Option<Fences> {
        let version = self.fences_version();
        let is_of_era = known >= FencesVersion::first_of(self.routing.version);
        let rows = self.fences.values().filter(|row| !is_of_era || row.version > known);
        let volumes = rows.map(|row| row.fence.clone());
        (version > known).then(|| Fences { version, volumes: volumes.collect() })
    }

    /// Refuses a fence that the volume cannot have.
    pub(crate) fn check_fence(&self, fence: &VolumeFence) -> Result<(), MgmtdError> {
        let is_taken = |row: &&FenceRow| {
            row.fence.epoch.volume == fence.epoch.volume && row.fence.volume != fence.volume
        };
        let checked = match self.fences.values().find(is_taken) {
            Some(row) => {
                Err(format!("epoch {}: it is of volume {}", fence.epoch, row.fence.volume))
            }
            None => fence.check(),
        };
        checked.map_err(|reason| MgmtdError::InvalidFence { volume: fence.volume, reason })
    }

    /// What the fences of this version wait for; `None`: from now on, no update that they refuse is
    /// executed.
    ///
    /// Each node that may have a lease knows them, so no such update starts. Each serving target has
    /// executed all earlier ones in the current chain; a target that is not in it has no part.
    pub(crate) fn fences_wait_for(
        &self,
        timers: &Timers,
        version: FencesVersion,
        now: Millis,
    ) -> Option<String> {
        // Leases of a former primary, also of nodes that this one does not know.
        if self.former_leases_ms(now).is_some() {
            return Some("the leases that another mgmtd has given".into());
        }
        let is_alive = |node: NodeId| self.is_alive(node, timers, now);
        let mut nodes = self.heartbeats.iter().filter(|(node, _)| is_alive(**node));
        if let Some((node, _)) = nodes.find(|(_, last)| last.known_fences() < version) {
            return Some(format!("{node}, which does not have it yet"));
        }
        let mut places = self.routing.chains.values().flat_map(|chain| {
            let serving = chain.targets.iter().filter(|it| it.state == PublicState::Serving);
            serving.map(move |place| (chain, place))
        });
        let (_, place) = places.find(|(chain, place)| {
            let last = self.heartbeats.get(&place.node);
            !is_alive(place.node)
                || last.is_none_or(|last| !last.has_drained(chain, place, version))
        })?;
        Some(format!("updates that {} on {} executes", place.target, place.node))
    }
}

impl LastHeartbeat {
    fn known_fences(&self) -> FencesVersion {
        self.fences.as_ref().map_or(FencesVersion(0), |fences| fences.known)
    }

    /// Whether a target of this node confirms these fences in the current version of its chain.
    fn has_drained(&self, chain: &Chain, place: &ChainTarget, version: FencesVersion) -> bool {
        let reported = |line: &TargetReport| {
            line.target == place.target && line.report.chain_version == chain.version
        };
        let mut drained = self.fences.iter().flat_map(|fences| &fences.drained);
        let confirms =
            |(target, drained): &(_, FencesVersion)| *target == place.target && *drained >= version;
        self.targets.iter().any(reported) && drained.any(confirms)
    }
}
