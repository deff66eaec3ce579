//! Removal of files: a file is unreadable before its chunks are dropped, open files are kept, and
//! the set of existing chunks is exact.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use threefs_core::layout::Layout;
use threefs_kv::{EmbeddedConfig, Store, StoreConfig};

use crate::chunk_trimmer::{ChunkTrimmer, DeadFile, Pending};
use crate::config::TreeConfig;
use crate::protocol::{
    At, Inode, InodeKind, LengthReport, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest,
    Reservation, SessionId,
};
use crate::tests::fixture::{Fixture, config, count_inodes, routing, soon};
use crate::tests::invariants::check_tree;
use crate::{Identity, Tree, Written};

const CHUNK: u64 = 1 << 20;

fn unlink(path: &str) -> MetaChange {
    MetaChange::Unlink { at: At::path(path) }
}

fn by_inode(id: InodeId) -> MetaQuery {
    MetaQuery::Stat { at: At::inode(id), follow: false }
}

fn report_open(client: ClientId, add: &[InodeId], release: &[InodeId], all: bool) -> MetaQuery {
    MetaQuery::ReportOpenFiles { client, add: add.to_vec(), release: release.to_vec(), all }
}

async fn open(fixture: &Fixture, client: ClientId, id: InodeId) {
    let open = MetaQuery::Open { at: At::inode(id), access: 4, client };
    fixture.query(open).await.unwrap();
}

fn written(inode: &Inode) -> &Written {
    let InodeKind::File { written, .. } = &inode.kind else { panic!("{inode:?}") };
    written
}

fn report(inode: &Inode, offset: u64, end: u64) -> MetaChange {
    let InodeKind::File { truncate_version, .. } = inode.kind else { panic!("{inode:?}") };
    let written = Written::of_bytes(offset, end, CHUNK as u32);
    let report = LengthReport { inode: inode.id, length: end, truncate_version, written };
    MetaChange::ReportLengths { reports: vec![report], ends: Vec::new() }
}

async fn reported(fixture: &Fixture, change: MetaChange) -> Inode {
    match fixture.change(change).await.unwrap() {
        MetaReply::Inodes(mut inodes) => inodes.pop().unwrap().unwrap(),
        other => panic!("{other:?}"),
    }
}

/// Checks, whenever a chunk is dropped, that the file cannot be read.
#[derive(Default)]
struct Reader {
    tree: std::sync::OnceLock<std::sync::Weak<Tree>>,
    readable: AtomicBool,
    was_called: AtomicBool,
}

impl ChunkTrimmer for Reader {
    fn trim<'a>(
        &'a self,
        _inode: InodeId,
        _layout: &'a Layout,
        _range: Range<u64>,
        _pending: Pending,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn forget<'a>(
        &'a self,
        files: &'a [DeadFile],
        _deadline: Deadline,
    ) -> BoxFuture<'a, Vec<Result<(), String>>> {
        Box::pin(async move {
            let tree = self.tree.get().unwrap().upgrade().unwrap();
            for DeadFile { inode, .. } in files {
                let request =
                    MetaRequest::Query { caller: Identity::ROOT, query: by_inode(*inode) };
                self.readable.fetch_or(tree.answer(request, soon()).await.is_ok(), SeqCst);
                self.was_called.store(true, SeqCst);
            }
            vec![Ok(()); files.len()]
        })
    }

    fn stored_end<'a>(
        &'a self,
        _inode: InodeId,
        _layout: &'a Layout,
        range: Range<u64>,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<u64, String>> {
        Box::pin(std::future::ready(Ok(range.start)))
    }
}

#[tokio::test]
async fn a_file_is_unreadable_before_its_chunks_are_removed() {
    let reader = Arc::new(Reader::default());
    let trimmer = Arc::clone(&reader) as Arc<dyn ChunkTrimmer>;
    let tree = Arc::new(Tree::open(Store::memory(), config(), routing(), trimmer).await.unwrap());
    assert!(reader.tree.set(Arc::downgrade(&tree)).is_ok());
    for (sequence, change) in [(1, crate::tests::fixture::create("/big")), (2, unlink("/big"))] {
        let id = crate::RequestId { client: ClientId(9), sequence, finished_below: 0 };
        let change = MetaRequest::Change { id, caller: Identity::ROOT, change };
        tree.answer(change, soon()).await.unwrap();
    }
    while tree.collect().await.unwrap() > 0 {}
    assert!(reader.was_called.load(SeqCst));
    assert!(!reader.readable.load(SeqCst), "its chunks were removed while it was readable");
}

#[tokio::test]
async fn the_chunks_of_a_removed_file_are_removed_after_a_delay() {
    let slow = TreeConfig { dead_grace_ms: 3_600_000, ..config() };
    let fixture = Fixture::open(Store::memory(), slow).await;
    let file = fixture.create("/file").await;
    fixture.change(unlink("/file")).await.unwrap();
    assert!(
        fixture.query(by_inode(file.id)).await.is_ok(),
        "a client that looked it up before may read it"
    );
    fixture.collect_all().await;
    let error = fixture.query(by_inode(file.id)).await.unwrap_err();
    assert!(matches!(error, MetaError::NotFound { .. }), "{error}");
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    assert_eq!(count_inodes(&fixture.store).await, 2);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn open_files_survive_a_restart_until_their_client_reports_or_expires() {
    let store = Store::memory();
    let quick = TreeConfig { session_timeout_ms: 1, ..config() };
    let (holder, kept, closed);
    {
        let fixture = Fixture::open(store.clone(), quick).await;
        holder = ClientId(77);
        (kept, closed) = (fixture.create("/kept").await, fixture.create("/closed").await);
        open(&fixture, holder, kept.id).await;
        open(&fixture, holder, closed.id).await;
        fixture.change(unlink("/kept")).await.unwrap();
        fixture.change(unlink("/closed")).await.unwrap();
        fixture.collect_all().await;
        assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    }
    // The client is disconnected: it has not reported to the new service.
    let fixture = Fixture::open(store.clone(), quick).await;
    fixture.collect_all().await;
    assert!(fixture.query(by_inode(kept.id)).await.is_ok(), "its client may return");
    fixture.query(report_open(holder, &[kept.id], &[], true)).await.unwrap();
    fixture.collect_all().await;
    assert!(fixture.query(by_inode(kept.id)).await.is_ok());
    assert!(fixture.query(by_inode(closed.id)).await.is_err(), "it was closed meanwhile");
    fixture.query(report_open(holder, &[], &[kept.id], false)).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn a_removed_file_that_is_reported_open_is_revived() {
    let slow = TreeConfig { dead_grace_ms: 20, ..config() };
    let fixture = Fixture::open(Store::memory(), slow).await;
    let file = fixture.create("/file").await;
    fixture.change(unlink("/file")).await.unwrap();
    fixture.collect_all().await;
    assert!(fixture.query(by_inode(file.id)).await.is_err());
    fixture.query(report_open(ClientId(5), &[file.id], &[], true)).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    fixture.tree.collect().await.unwrap();
    assert!(fixture.query(by_inode(file.id)).await.is_ok());
    assert!(fixture.recorder.trims.lock().unwrap().is_empty());
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_file_knows_which_of_its_chunks_must_exist() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    let dense = reported(&fixture, report(&file, 0, 3 * CHUNK)).await;
    assert!((0..3).all(|index| written(&dense).contains(index)));
    let set = |length| MetaChange::SetLength { at: At::path("/file"), length };
    fixture.change(set(100 * CHUNK)).await.unwrap();
    let sparse = fixture.stat("/file").await.unwrap();
    assert!(written(&sparse).contains(2) && !written(&sparse).contains(3), "a hole follows");
    fixture.change(set(CHUNK + 1)).await.unwrap();
    let cut = fixture.stat("/file").await.unwrap();
    assert!(written(&cut).contains(1) && !written(&cut).contains(2));
    // A report from before the truncation does not add chunks.
    let late = reported(&fixture, report(&file, 0, 9 * CHUNK)).await;
    assert_eq!(written(&late), written(&cut));
}

/// Which of the first chunks must exist.
async fn existing(fixture: &Fixture, path: &str, chunks: u32) -> Vec<u32> {
    let all: Vec<u32> = (0..chunks).collect();
    let mut existing = Vec::new();
    for page in all.chunks(1024) {
        let stat = MetaQuery::StatChunks { at: At::path(path), chunks: page.to_vec() };
        match fixture.query(stat).await.unwrap() {
            MetaReply::Inode(inode) => {
                existing.extend(page.iter().filter(|index| written(&inode).contains(**index)));
            }
            other => panic!("{other:?}"),
        }
    }
    existing
}

#[tokio::test]
async fn a_file_with_more_written_ranges_than_its_inode_stores_records_all_chunks() {
    const CHUNKS: u32 = 3000;
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await;
    let InodeKind::File { truncate_version, .. } = file.kind else { panic!() };
    // Every second chunk, back to front.
    let mut unreported = Written::default();
    for index in (0..CHUNKS).step_by(2) {
        unreported.add(index, index);
    }
    while !unreported.is_empty() {
        let written = unreported.take(300);
        let (inode, length) = (file.id, u64::from(CHUNKS) * CHUNK);
        let report = LengthReport { inode, length, truncate_version, written };
        let reports = vec![report];
        reported(&fixture, MetaChange::ReportLengths { reports, ends: Vec::new() }).await;
    }
    let inode = fixture.stat("/file").await.unwrap();
    assert!(written(&inode).has_more() && written(&inode).ranges() <= 256);
    let even: Vec<u32> = (0..CHUNKS).step_by(2).collect();
    assert_eq!(existing(&fixture, "/file", CHUNKS).await, even);
    let set = |length| MetaChange::SetLength { at: At::path("/file"), length };
    fixture.change(set(1001 * CHUNK)).await.unwrap();
    fixture.change(set(u64::from(CHUNKS) * CHUNK)).await.unwrap();
    assert_eq!(existing(&fixture, "/file", CHUNKS).await, even[..501]);
    fixture.change(unlink("/file")).await.unwrap();
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
    let rows = threefs_kv::KeyRange::prefix(b"WRIT");
    let mut txn = fixture.store.begin().await.unwrap();
    assert!(txn.range(&rows, 1).await.unwrap().is_empty(), "its rows are removed with it");
}

#[tokio::test]
async fn every_change_has_a_new_version_and_content_a_separate_one() {
    let fixture = Fixture::memory().await;
    let created = fixture.create("/file").await;
    let extended = reported(&fixture, report(&created, 0, 5)).await;
    let chmod = MetaChange::SetAttributes {
        at: At::path("/file"),
        follow: true,
        mode: Some(0o600),
        uid: None,
        gid: None,
        accessed: None,
        modified: Some(crate::SetTime::At(created.modified)),
    };
    fixture.change(chmod).await.unwrap();
    let chmodded = fixture.stat("/file").await.unwrap();
    assert!(created.version < extended.version && extended.version < chmodded.version);
    let content = |inode: &Inode| match inode.kind {
        InodeKind::File { content, .. } => content,
        _ => panic!(),
    };
    assert_eq!(chmodded.modified, created.modified, "the time was set back");
    assert_eq!(content(&chmodded), content(&extended));
    assert!(content(&extended) > content(&created));
}

#[tokio::test]
async fn only_chains_that_can_hold_chunks_are_queried() {
    let fixture = Fixture::memory().await;
    fixture.make_directory("/q").await;
    let quota =
        MetaChange::SetQuota { at: At::path("/q"), bytes_max: Some(1 << 40), inodes_max: None };
    fixture.change(quota).await.unwrap();
    let (small, loose) = (fixture.create("/q/small").await, fixture.create("/loose").await);
    let reservation =
        Reservation { inode: small.id, session: SessionId(3), end: 5 * CHUNK, truncate_version: 0 };
    fixture.change(MetaChange::Reserve { reservations: vec![reservation] }).await.unwrap();
    let ends = vec![(small.id, SessionId(3))];
    fixture.change(MetaChange::ReportLengths { reports: Vec::new(), ends }).await.unwrap();
    reported(&fixture, report(&fixture.stat("/q/small").await.unwrap(), 0, 1)).await;
    for path in ["/q/small", "/loose"] {
        let cut = MetaChange::SetLength { at: At::path(path), length: 0 };
        fixture.change(cut).await.unwrap();
    }
    let cut = std::mem::take(&mut *fixture.recorder.ends.lock().unwrap());
    for path in ["/q/small", "/loose"] {
        fixture.change(unlink(path)).await.unwrap();
    }
    fixture.collect_all().await;
    let ends_of_removal = fixture.recorder.ends.lock().unwrap().clone();
    for ends in [cut, ends_of_removal] {
        // A writer that stopped without a report may have written up to its reservation.
        assert!(ends.contains(&(small.id, 5 * CHUNK)), "{ends:?}");
        assert!(
            ends.contains(&(loose.id, u64::MAX)),
            "without a quota writers do not reserve: {ends:?}"
        );
    }
}

#[tokio::test]
async fn files_on_an_unavailable_chain_do_not_delay_others() {
    let fixture = Fixture::memory().await;
    let mut files = Vec::new();
    for number in 0..600 {
        let path = format!("/{number}");
        files.push(fixture.create(&path).await.id);
        fixture.change(unlink(&path)).await.unwrap();
    }
    let away: Vec<InodeId> = files.iter().copied().step_by(2).collect();
    fixture.recorder.unavailable.lock().unwrap().clone_from(&away);
    fixture.collect_all().await;
    assert_eq!(fixture.recorder.trims.lock().unwrap().len(), 300);
    assert_eq!(count_inodes(&fixture.store).await, 301, "those that failed and the root");
    check_tree(&fixture.store).await;
    fixture.recorder.unavailable.lock().unwrap().clear();
    fixture.collect_all().await;
    assert_eq!(count_inodes(&fixture.store).await, 1);
}

#[tokio::test]
async fn a_restored_tree_uses_no_inode_number_that_the_lost_one_may_have_used() {
    let folder = tempfile::tempdir().unwrap();
    let config = |name: &str| EmbeddedConfig::new(folder.path().join(name));
    let file = folder.path().join("dump");
    let file_inode = {
        let fixture =
            Fixture::open(Store::embedded(config("old")).unwrap(), crate::tests::fixture::config())
                .await;
        fixture.create("/kept").await
    };
    let (old, new) = (StoreConfig::Embedded(config("old")), StoreConfig::Embedded(config("new")));
    threefs_kv::dump(&old, crate::DUMP_KIND, &file, &|_, _| true).await.unwrap();
    let lost_file = {
        let fixture =
            Fixture::open(Store::embedded(config("old")).unwrap(), crate::tests::fixture::config())
                .await;
        let mut last = fixture.create("/lost").await;
        for number in 0..5000 {
            last = fixture.create(&format!("/lost-{number}")).await;
        }
        last
    };
    crate::restore(&new, &file, &|_, _| true).await.unwrap();
    let store = Store::embedded(config("new")).unwrap();
    let fixture = Fixture::open(store, crate::tests::fixture::config()).await;
    assert_eq!(fixture.stat("/kept").await.unwrap(), file_inode);
    assert!(fixture.stat("/lost").await.is_err());
    assert!(fixture.create("/new").await.id > lost_file.id);
    check_tree(&fixture.store).await;
}

/// Storage bounds how many forgotten files it remembers, and a holder of a capability for a removed
/// file may write to it until it expires.
#[tokio::test]
async fn a_file_with_a_live_capability_is_forgotten_again_after_the_expiry() {
    let forgotten = |fixture: &Fixture| fixture.recorder.trims.lock().unwrap().len();
    let store = Store::memory();
    let slow = TreeConfig { recount_wait_ms: 3_600_000, ..config() };
    let fixture = Fixture::open(store.clone(), slow).await;
    fixture.make_directory("/v").await;
    let (bytes_max, inodes_max) = (Some(100), Some(1));
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max, inodes_max };
    fixture.change(quota).await.unwrap();
    let file = fixture.create("/v/file").await;
    fixture.change(report(&file, 0, 50)).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    // Without a quota no capability is valid.
    fixture.create("/outside").await;
    fixture.change(unlink("/outside")).await.unwrap();
    fixture.collect_all().await;
    assert_eq!(forgotten(&fixture), 2);
    fixture.query(by_inode(file.id)).await.unwrap_err();
    check_tree(&store).await;
    // Its name is free in the meantime, and reporting it as open does not restore it.
    fixture.create("/v/other").await;
    let (add, release) = (vec![file.id], vec![]);
    fixture
        .query(MetaQuery::ReportOpenFiles { client: ClientId(5), add, release, all: true })
        .await
        .unwrap();
    let fixture = Fixture::open(store.clone(), config()).await;
    let (add, release) = (vec![file.id], vec![]);
    fixture
        .query(MetaQuery::ReportOpenFiles { client: ClientId(5), add, release, all: true })
        .await
        .unwrap();
    fixture.collect_all().await;
    assert_eq!(*fixture.recorder.trims.lock().unwrap(), [(file.id, 0)]);
    let mut txn = store.begin().await.unwrap();
    assert_eq!(txn.get(&crate::rows::inode(file.id)).await.unwrap(), None);
    check_tree(&store).await;
}

/// Tombstones count for no quota, and a ticket holder may create and remove files all the time.
#[tokio::test]
async fn records_of_files_to_forget_again_are_small() {
    let slow = TreeConfig { recount_wait_ms: 3_600_000, ..config() };
    let fixture = Fixture::open(Store::memory(), slow).await;
    fixture.make_directory("/v").await;
    let quota = MetaChange::SetQuota { at: At::path("/v"), bytes_max: None, inodes_max: None };
    fixture.change(quota).await.unwrap();
    let empty = fixture.create("/v/empty").await;
    let file = fixture.create("/v/file").await;
    for number in 0..200 {
        let start = number * 2 * CHUNK;
        fixture.change(report(&file, start, start + 1)).await.unwrap();
    }
    fixture.change(unlink("/v/empty")).await.unwrap();
    fixture.change(unlink("/v/file")).await.unwrap();
    fixture.collect_all().await;
    let mut txn = fixture.store.begin().await.unwrap();
    assert_eq!(txn.get(&crate::rows::inode(empty.id)).await.unwrap(), None);
    let row = txn.get(&crate::rows::inode(file.id)).await.unwrap().unwrap();
    assert!(row.len() < 200, "{} bytes", row.len());
    check_tree(&fixture.store).await;
}
