//! Unit tests of one replica: several reads with one request.

use super::*;
use crate::message::{ReadDone, ReadMany, ReadPart};
use crate::replica::PlannedRead;

fn reads(to: Address, parts: &[(u32, u32)]) -> StorageRequest {
    let part = |&(index, length): &(u32, u32)| ReadPart { index, offset: 1, length };
    let parts = parts.iter().map(part).collect();
    StorageRequest::ReadMany(ReadMany { to, inode: CHUNK.inode, parts })
}

#[test]
fn reads_with_one_request_are_checked_one_by_one() {
    let mut bench = Bench::serving(2, 3, &[(1, Serving), (2, Serving), (3, Serving)]);
    bench.set(state(6, tags(6)), None);
    let (here, absent) = (CHUNK.index, CHUNK.index + 1);
    let actions = bench.ask(reads(bench.to(2), &[(here, 4), (absent, 5)]), b"");
    let [Action::ServeReads { reads: planned, .. }] = &actions[..] else { panic!("{actions:?}") };
    let [PlannedRead::Serve(first), PlannedRead::Done(Ok(second))] = &planned[..] else {
        panic!("{planned:?}")
    };
    assert_eq!((first.chunk, first.offset, first.length), (CHUNK, 1, 4));
    assert_eq!((second.length, second.chunk_length), (0, 0));
    // One of the chunks has an update in flight.
    let (op, _) = apply_op(&bench.forward(2, 1, 7));
    bench.applied(op, 7);
    // Nothing is to be read from the store.
    let actions = bench.ask(reads(bench.to(2), &[(absent, 5), (here, 4)]), b"");
    let [Action::Reply { result: Ok(StorageReply::ReadMany(results)), .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    let [Ok(ReadDone { chunk_length: 0, .. }), Err(refused)] = &results[..] else {
        panic!("{results:?}")
    };
    assert_eq!(*refused, StorageError::ChunkNotCommit { chunk: CHUNK });
    // Without a lease none is served.
    bench.now = 10_000;
    let actions = bench.ask(reads(bench.to(2), &[(absent, 5)]), b"");
    let refused = StorageError::NoLease { target: TargetId(2) };
    assert!(
        actions.iter().any(|action| matches!(action, Action::Reply { result: Err(error), .. }
            if *error == refused)),
        "{actions:?}"
    );
}

#[test]
fn too_many_or_too_large_reads_with_one_request_are_refused() {
    let mut bench = Bench::serving(1, 3, &[(1, Serving)]);
    bench.set(state(6, tags(6)), None);
    let most = vec![(CHUNK.index, (ReadMany::BYTES_MAX / 64) as u32); ReadMany::PARTS_MAX];
    let actions = bench.ask(reads(bench.to(1), &most), b"");
    assert!(matches!(actions[..], [Action::ServeReads { .. }]), "{actions:?}");
    let StorageRequest::ReadMany(small) = reads(bench.to(1), &[(CHUNK.index, 1); 64]) else {
        panic!()
    };
    assert_eq!((small.bytes(), small.charged_bytes()), (64, 64 * 4096));
    let too_many = [&most[..], &[(CHUNK.index, 0)]].concat();
    let too_large = [(CHUNK.index, u32::MAX); 2];
    for parts in [&too_many[..], &too_large] {
        let error = error_of(&bench.ask(reads(bench.to(1), parts), b""));
        assert!(matches!(error, StorageError::InvalidRequest { .. }), "{error}");
    }
}
