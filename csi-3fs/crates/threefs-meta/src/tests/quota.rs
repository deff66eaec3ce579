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
async fn every_quota_above_holds_and_says_which_one_refused() {
    let fixture = Fixture::memory().await;
    let outer = fixture.make_directory("/v").await;
    let inner = fixture.make_directory("/v/inner").await;
    fixture.change(set_quota("/v", Some(100), Some(3))).await.unwrap();
    fixture.change(set_quota("/v/inner", Some(1000), None)).await.unwrap();
    let file = fixture.create("/v/inner/file").await;
    let refused = refusal(&fixture, report(&file, 101, &[])).await;
    assert!(
        matches!(refused, MetaError::QuotaExceeded { directory, .. } if directory == outer.id),
        "{refused}"
    );
    fixture.change(report(&file, 100, &[])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (100, 2));
    assert_eq!(used(&fixture, "/v/inner").await, (100, 1));
    fixture.create("/v/third").await;
    let refused = refusal(&fixture, create("/v/inner/fourth")).await;
    assert!(refused.to_string().contains("allows 3 inodes: 3 are in use"), "{refused}");
    // Below the current usage: nothing new fits, existing data stays.
    fixture.change(set_quota("/v/inner", Some(50), None)).await.unwrap();
    let refused = refusal(&fixture, report(&file, 101, &[])).await;
    assert!(refused.to_string().contains(&inner.id.to_string()), "{refused}");
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
async fn a_directory_that_is_in_use_gets_its_quota_with_all_that_is_below() {
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
    let refused = refusal(&fixture, rename("/v/a", "/a")).await;
    assert!(matches!(refused, MetaError::CrossQuota { .. }), "{refused}");
    // A directory with a quota can be moved anywhere, with its charge.
    fixture.change(rename("/v/own", "/own")).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (30, 4));
    assert_eq!(used(&fixture, "/own").await, (40, 1));
    check_tree(&fixture.store).await;
    // One name inside and one outside: it cannot belong to two quotas.
    let link = MetaChange::Link { from: At::path("/v/again"), to: At::path("/v/a/b/more") };
    fixture.change(link).await.unwrap();
    let refused = refusal(&fixture, set_quota("/v/a/b", None, None)).await;
    assert!(matches!(refused, MetaError::CrossQuota { .. }), "{refused}");
}

#[tokio::test]
async fn files_move_between_quotas_and_those_with_several_names_do_not() {
    let fixture = Fixture::memory().await;
    for path in ["/one", "/two"] {
        fixture.make_directory(path).await;
        fixture.change(set_quota(path, Some(100), Some(2))).await.unwrap();
    }
    let file = fixture.create("/one/file").await;
    fixture.change(report(&file, 70, &[])).await.unwrap();
    let other = fixture.create("/two/other").await;
    fixture.change(report(&other, 40, &[])).await.unwrap();
    let refused = refusal(&fixture, rename("/one/file", "/two/file")).await;
    assert!(matches!(refused, MetaError::QuotaExceeded { .. }), "{refused}");
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
    let refused = refusal(&fixture, link("/two/x")).await;
    assert!(matches!(refused, MetaError::CrossQuota { .. }), "{refused}");
    fixture.change(link("/one/y")).await.unwrap();
    let refused = refusal(&fixture, rename("/one/y", "/two/y")).await;
    assert!(matches!(refused, MetaError::CrossQuota { .. }), "{refused}");
}

#[tokio::test]
async fn a_writer_is_stopped_before_he_writes_and_gives_back_what_he_did_not_need() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", Some(100), None)).await.unwrap();
    let file = fixture.create("/v/file").await;
    fixture.change(reserve(&file, 1, 80)).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (80, 1));
    let second = fixture.create("/v/second").await;
    let refused = refusal(&fixture, reserve(&second, 2, 21)).await;
    assert!(matches!(refused, MetaError::QuotaExceeded { .. }), "{refused}");
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
async fn what_is_removed_while_somebody_has_it_open_counts_until_he_closes() {
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
async fn a_removed_volume_frees_those_above_at_once() {
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

#[derive(Clone, Debug)]
enum Action {
    Change(Kind, usize, usize, u64),
    Collect,
    Recount,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Create,
    MakeDirectory,
    Unlink,
    RemoveDirectory,
    RemoveTree,
    Rename,
    Exchange,
    Link,
    Report,
    Reserve,
    EndSession,
    SetLength,
    SetQuota,
    Open,
    Close,
}

const PLACES: [&str; 12] = [
    "/a", "/b", "/a/x", "/a/y", "/b/x", "/b/y", "/a/x/1", "/a/x/2", "/b/x/1", "/a/y/1", "/c", "/d",
];

fn action() -> impl Strategy<Value = Action> {
    use Kind::*;
    let kinds = prop::sample::select(vec![
        Create,
        Create,
        Create,
        MakeDirectory,
        MakeDirectory,
        MakeDirectory,
        Unlink,
        RemoveDirectory,
        RemoveTree,
        Rename,
        Rename,
        Rename,
        Exchange,
        Link,
        Report,
        Report,
        Reserve,
        Reserve,
        EndSession,
        SetLength,
        SetQuota,
        SetQuota,
        Open,
        Close,
    ]);
    let places = 0..PLACES.len();
    prop_oneof![
        12 => (kinds, places.clone(), places, 0u64..60)
            .prop_map(|(kind, one, two, number)| Action::Change(kind, one, two, number)),
        1 => Just(Action::Collect),
        1 => Just(Action::Recount),
    ]
}

/// The current bytes of an action; `None` if the location does not have it.
async fn change_of(
    fixture: &Fixture,
    kind: Kind,
    one: &str,
    two: &str,
    number: u64,
) -> Option<MetaChange> {
    let at = || At::path(one);
    let file = fixture.stat(one).await.ok().filter(|inode| !inode.is_directory());
    let session = u128::from(number % 3);
    Some(match kind {
        Kind::Create => create(one),
        Kind::MakeDirectory => make_directory(one, false),
        Kind::Unlink => MetaChange::Unlink { at: at() },
        Kind::RemoveDirectory => MetaChange::RemoveDirectory { at: at() },
        Kind::RemoveTree => MetaChange::RemoveTree { at: at() },
        Kind::Rename => rename(one, two),
        Kind::Exchange => {
            MetaChange::Rename { from: at(), to: At::path(two), mode: RenameMode::Exchange }
        }
        Kind::Link => MetaChange::Link { from: at(), to: At::path(two) },
        Kind::Report => report(&file?, number, &[]),
        Kind::Reserve => reserve(&file?, session, number),
        Kind::EndSession => report(&file?, 0, &[session]),
        Kind::SetLength => MetaChange::SetLength { at: At::inode(file?.id), length: number },
        Kind::SetQuota => set_quota(one, Some(2 * number), Some(number / 10)),
        Kind::Open => {
            let (client, at) = (fixture.client, At::inode(file?.id));
            let _ = fixture.query(MetaQuery::Open { at, access: 4, client }).await;
            return None;
        }
        Kind::Close => {
            let (client, release) = (fixture.client, vec![file?.id]);
            let report_open =
                MetaQuery::ReportOpenFiles { client, add: vec![], release, all: true };
            let _ = fixture.query(report_open).await;
            return None;
        }
    })
}

async fn run(actions: Vec<Action>) {
    let fixture = Fixture::memory().await;
    for action in &actions {
        match action {
            Action::Collect => {
                let _ = fixture.tree.collect().await.unwrap();
            }
            Action::Recount => fixture.recount().await,
            Action::Change(kind, one, two, number) => {
                let (one, two) = (PLACES[*one], PLACES[*two]);
                let Some(change) = change_of(&fixture, *kind, one, two, *number).await else {
                    continue;
                };
                match fixture.change(change).await {
                    Err(error @ MetaError::Damaged { .. }) => panic!("{error}"),
                    Err(MetaError::Unavailable { detail }) => panic!("{detail}"),
                    _ => {}
                }
            }
        }
        check_tree(&fixture.store).await;
    }
    // Nothing is stored, so each file counts for what it needs in the end.
    fixture.recount().await;
    check_tree(&fixture.store).await;
    let mut txn = fixture.store.begin().await.unwrap();
    for (key, value) in txn.range(&KeyRange::prefix(b"INOD"), usize::MAX).await.unwrap() {
        let row = InodeRow::decode(&key, &value).unwrap();
        if row.charged {
            assert_eq!((row.charged_end, row.excess), (row.needed_end(), 0), "{}", row.inode.id);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn counters_are_what_the_inodes_are(actions in prop::collection::vec(action(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(actions));
    }
}

/// Many writers fill a quota to its last byte and inode, and none exceeds it.
async fn race(store: Store, writers: u64) {
    let fixture = Arc::new(Fixture::open(store, config()).await);
    fixture.make_directory("/v/in").await;
    fixture.change(set_quota("/v", Some(1000), Some(40))).await.unwrap();
    fixture.change(set_quota("/v/in", Some(900), None)).await.unwrap();
    let tasks: Vec<_> = (0..writers)
        .map(|number| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move {
                let (mut files, mut bytes) = (0u64, 0u64);
                for round in 0..20u64 {
                    let path = format!("/v/in/{number}-{round}");
                    let client = ClientId(u128::from(number) + 1);
                    let at = |sequence| RequestId { client, sequence, finished_below: 0 };
                    let call = |sequence, change| MetaRequest::Change {
                        id: at(sequence),
                        caller: Identity::ROOT,
                        change,
                    };
                    let made =
                        fixture.tree.answer(call(3 * round + 1, create(&path)), soon()).await;
                    let file = match made {
                        Ok(MetaReply::Opened { inode, .. }) => inode,
                        Err(MetaError::QuotaExceeded { .. }) => continue,
                        other => panic!("{other:?}"),
                    };
                    files += 1;
                    let grow = reserve(&file, 1, 7 + number);
                    match fixture.tree.answer(call(3 * round + 2, grow), soon()).await {
                        Ok(_) => {}
                        Err(MetaError::QuotaExceeded { .. }) => continue,
                        other => panic!("{other:?}"),
                    }
                    let done = report(&file, 7 + number, &[1]);
                    fixture.tree.answer(call(3 * round + 3, done), soon()).await.unwrap();
                    bytes += 7 + number;
                }
                (files, bytes)
            })
        })
        .collect();
    let (mut files, mut bytes) = (0, 0);
    for task in tasks {
        let done = task.await.unwrap();
        files += done.0;
        bytes += done.1;
        let quota = quotas(&fixture, "/v").await[0];
        assert!(quota.bytes_used <= 1000 && quota.inodes_used <= 40, "{quota:?}");
    }
    assert_eq!(used(&fixture, "/v/in").await, (bytes, files));
    assert_eq!(files, 39, "every inode was given away, one is the directory");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn no_race_passes_a_limit_in_memory() {
    for _ in 0..10 {
        race(Store::new(Yielding(Store::memory())), 8).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_race_passes_a_limit_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    race(Store::embedded(EmbeddedConfig::new(folder.path())).unwrap(), 16).await;
}

#[tokio::test]
async fn the_layout_of_a_file_bounds_its_length() {
    let fixture = Fixture::memory().await;
    fixture.create("/file").await;
    let set = |length| MetaChange::SetLength { at: At::path("/file"), length };
    // A sparse pebibyte has only a length.
    fixture.change(set(1 << 50)).await.unwrap();
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 1 << 50);
    let refused = refusal(&fixture, set(1 << 53)).await;
    assert!(matches!(refused, MetaError::FileTooLarge { .. }), "{refused}");
    assert_eq!(LayoutDefaults::default().chunk_bytes, 0);
}

/// Reported and reserved lengths are bounded like set ones: kernels fail lookups of a length beyond
/// 2^63, and one near it would use up the quotas above.
#[tokio::test]
async fn no_client_says_that_a_file_is_longer_than_it_can_be() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/v").await;
    fixture.change(set_quota("/v", None, None)).await.unwrap();
    let file = fixture.create("/v/file").await;
    let InodeKind::File { layout, .. } = &file.kind else { panic!("{file:?}") };
    let max = u64::from(layout.chunk_bytes) << 32;
    let names_the_bound = |error: MetaError| {
        let MetaError::FileTooLarge { detail } = error else { return false };
        detail.contains(&max.to_string())
    };
    let refused = |reply: Result<MetaReply, MetaError>| match reply {
        Ok(MetaReply::Inodes(inodes)) => {
            inodes.into_iter().all(|inode| inode.is_err_and(names_the_bound))
        }
        Err(error) => names_the_bound(error),
        Ok(_) => false,
    };
    for length in [max + 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX - 1, u64::MAX] {
        assert!(refused(fixture.change(report(&file, length, &[])).await), "report {length}");
        assert!(refused(fixture.change(reserve(&file, 1, length)).await), "reserve {length}");
        let written = crate::Written::of_bytes(0, length, layout.chunk_bytes);
        let report = LengthReport { inode: file.id, length, truncate_version: 0, written };
        let close =
            MetaChange::Close { inode: file.id, session: SessionId(1), report: Some(report) };
        assert!(refused(fixture.change(close).await), "close {length}");
        assert_eq!(fixture.stat("/v/file").await.unwrap(), file);
        assert_eq!(used(&fixture, "/v").await, (0, 1));
        check_tree(&fixture.store).await;
    }
    fixture.change(report(&file, max, &[])).await.unwrap();
    assert_eq!(used(&fixture, "/v").await, (max, 1));
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
    // Most of what ten inodes may have, so that few sessions are the rest.
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
    let mut started = 0;
    let refused = loop {
        match fixture.change(batch(started)).await {
            Ok(_) => started += BATCH,
            Err(error) => break error,
        }
        assert!(started < 1 << 12, "the number of sessions is unlimited");
    };
    assert!(matches!(refused, MetaError::QuotaExceeded { .. }), "{refused}");
    assert!(refused.to_string().contains("write sessions"), "{refused}");
    assert!(started >= 1 << 10, "{started}");
    check_tree(&fixture.store).await;
    // An existing one costs nothing more.
    fixture.change(batch(0)).await.unwrap();
    let open = MetaChange::Open { at: At::path("/v/file"), write: true };
    fixture.change(open.clone()).await.unwrap();
    check_tree(&fixture.store).await;
    for first in (0..started).step_by(BATCH as usize) {
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

/// A sparse file of 2^58 bytes costs nothing: files of a volume without a byte limit must not use
/// up the counters above it.
#[tokio::test]
async fn sparse_files_exhaust_the_counters_of_their_own_volume_alone() {
    let fixture = Fixture::memory().await;
    for path in ["/v", "/v/hostile", "/v/other"] {
        fixture.make_directory(path).await;
        fixture.change(set_quota(path, None, None)).await.unwrap();
    }
    let hostile = fixture.stat("/v/hostile").await.unwrap().id;
    let layout = LayoutDefaults { chunk_bytes: 64 << 20, stripe: 1 };
    let mut refused = 0;
    // As many of the longest files as fit, then the rest.
    let lengths = [1 << 58; 31].into_iter().chain((0..=58).rev().map(|shift| 1 << shift));
    for (number, length) in lengths.enumerate() {
        let at = At::path(format!("/v/hostile/{number}"));
        let (mode, exclusive, write, track_open) = (0o644, true, false, false);
        let create =
            MetaChange::Create { at: at.clone(), mode, exclusive, layout, write, track_open };
        fixture.change(create).await.unwrap();
        match fixture.change(MetaChange::SetLength { at, length }).await {
            Ok(_) => {}
            Err(MetaError::QuotaExceeded { directory, .. }) if directory == hostile => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0);
    check_tree(&fixture.store).await;
    let file = fixture.create("/v/other/file").await;
    fixture.change(report(&file, 1 << 52, &[])).await.unwrap();
    // What is above all others does not fit into another counter: a separate limit would not be exact.
    let plain = fixture.make_directory("/plain").await;
    for number in 0..33 {
        let at = At::entry(plain.id, number.to_string());
        let (mode, exclusive, write, track_open) = (0o644, true, false, false);
        let create =
            MetaChange::Create { at: at.clone(), mode, exclusive, layout, write, track_open };
        fixture.change(create).await.unwrap();
        fixture.change(MetaChange::SetLength { at, length: 1 << 58 }).await.unwrap();
    }
    let error = refusal(&fixture, set_quota("/plain", None, None)).await;
    assert!(error.to_string().contains("remove sparse ones"), "{error}");
}

/// Invalid defaults are refused when they are set, not by each creation.
#[tokio::test]
async fn a_directory_takes_no_layout_that_its_files_cannot_have() {
    let fixture = Fixture::memory().await;
    let make = |path: &str, chunk_bytes, parents| {
        let defaults = LayoutDefaults { chunk_bytes, stripe: 0 };
        MetaChange::MakeDirectory { at: At::path(path), mode: 0o755, parents, defaults }
    };
    for chunk_bytes in [1, 100_000, (64 << 10) - 1, 32 << 10, 128 << 20, u32::MAX] {
        for parents in [false, true] {
            let error = refusal(&fixture, make("/d", chunk_bytes, parents)).await;
            assert!(matches!(error, MetaError::Invalid { .. }), "{error}");
            assert!(error.to_string().contains(&format!("`{chunk_bytes}`")), "{error}");
        }
    }
    for (path, chunk_bytes) in [("/a", 0), ("/b", 64 << 10), ("/c/d", 64 << 20)] {
        fixture.change(make(path, chunk_bytes, true)).await.unwrap();
        fixture.create(&format!("{path}/file")).await;
    }
}
