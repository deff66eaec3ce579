//! Quotas: exact, and never exceeded in any order of events.

use std::sync::Arc;

use proptest::prelude::*;
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{EmbeddedConfig, KeyRange, Store};

use crate::protocol::{
    At, LayoutDefaults, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest,
    QuotaUse, RenameMode, RequestId, Reservation, SESSION_ROW_BYTES, SessionId, SetMode,
};
use crate::rows::InodeRow;
use crate::tests::backends::Yielding;
use crate::tests::fixture::{Fixture, config, create, make_directory, rename, soon};
use crate::tests::invariants::check_tree;
use crate::{Identity, Inode, InodeKind};

mod lengths;
mod model;
mod races;

fn set_quota(path: &str, bytes_max: Option<u64>, inodes_max: Option<u64>) -> MetaChange {
    MetaChange::SetQuota { at: At::path(path), bytes_max, inodes_max }
}

async fn quotas(fixture: &Fixture, path: &str) -> Vec<QuotaUse> {
    match fixture.query(MetaQuery::Quotas { at: At::path(path) }).await.unwrap() {
        MetaReply::Quotas(quotas) => quotas,
        other => panic!("{other:?}"),
    }
}

async fn used(fixture: &Fixture, path: &str) -> (u64, u64) {
    let quota = quotas(fixture, path).await[0];
    (quota.bytes_used, quota.inodes_used)
}

fn version(inode: &Inode) -> u64 {
    let InodeKind::File { truncate_version, .. } = inode.kind else { panic!("{inode:?}") };
    truncate_version
}

fn reserve(inode: &Inode, session: u128, end: u64) -> MetaChange {
    let (session, truncate_version) = (SessionId(session), version(inode));
    let reservation = Reservation { inode: inode.id, session, end, truncate_version };
    MetaChange::Reserve { reservations: vec![reservation] }
}

fn report(inode: &Inode, length: u64, ends: &[u128]) -> MetaChange {
    let truncate_version = version(inode);
    MetaChange::ReportLengths {
        reports: vec![LengthReport {
            inode: inode.id,
            length,
            truncate_version,
            written: crate::Written::default(),
        }],
        ends: ends.iter().map(|session| (inode.id, SessionId(*session))).collect(),
    }
}

fn unlink(path: &str) -> MetaChange {
    MetaChange::Unlink { at: At::path(path) }
}

async fn refusal(fixture: &Fixture, change: MetaChange) -> MetaError {
    let error = fixture.change(change).await.unwrap_err();
    check_tree(&fixture.store).await;
    error
}

#[tokio::test]
async fn every_enclosing_quota_is_enforced_and_named_in_the_error() {
    let fixture = Fixture::memory().await;
    let outer = fixture.make_directory("/v").await;
    let inner = fixture.make_directory("/v/inner").await;
    fixture.change(set_quota("/v", Some(100), Some(3))).await.unwrap();
    fixture.change(set_quota("/v/inner", Some(1000), None)).await.unwrap();
    let file = fixture.create("/v/inner/file").await;
    let error = refusal(&fixture, report(&file, 101, &[])).await;
    assert!(
        matches!(error, MetaError::QuotaExceeded { directory, .. } if directory == outer.id),
        "{error}"
    );
    fixture.change(report(&file, 100, &[])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (100, 2));
    assert_eq!(used(&fixture, "/v/inner").await, (100, 1));
    fixture.create("/v/third").await;
    let error = refusal(&fixture, create("/v/inner/fourth")).await;
    assert!(error.to_string().contains("allows 3 inodes: 3 are in use"), "{error}");
    // Below the current usage: nothing new fits, existing data stays.
    fixture.change(set_quota("/v/inner", Some(50), None)).await.unwrap();
    let error = refusal(&fixture, report(&file, 101, &[])).await;
    assert!(error.to_string().contains(&inner.id.to_string()), "{error}");
    let cut = MetaChange::SetLength { at: At::path("/v/inner/file"), length: 60 };
    fixture.change(cut).await.unwrap();
    fixture.recount().await;
    assert_eq!(used(&fixture, "/v/inner").await, (60, 1));
    fixture.change(unlink("/v/inner/file")).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (0, 2));
    let chain: Vec<InodeId> =
        quotas(&fixture, "/v/inner").await.iter().map(|quota| quota.directory).collect();
    assert_eq!(chain, [inner.id, outer.id]);
}

#[tokio::test]
async fn a_quota_on_a_directory_in_use_counts_everything_below_it() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v/a/b").await;
    fixture.make_directory("/v/own").await;
    fixture.change(set_quota("/v/own", None, None)).await.unwrap();
    for (path, length) in [("/v/a/one", 10), ("/v/a/b/two", 20), ("/v/own/three", 40)] {
        let file = fixture.create(path).await;
        fixture.change(report(&file, length, &[])).await.unwrap();
    }
    let link = MetaChange::Link { from: At::path("/v/a/one"), to: At::path("/v/again") };
    fixture.change(link).await.unwrap();
    fixture.change(set_quota("/v", Some(100), Some(100))).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (70, 6));
    check_tree(&fixture.store).await;
    let error = refusal(&fixture, rename("/v/a", "/a")).await;
    assert!(matches!(error, MetaError::CrossQuota { .. }), "{error}");
    // A directory with a quota can be moved anywhere, with its charge.
    fixture.change(rename("/v/own", "/own")).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (30, 4));
    assert_eq!(used(&fixture, "/own").await, (40, 1));
    check_tree(&fixture.store).await;
    // One name inside and one outside: it cannot belong to two quotas.
    let link = MetaChange::Link { from: At::path("/v/again"), to: At::path("/v/a/b/more") };
    fixture.change(link).await.unwrap();
    let error = refusal(&fixture, set_quota("/v/a/b", None, None)).await;
    assert!(matches!(error, MetaError::CrossQuota { .. }), "{error}");
}

#[tokio::test]
async fn files_move_between_quotas_unless_they_have_several_links() {
    let fixture = Fixture::memory().await;
    for path in ["/one", "/two"] {
        fixture.make_directory(path).await;
        fixture.change(set_quota(path, Some(100), Some(2))).await.unwrap();
    }
    let file = fixture.create("/one/file").await;
    fixture.change(report(&file, 70, &[])).await.unwrap();
    let other = fixture.create("/two/other").await;
    fixture.change(report(&other, 40, &[])).await.unwrap();
    let error = refusal(&fixture, rename("/one/file", "/two/file")).await;
    assert!(matches!(error, MetaError::QuotaExceeded { .. }), "{error}");
    // A replaced file makes room at once.
    fixture.change(rename("/one/file", "/two/other")).await.unwrap();
    assert_eq!(used(&fixture, "/one").await, (0, 0));
    assert_eq!(used(&fixture, "/two").await, (70, 1));
    fixture.create("/one/x").await;
    let exchange = MetaChange::Rename {
        from: At::path("/one/x"),
        to: At::path("/two/other"),
        mode: RenameMode::Exchange,
    };
    fixture.change(exchange).await.unwrap();
    assert_eq!((used(&fixture, "/one").await, used(&fixture, "/two").await), ((70, 1), (0, 1)));
    let link = |to: &str| MetaChange::Link { from: At::path("/one/x"), to: At::path(to) };
    let error = refusal(&fixture, link("/two/x")).await;
    assert!(matches!(error, MetaError::CrossQuota { .. }), "{error}");
    fixture.change(link("/one/y")).await.unwrap();
    let error = refusal(&fixture, rename("/one/y", "/two/y")).await;
    assert!(matches!(error, MetaError::CrossQuota { .. }), "{error}");
}

#[tokio::test]
async fn a_writer_is_refused_before_it_writes_and_returns_unused_reservations() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", Some(100), None)).await.unwrap();
    let file = fixture.create("/v/file").await;
    fixture.change(reserve(&file, 1, 80)).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (80, 1));
    let second = fixture.create("/v/second").await;
    let error = refusal(&fixture, reserve(&second, 2, 21)).await;
    assert!(matches!(error, MetaError::QuotaExceeded { .. }), "{error}");
    fixture.change(report(&file, 30, &[1])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (68, 2), "its writer may still have a capability");
    fixture.recount().await;
    assert_eq!(used(&fixture, "/v").await, (30, 2));
    fixture.change(reserve(&second, 2, 70)).await.unwrap();
    // The last of two writers of a file releases the reservation.
    fixture.change(reserve(&second, 3, 60)).await.unwrap();
    fixture.change(report(&second, 10, &[2])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (100, 2));
    fixture.change(report(&second, 10, &[3])).await.unwrap();
    fixture.recount().await;
    assert_eq!(used(&fixture, "/v").await, (40, 2));
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn removed_open_files_count_until_they_are_closed() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", Some(100), None)).await.unwrap();
    let file = fixture.create("/v/file").await;
    fixture.change(report(&file, 60, &[])).await.unwrap();
    let client = ClientId(5);
    let open = MetaQuery::Open { at: At::inode(file.id), access: 4, client };
    fixture.query(open).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(used(&fixture, "/v").await, (60, 1));
    check_tree(&fixture.store).await;
    let (add, release) = (vec![], vec![file.id]);
    fixture.query(MetaQuery::ReportOpenFiles { client, add, release, all: true }).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(used(&fixture, "/v").await, (0, 0));
    // It was closed when it lost its name, and is written again: it counts again.
    let file = fixture.create("/v/file").await;
    fixture.change(unlink("/v/file")).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (0, 0));
    fixture.change(reserve(&file, 1, 50)).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (50, 1));
    fixture.collect_all().await;
    assert_eq!(used(&fixture, "/v").await, (50, 1), "it is being written");
    fixture.change(report(&file, 50, &[1])).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(used(&fixture, "/v").await, (0, 0));
}

#[tokio::test]
async fn a_removed_volume_is_uncharged_from_enclosing_quotas_at_once() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/all/v/deep").await;
    fixture.change(set_quota("/all", Some(100), None)).await.unwrap();
    fixture.change(set_quota("/all/v", Some(90), None)).await.unwrap();
    let file = fixture.create("/all/v/deep/file").await;
    fixture.change(report(&file, 90, &[])).await.unwrap();
    assert_eq!(used(&fixture, "/all").await, (90, 3));
    fixture.change(MetaChange::RemoveTree { at: At::path("/all/v") }).await.unwrap();
    assert_eq!(used(&fixture, "/all").await, (0, 0));
    check_tree(&fixture.store).await;
    fixture.collect_all().await;
    assert_eq!(used(&fixture, "/all").await, (0, 0));
    check_tree(&fixture.store).await;
}

/// Session rows are in the store shared by all volumes: a client that starts sessions without limit
/// is stopped by its volume's metadata limit, and ended sessions are released.
#[tokio::test]
async fn write_sessions_count_for_the_metadata_of_their_volume() {
    const BATCH: u128 = 256;
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", None, Some(10))).await.unwrap();
    let file = fixture.create("/v/file").await;
    // Uses most of the metadata limit of ten inodes, so that few sessions exhaust the rest.
    for number in 0..8 {
        let at = At::path(format!("/v/{number}"));
        fixture.create(&at.path).await;
        for name in ["user.a", "user.b"] {
            let (at, name, mode) = (at.clone(), name.into(), SetMode::Any);
            let value = Some(vec![7; 60_000]);
            let set = MetaChange::SetAttribute { at, name, value, mode };
            fixture.change(set).await.unwrap();
        }
    }
    let before = quotas(&fixture, "/v").await[0];
    let batch = |first: u128| {
        let reservation = |session| Reservation {
            inode: file.id,
            session: SessionId(session),
            end: 1,
            truncate_version: 0,
        };
        MetaChange::Reserve { reservations: (first..first + BATCH).map(reservation).collect() }
    };
    let mut sessions = 0;
    let error = loop {
        match fixture.change(batch(sessions)).await {
            Ok(_) => sessions += BATCH,
            Err(error) => break error,
        }
        assert!(sessions < 1 << 12, "the number of sessions is unlimited");
    };
    assert!(matches!(error, MetaError::QuotaExceeded { .. }), "{error}");
    assert!(error.to_string().contains("write sessions"), "{error}");
    assert!(sessions >= 1 << 10, "{sessions}");
    check_tree(&fixture.store).await;
    // An existing one costs nothing more.
    fixture.change(batch(0)).await.unwrap();
    let open = MetaChange::Open { at: At::path("/v/file"), write: true };
    fixture.change(open.clone()).await.unwrap();
    check_tree(&fixture.store).await;
    for first in (0..sessions).step_by(BATCH as usize) {
        let ends: Vec<u128> = (first..first + BATCH).collect();
        fixture.change(report(&file, 1, &ends)).await.unwrap();
    }
    check_tree(&fixture.store).await;
    fixture.change(rename("/v/file", "/file")).await.unwrap();
    check_tree(&fixture.store).await;
    fixture.change(rename("/file", "/v/file")).await.unwrap();
    let after = quotas(&fixture, "/v").await[0];
    assert_eq!(after.metadata_used, before.metadata_used + SESSION_ROW_BYTES);
    // The sweep ends the sessions of its client.
    fixture.tree.sweep(fixture.tree.config.session_timeout_ms + 1_000_000).await.unwrap();
    assert_eq!(quotas(&fixture, "/v").await[0].metadata_used, before.metadata_used);
    check_tree(&fixture.store).await;
}
