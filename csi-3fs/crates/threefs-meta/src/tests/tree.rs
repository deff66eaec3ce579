//! Guarantees of the operations, one per test.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::layout::ChainChoice;
use threefs_kv::{Backend, EmbeddedConfig, KvError, Store};

use crate::config::TreeConfig;
use crate::identity::Identity;
use crate::protocol::{
    At, BATCH_MAX, Inode, InodeKind, LayoutDefaults, LengthReport, MetaChange, MetaQuery,
    MetaReply, MetaRequest, Nanoseconds, ROOT, RequestId, SessionId,
};
use crate::rows;
use crate::tests::backends::UnknownOutcome;
use crate::tests::fixture::{Fixture, config, count_inodes, create, make_directory, rename, soon};
use crate::tests::invariants::check_tree;
use crate::tree::Tree;

mod lengths;

fn symlink(path: &str, target: &str) -> MetaChange {
    MetaChange::MakeSymlink { at: At::path(path), target: target.into() }
}

fn open(path: &str) -> MetaChange {
    MetaChange::Open { at: At::path(path), write: true }
}

fn set_length(path: &str, length: u64) -> MetaChange {
    MetaChange::SetLength { at: At::path(path), length }
}

fn unlink(path: &str) -> MetaChange {
    MetaChange::Unlink { at: At::path(path) }
}

fn report(inode: &Inode, length: u64) -> LengthReport {
    let InodeKind::File { truncate_version, .. } = inode.kind else { panic!("{inode:?}") };
    let written = crate::Written::of_bytes(0, length, 1 << 20);
    LengthReport { inode: inode.id, length, truncate_version, written }
}

async fn open_session(fixture: &Fixture, path: &str) -> (Inode, SessionId) {
    match fixture.change(open(path)).await.unwrap() {
        MetaReply::Opened { inode, session, .. } => (inode, session.unwrap()),
        other => panic!("{other:?}"),
    }
}

async fn refusal_text(fixture: &Fixture, change: MetaChange) -> String {
    fixture.change(change).await.unwrap_err().to_string()
}

#[tokio::test]
async fn symbolic_links_are_followed_and_cycles_detected() {
    let fixture = Fixture::memory().await;
    let file = fixture.make_directory("/d/e").await;
    let file = (file, fixture.create("/d/e/file").await).1;
    fixture.change(symlink("/to-d", "d")).await.unwrap();
    fixture.change(symlink("/d/e/up", "../../to-d/e")).await.unwrap();
    fixture.change(symlink("/absolute", "/d/e/file")).await.unwrap();
    for path in ["/to-d/e/file", "/d/e/up/up/file", "/absolute", "/to-d/../d/./e//file"] {
        assert_eq!(fixture.stat(path).await.unwrap().id, file.id, "{path}");
    }
    let keep = MetaQuery::Stat { at: At::path("/absolute"), follow: false };
    let MetaReply::Inode(link) = fixture.query(keep).await.unwrap() else { panic!() };
    assert!(matches!(link.kind, InodeKind::Symlink { .. }));
    fixture.change(symlink("/one", "two")).await.unwrap();
    fixture.change(symlink("/two", "one")).await.unwrap();
    let error = fixture.stat("/one/x").await.unwrap_err().to_string();
    assert!(error.contains("more than 40 symbolic links"), "{error}");
    // A creation through a dangling link creates its target; an exclusive one does not.
    fixture.change(symlink("/dangling", "d/made")).await.unwrap();
    let exclusive = MetaChange::Create {
        at: At::path("/dangling"),
        mode: 0o644,
        exclusive: true,
        layout: LayoutDefaults::default(),
        write: false,
        track_open: false,
    };
    assert!(refusal_text(&fixture, exclusive).await.contains("already exists"));
    let target = fixture.create("/dangling").await;
    assert_eq!(fixture.stat("/d/made").await.unwrap().id, target.id);
}

#[tokio::test]
async fn invalid_names_and_locations_are_refused_with_the_reason() {
    let fixture = Fixture::memory().await;
    fixture.create("/file").await;
    let long = "n".repeat(256);
    let cases = [
        (create(&format!("/{long}")), "longer than 255 bytes"),
        (create(&"/x".repeat(3000)), "longer than 255 bytes"),
        (create("/zero\0byte"), "NUL byte"),
        (create("/missing/file"), "`/missing/file`: no such file or directory"),
        (create("/file/below"), "`/file/below` is not a directory"),
        (make_directory("/file", true), "already exists"),
        (rename("/", "/x"), "is the root directory"),
        (rename("/file", "/.."), "is the root directory"),
        (MetaChange::RemoveTree { at: At::path("/") }, "is the root directory"),
        (MetaChange::RemoveDirectory { at: At::path("/file") }, "is not a directory"),
        (symlink("/s", ""), "target"),
        (set_length("/", 5), "is a directory"),
        (open("/"), "is a directory"),
    ];
    for (change, text) in cases {
        let error = refusal_text(&fixture, change.clone()).await;
        assert!(error.contains(text), "{change:?}: {error}");
    }
    let bad_layout = LayoutDefaults { chunk_bytes: 100_000, stripe: 0 };
    let change = MetaChange::Create {
        at: At::path("/odd"),
        mode: 0,
        exclusive: false,
        layout: bad_layout,
        write: false,
        track_open: false,
    };
    assert!(refusal_text(&fixture, change).await.contains("100000"));
    let written = crate::Written::default();
    let report = LengthReport { inode: ROOT, length: 1, truncate_version: 0, written };
    let reports = vec![report; BATCH_MAX + 1];
    let error = refusal_text(&fixture, MetaChange::ReportLengths { reports, ends: vec![] }).await;
    assert!(error.contains("at most 1024"), "{error}");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn files_use_their_layout_that_of_the_directory_or_the_default() {
    let fixture = Fixture::memory().await;
    let defaults = LayoutDefaults { chunk_bytes: 1 << 16, stripe: 2 };
    let (at, mode) = (At::path("/d"), 0o755);
    let make = MetaChange::MakeDirectory { at, mode, parents: false, defaults };
    fixture.change(make).await.unwrap();
    fixture.make_directory("/d/below").await;
    let layout = |inode: Inode| match inode.kind {
        InodeKind::File { layout, .. } => layout,
        other => panic!("{other:?}"),
    };
    let inherited = layout(fixture.create("/d/below/file").await);
    assert_eq!((inherited.chunk_bytes, inherited.stripe), (1 << 16, 2));
    let own = layout(fixture.create("/file").await);
    assert_eq!((own.chunk_bytes, own.stripe), (1 << 20, 4), "at most the existing chains");
    let mut bases = Vec::new();
    for number in 0..4 {
        let layout = layout(fixture.create(&format!("/d/{number}")).await);
        let ChainChoice::Range { base, .. } = layout.chains else { panic!() };
        bases.push(base);
    }
    assert_eq!(bases[0], bases[2], "stripes wrap around");
    assert_ne!(bases[0], bases[1]);
}

#[tokio::test]
async fn a_removed_file_keeps_its_chunks_while_a_client_writes() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    let (_, session) = open_session(&fixture, "/file").await;
    fixture.change(unlink("/file")).await.unwrap();
    assert!(fixture.stat("/file").await.is_err());
    fixture.collect_all().await;
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    let close = MetaChange::Close { inode: file.id, session, report: Some(report(&file, 5)) };
    fixture.change(close).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(*fixture.recorder.trims.lock().unwrap(), [(file.id, 0)]);
    assert_eq!(count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn chunks_that_storage_cannot_remove_are_retried_without_delaying_others() {
    let fixture = Fixture::memory().await;
    fixture.create("/file").await;
    fixture.change(unlink("/file")).await.unwrap();
    fixture.make_directory("/d/e/f").await;
    fixture.change(MetaChange::RemoveTree { at: At::path("/d") }).await.unwrap();
    fixture.recorder.refuse.store(true, SeqCst);
    fixture.collect_all().await;
    assert_eq!(count_inodes(&fixture.store).await, 2, "the root and the file are left");
    fixture.recorder.refuse.store(false, SeqCst);
    fixture.collect_all().await;
    assert_eq!(count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn a_removed_tree_disappears_at_once_and_is_collected_completely() {
    let fixture = Fixture::memory().await;
    for directory in 0..3 {
        fixture.make_directory(&format!("/t/{directory}")).await;
        for file in 0..300 {
            fixture.create(&format!("/t/{directory}/{file}")).await;
        }
    }
    let inside = fixture.stat("/t").await.unwrap().id;
    fixture.change(MetaChange::RemoveTree { at: At::path("/t") }).await.unwrap();
    assert!(fixture.stat("/t/1/5").await.is_err());
    let late = make_directory("late", false);
    let MetaChange::MakeDirectory { mut at, mode, parents, defaults } = late else { panic!() };
    at.directory = inside;
    let late = MetaChange::MakeDirectory { at, mode, parents, defaults };
    assert!(fixture.change(late).await.is_err(), "no name is added to a removed directory");
    check_tree(&fixture.store).await;
    fixture.collect_all().await;
    assert_eq!(fixture.recorder.trims.lock().unwrap().len(), 900);
    assert_eq!(count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn sessions_of_expired_clients_end() {
    let quick = TreeConfig { session_timeout_ms: 1, ..config() };
    let fixture = Fixture::open(Store::memory(), quick).await;
    fixture.create("/file").await;
    open_session(&fixture, "/file").await;
    fixture.change(unlink("/file")).await.unwrap();
    fixture.collect_all().await;
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    fixture.tree.sweep(0).await.unwrap();
    fixture.collect_all().await;
    assert!(
        fixture.recorder.trims.lock().unwrap().is_empty(),
        "just started: all clients may still report"
    );
    fixture.tree.sweep(u64::MAX).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(fixture.recorder.trims.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_retry_after_a_restart_gets_the_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    let store = || Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    let (request, first, collected);
    {
        let fixture = Fixture::open(store(), config()).await;
        fixture.create("/a").await;
        request = MetaRequest::Change {
            id: fixture.next_id(),
            caller: Identity::ROOT,
            change: rename("/a", "/b"),
        };
        first = fixture.tree.answer(request.clone(), soon()).await.unwrap();
        collected = fixture.create("/a").await;
    }
    let fixture = Fixture::open(store(), config()).await;
    assert_eq!(fixture.tree.answer(request, soon()).await.unwrap(), first);
    assert_eq!(fixture.stat("/a").await.unwrap().id, collected.id, "it was executed again");
    assert!(fixture.create("/c").await.id > collected.id, "inodes are never used again");
}

#[tokio::test]
async fn acknowledged_replies_are_forgotten_and_their_requests_never_repeated() {
    let fixture = Fixture::memory().await;
    let client = fixture.client;
    let call = |sequence, finished_below, change| {
        let id = RequestId { client, sequence, finished_below };
        fixture.tree.answer(MetaRequest::Change { id, caller: Identity::ROOT, change }, soon())
    };
    call(100, 100, create("/a")).await.unwrap();
    call(101, 100, rename("/a", "/b")).await.unwrap();
    call(102, 102, create("/a")).await.unwrap();
    let answers = crate::ops::CountRows { prefix: rows::ANSWERS, limit: 9 };
    assert_eq!(fixture.store.transact(soon(), &answers).await.unwrap(), 1);
    // A delayed copy: the client has its reply and has continued.
    let error = call(101, 100, rename("/a", "/b")).await.unwrap_err();
    assert!(error.to_string().contains("sequence `101`"), "{error}");
    assert!(fixture.stat("/a").await.is_ok());
}

#[tokio::test]
async fn directories_have_a_path_and_a_modification_time() {
    let fixture = Fixture::memory().await;
    let deep = fixture.make_directory("/a/b/c").await;
    fixture.change(rename("/a/b", "/moved")).await.unwrap();
    let path = fixture.query(MetaQuery::PathOf { directory: deep.id }).await.unwrap();
    assert_eq!(path, MetaReply::Path("/moved/c".into()));
    let before = fixture.stat("/moved/c").await.unwrap().modified;
    fixture.create("/moved/c/file").await;
    assert!(fixture.stat("/moved/c").await.unwrap().modified > before);
    let set = MetaChange::SetAttributes {
        at: At::path("/moved/c"),
        follow: true,
        mode: Some(0o700),
        uid: Some(5),
        gid: None,
        accessed: None,
        modified: Some(crate::SetTime::At(Nanoseconds(77))),
    };
    fixture.change(set).await.unwrap();
    let after = fixture.stat("/moved/c").await.unwrap();
    assert_eq!((after.mode, after.uid, after.modified), (0o700, 5, Nanoseconds(77)));
}

#[tokio::test]
async fn each_directory_counts_as_a_link_of_its_parent() {
    let fixture = Fixture::memory().await;
    let links = async |path: &str| fixture.stat(path).await.unwrap().links;
    for path in ["/a/1", "/a/2", "/b/3"] {
        fixture.make_directory(path).await;
    }
    fixture.change(create("/a/file")).await.unwrap();
    assert_eq!((links("/").await, links("/a").await, links("/b").await), (4, 4, 3));
    fixture.change(rename("/a/1", "/a/one")).await.unwrap();
    assert_eq!(links("/a").await, 4, "moved within it");
    fixture.change(rename("/a/one", "/b/one")).await.unwrap();
    assert_eq!((links("/a").await, links("/b").await), (3, 4), "moved elsewhere");
    fixture.change(rename("/a/2", "/b/one")).await.unwrap();
    assert_eq!((links("/a").await, links("/b").await), (2, 4), "replacing another directory");
    let exchange = MetaChange::Rename {
        from: At::path("/a/file"),
        to: At::path("/b/3"),
        mode: crate::protocol::RenameMode::Exchange,
    };
    fixture.change(exchange).await.unwrap();
    assert_eq!((links("/a").await, links("/b").await), (3, 3), "exchanged for a file");
    let remove = MetaChange::RemoveDirectory { at: At::path("/b/one") };
    fixture.change(remove).await.unwrap();
    fixture.change(MetaChange::RemoveTree { at: At::path("/a") }).await.unwrap();
    assert_eq!((links("/").await, links("/b").await), (3, 2));
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_store_of_the_previous_schema_is_migrated() {
    let store = Store::memory();
    Fixture::open(store.clone(), config()).await.create("/file").await;
    let mut txn = store.begin().await.unwrap();
    rows::write(&mut txn, rows::SCHEMA, &rows::SCHEMAS_PREVIOUS.start()).unwrap();
    txn.commit().await.unwrap();
    let fixture = Fixture::open(store.clone(), config()).await;
    fixture.stat("/file").await.unwrap();
    let mut txn = store.begin().await.unwrap();
    let schema: Option<u64> = rows::read(&mut txn, rows::SCHEMA).await.unwrap();
    assert_eq!(schema, Some(rows::SCHEMA_VERSION));
}

#[tokio::test]
async fn a_store_of_another_schema_is_refused() {
    let store = Store::memory();
    let mut txn = store.begin().await.unwrap();
    rows::write(&mut txn, rows::SCHEMA, &99u64).unwrap();
    txn.commit().await.unwrap();
    let error = Tree::open(
        store,
        config(),
        crate::tests::fixture::routing(),
        std::sync::Arc::new(crate::NoChunks),
    )
    .await
    .err()
    .unwrap();
    assert!(error.to_string().contains("schema 99"), "{error}");
}

#[tokio::test]
async fn a_commit_with_unknown_outcome_is_recognised_by_its_retry_and_ends_the_service() {
    let unsure = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let store = Store::new(UnknownOutcome(Store::memory(), Arc::clone(&unsure)));
    let fixture = Fixture::open(store, config()).await;
    fixture.create("/a").await;
    let request = MetaRequest::Change {
        id: fixture.next_id(),
        caller: Identity::ROOT,
        change: rename("/a", "/b"),
    };
    unsure.store(true, SeqCst);
    let error = fixture.tree.answer(request.clone(), soon()).await.unwrap_err();
    assert!(error.retryable(), "{error}");
    let error = fixture.tree.store_failed().await;
    assert!(matches!(error, KvError::CommitUnknown { .. }));
    unsure.store(false, SeqCst);
    assert!(matches!(fixture.tree.answer(request, soon()).await, Ok(MetaReply::Inode(_))));
}
