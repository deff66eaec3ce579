//! Unit tests of one replica: forgotten inodes.

use super::*;

fn forget(to: Address, from: Option<u64>) -> StorageRequest {
    let inodes = vec![InodeRange::one(CHUNK.inode)];
    StorageRequest::ForgetInodes(ForgetInodes {
        to,
        from: from.map(TargetId),
        inodes,
        version_floor: ChunkVersion(0),
        hop: u8::from(from.is_some()),
    })
}

#[test]
fn inodes_are_forgotten_locally_then_down_the_chain_and_refuse_updates() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    bench.set(state(1, tags(1)), None);
    let actions = bench.ask(forget(bench.to(1), None), b"");
    let [Action::ForgetInodes { op, .. }] = actions[..] else { panic!("{actions:?}") };
    // From now on, not from the time when the store has finished.
    let other = RequestTag { sequence: 5, ..TAG };
    let error = error_of(&bench.update(1, other));
    assert_eq!(error, StorageError::InodeForgotten { inode: CHUNK.inode });
    bench.metas.0.clear();
    bench.metas.1.insert(InodeRange::one(CHUNK.inode));
    let (call, node, request) = call_of(&bench.give(Event::InodesForgotten { op, result: Ok(()) }));
    assert_eq!(node, NodeId(2));
    let StorageRequest::ForgetInodes(forwarded) = request else { panic!("{request:?}") };
    assert_eq!((forwarded.from, forwarded.inodes.len()), (Some(TargetId(1)), 1));
    let actions = bench.answer(call, Ok(StorageReply::InodesForgotten));
    assert!(
        matches!(actions[..], [Action::Reply { result: Ok(StorageReply::InodesForgotten), .. }]),
        "{actions:?}"
    );
    assert!(bench.replica.is_idle());
    let error = error_of(&bench.update(1, other));
    assert_eq!(error, StorageError::InodeForgotten { inode: CHUNK.inode });
}

#[test]
fn a_late_forward_of_a_forgotten_inode_is_refused_without_a_demotion() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.metas.1.insert(InodeRange::one(CHUNK.inode));
    let error = error_of(&bench.forward(2, 1, 7));
    assert_eq!(error, StorageError::InodeForgotten { inode: CHUNK.inode });
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
}

#[test]
fn updates_in_progress_complete_before_their_inode_is_forgotten() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.update(1, TAG);
    let busy = error_of(&bench.ask(forget(bench.to(1), None), b""));
    assert_eq!(busy, StorageError::Busy { target: TargetId(1) });
}

#[test]
fn a_forgotten_inode_is_reported_to_a_replica_by_its_successor() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let error = StorageError::InodeForgotten { inode: CHUNK.inode };
    let actions = bench.answer(call, Err(PeerFailure::Refused(error.clone())));
    let [Action::ForgetInodes { op, .. }, Action::Reply { ref result, .. }] = actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(*result, Err(error));
    assert!(bench.give(Event::InodesForgotten { op, result: Ok(()) }).is_empty());
    assert!(bench.replica.is_idle());
}

#[test]
fn an_update_behind_a_pending_one_of_a_forgotten_inode_is_refused() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let other = RequestTag { channel: crate::ids::ChannelId(9), ..TAG };
    assert!(bench.update(1, other).is_empty(), "it waits for the first one");
    let expected = StorageError::InodeForgotten { inode: CHUNK.inode };
    let actions = bench.answer(call, Err(PeerFailure::Refused(expected.clone())));
    let [Action::ForgetInodes { op, .. }, ref replies @ ..] = actions[..] else {
        panic!("{actions:?}");
    };
    let is_refused =
        |it: &Action| matches!(it, Action::Reply { result: Err(error), .. } if *error == expected);
    // The store shows the pending state until it has forgotten the inode.
    assert!(replies.len() == 2 && replies.iter().all(is_refused), "{replies:?}");
    bench.metas.0.clear();
    bench.give(Event::InodesForgotten { op, result: Ok(()) });
    assert!(bench.replica.is_idle(), "no lane is held");
}
