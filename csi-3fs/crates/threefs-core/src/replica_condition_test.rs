//! Unit tests of one replica: updates of one version of a chunk.

use super::*;

fn remove(bench: &Bench, sequence: u64, at: u64) -> StorageRequest {
    let update = UpdateRequest {
        to: bench.to(1),
        chunk: CHUNK,
        tag: RequestTag { client: ClientId(33), channel: ChannelId(1), sequence },
        change: ContentChange::Remove,
        payload_checksum: Checksum::of(b""),
        chunk_bytes: 65_536,
    };
    StorageRequest::UpdateAt(update, ChunkVersion(at))
}

fn changed(expected: u64, committed: u64) -> StorageError {
    let (expected, committed) = (ChunkVersion(expected), ChunkVersion(committed));
    StorageError::ChunkChanged { chunk: CHUNK, expected, committed }
}

#[test]
fn an_update_of_another_version_changes_nothing() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(5, tags(5)), None);
    for at in [0, 4, 6] {
        let actions = bench.ask(remove(&bench, at, at), b"");
        assert_eq!(error_of(&actions), changed(at, 5));
        assert!(!changed(at, 5).retryable());
    }
    let (op, update) = apply_op(&bench.ask(remove(&bench, 7, 5), b""));
    assert_eq!(update.version, ChunkVersion(6));
    bench.set(state(5, tags(5)), Some(state(6, update.tags.clone())));
    bench.give(Event::Applied { op, unsent: false, result: Ok(state(6, update.tags.clone())) });
    bench.set(state(6, update.tags.clone()), None);
    bench.give(Event::Committed { op, result: Ok(state(6, update.tags)) });
    // A repeated request is answered, and not compared with the version that it made itself.
    match &bench.ask(remove(&bench, 7, 5), b"")[..] {
        [Action::Reply { result: Ok(StorageReply::Updated(updated)), .. }] => {
            assert_eq!(updated.version, ChunkVersion(6));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pending_update_is_completed_before_versions_are_compared() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(5, tags(5)), Some(state(6, tags(6))));
    let actions = bench.ask(remove(&bench, 1, 5), b"");
    let op = match actions[..] {
        [Action::Commit { op, version: ChunkVersion(6), .. }] => op,
        ref other => panic!("{other:?}"),
    };
    bench.set(state(6, tags(6)), None);
    let replies = bench.give(Event::Committed { op, result: Ok(state(6, tags(6))) });
    assert_eq!(error_of(&replies), changed(5, 6));
}

#[test]
fn chunks_are_listed_with_their_versions() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(5, tags(5)), None);
    let query = QueryChunks { to: bench.to(1), inode: CHUNK.inode, after: None, limit: 10 };
    match &bench.ask(StorageRequest::QueryVersions(query), b"")[..] {
        [Action::Reply { result: Ok(StorageReply::ChunkVersions { chunks, last }), .. }] => {
            let chunk = LastChunk { index: CHUNK.index, length: 4 };
            assert_eq!((&chunks[..], *last), (&[(chunk, ChunkVersion(5))][..], true));
        }
        other => panic!("{other:?}"),
    }
}
