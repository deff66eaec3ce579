//! Recounts: charges of a file beyond its length and reservation, and their release.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::InodeId;
use threefs_kv::{Backend, Commit, KvError, Snapshot, Store, Versionstamp, Watch};
use tokio::sync::Barrier;

use crate::config::TreeConfig;
use crate::ops;
use crate::protocol::{
    At, Inode, InodeKind, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, Reservation,
    SessionId, Written,
};
use crate::tests::backends::MostReads;
use crate::tests::fixture::{Fixture, config, rename, soon};
use crate::tests::invariants::check_tree;

/// A file in a directory with a quota of 100 bytes, of which 12 more may be excess.
async fn volume(config: TreeConfig) -> (Fixture, Inode) {
    let fixture = Fixture::open(Store::memory(), config).await;
    fixture.make_directory("/v").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    let file = fixture.create("/v/file").await;
    (fixture, file)
}

async fn used(fixture: &Fixture) -> u64 {
    match fixture.query(MetaQuery::Quotas { at: At::path("/v") }).await.unwrap() {
        MetaReply::Quotas(quotas) => quotas[0].bytes_used,
        other => panic!("{other:?}"),
    }
}

async fn reserve(fixture: &Fixture, file: InodeId, end: u64) {
    let InodeKind::File { truncate_version, .. } = fixture.stat("/v/file").await.unwrap().kind
    else {
        panic!()
    };
    let session = SessionId(1);
    let reservation = Reservation { inode: file, session, end, truncate_version };
    let change = MetaChange::Reserve { reservations: vec![reservation] };
    let MetaReply::Inodes(inodes) = fixture.change(change).await.unwrap() else { panic!() };
    inodes[0].as_ref().unwrap();
}

/// Ends the session without a length report.
async fn end(fixture: &Fixture, file: InodeId) {
    let ends = vec![(file, SessionId(1))];
    fixture.change(MetaChange::ReportLengths { reports: Vec::new(), ends }).await.unwrap();
}

async fn cut(fixture: &Fixture, length: u64) {
    fixture.change(MetaChange::SetLength { at: At::path("/v/file"), length }).await.unwrap();
}

/// End of the bytes that new capabilities permit to write.
async fn granted_end(fixture: &Fixture, file: InodeId) -> u64 {
    fixture.tree.terms(&[file], 9, soon()).await.unwrap()[0].as_ref().unwrap().end
}

#[tokio::test]
async fn returned_bytes_count_until_their_capabilities_expire() {
    let (fixture, file) = volume(TreeConfig { recount_wait_ms: 3_600_000, ..config() }).await;
    for step in ["end", "cut"] {
        reserve(&fixture, file.id, 80).await;
        assert_eq!((used(&fixture).await, granted_end(&fixture, file.id).await), (80, 80));
        match step {
            "end" => end(&fixture, file.id).await,
            _ => cut(&fixture, 0).await,
        }
        fixture.recount().await;
        assert_eq!((used(&fixture).await, granted_end(&fixture, file.id).await), (68, 0), "{step}");
    }
    assert!(fixture.recorder.queried_ranges.lock().unwrap().is_empty(), "it would be too early");
    // Writing the same file again charges only what it needs.
    reserve(&fixture, file.id, 70).await;
    assert_eq!((used(&fixture).await, granted_end(&fixture, file.id).await), (70, 70));
    // Removing it frees all of it at once.
    end(&fixture, file.id).await;
    fixture.change(MetaChange::Unlink { at: At::path("/v/file") }).await.unwrap();
    assert_eq!(used(&fixture).await, 0);
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
    let mut txn = fixture.store.begin().await.unwrap();
    assert_eq!(txn.get(&crate::rows::recount(file.id)).await.unwrap(), None);
}

#[tokio::test]
async fn unreported_stored_bytes_stay_counted_and_are_not_truncated() {
    let (fixture, file) = volume(config()).await;
    reserve(&fixture, file.id, 80).await;
    fixture.recorder.stored_ends.lock().unwrap().insert(file.id, 50);
    end(&fixture, file.id).await;
    fixture.recorder.refuse.store(true, SeqCst);
    fixture.recount().await;
    assert_eq!(used(&fixture).await, 68, "storage does not report its bytes");
    fixture.recorder.refuse.store(false, SeqCst);
    fixture.recount().await;
    assert_eq!((used(&fixture).await, granted_end(&fixture, file.id).await), (50, 0));
    assert_eq!(fixture.stat("/v/file").await.unwrap().length(), 0, "the length was not reported");
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    assert_eq!(
        fixture.recorder.queried_ranges.lock().unwrap()[..],
        [(file.id, 0..80), (file.id, 0..80)]
    );
    fixture.recount().await;
    assert_eq!(fixture.recorder.queried_ranges.lock().unwrap().len(), 2, "it is counted");
    // A disconnected client reports it now: that needs no space.
    let written = Written::default();
    let report = LengthReport { inode: file.id, length: 50, truncate_version: 0, written };
    let change = MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() };
    fixture.change(change).await.unwrap();
    assert_eq!(used(&fixture).await, 50);
    check_tree(&fixture.store).await;
    // After the truncation it is released in time, but not while storage still has it.
    fixture.recorder.refuse.store(true, SeqCst);
    let change = MetaChange::SetLength { at: At::path("/v/file"), length: 20 };
    fixture.change(change).await.unwrap_err();
    fixture.recorder.refuse.store(false, SeqCst);
    fixture.recount().await;
    assert_eq!(
        (used(&fixture).await, fixture.recorder.queried_ranges.lock().unwrap().len()),
        (38, 2)
    );
    fixture.tree.finish_trim(file.id, soon()).await.unwrap();
    fixture.recorder.stored_ends.lock().unwrap().insert(file.id, 20);
    fixture.recount().await;
    assert_eq!(used(&fixture).await, 20);
    check_tree(&fixture.store).await;
}

/// Between the query to storage and its reply the file is reserved further and released again:
/// those capabilities are valid for longer.
#[tokio::test]
async fn bytes_returned_meanwhile_wait_for_their_own_expiry() {
    let (fixture, file) = volume(config()).await;
    reserve(&fixture, file.id, 40).await;
    end(&fixture, file.id).await;
    let now = fixture.tree.uptime();
    let list = ops::ListRecounts { after: &[], limit: 10, now, wait_ms: 0 };
    let (entries, more) = fixture.store.transact(soon(), &list).await.unwrap();
    assert!(
        matches!(&entries[..], [one] if one.charged_end == 40) && more.is_none(),
        "{entries:?}"
    );
    let listed_ms = fixture.tree.uptime_ms();
    while fixture.tree.uptime_ms() == listed_ms {
        tokio::task::yield_now().await;
    }
    reserve(&fixture, file.id, 90).await;
    end(&fixture, file.id).await;
    let recount = ops::Recount { file: &entries[0], stored_end: 0 };
    fixture.store.transact(soon(), &recount).await.unwrap();
    assert_eq!(used(&fixture).await, 78);
    // The current reservation counts.
    let (entries, _) = fixture.store.transact(soon(), &list).await.unwrap();
    reserve(&fixture, file.id, 60).await;
    let recount = ops::Recount { file: &entries[0], stored_end: 0 };
    fixture.store.transact(soon(), &recount).await.unwrap();
    assert_eq!(used(&fixture).await, 60);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn the_wait_starts_again_after_a_restart() {
    let (fixture, file) = volume(TreeConfig { recount_wait_ms: 200, ..config() }).await;
    reserve(&fixture, file.id, 80).await;
    end(&fixture, file.id).await;
    let again = Fixture::open(fixture.store.clone(), fixture.tree.config).await;
    again.recount().await;
    assert!(again.recorder.queried_ranges.lock().unwrap().is_empty());
    assert_eq!(used(&again).await, 68);
    let until = Deadline::after(Duration::from_secs(60));
    while used(&again).await != 0 {
        assert!(!until.passed(), "the wait does not end");
        again.recount().await;
    }
    check_tree(&again.store).await;
}

/// More files than one page.
#[tokio::test]
async fn every_file_is_processed_in_turn() {
    let (fixture, _) = volume(config()).await;
    let (bytes_max, inodes_max) = (Some(900), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    for number in 0..300 {
        let file = fixture.create(&format!("/v/{number}")).await;
        let (session, truncate_version) = (SessionId(1), 0);
        let reservation = Reservation { inode: file.id, session, end: 3, truncate_version };
        fixture.change(MetaChange::Reserve { reservations: vec![reservation] }).await.unwrap();
        end(&fixture, file.id).await;
    }
    assert_eq!(used(&fixture).await, 900 - 900 / 8);
    fixture.recount().await;
    assert_eq!(used(&fixture).await, 0);
    check_tree(&fixture.store).await;
}

/// A client that stores bytes which it has released is bounded by quota and excess together.
#[tokio::test]
async fn an_eighth_more_than_the_limit_is_the_most_that_can_be_stored() {
    let (fixture, file) = volume(config()).await;
    reserve(&fixture, file.id, 100).await;
    end(&fixture, file.id).await;
    let second = fixture.create("/v/second").await;
    let call = async |end| {
        let (session, truncate_version) = (SessionId(2), 0);
        let reservation = Reservation { inode: second.id, session, end, truncate_version };
        fixture.change(MetaChange::Reserve { reservations: vec![reservation] }).await
    };
    assert!(call(13).await.is_err(), "bytes beyond the excess stay counted");
    call(12).await.unwrap();
    fixture.recorder.stored_ends.lock().unwrap().extend([(file.id, 100), (second.id, 12)]);
    for _ in 0..3 {
        fixture.recount().await;
        assert_eq!(used(&fixture).await, 112, "all of it counts, also beyond the limit");
        assert!(call(13).await.is_err());
        cut(&fixture, 0).await;
        assert_eq!(used(&fixture).await, 100);
        assert!(call(13).await.is_err());
    }
    fixture.change(MetaChange::Unlink { at: At::path("/v/file") }).await.unwrap();
    call(100).await.unwrap();
    check_tree(&fixture.store).await;
}

/// Each change reads the same free excess, and one of them takes it.
#[tokio::test]
async fn sessions_that_end_concurrently_share_the_excess_limit() {
    let fixture = Arc::new(Fixture::interleaving().await);
    fixture.make_directory("/v").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    let mut files = Vec::new();
    for number in 0..8 {
        let file = fixture.create(&format!("/v/{number}")).await;
        let (session, truncate_version) = (SessionId(1), 0);
        let reservation = Reservation { inode: file.id, session, end: 12, truncate_version };
        fixture.change(MetaChange::Reserve { reservations: vec![reservation] }).await.unwrap();
        files.push(file.id);
    }
    assert_eq!(used(&fixture).await, 96);
    let mut tasks = tokio::task::JoinSet::new();
    for file in files {
        let fixture = Arc::clone(&fixture);
        tasks.spawn(async move { end(&fixture, file).await });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    assert_eq!(used(&fixture).await, 84);
    check_tree(&fixture.store).await;
}

/// Bytes released by one file do not raise the limit for another file in the same change.
#[tokio::test]
async fn a_change_that_also_returns_bytes_stays_within_the_limit() {
    let (fixture, file) = volume(config()).await;
    let second = fixture.create("/v/second").await;
    reserve(&fixture, file.id, 8).await;
    let written = Written::default();
    let report = LengthReport { inode: second.id, length: 1000, truncate_version: 0, written };
    let ends = vec![(file.id, SessionId(1))];
    let change = MetaChange::ReportLengths { reports: vec![report], ends };
    let error = fixture.change(change).await.unwrap_err();
    assert!(matches!(error, MetaError::QuotaExceeded { .. }), "{error}");
    assert_eq!(used(&fixture).await, 8);
    check_tree(&fixture.store).await;
}

/// A new file at a path of which `end` bytes count as excess.
async fn excess(fixture: &Fixture, path: &str, end: u64) -> Inode {
    let file = fixture.create(path).await;
    let (session, truncate_version) = (SessionId(1), 0);
    let reservation = Reservation { inode: file.id, session, end, truncate_version };
    fixture.change(MetaChange::Reserve { reservations: vec![reservation] }).await.unwrap();
    self::end(fixture, file.id).await;
    file
}

/// The excess of a removed file is released, and the next file uses its room.
#[tokio::test]
async fn a_removed_file_that_counts_again_counts_as_used() {
    let (fixture, _) = volume(config()).await;
    let mut inodes = Vec::new();
    for _ in 0..20 {
        inodes.push(excess(&fixture, "/v/one", 12).await.id);
        assert_eq!(used(&fixture).await, 0);
        fixture.change(MetaChange::Unlink { at: At::path("/v/one") }).await.unwrap();
    }
    let mut successes = 0;
    for inode in inodes {
        let (session, truncate_version) = (SessionId(2), 0);
        let reservation = Reservation { inode, session, end: 1, truncate_version };
        let change = MetaChange::Reserve { reservations: vec![reservation] };
        successes += u64::from(fixture.change(change).await.is_ok());
    }
    assert_eq!((successes, used(&fixture).await), (8, 96));
    check_tree(&fixture.store).await;
}

/// Files with excess in one quota are moved to another, where the next one has room again.
#[tokio::test]
async fn files_moved_to_another_quota_become_excess_there_within_its_limit() {
    let (fixture, _) = volume(config()).await;
    fixture.make_directory("/w").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let quota = MetaChange::SetQuota { at: At::path("/w"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    let mut renames = 0;
    for number in 0..20 {
        let path = format!("/w/{number}");
        excess(&fixture, &path, 12).await;
        renames += u64::from(fixture.change(rename(&path, &format!("/v/{number}"))).await.is_ok());
        fixture.recount().await;
        check_tree(&fixture.store).await;
    }
    assert_eq!(renames, 20, "nothing is stored of them");
    for number in 20..30 {
        let path = format!("/w/{number}");
        excess(&fixture, &path, 12).await;
        renames += u64::from(fixture.change(rename(&path, &format!("/v/{number}"))).await.is_ok());
    }
    // The first of them is excess, and eight count as used.
    assert_eq!((renames, used(&fixture).await), (29, 96));
    check_tree(&fixture.store).await;
}

/// A client may report a file as open after its removal: then the chunks stay.
#[tokio::test]
async fn a_removed_file_that_is_reopened_counts_again() {
    let (fixture, file) = volume(config()).await;
    cut(&fixture, 80).await;
    fixture.change(MetaChange::Unlink { at: At::path("/v/file") }).await.unwrap();
    assert_eq!(used(&fixture).await, 0);
    let (client, add, release) = (fixture.client, vec![file.id], Vec::new());
    fixture.query(MetaQuery::ReportOpenFiles { client, add, release, all: true }).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(used(&fixture).await, 80);
    check_tree(&fixture.store).await;
    let (add, release) = (Vec::new(), vec![file.id]);
    fixture.query(MetaQuery::ReportOpenFiles { client, add, release, all: false }).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(used(&fixture).await, 0);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_counted_does_not_delay_others() {
    let (fixture, file) = volume(config()).await;
    let quota = file.quota.unwrap();
    reserve(&fixture, file.id, 80).await;
    end(&fixture, file.id).await;
    fixture.make_directory("/w").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let limits = MetaChange::SetQuota { at: At::path("/w"), bytes_max, inodes_max };
    fixture.change(limits).await.unwrap();
    let second = excess(&fixture, "/w/second", 80).await;
    let mut txn = fixture.store.begin().await.unwrap();
    txn.set(&crate::rows::quota_bytes(quota), *b"not a counter");
    txn.commit().await.unwrap();
    fixture.recount().await;
    let mut txn = fixture.store.begin().await.unwrap();
    for (inode, waits) in [(file.id, true), (second.id, false)] {
        let row = txn.get(&crate::rows::recount(inode)).await.unwrap();
        assert_eq!(row.is_some(), waits, "{inode}");
    }
}

/// A volume may have as many waiting files as its quota has inodes.
#[tokio::test]
async fn waiting_files_are_checked_by_age_only() {
    let most = Arc::new(AtomicU64::new(0));
    let store = Store::new(MostReads(Store::memory(), Arc::clone(&most)));
    let config = TreeConfig { recount_wait_ms: 3_600_000, ..config() };
    let fixture = Fixture::open(store, config).await;
    fixture.make_directory("/v").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    for number in 0..20 {
        excess(&fixture, &format!("/v/{number}"), 1).await;
    }
    most.store(0, SeqCst);
    fixture.recount().await;
    assert_eq!(most.load(SeqCst), 2, "the row of the collector and the page");
}

/// The file died after the query to storage, and a client that has it open reported before its
/// chunks were dropped.
#[tokio::test]
async fn a_file_that_is_revived_is_counted_again() {
    let (fixture, file) = volume(config()).await;
    let (now, client) = (fixture.tree.uptime(), fixture.client);
    reserve(&fixture, file.id, 80).await;
    end(&fixture, file.id).await;
    let list = ops::ListRecounts { after: &[], limit: 10, now, wait_ms: 0 };
    let (entries, _) = fixture.store.transact(soon(), &list).await.unwrap();
    fixture.change(MetaChange::Unlink { at: At::path("/v/file") }).await.unwrap();
    fixture.recorder.refuse.store(true, SeqCst);
    fixture.tree.collect().await.unwrap();
    assert!(fixture.tree.terms(&[file.id], 9, soon()).await.unwrap()[0].is_none(), "it is dead");
    let recount = ops::Recount { file: &entries[0], stored_end: 0 };
    fixture.store.transact(soon(), &recount).await.unwrap();
    let (add, release) = (vec![file.id], Vec::new());
    fixture.query(MetaQuery::ReportOpenFiles { client, add, release, all: true }).await.unwrap();
    for _ in 0..2 {
        fixture.tree.collect().await.unwrap();
    }
    assert_eq!(used(&fixture).await, 80);
    fixture.recorder.refuse.store(false, SeqCst);
    fixture.recount().await;
    assert_eq!(used(&fixture).await, 0);
    check_tree(&fixture.store).await;
}

/// A capability may be signed until the releasing commit, which records its start.
#[test]
fn a_capability_and_a_write_with_it_end_before_it_is_counted() {
    let life_ms = threefs_core::terms::WRITE_LIFETIME_S * 1000;
    let change_ms = crate::tree::REQUEST_TIMEOUT.as_millis() as u64;
    let clocks_ms = 20_000;
    let needed_ms = life_ms + change_ms + crate::config::DEAD_GRACE_MS + clocks_ms;
    assert!(TreeConfig::default().recount_wait_ms >= needed_ms);
}

/// A store that, while the flag is set, commits changes in groups of four.
struct ByFours(Store, Arc<AtomicBool>, Barrier);

impl Backend for ByFours {
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>> {
        Backend::snapshot(&self.0)
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>> {
        Box::pin(async {
            if self.1.load(SeqCst) {
                self.2.wait().await;
            }
            self.0.commit(commit).await
        })
    }

    fn watch(&self, key: &[u8]) -> Watch {
        self.0.watch(key)
    }

    fn exclusive_opening(&self) -> Option<u128> {
        self.0.exclusive_opening()
    }
}

/// One volume may have many waiting files, and files of other volumes are queued behind them.
#[tokio::test]
async fn files_are_counted_concurrently() {
    let by_fours = Arc::new(AtomicBool::new(false));
    let store = ByFours(Store::memory(), Arc::clone(&by_fours), Barrier::new(4));
    let fixture = Fixture::open(Store::new(store), config()).await;
    fixture.make_directory("/v").await;
    let (bytes_max, inodes_max) = (Some(100), None);
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    for number in 0..8 {
        excess(&fixture, &format!("/v/{number}"), 12).await;
    }
    assert_eq!(used(&fixture).await, 84);
    assert!(fixture.tree.lead().await.unwrap());
    by_fours.store(true, SeqCst);
    let recount = tokio::time::timeout(Duration::from_secs(20), fixture.recount());
    recount.await.expect("one after the other");
    assert_eq!(used(&fixture).await, 0);
}

#[tokio::test]
async fn sessions_that_end_in_one_change_share_the_excess_limit() {
    let (fixture, file) = volume(config()).await;
    let second = fixture.create("/v/second").await;
    let reservation = |inode: InodeId| {
        let (session, truncate_version) = (SessionId(1), 0);
        Reservation { inode, session, end: 10, truncate_version }
    };
    let reservations = vec![reservation(file.id), reservation(second.id)];
    fixture.change(MetaChange::Reserve { reservations }).await.unwrap();
    let ends = vec![(file.id, SessionId(1)), (second.id, SessionId(1))];
    fixture.change(MetaChange::ReportLengths { reports: Vec::new(), ends }).await.unwrap();
    assert_eq!(used(&fixture).await, 20 - 12);
    check_tree(&fixture.store).await;
}
