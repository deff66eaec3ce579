//! Several services over one store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KvError, Store};

use crate::Identity;
use crate::background::services::Observer;
use crate::config::TreeConfig;
use crate::ops::{self, OpError, Renewed};
use crate::protocol::{
    At, Inode, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest, MetaResult, RequestId,
};
use crate::rows;
use crate::tests::backends::{Shared, UnknownOutcome};
use crate::tests::fixture::{Fixture, collect_with_all, config, count_inodes, create, soon};
use crate::tests::invariants::check_tree;

const CLIENT: ClientId = ClientId(7);

/// Two services; the first one is the collector.
async fn two(config: TreeConfig) -> (Fixture, Fixture) {
    let store = Store::new(Shared(Store::memory()));
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

fn unlink(path: &str) -> MetaChange {
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

#[tokio::test]
async fn a_former_collector_and_a_removed_service_are_fenced() {
    let (a, b) = two(config()).await;
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

#[tokio::test]
async fn an_unknown_outcome_in_a_shared_store_does_not_end_the_service() {
    let unsure = Arc::new(AtomicBool::new(false));
    let store = Store::new(Shared(Store::memory()));
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
