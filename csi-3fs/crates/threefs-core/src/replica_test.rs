//! Unit tests of one replica: events, and the exact actions that follow.

use std::collections::BTreeMap;

use super::*;
use crate::checksum::Checksum;
use crate::chunk::{ChunkState, ContentChange, StoreUpdate, TagWindow, Which};
use crate::error::StoreError;
use crate::forgotten::{ForgottenInodes, InodeRange};
use crate::heartbeat::LocalState;
use crate::ids::{
    ChainId, ChainVersion, ChannelId, ChunkVersion, ClientId, Epoch, Incarnation, InodeId, NodeId,
    RequestTag, TargetId,
};
use crate::layout::CHUNK_BYTES_MAX;
use crate::message::{
    Address, Content, ForgetInodes, ForwardRequest, LastChunk, QueryChunks, ReadRequest,
    ReplaceRequest, SyncDone, SyncSession, SyncStart, UpdateRequest, Updated,
};
use crate::routing::PublicState;
use PublicState::{LastSrv, Offline, Serving, Syncing, Waiting};

const CHAIN: ChainId = ChainId(1);
const CHUNK: ChunkId = ChunkId::new(InodeId(5), 0);
const TAG: RequestTag = RequestTag { client: ClientId(9), channel: ChannelId(0), sequence: 4 };

#[path = "replica_condition_test.rs"]
mod condition;
#[path = "replica_differs_test.rs"]
mod differs;
#[path = "replica_epoch_test.rs"]
mod epochs;
#[path = "replica_failure_test.rs"]
mod failure;
#[path = "replica_fence_test.rs"]
mod fence;
#[path = "replica_forget_test.rs"]
mod forget;
#[path = "replica_lost_test.rs"]
mod lost;
#[path = "replica_prepare_test.rs"]
mod prepare;
#[path = "purge_test.rs"]
mod purge;
#[path = "replica_read_test.rs"]
mod read;
#[path = "replica_sync_test.rs"]
mod sync;
#[path = "replica_versions_test.rs"]
mod versions;

/// A store with the content that the test sets.
#[derive(Default)]
struct Metas(BTreeMap<ChunkId, ChunkMeta>, ForgottenInodes, ChunkVersion);

impl ChunkMetas for Metas {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.0.get(&chunk).cloned()
    }

    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.0.range(chunk.first_version()..=chunk).next_back().map(|(_, meta)| meta.clone())
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
    /// Unanswered prepares.
    prepares: Vec<CallId>,
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
        let mut bench = Self::new(me);
        bench.give(Event::Routing(chain(1, &[(me, LastSrv)])));
        bench.give(Event::Routing(chain(version, states)));
        bench.give(Event::Lease { valid_until: Millis(10_000) });
        bench
    }

    fn new(me: u64) -> Self {
        let mut config = Config::new(TargetId(me), CHAIN, Incarnation(77));
        config.call_timeout_ms = 100;
        let replica = Replica::new(config);
        let (metas, prepares) = (Metas::default(), Vec::new());
        Self { replica, metas, now: 1, expires: None, next_token: 0, prepares }
    }

    fn give(&mut self, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        self.replica.handle(Millis(self.now), event, &self.metas, &mut out);
        let of_prepare = |action: &Action| match action {
            Action::Apply { prepare, .. } => prepare.as_ref().map(|prepare| prepare.call),
            _ => None,
        };
        self.prepares.extend(out.iter().filter_map(of_prepare));
        out
    }

    /// The successor prepares what it was sent.
    fn answer_prepares(&mut self) {
        for call in std::mem::take(&mut self.prepares) {
            self.answer(call, Ok(StorageReply::Prepared));
        }
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

    /// Reports the pending state of `op` as durable, here and on the successor.
    fn applied(&mut self, op: OpId, version: u64) -> Vec<Action> {
        self.answer_prepares();
        let committed = self.metas.0.get(&CHUNK).map(|meta| meta.committed.clone());
        self.set(committed.unwrap_or_default(), Some(state(version, tags(version))));
        self.give(Event::Applied { op, unsent: false, result: Ok(state(version, tags(version))) })
    }

    fn committed(&mut self, op: OpId, version: u64) -> Vec<Action> {
        self.set(state(version, tags(version)), None);
        self.give(Event::Committed { op, result: Ok(state(version, tags(version))) })
    }

    fn answer(&mut self, call: CallId, result: Result<StorageReply, PeerFailure>) -> Vec<Action> {
        self.give(Event::Answer { call, result, payload: Bytes::new() })
    }
}

fn updated_reply(version: u64) -> StorageReply {
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
fn the_head_applies_confirms_commits_and_replies_in_this_order() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    let (op, update) = apply_op(&bench.update(1, TAG));
    assert_eq!(update.version, ChunkVersion(1));
    let (call, node, request) = call_of(&bench.applied(op, 1));
    assert_eq!(node, NodeId(2));
    assert!(matches!(request, StorageRequest::Confirm(confirmed)
        if confirmed.version == ChunkVersion(1) && confirmed.tag == TAG));
    match &bench.answer(call, Ok(updated_reply(1)))[..] {
        [Action::Commit { version: ChunkVersion(1), chain_version: ChainVersion(3), .. }] => {}
        other => panic!("{other:?}"),
    }
    match &bench.committed(op, 1)[..] {
        [Action::Reply { token: Token(1), result }] => assert_eq!(*result, Ok(updated_reply(1))),
        other => panic!("{other:?}"),
    }
    assert!(bench.replica.is_idle());
}

#[test]
fn the_tail_commits_without_forwarding() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    let (op, _) = apply_op(&bench.forward(2, 1, 1));
    assert!(matches!(bench.applied(op, 1)[..], [Action::Commit { .. }]));
}

#[test]
fn a_retry_gets_the_first_reply_and_an_older_request_none() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, tags(6)), None);
    match &bench.update(1, TAG)[..] {
        [Action::Reply { result, .. }] => assert_eq!(*result, Ok(updated_reply(6))),
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
fn a_new_head_refuses_a_late_write_of_an_earlier_incarnation_by_the_tags_of_the_chunk() {
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
fn an_update_beyond_the_maximum_chunk_size_is_refused() {
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
fn an_expired_update_is_not_started_even_if_it_expired_in_the_queue() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, tags(6)), None);
    let (op, _) = apply_op(&bench.update(1, RequestTag { sequence: 5, ..TAG }));
    bench.expires = Some(bench.now + 5);
    let waits = RequestTag { client: ClientId(77 << 32), ..TAG };
    assert!(bench.update(1, waits).is_empty());
    bench.now += 5;
    bench.applied(op, 7);
    let actions = bench.committed(op, 7);
    let expired = StorageError::Expired { target: TargetId(1) };
    let is_expired = |action: &Action| matches!(action, Action::Reply { result: Err(error), .. } if *error == expired);
    assert!(actions.iter().any(is_expired), "{actions:?}");
    assert!(!actions.iter().any(|action| matches!(action, Action::Apply { .. })), "{actions:?}");
    // An update completed in time is still answered later.
    bench.set(state(7, tags(7).with(waits, ChunkVersion(7))), None);
    assert!(matches!(bench.update(1, waits)[..], [Action::Reply { result: Ok(_), .. }]));
}

#[test]
fn a_pending_update_or_a_missing_lease_refuses_reads() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(6, tags(6)), None);
    let to = bench.to(2);
    let request = StorageRequest::Read(ReadRequest { to, chunk: CHUNK, offset: 0, length: 4 });
    assert!(matches!(bench.ask(request.clone(), b"")[..], [Action::ServeRead { .. }]));
    let (op, _) = apply_op(&bench.forward(2, 1, 7));
    bench.applied(op, 7);
    assert_eq!(
        error_of(&bench.ask(request.clone(), b"")),
        StorageError::ChunkNotCommit { chunk: CHUNK }
    );
    bench.now = 10_000;
    let actions = bench.ask(request, b"");
    assert!(
        actions.iter().any(|action| matches!(action, Action::Reply { result: Err(error), .. }
            if *error == StorageError::NoLease { target: TargetId(2) })),
        "{actions:?}"
    );
}

#[test]
fn a_forward_has_the_priority_of_the_requests_that_wait_for_it() {
    let mut bench = Bench::serving(2, 5, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(3, tags(3)), None);
    let hop_of = |actions: &[Action]| {
        actions.iter().find_map(|action| match action {
            Action::Call { request: StorageRequest::Confirm(request), .. } => Some(request.hop),
            _ => None,
        })
    };
    let (op, _) = apply_op(&bench.forward(2, 1, 4));
    assert_eq!(hop_of(&bench.applied(op, 4)), Some(2));
    // A copy of the same forward that was sent at a higher hop now waits for it as well.
    let request = ForwardRequest { hop: 4, ..forward_request(bench.to(2), 1, 4) };
    bench.ask(StorageRequest::Forward(request), b"data");
    bench.now += 200;
    assert_eq!(hop_of(&bench.give(Event::Tick)), Some(5), "the repeated call");
}

/// A truncated file leaves removed chunks. A query for existing chunks must not block the replica
/// while it examines all of them.
#[test]
fn a_query_scans_a_bounded_number_of_removed_chunks() {
    const REMOVED: u32 = 20_000;
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    for index in 0..=REMOVED + 5 {
        let chunk = ChunkId::new(CHUNK.inode, index);
        let committed = ChunkState { removed: index < REMOVED, ..state(2, tags(2)) };
        bench.metas.0.insert(chunk, ChunkMeta { chunk, committed, pending: None });
    }
    let (mut after, mut existing, mut answers) = (None, Vec::new(), 0);
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
        existing.extend(chunks.into_iter().filter(|it| it.length > 0).map(|it| it.index));
        if last {
            break;
        }
        assert!(newest > after, "it continues");
        after = newest;
    }
    assert_eq!(existing, (REMOVED..=REMOVED + 5).collect::<Vec<_>>());
    assert!(answers >= 3, "{answers} answers for {REMOVED} removed chunks");
}
