//! Unit tests of one replica: a scrub has confirmed a difference from the predecessor.

use super::*;
use crate::scrub::{ChunkSummary, Difference, DifferenceKind};

fn summary(version: u64) -> ChunkSummary {
    let meta = ChunkMeta { chunk: CHUNK, committed: state(version, tags(version)), pending: None };
    ChunkSummary::from(&meta)
}

fn differs(own: Option<u64>, predecessor: Option<u64>, kind: DifferenceKind) -> Event {
    let (own, predecessor) = (own.map(summary), predecessor.map(summary));
    let difference = Difference { chunk: CHUNK, kind, own, predecessor };
    Event::Differs { difference, chain_version: ChainVersion(3) }
}

/// Whether the second of three replicas stops serving.
fn stops(states: &[(u64, PublicState)], version: u64, event: Event) -> bool {
    let mut bench = Bench::serving(2, 3, states);
    bench.set(state(version, tags(version)), None);
    let actions = bench.give(event);
    let local = bench.replica.report(Millis(bench.now)).state;
    let alert = matches!(actions[..], [Action::Alert(Alert::Disagreement { .. })]);
    assert_eq!(alert, local == LocalState::Online);
    alert
}

#[test]
fn a_replica_that_lacks_updates_stops_serving_if_all_others_serve() {
    let whole = [(1, Serving), (2, Serving), (3, Serving)];
    let older = || differs(Some(4), Some(5), DifferenceKind::Older);
    assert!(stops(&whole, 4, older()));
    assert!(stops(&whole, 5, differs(Some(5), Some(5), DifferenceKind::Content)));
    assert!(!stops(&whole, 5, older()), "updated since");
    assert!(!stops(&[(1, Serving), (2, Serving), (3, Offline)], 4, older()), "not whole");
    assert!(!stops(&[(2, Serving), (1, Serving), (3, Serving)], 4, older()), "the head");
    let Event::Differs { difference, .. } = older() else { panic!() };
    let chain_version = ChainVersion(2);
    assert!(!stops(&whole, 4, Event::Differs { difference, chain_version }), "another chain");
}

#[test]
fn content_that_a_sync_would_destroy_is_kept() {
    let whole = [(1, Serving), (2, Serving), (3, Serving)];
    assert!(!stops(&whole, 6, differs(Some(6), Some(5), DifferenceKind::Newer)));
    assert!(!stops(&whole, 6, differs(Some(6), None, DifferenceKind::Newer)));
}
