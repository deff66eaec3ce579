//! Drops of versions that no snapshot shows.

use std::sync::Arc;

use super::epochs::{epoch_of, version};
use super::*;
use crate::fence::{FenceTable, Fences, VolumeFence};
use crate::ids::FencesVersion;
use crate::shown::ShownEpochs;
use crate::snapshot_inode::join;

const WAIT_MS: u64 = 50;

fn list(below: u32, counts: &[u32]) -> Event {
    let counts = counts.iter().copied().collect();
    let shown = ShownEpochs { volume: 1, below, counts };
    let fence = VolumeFence { volume: InodeId(40), epoch: epoch_of(below.max(1)), shown };
    let mut table = FenceTable::default();
    table.add(&Fences { version: FencesVersion(1), volumes: vec![fence] });
    Event::Fences(Arc::new(table))
}

fn meta_of(chunk: ChunkId, version: u64) -> (ChunkId, ChunkMeta) {
    (chunk, ChunkMeta { chunk, committed: state(version, tags(version)), pending: None })
}

/// A tail with versions of these epochs of the chunk.
fn tail(epochs: &[u32]) -> Bench {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let metas = epochs.iter().zip(1..).map(|(epoch, made)| meta_of(version(*epoch), made));
    bench.metas.0.extend(metas);
    bench
}

fn dropped(actions: &[Action]) -> Vec<ChunkId> {
    let chunk_of = |action: &Action| match action {
        Action::Drop { chunk, .. } => *chunk,
        other => panic!("expected drops, got {other:?}"),
    };
    actions.iter().map(chunk_of).collect()
}

impl Bench {
    /// Completes drops, and those that follow.
    fn complete_drops(&mut self, mut actions: Vec<Action>) -> Vec<ChunkId> {
        let mut all = Vec::new();
        while !actions.is_empty() {
            let mut next = Vec::new();
            for action in actions {
                let Action::Drop { op, chunk } = action else { panic!("{action:?}") };
                self.metas.0.remove(&chunk);
                all.push(chunk);
                next.extend(self.give(Event::Forgotten { op, result: Ok(()) }));
            }
            self.now += WAIT_MS;
            next.extend(self.give(Event::Tick));
            actions = next;
        }
        all
    }
}

#[test]
fn versions_that_no_snapshot_shows_are_dropped_and_the_newest_is_kept() {
    let mut bench = tail(&[0, 2, 3, 7]);
    let actions = bench.give(list(7, &[2]));
    assert_eq!(bench.complete_drops(actions), [version(0), version(3)]);
    let actions = bench.give(list(9, &[]));
    assert_eq!(bench.complete_drops(actions), [version(2)]);
    assert_eq!(bench.metas.0.keys().copied().collect::<Vec<_>>(), [version(7)]);
    assert!(bench.replica.is_idle());
}

#[test]
fn a_version_is_kept_while_a_snapshot_that_is_not_listed_may_show_it() {
    let mut bench = tail(&[0, 4]);
    assert!(bench.give(list(3, &[])).is_empty());
    assert_eq!(dropped(&bench.give(list(4, &[]))), [version(0)]);
}

#[test]
fn a_version_that_was_dropped_is_no_difference_and_a_shown_one_is() {
    let mut bench = tail(&[2, 4]);
    bench.give(list(4, &[2]));
    for (epoch, hides) in [(0, true), (1, true), (2, false), (3, true), (4, false), (5, false)] {
        assert_eq!(bench.replica.hides(&bench.metas, version(epoch)), hides, "{epoch}");
    }
}

#[test]
fn versions_of_a_volume_without_a_list_are_kept() {
    let mut bench = tail(&[0]);
    bench.metas.0.extend([meta_of(CHUNK.in_epoch(Epoch::new(2, 3)), 2)]);
    assert!(bench.give(list(9, &[])).is_empty());
}

#[test]
fn only_a_committed_version_replaces_an_older_one() {
    let mut bench = tail(&[0]);
    let chunk = version(2);
    let pending = Some(state(2, tags(2)));
    let meta = ChunkMeta { chunk, committed: ChunkState::default(), pending };
    bench.metas.0.insert(chunk, meta);
    assert!(bench.give(list(2, &[])).is_empty());
}

/// A syncing replica may lose the newer version, which its predecessor does not have.
#[test]
fn only_a_serving_replica_drops_versions_and_it_scans_when_it_starts_to_serve() {
    let mut bench = Bench::new(2);
    bench.metas.0.extend([meta_of(version(0), 1), meta_of(version(2), 2)]);
    bench.give(Event::Routing(chain(3, &[(1, Serving), (2, Syncing)])));
    assert!(bench.give(list(2, &[])).is_empty());
    bench.give(Event::Routing(chain(4, &[(2, LastSrv)])));
    let actions = bench.give(Event::Routing(chain(5, &[(2, Serving)])));
    assert_eq!(dropped(&actions), [version(0)]);
}

#[test]
fn a_version_that_is_hidden_is_dropped_when_the_next_one_is_committed() {
    let mut bench = tail(&[0]);
    bench.give(list(5, &[2]));
    let request = forward_request(bench.to(2), 1, 2);
    let change = ContentChange::Replace;
    for (epoch, made, drops) in [(2, 2, vec![version(0)]), (3, 3, vec![]), (4, 4, vec![version(3)])]
    {
        let (chunk, made_by) = (version(epoch), RequestTag { sequence: 9 + made, ..TAG });
        let request = ForwardRequest {
            chunk,
            change,
            fresh: true,
            tag: made_by,
            version: ChunkVersion(made),
            ..request
        };
        let (op, _) = apply_op(&bench.ask(StorageRequest::Forward(request), b"data"));
        bench.give(Event::Applied { op, unsent: false, result: Ok(state(made, tags(made))) });
        bench.metas.0.extend([meta_of(chunk, made)]);
        let mut actions = bench.give(Event::Committed { op, result: Ok(state(made, tags(made))) });
        assert!(matches!(actions.remove(0), Action::Reply { .. }));
        bench.now += WAIT_MS;
        actions.extend(bench.give(Event::Tick));
        assert_eq!(bench.complete_drops(actions), drops, "{chunk}");
    }
}

#[test]
fn a_scan_finds_hidden_versions_on_every_page() {
    let mut bench = tail(&[]);
    for index in 0..2_500 {
        let chunk = |epoch| ChunkId::new(CHUNK.inode, index).in_epoch(epoch_of(epoch));
        let epochs: &[u32] = if index % 3 == 0 { &[0, 2] } else { &[2] };
        bench.metas.0.extend(epochs.iter().map(|epoch| meta_of(chunk(*epoch), 1)));
    }
    let before = bench.metas.0.len();
    let actions = bench.give(list(2, &[]));
    let mut drops = bench.complete_drops(actions);
    // A page without a hidden version drops nothing: the next one follows after a pause.
    for _ in 0..5 {
        bench.now += WAIT_MS;
        let actions = bench.give(Event::Tick);
        drops.extend(bench.complete_drops(actions));
    }
    assert_eq!((drops.len(), bench.metas.0.len()), (834, before - 834));
}

#[test]
fn a_chunk_in_use_does_not_delay_the_drops_of_others() {
    let mut bench = tail(&[0, 2]);
    let other = ChunkId::new(CHUNK.inode, 1);
    let request = ForwardRequest { chunk: version(2), ..forward_request(bench.to(2), 1, 3) };
    let tag = RequestTag { sequence: 9, ..TAG };
    let request = ForwardRequest { tag, ..request };
    let (op, _) = apply_op(&bench.ask(StorageRequest::Forward(request), b"data"));
    assert!(bench.give(list(2, &[])).is_empty(), "the chunk is in use");
    bench.metas.0.extend([meta_of(other, 1), meta_of(other.in_epoch(epoch_of(2)), 2)]);
    bench.give(list(3, &[]));
    bench.now += WAIT_MS;
    assert_eq!(dropped(&bench.give(Event::Tick)), [other]);
    bench.metas.0.extend([meta_of(version(2), 3)]);
    bench.give(Event::Applied { op, unsent: false, result: Ok(state(3, tags(3))) });
    bench.give(Event::Committed { op, result: Ok(state(3, tags(3))) });
    bench.now += WAIT_MS;
    assert_eq!(dropped(&bench.give(Event::Tick)), [version(0)]);
}

#[test]
fn a_removed_version_is_purged_after_the_last_older_one_was_dropped() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.give(Event::Lease { valid_until: Millis(1_000_000) });
    bench.give(Event::Tick);
    let removed = ChunkState { removed: true, length: 0, ..state(2, tags(2)) };
    let chunk = version(2);
    bench.metas.0.extend([meta_of(version(0), 1)]);
    bench.metas.0.insert(chunk, ChunkMeta { chunk, committed: removed, pending: None });
    let actions = bench.give(list(2, &[]));
    assert_eq!(bench.complete_drops(actions), [version(0)]);
    // Also if it is not the newest one.
    bench.metas.0.extend([meta_of(version(3), 3)]);
    bench.now += 60_000;
    let actions = bench.give(Event::Tick);
    assert!(matches!(actions[..], [Action::Purge { chunk, .. }] if chunk == version(2)));
}

#[test]
fn of_two_removed_versions_the_older_one_is_purged_first() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.give(Event::Lease { valid_until: Millis(1_000_000) });
    for (epoch, made) in [(0, 1), (2, 2)] {
        let committed = ChunkState { removed: true, length: 0, ..state(made, tags(made)) };
        let meta = ChunkMeta { chunk: version(epoch), committed, pending: None };
        bench.metas.0.insert(meta.chunk, meta);
    }
    bench.give(Event::Routing(chain(4, &[(1, Serving)])));
    for epoch in [0, 2] {
        bench.now += 60_000;
        let op = match bench.give(Event::Tick)[..] {
            [Action::Purge { op, chunk, .. }] if chunk == version(epoch) => op,
            ref other => panic!("{epoch}: {other:?}"),
        };
        bench.metas.0.remove(&version(epoch));
        bench.give(Event::Forgotten { op, result: Ok(()) });
    }
}

#[test]
fn a_removed_snapshot_is_not_read() {
    let mut bench = tail(&[0, 2, 3]);
    let in_snapshot = |count| {
        let chunk = ChunkId { inode: join(7, CHUNK.inode), ..version(count) };
        let to = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]).to(2);
        StorageRequest::ReadUpTo(ReadRequest { to, chunk, offset: 0, length: 9 })
    };
    let served = |actions: &[Action]| match actions {
        [Action::ServeRead { request, .. }] => Some(request.chunk),
        [Action::Reply { result: Err(StorageError::ChunkNotFound { .. }), .. }] => None,
        other => panic!("{other:?}"),
    };
    for (count, shown) in [(1, 0), (2, 2), (3, 3)] {
        assert_eq!(served(&bench.ask(in_snapshot(count), b"")), Some(version(shown)));
    }
    bench.give(list(3, &[1]));
    for (count, shown) in [(1, Some(0)), (2, None), (3, Some(3))] {
        assert_eq!(served(&bench.ask(in_snapshot(count), b"")), shown.map(version), "{count}");
    }
}
