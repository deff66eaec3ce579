//! Unit tests of one replica: prepared updates.

use super::fence::{drained, fence};
use super::*;

const SERVING: [(u64, PublicState); 3] = [(1, Serving), (2, Serving), (3, Serving)];

fn prepare_of(actions: &[Action]) -> Prepare {
    match actions {
        [Action::Apply { prepare: Some(prepare), .. }] => prepare.clone(),
        other => panic!("expected an apply that prepares the successor, got {other:?}"),
    }
}

fn refused(error: StorageError) -> Result<StorageReply, PeerFailure> {
    Err(PeerFailure::Refused(error))
}

fn unprepared(version: u64) -> Result<StorageReply, PeerFailure> {
    refused(StorageError::NotPrepared { chunk: CHUNK, update: ChunkVersion(version) })
}

fn replies(actions: &[Action]) -> Vec<Result<StorageReply, StorageError>> {
    let of_reply = |action: &Action| match action {
        Action::Reply { result, .. } => Some(result.clone()),
        _ => None,
    };
    actions.iter().filter_map(of_reply).collect()
}

fn is_demoted(bench: &Bench) -> bool {
    bench.replica.report(Millis(bench.now)).state == LocalState::Online
}

impl Bench {
    fn prepare(&mut self, me: u64, version: u64) -> Vec<Action> {
        let request = forward_request(self.to(me), me - 1, version);
        let request = ForwardRequest { chunk_checksum: Checksum(0), ..request };
        self.ask(StorageRequest::Prepare(request), b"data")
    }

    fn confirm(&mut self, me: u64, version: u64, chunk_checksum: Checksum) -> Vec<Action> {
        let request = forward_request(self.to(me), me - 1, version);
        self.ask(StorageRequest::Confirm(ForwardRequest { chunk_checksum, ..request }), b"")
    }

    /// Target 2 of three, with update 1 prepared; its successor has not answered.
    fn preparing() -> (Self, CallId) {
        let mut bench = Self::serving(2, 3, &SERVING);
        let (op, _) = apply_op(&bench.prepare(2, 1));
        let prepare = bench.prepares.pop().unwrap();
        bench.applied(op, 1);
        (bench, prepare)
    }

    /// Target 2 of three, with update 1 prepared.
    fn prepared() -> Self {
        let mut bench = Self::serving(2, 3, &SERVING);
        let (op, _) = apply_op(&bench.prepare(2, 1));
        assert_eq!(replies(&bench.applied(op, 1)), [Ok(StorageReply::Prepared)]);
        assert!(bench.replica.is_idle());
        bench
    }
}

#[test]
fn the_successor_is_sent_an_update_while_it_is_applied() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let actions = bench.update(1, TAG);
    let Prepare { node, request, .. } = prepare_of(&actions);
    assert_eq!((node, request.version, request.tag), (NodeId(2), ChunkVersion(1), TAG));
    assert_eq!(request.payload_checksum, Checksum::of(b"data"));
}

#[test]
fn an_update_is_confirmed_once_the_successor_has_prepared_it() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let actions = bench.update(1, TAG);
    let (prepare, (op, _)) = (prepare_of(&actions), apply_op(&actions));
    bench.prepares.clear();
    assert!(bench.applied(op, 1).is_empty(), "otherwise it would be sent twice");
    let (_, node, request) = call_of(&bench.answer(prepare.call, Ok(StorageReply::Prepared)));
    let StorageRequest::Confirm(request) = request else { panic!("{request:?}") };
    assert_eq!((node, request.chunk_checksum), (NodeId(2), Checksum::of(b"data")));
}

#[test]
fn an_update_that_the_successor_did_not_prepare_is_forwarded_at_once() {
    let busy = || refused(StorageError::Busy { target: TargetId(2) });
    for is_early in [true, false] {
        let mut bench = Bench::serving(1, 3, &SERVING);
        let actions = bench.update(1, TAG);
        let (prepare, (op, _)) = (prepare_of(&actions), apply_op(&actions));
        bench.prepares.clear();
        let actions = if is_early {
            assert!(bench.answer(prepare.call, busy()).is_empty());
            bench.applied(op, 1)
        } else {
            assert!(bench.applied(op, 1).is_empty());
            bench.answer(prepare.call, busy())
        };
        let (_, _, request) = call_of(&actions);
        assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    }
    // It has restarted meanwhile.
    let mut bench = Bench::serving(1, 3, &SERVING);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let lost = refused(StorageError::NotPrepared { chunk: CHUNK, update: ChunkVersion(1) });
    let (_, _, request) = call_of(&bench.answer(call, lost));
    let StorageRequest::Forward(request) = request else { panic!("{request:?}") };
    assert_eq!(request.chunk_checksum, Checksum::of(b"data"));
}

#[test]
fn an_update_whose_prepare_was_left_out_is_forwarded_at_once() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let actions = bench.update(1, TAG);
    let (prepare, (op, _)) = (prepare_of(&actions), apply_op(&actions));
    assert!(prepare.is_optional);
    let made = state(1, tags(1));
    bench.set(ChunkState::default(), Some(made.clone()));
    let actions = bench.give(Event::Applied { op, result: Ok(made), unsent: true });
    let (_, _, request) = call_of(&actions);
    assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    // Otherwise the predecessor, whose confirmation it could not pass on, would send the bytes again.
    let mut bench = Bench::serving(2, 3, &SERVING);
    assert!(!prepare_of(&bench.prepare(2, 1)).is_optional);
}

#[test]
fn a_successor_that_does_not_answer_is_not_prepared_for_a_while() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let prepare = bench.prepares.pop().unwrap();
    bench.answer(prepare, Err(PeerFailure::Unreachable));
    let (call, _, request) = call_of(&bench.applied(op, 1));
    assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    bench.answer(call, Ok(updated_reply(1)));
    bench.committed(op, 1);
    let later = |sequence| RequestTag { sequence, ..TAG };
    bench.now += bench.replica.config.call_timeout_ms - 1;
    let actions = bench.update(1, later(8));
    assert!(matches!(actions[..], [Action::Apply { prepare: None, .. }]), "{actions:?}");
    let (op, _) = apply_op(&actions);
    let (call, _, request) = call_of(&bench.applied(op, 2));
    assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    bench.answer(call, Ok(updated_reply(2)));
    bench.committed(op, 2);
    bench.now += 1;
    prepare_of(&bench.update(1, later(9)));
    // Also if its answer is lost.
    let (op, _) = (bench.replica.ops.keys().next().copied().unwrap(), bench.prepares.clear());
    assert!(bench.applied(op, 3).is_empty());
    bench.now += bench.replica.config.call_timeout_ms;
    let (_, _, request) = call_of(&bench.give(Event::Tick));
    assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    assert_eq!(bench.replica.calls.len(), 1, "the prepare is given up");
}

#[test]
fn a_prepared_update_waits_for_its_predecessor_and_then_confirms_its_successor() {
    let mut bench = Bench::prepared();
    let actions = bench
        .give(Event::Routing(chain(4, &[(1, Serving), (2, Serving), (3, Serving), (4, Syncing)])));
    assert!(actions.is_empty(), "its predecessor may not have it: {actions:?}");
    let mut bench = Bench::prepared();
    let (_, node, request) = call_of(&bench.confirm(2, 1, Checksum::of(b"data")));
    assert_eq!(node, NodeId(3));
    assert!(matches!(request, StorageRequest::Confirm(_)), "{request:?}");
}

#[test]
fn a_new_head_completes_a_prepared_update() {
    let mut bench = Bench::prepared();
    let routing = Event::Routing(chain(4, &[(2, Serving), (3, Serving), (1, Offline)]));
    // The successor of the former chain version may lack it: it is asked, and sent the whole chunk.
    let (call, _, request) = call_of(&bench.give(routing));
    assert!(matches!(request, StorageRequest::Confirm(_)), "{request:?}");
    // It has not got the new routing yet: it is asked again.
    let behind = StorageError::ChainVersionMismatch {
        chain: ChainId(1),
        request_version: ChainVersion(4),
        replica_version: ChainVersion(3),
    };
    bench.answer(call, refused(behind));
    bench.now += bench.replica.config.retry_wait_ms_max;
    let (call, _, request) = call_of(&bench.give(Event::Tick));
    assert!(matches!(request, StorageRequest::Confirm(_)), "{request:?}");
    let actions = bench.answer(call, unprepared(1));
    assert!(matches!(actions[..], [Action::ReadContent { which: Which::Newest, .. }]));
    // Also one that is not durable yet when the predecessor leaves.
    let mut bench = Bench::serving(2, 3, &SERVING);
    let (op, _) = apply_op(&bench.prepare(2, 1));
    bench.give(Event::Routing(chain(4, &[(2, Serving), (3, Serving), (1, Offline)])));
    // The client's retry is not answered by the end of the prepare.
    assert!(bench.update(2, TAG).is_empty());
    let (call, _, request) = call_of(&bench.applied(op, 1));
    assert!(matches!(request, StorageRequest::Forward(_)), "{request:?}");
    bench.answer(call, Ok(updated_reply(1)));
    let done = replies(&bench.committed(op, 1));
    assert!(
        matches!(done[..], [Ok(StorageReply::Prepared), Ok(StorageReply::Updated(_))]),
        "{done:?}"
    );
}

#[test]
fn a_confirmation_of_other_content_makes_the_replica_stop_serving() {
    let mut bench = Bench::prepared();
    let actions = bench.confirm(2, 1, Checksum(7));
    let mismatch = replies(&actions);
    assert!(matches!(mismatch[..], [Err(StorageError::ChecksumMismatch { .. })]), "{mismatch:?}");
    assert!(is_demoted(&bench));
}

#[test]
fn a_confirmation_of_an_unknown_update_is_refused_without_effect() {
    let mut bench = Bench::serving(2, 3, &SERVING);
    let error = error_of(&bench.confirm(2, 1, Checksum::of(b"data")));
    assert_eq!(error, StorageError::NotPrepared { chunk: CHUNK, update: ChunkVersion(1) });
    // A forward decides whether the replicas disagree, not the messages before it.
    let error = error_of(&bench.prepare(2, 5));
    assert!(matches!(error, StorageError::ChunkMissingUpdate { .. }), "{error}");
    assert!(!is_demoted(&bench));
}

#[test]
fn an_update_that_fails_before_it_is_sent_ends() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let actions = bench.update(1, TAG);
    let (prepare, (op, _)) = (prepare_of(&actions), apply_op(&actions));
    let full = || Err(StoreError::NoSpace { needed_bytes: 4 });
    let actions = bench.give(Event::Applied { op, result: full(), unsent: true });
    assert_eq!(error_of(&actions), StorageError::NoSpace { target: TargetId(1) });
    assert!(bench.replica.is_idle());
    assert!(bench.answer(prepare.call, Ok(StorageReply::Prepared)).is_empty());
}

#[test]
fn the_head_keeps_an_update_that_its_successor_may_have_until_there_is_space() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let (op, first) = apply_op(&bench.update(1, TAG));
    let full = || Err(StoreError::NoSpace { needed_bytes: 4 });
    let actions = bench.give(Event::Applied { op, result: full(), unsent: false });
    assert!(matches!(actions[..], [Action::Alert(Alert::Full { .. }), Action::Reply { .. }]));
    assert_eq!(replies(&actions), [Err(StorageError::NoSpace { target: TargetId(1) })]);
    let other = RequestTag { sequence: TAG.sequence + 1, ..TAG };
    assert!(bench.update(1, other).is_empty(), "it waits for the one before it");
    for _ in 0..3 {
        bench.now += 1_000;
        let (again, update) = apply_op(&bench.give(Event::Tick));
        assert_eq!((again, update), (op, first.clone()), "with the same version");
        bench.give(Event::Applied { op, result: full(), unsent: false });
    }
    bench.now += 1_000;
    apply_op(&bench.give(Event::Tick));
    let (call, _, request) = call_of(&bench.applied(op, 1));
    assert!(matches!(request, StorageRequest::Confirm(_)), "{request:?}");
    bench.answer(call, Ok(updated_reply(1)));
    let actions = bench.committed(op, 1);
    let (_, update) = apply_op(&actions);
    assert_eq!(update.version, ChunkVersion(2));
}

#[test]
fn a_file_is_removed_although_an_update_of_it_waits_for_space() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let forget = |bench: &Bench| {
        let inodes = vec![InodeRange::one(CHUNK.inode)];
        StorageRequest::ForgetInodes(ForgetInodes::of_head(bench.to(1), inodes))
    };
    let request = forget(&bench);
    assert!(matches!(error_of(&bench.ask(request, b"")), StorageError::Busy { .. }));
    let full = Err(StoreError::NoSpace { needed_bytes: 4 });
    bench.give(Event::Applied { op, result: full, unsent: false });
    let request = forget(&bench);
    let actions = bench.ask(request, b"");
    assert!(matches!(actions[..], [Action::ForgetInodes { .. }]), "{actions:?}");
    bench.now += 1_000;
    assert!(bench.give(Event::Tick).is_empty(), "it is not made any more");
    assert_eq!(bench.replica.ops.len(), 1, "the removal may still fail");
    bench.metas.1.insert(InodeRange::one(CHUNK.inode));
    bench.now += 1_000;
    assert!(bench.give(Event::Tick).is_empty());
    assert!(bench.replica.ops.is_empty());
}

#[test]
fn a_head_that_cannot_apply_an_announced_update_leaves() {
    let mut bench = Bench::serving(1, 3, &SERVING);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let damaged = Err(StoreError::Corrupt { chunk: CHUNK, block: 0 });
    let actions = bench.give(Event::Applied { op, result: damaged, unsent: false });
    assert!(matches!(replies(&actions)[..], [Err(StorageError::NotServing { .. })]), "{actions:?}");
    assert!(is_demoted(&bench));
    // Alone it repairs the chunk, and stays.
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Offline)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let damaged = Err(StoreError::Corrupt { chunk: CHUNK, block: 0 });
    bench.give(Event::Applied { op, result: damaged, unsent: false });
    assert!(!is_demoted(&bench));
}

#[test]
fn a_new_head_that_lacks_an_update_that_it_has_announced_leaves() {
    for is_repaired in [false, true] {
        let mut bench = Bench::serving(2, 3, &SERVING);
        let (op, _) = apply_op(&bench.prepare(2, 1));
        let full = Err(StoreError::NoSpace { needed_bytes: 4 });
        bench.give(Event::Applied { op, result: full, unsent: false });
        if is_repaired {
            let (op, _) = apply_op(&bench.forward(2, 1, 1));
            bench.applied(op, 1);
        }
        bench.give(Event::Routing(chain(4, &[(2, Serving), (3, Serving), (1, Offline)])));
        assert_eq!(is_demoted(&bench), !is_repaired);
    }
    // It may also become the head before the update fails.
    let mut bench = Bench::serving(2, 3, &SERVING);
    let (op, _) = apply_op(&bench.prepare(2, 1));
    bench.give(Event::Routing(chain(4, &[(2, Serving), (3, Serving), (1, Offline)])));
    let full = Err(StoreError::NoSpace { needed_bytes: 4 });
    bench.give(Event::Applied { op, result: full, unsent: false });
    assert!(is_demoted(&bench));
}

#[test]
fn a_replica_that_syncs_its_successor_anew_may_become_the_head() {
    let mut bench = Bench::serving(2, 3, &SERVING);
    let (op, _) = apply_op(&bench.prepare(2, 1));
    let full = Err(StoreError::NoSpace { needed_bytes: 4 });
    bench.give(Event::Applied { op, result: full, unsent: false });
    bench.give(Event::Routing(chain(4, &[(1, Serving), (2, Serving), (3, Syncing)])));
    bench.give(Event::Routing(chain(5, &SERVING)));
    bench.give(Event::Routing(chain(6, &[(2, Serving), (3, Serving), (1, Offline)])));
    assert!(!is_demoted(&bench));
}

#[test]
fn a_delayed_copy_of_an_earlier_forward_does_not_contradict_a_prepared_update() {
    let mut bench = Bench::serving(2, 3, &SERVING);
    bench.set(state(1, tags(1)), None);
    let (op, _) = apply_op(&bench.prepare(2, 2));
    bench.applied(op, 2);
    let error = error_of(&bench.forward(2, 1, 1));
    assert!(matches!(error, StorageError::ChunkStaleUpdate { .. }), "{error}");
    assert!(!is_demoted(&bench));
}

#[test]
fn a_sync_sends_a_prepared_chunk_once_it_is_confirmed() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.prepare(2, 1));
    bench.applied(op, 1);
    let routing = Event::Routing(chain(4, &[(1, Serving), (2, Serving), (3, Syncing)]));
    let (start, ..) = call_of(&bench.give(routing));
    let session = SyncSession { incarnation: Incarnation(5), number: 1 };
    let started = StorageReply::SyncStarted { session, round: 1 };
    let (metas, ..) = call_of(&bench.answer(start, Ok(started)));
    let none = StorageReply::Metas { metas: Vec::new(), last: true };
    assert!(bench.answer(metas, Ok(none.clone())).is_empty(), "it waits");
    bench.now += bench.replica.config.retry_wait_ms;
    assert!(bench.give(Event::Tick).is_empty(), "it waits longer");
    let actions = bench.confirm(2, 1, Checksum::of(b"data"));
    assert!(matches!(actions[..], [Action::ReadContent { .. }]), "a whole chunk: {actions:?}");
}

#[test]
fn later_prepared_updates_do_not_delay_the_confirmation_of_fences() {
    let mut bench = Bench::prepared();
    bench.give(fence(1));
    assert_eq!(drained(&bench), 0, "it may be of an epoch that has ended");
    let chunk = ChunkId::new(CHUNK.inode, 1);
    let request = ForwardRequest { chunk, ..forward_request(bench.to(2), 1, 1) };
    let (op, _) = apply_op(&bench.ask(StorageRequest::Prepare(request), b"data"));
    let pending = state(1, tags(1));
    let meta = ChunkMeta { pending: Some(pending.clone()), ..ChunkMeta::absent(chunk) };
    bench.metas.0.insert(chunk, meta);
    bench.give(Event::Applied { op, result: Ok(pending), unsent: false });
    let (call, ..) = call_of(&bench.confirm(2, 1, Checksum::of(b"data")));
    let [Action::Commit { op, .. }] = bench.answer(call, Ok(updated_reply(1)))[..] else {
        panic!("expected a commit")
    };
    assert_eq!(drained(&bench), 0);
    bench.committed(op, 1);
    assert_eq!(drained(&bench), 1, "the other one is of a later update");
}

/// The call of a forward with these bytes.
fn forwarded(actions: &[Action]) -> (CallId, Bytes) {
    match actions {
        [Action::Call { call, request: StorageRequest::Forward(_), payload, .. }] => {
            (*call, payload.clone())
        }
        other => panic!("expected a forward, got {other:?}"),
    }
}

#[test]
fn bytes_that_the_successor_lacks_come_from_the_predecessor() {
    // Its prepare fails before, or after, the predecessor confirms.
    for fails_first in [true, false] {
        let (mut bench, prepare) = Bench::preparing();
        let lost = StorageError::NotPrepared { chunk: CHUNK, update: ChunkVersion(1) };
        let answers = if fails_first {
            bench.answer(prepare, Err(PeerFailure::Unreachable));
            bench.confirm(2, 1, Checksum::of(b"data"))
        } else {
            assert!(bench.confirm(2, 1, Checksum::of(b"data")).is_empty(), "it waits");
            bench.answer(prepare, Err(PeerFailure::Unreachable))
        };
        assert_eq!(replies(&answers), [Err(lost)], "no chunk is read: {answers:?}");
        let request = forward_request(bench.to(2), 1, 1);
        let request = ForwardRequest { chunk_checksum: Checksum::of(b"data"), ..request };
        let actions = bench.ask(StorageRequest::Forward(request), b"data");
        let (call, payload) = forwarded(&actions);
        assert_eq!(payload, b"data"[..]);
        bench.answer(call, Ok(updated_reply(1)));
    }
}

#[test]
fn a_forward_brings_the_bytes_for_a_confirmation_in_progress() {
    let mut bench = Bench::prepared();
    let (confirm, ..) = call_of(&bench.confirm(2, 1, Checksum::of(b"data")));
    let request = forward_request(bench.to(2), 1, 1);
    let request = ForwardRequest { chunk_checksum: Checksum::of(b"data"), ..request };
    assert!(bench.ask(StorageRequest::Forward(request), b"data").is_empty());
    let (_, payload) = forwarded(&bench.answer(confirm, unprepared(1)));
    assert_eq!(payload, b"data"[..]);
}

#[test]
fn a_replica_that_does_not_prepare_its_successor_refuses_prepares() {
    let (mut bench, prepare) = Bench::preparing();
    bench.answer(prepare, Err(PeerFailure::Unreachable));
    let chunk = ChunkId::new(InodeId(5), 1);
    let request = ForwardRequest { chunk, ..forward_request(bench.to(2), 1, 1) };
    let refusal = replies(&bench.ask(StorageRequest::Prepare(request), b"data"));
    assert_eq!(refusal, [Err(StorageError::Busy { target: TargetId(2) })]);
    // Its predecessor does not send it the bytes twice for a while.
    let mut head = Bench::serving(1, 3, &SERVING);
    let prepare = prepare_of(&head.update(1, TAG));
    head.answer(prepare.call, refused(StorageError::Busy { target: TargetId(2) }));
    let request = UpdateRequest {
        to: head.to(1),
        chunk,
        tag: RequestTag { sequence: TAG.sequence + 1, ..TAG },
        change: ContentChange::Write { offset: 0 },
        payload_checksum: Checksum::of(b"data"),
        chunk_bytes: 65_536,
    };
    let actions = head.ask(StorageRequest::Update(request), b"data");
    assert!(matches!(actions[..], [Action::Apply { prepare: None, .. }]), "{actions:?}");
}
