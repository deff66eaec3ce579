//! Chains that are held after mgmtd's store was restored from a backup
//! (`threefs_core::membership`).

use std::collections::BTreeMap;

use threefs_core::heartbeat::SeenRouting;
use threefs_core::ids::{ChainId, ChainVersion, FencesVersion, NodeId, StoreId, TargetId};
use threefs_core::membership::{MembershipRecord, Unproven, confirm, hold, newest};
use threefs_core::routing::{Chain, ChainTarget};
use threefs_core::time::Millis;

use crate::changes::Changes;
use crate::report::{UnconfirmedChain, UnconfirmedReport, UnknownTarget};
use crate::view::View;

/// The records of each chain, with the nodes that report them.
pub(crate) type Records<'a> = BTreeMap<ChainId, Vec<Reported<'a>>>;
type Reported<'a> = (NodeId, &'a MembershipRecord);

fn reported<'a, 'b>(records: &'b Records<'a>, chain: ChainId) -> &'b [Reported<'a>] {
    records.get(&chain).map_or(&[], Vec::as_slice)
}

fn records_of<'a>(reported: &[Reported<'a>]) -> impl Iterator<Item = &'a MembershipRecord> {
    reported.iter().map(|(_, record)| *record)
}

impl View {
    /// Whether a node has seen newer state than this store has: it was restored from a backup.
    pub(crate) fn is_behind(&self, seen: &SeenRouting, fences: FencesVersion) -> bool {
        let is_newer = |record: &MembershipRecord| {
            let chain = self.routing.chains.get(&record.chain.id);
            !self.routing.retired.contains(&record.target)
                && chain.is_some_and(|chain| record.supersedes(chain))
        };
        seen.version > self.routing.version
            || fences > self.fences_version()
            || seen.records.iter().any(is_newer)
    }

    /// The reported records by chain, without copies of another node's. The record of a target that
    /// has left its chain names no node, and may be the only trace of the chain without it.
    pub(crate) fn records(&self) -> Records<'_> {
        let mut records = Records::new();
        for (node, last) in &self.heartbeats {
            let counts = |record: &&MembershipRecord| {
                record.chain.place(record.target).is_none_or(|place| place.node == *node)
                    && !self.routing.retired.contains(&record.target)
            };
            for record in last.records.iter().filter(counts) {
                records.entry(record.chain.id).or_default().push((*node, record));
            }
        }
        records
    }

    fn confirm(
        &self,
        newest: &Chain,
        held: ChainVersion,
        records: &[Reported<'_>],
    ) -> Result<(Chain, Vec<(TargetId, StoreId)>), Unproven> {
        let of_members: BTreeMap<TargetId, &MembershipRecord> = records
            .iter()
            .filter(|(node, record)| {
                newest.place(record.target).is_some_and(|place| place.node == *node)
            })
            .map(|(_, record)| (record.target, *record))
            .collect();
        let empty = newest.targets.iter().filter_map(|place| {
            let line = self.report_of(place.node, place.target).filter(|line| line.chunks == 0)?;
            Some((place.target, line.store?))
        });
        confirm(newest, held, &of_members, &self.stores, &empty.collect())
    }

    /// Whether no target of a held chain serves any more by a lease of the lost mgmtd: all of them
    /// have received the held version, or such leases have ended.
    pub(super) fn has_stopped(&self, members: &Chain, held: ChainVersion, now: Millis) -> bool {
        let has_received = |place: &ChainTarget| {
            let line = self.report_of(place.node, place.target);
            line.is_some_and(|line| line.report.chain_version == held)
        };
        self.former_leases_ms(now).is_none() || members.targets.iter().all(has_received)
    }

    /// Adds what follows for a held chain from the records.
    pub(super) fn scan_held(
        &self,
        chain: &Chain,
        known: &Chain,
        (records, now): (&Records<'_>, Millis),
        changes: &mut Changes,
    ) {
        let records = reported(records, chain.id);
        let Ok(newest) = newest(known, records_of(records)) else { return };
        if let Ok((next, stores)) = self.confirm(newest, chain.version, records) {
            if !self.has_stopped(newest, chain.version, now) {
                return;
            }
            let stays = |target| next.place(target).is_some();
            if let Some(this) = self.routing.moves.get(&chain.id)
                && !(stays(this.source) && stays(this.destination))
            {
                changes.dropped_moves.push(chain.id);
            }
            changes.stores.extend(stores);
            changes.released.push(chain.id);
            changes.chains.push(next);
        } else if newest.version > known.version {
            // Its nodes must open their stores, so that one of them can be promoted.
            changes.chains.push(hold(newest, chain.version, 0));
            changes.learned.push(newest.clone());
        }
    }

    /// Records of targets that this store does not know: their chain was created, or the target
    /// was added to it, after the backup.
    pub(crate) fn unknown_targets(&self) -> impl Iterator<Item = UnknownTarget> {
        self.heartbeats.iter().flat_map(move |(node, last)| {
            let unknown = |record: &&MembershipRecord| {
                let chain = self.routing.chains.get(&record.chain.id);
                !self.routing.retired.contains(&record.target)
                    && chain.is_none_or(|chain| chain.place(record.target).is_none())
            };
            last.records.iter().filter(unknown).map(|record| UnknownTarget {
                target: record.target,
                node: *node,
                chain: record.chain.id,
            })
        })
    }

    /// Why a held chain is not confirmed, if it is not about to be.
    pub(crate) fn unproven(&self, id: ChainId, records: &Records<'_>) -> Option<Unproven> {
        let (known, held) = (self.held.get(&id)?, self.routing.chains.get(&id)?.version);
        let records = reported(records, id);
        newest(known, records_of(records))
            .and_then(|newest| self.confirm(newest, held, records))
            .err()
    }

    /// Why held chains wait, for operators.
    pub(crate) fn unconfirmed(&self) -> UnconfirmedReport {
        let records = self.records();
        let chains = self.held.keys().map(|chain| {
            let unproven = self.unproven(*chain, &records);
            let reason = unproven.map(|unproven| unproven.to_string());
            let reason = reason.unwrap_or_else(|| "it is being confirmed".into());
            UnconfirmedChain { chain: *chain, reason }
        });
        UnconfirmedReport {
            chains: chains.collect(),
            unknown_targets: self.unknown_targets().collect(),
        }
    }

    /// Logs new reasons why held chains wait.
    pub(crate) fn log_waits(&mut self) {
        if self.held.is_empty() && self.logged_waits.is_empty() {
            return;
        }
        let report = self.unconfirmed();
        let waits: BTreeMap<ChainId, String> =
            report.chains.into_iter().map(|it| (it.chain, it.reason)).collect();
        for (chain, reason) in &waits {
            if self.logged_waits.get(chain) != Some(reason) {
                tracing::warn!(
                    "{chain} is held, because the store of mgmtd was restored from a backup: \
                     {reason}. Start these storage services, or promote a target"
                );
            }
        }
        for chain in self.logged_waits.keys().filter(|chain| !waits.contains_key(chain)) {
            tracing::info!("{chain} is released");
        }
        self.logged_waits = waits;
    }
}
