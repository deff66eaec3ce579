//! Proof, from the disks of the targets, of the newest state of a chain whose table was restored from
//! a backup. Pure.
//!
//! Each target records the newest version of its chain durably before that version takes effect
//! ([`MembershipRecord::next`]). An update is acknowledged only when all SERVING targets of its
//! chain version have it, so all of them have recorded that version.
//!
//! A restored table may be older: the replicas that it lists as SERVING may have left since. So
//! mgmtd **holds** its chains: all targets are OFFLINE ([`hold`]), and the rules of chains let none
//! of them lead. It collects the records. The newest chain among the dumped one and the records is
//! the last one that took effect if *every* member of it reports a record: a later version takes
//! effect first on one of its members, because any other target serves only after one of them has
//! synced it. Then the targets that served last in it become LASTSRV ([`confirm`]). If a member does
//! not report, the chain waits, and an operator may promote a target.
//!
//! A held chain is never recorded, so it does not hide what was before. A store that was emptied or
//! replaced after the loss has no record, and proves nothing. Only a member without data is not
//! needed: an empty store that waits for its first sync, or any empty store of a chain in its first
//! version.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ChainVersion, StoreId, TargetId};
use crate::routing::{Chain, ChainTarget, PublicState};

/// The newest chain that a target has acted under, as its disk has recorded it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipRecord {
    /// The target.
    pub target: TargetId,
    /// The store that has recorded it.
    pub store: StoreId,
    /// Whether this store has had all data of its chain at some time. An empty store in place of a
    /// lost one has not, also while mgmtd still lists its target as SERVING.
    pub complete: bool,
    /// The chain.
    pub chain: Chain,
}

impl MembershipRecord {
    /// The record that must be durable before `chain` takes effect; `None` if nothing has to be
    /// written. `up_to_date`: the replica has all data of its chain.
    #[must_use]
    pub fn next(
        before: Option<&Self>,
        target: TargetId,
        store: StoreId,
        chain: &Chain,
        up_to_date: bool,
    ) -> Option<Self> {
        let before = before.filter(|before| before.store == store);
        let is_newer = before.is_none_or(|before| before.chain.version < chain.version);
        let serves = chain.state_of(target) == Some(PublicState::Serving);
        let complete = before.is_some_and(|before| before.complete) || (serves && up_to_date);
        (is_newer && !is_held(chain)).then(|| Self {
            target,
            store,
            complete,
            chain: chain.clone(),
        })
    }

    /// Whether `chain` is older than the recorded one: it comes from an mgmtd that was restored
    /// from a backup, and must not take effect.
    #[must_use]
    pub fn supersedes(&self, chain: &Chain) -> bool {
        chain.version < self.chain.version
    }
}

/// Whether no target may lead before the chain is confirmed or one is promoted. The rules of chains
/// never produce such a chain: they keep a target that is SERVING or LASTSRV.
#[must_use]
pub fn is_held(chain: &Chain) -> bool {
    let leads =
        |place: &ChainTarget| matches!(place.state, PublicState::Serving | PublicState::LastSrv);
    !chain.targets.iter().any(leads)
}

/// The members of `newest` without a leader, in a version above those of the previous eras.
#[must_use]
pub fn hold(newest: &Chain, before: ChainVersion, era: u32) -> Chain {
    let stop = |place: &ChainTarget| ChainTarget { state: PublicState::Offline, ..*place };
    Chain {
        id: newest.id,
        version: newest.version.max(before).next().max(ChainVersion::first_of(era)),
        targets: newest.targets.iter().map(stop).collect(),
    }
}

/// Why a held chain is not confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unproven {
    /// Records of this version differ.
    Conflict(ChainVersion),
    /// These members have no record.
    NoRecord(Vec<ChainTarget>),
    /// All members have reported, and the data of those that served last is lost.
    NoData(Vec<ChainTarget>),
}

impl fmt::Display for Unproven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |places: &[ChainTarget]| {
            let names = places.iter().map(|place| format!("{} on {}", place.target, place.node));
            names.collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Conflict(version) => {
                write!(f, "two targets have recorded different members of version {version}")
            }
            Self::NoRecord(places) => write!(f, "no membership record of {}", list(places)),
            Self::NoData(places) => write!(f, "the last serving stores are lost: {}", list(places)),
        }
    }
}

/// The newest version of a held chain that is known.
///
/// # Errors
/// [`Unproven::Conflict`].
pub fn newest<'a>(
    dumped: &'a Chain,
    records: impl IntoIterator<Item = &'a MembershipRecord>,
) -> Result<&'a Chain, Unproven> {
    let mut newest = dumped;
    let mut conflict = None;
    for chain in records.into_iter().map(|record| &record.chain) {
        if chain.version > newest.version {
            (newest, conflict) = (chain, None);
        } else if chain.version == newest.version && chain.targets != newest.targets {
            conflict = Some(Unproven::Conflict(chain.version));
        }
    }
    conflict.map_or(Ok(newest), Err)
}

/// The chain that continues a held one, and the stores of the targets that may lead it. `newest`:
/// see [`newest`]; `known_stores`: the stores with which targets have served according to mgmtd;
/// `empty_stores`: open stores without chunks.
///
/// # Errors
/// [`Unproven`].
pub fn confirm(
    newest: &Chain,
    held: ChainVersion,
    records: &BTreeMap<TargetId, &MembershipRecord>,
    known_stores: &BTreeMap<TargetId, StoreId>,
    empty_stores: &BTreeMap<TargetId, StoreId>,
) -> Result<(Chain, Vec<(TargetId, StoreId)>), Unproven> {
    let is_new = newest.version == ChainVersion(1);
    let unknown = |place: &&ChainTarget| {
        let waits = matches!(place.state, PublicState::Waiting | PublicState::Offline);
        let needless = (waits || is_new) && empty_stores.contains_key(&place.target);
        !records.contains_key(&place.target) && !needless
    };
    let missing: Vec<ChainTarget> = newest.targets.iter().filter(unknown).copied().collect();
    if !missing.is_empty() {
        return Err(Unproven::NoRecord(missing));
    }
    let last: Vec<ChainTarget> = served_last(newest).copied().collect();
    let has_data = |place: &ChainTarget| {
        let Some(record) = records.get(&place.target) else {
            return empty_stores.get(&place.target).map(|store| (place.target, *store));
        };
        let known = known_stores.get(&place.target) == Some(&record.store);
        (record.complete || known).then_some((place.target, record.store))
    };
    let leaders: BTreeMap<TargetId, StoreId> = last.iter().filter_map(has_data).collect();
    if leaders.is_empty() {
        return Err(Unproven::NoData(last));
    }
    let mut targets = newest.targets.clone();
    for place in &mut targets {
        place.state = match leaders.contains_key(&place.target) {
            true => PublicState::LastSrv,
            false => PublicState::Offline,
        };
    }
    targets.sort_by_key(|place| place.state);
    let chain = Chain { id: newest.id, version: held.next(), targets };
    Ok((chain, leaders.into_iter().collect()))
}

/// The targets with all acknowledged updates: those that serve, or served when all of them died.
pub fn served_last(chain: &Chain) -> impl Iterator<Item = &ChainTarget> {
    let state = match chain.head() {
        Some(_) => PublicState::Serving,
        None => PublicState::LastSrv,
    };
    chain.targets.iter().filter(move |place| place.state == state)
}

#[cfg(test)]
#[path = "membership_test.rs"]
mod tests;
