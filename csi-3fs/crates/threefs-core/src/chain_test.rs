use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::ids::{ChainId, ChainVersion, NodeId};
use LocalState::{Offline as Gone, Online, UpToDate};
use PublicState::{LastSrv, Offline, Serving, Syncing, Waiting};

const NOW: u32 = 7;

fn chain(states: &[PublicState]) -> Chain {
    let targets = states
        .iter()
        .zip(1..)
        .map(|(&state, number)| ChainTarget {
            target: TargetId(number),
            node: NodeId(number as u32),
            state,
        })
        .collect();
    Chain { id: ChainId(1), version: ChainVersion(NOW), targets }
}

/// `None` = no heartbeat. Reports are about the current version.
fn scan(states: &[PublicState], local: &[Option<LocalState>]) -> Vec<(u64, PublicState)> {
    advance(&chain(states), &reports(local, NOW))
        .chain
        .targets
        .iter()
        .map(|place| (place.target.0, place.state))
        .collect()
}

fn reports(local: &[Option<LocalState>], version: u32) -> BTreeMap<TargetId, LocalReport> {
    local
        .iter()
        .zip(1..)
        .filter_map(|(state, number)| {
            let report = LocalReport { state: (*state)?, chain_version: ChainVersion(version) };
            Some((TargetId(number), report))
        })
        .collect()
}

#[test]
fn a_healthy_chain_does_not_change() {
    let before = chain(&[Serving, Serving, Serving]);
    let after = advance(&before, &reports(&[Some(UpToDate); 3], NOW));
    assert!(!after.changed(&before));
    assert_eq!(after.chain, before);
    assert_eq!(after.reasons, []);
}

#[test]
fn a_dead_target_goes_to_the_end_and_the_rest_serve() {
    assert_eq!(
        scan(&[Serving, Serving, Serving], &[None, Some(UpToDate), Some(UpToDate)]),
        [(2, Serving), (3, Serving), (1, Offline)]
    );
}

#[test]
fn if_all_serving_targets_die_together_any_of_them_may_lead() {
    let dead = scan(&[Serving, Serving, Syncing], &[None, None, None]);
    assert_eq!(dead, [(1, LastSrv), (2, LastSrv), (3, Offline)]);
    // The old head does not return: the other target has every acknowledged update.
    assert_eq!(
        scan(&[LastSrv, LastSrv, Offline], &[None, Some(Online), Some(Online)]),
        [(2, Serving), (3, Syncing), (1, Offline)]
    );
    // Both are back: one leads, the other is synced from it.
    assert_eq!(
        scan(&[LastSrv, LastSrv, Offline], &[Some(Online), Some(Online), None]),
        [(1, Serving), (2, Offline), (3, Offline)]
    );
    // A target that returns too late does not lead, and the chain does not wait for it.
    assert_eq!(
        scan(&[Serving, Serving, Serving], &[None, Some(UpToDate), None]),
        [(2, Serving), (1, Offline), (3, Offline)]
    );
}

#[test]
fn a_target_with_possibly_stale_data_leads_only_if_it_was_the_head() {
    assert_eq!(scan(&[Serving, Serving], &[None, Some(Online)]), [(1, LastSrv), (2, Offline)]);
    assert_eq!(scan(&[Serving, Serving], &[Some(Online), None]), [(1, LastSrv), (2, LastSrv)]);
    assert_eq!(
        scan(&[Serving, Serving], &[Some(Online), Some(Online)]),
        [(1, LastSrv), (2, Offline)]
    );
}

#[test]
fn a_promoted_target_takes_the_place_of_those_that_served_last() {
    let before = chain(&[LastSrv, LastSrv, Waiting]);
    let after = promote(&before, TargetId(3)).unwrap();
    let states: Vec<_> = after.chain.targets.iter().map(|place| place.state).collect();
    assert_eq!(states, [LastSrv, Offline, Offline]);
    assert_eq!(after.chain.targets[0].target, TargetId(3));
    assert_eq!(after.chain.version, ChainVersion(NOW + 1));
    assert_eq!(after.reasons.len(), 3);
    assert_eq!(promote(&before, TargetId(1)), Err(NotPromotable::MayLead));
    assert_eq!(promote(&before, TargetId(9)), Err(NotPromotable::Absent));
    let served = chain(&[Serving, Offline]);
    assert_eq!(promote(&served, TargetId(2)), Err(NotPromotable::Served));
}

#[test]
fn only_the_last_serving_target_revives_a_dead_chain() {
    assert_eq!(
        scan(&[LastSrv, Offline, Offline], &[None, Some(Online), None]),
        [(1, LastSrv), (2, Waiting), (3, Offline)]
    );
    assert_eq!(
        scan(&[LastSrv, Waiting, Waiting], &[Some(Online), Some(Online), Some(Online)]),
        [(1, Serving), (2, Syncing), (3, Waiting)]
    );
}

#[test]
fn a_new_chain_starts_by_the_same_rules() {
    let places: Vec<_> = (1..=3).map(|n| (TargetId(n), NodeId(n as u32))).collect();
    let mut chain = Chain::create(ChainId(1), &places);
    for _ in 0..6 {
        let reported: BTreeMap<_, _> = chain
            .targets
            .iter()
            .map(|place| {
                let state = if place.state == Offline { Online } else { UpToDate };
                (place.target, LocalReport { state, chain_version: chain.version })
            })
            .collect();
        chain = advance(&chain, &reported).chain;
    }
    assert!(chain.is_whole(), "{chain:?}");
}

#[test]
fn one_target_syncs_at_a_time() {
    assert_eq!(
        scan(&[Serving, Waiting, Offline], &[Some(UpToDate), Some(Online), Some(Online)]),
        [(1, Serving), (2, Syncing), (3, Waiting)]
    );
    assert_eq!(
        scan(&[Serving, Syncing, Waiting], &[Some(UpToDate), Some(UpToDate), Some(Online)]),
        [(1, Serving), (2, Serving), (3, Syncing)]
    );
}

#[test]
fn a_synced_target_takes_over_when_its_predecessor_dies() {
    assert_eq!(scan(&[Serving, Syncing], &[None, Some(UpToDate)]), [(2, Serving), (1, Offline)]);
}

#[test]
fn an_unfinished_sync_waits_when_its_predecessor_dies() {
    assert_eq!(scan(&[Serving, Syncing], &[None, Some(Online)]), [(1, LastSrv), (2, Waiting)]);
}

#[test]
fn a_stale_up_to_date_report_does_not_end_a_newer_sync() {
    let before = chain(&[Serving, Syncing]);
    let mut reported = reports(&[Some(UpToDate), Some(UpToDate)], NOW);
    if let Some(report) = reported.get_mut(&TargetId(2)) {
        report.chain_version = ChainVersion(NOW - 1);
    }
    assert_eq!(advance(&before, &reported).chain, before);
}

#[test]
fn a_serving_target_that_reports_possibly_stale_data_is_synced_again() {
    let before = chain(&[Serving, Serving]);
    let transition = advance(&before, &reports(&[Some(UpToDate), Some(Online)], NOW));
    assert_eq!(transition.chain.state_of(TargetId(2)), Some(Offline));
    assert_eq!(transition.reasons[0].cause, Cause::NotSure);
    // In a report about an older version, it only means that the target has not received the newer
    // one.
    let early = advance(&before, &reports(&[Some(UpToDate), Some(Online)], NOW - 1));
    assert_eq!(early.chain, before);
}

#[test]
fn a_target_that_its_service_reports_offline_is_dead() {
    assert_eq!(
        scan(&[Serving, Serving], &[Some(Gone), Some(UpToDate)]),
        [(2, Serving), (1, Offline)]
    );
}

#[test]
fn reasons_are_sentences() {
    let transition = advance(&chain(&[Serving, Serving]), &reports(&[None, Some(UpToDate)], NOW));
    assert_eq!(
        transition.reasons[0].to_string(),
        "target-1 SERVING -> OFFLINE: no heartbeat in time, or reported unusable by its service"
    );
}

fn any_public() -> impl Strategy<Value = PublicState> {
    prop_oneof![Just(Serving), Just(LastSrv), Just(Syncing), Just(Waiting), Just(Offline)]
}

fn any_local() -> impl Strategy<Value = Option<LocalState>> {
    prop_oneof![Just(None), Just(Some(UpToDate)), Just(Some(Online)), Just(Some(Gone))]
}

proptest! {
    #[test]
    fn invariants_hold_after_any_scan(
        places in prop::collection::vec((any_public(), any_local(), NOW - 1..=NOW), 1..6),
    ) {
        let mut states: Vec<_> = places.iter().map(|(state, ..)| *state).collect();
        states.sort();
        // Legal chains only: LASTSRV targets exist only while no target serves.
        for place in 1..states.len() {
            if states[place] == LastSrv && matches!(states[place - 1], Serving | Offline) {
                states[place] = Offline;
            }
        }
        states.sort();
        let before = chain(&states);
        let reported: BTreeMap<_, _> = places
            .iter()
            .zip(1..)
            .filter_map(|((_, local, version), number)| {
                let state = (*local)?;
                let report = LocalReport { state, chain_version: ChainVersion(*version) };
                Some((TargetId(number), report))
            })
            .collect();
        let transition = advance(&before, &reported);
        let after = &transition.chain;
        // Same targets, canonical order, version moves exactly on change.
        let mut ids: Vec<_> = after.targets.iter().map(|place| place.target).collect();
        ids.sort();
        prop_assert_eq!(ids, (1..=places.len() as u64).map(TargetId).collect::<Vec<_>>());
        prop_assert!(after.targets.is_sorted_by_key(|place| place.state));
        prop_assert_eq!(after.targets != before.targets, transition.changed(&before));
        // A serving target served before, was one of the last, or has just been synced.
        for place in after.serving() {
            let was = before.state_of(place.target).unwrap();
            prop_assert!(matches!(was, Serving | LastSrv | Syncing));
        }
        // LASTSRV exists only while no target serves, and a chain that served can always recover.
        let serves = after.head().is_some();
        let last = after.targets.iter().filter(|place| place.state == LastSrv).count();
        prop_assert!(!serves || last == 0);
        // At most one target starts to serve without a sync: the others are compared with it.
        let leaders = after.serving().filter(|it| before.state_of(it.target) == Some(LastSrv)).count();
        prop_assert!(leaders <= 1);
        if before.head().is_some() {
            prop_assert!(serves || last >= 1);
        }
        // Every change has a reason.
        let changed = after
            .targets
            .iter()
            .filter(|place| before.state_of(place.target) != Some(place.state))
            .count();
        prop_assert_eq!(transition.reasons.len(), changed);
    }
}
