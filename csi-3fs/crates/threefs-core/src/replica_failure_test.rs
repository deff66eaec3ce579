//! Unit tests of one replica: failures of peers and stores, and changes of the chain.

use super::*;

#[test]
fn a_silent_successor_gets_retries_until_the_chain_excludes_it() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (first, node, _) = call_of(&bench.applied(op, 1));
    assert_eq!(node, NodeId(2));
    assert_eq!(bench.replica.next_wakeup(), Some(Millis(101)), "every wait has a timeout");
    bench.now = 101;
    let (second, node, _) = call_of(&bench.give(Event::Tick));
    assert_eq!(node, NodeId(2));
    assert!(
        bench.answer(first, Ok(updated_reply(1))).is_empty(),
        "given up, however late it comes"
    );
    let routing = Event::Routing(chain(4, &[(1, Serving), (3, Serving), (2, Offline)]));
    let (third, node, _) = call_of(&bench.give(routing));
    assert_eq!(node, NodeId(3));
    assert!(
        bench.answer(second, Ok(updated_reply(1))).is_empty(),
        "an answer for a former chain is ignored"
    );
    assert!(matches!(bench.answer(third, Ok(updated_reply(1)))[..], [Action::Commit { .. }]));
}

/// The sender repeats it: the tag is not recorded, and no disagreement about content is reported.
#[test]
fn an_update_with_a_damaged_payload_is_refused_and_its_repetition_is_made() {
    let mut head = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    check_damaged_payload(&mut head, |head, _| head.update(1, TAG));
    let mut tail = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    check_damaged_payload(&mut tail, |tail, _| tail.forward(2, 1, 1));
    let mut syncing = Bench::serving(2, 3, &[(1, Serving), (2, Syncing)]);
    let start = SyncStart { to: syncing.to(2), from: TargetId(1), round: 1 };
    let actions = syncing.ask(StorageRequest::SyncStart(start), b"");
    let [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] = actions[..]
    else {
        panic!("{actions:?}")
    };
    check_damaged_payload(&mut syncing, |syncing, sequence| {
        let request = ReplaceRequest {
            to: syncing.to(2),
            from: TargetId(1),
            session,
            sequence,
            chunk: CHUNK,
            version: ChunkVersion(1),
            removed: false,
            tags: tags(1),
            checksum: Checksum::of(b"data"),
        };
        syncing.ask(StorageRequest::Replace(request), b"data")
    });
}

/// `ask`: makes the request for the n-th time.
fn check_damaged_payload(bench: &mut Bench, ask: impl Fn(&mut Bench, u64) -> Vec<Action>) {
    let actions = ask(bench, 1);
    let [Action::Apply { op, payload_checksum: expected, .. }] = actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(expected, Checksum::of(b"data"));
    let report = bench.replica.report(Millis(bench.now));
    let damaged = StoreError::PayloadDamaged { chunk: CHUNK, expected, computed: Checksum(1) };
    let error = error_of(&bench.give(Event::Applied { op, unsent: false, result: Err(damaged) }));
    assert!(matches!(error, StorageError::ChecksumMismatch { .. }) && error.retryable());
    assert_eq!(bench.replica.report(Millis(bench.now)), report);
    assert!(bench.replica.is_idle());
    apply_op(&ask(bench, 2));
}

#[test]
fn a_copy_is_charged_to_the_class_of_the_requests_that_wait_for_it() {
    use crate::message::class;
    let class_of = |actions: &[Action]| match actions {
        [Action::Apply { class, .. }] => *class,
        other => panic!("expected one apply, got {other:?}"),
    };
    let mut head = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    assert_eq!(class_of(&head.update(1, TAG)), class::UPDATE);
    let mut tail = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let request = ForwardRequest { hop: 2, ..forward_request(tail.to(2), 1, 1) };
    assert_eq!(class_of(&tail.ask(StorageRequest::Forward(request), b"data")), 2);
}

#[test]
fn a_wait_for_space_does_not_count_as_a_stalled_store() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    bench.give(Event::RoomAwaited { op });
    bench.now += 2 * bench.replica.config.store_stall_ms;
    assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::UpToDate);
    bench.give(Event::RoomGiven { op });
    assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::UpToDate);
    bench.now += 2 * bench.replica.config.store_stall_ms;
    assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::Offline);
}

#[test]
fn a_full_successor_is_reported_immediately_and_the_next_update_not_started() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let full = StorageError::NoSpace { target: TargetId(2) };
    let actions = bench.answer(call, Err(PeerFailure::Refused(full.clone())));
    assert!(matches!(&actions[..],
        [Action::Reply { result: Err(error), .. }, Action::Alert(Alert::SuccessorFull { .. })]
        if *error == full));
    let other = ChunkId::new(InodeId(6), 0);
    let request = UpdateRequest {
        to: bench.to(1),
        chunk: other,
        tag: RequestTag { sequence: 5, ..TAG },
        change: ContentChange::Write { offset: 0 },
        payload_checksum: Checksum::of(b"data"),
        chunk_bytes: 65_536,
    };
    assert_eq!(error_of(&bench.ask(StorageRequest::Update(request), b"data")), full);
}

#[test]
fn a_damaged_chunk_is_fetched_from_a_replica_that_has_the_same_version() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(6, tags(6)), None);
    let actions = bench.give(Event::DamageFound { chunk: CHUNK });
    assert!(matches!(actions[0], Action::Alert(Alert::Damaged { .. })));
    let (call, node, _) = call_of(&actions[1..]);
    assert_eq!(node, NodeId(2));
    let other = StorageError::ChunkNotFound { chunk: CHUNK };
    let (call, node, _) = call_of(&bench.answer(call, Err(PeerFailure::Refused(other))));
    assert_eq!(node, NodeId(3));
    let content = Content { version: ChunkVersion(6), checksum: Checksum::of(b"data") };
    let result = Ok(StorageReply::Content(content));
    let payload = Bytes::from_static(b"data");
    let (op, update) = apply_op(&bench.give(Event::Answer { call, result, payload }));
    assert_eq!((update.version, update.change), (ChunkVersion(6), ContentChange::Replace));
    assert!(matches!(bench.applied(op, 6)[..], [Action::Commit { .. }]));
    assert!(matches!(bench.committed(op, 6)[..], [Action::Alert(Alert::Repaired { .. })]));
}

#[test]
fn a_restarted_replica_waits_for_the_manager_and_rolls_pending_updates_forward() {
    let mut bench = Bench::new(1);
    bench.set(state(6, tags(6)), Some(state(7, tags(7))));
    bench.give(Event::Lease { valid_until: Millis(10_000) });
    assert!(bench.give(Event::Routing(chain(3, &[(1, Serving)]))).is_empty());
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::Online);
    assert!(matches!(error_of(&bench.update(1, TAG)), StorageError::NotServing { .. }));
    bench.give(Event::Routing(chain(4, &[(1, LastSrv)])));
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
    let actions = bench.give(Event::Routing(chain(5, &[(1, Serving), (2, Syncing)])));
    // The sync starts; the pending update waits for its session.
    let (call, _, request) = call_of(&actions);
    assert!(matches!(request, StorageRequest::SyncStart(_)));
    let session = SyncSession { incarnation: Incarnation(3), number: 1 };
    let actions = bench.answer(call, Ok(StorageReply::SyncStarted { session, round: 1 }));
    assert!(matches!(
        &actions[..],
        [Action::Call { .. }, Action::ReadContent { chunk: CHUNK, which: Which::Newest, .. }]
    ));
}

#[test]
fn a_failed_or_hung_store_takes_the_target_offline() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.update(1, TAG);
    assert_eq!(bench.replica.report(Millis(10_002)).state, LocalState::Offline, "it hangs");
    // The earlier report remains valid, although the store responds now (seed 23632).
    bench.now = 10_002;
    bench.applied(OpId(1), 1);
    assert_eq!(bench.replica.report(Millis(10_003)).state, LocalState::Online);
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let io = StoreError::Io { operation: "flush".into(), reason: "no".into() };
    bench.give(Event::Applied { op, unsent: false, result: Err(io) });
    assert_eq!(bench.replica.report(Millis(2)).state, LocalState::Offline);
}

/// Found by the simulator (seed 21913): an update that could not be written was committed after a
/// change of the chain.
#[test]
fn a_store_that_fails_during_an_aborted_update_goes_offline() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.forward(2, 1, 1));
    bench.give(Event::Routing(chain(4, &[(1, LastSrv), (2, LastSrv)])));
    let error = StoreError::Io { operation: "flush".to_owned(), reason: "broken".to_owned() };
    bench.give(Event::Applied { op, unsent: false, result: Err(error) });
    assert!(bench.replica.has_failed());
}

/// A target that is reported OFFLINE must not serve: mgmtd continues the chain without it
/// immediately.
#[test]
fn a_leaving_replica_serves_no_requests_whatever_routing_it_receives() {
    let mut bench = Bench::serving(1, 5, &[(1, Serving), (2, Serving)]);
    assert!(bench.replica.serves(Millis(bench.now)));
    bench.give(Event::Leave);
    let chains: [&[(u64, PublicState)]; 3] =
        [&[(1, Serving), (2, Serving)], &[(1, LastSrv), (2, Offline)], &[(1, Serving)]];
    for (version, states) in (6..).zip(chains) {
        bench.give(Event::Routing(chain(version, states)));
        bench.give(Event::Lease { valid_until: Millis(20_000) });
        assert_eq!(bench.replica.report(Millis(bench.now)).state, LocalState::Offline);
        assert!(!bench.replica.serves(Millis(bench.now)), "{states:?}");
        let actions = bench.update(1, TAG);
        assert!(matches!(actions[..], [Action::Reply { result: Err(_), .. }]), "{actions:?}");
    }
}

/// Each fence separately: in simulated schedules, another fence would refuse the request.
#[test]
fn a_forward_from_another_sender_or_chain_version_is_refused() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    for from in [2, 3, 9] {
        let (from, target) = (TargetId(from), TargetId(2));
        let error = error_of(&bench.forward(2, from.0, 1));
        assert_eq!(error, StorageError::NotPredecessor { from, target });
    }
    for version in [2, 4] {
        let to = Address { chain_version: ChainVersion(version), ..bench.to(2) };
        let request = StorageRequest::Forward(forward_request(to, 1, 1));
        let actions = bench.ask(request, b"data");
        let Some(Action::Reply { result: Err(error), .. }) = actions.last() else {
            panic!("{actions:?}")
        };
        assert!(matches!(error, StorageError::ChainVersionMismatch { .. }), "{error}");
    }
    apply_op(&bench.forward(2, 1, 1));
}
