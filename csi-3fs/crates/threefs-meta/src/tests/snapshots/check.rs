//! The check of metadata of a volume with snapshots: a name that a snapshot shows has a state of its
//! inode.

use std::sync::Arc;

use threefs_core::ids::InodeId;
use threefs_kv::Transaction;

use crate::protocol::{At, MetaChange};
use crate::rows;
use crate::rows::history::{self as keys, FormerInode};
use crate::tests::check::change;
use crate::tests::fixture::{Fixture, make_directory, rename};
use crate::tests::invariants::{check_rows, check_tree};
use crate::tests::snapshots::{TestFences, remove_snapshot, set_quota};

const VOLUME: &str = "/v";

/// A volume whose snapshots of the epochs 0, 1 and 2 show other states of its files; that of epoch 1 is
/// removed.
async fn example() -> Fixture {
    let fixture = Fixture::memory().await.with_fences(Arc::new(TestFences::default()));
    fixture.volume(VOLUME).await;
    fixture.change(make_directory("/v/directory", false)).await.unwrap();
    for name in ["unchanged", "changed", "removed", "directory/renamed"] {
        fixture.create(&format!("/v/{name}")).await;
    }
    for name in ["first", "second", "third"] {
        fixture.snapshot(VOLUME, name).await.unwrap();
        set_mode(&fixture, "/v/changed").await;
    }
    fixture.change(MetaChange::Unlink { at: At::path("/v/removed") }).await.unwrap();
    fixture.change(rename("/v/directory/renamed", "/v/other")).await.unwrap();
    fixture.change(remove_snapshot(VOLUME, "second")).await.unwrap();
    fixture.change(make_directory("/v/inner", false)).await.unwrap();
    fixture.snapshot(VOLUME, "fourth").await.unwrap();
    check_tree(&fixture.store).await;
    fixture
}

async fn set_mode(fixture: &Fixture, path: &str) {
    let (mode, at) = (Some(0o640), At::path(path));
    let (uid, gid, accessed, modified) = (None, None, None, None);
    let change =
        MetaChange::SetAttributes { at, follow: false, mode, uid, gid, accessed, modified };
    fixture.change(change).await.unwrap();
}

/// The epochs of snapshots that show a name without a state of the inode, after the damage.
async fn without_state(
    fixture: &Fixture,
    id: InodeId,
    damage: impl AsyncFn(&mut Transaction),
) -> Vec<String> {
    change(&fixture.store, damage).await;
    let findings = check_rows(&fixture.store).await.findings.into_iter();
    let about = findings.filter(|it| it.inode == id.0 && it.kind == "history");
    let lacks = about.filter(|it| it.detail.ends_with("but no state of it"));
    let epoch = |detail: &str| detail.split("epoch ").nth(1)?.split(',').next().map(String::from);
    lacks.map(|it| epoch(&it.detail).unwrap()).collect()
}

/// Removes a former state of an inode with its entry in the index.
async fn forget(txn: &mut Transaction, volume: InodeId, id: InodeId, end: u32) {
    let key = keys::former_inode(id, end);
    assert!(txn.get(&key).await.unwrap().is_some(), "no state until {end}");
    txn.clear(&keys::end(volume, end, &key));
    txn.clear(&key);
}

async fn id_in(fixture: &Fixture, path: &str) -> (InodeId, InodeId) {
    let volume = fixture.stat(VOLUME).await.unwrap().id;
    (volume, crate::ops::view::raw(fixture.stat(path).await.unwrap().id))
}

#[tokio::test]
async fn names_of_snapshots_without_a_state_of_their_inode_are_found() {
    // A current state that is later than the name.
    let fixture = example().await;
    let (_, id) = id_in(&fixture, "/v/unchanged").await;
    let later = async |txn: &mut Transaction| {
        let mut row = rows::read_inode(txn, id).await.unwrap().unwrap();
        row.since = 1;
        row.write(txn).unwrap();
    };
    assert_eq!(without_state(&fixture, id, later).await, ["0"]);
    // Former states of an inode that has a name.
    for (end, epochs) in [(1, vec!["0"]), (3, vec!["2"])] {
        let fixture = example().await;
        let (volume, id) = id_in(&fixture, "/v/changed").await;
        let lost = async |txn: &mut Transaction| forget(txn, volume, id, end).await;
        assert_eq!(without_state(&fixture, id, lost).await, epochs, "{end}");
    }
    // The state that only the removed snapshot shows.
    let fixture = example().await;
    let (volume, id) = id_in(&fixture, "/v/changed").await;
    let dropped = async |txn: &mut Transaction| forget(txn, volume, id, 2).await;
    assert_eq!(without_state(&fixture, id, dropped).await, [""; 0]);
    // Of an inode that only snapshots show, and of one that has another name now.
    for path in ["/v/.snapshots/first/removed", "/v/.snapshots/first/directory/renamed"] {
        let fixture = example().await;
        let (volume, id) = id_in(&fixture, path).await;
        let lost = async |txn: &mut Transaction| forget(txn, volume, id, 3).await;
        assert_eq!(without_state(&fixture, id, lost).await, ["0"], "{path}");
    }
    // A former state that is later than the name.
    let fixture = example().await;
    let (_, id) = id_in(&fixture, "/v/.snapshots/first/removed").await;
    let later = async |txn: &mut Transaction| {
        let key = keys::former_inode(id, 3);
        let former: FormerInode = rows::read(txn, &key).await.unwrap().unwrap();
        rows::write(txn, &key, &FormerInode { since: 1, ..former }).unwrap();
    };
    assert_eq!(without_state(&fixture, id, later).await, ["0"]);
}

#[tokio::test]
async fn a_volume_in_a_volume_with_snapshots_has_no_findings() {
    let fixture = example().await;
    fixture.change(make_directory("/v/volume", false)).await.unwrap();
    fixture.change(set_quota("/v/volume")).await.unwrap();
    fixture.create("/v/volume/file").await;
    for (path, name) in [(VOLUME, "a"), ("/v/volume", "a"), (VOLUME, "b"), ("/v/volume", "b")] {
        fixture.snapshot(path, name).await.unwrap();
        set_mode(&fixture, "/v/volume/file").await;
        set_mode(&fixture, "/v/volume").await;
        check_tree(&fixture.store).await;
    }
    for name in ["a", "b"] {
        fixture.change(remove_snapshot("/v/volume", name)).await.unwrap();
    }
    fixture.tree.drop_history().await.unwrap();
    fixture.change(MetaChange::RemoveTree { at: At::path("/v/volume") }).await.unwrap();
    check_tree(&fixture.store).await;
    fixture.collect_all().await;
    check_tree(&fixture.store).await;
}
