//! A scan of all chains: what changes, given the newest heartbeats.

use std::collections::BTreeMap;

use threefs_core::chain::advance;
use threefs_core::heartbeat::{LocalReport, LocalState, TargetReport};
use threefs_core::ids::TargetId;
use threefs_core::moves::follow;
use threefs_core::routing::{Chain, ChainTarget, PublicState};
use threefs_core::time::Millis;

use crate::config::Timers;
use crate::protocol::ForeignStore;
use crate::view::{Changes, View};

impl View {
    /// Whether a chain has to wait before anything of it is decided: some of those that serve it are
    /// dead, and of the others none has been heard lately. If all of them die, as they do when the
    /// power fails or all processes are killed, they must be found dead *together*: then each of
    /// them may lead. One after the other they would leave the last one alone as the authority,
    /// and its disk may be the one that is lost. It ends with a heartbeat of one of them, or after
    /// `node_failure_ms` of silence of the last; nobody is served by the chain meanwhile anyway.
    pub(super) fn must_wait(
        &self,
        chain: &Chain,
        reports: &BTreeMap<TargetId, LocalReport>,
        timers: &Timers,
        now: Millis,
    ) -> bool {
        let serves = |place: &ChainTarget| {
            reports.get(&place.target).is_some_and(|report| match report.state {
                LocalState::UpToDate => true,
                LocalState::Online => report.chain_version != chain.version,
                LocalState::Offline => false,
            })
        };
        let restarted =
            chain.serving().filter_map(|place| self.restarting.get(&place.node)).max().copied();
        let heard_lately = |place: &&ChainTarget| {
            self.heartbeats.get(&place.node).is_some_and(|heartbeats| {
                now.since(heartbeats.at) < timers.node_lease_ms()
                    && restarted.is_none_or(|since| heartbeats.at >= since)
            })
        };
        let (alive, dead): (Vec<&ChainTarget>, Vec<&ChainTarget>) =
            chain.serving().partition(|place| serves(place));
        !dead.is_empty() && !alive.is_empty() && !alive.iter().any(heard_lately)
    }

    /// What has to change now.
    pub(crate) fn scan(&self, timers: &Timers, now: Millis) -> Changes {
        let mut lines: BTreeMap<TargetId, &TargetReport> = BTreeMap::new();
        for (node, heartbeats) in &self.heartbeats {
            if self.is_alive(*node, timers, now) && !self.restarting.contains_key(node) {
                lines.extend(heartbeats.targets.iter().map(|line| (line.target, line)));
            }
        }
        let mut reports: BTreeMap<TargetId, LocalReport> =
            lines.iter().map(|(target, line)| (*target, line.report)).collect();
        for place in self.routing.chains.values().flat_map(|chain| &chain.targets) {
            if let Some(line) = lines.get(&place.target)
                && self.is_foreign(place, line)
                && let Some(report) = reports.get_mut(&place.target)
            {
                report.state = LocalState::Offline;
            }
        }
        let mut changes = Changes::default();
        for chain in self.routing.chains.values() {
            if self.must_wait(chain, &reports, timers, now) {
                continue;
            }
            let mut next = advance(chain, &reports);
            if let Some(this) = self.routing.moves.get(&chain.id) {
                let (followed, ended) = follow(chain, next.chain, this);
                next.chain = followed;
                changes.ended.extend(ended.then_some(*this));
            }
            let serving = next.chain.serving().map(|place| place.target);
            changes.stores.extend(serving.filter_map(|target| {
                let line = lines.get(&target)?;
                // A report of a former state of the chain may be about a former store. Of a target
                // that never served there is none, and its store is written down with the change
                // that lets it serve: were it lost before its next heartbeat, an empty one would
                // lead in its place.
                let news = match self.stores.get(&target) {
                    None => true,
                    known => {
                        line.report.chain_version == chain.version && known.copied() != line.store
                    }
                };
                news.then_some((target, line.store?))
            }));
            if next.changed(chain) {
                changes.reasons.extend(next.reasons);
                changes.chains.push(next.chain);
            }
        }
        changes
    }

    /// Targets that served last and report another store than the one they served with: the disk was
    /// emptied or replaced, or its folder is missing. Such a store is never taken for the chain's
    /// data; the target counts as dead until another one serves, and is synced then.
    pub(crate) fn foreign(&self) -> impl Iterator<Item = ForeignStore> {
        self.routing.chains.values().flat_map(move |chain| {
            chain.targets.iter().filter_map(move |place| {
                let line = self.report_of(place.node, place.target)?;
                self.is_foreign(place, &line).then_some(ForeignStore {
                    target: place.target,
                    node: place.node,
                    chain: chain.id,
                    served_with: self.stores.get(&place.target).copied()?,
                    reported: line.store?,
                })
            })
        })
    }

    /// See [`Self::foreign`].
    pub(super) fn is_foreign(&self, place: &ChainTarget, line: &TargetReport) -> bool {
        let known = self.stores.get(&place.target).copied();
        let leads = matches!(place.state, PublicState::Serving | PublicState::LastSrv);
        leads && line.store.is_some() && !line.is_of(known)
    }
}
