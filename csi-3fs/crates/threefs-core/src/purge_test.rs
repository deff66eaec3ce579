//! Purge of removed chunks from the tail to the head; late messages do not restore them.

use super::*;
use crate::message::PurgeRequest;

const PURGE_AFTER_MS: u64 = 60_000;

fn removed(version: u64) -> ChunkState {
    ChunkState { length: 0, checksum: Checksum(0), removed: true, ..state(version, tags(version)) }
}

/// The head of two replicas, which has just removed the chunk by version 5.
fn head_with_a_removed_chunk() -> Bench {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    bench.give(Event::Lease { valid_until: Millis(10 * PURGE_AFTER_MS) });
    bench.tick();
    bench.set(state(4, tags(4)), None);
    let request = UpdateRequest {
        to: bench.to(1),
        chunk: CHUNK,
        tag: RequestTag { sequence: TAG.sequence + 1, ..TAG },
        change: ContentChange::Remove,
        payload_checksum: Checksum::of(b""),
        chunk_bytes: 65_536,
    };
    let (op, _) = apply_op(&bench.ask(StorageRequest::Update(request), b""));
    bench.set(state(4, tags(4)), Some(removed(5)));
    bench.answer_prepares();
    let (call, ..) =
        call_of(&bench.give(Event::Applied { op, unsent: false, result: Ok(removed(5)) }));
    let updated = Updated { version: ChunkVersion(5), ..Updated::nothing() };
    bench.answer(call, Ok(StorageReply::Updated(updated)));
    bench.set(removed(5), None);
    bench.give(Event::Committed { op, result: Ok(removed(5)) });
    bench
}

impl Bench {
    fn tick(&mut self) -> Vec<Action> {
        self.give(Event::Tick)
    }

    fn purge(&mut self, me: u64, from: u64, version: u64, number: u64) -> Vec<Action> {
        let (to, from) = (self.to(me), TargetId(from));
        let version = ChunkVersion(version);
        let request = PurgeRequest { to, from, chunk: CHUNK, version, number, hop: 1 };
        self.ask(StorageRequest::Purge(request), b"")
    }

    fn purged(&mut self, op: OpId, version: u64) -> Vec<Action> {
        self.metas.0.clear();
        self.metas.2 = ChunkVersion(version);
        self.give(Event::Forgotten { op, result: Ok(()) })
    }

    /// A forward of an update without earlier content.
    fn fresh(&mut self, me: u64, from: u64, version: u64, purges: u64) -> Vec<Action> {
        let request = forward_request(self.to(me), from, version);
        let request = ForwardRequest { fresh: true, purges, ..request };
        self.ask(StorageRequest::Forward(request), b"data")
    }
}

fn purge_op(actions: &[Action]) -> OpId {
    match actions {
        [Action::Purge { op, chunk: CHUNK, version: ChunkVersion(5) }] => *op,
        other => panic!("expected one purge, got {other:?}"),
    }
}

#[test]
fn the_head_purges_after_its_successor_and_continues_with_a_higher_version() {
    let mut bench = head_with_a_removed_chunk();
    bench.now += PURGE_AFTER_MS - 1;
    assert!(bench.tick().is_empty(), "a repeated update may still come");
    bench.now += 1;
    let (call, node, request) = call_of(&bench.tick());
    assert_eq!(node, NodeId(2));
    assert!(matches!(request, StorageRequest::Purge(purge)
        if purge.version == ChunkVersion(5) && purge.number == 1));
    let updated = Updated { version: ChunkVersion(5), ..Updated::nothing() };
    let op = purge_op(&bench.answer(call, Ok(StorageReply::Updated(updated))));
    assert!(bench.purged(op, 5).is_empty());
    assert!(bench.replica.is_idle());
    let (op, update) = apply_op(&bench.update(1, RequestTag { sequence: 9, ..TAG }));
    assert_eq!(update.version, ChunkVersion(6));
    let (_, _, request) = call_of(&bench.applied(op, 6));
    assert!(matches!(request, StorageRequest::Confirm(confirmed)
        if confirmed.fresh && confirmed.purges == 1));
}

#[test]
fn an_update_waits_for_a_purge_no_longer_than_for_its_answer() {
    let mut bench = head_with_a_removed_chunk();
    bench.now += PURGE_AFTER_MS;
    call_of(&bench.tick());
    let later = RequestTag { sequence: 9, ..TAG };
    assert!(bench.update(1, later).is_empty(), "the lane is taken");
    bench.now += bench.replica.config.call_timeout_ms;
    let (_, update) = apply_op(&bench.tick());
    assert_eq!(update.version, ChunkVersion(6), "the chunk is still known");
}

#[test]
fn a_failed_purge_is_retried() {
    let mut bench = head_with_a_removed_chunk();
    bench.now += PURGE_AFTER_MS;
    let (call, ..) = call_of(&bench.tick());
    assert!(bench.answer(call, Err(PeerFailure::Unreachable)).is_empty());
    assert!(bench.replica.is_idle());
    bench.now += PURGE_AFTER_MS;
    let (.., request) = call_of(&bench.tick());
    assert!(matches!(request, StorageRequest::Purge(purge) if purge.number == 2));
}

#[test]
fn a_sync_transfers_the_version_floor_before_it_compares() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.metas.2 = ChunkVersion(5);
    let starts = bench.give(Event::Routing(chain(4, &[(1, Serving), (2, Syncing)])));
    let (call, _, request) = call_of(&starts);
    let StorageRequest::SyncStart(SyncStart { round, .. }) = request else { panic!("{request:?}") };
    let session = SyncSession::default();
    let (call, _, request) =
        call_of(&bench.answer(call, Ok(StorageReply::SyncStarted { session, round })));
    assert!(matches!(request, StorageRequest::ForgetInodes(forget)
        if forget.version_floor == ChunkVersion(5)));
    let (.., request) = call_of(&bench.answer(call, Ok(StorageReply::InodesForgotten)));
    assert!(matches!(request, StorageRequest::SyncMetas(_)));
}

#[test]
fn a_rewritten_chunk_is_not_purged() {
    let mut bench = head_with_a_removed_chunk();
    bench.set(state(6, tags(6)), None);
    bench.now += PURGE_AFTER_MS;
    assert!(bench.tick().is_empty());
    // A late request does not remove it either.
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.set(state(6, tags(6)), None);
    let error = error_of(&bench.purge(2, 1, 5, 1));
    assert!(matches!(error, StorageError::ChunkConflict { .. }));
}

#[test]
fn a_new_head_purges_chunks_removed_under_its_predecessor() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    bench.give(Event::Lease { valid_until: Millis(10 * PURGE_AFTER_MS) });
    bench.set(removed(5), None);
    bench.give(Event::Routing(chain(4, &[(1, Serving), (2, Serving)])));
    bench.tick();
    bench.now += PURGE_AFTER_MS;
    let (.., request) = call_of(&bench.tick());
    assert!(matches!(request, StorageRequest::Purge(purge) if purge.chunk == CHUNK));
}

#[test]
fn purges_wait_while_a_replica_is_syncing() {
    let mut bench = head_with_a_removed_chunk();
    bench.give(Event::Routing(chain(4, &[(1, Serving), (2, Syncing)])));
    bench.now += PURGE_AFTER_MS;
    let is_purge = |action: &Action| {
        matches!(action, Action::Call { request: StorageRequest::Purge(_), .. })
            || matches!(action, Action::Purge { .. })
    };
    assert!(!bench.tick().iter().any(is_purge));
    bench.now += PURGE_AFTER_MS;
    assert!(!bench.tick().iter().any(is_purge));
}

#[test]
fn a_replica_between_two_others_purges_after_its_successor() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(removed(5), None);
    let (call, node, request) = call_of(&bench.purge(2, 1, 5, 7));
    assert_eq!(node, NodeId(3));
    assert!(request.class() > 1, "{request:?} needs a higher class than its own request");
    let updated = Updated { version: ChunkVersion(5), ..Updated::nothing() };
    let op = purge_op(&bench.answer(call, Ok(StorageReply::Updated(updated))));
    match &bench.purged(op, 5)[..] {
        [Action::Reply { result: Ok(StorageReply::Updated(done)), .. }] => {
            assert_eq!(done.version, ChunkVersion(5));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_forward_from_before_a_purge_is_refused_and_a_later_one_accepted() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.set(removed(5), None);
    let op = purge_op(&bench.purge(2, 1, 5, 7));
    bench.purged(op, 5);
    let late = error_of(&bench.fresh(2, 1, 1, 6));
    assert_eq!(late, StorageError::Busy { target: TargetId(2) });
    assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::UpToDate);
    let (_, update) = apply_op(&bench.fresh(2, 1, 9, 7));
    assert_eq!(update.version, ChunkVersion(9));
}

#[test]
fn an_update_of_a_chunk_that_a_replica_lacks_is_still_a_mismatch() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.forward(2, 1, 9);
    assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::Online);
}

#[test]
fn a_removed_version_is_not_purged_while_an_older_one_exists() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (older, newer) = (CHUNK, CHUNK.in_epoch(Epoch::new(1, 3)));
    let meta = |chunk, committed| (chunk, ChunkMeta { chunk, committed, pending: None });
    bench.metas.0.extend([meta(older, state(4, tags(4))), meta(newer, removed(5))]);
    let (to, from, version) = (bench.to(2), TargetId(1), ChunkVersion(5));
    let request = PurgeRequest { to, from, chunk: newer, version, number: 1, hop: 1 };
    let refused = error_of(&bench.ask(StorageRequest::Purge(request), b""));
    assert_eq!(refused, StorageError::ChunkConflict { chunk: newer, version });
    bench.metas.0.remove(&older);
    let actions = bench.ask(StorageRequest::Purge(request), b"");
    assert!(matches!(actions[..], [Action::Purge { chunk, .. }] if chunk == newer), "{actions:?}");
}
