//! Several services over one store.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{KeyRange, KvError, Store};
use tokio::sync::Notify;

use crate::background::services::Observer;
use crate::chunk_trimmer::{ChunkTrimmer, DeadFile, NoChunks, Pending};
use crate::config::TreeConfig;
use crate::ops::{self, OpError, Renewed};
use crate::protocol::{
    At, EntryKind, Inode, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult,
    RequestId,
};
use crate::rows;
use crate::tests::backends::UnknownOutcome;
use crate::tests::fixture::{
    Fixture, collect_with_all, config, count_inodes, create, routing, soon,
};
use crate::tests::invariants::check_tree;
use crate::{Identity, Tree};

const CLIENT: ClientId = ClientId(7);

/// Two services; the first one is the collector.
pub(super) async fn two(config: TreeConfig) -> (Fixture, Fixture) {
    let store = Store::shared_memory();
    let a = Fixture::open(store.clone(), config).await;
    let b = Fixture::open(store, config).await;
    assert!(a.tree.lead().await.unwrap() && !b.tree.lead().await.unwrap());
    (a, b)
}

/// A change with a request id of the caller.
async fn change(fixture: &Fixture, id: RequestId, change: MetaChange) -> MetaResult {
    let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
    fixture.tree.answer(request, soon()).await
}

pub(super) fn unlink(path: &str) -> MetaChange {
    MetaChange::Unlink { at: At::path(path) }
}

async fn open(fixture: &Fixture, at: At) -> MetaResult {
    fixture.query(MetaQuery::Open { at, access: 4, client: CLIENT }).await
}

/// Reports open files; returns whether the service knows all of them.
async fn report(fixture: &Fixture, add: &[InodeId], release: &[InodeId], all: bool) -> bool {
    let (add, release) = (add.to_vec(), release.to_vec());
    let query = MetaQuery::ReportOpenFiles { client: CLIENT, add, release, all };
    match fixture.query(query).await.unwrap() {
        MetaReply::OpenFilesReported { complete } => complete,
        other => panic!("{other:?}"),
    }
}

async fn exists(fixture: &Fixture, file: &Inode) -> bool {
    fixture.query(MetaQuery::Stat { at: At::inode(file.id), follow: false }).await.is_ok()
}

/// Lets a service remove all others, which do not renew their rows.
async fn remove_others(fixture: &Fixture) {
    let mut observer = Observer::new(Duration::from_millis(20));
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        fixture.tree.check_removals().await.unwrap();
        fixture.tree.remove_silent_services(&mut observer).await.unwrap();
        let services = fixture.store.transact(soon(), &ops::ListServices).await.unwrap();
        if services.len() == 1 {
            assert_eq!(services[0].0, fixture.tree.open_files.run_id());
            break;
        }
        assert!(Instant::now() < deadline, "{services:?}");
        tokio::task::yield_now().await;
    }
}

/// A copy of a request that was delayed on its way to another service.
#[tokio::test]
async fn a_late_duplicate_through_another_service_is_refused_once_its_answer_is_dropped() {
    let (a, b) = two(config()).await;
    let id = |sequence, finished_below| RequestId { client: CLIENT, sequence, finished_below };
    let answer = change(&a, id(1, 1), create("/file")).await.unwrap();
    assert_eq!(change(&b, id(1, 1), create("/file")).await.unwrap(), answer);
    change(&a, id(2, 2), unlink("/file")).await.unwrap();
    let error = change(&b, id(1, 1), create("/file")).await.unwrap_err();
    assert!(matches!(&error, MetaError::Invalid { field, .. } if field == "sequence"), "{error}");
    assert!(b.stat("/file").await.is_err(), "it was executed again");
}

#[tokio::test]
async fn a_file_that_is_open_through_another_service_is_not_collected() {
    for by_path in [true, false] {
        let (a, b) = two(config()).await;
        let file = a.create("/file").await;
        let at = if by_path { At::path("/file") } else { At::inode(file.id) };
        open(&b, at).await.unwrap();
        a.change(unlink("/file")).await.unwrap();
        assert_eq!(a.tree.collect().await.unwrap(), 0, "the other service has not checked it");
        collect_with_all(&[&a, &b]).await;
        assert!(exists(&a, &file).await);
        report(&b, &[], &[file.id], false).await;
        collect_with_all(&[&a, &b]).await;
        assert!(!exists(&a, &file).await);
        assert_eq!(count_inodes(&a.store).await, 1);
        check_tree(&a.store).await;
    }
}

#[tokio::test]
async fn a_removed_file_that_is_opened_through_another_service_is_kept() {
    let slow = TreeConfig { dead_grace_ms: 60_000, ..config() };
    let (a, b) = two(slow).await;
    let file = a.create("/file").await;
    a.change(unlink("/file")).await.unwrap();
    b.tree.check_removals().await.unwrap();
    open(&b, At::inode(file.id)).await.unwrap();
    collect_with_all(&[&a, &b]).await;
    assert!(exists(&a, &file).await);
    report(&b, &[], &[file.id], false).await;
    collect_with_all(&[&a, &b]).await;
    let error = open(&b, At::inode(file.id)).await.unwrap_err();
    assert!(matches!(error, MetaError::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn files_of_a_service_that_is_gone_wait_for_its_clients() {
    for reports in [true, false] {
        let (a, b) = two(config()).await;
        let (kept, closed) = (a.create("/kept").await, a.create("/closed").await);
        for file in [&kept, &closed] {
            open(&b, At::inode(file.id)).await.unwrap();
        }
        // It is gone before it has checked its own removal, and after that of the other.
        a.change(unlink("/closed")).await.unwrap();
        a.tree.collect().await.unwrap();
        b.tree.check_removals().await.unwrap();
        b.change(unlink("/kept")).await.unwrap();
        drop(b);
        remove_others(&a).await;
        collect_with_all(&[&a]).await;
        assert!(exists(&a, &kept).await && exists(&a, &closed).await);
        if reports {
            assert!(!report(&a, &[], &[], false).await, "it must report all of them");
            assert!(report(&a, &[kept.id], &[], true).await);
            collect_with_all(&[&a]).await;
            assert!(exists(&a, &kept).await && !exists(&a, &closed).await);
            report(&a, &[], &[kept.id], false).await;
        } else {
            a.tree.sweep(a.tree.uptime_ms() + a.tree.config.session_timeout_ms).await.unwrap();
        }
        collect_with_all(&[&a]).await;
        assert_eq!(count_inodes(&a.store).await, 1);
        check_tree(&a.store).await;
    }
}

/// The client repeats the request through another service, which has checked the removal already.
#[tokio::test]
async fn a_file_that_is_open_by_a_repeated_creation_is_not_collected() {
    let (a, b) = two(config()).await;
    let id = RequestId { client: CLIENT, sequence: 1, finished_below: 1 };
    let MetaChange::Create { at, mode, exclusive, layout, write, .. } = create("/file") else {
        panic!()
    };
    let create = MetaChange::Create { at, mode, exclusive, layout, write, track_open: true };
    change(&a, id, create.clone()).await.unwrap();
    b.change(unlink("/file")).await.unwrap();
    drop(a);
    remove_others(&b).await;
    assert!(b.tree.lead().await.unwrap());
    b.tree.as_collector(&ops::EndRound { queue: rows::REMOVALS }).await.unwrap();
    b.tree.check_removals().await.unwrap();
    let MetaReply::Opened { inode, .. } = change(&b, id, create).await.unwrap() else { panic!() };
    collect_with_all(&[&b]).await;
    assert!(exists(&b, &inode).await);
    report(&b, &[], &[inode.id], false).await;
    collect_with_all(&[&b]).await;
    assert_eq!(count_inodes(&b.store).await, 1);
}

/// Their keys have a version in place of the round.
#[tokio::test]
async fn removals_of_an_earlier_release_wait_for_the_clients_that_they_name() {
    let store = Store::memory();
    let file = {
        let fixture = Fixture::open(store.clone(), config()).await;
        let file = fixture.create("/file").await;
        fixture.change(unlink("/file")).await.unwrap();
        file
    };
    let mut txn = store.begin().await.unwrap();
    let queued = txn.range(&KeyRange::prefix(rows::REMOVALS), 2).await.unwrap();
    txn.clear(&queued[0].0);
    let (inode, kind, opened_by) = (file.id, EntryKind::File, vec![CLIENT]);
    let row = rows::RemovalRow { inode, kind, run_id: 1, opened_by };
    let row = postcard::to_allocvec(&row).unwrap();
    // Of another store, which had committed more.
    let version = 1_u64 << 40;
    let stamp = [&version.to_be_bytes()[..], &[0, 0]].concat();
    let key = [rows::REMOVALS, &stamp, &inode.0.to_be_bytes()].concat();
    txn.set(&key, row);
    txn.clear(rows::ROUND);
    rows::write(&mut txn, rows::SCHEMA, rows::SCHEMAS_PREVIOUS.end()).unwrap();
    txn.commit().await.unwrap();
    let fixture = Fixture::open(store, config()).await;
    fixture.create("/later").await;
    fixture.change(unlink("/later")).await.unwrap();
    fixture.collect_all().await;
    assert!(exists(&fixture, &file).await);
    assert_eq!(count_inodes(&fixture.store).await, 2, "the later file does not wait");
    assert!(report(&fixture, &[], &[], true).await);
    fixture.collect_all().await;
    assert_eq!(count_inodes(&fixture.store).await, 1);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_former_collector_and_a_removed_service_are_fenced() {
    let (a, b) = two(config()).await;
    assert!(matches!(a.query(MetaQuery::Role).await.unwrap(), MetaReply::Role(_)));
    a.create("/file").await;
    a.change(unlink("/file")).await.unwrap();
    let former = a.tree.services.collector().unwrap();
    assert_eq!(b.tree.collect().await.unwrap(), 0);
    remove_others(&b).await;
    assert!(b.tree.lead().await.unwrap());
    assert_eq!(b.tree.services.collector().unwrap().epoch, former.epoch + 1);
    // The former collector resumes in the middle of a pass.
    let clear = ops::ClearRows(&[rows::inode(InodeId(1))]);
    assert_eq!(a.tree.as_collector(&clear).await.unwrap_err(), OpError::NotCollector);
    assert_eq!(a.tree.check_removals().await.unwrap(), Renewed::Removed);
    assert_eq!(a.tree.collect().await.unwrap(), 0);
    let error = open(&a, At::path("/")).await.unwrap_err();
    assert!(error.retryable() && error.to_string().contains("use another"), "{error}");
    // It does not call itself a service that serves.
    let error = a.query(MetaQuery::Role).await.unwrap_err();
    assert!(error.to_string().contains("use another"), "{error}");
    collect_with_all(&[&b]).await;
    assert_eq!(count_inodes(&b.store).await, 1);
}

#[tokio::test]
async fn sessions_of_a_client_that_uses_another_service_do_not_end() {
    let (a, b) = two(config()).await;
    b.create("/file").await;
    let at = At::path("/file");
    change(
        &b,
        RequestId { client: CLIENT, sequence: 1, finished_below: 1 },
        MetaChange::Open { at, write: true },
    )
    .await
    .unwrap();
    let sessions = || async {
        let list = ops::CountRows { prefix: rows::SESSIONS, limit: 10 };
        a.store.transact(soon(), &list).await.unwrap()
    };
    let timeout_ms = a.tree.config.session_timeout_ms;
    let mut now_ms = a.tree.uptime_ms() + timeout_ms;
    for _ in 0..4 {
        // The client is active: the other service publishes it from time to time.
        report(&b, &[], &[], false).await;
        b.tree.publish_activity().await.unwrap();
        a.tree.sweep(now_ms).await.unwrap();
        assert_eq!(sessions().await, 1);
        now_ms += timeout_ms * 3 / 4;
        // The uptime of the service is part of the row.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    a.tree.sweep(now_ms).await.unwrap();
    a.tree.sweep(now_ms + timeout_ms + 1).await.unwrap();
    assert_eq!(sessions().await, 0, "it is silent");
    check_tree(&a.store).await;
}

/// Waits before it checks whether the truncation is still pending, and records what it cuts.
#[derive(Default)]
struct Slow {
    started: Notify,
    resumed: Notify,
    cuts: Mutex<Vec<InodeId>>,
}

impl ChunkTrimmer for Slow {
    fn trim<'a>(
        &'a self,
        inode: InodeId,
        _layout: &'a Layout,
        _range: Range<u64>,
        pending: Pending,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            self.started.notify_one();
            self.resumed.notified().await;
            pending().await?;
            self.cuts.lock().unwrap().push(inode);
            Ok(())
        })
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        NoChunks.forget(files, deadline)
    }

    fn stored_end<'a>(
        &'a self,
        inode: InodeId,
        layout: &'a Layout,
        range: Range<u64>,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        NoChunks.stored_end(inode, layout, range, deadline)
    }
}

#[tokio::test]
async fn a_truncation_that_another_service_completes_is_not_continued() {
    let store = Store::shared_memory();
    let slow = Arc::new(Slow::default());
    let trimmer = Arc::clone(&slow) as Arc<dyn ChunkTrimmer>;
    let a = Tree::open(store.clone(), config(), routing(), trimmer).await.unwrap();
    let b = Fixture::open(store, config()).await;
    let file = b.create("/file").await.id;
    let length = |length| MetaChange::SetLength { at: At::path("/file"), length };
    b.change(length(100)).await.unwrap();
    let id = RequestId { client: CLIENT, sequence: 1, finished_below: 1 };
    let cut = MetaRequest::Change { id, caller: Identity::ROOT, change: length(50) };
    let (cut, ()) = tokio::join!(a.answer(cut, soon()), async {
        slow.started.notified().await;
        // A client that opens the file for writing does not wait for the slow service.
        b.change(MetaChange::Open { at: At::path("/file"), write: true }).await.unwrap();
        assert_eq!(*b.recorder.trims.lock().unwrap(), [(file, 50)]);
        slow.resumed.notify_one();
    });
    cut.unwrap();
    assert!(slow.cuts.lock().unwrap().is_empty(), "it removed data of the client");
    // While it is pending, it is cut.
    let id = RequestId { client: CLIENT, sequence: 2, finished_below: 2 };
    let cut = MetaRequest::Change { id, caller: Identity::ROOT, change: length(20) };
    slow.resumed.notify_one();
    a.answer(cut, soon()).await.unwrap();
    assert_eq!(*slow.cuts.lock().unwrap(), [file]);
}

#[tokio::test]
async fn an_unknown_outcome_in_a_shared_store_does_not_end_the_service() {
    let unsure = Arc::new(AtomicBool::new(false));
    let store = Store::shared_memory();
    let store = Store::new(UnknownOutcome(store, Arc::clone(&unsure)));
    let fixture = Fixture::open(store, config()).await;
    let id = RequestId { client: CLIENT, sequence: 1, finished_below: 1 };
    unsure.store(true, SeqCst);
    let error = change(&fixture, id, create("/file")).await.unwrap_err();
    assert!(error.retryable(), "{error}");
    unsure.store(false, SeqCst);
    assert!(matches!(change(&fixture, id, create("/file")).await, Ok(MetaReply::Opened { .. })));
    let failed = tokio::time::timeout(Duration::from_millis(10), fixture.tree.store_failed());
    assert!(failed.await.map_or(true, |error: KvError| panic!("{error}")));
}

#[tokio::test]
async fn an_open_that_fails_keeps_the_entry_of_an_earlier_open() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    open(&fixture, At::inode(file.id)).await.unwrap();
    let query = MetaQuery::Open { at: At::inode(file.id), access: 2, client: CLIENT };
    let request = MetaRequest::Query { caller: Identity::user(1000, 1000), query };
    assert!(fixture.tree.answer(request, soon()).await.is_err(), "the mode allows no writing");
    assert!(report(&fixture, &[], &[], true).await);
    fixture.change(unlink("/file")).await.unwrap();
    fixture.collect_all().await;
    assert!(exists(&fixture, &file).await);
}
