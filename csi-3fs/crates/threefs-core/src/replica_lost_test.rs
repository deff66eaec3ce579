//! Unit tests of one replica: chunks whose content no replica can read.

use super::*;

const SESSION: SyncSession = SyncSession { incarnation: Incarnation(3), number: 1 };

fn damaged(op: OpId) -> Event {
    Event::Content { op, result: Err(StoreError::Corrupt { chunk: CHUNK, block: 0 }) }
}

/// The head of a chain whose successor starts a sync, and the actions when the session is known.
fn syncing(bench: &mut Bench) -> Vec<Action> {
    bench.give(Event::Routing(chain(4, &[(1, LastSrv)])));
    bench.give(Event::Lease { valid_until: Millis(100_000) });
    let (start, ..) = call_of(&bench.give(Event::Routing(chain(5, &[(1, Serving), (2, Syncing)]))));
    bench.answer(start, Ok(StorageReply::SyncStarted { session: SESSION, round: 1 }))
}

/// Starts the copy of the chunk, which the successor has only as a pending update.
fn copies(bench: &mut Bench) -> OpId {
    bench.set(state(1, tags(1)), None);
    let (metas, ..) = call_of(&syncing(bench));
    let committed = ChunkState::default();
    let pending = Some(state(1, tags(1)));
    let metas_of_successor = vec![ChunkMeta { chunk: CHUNK, committed, pending }];
    let reply = StorageReply::Metas { metas: metas_of_successor, last: true };
    let actions = bench.answer(metas, Ok(reply));
    let [Action::ReadContent { op, which: Which::Committed, .. }] = actions[..] else {
        panic!("{actions:?}")
    };
    op
}

/// The request without content that a damaged content causes.
fn without_content(bench: &mut Bench, op: OpId) -> CallId {
    let actions = bench.give(damaged(op));
    match &actions[..] {
        [.., Action::Call { call, request: StorageRequest::Replace(request), payload, .. }] => {
            let expected = state(1, tags(1));
            assert!(payload.is_empty());
            assert_eq!((request.version, &request.tags), (expected.version, &expected.tags));
            assert_eq!(request.checksum, expected.checksum);
            *call
        }
        other => panic!("{other:?}"),
    }
}

fn refused() -> Result<StorageReply, PeerFailure> {
    let (expected, computed) = (Checksum::of(b"data"), Checksum(0));
    let error = StorageError::ChecksumMismatch { chunk: CHUNK, expected, computed };
    Err(PeerFailure::Refused(error))
}

#[test]
fn a_sync_ends_if_the_successor_has_the_state_of_a_damaged_chunk() {
    let mut bench = Bench::new(1);
    let op = copies(&mut bench);
    let call = without_content(&mut bench, op);
    let actions = bench.answer(call, Ok(updated_reply(1)));
    let done = |action: &Action| {
        matches!(action, Action::Call { request: StorageRequest::SyncDone(_), .. })
    };
    let repair =
        |action: &Action| matches!(action, Action::Call { request: StorageRequest::Repair(_), .. });
    assert!(actions.iter().any(done), "{actions:?}");
    assert!(actions.iter().any(repair), "the successor's content may be intact: {actions:?}");
}

#[test]
fn a_sync_waits_for_a_damaged_chunk_that_the_successor_lacks_and_updates_continue() {
    let mut bench = Bench::new(1);
    let op = copies(&mut bench);
    let call = without_content(&mut bench, op);
    let actions = bench.answer(call, refused());
    let [Action::Alert(Alert::Damaged { .. }), Action::Call { call: repair, .. }] = actions[..]
    else {
        panic!("{actions:?}")
    };
    let actions = bench.answer(repair, refused());
    assert!(matches!(actions[..], [Action::Alert(Alert::NotRepaired { .. })]), "{actions:?}");
    assert!(bench.replica.is_idle(), "updates of the chunk can start");
    bench.now = 60_000;
    let actions = bench.give(Event::Tick);
    assert!(matches!(actions[..], [Action::ReadContent { .. }]), "again: {actions:?}");
}

#[test]
fn a_pending_update_that_is_damaged_is_committed_if_the_successor_has_it() {
    let mut bench = Bench::new(1);
    bench.set(ChunkState::default(), Some(state(1, tags(1))));
    let actions = syncing(&mut bench);
    let [Action::Call { .. }, Action::ReadContent { op, which: Which::Newest, .. }] = actions[..]
    else {
        panic!("{actions:?}")
    };
    let call = without_content(&mut bench, op);
    assert!(matches!(bench.answer(call, Ok(updated_reply(1)))[..], [Action::Commit { .. }]));
    let mut bench = Bench::new(2);
    bench.give(Event::Routing(chain(1, &[(2, LastSrv)])));
    bench.set(ChunkState::default(), Some(state(1, tags(1))));
    let actions = bench.give(Event::Routing(chain(3, &[(2, Serving), (3, Serving), (1, Offline)])));
    let [Action::Call { call, request: StorageRequest::Confirm(_), .. }] = actions[..] else {
        panic!("{actions:?}")
    };
    let lacks = StorageError::NotPrepared { chunk: CHUNK, update: ChunkVersion(1) };
    let actions = bench.answer(call, Err(PeerFailure::Refused(lacks)));
    let [Action::ReadContent { op, .. }] = actions[..] else { panic!("{actions:?}") };
    let actions = bench.give(damaged(op));
    let [.., Action::Call { call, request: StorageRequest::Forward(request), payload, .. }] =
        &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert!(payload.is_empty() && request.payload_checksum == Checksum::of(b"data"));
    assert!(bench.answer(*call, refused()).is_empty(), "the successor lacks it: it stays pending");
}

/// Replies of a SYNCING target with this chunk to a request without content.
fn receives(committed: ChunkState, pending: Option<ChunkState>) -> (Bench, Vec<Action>) {
    let mut bench = Bench::new(1);
    bench.set(committed, pending);
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing)])));
    let to = bench.to(1);
    let start = StorageRequest::SyncStart(SyncStart { to, from: TargetId(2), round: 1 });
    let session = match &bench.ask(start, b"")[..] {
        [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] => *session,
        other => panic!("{other:?}"),
    };
    let request = ReplaceRequest {
        to,
        from: TargetId(2),
        session,
        sequence: 1,
        chunk: CHUNK,
        version: ChunkVersion(6),
        removed: false,
        tags: tags(6),
        checksum: Checksum::of(b"data"),
    };
    let actions = bench.ask(StorageRequest::Replace(request), b"");
    (bench, actions)
}

#[test]
fn a_request_without_content_confirms_only_the_same_state() {
    let same = || state(6, tags(6));
    let (mut bench, actions) = receives(state(5, tags(5)), Some(same()));
    let [Action::Commit { op, version: ChunkVersion(6), .. }] = actions[..] else {
        panic!("{actions:?}")
    };
    let actions = bench.committed(op, 6);
    let confirmed = |actions: &[Action]| match actions {
        [Action::Reply { result: Ok(StorageReply::Updated(reply)), .. }] => {
            (reply.version, reply.checksum) == (ChunkVersion(6), Checksum::of(b"data"))
        }
        _ => false,
    };
    assert!(confirmed(&actions), "{actions:?}");
    assert!(confirmed(&receives(same(), None).1));
    let content = ChunkState { checksum: Checksum(7), ..same() };
    let removed = ChunkState { removed: true, ..same() };
    for (committed, pending) in [
        (ChunkState::default(), None),
        (state(5, tags(5)), None),
        (state(7, tags(7)), None),
        (state(6, tags(5)), None),
        (content.clone(), None),
        (removed, None),
        (state(5, tags(5)), Some(content)),
        (same(), Some(state(7, tags(7)))),
    ] {
        let (bench, actions) = receives(committed, pending);
        assert!(matches!(error_of(&actions), StorageError::ChecksumMismatch { .. }));
        assert!(bench.replica.is_idle());
    }
}
