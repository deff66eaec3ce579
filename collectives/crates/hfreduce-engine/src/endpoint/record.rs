//! Flight records of `connect`.

use super::info::Info;
use super::{Endpoint, Options};
use hfreduce_core::Flows;
use hfreduce_core::error::CollectiveError;
use hfreduce_core::reconfigure::Start;
use hfreduce_shm::flight::{RankInfo, Recorder};

impl Endpoint {
    pub(super) fn rank_info(&self, infos: &[Info], group: u64, epoch: u32) -> RankInfo {
        let rank = self.options.rank;
        let (node, local) = (self.placement.node_of(rank), self.placement.local_of(rank));
        let flows = Flows::new(&self.plan, node);
        let streams = self.streams(self.channels(infos));
        let link = |peer: &usize| {
            let rank = *self.placement.members(*peer).get(local)?;
            Some((rank, self.placement.nodes()[*peer].name.clone(), streams))
        };
        let own_node = &self.placement.nodes()[node];
        RankInfo {
            job: self.options.job.clone(),
            rank,
            world_size: self.placement.world_size(),
            node: own_node.name.clone(),
            zone: own_node.zone.clone(),
            reached_at: self.info.reached_at(),
            group,
            epoch,
            links: flows.peers().iter().filter_map(link).collect(),
        }
    }

    /// Records the phase of `connect`.
    pub(super) fn record_phase(&self, phase: &str, rank: u32) {
        if let Some(recorder) = self.recorder.get() {
            recorder.waiting(None, phase, Some(rank));
        }
    }
}

/// A recorder for the time between two epochs: ranks are positions in the list of members.
pub(super) fn for_reconfiguration(options: &Options, start: &Start) -> Recorder {
    let (node, zone) = options.placement.get(options.rank as usize).cloned().unwrap_or_default();
    let info = RankInfo {
        job: options.job.clone(),
        rank: start.own.unwrap_or(0) as u32,
        world_size: start.size,
        node,
        zone,
        reached_at: String::new(),
        group: start.list_digest,
        epoch: start.epoch.saturating_add(1),
        links: Vec::new(),
    };
    Recorder::new(&options.folders, &info)
}

/// The error with the path of its dump.
pub(super) fn with_dump(error: CollectiveError, recorder: &Recorder) -> CollectiveError {
    let path = recorder.broke(&error.cause.encode());
    CollectiveError { flight_record: path.map(|path| path.display().to_string().into()), ..error }
}
