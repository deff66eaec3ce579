//! Queries of an audit: every inode once, every chunk that must exist, and only inodes that are gone.

use threefs_core::ids::InodeId;

use crate::protocol::{
    At, AuditAnswer, AuditQuery, BATCH_MAX, InodeKind, LengthReport, MetaChange, MetaError,
    MetaQuery, MetaReply, ROOT,
};
use crate::tests::fixture::Fixture;
use crate::tests::scope::{Volumes, is_refused};
use crate::{AuditedFile, Written};

const CHUNK: u64 = 1 << 20;

async fn ask(fixture: &Fixture, query: AuditQuery) -> AuditAnswer {
    match fixture.query(MetaQuery::Audit(query)).await.unwrap() {
        MetaReply::Audit(answer) => answer,
        other => panic!("{other:?}"),
    }
}

/// All pages: the inodes, and the files with chunks.
async fn all(fixture: &Fixture, limit: u32) -> (Vec<InodeId>, Vec<AuditedFile>) {
    let (mut inodes, mut files) = (Vec::new(), Vec::new());
    loop {
        let after = inodes.last().copied().unwrap_or(InodeId(0));
        match ask(fixture, AuditQuery::Files { after, limit }).await {
            AuditAnswer::Files { inodes: page, files: with_chunks, more } => {
                inodes.extend(page);
                files.extend(with_chunks);
                if !more {
                    return (inodes, files);
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn unknown(fixture: &Fixture, inodes: &[InodeId]) -> Vec<InodeId> {
    match ask(fixture, AuditQuery::Unknown { inodes: inodes.to_vec() }).await {
        AuditAnswer::Unknown { inodes, .. } => inodes,
        other => panic!("{other:?}"),
    }
}

async fn report(fixture: &Fixture, path: &str, written: &Written) {
    let inode = fixture.stat(path).await.unwrap();
    let InodeKind::File { truncate_version, .. } = inode.kind else { panic!("{inode:?}") };
    let mut rest = written.clone();
    while !rest.is_empty() {
        let (inode, written) = (inode.id, rest.take(300));
        let report = LengthReport { inode, length: 1 << 40, truncate_version, written };
        let (reports, ends) = (vec![report], Vec::new());
        fixture.change(MetaChange::ReportLengths { reports, ends }).await.unwrap();
    }
}

#[tokio::test]
async fn pages_have_every_inode_once_and_files_with_chunks() {
    let fixture = Fixture::memory().await;
    let mut expected = vec![ROOT];
    for number in 0..7 {
        expected.push(fixture.create(&format!("/{number}")).await.id);
    }
    expected.push(fixture.make_directory("/directory").await.id);
    report(&fixture, "/3", &Written::of_bytes(0, 2 * CHUNK, CHUNK as u32)).await;
    for limit in [1, 2, 3, 9, 100, u32::MAX] {
        let (inodes, files) = all(&fixture, limit).await;
        assert_eq!(inodes, expected);
        let written: Vec<_> = files.iter().flat_map(|file| file.written.iter()).collect();
        assert_eq!((files[0].inode, written), (expected[4], vec![(0, 1)]));
    }
    assert_eq!(unknown(&fixture, &expected).await, []);
    // A removed file is known until its chunks have been dropped, and never again.
    fixture.change(MetaChange::Unlink { at: At::path("/3") }).await.unwrap();
    assert_eq!(unknown(&fixture, &expected).await, []);
    fixture.collect_all().await;
    assert_eq!(unknown(&fixture, &expected).await, [expected[4]]);
    assert_eq!(all(&fixture, 100).await.1, []);
    let never = InodeId(u64::MAX);
    assert_eq!(unknown(&fixture, &[never, ROOT]).await, [never]);
}

#[tokio::test]
async fn all_ranges_of_a_file_are_listed() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let mut written = Written::default();
    // Single chunks, and a range of several full pages.
    (0..9000).step_by(3).for_each(|index| written.add(index, index));
    written.add(20_000, 60_000);
    report(&fixture, "/file", &written).await;
    let (_, files) = all(&fixture, 100).await;
    let mut listed = files[0].written.clone();
    assert!(listed.has_more());
    let (mut after, mut pages) = (None, 0);
    loop {
        match ask(&fixture, AuditQuery::Written { inode: file, after }).await {
            AuditAnswer::Written { written, next } => {
                listed.merge(&written);
                pages += 1;
                match next {
                    Some(_) => after = next,
                    None => break,
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(listed.iter().collect::<Vec<_>>(), written.iter().collect::<Vec<_>>());
    assert!(pages > 1);
}

#[tokio::test]
async fn all_names_of_an_inode_are_found() {
    let fixture = Fixture::memory().await;
    let directory = fixture.make_directory("/a/b").await.id;
    let file = fixture.create("/a/b/one").await.id;
    fixture.create("/a/b/other").await;
    let link = MetaChange::Link { from: At::path("/a/b/one"), to: At::path("/two") };
    fixture.change(link).await.unwrap();
    let names = |after| AuditQuery::Names { inodes: vec![file], after };
    let both = vec![(file, ROOT, "two".to_owned()), (file, directory, "one".to_owned())];
    assert_eq!(
        ask(&fixture, names(None)).await,
        AuditAnswer::Names { names: both.clone(), next: None }
    );
    let after_first = names(Some((ROOT, "two".into())));
    let names = both[1..].to_vec();
    assert_eq!(ask(&fixture, after_first).await, AuditAnswer::Names { names, next: None });
}

#[tokio::test]
async fn an_audit_needs_the_key_and_has_bounded_batches() {
    let volumes = Volumes::new().await;
    for query in [
        AuditQuery::Files { after: InodeId(0), limit: 10 },
        AuditQuery::Written { inode: volumes.a.id, after: None },
        AuditQuery::Names { inodes: vec![volumes.a.id], after: None },
        AuditQuery::Unknown { inodes: vec![volumes.a.id] },
    ] {
        is_refused(volumes.query(MetaQuery::Audit(query)).await);
    }
    let inodes: Vec<InodeId> = (0..=BATCH_MAX as u64).map(InodeId).collect();
    let names = AuditQuery::Names { inodes: inodes.clone(), after: None };
    for query in [AuditQuery::Unknown { inodes }, names] {
        let error = volumes.fixture.query(MetaQuery::Audit(query)).await.unwrap_err();
        assert!(matches!(error, MetaError::Invalid { .. }), "{error}");
    }
}
