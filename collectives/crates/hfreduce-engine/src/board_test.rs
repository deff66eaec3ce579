use super::*;
use crate::core::{Determinism, Kind};

const SHAPE: Shape = Shape { locals: 2, slots: 4, sums: 8, slot_bytes: 4096 };

fn board() -> Board {
    Board::create(Segment::create("board", SHAPE.bytes()).unwrap(), SHAPE).unwrap()
}

fn print() -> Fingerprint {
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
fn a_slot_is_free_again_when_every_rank_released_it() {
    let board = board();
    board.stage(0, 6);
    assert_eq!((board.staged(0), board.staged_by_all(), board.released_by_all()), (6, 0, 0));
    board.publish(1, 2);
    assert_eq!((board.published(1), board.published(0)), (2, 0));
    board.release(0, 5);
    assert_eq!(board.released_by_all(), 0);
    board.release(1, 2);
    assert_eq!(board.released_by_all(), 2);
}

#[test]
fn registered_memory_is_known_by_operation() {
    let board = board();
    let memory = Registered { input: Some(0), output: None };
    board.register(1, 3, 7, memory);
    assert_eq!(board.registered(1, 3, 7), Some(memory));
    assert_eq!((board.registered(1, 3, 8), board.registered(0, 3, 7)), (None, None));
    assert_eq!(board.registered(1, 3 + REGISTERED_MAX as u64, 9), None);
}

#[test]
fn nobody_begins_to_touch_memory_after_the_end() {
    let board = board();
    assert!(board.begin_touching(0) && board.is_touching(0));
    board.abort(0, b"over");
    assert!(board.is_touching(0) && !board.begin_touching(1) && !board.is_touching(1));
    board.end_touching(0);
    assert!(!board.is_touching(0));
}

#[test]
fn fingerprints_are_remembered_for_a_while() {
    let board = board();
    let print = print();
    board.enter(1, 70, &print);
    assert_eq!(
        (board.print(1, 70), board.print(1, 70 + PRINTS as u64), board.print(0, 70)),
        (Some(print), None, None)
    );
    assert_eq!((board.entered(1), board.entered(0)), (71, 0));
}

#[test]
fn a_roll_forgets_the_chunk_before() {
    let board = board();
    let later = 3 + SHAPE.slots as u64;
    assert!(!board.lacks_one(3) && !board.answer(3, 1) && board.lacks_one(3));
    assert_eq!((board.adder(3), board.closed_by(3)), (None, None));
    assert!(board.answer(3, 0));
    assert_eq!((board.adder(3), board.closed_by(3)), (Some(0), None));
    board.close(3, 0);
    assert_eq!((board.closed_by(3), board.closed_by(later)), (Some(0), None));
    assert!(!board.answer(later, 0) && board.answer(later, 1));
    assert_eq!(board.adder(later), Some(1));
}

#[test]
fn the_first_abort_stays() {
    let board = board();
    assert!(board.aborted().is_none() && !board.is_aborted());
    assert!(board.abort(1, b"first") && !board.abort(0, b"second"));
    assert_eq!(board.aborted().unwrap(), Aborted::Because(b"first".to_vec()));
}

#[test]
fn a_rank_that_died_in_its_abort_record_is_named() {
    let board = board();
    assert!(board.header().abort.claim(1) && board.is_aborted());
    assert!(!board.abort(0, b"second"));
    assert_eq!(board.aborted(), Some(Aborted::Unfinished(1)));
}

#[test]
fn a_fingerprint_is_kept_until_the_window_has_passed_it() {
    let (board, ours) = (board(), print());
    assert_eq!(board.compare(1, 0, ours), Compared::Absent(None));
    board.enter(1, 0, &ours);
    assert_eq!(board.compare(1, 0, ours), Compared::Equal);
    let other = Fingerprint { count: ours.count + 1, ..ours };
    assert_eq!(board.compare(1, 0, other), Compared::Differs(ours));
    // As far as a rank gets while the other has not ended operation 0.
    for sequence in 1..crate::core::OUTSTANDING_MAX as u64 {
        board.enter(1, sequence, &other);
    }
    assert_eq!(board.compare(1, 0, ours), Compared::Equal);
    let next = crate::core::OUTSTANDING_MAX as u64;
    assert_eq!(board.compare(1, next, ours), Compared::Absent(Some((next - 1, other))));
}

#[test]
fn the_slowest_rank_says_what_all_have_ended() {
    let board = board();
    board.end(1, 9);
    assert_eq!(board.ended_by_all(), 0);
    board.end(0, 7);
    assert_eq!((board.ended(0), board.ended(1), board.ended_by_all()), (7, 9, 7));
}

#[test]
fn who_sleeps_for_something_else_is_left_alone() {
    let board = board();
    assert!(!board.must_wake(1, FOR_RESULT));
    board.fall_asleep(1, FOR_RESULT);
    assert!(!board.must_wake(1, FOR_INPUT));
    assert!(board.must_wake(1, FOR_RESULT) && !board.must_wake(1, FOR_RESULT));
    board.fall_asleep(1, 0);
    assert!(board.must_wake(1, FOR_ABORT));
}

#[test]
fn slots_do_not_overlap() {
    let board = board();
    let mut places: Vec<usize> = (0..SHAPE.slots as u64)
        .flat_map(|g| [board.input(0, g), board.input(1, g), board.result(g)])
        .chain((0..SHAPE.sums as u64).map(|g| board.sum(g)))
        .chain(
            (0..2)
                .flat_map(|local| (0..MESSAGE_SLOTS).map(move |at| (local, at)))
                .map(|(local, at)| board.message(local, at).unwrap()),
        )
        .map(|place| place.addr())
        .collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] == SHAPE.slot_bytes));
    assert!(
        places.last().unwrap() + SHAPE.slot_bytes <= board.segment.base().addr() + SHAPE.bytes()
    );
    assert!(board.message(0, MESSAGE_SLOTS).is_none() && board.message(2, 0).is_none());
}
