//! Tests of the schedule, the pace and the comparison of scrubs.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::checksum::Checksum;
use crate::ids::{ChunkVersion, InodeId};

const INTERVAL: u64 = 1_000;
const STORE: StoreId = StoreId((1 << 100) + 2_048);

fn chunk(index: u32) -> ChunkId {
    ChunkId::new(InodeId(7), index)
}

/// As if the process had restarted.
fn restarted(progress: &Progress, store: StoreId, now: u64) -> Progress {
    let text = serde_json::to_string(&progress.record()).unwrap();
    Progress::restore(serde_json::from_str(&text).ok(), store, now, INTERVAL)
}

#[test]
fn passes_start_at_intervals_and_continue_after_a_restart() {
    let mut progress = Progress::new(STORE, 10_000, INTERVAL);
    assert_eq!(progress.step(10_000, INTERVAL), Step::Wait(500), "spread by store");
    assert_eq!(progress.step(10_500, INTERVAL), Step::Verify(None));
    progress.verified(chunk(3), 70);
    progress.advance(chunk(3));
    let mut progress = restarted(&progress, STORE, 10_600);
    assert_eq!(progress.step(10_600, INTERVAL), Step::Verify(Some(chunk(3))));
    progress.finish(10_700, INTERVAL);
    let last = progress.status(0, INTERVAL).last.unwrap();
    assert_eq!((last.started_unix_s, last.finished_unix_s), (10_500, 10_700));
    assert_eq!((last.chunks, last.bytes), (1, 70));
    let mut progress = restarted(&progress, STORE, 10_800);
    assert_eq!(progress.step(10_800, INTERVAL), Step::Wait(700), "from start to start");
    assert_eq!(restarted(&progress, StoreId(1), 5), Progress::new(StoreId(1), 5, INTERVAL));
}

#[test]
fn a_late_pass_is_followed_by_the_next_and_a_clock_set_back_delays_at_most_one_interval() {
    let mut progress = Progress::new(StoreId(0), 10_000, INTERVAL);
    assert_eq!(progress.step(10_000, INTERVAL), Step::Verify(None));
    progress.finish(19_000, INTERVAL);
    assert_eq!(progress.step(19_000, INTERVAL), Step::Verify(None));
    progress.finish(19_001, INTERVAL);
    assert_eq!(progress.step(50, INTERVAL), Step::Wait(INTERVAL));
    assert_eq!(progress.step(50, 10), Step::Wait(10), "a shorter interval");
}

#[test]
fn without_an_interval_only_requested_passes_run() {
    let mut progress = Progress::new(STORE, 10_000, 0);
    assert_eq!(progress.step(99_000, 0), Step::Wait(u64::MAX));
    assert_eq!(progress.status(0, 0).due_unix_s, None);
    progress.start(99_000);
    assert_eq!(progress.step(99_001, 0), Step::Verify(None));
    progress.advance(chunk(1));
    progress.start(99_002);
    assert_eq!(progress.step(99_003, 0), Step::Verify(Some(chunk(1))), "the running pass");
}

#[test]
fn damaged_chunks_are_reported_until_they_are_repaired_or_intact() {
    let mut progress = Progress::new(STORE, 0, INTERVAL);
    progress.start(0);
    for index in 1..=3 {
        assert!(progress.damage_detected(chunk(index)));
        assert!(progress.damage_detected(chunk(index)), "once more, by a client's read");
    }
    progress.repaired(chunk(1));
    progress.not_repaired(chunk(2));
    progress.not_repaired(chunk(3));
    assert_eq!(progress.repair_of(chunk(1)), None);
    let mut progress = restarted(&progress, STORE, 1);
    assert_eq!(progress.repair_of(chunk(2)), Some(Repair::Failed));
    progress.verified(chunk(2), 10);
    let status = progress.status(0, INTERVAL);
    assert_eq!((status.damaged, status.damaged_chunks), (1, vec![chunk(3)]));
    let pass = status.running.unwrap();
    assert_eq!((pass.damaged, pass.repaired), (3, 1));
    progress.finish(2, INTERVAL);
    progress.damage_detected(chunk(9));
    let status = progress.status(0, INTERVAL);
    assert_eq!((status.last.unwrap().damaged, status.total.damaged), (3, 4), "by a client's read");
}

#[test]
fn chunks_that_differ_are_reported_until_they_are_equal() {
    let mut progress = Progress::new(STORE, 0, INTERVAL);
    progress.start(0);
    for index in 1..=3 {
        progress.differs(chunk(index), DifferenceKind::Newer);
    }
    progress.differs(chunk(4), DifferenceKind::Older);
    progress.compared(Some(chunk(1)), chunk(3), &[chunk(3)]);
    let status = restarted(&progress, STORE, 1).status(0, INTERVAL);
    assert_eq!((status.different, status.different_chunks), (2, vec![chunk(1), chunk(3)]));
    assert_eq!(status.running.unwrap().different, 4);
}

#[test]
fn the_number_of_recorded_chunks_is_limited() {
    let mut progress = Progress::new(STORE, 0, INTERVAL);
    for index in 0..DAMAGED_MAX as u32 {
        assert!(progress.damage_detected(chunk(index)));
    }
    assert!(!progress.damage_detected(chunk(u32::MAX)));
    assert!(progress.damage_detected(chunk(5)));
    assert_eq!(progress.status(0, INTERVAL).damaged_chunks.len(), DAMAGED_LISTED_MAX);
}

#[test]
fn the_pace_respects_the_rate_the_disk_and_the_clients() {
    let pace = Pace { bytes_per_second: 1 << 20 };
    let (mib, ms) = (1 << 20, Duration::from_millis);
    assert_eq!(pace.pause(mib, ms(100), false), ms(900));
    assert_eq!(pace.pause(mib, ms(100), true), ms(3_900));
    assert_eq!(pace.pause(mib, ms(800), false), ms(800), "half of the time");
    assert_eq!(pace.pause(0, ms(0), false), Duration::from_secs_f64(0.0625), "a seek");
    let stopped = Pace { bytes_per_second: 0 }.pause(mib, ms(0), false);
    assert_eq!(stopped, Duration::from_secs(mib));
}

/// One replica's states of a few chunks.
#[derive(Clone, Default)]
struct Side(BTreeMap<u32, ChunkSummary>);

impl Side {
    fn state(&mut self, index: u32) -> &mut ChunkSummary {
        self.0.entry(index).or_insert(ChunkSummary {
            chunk: chunk(index),
            version: ChunkVersion(0),
            length: 0,
            checksum: Checksum(0),
            exists: false,
            pending: false,
        })
    }

    fn apply(&mut self, index: u32) {
        self.state(index).pending = true;
    }

    fn commit(&mut self, index: u32, version: u64, exists: bool) {
        let state = self.state(index);
        (state.pending, state.exists, state.version) = (false, exists, ChunkVersion(version));
        (state.length, state.checksum) = (version as u32, Checksum(version as u32));
    }

    fn read(&self) -> Vec<ChunkSummary> {
        self.0.values().copied().collect()
    }
}

/// The steps of an update at the predecessor and the replica.
fn step(predecessor: &mut Side, own: &mut Side, index: u32, step: u8, version: u64, exists: bool) {
    match step {
        0 => predecessor.apply(index),
        1 => own.apply(index),
        2 => own.commit(index, version, exists),
        _ => predecessor.commit(index, version, exists),
    }
}

#[test]
fn an_update_that_only_the_replica_has_committed_is_not_a_difference() {
    let (mut predecessor, mut own) = (Side::default(), Side::default());
    for number in 0..3 {
        step(&mut predecessor, &mut own, 0, number, 2, true);
        let states = own.read();
        assert_eq!(compare(&states, &predecessor.read(), &states), vec![], "step {number}");
    }
}

proptest! {
    /// No schedule of updates, removals and purges makes equal replicas look different.
    #[test]
    fn updates_in_progress_are_not_differences(
        updates in prop::collection::vec((0_u32..3, any::<bool>()), 1..12),
        reads in prop::collection::vec(0_usize..60, 3),
    ) {
        let (mut predecessor, mut own) = (Side::default(), Side::default());
        // Removed long ago; a purge is later than any read of the same comparison.
        for index in 0..3 {
            predecessor.commit(index, 1, false);
            own.commit(index, 1, false);
        }
        let mut history = vec![(predecessor.clone(), own.clone())];
        for index in 1..3 {
            own.0.remove(&index);
            history.push((predecessor.clone(), own.clone()));
            predecessor.0.remove(&index);
            history.push((predecessor.clone(), own.clone()));
        }
        for (version, (index, exists)) in (2..).zip(updates) {
            for number in 0..4 {
                step(&mut predecessor, &mut own, index, number, version, exists);
                history.push((predecessor.clone(), own.clone()));
            }
        }
        let mut reads: Vec<usize> = reads.into_iter().map(|at| at.min(history.len() - 1)).collect();
        reads.sort_unstable();
        let (before, theirs, after) = (&history[reads[0]], &history[reads[1]], &history[reads[2]]);
        prop_assert_eq!(compare(&before.1.read(), &theirs.0.read(), &after.1.read()), vec![]);
    }

    /// A replica that lost an update, or holds other content, is reported with the right kind.
    #[test]
    fn real_differences_are_detected(version in 2_u64..100, index in 0_u32..3, change in 0_u8..4) {
        let mut predecessor = Side::default();
        for other in 0..3 {
            predecessor.commit(other, version, true);
        }
        let mut own = predecessor.clone();
        let expected = match change {
            0 => {
                own.0.remove(&index);
                DifferenceKind::Older
            }
            1 => {
                own.commit(index, version - 1, true);
                DifferenceKind::Older
            }
            2 => {
                own.state(index).checksum = Checksum(0);
                DifferenceKind::Content
            }
            _ => {
                predecessor.commit(index, version - 1, true);
                DifferenceKind::Newer
            }
        };
        let differences = compare(&own.read(), &predecessor.read(), &own.read());
        prop_assert_eq!(differences.len(), 1);
        prop_assert_eq!((differences[0].chunk, differences[0].kind), (chunk(index), expected));
    }
}
