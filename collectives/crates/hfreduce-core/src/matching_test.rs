//! Tests of message matching.

use super::fingerprint::Fingerprint;
use super::kind::Kind;
use super::matching::*;
use super::tree::Violation;
use crate::Determinism;

fn envelope(kind: Kind, tag: u64, bytes: u64) -> Envelope {
    let fingerprint = Fingerprint {
        kind,
        dtype: 0,
        element_bytes: 1,
        op: 0,
        root: 0,
        count: bytes,
        shape: 0,
        modes: Determinism::DEFAULT,
    };
    Envelope { tag, bytes, fingerprint }
}

fn ticket(operation: u64) -> TransferId {
    TransferId { operation, transfer: 0 }
}

fn granted(peer: u32, message: u64, operation: u64) -> PairAction {
    PairAction::Grant { peer, message, ticket: ticket(operation) }
}

fn actions(pairs: &mut Pairs) -> Vec<PairAction> {
    std::iter::from_fn(|| pairs.poll()).collect()
}

#[test]
fn messages_of_one_tag_are_matched_in_order() {
    let mut pairs = Pairs::default();
    pairs.offered(3, 10, envelope(Kind::Send, 7, 4), false).unwrap();
    pairs.offered(3, 11, envelope(Kind::Send, 8, 4), false).unwrap();
    pairs.receive(3, ticket(1), envelope(Kind::Recv, 8, 4)).unwrap();
    pairs.receive(3, ticket(2), envelope(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(3, ticket(4), envelope(Kind::Recv, 7, 4)).unwrap();
    pairs.offered(3, 12, envelope(Kind::Send, 7, 4), false).unwrap();
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
fn long_messages_wait_for_a_grant() {
    let mut pairs = Pairs::default();
    let long = envelope(Kind::Send, 7, EAGER_BYTES_MAX + 1);
    pairs.send(1, ticket(0), long);
    let offer = PairAction::Offer { peer: 1, message: 0, envelope: long, eager: None };
    assert_eq!(actions(&mut pairs), [offer]);
    assert!(pairs.granted(1, 5).is_err());
    pairs.granted(1, 0).unwrap();
    let stream = PairAction::Stream { peer: 1, message: 0, ticket: ticket(0) };
    assert_eq!(actions(&mut pairs), [stream]);
    assert!(pairs.granted(1, 0).is_err());
}

#[test]
fn short_messages_are_sent_with_their_offers_while_the_window_allows() {
    let mut pairs = Pairs::default();
    let fitting = EAGER_WINDOW_BYTES / EAGER_BYTES_MAX;
    for number in 0..fitting + 2 {
        pairs.send(1, ticket(number), envelope(Kind::Send, 7, EAGER_BYTES_MAX));
    }
    pairs.send(2, ticket(99), envelope(Kind::Send, 7, 1));
    let eager = |pairs: &mut Pairs| -> Vec<(u32, Option<TransferId>)> {
        let offers = actions(pairs).into_iter().filter_map(|action| match action {
            PairAction::Offer { peer, eager, .. } => Some((peer, eager)),
            _ => None,
        });
        offers.collect()
    };
    let mut expected: Vec<_> = (0..fitting).map(|number| (1, Some(ticket(number)))).collect();
    expected.extend([(1, None), (1, None), (2, Some(ticket(99)))]);
    assert_eq!(eager(&mut pairs), expected);
    // Granted: the send completes and frees its part of the window.
    pairs.granted(1, 0).unwrap();
    assert_eq!(actions(&mut pairs), [PairAction::Complete { ticket: ticket(0) }]);
    pairs.send(1, ticket(50), envelope(Kind::Send, 7, EAGER_BYTES_MAX));
    pairs.send(1, ticket(51), envelope(Kind::Send, 7, EAGER_BYTES_MAX));
    assert_eq!(eager(&mut pairs), [(1, Some(ticket(50))), (1, None)]);
    // A message that was offered without its bytes is sent when it is granted.
    pairs.granted(1, fitting).unwrap();
    let stream = PairAction::Stream { peer: 1, message: fitting, ticket: ticket(fitting) };
    assert_eq!(actions(&mut pairs), [stream]);
}

#[test]
fn bytes_of_an_offer_are_delivered_to_the_matching_receive() {
    let mut pairs = Pairs::default();
    let short = envelope(Kind::Send, 7, 4);
    let delivery = |message, operation| {
        let (peer, ticket) = (3, ticket(operation));
        [
            granted(peer, message, operation),
            PairAction::Take { peer, message, ticket },
            PairAction::Complete { ticket },
        ]
    };
    pairs.offered(3, 0, short, true).unwrap();
    assert_eq!(actions(&mut pairs), []);
    pairs.receive(3, ticket(1), envelope(Kind::Recv, 7, 4)).unwrap();
    assert_eq!(actions(&mut pairs), delivery(0, 1));
    pairs.receive(3, ticket(2), envelope(Kind::Recv, 7, 4)).unwrap();
    pairs.offered(3, 1, short, true).unwrap();
    assert_eq!(actions(&mut pairs), delivery(1, 2));
    // No pieces follow.
    assert!(pairs.piece(3, 1, 4).is_err());
}

#[test]
fn a_peer_that_sends_more_than_its_window_without_a_grant_is_refused() {
    let mut pairs = Pairs::default();
    let longest = envelope(Kind::Send, 7, EAGER_BYTES_MAX);
    let fitting = EAGER_WINDOW_BYTES / EAGER_BYTES_MAX;
    for message in 0..fitting {
        pairs.offered(3, message, longest, true).unwrap();
    }
    // A matched message frees its part of the window, and other peers have separate windows.
    pairs.receive(3, ticket(0), envelope(Kind::Recv, 7, EAGER_BYTES_MAX)).unwrap();
    pairs.offered(3, fitting, longest, true).unwrap();
    pairs.offered(4, 0, longest, true).unwrap();
    let refused = pairs.offered(3, fitting + 1, longest, true);
    assert!(
        matches!(refused, Err(Violation::Protocol(why)) if why.contains("65536 unrequested bytes"))
    );
}

#[test]
fn messages_of_another_length_are_refused() {
    let mut pairs = Pairs::default();
    pairs.receive(3, ticket(1), envelope(Kind::Recv, 8, 4)).unwrap();
    let other = pairs.offered(3, 0, envelope(Kind::Send, 8, 5), false);
    assert!(matches!(other, Err(Violation::Mismatch { .. })));
    // Both ranks call the same operation with different lengths for each other.
    let uneven = |bytes| Envelope { bytes, tag: 1 << 63 | 5, ..envelope(Kind::Alltoall, 0, 0) };
    pairs.receive(5, ticket(2), uneven(8)).unwrap();
    let Err(Violation::Mismatch { sequence, fingerprint, peer_fingerprint }) =
        pairs.offered(5, 0, uneven(12), false)
    else {
        panic!("lengths differ")
    };
    assert_eq!((sequence, fingerprint.count, peer_fingerprint.count), (5, 8, 12));
    for message in 0..OFFERS_MAX as u64 {
        pairs.offered(4, message, envelope(Kind::Send, 1, 1), false).unwrap();
    }
    assert!(pairs.offered(4, 9999, envelope(Kind::Send, 1, 1), false).is_err());
}

#[test]
fn empty_messages_are_matched() {
    let mut pairs = Pairs::default();
    pairs.send(1, ticket(0), envelope(Kind::Send, 7, 0));
    pairs.granted(1, 0).unwrap();
    pairs.receive(1, ticket(1), envelope(Kind::Recv, 7, 0)).unwrap();
    pairs.offered(1, 0, envelope(Kind::Send, 7, 0), false).unwrap();
    let done: Vec<_> = actions(&mut pairs)
        .into_iter()
        .filter(|action| matches!(action, PairAction::Complete { .. }))
        .collect();
    assert_eq!(done.len(), 2);
}

#[test]
fn a_receive_from_any_rank_matches_the_oldest_offer_of_its_tag() {
    let mut pairs = Pairs::default();
    pairs.offered(5, 0, envelope(Kind::Send, 7, 4), false).unwrap();
    pairs.offered(2, 0, envelope(Kind::Send, 8, 4), false).unwrap();
    pairs.offered(2, 1, envelope(Kind::Send, 7, 4), false).unwrap();
    for operation in 1..=3 {
        pairs.receive(ANY_RANK, ticket(operation), envelope(Kind::Recv, 7, 4)).unwrap();
    }
    assert_eq!(actions(&mut pairs), [granted(5, 0, 1), granted(2, 1, 2)]);
    pairs.offered(9, 3, envelope(Kind::Send, 7, 4), false).unwrap();
    assert_eq!(actions(&mut pairs), [granted(9, 3, 3)]);
    assert_eq!(pairs.piece(9, 3, 4), Ok((ticket(3), 0)));
}

#[test]
fn receives_from_one_rank_and_from_any_rank_match_in_order() {
    let mut pairs = Pairs::default();
    pairs.receive(ANY_RANK, ticket(1), envelope(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(3, ticket(2), envelope(Kind::Recv, 7, 4)).unwrap();
    pairs.receive(ANY_RANK, ticket(3), envelope(Kind::Recv, 7, 4)).unwrap();
    for message in 0..3 {
        pairs.offered(3, message, envelope(Kind::Send, 7, 4), false).unwrap();
    }
    assert_eq!(actions(&mut pairs), [granted(3, 0, 1), granted(3, 1, 2), granted(3, 2, 3)]);
    // The error names the peer whose offer does not match.
    pairs.offered(4, 0, envelope(Kind::Send, 7, 5), false).unwrap();
    let refused = pairs.receive(ANY_RANK, ticket(4), envelope(Kind::Recv, 7, 4));
    assert!(matches!(refused, Err((4, Violation::Mismatch { .. }))));
}

#[test]
fn many_messages_of_one_tag_do_not_delay_another_tag() {
    let mut pairs = Pairs::default();
    for number in 0..2000 {
        pairs.send(1, ticket(number), envelope(Kind::Send, 7, 8));
    }
    pairs.send(1, ticket(2000), envelope(Kind::Send, 8, 8));
    let offered = |action: &PairAction| match action {
        PairAction::Offer { envelope, .. } => envelope.tag == 8,
        _ => false,
    };
    assert_eq!(actions(&mut pairs).iter().filter(|action| offered(action)).count(), 1);
}
