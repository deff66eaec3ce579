use proptest::prelude::*;

use super::*;
use crate::chain::advance;
use crate::heartbeat::{LocalReport, LocalState};
use crate::ids::{ChainId, NodeId};
use PublicState::{LastSrv, Offline, Serving, Syncing, Waiting};

fn chain(version: u32, states: &[PublicState]) -> Chain {
    let places = states.iter().zip(1..).map(|(&state, number)| ChainTarget {
        target: TargetId(number),
        node: NodeId(number as u32),
        state,
    });
    let mut targets: Vec<ChainTarget> = places.collect();
    targets.sort_by_key(|place| place.state);
    Chain { id: ChainId(1), version: ChainVersion(version), targets }
}

fn store(target: u64) -> StoreId {
    StoreId(u128::from(target) * 100)
}

fn record(target: u64, chain: Chain) -> MembershipRecord {
    MembershipRecord { target: TargetId(target), store: store(target), complete: true, chain }
}

fn confirmed(
    dumped: &Chain,
    records: &[MembershipRecord],
) -> Result<Vec<(u64, PublicState)>, Unproven> {
    let newest = newest(dumped, records)?;
    let held = hold(newest, dumped.version, 1);
    let records = records.iter().map(|record| (record.target, record)).collect();
    let (chain, _) = confirm(newest, held.version, &records, &BTreeMap::new(), &BTreeMap::new())?;
    assert_eq!(chain.version, held.version.next());
    Ok(chain.targets.iter().map(|place| (place.target.0, place.state)).collect())
}

const ALL: [PublicState; 3] = [Serving; 3];

#[test]
fn a_store_is_complete_once_it_serves_with_all_data() {
    let next = |before: Option<&MembershipRecord>, version, state, up_to_date| {
        let chain = chain(version, &[state, Serving]);
        MembershipRecord::next(before, TargetId(1), store(1), &chain, up_to_date)
    };
    // A wiped disk that mgmtd still lists.
    let wiped = next(None, 7, Serving, false).unwrap();
    assert!(!wiped.complete);
    let synced = next(Some(&wiped), 8, Syncing, false).unwrap();
    let serves = next(Some(&synced), 9, Serving, true).unwrap();
    assert!(!synced.complete && serves.complete);
    assert!(next(Some(&serves), 10, Offline, false).unwrap().complete);
    assert_eq!(next(Some(&serves), 9, Serving, true), None, "it is recorded");
    assert_eq!(next(Some(&serves), 8, Serving, true), None, "it is older");
    assert!(serves.supersedes(&synced.chain) && !serves.supersedes(&serves.chain));
    let other = StoreId(5);
    let replaced = MembershipRecord::next(Some(&serves), TargetId(1), other, &serves.chain, false);
    assert!(!replaced.unwrap().complete, "another store knows nothing of its predecessor");
}

#[test]
fn a_held_chain_has_no_leader_and_is_not_recorded() {
    for era in [0, 1, 4_095, u32::MAX] {
        let held = hold(&chain(9, &ALL), ChainVersion(12), era);
        assert!(held.version >= ChainVersion(13) && held.version >= ChainVersion::first_of(era));
        assert!(is_held(&held));
        assert_eq!(MembershipRecord::next(None, TargetId(1), store(1), &held, true), None);
        let report = |state| LocalReport { state, chain_version: held.version };
        for state in [LocalState::UpToDate, LocalState::Online] {
            let reports = (1..=3).map(|id| (TargetId(id), report(state))).collect();
            assert!(is_held(&advance(&held, &reports).chain), "no rule lets a target lead");
        }
    }
}

/// The table is from version 3; replica 1 left in version 4, and replica 2 in version 5.
#[test]
fn only_the_newest_record_leads() {
    let (four, five) =
        (chain(4, &[Offline, Serving, Serving]), chain(5, &[Offline, Offline, Serving]));
    let dumped = chain(3, &ALL);
    let stale = record(1, dumped.clone());
    let waits = |missing: &[u64], result| match result {
        Err(Unproven::NoRecord(places)) => {
            let places: Vec<u64> =
                places.iter().map(|place: &ChainTarget| place.target.0).collect();
            assert_eq!(places, missing);
        }
        other => panic!("{other:?}"),
    };
    waits(&[2, 3], confirmed(&dumped, std::slice::from_ref(&stale)));
    let second = record(2, four);
    waits(&[3], confirmed(&dumped, &[stale.clone(), second.clone()]));
    let records = [stale, second, record(3, five)];
    assert_eq!(confirmed(&dumped, &records), Ok(vec![(3, LastSrv), (1, Offline), (2, Offline)]));
}

#[test]
fn a_table_that_is_not_old_is_confirmed_as_it_is() {
    let dumped = chain(3, &[Serving, Serving, Waiting]);
    // Replica 2 had not received version 3.
    let records = [record(1, dumped.clone()), record(2, chain(2, &ALL)), record(3, dumped.clone())];
    let expected = vec![(1, LastSrv), (2, LastSrv), (3, Offline)];
    assert_eq!(confirmed(&dumped, &records), Ok(expected));
    let died = chain(3, &[LastSrv, LastSrv, Offline]);
    let records = [1, 2, 3].map(|target| record(target, died.clone()));
    assert_eq!(confirmed(&died, &records).unwrap()[2], (3, Offline));
}

#[test]
fn a_store_without_the_data_does_not_lead() {
    let dumped = chain(3, &ALL);
    let newer = chain(5, &[Serving, Serving, Offline]);
    let emptied = MembershipRecord { complete: false, ..record(1, newer.clone()) };
    let records = [emptied.clone(), record(2, newer.clone()), record(3, dumped.clone())];
    assert_eq!(confirmed(&dumped, &records).unwrap()[0], (2, LastSrv));
    let alone = chain(6, &[LastSrv, Offline, Offline]);
    let emptied = MembershipRecord { complete: false, ..record(1, alone.clone()) };
    let records = [emptied, record(2, newer), record(3, dumped.clone())];
    assert!(matches!(confirmed(&dumped, &records), Err(Unproven::NoData(_))));
    // mgmtd knows the store.
    let newest = newest(&dumped, &records).unwrap();
    let by_target = records.iter().map(|record| (record.target, record)).collect();
    let known = BTreeMap::from([(TargetId(1), store(1))]);
    let (chain, stores) =
        confirm(newest, ChainVersion(9), &by_target, &known, &BTreeMap::new()).unwrap();
    assert_eq!(stores, [(TargetId(1), store(1))]);
    assert_eq!(chain.targets[0].state, LastSrv);
}

/// Replica 1 was moved away in version 4, and has learned it before the others.
#[test]
fn the_record_of_a_target_that_has_left_shows_the_chain_without_it() {
    let dumped = chain(3, &ALL);
    let mut without = chain(4, &ALL);
    without.targets.retain(|place| place.target != TargetId(1));
    let left = record(1, without.clone());
    let records = [left.clone(), record(2, dumped.clone()), record(3, dumped.clone())];
    assert_eq!(confirmed(&dumped, &records), Ok(vec![(2, LastSrv), (3, LastSrv)]));
    // It was a new member when it learned version 4, and is the last to learn that it syncs.
    let syncs = chain(5, &[Syncing, Serving, Serving]);
    let records = [left, record(2, syncs.clone()), record(3, syncs.clone())];
    let expected = vec![(2, LastSrv), (3, LastSrv), (1, Offline)];
    assert_eq!(confirmed(&dumped, &records), Ok(expected));
}

#[test]
fn different_records_of_one_version_are_a_conflict() {
    let dumped = chain(3, &ALL);
    let records = [
        record(1, chain(4, &[Serving, Offline, Serving])),
        record(2, chain(4, &[Offline, Serving, Serving])),
        record(3, dumped.clone()),
    ];
    assert_eq!(confirmed(&dumped, &records), Err(Unproven::Conflict(ChainVersion(4))));
    let mut resolved = records.to_vec();
    resolved[2] = record(3, chain(5, &[Offline, Offline, Serving]));
    assert!(confirmed(&dumped, &resolved).is_ok(), "a newer version decides");
}

/// A move or a chain has just started.
#[test]
fn an_empty_member_is_needed_only_if_it_may_have_had_data() {
    let confirmed = |newest: &Chain, records: &[u64], empty: &[u64]| {
        let records: Vec<_> = records.iter().map(|id| record(*id, newest.clone())).collect();
        let records = records.iter().map(|record| (record.target, record)).collect();
        let empty = empty.iter().map(|id| (TargetId(*id), store(*id))).collect();
        confirm(newest, ChainVersion(90), &records, &BTreeMap::new(), &empty)
    };
    for (state, needed) in [(Offline, false), (Waiting, false), (Syncing, true), (Serving, true)] {
        let moving = chain(5, &[Serving, Serving, state]);
        assert_eq!(confirmed(&moving, &[1, 2], &[3]).is_err(), needed, "{state}");
        assert!(confirmed(&moving, &[1, 2], &[]).is_err(), "its store may have data");
    }
    let created = chain(1, &[LastSrv, Offline, Offline]);
    let (started, stores) = confirmed(&created, &[], &[1, 2, 3]).unwrap();
    assert_eq!((started.targets, stores), (created.targets.clone(), vec![(TargetId(1), store(1))]));
    assert!(confirmed(&created, &[], &[1, 2]).is_err());
    let lost = chain(2, &[LastSrv, Offline, Offline]);
    assert!(confirmed(&lost, &[], &[1, 2, 3]).is_err(), "it has served");
}

#[derive(Debug, Clone)]
struct Step {
    alive: [bool; 3],
    learns: [bool; 3],
}

fn step() -> impl Strategy<Value = Step> {
    let flag = || prop::array::uniform3(prop::bool::weighted(0.7));
    (flag(), flag()).prop_map(|(alive, learns)| Step { alive, learns })
}

proptest! {
    /// A history of a chain by its rules. Targets learn versions at different times, and a version
    /// acknowledges updates once all its SERVING targets have learned it. The table is restored from
    /// any earlier version. Whatever targets report: the chain waits, or one that has every
    /// acknowledged update leads.
    #[test]
    fn no_target_without_an_acknowledged_update_leads(
        steps in prop::collection::vec(step(), 1..25),
        dump_at in 0_usize..25,
        reports in prop::array::uniform3(prop::bool::weighted(0.8)),
    ) {
        let ids = [1, 2, 3].map(TargetId);
        let mut current = Chain::create(ChainId(1), &ids.map(|id| (id, NodeId(id.0 as u32))));
        let mut history = vec![current.clone()];
        let mut records: BTreeMap<TargetId, MembershipRecord> = BTreeMap::new();
        let mut holders: Vec<TargetId> = Vec::new();
        for Step { alive, learns } in steps {
            for (index, id) in ids.into_iter().enumerate() {
                if learns[index] && alive[index]
                    && let Some(next) = MembershipRecord::next(
                        records.get(&id), id, store(id.0), &current, true,
                    )
                {
                    records.insert(id, next);
                }
            }
            let knows = |id: &TargetId| {
                records.get(id).is_some_and(|record| record.chain.version == current.version)
            };
            let serving: Vec<TargetId> = current.serving().map(|place| place.target).collect();
            if !serving.is_empty() && serving.iter().all(knows) {
                holders = serving;
            }
            // A sync ends only once both sides have learned the version.
            let report = |index: usize| {
                let synced = knows(&ids[index])
                    && current.predecessor(ids[index]).is_none_or(|place| knows(&place.target));
                let state = if synced { LocalState::UpToDate } else { LocalState::Online };
                let serves = current.state_of(ids[index]) == Some(Serving);
                let chain_version = match serves { true => ChainVersion(0), false => current.version };
                (ids[index], LocalReport { state, chain_version })
            };
            let reports = (0..3).filter(|index| alive[*index]).map(report).collect();
            // A synced target has what its predecessor has.
            let before = current.clone();
            current = advance(&current, &reports).chain;
            for place in current.serving() {
                let was = before.state_of(place.target);
                if was == Some(Syncing)
                    && before.predecessor(place.target).is_some_and(|it| holders.contains(&it.target))
                {
                    holders.push(place.target);
                }
            }
            history.push(current.clone());
        }
        let dumped = history[dump_at.min(history.len() - 1)].clone();
        let known: Vec<MembershipRecord> = ids
            .iter()
            .zip(reports)
            .filter_map(|(id, reports)| records.get(id).filter(|_| reports).cloned())
            .collect();
        if let Ok(states) = confirmed(&dumped, &known) {
            for (target, _) in states.into_iter().filter(|(_, state)| *state == LastSrv) {
                prop_assert!(
                    holders.is_empty() || holders.contains(&TargetId(target)),
                    "target {target} leads, {holders:?} have the updates"
                );
            }
        }
    }
}
