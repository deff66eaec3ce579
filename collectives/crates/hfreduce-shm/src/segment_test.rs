use super::*;
use hfreduce_core::{Determinism, Fingerprint, Kind};

const SHAPE: Shape = Shape { locals: 2, slots: 4, ring_slots: 8, slot_bytes: 4096 };

fn shm() -> ShmSegment {
    ShmSegment::create(Segment::create("board", SHAPE.bytes()).unwrap(), SHAPE).unwrap()
}

fn fingerprint() -> Fingerprint {
    Fingerprint {
        kind: Kind::Reduce,
        dtype: 1,
        element_bytes: 2,
        op: 3,
        root: 4,
        count: 5,
        shape: 6,
        modes: Determinism::DEFAULT,
    }
}

#[test]
fn a_slot_is_free_when_every_rank_has_released_it() {
    let shm = shm();
    shm.stage(0, 6);
    assert_eq!((shm.staged(0), shm.staged_by_all(), shm.released_by_all()), (6, 0, 0));
    shm.publish(1, 2);
    assert_eq!((shm.published(1), shm.published(0)), (2, 0));
    shm.release(0, 5);
    assert_eq!(shm.released_by_all(), 0);
    shm.release(1, 2);
    assert_eq!(shm.released_by_all(), 2);
}

#[test]
fn registered_memory_is_recorded_per_operation() {
    let shm = shm();
    let memory = Registered { input: Some(0), output: None };
    shm.register(1, 3, 7, memory);
    assert_eq!(shm.registered(1, 3, 7), Some(memory));
    assert_eq!((shm.registered(1, 3, 8), shm.registered(0, 3, 7)), (None, None));
    assert_eq!(shm.registered(1, 3 + REGISTERED_MAX as u64, 9), None);
}

#[test]
fn no_access_starts_after_an_abort() {
    let shm = shm();
    assert!(shm.start_peer_access(0) && shm.is_accessing_peers(0));
    shm.abort(0, b"over");
    assert!(shm.is_accessing_peers(0) && !shm.start_peer_access(1) && !shm.is_accessing_peers(1));
    shm.end_peer_access(0);
    assert!(!shm.is_accessing_peers(0));
}

#[test]
fn fingerprints_are_kept_for_a_window() {
    let shm = shm();
    let fingerprint = fingerprint();
    shm.enter(1, 70, &fingerprint);
    assert_eq!(
        (
            shm.fingerprint(1, 70),
            shm.fingerprint(1, 70 + FINGERPRINTS_KEPT as u64),
            shm.fingerprint(0, 70)
        ),
        (Some(fingerprint), None, None)
    );
    assert_eq!((shm.entered(1), shm.entered(0)), (71, 0));
}

#[test]
fn an_arrival_counter_is_reset_for_the_next_chunk() {
    let shm = shm();
    let later = 3 + SHAPE.slots as u64;
    assert!(!shm.lacks_last_arrival(3) && !shm.arrive(3, 1) && shm.lacks_last_arrival(3));
    assert_eq!((shm.reducer(3), shm.reduced_by(3)), (None, None));
    assert!(shm.arrive(3, 0));
    assert_eq!((shm.reducer(3), shm.reduced_by(3)), (Some(0), None));
    shm.complete_reduction(3, 0);
    assert_eq!((shm.reduced_by(3), shm.reduced_by(later)), (Some(0), None));
    assert!(!shm.arrive(later, 0) && shm.arrive(later, 1));
    assert_eq!(shm.reducer(later), Some(1));
}

#[test]
fn the_first_abort_reason_is_kept() {
    let shm = shm();
    assert!(shm.aborted().is_none() && !shm.is_aborted());
    assert!(shm.abort(1, b"first") && !shm.abort(0, b"second"));
    assert_eq!(shm.aborted().unwrap(), Aborted::Reason(b"first".to_vec()));
}

#[test]
fn a_rank_that_died_while_recording_an_abort_is_reported() {
    let shm = shm();
    assert!(shm.header().abort.claim(1) && shm.is_aborted());
    assert!(!shm.abort(0, b"second"));
    assert_eq!(shm.aborted(), Some(Aborted::Unfinished(1)));
}

#[test]
fn a_fingerprint_is_kept_until_the_window_has_passed_it() {
    let (shm, own) = (shm(), fingerprint());
    assert_eq!(shm.compare(1, 0, own), Compared::Absent(None));
    shm.enter(1, 0, &own);
    assert_eq!(shm.compare(1, 0, own), Compared::Equal);
    let other = Fingerprint { count: own.count + 1, ..own };
    assert_eq!(shm.compare(1, 0, other), Compared::Differs(own));
    // The maximum distance while the other rank has not ended operation 0.
    for sequence in 1..hfreduce_core::OUTSTANDING_MAX as u64 {
        shm.enter(1, sequence, &other);
    }
    assert_eq!(shm.compare(1, 0, own), Compared::Equal);
    let next = hfreduce_core::OUTSTANDING_MAX as u64;
    assert_eq!(shm.compare(1, next, own), Compared::Absent(Some((next - 1, other))));
}

#[test]
fn the_slowest_rank_determines_what_all_have_completed() {
    let shm = shm();
    shm.end(1, 9);
    assert_eq!(shm.ended_by_all(), 0);
    shm.end(0, 7);
    assert_eq!((shm.ended(0), shm.ended(1), shm.ended_by_all()), (7, 9, 7));
}

#[test]
fn a_rank_that_waits_for_another_event_is_not_woken() {
    let shm = shm();
    assert!(!shm.claim_wakeup(1, WAIT_RESULT));
    shm.fall_asleep(1, WAIT_RESULT);
    assert!(!shm.claim_wakeup(1, WAIT_INPUT));
    assert!(shm.claim_wakeup(1, WAIT_RESULT) && !shm.claim_wakeup(1, WAIT_RESULT));
    shm.fall_asleep(1, 0);
    assert!(shm.claim_wakeup(1, WAIT_ABORT));
}

#[test]
fn slots_do_not_overlap() {
    let shm = shm();
    let mut places: Vec<usize> = (0..SHAPE.slots as u64)
        .flat_map(|g| [shm.input(0, g), shm.input(1, g), shm.result(g)])
        .chain((0..SHAPE.ring_slots as u64).map(|g| shm.ring_slot(g)))
        .chain(
            (0..2)
                .flat_map(|local| (0..MESSAGE_SLOTS).map(move |at| (local, at)))
                .map(|(local, at)| shm.message(local, at).unwrap()),
        )
        .map(|place| place.addr())
        .collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] == SHAPE.slot_bytes));
    assert!(places.last().unwrap() + SHAPE.slot_bytes <= shm.segment.base().addr() + SHAPE.bytes());
    assert!(shm.message(0, MESSAGE_SLOTS).is_none() && shm.message(2, 0).is_none());
}
