//! Repairs of counters: planted errors are corrected exactly, also while clients change what the
//! counters count, while volumes move and are removed, and while the outcome of steps is unknown.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::ids::InodeId;
use threefs_kv::{EmbeddedConfig, Store, Transaction};

use crate::check::Checked;
use crate::protocol::{
    At, AuditQuery, CORRECTIONS_PER_STEP, Correction, LengthReport, MetaChange, MetaError,
    MetaQuery, MetaReply, TrashChange, Written,
};
use crate::rows;
use crate::tests::backends::{UnknownOutcome, Yielding};
use crate::tests::fixture::{Fixture, config, create, make_directory, rename};
use crate::tests::invariants::{check_rows, check_tree};

const VOLUMES: [&str; 4] = ["/a", "/a/v", "/a/v/w", "/b"];

fn set_quota(path: &str) -> MetaChange {
    let (bytes_max, inodes_max) = (Some(1 << 40), Some(1 << 20));
    MetaChange::SetQuota { at: At::path(path), bytes_max, inodes_max }
}

async fn nested(store: Store) -> Fixture {
    let fixture = Fixture::open(store, config()).await;
    for path in VOLUMES {
        fixture.make_directory(path).await;
        fixture.change(set_quota(path)).await.unwrap();
        for name in ["x", "y"] {
            fixture.make_directory(&format!("{path}/{name}")).await;
            fixture.create(&format!("{path}/{name}/file")).await;
        }
    }
    fixture
}

async fn damage(store: &Store, damage: impl Fn(&mut Transaction)) {
    let mut txn = store.begin().await.unwrap();
    damage(&mut txn);
    txn.commit().await.unwrap();
}

/// Adds errors to the counters of some directories.
async fn plant(fixture: &Fixture, random: &mut StdRng) {
    for path in VOLUMES {
        let id = fixture.stat(path).await.unwrap().id;
        for key in [
            rows::quota_bytes(id),
            rows::quota_excess(id),
            rows::quota_inodes(id),
            rows::quota_metadata(id),
            rows::subdirectories(id),
        ] {
            if random.random_range(0..3) > 0 {
                let error = random.random_range(-50..50);
                damage(&fixture.store, |txn| txn.atomic_add(&key, error)).await;
            }
        }
        damage(&fixture.store, |txn| txn.atomic_add(&rows::answer_bytes(id), 9)).await;
    }
}

async fn ask(fixture: &Fixture, query: AuditQuery) -> Result<(), MetaError> {
    fixture.query(MetaQuery::Audit(query)).await.map(|reply| assert_eq!(reply, MetaReply::Done))
}

/// Starts a repair and reads a snapshot.
async fn start(fixture: &Fixture, repair: u64) -> Checked {
    ask(fixture, AuditQuery::StartRepair { repair }).await.unwrap();
    check_rows(&fixture.store).await
}

async fn apply(fixture: &Fixture, repair: u64, checked: &Checked) -> Result<(), MetaError> {
    let steps = checked.corrections.chunks(3);
    for (step, corrections) in (0..).zip(steps) {
        let corrections = corrections.to_vec();
        ask(fixture, AuditQuery::Repair { repair, step, corrections }).await?;
    }
    Ok(())
}

#[tokio::test]
async fn planted_errors_are_corrected_and_nothing_else() {
    for seed in 0..20 {
        let fixture = nested(Store::memory()).await;
        let mut random = StdRng::seed_from_u64(seed);
        assert_eq!(start(&fixture, 1).await.corrections, []);
        plant(&fixture, &mut random).await;
        let checked = start(&fixture, 2).await;
        assert_eq!(checked.repair, Some(2));
        assert!(checked.findings_total > 0);
        apply(&fixture, 2, &checked).await.unwrap();
        check_tree(&fixture.store).await;
    }
}

#[tokio::test]
async fn counters_of_an_inode_are_corrected_unless_it_has_changed() {
    for changes in [false, true] {
        let fixture = nested(Store::memory()).await;
        let link = MetaChange::Link { from: At::path("/a/x/file"), to: At::path("/a/x/other") };
        fixture.change(link).await.unwrap();
        let directory = fixture.stat("/a/x").await.unwrap().id;
        let file = fixture.stat("/a/x/file").await.unwrap().id;
        damage(&fixture.store, |txn| txn.clear(&rows::dentry(directory, "other"))).await;
        let checked = start(&fixture, 1).await;
        let kinds: Vec<_> = checked.findings.iter().map(|it| (it.inode, it.kind)).collect();
        assert_eq!(kinds, [(file.0, "charge"), (file.0, "links")]);
        if changes {
            let link = MetaChange::Link { from: At::path("/a/x/file"), to: At::path("/a/x/new") };
            fixture.change(link).await.unwrap();
        }
        apply(&fixture, 1, &checked).await.unwrap();
        let links = fixture.stat("/a/x/file").await.unwrap().links;
        assert_eq!(links, if changes { 3 } else { 1 }, "two names and one that is lost, or one");
        let checked = start(&fixture, 2).await;
        apply(&fixture, 2, &checked).await.unwrap();
        check_tree(&fixture.store).await;
    }
}

/// What cannot be derived is not touched.
#[tokio::test]
async fn inodes_without_names_and_names_without_inodes_are_not_corrected() {
    let fixture = nested(Store::memory()).await;
    let directory = fixture.stat("/b/x").await.unwrap().id;
    let other = fixture.stat("/b/y/file").await.unwrap().id;
    damage(&fixture.store, |txn| txn.clear(&rows::dentry(directory, "file"))).await;
    assert_eq!(start(&fixture, 1).await.corrections, [], "an orphan");
    // Its charge is gone with it, so the use of its volume is derivable.
    damage(&fixture.store, |txn| txn.clear(&rows::inode(other))).await;
    let checked = start(&fixture, 2).await;
    assert!(matches!(checked.corrections[..], [Correction::Quota { .. }]), "{checked:?}");
    apply(&fixture, 2, &checked).await.unwrap();
    let checked = check_rows(&fixture.store).await;
    assert!(checked.findings.iter().all(|it| it.kind != "quota"), "{checked:?}");
    assert!(checked.findings_total > 0);
}

#[tokio::test]
async fn rows_that_cannot_be_read_prevent_corrections() {
    let fixture = nested(Store::memory()).await;
    let file = fixture.stat("/b/y/file").await.unwrap().id;
    damage(&fixture.store, |txn| txn.set(&rows::inode(file), vec![255; 3])).await;
    let checked = start(&fixture, 1).await;
    assert_eq!((checked.unreadable_rows, checked.corrections), (1, vec![]));
}

#[tokio::test]
async fn quotas_that_form_a_circle_are_not_corrected() {
    let fixture = nested(Store::memory()).await;
    let id = fixture.stat("/b").await.unwrap().id;
    let (bytes_max, inodes_max, above) = (None, None, Some(id));
    let circle = rows::QuotaRow { bytes_max, inodes_max, above, trash_seconds: 0 };
    damage(&fixture.store, |txn| rows::write(txn, &rows::quota(id), &circle).unwrap()).await;
    let checked = start(&fixture, 1).await;
    assert_eq!(checked.corrections, []);
    assert!(checked.findings_total > 0);
}

#[tokio::test]
async fn a_step_is_applied_once_and_only_for_the_repair_that_started_last() {
    let fixture = nested(Store::memory()).await;
    let id = fixture.stat("/a").await.unwrap().id;
    damage(&fixture.store, |txn| txn.atomic_add(&rows::quota_inodes(id), 5)).await;
    let (first, second) = (start(&fixture, 1).await, start(&fixture, 2).await);
    assert_eq!(first.corrections, second.corrections);
    let error = apply(&fixture, 1, &first).await.unwrap_err();
    assert!(error.to_string().contains("another repair has started"), "{error}");
    for _ in 0..3 {
        apply(&fixture, 2, &second).await.unwrap();
        // A late duplicate of its start does not restart it.
        ask(&fixture, AuditQuery::StartRepair { repair: 2 }).await.unwrap();
        check_tree(&fixture.store).await;
    }
    assert_eq!(check_rows(&fixture.store).await.repair, None, "the snapshot is too new for it");
    let corrections = second.corrections.clone();
    let gap = AuditQuery::Repair { repair: 2, step: 7, corrections };
    assert!(ask(&fixture, gap).await.is_err());
    let corrections = vec![Correction::Answers { volume: id, more: 1 }; CORRECTIONS_PER_STEP + 1];
    let error = ask(&fixture, AuditQuery::Repair { repair: 2, step: 1, corrections }).await;
    assert!(matches!(error, Err(MetaError::Invalid { .. })), "{error:?}");
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_step_with_an_unknown_outcome_is_repeated_without_effect() {
    let unknown = Arc::new(AtomicBool::new(false));
    let store = Store::new(UnknownOutcome(Store::memory(), Arc::clone(&unknown)));
    let fixture = nested(store).await;
    plant(&fixture, &mut StdRng::seed_from_u64(3)).await;
    let checked = start(&fixture, 1).await;
    for (step, corrections) in (0..).zip(checked.corrections.chunks(4)) {
        let query = || AuditQuery::Repair { repair: 1, step, corrections: corrections.to_vec() };
        unknown.store(true, SeqCst);
        assert!(ask(&fixture, query()).await.is_err(), "it is not known");
        unknown.store(false, SeqCst);
        ask(&fixture, query()).await.unwrap();
    }
    check_tree(&fixture.store).await;
}

fn random_path(random: &mut StdRng) -> String {
    let names = ["a", "b", "v", "w", "x", "y", "file"];
    (0..random.random_range(1..5))
        .map(|_| format!("/{}", names[random.random_range(0..7)]))
        .collect()
}

fn random_change(random: &mut StdRng, file: InodeId) -> MetaChange {
    let (path, other) = (random_path(random), random_path(random));
    let at = || At::path(path.clone());
    match random.random_range(0..16) {
        0 | 1 => create(&path),
        2 | 3 => make_directory(&path, true),
        4..8 => rename(&path, &other),
        8 => MetaChange::Link { from: at(), to: At::path(other) },
        9 => MetaChange::RemoveDirectory { at: at() },
        10 => MetaChange::Unlink { at: at() },
        11 => set_quota(&path),
        12 => MetaChange::SetLength { at: at(), length: random.random_range(0..5000) },
        13 => MetaChange::Trash(TrashChange::Keep { at: at(), seconds: 1000 }),
        14 => MetaChange::ReportLengths {
            reports: vec![LengthReport {
                inode: file,
                length: random.random_range(0..9000),
                truncate_version: 0,
                written: Written::default(),
            }],
            ends: vec![],
        },
        _ => MetaChange::RemoveTree { at: at() },
    }
}

/// Clients change files, directories and volumes while a repair reads its snapshot and applies its
/// corrections: afterwards every snapshot is consistent.
async fn race(store: Store, seed: u64) {
    let fixture = Arc::new(nested(store).await);
    let mut random = StdRng::seed_from_u64(seed);
    plant(&fixture, &mut random).await;
    let file = fixture.stat("/b/x/file").await.unwrap().id;
    let (ended, changes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4_u64)
        .map(|client| {
            let (fixture, ended) = (Arc::clone(&fixture), Arc::clone(&ended));
            let (changes, mut random) =
                (Arc::clone(&changes), StdRng::seed_from_u64(seed * 100 + client));
            tokio::spawn(async move {
                while !ended.load(SeqCst) {
                    let result = fixture.change(random_change(&mut random, file)).await;
                    changes.fetch_add(usize::from(result.is_ok()), SeqCst);
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let collector = tokio::spawn({
        let (fixture, ended) = (Arc::clone(&fixture), Arc::clone(&ended));
        async move {
            while !ended.load(SeqCst) {
                fixture.tree.check_removals().await.unwrap();
                fixture.tree.collect().await.unwrap();
                fixture.recount().await;
                tokio::task::yield_now().await;
            }
        }
    });
    let wait_for_changes = async |more: usize| {
        let until = changes.load(SeqCst) + more;
        while changes.load(SeqCst) < until {
            tokio::task::yield_now().await;
        }
    };
    // A repair that started earlier fails without a trace.
    let former = start(&fixture, 1).await;
    let checked = start(&fixture, 2).await;
    apply(&fixture, 1, &former).await.unwrap_err();
    wait_for_changes(random.random_range(0..40)).await;
    assert!(!checked.corrections.is_empty());
    apply(&fixture, 2, &checked).await.unwrap();
    for _ in 0..10 {
        wait_for_changes(3).await;
        let findings = check_rows(&fixture.store).await.findings;
        assert_eq!(findings, [], "seed {seed}");
    }
    ended.store(true, SeqCst);
    for task in clients.into_iter().chain([collector]) {
        task.await.unwrap();
    }
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_repair_races_clients_in_memory() {
    for seed in 0..30 {
        race(Store::new(Yielding(Store::memory())), seed).await;
    }
}

#[tokio::test]
async fn a_repair_races_clients_of_a_shared_store() {
    for seed in 0..30 {
        race(Store::new(Yielding(Store::shared_memory())), seed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_races_clients_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    race(store, 7).await;
}
