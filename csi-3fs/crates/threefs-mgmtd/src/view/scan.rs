//! Scan of all chains: the changes that follow from the newest heartbeats.

use std::collections::BTreeMap;

use threefs_core::chain::advance;
use threefs_core::heartbeat::{LocalReport, LocalState, TargetReport};
use threefs_core::ids::TargetId;
use threefs_core::moves::follow;
use threefs_core::routing::{Chain, ChainTarget, PublicState};
use threefs_core::time::Millis;

use crate::changes::Changes;
use crate::config::Timers;
use crate::protocol::ForeignStore;
use crate::view::View;
use crate::view::held::Records;

impl View {
    /// Whether decisions about a chain must wait: some of its serving targets are dead, and none of
    /// the others has sent a heartbeat recently. If all of them die, as in a power failure or when
    /// all processes are killed, they must be declared dead *together*: then any of them may lead.
    /// One after the other, only the last one could lead, and its disk may be lost. The wait ends
    /// with a heartbeat of one of them, or when the last one is declared dead after
    /// `node_failure_ms`; replicas serve reads in the meantime only while they hold their leases.
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
            self.heartbeats.get(&place.node).is_some_and(|last| {
                now.since(last.at) < timers.node_failure_ms / 2
                    && restarted.is_none_or(|since| last.at >= since)
            })
        };
        let (alive, dead): (Vec<&ChainTarget>, Vec<&ChainTarget>) =
            chain.serving().partition(|place| serves(place));
        !dead.is_empty() && !alive.is_empty() && !alive.iter().any(heard_lately)
    }

    /// The changes that are due.
    pub(crate) fn scan(&self, timers: &Timers, now: Millis) -> Changes {
        let mut lines: BTreeMap<TargetId, &TargetReport> = BTreeMap::new();
        for (node, last) in &self.heartbeats {
            if self.is_alive(*node, timers, now) && !self.restarting.contains_key(node) {
                lines.extend(last.targets.iter().map(|line| (line.target, line)));
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
        let records = if self.held.is_empty() { Records::new() } else { self.records() };
        for chain in self.routing.chains.values() {
            if let Some(known) = self.held.get(&chain.id) {
                self.scan_held(chain, known, (&records, now), &mut changes);
                continue;
            }
            if self.must_wait(chain, &reports, timers, now) {
                continue;
            }
            let mut next = advance(chain, &reports);
            if let Some(this) = self.routing.moves.get(&chain.id) {
                let (next_chain, ended) = follow(chain, next.chain, this);
                next.chain = next_chain;
                changes.ended_moves.extend(ended.then_some(*this));
            }
            let serving = next.chain.serving().map(|place| place.target);
            changes.stores.extend(serving.filter_map(|target| {
                let line = lines.get(&target)?;
                // A report about an earlier version of the chain may be about a former store. The
                // store of a target that has never served is recorded with the change that lets it
                // serve: if it were lost before its next heartbeat, an empty store would lead in
                // its place.
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

    /// Targets that served last and report another store than the one that they served with: the
    /// disk was emptied or replaced, or its folder is missing. Such a store never counts as the
    /// chain's data; the target counts as dead until another one serves, and is synced then.
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
        let store = self.stores.get(&place.target).copied();
        let leads = matches!(place.state, PublicState::Serving | PublicState::LastSrv);
        leads && line.store.is_some() && !line.is_of(store)
    }
}
