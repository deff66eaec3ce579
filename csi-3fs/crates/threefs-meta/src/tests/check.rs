//! The check of metadata: each kind of damage is found, and nothing else.

use threefs_kv::{DumpError, EmbeddedConfig, Store, StoreConfig, Transaction};

use crate::check::{Checked, check};
use crate::protocol::{At, EntryKind, MetaChange, ROOT, TrashChange, TrashId};
use crate::rows::{self, DentryRow, InodeRow, QuotaRow, RemovalRow, TrashRow};
use crate::tests::fixture::{Fixture, make_directory, rename};
use crate::tests::invariants::{check_rows, check_tree};
use threefs_core::ids::InodeId;

/// A volume with a file, a link, a trash and removals.
async fn example() -> Fixture {
    let fixture = Fixture::memory().await;
    fixture.change(make_directory("/v/d/e", true)).await.unwrap();
    let at = || At::path("/v");
    let quota = MetaChange::SetQuota { at: at(), bytes_max: Some(100), inodes_max: None };
    fixture.change(quota).await.unwrap();
    for path in ["/v/d/file", "/v/removed", "/free", "/gone"] {
        fixture.create(path).await;
    }
    let link = MetaChange::Link { from: At::path("/v/d/file"), to: At::path("/v/link") };
    fixture.change(link).await.unwrap();
    let keep = MetaChange::Trash(TrashChange::Keep { at: at(), seconds: 1000 });
    fixture.change(keep).await.unwrap();
    for path in ["/v/removed", "/gone"] {
        fixture.change(MetaChange::Unlink { at: At::path(path) }).await.unwrap();
    }
    fixture.change(MetaChange::RemoveTree { at: At::path("/v/d/e") }).await.unwrap();
    check_tree(&fixture.store).await;
    fixture
}

pub(super) async fn change(store: &Store, damage: impl AsyncFn(&mut Transaction)) {
    let mut txn = store.begin().await.unwrap();
    damage(&mut txn).await;
    txn.commit().await.unwrap();
}

/// The kinds of findings about an inode after the damage.
async fn kinds(fixture: &Fixture, id: InodeId, damage: impl AsyncFn(&mut Transaction)) -> String {
    change(&fixture.store, damage).await;
    let Checked { findings, findings_total, .. } = check_rows(&fixture.store).await;
    assert_eq!(findings.len() as u64, findings_total);
    let about = findings.iter().filter(|finding| finding.inode == id.0);
    let mut kinds: Vec<&str> = about.map(|finding| finding.kind).collect();
    kinds.dedup();
    kinds.join(" ")
}

async fn edit(txn: &mut Transaction, id: InodeId, edit: impl Fn(&mut InodeRow)) {
    let mut row = rows::read_inode(txn, id).await.unwrap().unwrap();
    edit(&mut row);
    rows::write(txn, &rows::inode(id), &row).unwrap();
}

/// An entry of the trash of a volume.
async fn kept(store: &Store, volume: InodeId, kind: EntryKind) -> (TrashId, TrashRow) {
    let mut txn = store.begin().await.unwrap();
    let range = threefs_kv::KeyRange::prefix(&rows::trash_of(volume));
    for (key, value) in txn.range(&range, 9).await.unwrap() {
        let row: TrashRow = rows::decode(&key, &value).unwrap();
        if row.kind == kind {
            return (rows::trash_id_of_key(&key).unwrap(), row);
        }
    }
    panic!("no {kind:?} in the trash")
}

#[tokio::test]
async fn damaged_names_and_links_are_found() {
    let file = |fixture: Fixture| async move {
        let id = fixture.stat("/v/d/file").await.unwrap().id;
        (fixture, id)
    };
    let (fixture, id) = file(example().await).await;
    let lost = kinds(&fixture, id, async |txn| txn.clear(&rows::inode(id))).await;
    assert_eq!(lost, "name");
    let (fixture, id) = file(example().await).await;
    let links =
        kinds(&fixture, id, async |txn| edit(txn, id, |row| row.inode.links = 7).await).await;
    assert_eq!(links, "links");
    let volume = fixture.stat("/v").await.unwrap().id;
    let (fixture, id) = file(example().await).await;
    let one_name = kinds(&fixture, id, async |txn| txn.clear(&rows::dentry(volume, "link"))).await;
    assert_eq!(one_name, "charge links");
    let fixture = example().await;
    let id = fixture.stat("/free").await.unwrap().id;
    let orphan = kinds(&fixture, id, async |txn| txn.clear(&rows::dentry(ROOT, "free"))).await;
    assert_eq!(orphan, "charge links removal");
    let fixture = example().await;
    let id = fixture.stat("/free").await.unwrap().id;
    let wrong = DentryRow::new(id, EntryKind::Symlink);
    let kind = kinds(&fixture, id, async |txn| {
        rows::write(txn, &rows::dentry(ROOT, "free"), &wrong).unwrap();
    });
    assert_eq!(kind.await, "name");
}

#[tokio::test]
async fn damaged_directories_are_found() {
    let fixture = example().await;
    let (volume, id) =
        (fixture.stat("/v").await.unwrap().id, fixture.stat("/v/d").await.unwrap().id);
    let parent = async |txn: &mut Transaction| {
        edit(txn, id, |row| {
            if let crate::InodeKind::Directory { parent, .. } = &mut row.inode.kind {
                *parent = id;
            }
        })
        .await;
    };
    assert_eq!(kinds(&fixture, id, parent).await, "directory");
    let fixture = example().await;
    let counted = async |txn: &mut Transaction| txn.atomic_add(&rows::subdirectories(volume), 1);
    assert_eq!(kinds(&fixture, volume, counted).await, "links");
    let fixture = example().await;
    let gone = kinds(&fixture, volume, async |txn| txn.clear(&rows::inode(volume))).await;
    assert_eq!(gone, "directory name row");
    let fixture = example().await;
    let no_root = kinds(&fixture, ROOT, async |txn| txn.clear(&rows::inode(ROOT))).await;
    assert!(no_root.contains("directory"), "{no_root}");
}

#[tokio::test]
async fn damaged_queues_and_trashes_are_found() {
    let fixture = example().await;
    let volume = fixture.stat("/v").await.unwrap().id;
    let (file, _) = kept(&fixture.store, volume, EntryKind::File).await;
    let lost = async |txn: &mut Transaction| txn.clear(&rows::trashed(volume, file));
    assert_eq!(kinds(&fixture, file.inode, lost).await, "charge removal");
    let fixture = example().await;
    let (file, entry) = kept(&fixture.store, volume, EntryKind::File).await;
    let twice = async |txn: &mut Transaction| {
        let later = TrashId { removed_ms: file.removed_ms + 1, ..file };
        rows::write(txn, &rows::trashed(volume, later), &entry).unwrap();
    };
    assert_eq!(kinds(&fixture, file.inode, twice).await, "trash");
    let fixture = example().await;
    let (file, _) = kept(&fixture.store, volume, EntryKind::File).await;
    let both = async |txn: &mut Transaction| {
        let (inode, kind) = (file.inode, EntryKind::File);
        let removal = RemovalRow { inode, kind, run_id: 1, opened_by: Vec::new() };
        crate::ops::queue(txn, rows::REMOVALS, &removal).await.unwrap();
    };
    assert_eq!(kinds(&fixture, file.inode, both).await, "removal");
    let fixture = example().await;
    let (directory, _) = kept(&fixture.store, volume, EntryKind::Directory).await;
    let place = async |txn: &mut Transaction| txn.clear(&rows::trashed_directory(directory.inode));
    assert_eq!(kinds(&fixture, directory.inode, place).await, "trash");
    let fixture = example().await;
    let (directory, _) = kept(&fixture.store, volume, EntryKind::Directory).await;
    let nowhere = async |txn: &mut Transaction| {
        txn.clear(&rows::trashed_directory(directory.inode));
        txn.clear(&rows::trashed(volume, directory));
    };
    assert_eq!(kinds(&fixture, directory.inode, nowhere).await, "removal");
    let fixture = example().await;
    let (file, _) = kept(&fixture.store, volume, EntryKind::File).await;
    let dead = async |txn: &mut Transaction| edit(txn, file.inode, |row| row.dead = true).await;
    assert_eq!(kinds(&fixture, file.inode, dead).await, "trash");
    let fixture = example().await;
    let id = fixture.stat("/free").await.unwrap().id;
    let queued = async |txn: &mut Transaction| {
        let removal =
            RemovalRow { inode: id, kind: EntryKind::File, run_id: 1, opened_by: Vec::new() };
        crate::ops::queue(txn, rows::REMOVALS, &removal).await.unwrap();
    };
    assert_eq!(kinds(&fixture, id, queued).await, "removal");
}

#[tokio::test]
async fn wrong_counters_are_found() {
    let fixture = example().await;
    let volume = fixture.stat("/v").await.unwrap().id;
    for key in [
        rows::quota_bytes(volume),
        rows::quota_excess(volume),
        rows::quota_inodes(volume),
        rows::quota_metadata(volume),
    ] {
        let fixture = example().await;
        let more = async |txn: &mut Transaction| txn.atomic_add(&key, 1);
        assert_eq!(kinds(&fixture, volume, more).await, "quota");
    }
    let fixture = example().await;
    let id = fixture.stat("/v/d/file").await.unwrap().id;
    let owner = async |txn: &mut Transaction| edit(txn, id, |row| row.inode.quota = None).await;
    assert_eq!(kinds(&fixture, id, owner).await, "quota");
    let fixture = example().await;
    let circle = async |txn: &mut Transaction| {
        let (bytes_max, inodes_max, above) = (None, None, Some(volume));
        let quota = QuotaRow { bytes_max, inodes_max, above, trash_seconds: 0 };
        rows::write(txn, &rows::quota(volume), &quota).unwrap();
    };
    assert_eq!(kinds(&fixture, id, circle).await, "quota", "its quota is above itself");
    let fixture = example().await;
    let answers = async |txn: &mut Transaction| {
        txn.atomic_add(&rows::answer_bytes(volume), 5);
    };
    assert_eq!(kinds(&fixture, volume, answers).await, "answers");
    let fixture = example().await;
    let charge = async |txn: &mut Transaction| edit(txn, id, |row| row.excess = 1).await;
    assert!(kinds(&fixture, id, charge).await.contains("charge"));
}

#[tokio::test]
async fn rows_that_cannot_be_read_and_rows_without_inode_are_found() {
    let fixture = example().await;
    let id = fixture.stat("/free").await.unwrap().id;
    let garbage = async |txn: &mut Transaction| txn.set(&rows::dentry(ROOT, "x"), vec![255; 3]);
    assert_eq!(kinds(&fixture, ROOT, garbage).await, "row");
    let missing = InodeId(1 << 30);
    let attribute = async |txn: &mut Transaction| txn.set(&rows::attribute(missing, "user.a"), "x");
    assert_eq!(kinds(&fixture, missing, attribute).await, "row");
    assert_ne!(id, missing);
}

#[tokio::test]
async fn findings_are_bounded_and_counted() {
    let fixture = Fixture::memory().await;
    change(&fixture.store, async |txn| {
        for number in 0..1500 {
            txn.set(&rows::attribute(InodeId(1000 + number), "user.a"), "x");
        }
    })
    .await;
    let checked = check_rows(&fixture.store).await;
    assert_eq!((checked.findings.len(), checked.findings_total), (1000, 1500));
}

#[tokio::test]
async fn a_dump_is_checked_and_one_of_another_schema_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = EmbeddedConfig::new(folder.path().join("store"));
    let (source, file) = (StoreConfig::Embedded(config.clone()), folder.path().join("meta.dump"));
    let report = &|_, _| true;
    {
        let store = Store::embedded(config.clone()).unwrap();
        let fixture = Fixture::open(store, crate::tests::fixture::config()).await;
        fixture.create("/file").await;
        fixture.change(rename("/file", "/other")).await.unwrap();
    }
    threefs_kv::dump(&source, "meta", &file, report).await.unwrap();
    let checked = check(&file, report).unwrap();
    assert_eq!((checked.inodes, checked.findings), (2, vec![]));
    assert!(matches!(check(&file, &|_, _| false), Err(DumpError::Stopped)));
    {
        let store = Store::embedded(config).unwrap();
        change(&store, async |txn| {
            rows::write(txn, rows::SCHEMA, &(rows::SCHEMA_WITH_SNAPSHOTS + 1)).unwrap();
        })
        .await;
    }
    threefs_kv::dump(&source, "meta", &file, report).await.unwrap();
    let error = check(&file, report).unwrap_err();
    assert!(error.to_string().contains("schema 9"), "{error}");
}
