//! Tests of the credits: limits, order, and that none are lost.

use std::collections::HashMap;

use proptest::prelude::*;

use super::credit::*;

#[test]
fn connections_take_turns() {
    let mut credits = Credits::new(2, 2);
    let greedy: Vec<CreditRequest> = (0..100).map(|_| credits.request('a', None, 1)).collect();
    assert_eq!(credits.grant(), greedy[..2]);
    let modest = credits.request('b', None, 1);
    credits.release('a', 1);
    assert_eq!(credits.grant(), [modest], "whose own share is used up has no turn");
    credits.release('a', 1);
    assert_eq!(credits.grant(), [greedy[2]]);
}

#[test]
fn a_connection_is_limited_to_its_share_and_a_large_request_to_the_total() {
    let mut credits = Credits::new(100, 25);
    let first = credits.request('a', None, 20);
    let second = credits.request('a', None, 20);
    let other = credits.request('b', None, 60);
    assert_eq!(credits.grant(), [first, other], "60 is over the share of b, which has nothing");
    assert!(!credits.is_short(None), "what waits, waits for its own share");
    credits.release('a', 20);
    assert_eq!(credits.grant(), [second]);
    let whole = credits.request('c', None, 1_000);
    assert_eq!(credits.grant(), []);
    assert!(credits.is_short(None));
    credits.release('a', 20);
    credits.release('b', 60);
    assert_eq!(credits.grant(), [whole]);
    credits.release('c', credits.credits_of(1_000));
    assert!(credits.is_idle() && credits.nothing_ready());
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    let mut credits = Credits::new(10, 10);
    let first = credits.request('a', None, 4);
    let large = credits.request('b', None, 8);
    let small = credits.request('c', None, 1);
    assert_eq!(credits.grant(), [first]);
    credits.release('a', 4);
    assert_eq!(credits.grant(), [large, small]);
}

/// Total credits of the requests of `of` if each of them requests as much as it may.
fn grants_of(credits: &mut Credits<(u64, u8)>, of: u64, connections: u8) -> Vec<(u64, u8)> {
    let mut peer_of_request = HashMap::new();
    for connection in 0..connections {
        let peer = (of, connection);
        for _ in 0..100 {
            peer_of_request.insert(credits.request(peer, (of > 0).then_some(of), 1), peer);
        }
    }
    let peers: Vec<_> =
        credits.grant().iter().map(|it| peer_of_request.remove(it).unwrap()).collect();
    for (request, peer) in peer_of_request {
        credits.cancel(peer, request);
    }
    peers
}

/// A grant examines no connection that waits for its own share, whatever their number.
#[test]
fn connections_at_their_share_have_no_turn_until_they_release_memory() {
    let mut credits = Credits::new(1_000, 10);
    for peer in 0..50 {
        let _ = (credits.request(peer, Some(1), 1), credits.request(peer, Some(1), 100));
    }
    assert_eq!(credits.grant().len(), 50);
    assert!(credits.nothing_ready());
    credits.release(7, 1);
    assert_eq!(credits.grant(), [CreditRequest(16)], "it holds nothing");
    let small = credits.request(8, Some(1), 1);
    assert_eq!(credits.grant(), [], "behind the large one of its connection");
    credits.cancel(8, CreditRequest(18));
    assert_eq!(credits.grant(), [small]);
}

#[test]
fn a_volumes_share_does_not_depend_on_its_number_of_connections() {
    let mut credits = Credits::new(64, 8);
    let alone = grants_of(&mut credits, 1, 50);
    assert_eq!(alone.len(), 32, "as much stays free");
    let one = grants_of(&mut credits, 2, 1);
    assert_eq!(one.len(), 8, "a connection has its share");
    let many = grants_of(&mut credits, 3, 50);
    assert_eq!(many.len(), 8, "all volumes leave a quarter to services");
    let services = grants_of(&mut credits, 0, 50);
    assert_eq!(services.len(), 16);
    for peer in [alone, one, many, services].concat() {
        credits.release(peer, 1);
    }
    assert!(credits.is_idle() && credits.nothing_ready());
}

#[test]
fn a_volume_at_its_share_waits_for_memory_of_its_connections() {
    let mut credits = Credits::new(64, 8);
    let _ = (
        credits.request(0, None, 48),
        credits.request(1, Some(1), 8),
        credits.request(2, Some(1), 1),
    );
    assert_eq!(credits.grant().len(), 2);
    assert!(credits.is_short(Some(1)));
    assert!(!credits.is_short(Some(2)) && !credits.is_short(None), "others have no part in it");
}

#[test]
fn volumes_take_turns_however_many_connections_they_have() {
    let mut credits = Credits::new(4, 4);
    let all: Vec<CreditRequest> = (0..4).map(|_| credits.request(0, None, 1)).collect();
    assert_eq!(credits.grant(), all);
    let many: Vec<CreditRequest> = (1..=50).map(|peer| credits.request(peer, Some(1), 1)).collect();
    let one: Vec<CreditRequest> = (0..2).map(|_| credits.request(99, Some(2), 1)).collect();
    let mut grants = Vec::new();
    for _ in 0..3 {
        credits.release(0, 1);
        grants.extend(credits.grant());
    }
    assert_eq!(grants, [many[0], one[0], many[1]]);
    credits.release(1, 1);
    assert_eq!(credits.grant(), [one[1]]);
}

#[test]
fn a_waiting_volume_is_overtaken_by_services_but_not_by_other_volumes() {
    let mut credits = Credits::new(16, 8);
    let first = credits.request(1, Some(1), 8);
    assert_eq!(credits.grant(), [first]);
    let large = credits.request(2, Some(2), 6);
    let small = credits.request(3, Some(3), 1);
    let service = credits.request(4, None, 4);
    assert_eq!(credits.grant(), [service]);
    assert!(credits.is_short(None));
    credits.release(1, 8);
    assert_eq!(credits.grant(), [large, small]);
}

/// Peers that hold their memory a hundred times as long as others take no part of the rate of these.
#[test]
fn a_slow_peer_takes_no_memory_that_a_fast_one_returns() {
    // 8 fast and 8 slow peers, each with 100 requests waiting, in one volume or as services.
    for volume in [None, Some(1)] {
        let mut credits = Credits::new(64, 32);
        let mut peer_of_request = HashMap::new();
        for _ in 0..100 {
            for peer in 0..16 {
                peer_of_request.insert(credits.request(peer, volume, 1), peer);
            }
        }
        let mut held = [0; 16];
        let mut rates = [0; 16];
        for round in 1..=100 {
            for request in credits.grant() {
                let peer = peer_of_request[&request];
                held[peer as usize] += 1;
                rates[peer as usize] += 1;
            }
            for peer in 0..16 {
                let bytes = if peer < 8 || round % 100 == 0 { held[peer as usize] } else { 0 };
                credits.release(peer, bytes);
                held[peer as usize] -= bytes;
            }
        }
        let fast = &rates[..8];
        assert!(fast.iter().all(|granted| *granted == 100), "{volume:?}: {rates:?}");
    }
}

proptest! {
    /// No credits are lost in any sequence, and every request is granted once others return
    /// theirs.
    #[test]
    fn all_waiters_are_served(steps in prop::collection::vec((0_u8..5, 0_usize..40, 0_u8..3), 1..200)) {
        let mut credits = Credits::new(32, 8);
        // Two services, and two volumes, one with two connections.
        let volume = |peer: u8| (peer > 1).then_some(u64::from(peer / 2));
        let mut waiting: Vec<(CreditRequest, u8, usize)> = Vec::new();
        let mut grants: Vec<(CreditRequest, u8, usize)> = Vec::new();
        let settle = |credits: &mut Credits<u8>, waiting: &mut Vec<(CreditRequest, u8, usize)>, grants: &mut Vec<_>| {
            for request in credits.grant() {
                let at = waiting.iter().position(|it| it.0 == request).unwrap();
                grants.push(waiting.remove(at));
            }
        };
        for (peer, bytes, what) in steps {
            match what {
                0 => {
                    let request = credits.request(peer, volume(peer), bytes);
                    waiting.push((request, peer, credits.credits_of(bytes)));
                }
                1 if !grants.is_empty() => {
                    let (_, peer, bytes) = grants.remove(bytes % grants.len());
                    credits.release(peer, bytes);
                }
                2 if !waiting.is_empty() => {
                    let (request, peer, _) = waiting.remove(bytes % waiting.len());
                    credits.cancel(peer, request);
                }
                _ => {}
            }
            settle(&mut credits, &mut waiting, &mut grants);
            let sum: usize = grants.iter().map(|it| it.2).sum();
            prop_assert_eq!(credits.free_bytes() + sum, 32);
        }
        while !(grants.is_empty() && waiting.is_empty()) {
            let before = grants.len() + waiting.len();
            if let Some((_, peer, bytes)) = grants.pop() {
                credits.release(peer, bytes);
            }
            settle(&mut credits, &mut waiting, &mut grants);
            prop_assert!(grants.len() + waiting.len() < before, "nothing moves any more");
        }
        prop_assert!(credits.is_idle());
    }
}
