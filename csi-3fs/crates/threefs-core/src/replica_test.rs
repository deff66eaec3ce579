//! Unit tests of one replica: events, and the exact actions that follow.

use std::collections::BTreeMap;

use super::*;
use crate::checksum::Checksum;
use crate::chunk::{ChunkState, ContentChange, StoreUpdate, TagWindow, Which};
use crate::error::StoreError;
use crate::forgotten::{ForgottenInodes, InodeRange};
use crate::ids::{ChannelId, ChunkVersion, ClientId, InodeId, NodeId, RequestTag};
use crate::layout::CHUNK_BYTES_MAX;
use crate::message::{
    Content, ForgetInodes, ForwardRequest, QueryChunks, ReadRequest, ReplaceRequest, SyncDone,
    SyncSession, SyncStart, UpdateRequest, Updated,
};
use PublicState::{LastSrv, Offline, Serving, Syncing, Waiting};

const CHAIN: ChainId = ChainId(1);
const CHUNK: ChunkId = ChunkId { inode: InodeId(5), index: 0 };
const TAG: RequestTag = RequestTag { client: ClientId(9), channel: ChannelId(0), sequence: 4 };

#[path = "purge_test.rs"]
mod purge;

/// A store with the content that the test sets.
#[derive(Default)]
struct Metas(BTreeMap<ChunkId, ChunkMeta>, ForgottenInodes, ChunkVersion);

impl ChunkMetas for Metas {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.0.get(&chunk).cloned()
    }

    fn metas(&self, after: Option<ChunkId>, last: ChunkId, limit: usize) -> Vec<ChunkMeta> {
        self.0
            .values()
            .filter(|meta| after.is_none_or(|after| meta.chunk > after) && meta.chunk <= last)
            .take(limit)
            .cloned()
            .collect()
    }

    fn pending(&self, after: Option<ChunkId>, limit: usize) -> Vec<ChunkId> {
        self.metas(after, ChunkId::MAX, usize::MAX)
            .into_iter()
            .filter(|meta| meta.pending.is_some())
            .map(|meta| meta.chunk)
            .take(limit)
            .collect()
    }

    fn last_existing(&self, _: InodeId) -> Option<ChunkMeta> {
        None
    }

    fn is_forgotten(&self, inode: InodeId) -> bool {
        self.1.contains(inode)
    }

    fn forgotten(&self, after: Option<InodeId>, limit: usize) -> Vec<InodeRange> {
        self.1.ranges(after, limit)
    }

    fn version_floor(&self) -> ChunkVersion {
        self.2
    }
}

struct Bench {
    replica: Replica,
    metas: Metas,
    now: u64,
    expires: Option<u64>,
    next_token: u64,
}

fn chain(version: u32, states: &[(u64, PublicState)]) -> Chain {
    let targets = states
        .iter()
        .map(|&(target, state)| ChainTarget {
            target: TargetId(target),
            node: NodeId(target as u32),
            state,
        })
        .collect();
    Chain { id: CHAIN, version: ChainVersion(version), targets }
}

fn state(version: u64, tags: TagWindow) -> ChunkState {
    ChunkState {
        version: ChunkVersion(version),
        chain_version: ChainVersion(3),
        length: 4,
        checksum: Checksum::of(b"data"),
        removed: false,
        tags,
    }
}

fn tags(version: u64) -> TagWindow {
    TagWindow::default().with(TAG, ChunkVersion(version))
}

fn forward_request(to: Address, from: u64, version: u64) -> ForwardRequest {
    ForwardRequest {
        to,
        from: TargetId(from),
        chunk: CHUNK,
        version: ChunkVersion(version),
        tag: TAG,
        change: ContentChange::Write { offset: 0 },
        payload_checksum: Checksum::of(b"data"),
        chunk_checksum: Checksum::of(b"data"),
        fresh: false,
        purges: 0,
        hop: 1,
    }
}

impl Bench {
    /// Target `me` of a chain that it has served since before the test.
    fn serving(me: u64, version: u32, states: &[(u64, PublicState)]) -> Self {
        let mut bench = Self::started(me);
        bench.give(Event::Routing(chain(1, &[(me, LastSrv)])));
        bench.give(Event::Routing(chain(version, states)));
        bench.give(Event::Lease { valid_until: Millis(10_000) });
        bench
    }

    fn started(me: u64) -> Self {
        let mut config = Config::new(TargetId(me), CHAIN, Incarnation(77));
        config.call_timeout_ms = 100;
        let replica = Replica::new(config);
        Self { replica, metas: Metas::default(), now: 1, expires: None, next_token: 0 }
    }

    fn give(&mut self, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        self.replica.handle(Millis(self.now), event, &self.metas, &mut out);
        out
    }

    fn ask(&mut self, request: StorageRequest, payload: &'static [u8]) -> Vec<Action> {
        self.next_token += 1;
        let payload = Bytes::from_static(payload);
        let token = Token(self.next_token);
        let expires = self.expires.map(Millis);
        self.give(Event::Request { token, request, payload, expires })
    }

    fn to(&self, me: u64) -> Address {
        let chain_version = self.replica.chain_version();
        Address { chain: CHAIN, chain_version, target: TargetId(me) }
    }

    fn update(&mut self, me: u64, tag: RequestTag) -> Vec<Action> {
        let request = UpdateRequest {
            to: self.to(me),
            chunk: CHUNK,
            tag,
            change: ContentChange::Write { offset: 0 },
            payload_checksum: Checksum::of(b"data"),
            chunk_bytes: 65_536,
        };
        self.ask(StorageRequest::Update(request), b"data")
    }

    fn forward(&mut self, me: u64, from: u64, version: u64) -> Vec<Action> {
        let request = forward_request(self.to(me), from, version);
        self.ask(StorageRequest::Forward(request), b"data")
    }

    fn set(&mut self, committed: ChunkState, pending: Option<ChunkState>) {
        self.metas.0.insert(CHUNK, ChunkMeta { chunk: CHUNK, committed, pending });
    }

    /// Reports the pending state of `op` as durable.
    fn applied(&mut self, op: OpId, version: u64) -> Vec<Action> {
        let committed = self.metas.0.get(&CHUNK).map(|meta| meta.committed.clone());
        self.set(committed.unwrap_or_default(), Some(state(version, tags(version))));
        self.give(Event::Applied { op, result: Ok(state(version, tags(version))) })
    }

    fn committed(&mut self, op: OpId, version: u64) -> Vec<Action> {
        self.set(state(version, tags(version)), None);
        self.give(Event::Committed { op, result: Ok(state(version, tags(version))) })
    }

    fn answer(&mut self, call: CallId, result: Result<StorageReply, PeerFailure>) -> Vec<Action> {
        self.give(Event::Answer { call, result, payload: Bytes::new() })
    }
}

fn done(version: u64) -> StorageReply {
    StorageReply::Updated(Updated {
        version: ChunkVersion(version),
        length: 4,
        checksum: Checksum::of(b"data"),
        chain_version: ChainVersion(3),
    })
}

fn apply_op(actions: &[Action]) -> (OpId, StoreUpdate) {
    match actions {
        [Action::Apply { op, update, .. }] => (*op, update.clone()),
        other => panic!("expected one apply, got {other:?}"),
    }
}

fn call_of(actions: &[Action]) -> (CallId, NodeId, StorageRequest) {
    match actions {
        [Action::Call { call, node, request, .. }] => (*call, *node, request.clone()),
        other => panic!("expected one call, got {other:?}"),
    }
}

fn error_of(actions: &[Action]) -> StorageError {
    match actions {
        [Action::Reply { result: Err(error), .. }] => error.clone(),
        other => panic!("expected one refusal, got {other:?}"),
    }
}

#[test]
fn the_head_applies_forwards_commits_and_answers_in_this_order() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, update) = apply_op(&bench.update(1, TAG));
    assert_eq!(update.version, ChunkVersion(1));
    let (call, node, request) = call_of(&bench.applied(op, 1));
    assert_eq!(node, NodeId(2));
    assert!(matches!(request, StorageRequest::Forward(forward)
        if forward.version == ChunkVersion(1) && forward.tag == TAG));
    match &bench.answer(call, Ok(done(1)))[..] {
        [Action::Commit { version: ChunkVersion(1), chain_version: ChainVersion(3), .. }] => {}
        other => panic!("{other:?}"),
    }
    match &bench.committed(op, 1)[..] {
        [Action::Reply { token: Token(1), result }] => assert_eq!(*result, Ok(done(1))),
        other => panic!("{other:?}"),
    }
    assert!(bench.replica.is_idle());
}

#[test]
fn the_tail_commits_without_asking_anybody() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.forward(2, 1, 1));
    assert!(matches!(bench.applied(op, 1)[..], [Action::Commit { .. }]));
}

#[test]
fn a_retry_gets_the_first_answer_and_an_older_request_none() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, tags(6)), None);
    match &bench.update(1, TAG)[..] {
        [Action::Reply { result, .. }] => assert_eq!(*result, Ok(done(6))),
        other => panic!("{other:?}"),
    }
    let older = RequestTag { sequence: 3, ..TAG };
    assert_eq!(error_of(&bench.update(1, older)), StorageError::DuplicateUpdate { tag: older });
    // While the update is in progress, a retry joins it.
    let newer = RequestTag { sequence: 5, ..TAG };
    let (op, _) = apply_op(&bench.update(1, newer));
    assert!(bench.update(1, newer).is_empty());
    bench.applied(op, 7);
    assert_eq!(bench.committed(op, 7).len(), 2, "both are answered");
}

/// A delayed copy of a write from a killed daemon, at a head without memory of it: it has
/// restarted, or has just become head.
#[test]
fn a_new_head_refuses_a_late_write_of_an_earlier_life_by_the_tags_of_the_chunk() {
    let with_incarnation =
        |life| RequestTag { client: ClientId::with_incarnation(9 << 32, life), ..TAG };
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, TagWindow::default().with(with_incarnation(2), ChunkVersion(6))), None);
    let error = error_of(&bench.update(1, with_incarnation(1)));
    assert!(matches!(error, StorageError::Superseded { .. }), "{error}");
    apply_op(&bench.update(1, with_incarnation(3)));
}

/// Otherwise a client could create a chunk that cannot be sent to any replica, and every disk would
/// have to reserve space for its overwrite.
#[test]
fn no_update_makes_a_chunk_larger_than_any_file_may_have() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    let request = UpdateRequest {
        to: bench.to(1),
        chunk: CHUNK,
        tag: TAG,
        change: ContentChange::Truncate { length: CHUNK_BYTES_MAX + 1 },
        payload_checksum: Checksum::of(b""),
        chunk_bytes: u32::MAX,
    };
    let error = error_of(&bench.ask(StorageRequest::Update(request), b""));
    assert!(matches!(error, StorageError::ChunkSizeMismatch { .. }), "{error}");
}

#[test]
fn an_update_whose_time_is_over_is_not_begun_however_long_it_waited_for_its_turn() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, tags(6)), None);
    let (op, _) = apply_op(&bench.update(1, RequestTag { sequence: 5, ..TAG }));
    bench.expires = Some(bench.now + 5);
    let waits = RequestTag { client: ClientId(77 << 32), ..TAG };
    assert!(bench.update(1, waits).is_empty());
    bench.now += 5;
    bench.applied(op, 7);
    let ended = bench.committed(op, 7);
    let expired = StorageError::Expired { target: TargetId(1) };
    let refused = |action: &Action| matches!(action, Action::Reply { result: Err(error), .. } if *error == expired);
    assert!(ended.iter().any(refused), "{ended:?}");
    assert!(!ended.iter().any(|action| matches!(action, Action::Apply { .. })), "{ended:?}");
    // An update completed in time is still answered later.
    bench.set(state(7, tags(7).with(waits, ChunkVersion(7))), None);
    assert!(matches!(bench.update(1, waits)[..], [Action::Reply { result: Ok(_), .. }]));
}

#[test]
fn a_pending_update_or_a_missing_lease_refuses_reads() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(6, tags(6)), None);
    let to = bench.to(2);
    let read = StorageRequest::Read(ReadRequest { to, chunk: CHUNK, offset: 0, length: 4 });
    assert!(matches!(bench.ask(read.clone(), b"")[..], [Action::ServeRead { .. }]));
    let (op, _) = apply_op(&bench.forward(2, 1, 7));
    bench.applied(op, 7);
    assert_eq!(
        error_of(&bench.ask(read.clone(), b"")),
        StorageError::ChunkNotCommit { chunk: CHUNK }
    );
    bench.now = 10_000;
    let refused = bench.ask(read, b"");
    assert!(
        refused.iter().any(|action| matches!(action, Action::Reply { result: Err(error), .. }
            if *error == StorageError::NoLease { target: TargetId(2) })),
        "{refused:?}"
    );
}

/// Found by the simulator (seed 22682): a head that was replaced while it was stopped received its
/// demotion only when it was SYNCING already, and completed its update as if it were the tail.
#[test]
fn a_former_head_that_is_syncing_does_not_end_what_it_began() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let replies = bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing)])));
    let state = Syncing;
    assert_eq!(error_of(&replies), StorageError::NotServing { target: TargetId(1), state });
    assert!(bench.answer(call, Ok(done(1))).is_empty(), "the old answer means nothing");
    assert!(bench.replica.is_idle());
}

#[test]
fn a_sync_begins_only_when_the_store_is_done_with_what_was_before() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing)])));
    let start =
        StorageRequest::SyncStart(SyncStart { to: bench.to(1), from: TargetId(2), round: 1 });
    assert_eq!(
        error_of(&bench.ask(start.clone(), b"")),
        StorageError::Busy { target: TargetId(1) }
    );
    bench.applied(op, 1);
    assert!(matches!(
        bench.ask(start, b"")[..],
        [Action::Reply { result: Ok(StorageReply::SyncStarted { round: 1, .. }), .. }]
    ));
}

fn replace(bench: &Bench, session: SyncSession, sequence: u64, version: u64) -> StorageRequest {
    StorageRequest::Replace(ReplaceRequest {
        to: bench.to(1),
        from: TargetId(2),
        session,
        sequence,
        chunk: CHUNK,
        version: ChunkVersion(version),
        removed: false,
        tags: tags(version),
        checksum: Checksum::of(b"data"),
    })
}

#[test]
fn a_syncing_target_takes_any_version_of_its_session_but_nothing_late() {
    let mut bench = Bench::started(1);
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing)])));
    bench.set(state(9, tags(9)), None);
    let start =
        StorageRequest::SyncStart(SyncStart { to: bench.to(1), from: TargetId(2), round: 1 });
    let session = match &bench.ask(start, b"")[..] {
        [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] => *session,
        other => panic!("{other:?}"),
    };
    let request = replace(&bench, session, 8, 3);
    let (op, update) = apply_op(&bench.ask(request, b"data"));
    assert_eq!((update.version, update.change), (ChunkVersion(3), ContentChange::Replace));
    bench.applied(op, 3);
    bench.committed(op, 3);
    let late = replace(&bench, session, 7, 2);
    assert!(matches!(error_of(&bench.ask(late, b"data")), StorageError::ChunkStaleUpdate { .. }));
    let other = SyncSession { number: session.number + 1, ..session };
    let foreign = replace(&bench, other, 9, 4);
    assert_eq!(
        error_of(&bench.ask(foreign, b"data")),
        StorageError::SyncSessionMismatch { target: TargetId(1) }
    );
}

/// Found by the simulator (seed 31832): two nodes, each between a predecessor and a successor of a
/// chain, held the slots for whole chunks that they waited for.
#[test]
fn nobody_waits_for_a_whole_chunk_once_the_target_serves() {
    let mut bench = Bench::started(1);
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing), (3, Waiting)])));
    let to = bench.to(1);
    let start = StorageRequest::SyncStart(SyncStart { to, from: TargetId(2), round: 1 });
    let session = match &bench.ask(start, b"")[..] {
        [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] => *session,
        other => panic!("{other:?}"),
    };
    apply_op(&bench.ask(replace(&bench, session, 1, 1), b"data"));
    assert!(bench.ask(replace(&bench, session, 2, 2), b"data").is_empty(), "it waits in line");
    bench.ask(StorageRequest::SyncDone(SyncDone { to, session }), b"");
    let serves = chain(6, &[(2, Serving), (1, Serving), (3, Syncing)]);
    let actions = bench.give(Event::Routing(serves));
    let is_reply = |action: &&Action| {
        matches!(action, Action::Reply { result: Err(StorageError::Busy { .. }), .. })
    };
    assert_eq!(actions.iter().filter(is_reply).count(), 2, "{actions:?}");
}

/// Found by the simulator (seed 66906): a full target reported that, and was made SERVING because
/// of an earlier report.
#[test]
fn a_target_that_ran_full_during_its_sync_does_not_serve_when_it_is_told_to() {
    let mut bench = Bench::started(1);
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing)])));
    let to = bench.to(1);
    let start = StorageRequest::SyncStart(SyncStart { to, from: TargetId(2), round: 1 });
    let session = match &bench.ask(start.clone(), b"")[..] {
        [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] => *session,
        other => panic!("{other:?}"),
    };
    bench.ask(StorageRequest::SyncDone(SyncDone { to, session }), b"");
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
    let request = replace(&bench, session, 1, 1);
    let (op, _) = apply_op(&bench.ask(request, b"data"));
    bench.give(Event::Applied { op, result: Err(StoreError::NoSpace { needed_bytes: 4 }) });
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::Offline);
    assert!(matches!(error_of(&bench.ask(start, b"")), StorageError::NoSpace { .. }));
    bench.give(Event::Routing(chain(6, &[(2, Serving), (1, Serving)])));
    bench.now = 9_000;
    bench.give(Event::Lease { valid_until: Millis(20_000) });
    assert!(!bench.replica.serves(Millis(9_000)));
    assert_eq!(bench.replica.report(Millis(9_000)).state, LocalState::Online);
}

#[test]
fn a_replica_that_missed_an_update_distrusts_itself_and_says_so() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
    let actions = bench.forward(2, 1, 5);
    assert!(matches!(
        &actions[..],
        [
            Action::Alert(Alert::Disagreement { .. }),
            Action::Reply { result: Err(StorageError::ChunkMissingUpdate { .. }), .. }
        ]
    ));
    let report = bench.replica.report(Millis(1));
    assert_eq!((report.state, report.chain_version), (LocalState::Online, ChainVersion(3)));
    assert!(!bench.replica.serves(Millis(1)));
}

#[test]
fn a_silent_successor_is_asked_again_and_left_behind_with_the_chain() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (first, node, _) = call_of(&bench.applied(op, 1));
    assert_eq!(node, NodeId(2));
    assert_eq!(bench.replica.next_wakeup(), Some(Millis(101)), "every wait has its end");
    bench.now = 101;
    let (second, node, _) = call_of(&bench.give(Event::Tick));
    assert_eq!(node, NodeId(2));
    assert!(bench.answer(first, Ok(done(1))).is_empty(), "given up, however late it comes");
    let routing = Event::Routing(chain(4, &[(1, Serving), (3, Serving), (2, Offline)]));
    let (third, node, _) = call_of(&bench.give(routing));
    assert_eq!(node, NodeId(3));
    assert!(bench.answer(second, Ok(done(1))).is_empty(), "about a former chain");
    assert!(matches!(bench.answer(third, Ok(done(1)))[..], [Action::Commit { .. }]));
}

#[test]
fn a_copy_takes_room_as_the_class_of_the_requests_that_wait_for_it() {
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
fn a_wait_for_room_is_no_stall_of_the_store() {
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
fn a_full_successor_is_told_at_once_and_the_next_update_is_not_begun() {
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
fn a_restarted_replica_serves_only_what_the_manager_says_and_rolls_pending_updates_forward() {
    let mut bench = Bench::started(1);
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
fn inodes_are_forgotten_here_then_down_the_chain_and_take_no_updates() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    bench.set(state(1, tags(1)), None);
    let actions = bench.ask(forget(bench.to(1), None), b"");
    let [Action::ForgetInodes { op, .. }] = actions[..] else { panic!("{actions:?}") };
    // From now on, not from the time when the store has finished.
    let other = RequestTag { sequence: 5, ..TAG };
    let refused = error_of(&bench.update(1, other));
    assert_eq!(refused, StorageError::InodeForgotten { inode: CHUNK.inode });
    bench.metas.0.clear();
    bench.metas.1.insert(InodeRange::one(CHUNK.inode));
    let (call, node, request) = call_of(&bench.give(Event::InodesForgotten { op, result: Ok(()) }));
    assert_eq!(node, NodeId(2));
    let StorageRequest::ForgetInodes(passed) = request else { panic!("{request:?}") };
    assert_eq!((passed.from, passed.inodes.len()), (Some(TargetId(1)), 1));
    let actions = bench.answer(call, Ok(StorageReply::InodesForgotten));
    assert!(
        matches!(actions[..], [Action::Reply { result: Ok(StorageReply::InodesForgotten), .. }]),
        "{actions:?}"
    );
    assert!(bench.replica.is_idle());
    let refused = error_of(&bench.update(1, other));
    assert_eq!(refused, StorageError::InodeForgotten { inode: CHUNK.inode });
}

#[test]
fn a_late_forward_of_a_forgotten_inode_is_refused_without_a_demotion() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.metas.1.insert(InodeRange::one(CHUNK.inode));
    let refused = error_of(&bench.forward(2, 1, 7));
    assert_eq!(refused, StorageError::InodeForgotten { inode: CHUNK.inode });
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
}

#[test]
fn what_is_under_way_ends_before_its_inode_is_forgotten() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.update(1, TAG);
    let busy = error_of(&bench.ask(forget(bench.to(1), None), b""));
    assert_eq!(busy, StorageError::Busy { target: TargetId(1) });
}

#[test]
fn a_replica_learns_from_its_successor_that_an_inode_is_forgotten() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let (call, ..) = call_of(&bench.applied(op, 1));
    let refused = StorageError::InodeForgotten { inode: CHUNK.inode };
    let actions = bench.answer(call, Err(PeerFailure::Refused(refused.clone())));
    let [Action::ForgetInodes { op, .. }, Action::Reply { ref result, .. }] = actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(*result, Err(refused));
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
    let refused = StorageError::InodeForgotten { inode: CHUNK.inode };
    let actions = bench.answer(call, Err(PeerFailure::Refused(refused.clone())));
    let [Action::ForgetInodes { op, .. }, ref replies @ ..] = actions[..] else {
        panic!("{actions:?}");
    };
    let is_refused =
        |it: &Action| matches!(it, Action::Reply { result: Err(error), .. } if *error == refused);
    // The store shows the pending state until it has forgotten the inode.
    assert!(replies.len() == 2 && replies.iter().all(is_refused), "{replies:?}");
    bench.metas.0.clear();
    bench.give(Event::InodesForgotten { op, result: Ok(()) });
    assert!(bench.replica.is_idle(), "no lane is held");
}

#[test]
fn a_failed_or_hung_store_gives_the_target_up() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.update(1, TAG);
    assert_eq!(bench.replica.report(Millis(10_002)).state, LocalState::Offline, "it hangs");
    // The earlier report stands, although the store responds now (seed 23632).
    bench.now = 10_002;
    bench.applied(OpId(1), 1);
    assert_eq!(bench.replica.report(Millis(10_003)).state, LocalState::Online);
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    let (op, _) = apply_op(&bench.update(1, TAG));
    let io = StoreError::Io { operation: "flush".into(), reason: "no".into() };
    bench.give(Event::Applied { op, result: Err(io) });
    assert_eq!(bench.replica.report(Millis(2)).state, LocalState::Offline);
}

/// Found by the simulator (seed 21913): an update that could not be written was committed after a
/// change of the chain.
#[test]
fn a_store_that_fails_for_an_aborted_update_is_given_up() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.forward(2, 1, 1));
    bench.give(Event::Routing(chain(4, &[(1, LastSrv), (2, LastSrv)])));
    let failed = StoreError::Io { operation: "flush".to_owned(), reason: "broken".to_owned() };
    bench.give(Event::Applied { op, result: Err(failed) });
    assert!(bench.replica.has_failed());
}

/// Found by the simulator (seed 15722): an update whose commit the disk had lost was in progress
/// again, the comparison missed it, and the successor served without it.
#[test]
fn a_sync_does_not_end_before_what_is_under_way() {
    let mut bench = Bench::started(1);
    bench.set(ChunkState::default(), Some(state(1, tags(1))));
    bench.give(Event::Routing(chain(4, &[(1, LastSrv)])));
    let actions = bench.give(Event::Routing(chain(5, &[(1, Serving), (2, Syncing)])));
    let (start, ..) = call_of(&actions);
    let session = SyncSession { incarnation: Incarnation(3), number: 1 };
    let actions = bench.answer(start, Ok(StorageReply::SyncStarted { session, round: 1 }));
    let [Action::Call { call: metas, .. }, Action::ReadContent { op, .. }] = actions[..] else {
        panic!("{actions:?}");
    };
    let nothing = StorageReply::Metas { metas: Vec::new(), last: true };
    assert!(bench.answer(metas, Ok(nothing)).is_empty(), "the pending update is not through");
    let content = (state(1, tags(1)), Bytes::from_static(b"data"));
    let (replace, _, request) = call_of(&bench.give(Event::Content { op, result: Ok(content) }));
    assert!(matches!(request, StorageRequest::Replace(_)));
    assert!(matches!(bench.answer(replace, Ok(done(1)))[..], [Action::Commit { .. }]));
    let actions = bench.committed(op, 1);
    let [Action::ReadContent { op: send, which: Which::Committed, .. }] = actions[..] else {
        panic!("{actions:?}");
    };
    let content = (state(1, tags(1)), Bytes::from_static(b"data"));
    let (replace, ..) = call_of(&bench.give(Event::Content { op: send, result: Ok(content) }));
    let (_, _, request) = call_of(&bench.answer(replace, Ok(done(1))));
    assert!(matches!(request, StorageRequest::SyncDone(_)));
}

/// A target that is reported OFFLINE must not serve: mgmtd continues the chain without it at once.
#[test]
fn a_replica_that_leaves_serves_nothing_whatever_it_learns_later() {
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
        let refused = bench.update(1, TAG);
        assert!(matches!(refused[..], [Action::Reply { result: Err(_), .. }]), "{refused:?}");
    }
}

#[test]
fn a_forward_asks_above_everything_that_waits_for_it() {
    let mut bench = Bench::serving(2, 5, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(3, tags(3)), None);
    let hop_of = |actions: &[Action]| {
        actions.iter().find_map(|action| match action {
            Action::Call { request: StorageRequest::Forward(request), .. } => Some(request.hop),
            _ => None,
        })
    };
    let started = bench.forward(2, 1, 4);
    let Some(Action::Apply { op, .. }) = started.first() else { panic!("{started:?}") };
    assert_eq!(hop_of(&bench.applied(*op, 4)), Some(2));
    // A copy of the same forward that was sent at a higher hop now waits for it as well.
    let request = ForwardRequest { hop: 4, ..forward_request(bench.to(2), 1, 4) };
    bench.ask(StorageRequest::Forward(request), b"data");
    bench.now += 200;
    assert_eq!(hop_of(&bench.give(Event::Tick)), Some(5), "the repeated call");
}

/// A truncated file leaves removed chunks. A query for existing chunks must not block the replica
/// while it examines all of them.
#[test]
fn a_query_looks_at_a_bounded_number_of_removed_chunks() {
    const REMOVED: u32 = 20_000;
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    for index in 0..=REMOVED + 5 {
        let chunk = ChunkId::new(CHUNK.inode, index);
        let committed = ChunkState { removed: index < REMOVED, ..state(2, tags(2)) };
        bench.metas.0.insert(chunk, ChunkMeta { chunk, committed, pending: None });
    }
    let (mut after, mut found, mut answers) = (None, Vec::new(), 0);
    loop {
        answers += 1;
        let (to, inode) = (bench.to(1), CHUNK.inode);
        let query = QueryChunks { to, inode, after, limit: 4 };
        let (chunks, last) = match &bench.ask(StorageRequest::QueryChunks(query), b"")[..] {
            [Action::Reply { result: Ok(StorageReply::Chunks { chunks, last }), .. }] => {
                (chunks.clone(), *last)
            }
            other => panic!("{other:?}"),
        };
        assert!(chunks.len() <= 5, "{chunks:?}");
        let newest = chunks.last().map(|it| it.index);
        found.extend(chunks.into_iter().filter(|it| it.length > 0).map(|it| it.index));
        if last {
            break;
        }
        assert!(newest > after, "it continues");
        after = newest;
    }
    assert_eq!(found, (REMOVED..=REMOVED + 5).collect::<Vec<_>>());
    assert!(answers >= 3, "{answers} answers for {REMOVED} removed chunks");
}

/// Each fence by itself: in schedules, others stand behind it.
#[test]
fn a_forward_of_another_sender_or_version_of_the_chain_is_refused() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    for from in [2, 3, 9] {
        let (from, target) = (TargetId(from), TargetId(2));
        let refused = error_of(&bench.forward(2, from.0, 1));
        assert_eq!(refused, StorageError::NotPredecessor { from, target });
    }
    for version in [2, 4] {
        let to = Address { chain_version: ChainVersion(version), ..bench.to(2) };
        let request = StorageRequest::Forward(forward_request(to, 1, 1));
        let refused = bench.ask(request, b"data");
        let Some(Action::Reply { result: Err(error), .. }) = refused.last() else {
            panic!("{refused:?}")
        };
        assert!(matches!(error, StorageError::ChainVersionMismatch { .. }), "{error}");
    }
    apply_op(&bench.forward(2, 1, 1));
}

#[test]
fn a_sync_is_taken_from_its_predecessor_and_ended_in_its_session_alone() {
    let mut bench = Bench::started(1);
    bench.give(Event::Routing(chain(5, &[(2, Serving), (1, Syncing), (3, Offline)])));
    let to = bench.to(1);
    let start = |from| StorageRequest::SyncStart(SyncStart { to, from: TargetId(from), round: 1 });
    let refused = error_of(&bench.ask(start(3), b""));
    assert!(matches!(refused, StorageError::NotPredecessor { .. }), "{refused}");
    let session = match &bench.ask(start(2), b"")[..] {
        [Action::Reply { result: Ok(StorageReply::SyncStarted { session, .. }), .. }] => *session,
        other => panic!("{other:?}"),
    };
    let mismatch = StorageError::SyncSessionMismatch { target: TargetId(1) };
    for other in [
        SyncSession { number: session.number + 1, ..session },
        SyncSession { incarnation: Incarnation(78), ..session },
    ] {
        let done = StorageRequest::SyncDone(SyncDone { to, session: other });
        assert_eq!(error_of(&bench.ask(done, b"")), mismatch);
        assert_eq!(bench.replica.report(Millis(1)).state, LocalState::Online);
    }
    let mut request = replace(&bench, session, 1, 1);
    if let StorageRequest::Replace(request) = &mut request {
        request.from = TargetId(3);
    }
    let refused = error_of(&bench.ask(request, b"data"));
    assert!(matches!(refused, StorageError::NotPredecessor { .. }), "{refused}");
    bench.ask(StorageRequest::SyncDone(SyncDone { to, session }), b"");
    assert_eq!(bench.replica.report(Millis(1)).state, LocalState::UpToDate);
}
