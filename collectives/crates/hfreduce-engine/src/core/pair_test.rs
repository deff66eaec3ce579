//! Who is paired with whom, and when.

use super::fingerprint::{Fingerprint, Kind};
use super::pair::*;
use super::tree::Violation;
use crate::core::Determinism;

fn letter(kind: Kind, tag: u64, bytes: u64) -> Letter {
    let print = Fingerprint {
        kind,
        dtype: 0,
        element_bytes: 1,
        op: 0,
        root: 0,
        count: bytes,
        shape: 0,
        modes: Determinism::DEFAULT,
    };
    Letter { tag, bytes, print }
}

fn ticket(operation: u64) -> Ticket {
    Ticket { operation, transfer: 0 }
}

fn granted(peer: u32, message: u64, operation: u64) -> PairAction {
    PairAction::Grant { peer, message, ticket: ticket(operation) }
}

fn actions(pairs: &mut Pairs) -> Vec<PairAction> {
    std::iter::from_fn(|| pairs.poll()).collect()
}

#[test]
fn messages_of_one_tag_pair_up_in_order_whoever_is_first() {
    let mut pairs = Pairs::default();
    pairs.offered(3, 10, letter(Kind::Send, 7, 4)).unwrap();
    pairs.offered(3, 11, letter(Kind::Send, 8, 4)).unwrap();
    pairs.receive(3, ticket(1), letter(Kind::Recv, 8, 4)).unwrap();
    pairs.receive(3, ticket(2), letter(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(3, ticket(4), letter(Kind::Recv, 7, 4)).unwrap();
    pairs.offered(3, 12, letter(Kind::Send, 7, 4)).unwrap();
    let grants = [(11, 1), (10, 2), (12, 4)].map(|(message, to)| granted(3, message, to));
    assert_eq!(actions(&mut pairs), grants);
    assert_eq!(pairs.piece(3, 10, 3), Ok((ticket(2), 0)));
    pairs.arrived(3, 10, 3);
    assert!(pairs.piece(3, 10, 2).is_err() && pairs.piece(2, 10, 1).is_err());
    assert_eq!(pairs.piece(3, 10, 1), Ok((ticket(2), 3)));
    pairs.arrived(3, 10, 1);
    assert_eq!(actions(&mut pairs), [PairAction::Complete { ticket: ticket(2) }]);
}

#[test]
fn nothing_is_sent_before_it_is_granted() {
    let mut pairs = Pairs::default();
    let sent = letter(Kind::Send, 7, 4);
    pairs.send(1, ticket(0), sent);
    assert_eq!(actions(&mut pairs), [PairAction::Offer { peer: 1, message: 0, letter: sent }]);
    assert!(pairs.granted(1, 5).is_err());
    pairs.granted(1, 0).unwrap();
    let stream = PairAction::Stream { peer: 1, message: 0, ticket: ticket(0) };
    assert_eq!(actions(&mut pairs), [stream]);
    assert!(pairs.granted(1, 0).is_err());
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut pairs = Pairs::default();
    pairs.receive(3, ticket(1), letter(Kind::Recv, 8, 4)).unwrap();
    let other = pairs.offered(3, 0, letter(Kind::Send, 8, 5));
    assert!(matches!(other, Err(Violation::Mismatch { .. })));
    // Both call the same; what one sends is not what the other expects.
    let uneven = |bytes| Letter { bytes, tag: 1 << 63 | 5, ..letter(Kind::Alltoall, 0, 0) };
    pairs.receive(5, ticket(2), uneven(8)).unwrap();
    let Err(Violation::Mismatch { sequence, ours, theirs }) = pairs.offered(5, 0, uneven(12))
    else {
        panic!("lengths differ")
    };
    assert_eq!((sequence, ours.count, theirs.count), (5, 8, 12));
    for message in 0..OFFERS_MAX as u64 {
        pairs.offered(4, message, letter(Kind::Send, 1, 1)).unwrap();
    }
    assert!(pairs.offered(4, 9999, letter(Kind::Send, 1, 1)).is_err());
}

#[test]
fn empty_messages_still_meet() {
    let mut pairs = Pairs::default();
    pairs.send(1, ticket(0), letter(Kind::Send, 7, 0));
    pairs.granted(1, 0).unwrap();
    pairs.receive(1, ticket(1), letter(Kind::Recv, 7, 0)).unwrap();
    pairs.offered(1, 0, letter(Kind::Send, 7, 0)).unwrap();
    let done: Vec<_> = actions(&mut pairs)
        .into_iter()
        .filter(|action| matches!(action, PairAction::Complete { .. }))
        .collect();
    assert_eq!(done.len(), 2);
}

#[test]
fn a_receive_from_anybody_takes_the_oldest_offer_of_its_tag() {
    let mut pairs = Pairs::default();
    pairs.offered(5, 0, letter(Kind::Send, 7, 4)).unwrap();
    pairs.offered(2, 0, letter(Kind::Send, 8, 4)).unwrap();
    pairs.offered(2, 1, letter(Kind::Send, 7, 4)).unwrap();
    for operation in 1..=3 {
        pairs.receive(ANY_RANK, ticket(operation), letter(Kind::Recv, 7, 4)).unwrap();
    }
    assert_eq!(actions(&mut pairs), [granted(5, 0, 1), granted(2, 1, 2)]);
    pairs.offered(9, 3, letter(Kind::Send, 7, 4)).unwrap();
    assert_eq!(actions(&mut pairs), [granted(9, 3, 3)]);
    assert_eq!(pairs.piece(9, 3, 4), Ok((ticket(3), 0)));
}

#[test]
fn of_receives_from_one_and_from_anybody_the_first_goes_first() {
    let mut pairs = Pairs::default();
    pairs.receive(ANY_RANK, ticket(1), letter(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(3, ticket(2), letter(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(ANY_RANK, ticket(3), letter(Kind::Recv, 7, 4)).unwrap();
    for message in 0..3 {
        pairs.offered(3, message, letter(Kind::Send, 7, 4)).unwrap();
    }
    assert_eq!(actions(&mut pairs), [granted(3, 0, 1), granted(3, 1, 2), granted(3, 2, 3)]);
    // Whoever offers what does not fit is named.
    pairs.offered(4, 0, letter(Kind::Send, 7, 5)).unwrap();
    let refused = pairs.receive(ANY_RANK, ticket(4), letter(Kind::Recv, 7, 4));
    assert!(matches!(refused, Err((4, Violation::Mismatch { .. }))));
}

#[test]
fn many_messages_of_one_tag_do_not_hold_back_one_of_another() {
    let mut pairs = Pairs::default();
    for number in 0..2000 {
        pairs.send(1, ticket(number), letter(Kind::Send, 7, 8));
    }
    pairs.send(1, ticket(2000), letter(Kind::Send, 8, 8));
    let offered = |action: &PairAction| match action {
        PairAction::Offer { letter, .. } => letter.tag == 8,
        _ => false,
    };
    assert_eq!(actions(&mut pairs).iter().filter(|action| offered(action)).count(), 1);
}
