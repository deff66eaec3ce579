//! Written chunks that do not fit into the inode, in snapshots.

use std::sync::Arc;

use crate::protocol::{At, InodeKind, LengthReport, MetaChange, MetaQuery, MetaReply, Written};
use crate::tests::fixture::Fixture;
use crate::tests::invariants::check_tree;
use crate::tests::snapshots::audit::{further_chunks, shown_files};
use crate::tests::snapshots::{TestFences, history_rows, remove_snapshot};

const CHUNK: u64 = 1 << 20;

/// Reports every second chunk from `first` on.
async fn write(fixture: &Fixture, path: &str, first: u64, count: u64) {
    let inode = fixture.stat(path).await.unwrap();
    let InodeKind::File { truncate_version, .. } = inode.kind else { panic!("no file") };
    let mut written = Written::default();
    for chunk in (first..).step_by(2).take(count as usize) {
        written.add_bytes(chunk * CHUNK, chunk * CHUNK + 1, CHUNK as u32);
    }
    let length = (first + 2 * count) * CHUNK;
    let report = LengthReport { inode: inode.id, length, truncate_version, written };
    let report = MetaChange::ReportLengths { reports: vec![report], ends: vec![] };
    fixture.change(report).await.unwrap();
}

async fn chunks(fixture: &Fixture, path: &str) -> Vec<(u32, u32)> {
    let mut found = Written::default();
    for first in (0..20_000).step_by(1000) {
        let chunks = (first..first + 1000).collect();
        let stat = MetaQuery::StatChunks { at: At::path(path), chunks };
        let MetaReply::Inode(inode) = fixture.query(stat).await.unwrap() else {
            panic!("no inode")
        };
        let InodeKind::File { written, .. } = inode.kind else { panic!("no file") };
        found.merge(&written);
    }
    found.iter().collect()
}

#[tokio::test]
async fn a_snapshot_has_the_chunks_that_must_exist_beyond_those_in_the_inode() {
    let fixture = Fixture::memory().await.with_fences(Arc::new(TestFences::default()));
    fixture.volume("/v").await;
    fixture.create("/v/f").await;
    write(&fixture, "/v/f", 0, 500).await;
    let mut expected = vec![("s0".to_owned(), chunks(&fixture, "/v/f").await)];
    fixture.snapshot("/v", "s0").await.unwrap();
    for (number, first) in [(1, 1), (2, 9_000), (3, 400), (4, 16_000)] {
        match number {
            3 => {
                let length = 700 * CHUNK;
                let cut = MetaChange::SetLength { at: At::path("/v/f"), length };
                fixture.change(cut).await.unwrap();
            }
            _ => write(&fixture, "/v/f", first, 500).await,
        }
        let name = format!("s{number}");
        expected.push((name.clone(), chunks(&fixture, "/v/f").await));
        fixture.snapshot("/v", &name).await.unwrap();
        check_tree(&fixture.store).await;
    }
    fixture.change(MetaChange::Unlink { at: At::path("/v/f") }).await.unwrap();
    fixture.collect_all().await;
    let rows = history_rows(&fixture.store).await;
    assert!(rows.iter().any(|row| row.starts_with("HWRI")), "{rows:?}");
    for removed in [2, 0, 1, 0, 0] {
        for (name, chunks_then) in &expected {
            let path = format!("/v/.snapshots/{name}/f");
            assert_eq!(&chunks(&fixture, &path).await, chunks_then, "{name}");
            let (inode, mut all) = (fixture.stat(&path).await.unwrap(), Written::default());
            let InodeKind::File { written, .. } = &inode.kind else { panic!("no file") };
            for part in [written, &further_chunks(&fixture, inode.id).await] {
                all.merge(part);
            }
            assert_eq!(&all.iter().collect::<Vec<_>>(), chunks_then, "{name}");
            // Each snapshot, as the pages have their own history.
            assert!(shown_files(&fixture).await.iter().any(|it| it.file.inode == inode.id));
        }
        let (name, _) = expected.remove(removed);
        fixture.change(remove_snapshot("/v", &name)).await.unwrap();
        fixture.tree.drop_history().await.unwrap();
        fixture.collect_all().await;
        check_tree(&fixture.store).await;
    }
    assert_eq!(history_rows(&fixture.store).await, Vec::<String>::new());
}
