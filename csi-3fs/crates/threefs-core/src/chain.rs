//! Chain state machine of mgmtd: one scan of a chain as a pure function.
//!
//! The rules, in this order (at most one applies to each target):
//! 1. SERVING stays while the target is alive. If every SERVING target is dead in one scan, all of
//!    them become LASTSRV: each has every update that was acknowledged under this version of the
//!    chain, and their leases have ended, so any of them may lead.
//! 2. The first live LASTSRV returns to SERVING if no target serves; the others become OFFLINE and
//!    are synced from it, because unacknowledged updates may differ.
//! 3. SYNCING becomes SERVING when up to date, and WAITING if no target is left to sync it.
//! 4. WAITING and OFFLINE targets start to sync, one target of a chain at a time, if they are alive
//!    and some target serves.
//! 5. If some target serves at the end, every LASTSRV becomes OFFLINE.
//!
//! Two additions to the system of the paper, because a heartbeat may be older than the chain that
//! it is compared with:
//! - "up to date" ends a sync only if it was reported about this version of the chain;
//! - a SERVING target that reports ONLINE about the current version has restarted or distrusts its
//!   data: it counts as dead at once, without a timeout, and is synced like any other.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::heartbeat::{LocalReport, LocalState};
use crate::ids::TargetId;
use crate::routing::{Chain, ChainTarget, PublicState};

/// Why a target changed its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// No heartbeat in time, or the service reports the target as unusable.
    Dead,
    /// It restarted or disagrees with its predecessor: its data must be compared.
    NotSure,
    /// Dead, and no other target serves: the chain waits for this target, or one that died with it.
    LastToServe,
    /// One of the last serving targets is back.
    LastIsBack,
    /// An operator has promoted it to head.
    Promoted,
    /// Another target serves again, so LASTSRV no longer applies.
    OtherServes,
    /// The sync is complete.
    Synced,
    /// It is synced next.
    SyncBegins,
    /// Alive, but no target can sync it now.
    MustWait,
}

/// State change of one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// The target.
    pub target: TargetId,
    /// Old state.
    pub before: PublicState,
    /// New state.
    pub after: PublicState,
    /// The cause.
    pub cause: Cause,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.cause {
            Cause::Dead => "no heartbeat in time, or reported unusable by its service",
            Cause::NotSure => "restarted or disagrees with its predecessor",
            Cause::LastToServe => "all serving targets died",
            Cause::LastIsBack => "one of the last serving targets is back",
            Cause::Promoted => "promoted by an operator",
            Cause::OtherServes => "another target serves",
            Cause::Synced => "synced",
            Cause::SyncBegins => "sync started",
            Cause::MustWait => "waiting for its sync",
        };
        write!(f, "{} {} -> {}: {why}", self.target, self.before, self.after)
    }
}

/// Result of a scan of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The chain to persist and publish; version + 1 if anything changed.
    pub chain: Chain,
    /// One entry per changed target, in chain order.
    pub reasons: Vec<Reason>,
}

impl Transition {
    /// Whether there is anything to persist.
    #[must_use]
    pub fn changed(&self, before: &Chain) -> bool {
        self.chain.version != before.version
    }
}

/// Scans one chain. `reports` holds the newest report of every target whose node is alive; a target
/// without one is dead.
#[must_use]
pub fn advance(chain: &Chain, reports: &BTreeMap<TargetId, LocalReport>) -> Transition {
    let local: Vec<Health> =
        chain.targets.iter().map(|place| health(chain, place, reports)).collect();
    let before: Vec<PublicState> = chain.targets.iter().map(|place| place.state).collect();
    let mut after = before.clone();
    let mut causes: Vec<Option<Cause>> = vec![None; before.len()];

    serving_targets(&before, &local, &mut after, &mut causes);
    let any_serves = |after: &[PublicState]| after.contains(&PublicState::Serving);
    // At most one: it serves afterwards.
    for place in 0..before.len() {
        if before[place] == PublicState::LastSrv
            && local[place] != Health::Dead
            && !any_serves(&after)
        {
            (after[place], causes[place]) = (PublicState::Serving, Some(Cause::LastIsBack));
        }
    }
    syncing_targets(&before, &local, &mut after, &mut causes);
    waiting_targets(&before, &local, &mut after, &mut causes);
    if any_serves(&after) {
        for place in 0..after.len() {
            if after[place] == PublicState::LastSrv {
                after[place] = PublicState::Offline;
                if before[place] == PublicState::LastSrv {
                    causes[place] = Some(Cause::OtherServes);
                } else if causes[place] == Some(Cause::LastToServe) {
                    causes[place] = Some(dead_cause(local[place]));
                }
            }
        }
    }
    transition(chain, &after, &causes)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    UpToDate,
    Alive,
    NotSure,
    Dead,
}

fn health(chain: &Chain, place: &ChainTarget, reports: &BTreeMap<TargetId, LocalReport>) -> Health {
    let Some(report) = reports.get(&place.target) else { return Health::Dead };
    let about_this_version = report.chain_version == chain.version;
    match (report.state, place.state) {
        (LocalState::Offline, _) => Health::Dead,
        (LocalState::Online, PublicState::Serving) if about_this_version => Health::NotSure,
        (LocalState::UpToDate, PublicState::Syncing) if about_this_version => Health::UpToDate,
        _ => Health::Alive,
    }
}

fn dead_cause(health: Health) -> Cause {
    if health == Health::NotSure { Cause::NotSure } else { Cause::Dead }
}

fn serving_targets(
    before: &[PublicState],
    local: &[Health],
    after: &mut [PublicState],
    causes: &mut [Option<Cause>],
) {
    let mut first_dead = true;
    for place in 0..before.len() {
        let dead = matches!(local[place], Health::Dead | Health::NotSure);
        if before[place] != PublicState::Serving || !dead {
            continue;
        }
        // A target that distrusts its data may lack updates of its predecessor, so it leads only if
        // it has none.
        if first_dead || local[place] == Health::Dead {
            (after[place], causes[place]) = (PublicState::LastSrv, Some(Cause::LastToServe));
        } else {
            (after[place], causes[place]) = (PublicState::Offline, Some(dead_cause(local[place])));
        }
        first_dead = false;
    }
}

fn syncing_targets(
    before: &[PublicState],
    local: &[Health],
    after: &mut [PublicState],
    causes: &mut [Option<Cause>],
) {
    for place in 0..before.len() {
        if before[place] != PublicState::Syncing {
            continue;
        }
        let served = after.contains(&PublicState::Serving);
        let (state, cause) = match local[place] {
            Health::UpToDate => (PublicState::Serving, Some(Cause::Synced)),
            Health::Alive | Health::NotSure if served => (PublicState::Syncing, None),
            Health::Alive | Health::NotSure => (PublicState::Waiting, Some(Cause::MustWait)),
            Health::Dead => (PublicState::Offline, Some(Cause::Dead)),
        };
        (after[place], causes[place]) = (state, cause);
    }
}

fn waiting_targets(
    before: &[PublicState],
    local: &[Health],
    after: &mut [PublicState],
    causes: &mut [Option<Cause>],
) {
    for place in 0..before.len() {
        if !matches!(before[place], PublicState::Waiting | PublicState::Offline) {
            continue;
        }
        let served = after.contains(&PublicState::Serving);
        let syncing = after.contains(&PublicState::Syncing);
        let (state, cause) = match local[place] {
            Health::Dead => (PublicState::Offline, Cause::Dead),
            _ if served && !syncing => (PublicState::Syncing, Cause::SyncBegins),
            _ => (PublicState::Waiting, Cause::MustWait),
        };
        if state != before[place] {
            (after[place], causes[place]) = (state, Some(cause));
        }
    }
}

/// Why a target cannot be promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPromotable {
    /// The target is not in this chain.
    Absent,
    /// Another target serves: a promotion is not needed.
    Served,
    /// The target may already lead: it becomes the head once it is alive.
    MayLead,
}

/// The chain with `target` as its head. The last serving targets can no longer lead: if one of them
/// returns, it is synced from `target`, and updates that only it had are lost.
///
/// # Errors
/// [`NotPromotable`].
pub fn promote(chain: &Chain, target: TargetId) -> Result<Transition, NotPromotable> {
    match chain.state_of(target) {
        None => return Err(NotPromotable::Absent),
        Some(PublicState::LastSrv) => return Err(NotPromotable::MayLead),
        Some(_) if chain.head().is_some() => return Err(NotPromotable::Served),
        Some(_) => {}
    }
    let mut after: Vec<PublicState> = chain.targets.iter().map(|place| place.state).collect();
    let mut causes = vec![None; after.len()];
    for (place, (state, cause)) in chain.targets.iter().zip(after.iter_mut().zip(&mut causes)) {
        if place.target == target {
            (*state, *cause) = (PublicState::LastSrv, Some(Cause::Promoted));
        } else if *state == PublicState::LastSrv {
            (*state, *cause) = (PublicState::Offline, Some(Cause::Promoted));
        }
    }
    Ok(transition(chain, &after, &causes))
}

fn transition(chain: &Chain, after: &[PublicState], causes: &[Option<Cause>]) -> Transition {
    let mut reasons = Vec::new();
    let mut targets: Vec<ChainTarget> = Vec::with_capacity(after.len());
    for ((place, &state), cause) in chain.targets.iter().zip(after).zip(causes) {
        targets.push(ChainTarget { state, ..*place });
        if place.state != state
            && let Some(cause) = *cause
        {
            reasons.push(Reason { target: place.target, before: place.state, after: state, cause });
        }
    }
    targets.sort_by_key(|place| place.state);
    let changed = targets != chain.targets;
    let version = if changed { chain.version.next() } else { chain.version };
    Transition { chain: Chain { id: chain.id, version, targets }, reasons }
}

#[cfg(test)]
#[path = "chain_test.rs"]
mod tests;
