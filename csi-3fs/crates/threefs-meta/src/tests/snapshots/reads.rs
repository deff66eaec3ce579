//! Reads and refused changes of snapshots, moves between volumes, removal of volumes.

use std::sync::Arc;

use crate::Identity;
use crate::protocol::{
    At, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, Written,
};
use crate::tests::fixture::{Fixture, create, make_directory, rename, soon};
use crate::tests::invariants::check_tree;
use crate::tests::snapshots::{TestFences, history_rows, remove_snapshot, set_quota};

async fn fixture() -> Fixture {
    Fixture::memory().await.with_fences(Arc::new(TestFences::default()))
}

fn is_read_only<T>(result: &Result<T, MetaError>) -> bool {
    matches!(result, Err(MetaError::ReadOnly { .. }))
}

#[tokio::test]
async fn snapshots_are_read_only_and_their_directory_is_not_listed() {
    let fixture = fixture().await;
    fixture.volume("/v").await;
    let file = fixture.create("/v/f").await;
    fixture.snapshot("/v", "s").await.unwrap();
    assert_eq!(fixture.names("/v").await, ["f"]);
    let shown = fixture.stat("/v/.snapshots/s/f").await.unwrap();
    assert_ne!(shown.id, file.id);
    for change in [
        create("/v/.snapshots/s/g"),
        create("/v/.snapshots/g"),
        make_directory("/v/.snapshots/s/d", false),
        rename("/v/.snapshots/s/f", "/v/g"),
        rename("/v/f", "/v/.snapshots/s/f"),
        rename("/v/.snapshots", "/v/real"),
        MetaChange::Unlink { at: At::path("/v/.snapshots/s/f") },
        MetaChange::RemoveTree { at: At::path("/v/.snapshots/s") },
        MetaChange::RemoveTree { at: At::path("/v/.snapshots") },
        MetaChange::RemoveDirectory { at: At::path("/v/.snapshots") },
        MetaChange::Open { at: At::inode(shown.id), write: true },
        MetaChange::SetLength { at: At::inode(shown.id), length: 0 },
        MetaChange::Link { from: At::inode(shown.id), to: At::path("/v/link") },
    ] {
        let result = fixture.change(change.clone()).await;
        assert!(is_read_only(&result), "{change:?}: {result:?}");
    }
    let real = fixture.change(make_directory("/v/.snapshots", false)).await;
    assert!(matches!(real, Err(MetaError::Exists { .. })), "{real:?}");
    let access = crate::permission::WRITE;
    let open = MetaQuery::Open { at: At::inode(shown.id), access, client: fixture.client };
    assert!(is_read_only(&fixture.query(open).await));
    assert_eq!(fixture.names("/v/.snapshots/s").await, ["f"]);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn dots_and_paths_lead_back_to_the_volume() {
    let fixture = fixture().await;
    let volume = fixture.volume("/v").await;
    fixture.make_directory("/v/d/e").await;
    fixture.snapshot("/v", "s").await.unwrap();
    let deep = fixture.stat("/v/.snapshots/s/d/e").await.unwrap();
    let MetaReply::Path(path) =
        fixture.query(MetaQuery::PathOf { directory: deep.id }).await.unwrap()
    else {
        panic!("no path")
    };
    assert_eq!(path, "/v/.snapshots/s/d/e");
    let up = fixture.stat("/v/.snapshots/s/d/e/../../../..").await.unwrap();
    assert_eq!(up.id, volume);
}

#[tokio::test]
async fn a_ticket_reads_snapshots_of_its_volume_only() {
    let fixture = fixture().await;
    let volume = fixture.volume("/v").await;
    fixture.create("/v/f").await;
    fixture.volume("/w").await;
    fixture.create("/w/g").await;
    fixture.snapshot("/v", "s").await.unwrap();
    fixture.snapshot("/w", "s").await.unwrap();
    let foreign = fixture.stat("/w/.snapshots/s/g").await.unwrap();
    let caller = Identity { scope: Some(volume), ..Identity::ROOT };
    let stat = |at: At| {
        let query = MetaQuery::Stat { at, follow: true };
        let request = MetaRequest::Query { caller: caller.clone(), query };
        fixture.tree.answer(request, soon())
    };
    stat(At::path("/.snapshots/s/f")).await.unwrap();
    stat(At::path("/.snapshots/s/../../f")).await.unwrap();
    let refused = stat(At::inode(foreign.id)).await;
    assert!(matches!(refused, Err(MetaError::PermissionDenied { .. })), "{refused:?}");
}

#[tokio::test]
async fn nothing_moves_between_volumes_that_have_had_snapshots() {
    let fixture = fixture().await;
    fixture.volume("/v").await;
    fixture.volume("/w").await;
    fixture.create("/v/f").await;
    fixture.create("/w/g").await;
    fixture.make_directory("/v/d").await;
    fixture.change(rename("/v/f", "/w/f")).await.unwrap();
    fixture.change(rename("/w/f", "/v/f")).await.unwrap();
    fixture.snapshot("/v", "s").await.unwrap();
    for (from, to) in [("/v/f", "/w/f"), ("/w/g", "/v/g"), ("/v/f", "/f"), ("/v/d", "/d")] {
        let refused = fixture.change(rename(from, to)).await;
        assert!(matches!(refused, Err(MetaError::CrossQuota { .. })), "{from}: {refused:?}");
    }
    let refused = fixture.change(set_quota("/v/d")).await;
    assert!(matches!(refused, Err(MetaError::CrossQuota { .. })), "{refused:?}");
    // One that no snapshot shows becomes a volume inside the volume: an empty directory in later
    // snapshots.
    fixture.volume("/v/inner").await;
    fixture.create("/v/inner/x").await;
    fixture.snapshot("/v", "t").await.unwrap();
    assert_eq!(fixture.names("/v/.snapshots/t").await, ["d", "f", "inner"]);
    assert_eq!(fixture.names("/v/.snapshots/t/inner").await, Vec::<String>::new());
    fixture.change(MetaChange::RemoveTree { at: At::path("/v/inner") }).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(fixture.names("/v/.snapshots/t/inner").await, Vec::<String>::new());
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_volume_with_snapshots_is_removed_only_with_a_directory_above_it() {
    let fixture = fixture().await;
    fixture.make_directory("/a").await;
    fixture.volume("/a/v").await;
    fixture.create("/a/v/f").await;
    fixture.snapshot("/a/v", "s").await.unwrap();
    fixture.change(MetaChange::Unlink { at: At::path("/a/v/f") }).await.unwrap();
    for change in [
        MetaChange::RemoveDirectory { at: At::path("/a/v") },
        MetaChange::RemoveTree { at: At::path("/a/v") },
    ] {
        let refused = fixture.change(change).await;
        assert!(matches!(refused, Err(MetaError::NotEmpty { .. })), "{refused:?}");
    }
    fixture.change(MetaChange::RemoveTree { at: At::path("/a") }).await.unwrap();
    for _ in 0..4 {
        fixture.collect_all().await;
        fixture.tree.drop_history().await.unwrap();
        check_tree(&fixture.store).await;
    }
    assert_eq!(history_rows(&fixture.store).await, Vec::<String>::new());
    assert_eq!(crate::tests::fixture::count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn a_removed_file_stays_charged_until_its_last_snapshot_is_removed() {
    let fixture = fixture().await;
    fixture.volume("/v").await;
    let file = fixture.create("/v/f").await;
    let written = Written::of_bytes(0, 100, 10);
    let report = LengthReport { inode: file.id, length: 100, truncate_version: 0, written };
    let report = MetaChange::ReportLengths { reports: vec![report], ends: vec![] };
    fixture.change(report).await.unwrap();
    fixture.snapshot("/v", "s").await.unwrap();
    fixture.snapshot("/v", "t").await.unwrap();
    fixture.change(MetaChange::Unlink { at: At::path("/v/f") }).await.unwrap();
    fixture.collect_all().await;
    for name in ["s", "t"] {
        assert_eq!(fixture.recorder.trims.lock().unwrap().as_slice(), [], "{name}");
        assert_eq!(used_bytes(&fixture).await, 100);
        let path = format!("/v/.snapshots/{name}/f");
        assert_eq!(fixture.stat(&path).await.unwrap().length(), 100);
        fixture.change(remove_snapshot("/v", name)).await.unwrap();
        fixture.tree.drop_history().await.unwrap();
        fixture.collect_all().await;
    }
    // Once for the chunks, and once more when capabilities have expired.
    let forgotten = fixture.recorder.trims.lock().unwrap().clone();
    assert_eq!(forgotten, [(file.id, 0), (file.id, 0)]);
    assert_eq!(used_bytes(&fixture).await, 0);
    check_tree(&fixture.store).await;
}

async fn used_bytes(fixture: &Fixture) -> u64 {
    match fixture.query(MetaQuery::Quotas { at: At::path("/v") }).await.unwrap() {
        MetaReply::Quotas(quotas) => quotas[0].bytes_used,
        other => panic!("{other:?}"),
    }
}
