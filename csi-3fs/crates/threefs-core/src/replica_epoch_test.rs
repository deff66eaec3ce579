//! Versions of a chunk: the first update in a later epoch starts one, older ones do not change.

use super::*;

const OLD: &[u8] = b"old content";

fn of_content(content: &[u8], version: u64) -> ChunkState {
    let (length, checksum) = (content.len() as u32, Checksum::of(content));
    ChunkState { length, checksum, ..state(version, tags(version)) }
}

/// Epoch `count` of a volume; 0 is the one before its first snapshot.
pub(super) fn epoch_of(count: u32) -> Epoch {
    Epoch::new(u32::from(count > 0), count)
}

pub(super) fn version(count: u32) -> ChunkId {
    CHUNK.in_epoch(epoch_of(count))
}

fn next_tag() -> RequestTag {
    RequestTag { sequence: TAG.sequence + 1, ..TAG }
}

fn write_at(bench: &Bench, epoch: u32, tag: RequestTag, offset: u32) -> UpdateRequest {
    UpdateRequest {
        to: bench.to(1),
        chunk: version(epoch),
        tag,
        change: ContentChange::Write { offset },
        payload_checksum: Checksum::of(b"data"),
        chunk_bytes: 65_536,
    }
}

impl Bench {
    fn set_version(&mut self, epoch: u32, committed: ChunkState, pending: Option<ChunkState>) {
        let chunk = version(epoch);
        self.metas.0.insert(chunk, ChunkMeta { chunk, committed, pending });
    }

    fn write(&mut self, epoch: u32, tag: RequestTag, offset: u32) -> Vec<Action> {
        let request = write_at(self, epoch, tag, offset);
        self.ask(StorageRequest::Update(request), b"data")
    }

    fn read(&mut self, up_to: Option<u32>) -> Vec<Action> {
        let chunk = version(up_to.unwrap_or(0));
        let request = ReadRequest { to: self.to(1), chunk, offset: 0, length: 9 };
        self.ask(
            match up_to {
                Some(_) => StorageRequest::ReadUpTo(request),
                None => StorageRequest::Read(request),
            },
            b"",
        )
    }
}

/// The head of two replicas, with version 7 of the chunk, of epoch 2.
fn head() -> Bench {
    let mut bench = Bench::serving(1, 3, &[(1, Serving), (2, Serving)]);
    bench.give(super::fence::fence(1));
    bench.set_version(2, of_content(OLD, 7), None);
    bench
}

fn copy_op(actions: &[Action], chunk: ChunkId) -> OpId {
    match actions {
        [Action::ReadContent { op, chunk: read, which: Which::Committed }] if *read == chunk => *op,
        other => panic!("expected one read of {chunk}, got {other:?}"),
    }
}

#[test]
fn the_first_update_in_an_epoch_applies_to_a_copy_and_is_forwarded_as_a_whole_chunk() {
    let mut bench = head();
    let op = copy_op(&bench.write(5, next_tag(), 4), version(2));
    let content = Ok((of_content(OLD, 7), Bytes::from_static(OLD)));
    let actions = bench.give(Event::Content { op, result: content });
    let [Action::Apply { update, payload, payload_checksum, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(&payload[..], b"old dataent");
    assert_eq!(*payload_checksum, Checksum::of(payload));
    let made = ChunkVersion(8);
    assert_eq!((update.chunk, update.version), (version(5), made));
    assert_eq!(update.change, ContentChange::Replace);
    assert_eq!(update.tags, tags(7).with(next_tag(), made));
    let pending = ChunkState { tags: update.tags.clone(), ..of_content(payload, 8) };
    bench.set_version(5, ChunkState::default(), Some(pending.clone()));
    let actions = bench.give(Event::Applied { op, unsent: false, result: Ok(pending) });
    let [Action::Call { request: StorageRequest::Forward(forward), payload: sent, .. }] =
        &actions[..]
    else {
        panic!("{actions:?}");
    };
    assert_eq!(sent, payload);
    assert!(forward.fresh && forward.change == ContentChange::Replace);
    assert_eq!((forward.chunk, forward.version), (version(5), made));
    assert_eq!(forward.chunk_checksum, *payload_checksum);
}

#[test]
fn an_update_that_needs_no_earlier_content_copies_only_the_tags() {
    let mut bench = head();
    let change = ContentChange::Replace;
    let request = UpdateRequest { change, ..write_at(&bench, 5, next_tag(), 0) };
    let (_, update) = apply_op(&bench.ask(StorageRequest::Update(request), b"data"));
    assert_eq!((update.chunk, update.version), (version(5), ChunkVersion(8)));
    assert_eq!(update.tags, tags(7).with(next_tag(), ChunkVersion(8)));
}

#[test]
fn an_update_of_an_earlier_epoch_than_the_newest_version_is_refused() {
    let mut bench = head();
    let expected = StorageError::EpochEnded { chunk: version(1), newest: epoch_of(2) };
    assert_eq!(error_of(&bench.write(1, next_tag(), 0)), expected);
    let (_, update) = apply_op(&bench.write(2, next_tag(), 0));
    assert_eq!(update.chunk, version(2));
}

#[test]
fn a_repeated_update_is_recognised_whatever_its_epoch() {
    for epoch in [0, 2, 5] {
        match &head().write(epoch, TAG, 0)[..] {
            [Action::Reply { result: Ok(StorageReply::Updated(done)), .. }] => {
                assert_eq!(done.version, ChunkVersion(7));
            }
            other => panic!("{other:?}"),
        }
    }
    let mut bench = head();
    copy_op(&bench.write(5, next_tag(), 4), version(2));
    assert!(bench.write(6, next_tag(), 4).is_empty(), "it waits for the one in progress");
}

#[test]
fn a_pending_update_is_resolved_before_a_new_version_starts() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set_version(2, of_content(OLD, 7), Some(of_content(b"new", 8)));
    match &bench.write(5, next_tag(), 4)[..] {
        [Action::Commit { chunk, version: ChunkVersion(8), .. }] => {
            assert_eq!(*chunk, version(2));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_damaged_payload_is_not_merged_into_the_copy() {
    let mut bench = head();
    let request = write_at(&bench, 5, next_tag(), 4);
    let refused = error_of(&bench.ask(StorageRequest::Update(request), b"dat?"));
    assert!(matches!(refused, StorageError::ChecksumMismatch { .. }), "{refused}");
}

#[test]
fn an_update_that_expires_while_the_content_is_copied_is_not_started() {
    let mut bench = head();
    bench.expires = Some(bench.now + 5);
    let op = copy_op(&bench.write(5, next_tag(), 4), version(2));
    bench.now += 5;
    let result = Ok((of_content(OLD, 7), Bytes::from_static(OLD)));
    let refused = error_of(&bench.give(Event::Content { op, result }));
    assert!(matches!(refused, StorageError::Expired { .. }), "{refused}");
    assert!(bench.replica.is_idle());
}

#[test]
fn a_damaged_old_version_is_repaired_and_the_update_refused() {
    let mut bench = head();
    let chunk = version(2);
    let op = copy_op(&bench.write(5, next_tag(), 4), chunk);
    let result = Err(StoreError::Corrupt { chunk, block: 0 });
    let actions = bench.give(Event::Content { op, result });
    let refused = |it: &Action| {
        matches!(it, Action::Reply { result: Err(StorageError::ChunkCorrupt { .. }), .. })
    };
    let repair = |it: &Action| {
        matches!(it, Action::Call { request: StorageRequest::Repair(repair), .. }
            if repair.chunk == chunk)
    };
    assert!(actions.iter().any(refused) && actions.iter().any(repair), "{actions:?}");
}

#[test]
fn a_read_is_of_the_newest_version_up_to_its_epoch() {
    let mut bench = head();
    bench.set_version(5, of_content(b"newer", 8), None);
    let cases = [
        (None, Some(5)),
        (Some(9), Some(5)),
        (Some(4), Some(2)),
        (Some(2), Some(2)),
        (Some(1), None),
    ];
    for (up_to, expected) in cases {
        match (&bench.read(up_to)[..], expected) {
            ([Action::ServeRead { request, .. }], Some(epoch)) => {
                assert_eq!(request.chunk, version(epoch));
            }
            ([Action::Reply { result: Ok(StorageReply::Read(done)), .. }], None) => {
                assert_eq!((done.version, done.length), (ChunkVersion(0), 0));
            }
            other => panic!("{up_to:?}: {other:?}"),
        }
    }
    // A later version that is pending does not hide an earlier one from a snapshot.
    bench.set_version(7, ChunkState::default(), Some(of_content(b"newest", 9)));
    let refused = StorageError::ChunkNotCommit { chunk: version(7) };
    assert_eq!(error_of(&bench.read(None)), refused);
    assert!(matches!(&bench.read(Some(6))[..], [Action::ServeRead { .. }]));
}

fn forward_of(bench: &Bench, epoch: u32, update: u64) -> ForwardRequest {
    let request = forward_request(bench.to(2), 1, update);
    let (chunk, change) = (version(epoch), ContentChange::Replace);
    ForwardRequest { chunk, change, fresh: true, tag: next_tag(), ..request }
}

#[test]
fn a_forward_starts_a_version_with_the_tags_of_the_one_before() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.set_version(2, of_content(OLD, 7), None);
    let request = forward_of(&bench, 5, 8);
    let (_, update) = apply_op(&bench.ask(StorageRequest::Forward(request), b"data"));
    assert_eq!((update.chunk, update.version), (version(5), ChunkVersion(8)));
    assert_eq!(update.tags, tags(7).with(next_tag(), ChunkVersion(8)));
}

#[test]
fn a_late_forward_of_an_earlier_epoch_is_refused() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.set_version(5, of_content(OLD, 7), None);
    let request = forward_of(&bench, 2, 6);
    let refused = error_of(&bench.ask(StorageRequest::Forward(request), b"data"));
    assert!(matches!(refused, StorageError::ChunkStaleUpdate { .. }), "{refused}");
    assert_eq!(bench.metas.0.len(), 1);
}

#[test]
fn a_forward_of_a_new_version_without_the_update_before_it_is_a_disagreement() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving)]);
    bench.set_version(2, of_content(OLD, 6), None);
    let request = forward_of(&bench, 5, 8);
    let actions = bench.ask(StorageRequest::Forward(request), b"data");
    let alert = |it: &Action| matches!(it, Action::Alert(Alert::Disagreement { .. }));
    assert!(actions.iter().any(alert), "{actions:?}");
}

#[test]
fn lists_have_the_newest_version_of_each_chunk() {
    let mut bench = head();
    bench.set_version(5, of_content(b"newer", 8), None);
    let removed = ChunkState { removed: true, ..of_content(b"", 9) };
    for (epoch, committed) in [(0, of_content(OLD, 3)), (2, removed)] {
        let chunk = ChunkId::new(CHUNK.inode, 1).in_epoch(epoch_of(epoch));
        bench.metas.0.insert(chunk, ChunkMeta { chunk, committed, pending: None });
    }
    let chunk = ChunkId::new(CHUNK.inode, 2);
    let committed = of_content(b"x", 1);
    bench.metas.0.insert(chunk, ChunkMeta { chunk, committed, pending: None });
    for (limit, expected) in [(1, vec![(0, 5)]), (9, vec![(0, 5), (2, 1)])] {
        let (to, inode) = (bench.to(1), CHUNK.inode);
        let query = QueryChunks { to, inode, after: None, limit };
        match &bench.ask(StorageRequest::QueryChunks(query), b"")[..] {
            [Action::Reply { result: Ok(StorageReply::Chunks { chunks, .. }), .. }] => {
                let listed: Vec<_> = chunks.iter().map(|it| (it.index, it.length)).collect();
                assert_eq!(listed, expected);
            }
            other => panic!("{other:?}"),
        }
    }
}
