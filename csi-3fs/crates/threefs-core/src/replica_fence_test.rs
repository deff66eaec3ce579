//! Fences: which updates start, and when a replica confirms.

use std::sync::Arc;

use super::epochs::{epoch_of, version};
use super::*;
use crate::fence::{FenceTable, Fences, VolumeFence};
use crate::ids::FencesVersion;
use crate::message::{NamedVolume, UpdateConditions};
use crate::shown::ShownEpochs;

const VOLUME: InodeId = InodeId(40);

/// The fence of epoch `count`, as version `count` of all fences.
pub(super) fn fence(count: u32) -> Event {
    let shown = ShownEpochs { volume: 1, below: count, counts: (0..count).collect() };
    let fence = VolumeFence { volume: VOLUME, epoch: epoch_of(count), shown };
    let mut table = FenceTable::default();
    table.add(&Fences { version: FencesVersion(count.into()), volumes: vec![fence] });
    Event::Fences(Arc::new(table))
}

fn update(bench: &Bench, chunk: ChunkId, volume: NamedVolume) -> StorageRequest {
    let request = UpdateRequest {
        to: bench.to(1),
        chunk,
        tag: TAG,
        change: ContentChange::Replace,
        payload_checksum: Checksum::of(b"data"),
        chunk_bytes: 65_536,
    };
    match volume {
        NamedVolume::Unnamed => StorageRequest::Update(request),
        volume => StorageRequest::UpdateIf(request, UpdateConditions { volume, at: None }),
    }
}

fn head() -> Bench {
    Bench::serving(1, 3, &[(1, Serving), (2, Serving)])
}

fn updated_of(actions: &[Action]) -> Updated {
    match actions {
        [Action::Reply { result: Ok(StorageReply::Updated(updated)), .. }] => *updated,
        other => panic!("{other:?}"),
    }
}

fn commit_op(actions: &[Action]) -> OpId {
    match actions {
        [Action::Commit { op, .. }] => *op,
        other => panic!("{other:?}"),
    }
}

pub(super) fn drained(bench: &Bench) -> u64 {
    bench.replica.drained_fences().0
}

#[test]
fn an_update_starts_only_in_an_epoch_that_has_not_ended() {
    let (volume, other) = (NamedVolume::Volume(VOLUME), NamedVolume::Volume(InodeId(41)));
    for (named, chunk, accepted) in [
        (volume, version(2), true),
        (volume, version(3), true),
        (volume, version(1), false),
        (volume, version(0), false),
        (other, version(0), true),
        (NamedVolume::NoVolume, version(0), true),
        // It may be of the volume.
        (NamedVolume::Unnamed, version(0), false),
        (NamedVolume::Unnamed, version(2), true),
        (NamedVolume::Unnamed, version(1), false),
        // A restored mgmtd may have lost the fence.
        (other, CHUNK.in_epoch(Epoch::new(9, 5)), false),
    ] {
        let mut bench = head();
        bench.give(fence(2));
        let request = update(&bench, chunk, named);
        let actions = bench.ask(request, b"data");
        match accepted {
            true => drop(apply_op(&actions)),
            false => {
                let error = error_of(&actions);
                assert!(matches!(error, StorageError::Fenced { .. }), "{named:?} {chunk} {error}");
            }
        }
    }
    let mut bench = head();
    bench.give(fence(2));
    let request = update(&bench, version(2), other);
    assert!(matches!(error_of(&bench.ask(request, b"data")), StorageError::InvalidRequest { .. }));
}

#[test]
fn without_fences_an_update_need_not_name_its_volume() {
    let mut bench = head();
    let request = update(&bench, version(0), NamedVolume::Unnamed);
    drop(apply_op(&bench.ask(request, b"data")));
}

#[test]
fn an_update_that_was_made_before_the_fence_is_recognized_after_it() {
    let mut bench = head();
    bench.metas.0.insert(
        CHUNK,
        ChunkMeta {
            chunk: CHUNK,
            committed: state(4, TagWindow::default().with(TAG, ChunkVersion(4))),
            pending: None,
        },
    );
    bench.give(fence(2));
    let request = update(&bench, version(0), NamedVolume::Volume(VOLUME));
    assert_eq!(updated_of(&bench.ask(request, b"data")).version, ChunkVersion(4));
}

#[test]
fn a_fence_is_confirmed_once_the_updates_from_before_it_have_ended() {
    let mut bench = head();
    let request = update(&bench, version(0), NamedVolume::Volume(VOLUME));
    let (op, update) = apply_op(&bench.ask(request, b"data"));
    bench.give(fence(1));
    assert_eq!(drained(&bench), 0);
    let pending = state(update.version.0, update.tags.clone());
    bench.answer_prepares();
    let (call, ..) =
        call_of(&bench.give(Event::Applied { op, unsent: false, result: Ok(pending.clone()) }));
    assert_eq!(drained(&bench), 0);
    // It waits for the barrier of the first one.
    bench.give(fence(2));
    let reply = Updated {
        version: pending.version,
        length: pending.length,
        checksum: pending.checksum,
        chain_version: ChainVersion(3),
    };
    let (result, payload) = (Ok(StorageReply::Updated(reply)), Bytes::new());
    bench.give(Event::Answer { call, result, payload });
    assert_eq!(drained(&bench), 0, "it is not committed yet");
    bench.give(Event::Committed { op, result: Ok(pending) });
    assert_eq!(drained(&bench), 2);
}

#[test]
fn a_pending_state_of_a_former_predecessor_is_resolved_before_the_confirmation() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.give(fence(1));
    assert_eq!(drained(&bench), 1);
    let pending = state(1, tags(1));
    bench.metas.0.insert(
        CHUNK,
        ChunkMeta {
            chunk: CHUNK,
            committed: ChunkState::default(),
            pending: Some(pending.clone()),
        },
    );
    let actions = bench.give(Event::Routing(chain(4, &[(2, Serving), (1, Offline)])));
    assert_eq!(drained(&bench), 0);
    let op = commit_op(&actions);
    bench
        .metas
        .0
        .insert(CHUNK, ChunkMeta { chunk: CHUNK, committed: pending.clone(), pending: None });
    bench.give(Event::Committed { op, result: Ok(pending) });
    assert_eq!(drained(&bench), 1);
}

#[test]
fn a_pending_state_that_an_aborted_update_leaves_is_resolved_before_the_confirmation() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    let request = update(&bench, version(0), NamedVolume::Volume(VOLUME));
    let (op, update) = apply_op(&bench.ask(request, b"data"));
    // It is in the store while the chain stops and continues.
    bench.give(Event::Routing(chain(4, &[(1, LastSrv)])));
    bench.give(Event::Routing(chain(5, &[(1, Serving)])));
    bench.give(fence(1));
    assert_eq!(drained(&bench), 0);
    let pending = state(update.version.0, update.tags.clone());
    let (committed, left) = (ChunkState::default(), Some(pending.clone()));
    bench.metas.0.insert(CHUNK, ChunkMeta { chunk: CHUNK, committed, pending: left });
    let op =
        commit_op(&bench.give(Event::Applied { op, unsent: false, result: Ok(pending.clone()) }));
    assert_eq!(drained(&bench), 0, "the aborted update has ended, its state is not resolved");
    let committed = ChunkMeta { chunk: CHUNK, committed: pending.clone(), pending: None };
    bench.metas.0.insert(CHUNK, committed);
    bench.give(Event::Committed { op, result: Ok(pending) });
    assert_eq!(drained(&bench), 1);
}

#[test]
fn a_replica_that_does_not_serve_confirms_nothing() {
    let mut bench = head();
    bench.give(fence(1));
    assert_eq!(drained(&bench), 1);
    bench.give(Event::Retire);
    assert_eq!(drained(&bench), 0);
}
