//! The trash of volumes: what is removed can be restored until it expires.

mod isolation;
mod lifetime;
mod storm;

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{EmbeddedConfig, Store};

use crate::protocol::{
    At, EntryKind, Inode, InodeKind, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply,
    MetaResult, Nanoseconds, TRASH_PAGE_MAX, TrashAnswer, TrashChange, TrashEntry, TrashId,
    TrashQuery, Written,
};
use crate::rows::{QuotaRow, quota};
use crate::tests::fixture::{Fixture, config, count_inodes, rename};
use crate::tests::invariants::check_tree;
use crate::tree::now;

const DAY: u64 = 86_400;

pub(super) fn unlink(path: &str) -> MetaChange {
    MetaChange::Unlink { at: At::path(path) }
}

pub(super) fn remove_directory(path: &str) -> MetaChange {
    MetaChange::RemoveDirectory { at: At::path(path) }
}

pub(super) fn remove_tree(path: &str) -> MetaChange {
    MetaChange::RemoveTree { at: At::path(path) }
}

pub(super) fn keep(path: &str, seconds: u64) -> MetaChange {
    MetaChange::Trash(TrashChange::Keep { at: At::path(path), seconds })
}

pub(super) fn restore(volume: &str, id: TrashId, to: Option<&str>) -> MetaChange {
    MetaChange::Trash(TrashChange::Restore { at: At::path(volume), id, to: to.map(At::path) })
}

pub(super) fn purge(volume: &str, ids: &[TrashId]) -> MetaChange {
    MetaChange::Trash(TrashChange::Purge { at: At::path(volume), ids: ids.to_vec() })
}

fn set_quota(path: &str, bytes_max: Option<u64>) -> MetaChange {
    MetaChange::SetQuota { at: At::path(path), bytes_max, inodes_max: None }
}

/// A volume at this path whose removed files are kept for a day.
async fn volume_with_trash(fixture: &Fixture, path: &str) -> Inode {
    fixture.make_directory(path).await;
    fixture.change(set_quota(path, Some(1000))).await.unwrap();
    fixture.change(keep(path, DAY)).await.unwrap();
    fixture.stat(path).await.unwrap()
}

async fn volume(fixture: &Fixture) -> Inode {
    volume_with_trash(fixture, "/v").await
}

/// All entries of the trash of a volume.
pub(super) async fn trash(fixture: &Fixture, volume: &str) -> Vec<TrashEntry> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let list = MetaQuery::Trash(TrashQuery::List { at: At::path(volume), after });
        match fixture.query(list).await.unwrap() {
            MetaReply::Trash(TrashAnswer::Page { entries, more, .. }) => {
                after = entries.last().map(|entry| entry.id);
                all.extend(entries);
                if !more {
                    return all;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The path of each entry, sorted.
async fn paths(fixture: &Fixture, volume: &str) -> Vec<String> {
    let entries = trash(fixture, volume).await;
    let mut paths: Vec<_> =
        entries.into_iter().map(|entry| entry.path.unwrap_or("(gone)".into())).collect();
    paths.sort();
    paths
}

async fn entry_of(fixture: &Fixture, path: &str) -> TrashEntry {
    let entries = trash(fixture, "/v").await;
    let entry = entries.into_iter().rfind(|entry| entry.path.as_deref() == Some(path));
    entry.unwrap_or_else(|| panic!("`{path}` is not in the trash"))
}

/// Creates a file with some bytes.
async fn file(fixture: &Fixture, path: &str, length: u64) -> Inode {
    let inode = fixture.create(path).await;
    let report =
        LengthReport { inode: inode.id, length, truncate_version: 0, written: Written::default() };
    let report = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
    match fixture.change(report).await.unwrap() {
        MetaReply::Inodes(mut inodes) => inodes.pop().unwrap().unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Bytes and inodes of the volume `/v`.
async fn used(fixture: &Fixture) -> (u64, u64) {
    match fixture.query(MetaQuery::Quotas { at: At::path("/v") }).await.unwrap() {
        MetaReply::Quotas(quotas) => (quotas[0].bytes_used, quotas[0].inodes_used),
        other => panic!("{other:?}"),
    }
}

fn later(seconds: u64) -> Nanoseconds {
    Nanoseconds(now().0 + i64::try_from(seconds).unwrap() * 1_000_000_000)
}

fn is_taken(result: &MetaResult) -> bool {
    matches!(result, Err(MetaError::Exists { .. }))
}

#[tokio::test]
async fn a_removed_file_stays_charged_and_is_restored_with_its_bytes() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.make_directory("/v/d").await;
    let created = file(&fixture, "/v/d/file", 100).await;
    fixture.change(unlink("/v/d/file")).await.unwrap();
    assert!(matches!(fixture.stat("/v/d/file").await, Err(MetaError::NotFound { .. })));
    let removed = fixture.query(MetaQuery::Stat { at: At::inode(created.id), follow: false }).await;
    assert!(matches!(removed, Ok(MetaReply::Inode(inode)) if inode.links == 0), "as in POSIX");
    fixture.collect_all().await;
    assert_eq!(used(&fixture).await, (100, 2));
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    let entry = entry_of(&fixture, "d/file").await;
    assert_eq!((entry.kind, entry.length, entry.removed_by), (EntryKind::File, 100, 0));
    check_tree(&fixture.store).await;
    fixture.change(restore("/v", entry.id, None)).await.unwrap();
    let restored = fixture.stat("/v/d/file").await.unwrap();
    assert_eq!((restored.id, restored.links, restored.length()), (created.id, 1, 100));
    assert!(trash(&fixture, "/v").await.is_empty());
    let again = fixture.change(restore("/v", entry.id, None)).await;
    assert!(matches!(again, Err(MetaError::NotFound { .. })), "{again:?}");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn nothing_is_kept_outside_volumes_with_a_retention() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.make_directory("/w").await;
    fixture.change(set_quota("/w", None)).await.unwrap();
    for path in ["/file", "/w/file"] {
        fixture.create(path).await;
        fixture.change(unlink(path)).await.unwrap();
    }
    assert!(trash(&fixture, "/w").await.is_empty());
    let error = fixture.change(keep("/", DAY)).await.unwrap_err();
    assert!(error.to_string().contains("has no quota"), "{error}");
    let error = fixture.change(keep("/w", u64::MAX)).await.unwrap_err();
    assert!(error.to_string().contains("at most"), "{error}");
    // The name of a file that has others is not kept.
    fixture.create("/v/file").await;
    let link = MetaChange::Link { from: At::path("/v/file"), to: At::path("/v/link") };
    fixture.change(link).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    assert!(trash(&fixture, "/v").await.is_empty());
    fixture.change(unlink("/v/link")).await.unwrap();
    assert_eq!(paths(&fixture, "/v").await, ["link"]);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_file_that_a_rename_replaces_is_kept() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    let old = file(&fixture, "/v/file", 10).await;
    let new = file(&fixture, "/v/new", 20).await;
    fixture.change(rename("/v/new", "/v/file")).await.unwrap();
    let entry = entry_of(&fixture, "file").await;
    assert_eq!(entry.id.inode, old.id);
    assert!(is_taken(&fixture.change(restore("/v", entry.id, None)).await));
    assert!(is_taken(&fixture.change(restore("/v", entry.id, Some("/v/file"))).await));
    fixture.change(restore("/v", entry.id, Some("/v/former"))).await.unwrap();
    assert_eq!(fixture.stat("/v/former").await.unwrap().id, old.id);
    assert_eq!(fixture.stat("/v/file").await.unwrap().id, new.id);
    check_tree(&fixture.store).await;
}

/// As `rm -r` through a mount: each name is removed separately.
#[tokio::test]
async fn a_file_is_restored_with_the_directories_above_it() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    fixture.make_directory("/v/a/b/c").await;
    for path in ["/v/a/b/c/one", "/v/a/b/two"] {
        file(&fixture, path, 1).await;
        fixture.change(unlink(path)).await.unwrap();
    }
    for path in ["/v/a/b/c", "/v/a/b", "/v/a"] {
        fixture.change(remove_directory(path)).await.unwrap();
    }
    assert_eq!(paths(&fixture, "/v").await, ["a", "a/b", "a/b/c", "a/b/c/one", "a/b/two"]);
    assert!(entry_of(&fixture, "a/b").await.empty && !entry_of(&fixture, "a/b/two").await.empty);
    check_tree(&fixture.store).await;
    let one = entry_of(&fixture, "a/b/c/one").await;
    fixture.change(restore("/v", one.id, None)).await.unwrap();
    assert_eq!(fixture.stat("/v/a/b/c/one").await.unwrap().id, one.id.inode);
    assert_eq!(fixture.stat("/v/a").await.unwrap().links, 3);
    assert_eq!(paths(&fixture, "/v").await, ["a/b/two"]);
    check_tree(&fixture.store).await;
    // A directory that has the name of a removed one takes its place; a file does not.
    let two = entry_of(&fixture, "a/b/two").await;
    fixture.change(remove_tree("/v/a")).await.unwrap();
    fixture.create("/v/a").await;
    assert!(is_taken(&fixture.change(restore("/v", two.id, None)).await));
    fixture.change(unlink("/v/a")).await.unwrap();
    fixture.change(restore("/v", two.id, None)).await.unwrap();
    assert_eq!(fixture.stat("/v/a/b/two").await.unwrap().id, two.id.inode);
    check_tree(&fixture.store).await;
    fixture.change(unlink("/v/a/b/two")).await.unwrap();
    fixture.change(unlink("/v/a/b/c/one")).await.unwrap();
    for path in ["/v/a/b/c", "/v/a/b", "/v/a"] {
        fixture.change(remove_directory(path)).await.unwrap();
    }
    let other = fixture.make_directory("/v/a").await;
    let two = entry_of(&fixture, "a/b/two").await;
    fixture.change(restore("/v", two.id, None)).await.unwrap();
    assert_eq!(fixture.stat("/v/a/b/two").await.unwrap().id, two.id.inode);
    assert_eq!(fixture.stat("/v/a").await.unwrap().id, other.id, "it was not replaced");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_removed_tree_is_one_entry_and_returns_with_its_contents() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    let below = fixture.make_directory("/v/tree/deep").await;
    let deep = file(&fixture, "/v/tree/deep/file", 7).await;
    fixture.change(remove_tree("/v/tree")).await.unwrap();
    assert_eq!(paths(&fixture, "/v").await, ["tree"]);
    assert!(!entry_of(&fixture, "tree").await.empty);
    fixture.collect_all().await;
    assert_eq!(used(&fixture).await, (7, 3));
    check_tree(&fixture.store).await;
    let entry = entry_of(&fixture, "tree").await;
    let into = restore("/v", entry.id, Some("/v/tree/deep/x"));
    assert!(matches!(fixture.change(into).await, Err(MetaError::NotFound { .. })));
    let inside = MetaChange::Trash(TrashChange::Restore {
        at: At::path("/v"),
        id: entry.id,
        to: Some(At::entry(below.id, "self")),
    });
    assert!(matches!(fixture.change(inside).await, Err(MetaError::NotFound { .. })), "a cycle");
    fixture.change(restore("/v", entry.id, Some("/v/again"))).await.unwrap();
    assert_eq!(fixture.stat("/v/again/deep/file").await.unwrap().id, deep.id);
    assert_eq!(fixture.stat("/v/again/deep/..").await.unwrap().id, entry.id.inode);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_retry_through_another_service_restores_once() {
    let store = Store::shared_memory();
    let (first, second) = (
        Fixture::open(store.clone(), config()).await,
        Fixture::open(store.clone(), config()).await,
    );
    volume(&first).await;
    file(&first, "/v/file", 3).await;
    first.change(unlink("/v/file")).await.unwrap();
    let id = entry_of(&second, "file").await.id;
    let request = crate::MetaRequest::Change {
        id: first.next_id(),
        caller: crate::Identity::ROOT,
        change: restore("/v", id, None),
    };
    let soon = crate::tests::fixture::soon;
    let answer = first.tree.answer(request.clone(), soon()).await.unwrap();
    // The same inode is in the trash again: the retry must not restore it.
    second.change(unlink("/v/file")).await.unwrap();
    assert_eq!(second.tree.answer(request, soon()).await.unwrap(), answer);
    assert_eq!(paths(&second, "/v").await, ["file"]);
    check_tree(&store).await;
}

#[test]
fn quotas_of_earlier_releases_have_no_retention() {
    let key = quota(crate::protocol::ROOT);
    let earlier = (Some(5u64), None::<u64>, Some(crate::protocol::ROOT));
    let row = QuotaRow::decode(&key, &postcard::to_allocvec(&earlier).unwrap()).unwrap();
    let above = Some(crate::protocol::ROOT);
    let expected = QuotaRow { bytes_max: Some(5), inodes_max: None, above, trash_seconds: 0 };
    assert_eq!(row, expected);
    let bytes = postcard::to_allocvec(&QuotaRow { trash_seconds: 9, ..row }).unwrap();
    assert_eq!(QuotaRow::decode(&key, &bytes).unwrap().trash_seconds, 9);
}

#[tokio::test]
async fn symbolic_links_are_kept() {
    let fixture = Fixture::memory().await;
    volume(&fixture).await;
    let make = MetaChange::MakeSymlink { at: At::path("/v/link"), target: "x".into() };
    fixture.change(make).await.unwrap();
    fixture.change(unlink("/v/link")).await.unwrap();
    let entry = entry_of(&fixture, "link").await;
    assert_eq!(entry.kind, EntryKind::Symlink);
    let to = restore("/v", entry.id, Some("/v/a-longer-name"));
    match fixture.change(to).await.unwrap() {
        MetaReply::Inode(inode) => assert!(matches!(inode.kind, InodeKind::Symlink { .. })),
        other => panic!("{other:?}"),
    }
    check_tree(&fixture.store).await;
}
