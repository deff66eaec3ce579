//! Many concurrent clients on few names; the rows must always form a tree.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use threefs_core::ids::ClientId;
use threefs_kv::{EmbeddedConfig, Store};

use crate::Identity;
use crate::RenameMode;
use crate::protocol::{At, MetaChange, MetaError, MetaReply, MetaRequest, ROOT, RequestId};
use crate::tests::backends::Yielding;
use crate::tests::fixture::{
    Fixture, collect_with_all, config, count_inodes, create, make_directory, rename, soon,
};
use crate::tests::invariants::check_tree;

fn random_path(random: &mut StdRng) -> String {
    let names = ["a", "b", "c"];
    (0..random.random_range(1..5))
        .map(|_| format!("/{}", names[random.random_range(0..3)]))
        .collect()
}

fn random_change(random: &mut StdRng) -> MetaChange {
    let (path, other) = (random_path(random), random_path(random));
    let at = || At::path(path.clone());
    match random.random_range(0..12) {
        0 | 1 => create(&path),
        2..5 => make_directory(&path, true),
        5..9 => rename(&path, &other),
        9 => MetaChange::Link { from: at(), to: At::path(other) },
        10 => MetaChange::RemoveDirectory { at: at() },
        _ => MetaChange::RemoveTree { at: at() },
    }
}

/// Clients use one of the services at random; with several, a request may be repeated through
/// another one at the same time.
async fn storm(store: Store, seed: u64, changes: usize, services: usize) {
    let mut fixtures = Vec::new();
    for _ in 0..services {
        fixtures.push(Arc::new(Fixture::open(store.clone(), config()).await));
    }
    let clients: Vec<_> = (0..8u64)
        .map(|number| {
            let fixtures = fixtures.clone();
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(seed * 100 + number);
                let mut count = 0;
                for sequence in 1..=changes as u64 {
                    let client = ClientId(u128::from(number) + 1);
                    let id = RequestId { client, sequence, finished_below: sequence };
                    let change = random_change(&mut random);
                    let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
                    let mut service = || &fixtures[random.random_range(0..services)].tree;
                    let (first, again) = (service(), service());
                    let answers = if services > 1 {
                        let again = again.answer(request.clone(), soon());
                        let (first, again) = tokio::join!(first.answer(request, soon()), again);
                        // A refused change is not stored, so one of them may be refused.
                        if let (Ok(first), Ok(again)) = (&first, &again) {
                            assert_eq!(first, again, "it was executed twice");
                        }
                        vec![first, again]
                    } else {
                        vec![first.answer(request, soon()).await]
                    };
                    for answer in &answers {
                        if let Err(
                            error @ (MetaError::Damaged { .. } | MetaError::Unavailable { .. }),
                        ) = answer
                        {
                            panic!("{error}")
                        }
                    }
                    count += usize::from(answers.iter().any(Result::is_ok));
                }
                count
            })
        })
        .collect();
    let collector = tokio::spawn({
        let fixtures = fixtures.clone();
        async move {
            loop {
                for fixture in &fixtures {
                    fixture.tree.check_removals().await.unwrap();
                    fixture.tree.collect().await.unwrap();
                }
                check_tree(&fixtures[0].store).await;
                tokio::task::yield_now().await;
            }
        }
    });
    let mut count = 0;
    for client in clients {
        count += client.await.unwrap();
    }
    collector.abort();
    assert!(collector.await.is_err_and(|error| error.is_cancelled()), "the tree was broken");
    assert!(count > changes, "only {count} changes went through");
    check_tree(&store).await;
    let remove = |name: &str| MetaChange::RemoveTree { at: At::path(name) };
    for name in ["a", "b", "c"] {
        let _ = fixtures[0].change(remove(name)).await;
    }
    collect_with_all(&fixtures).await;
    assert_eq!(count_inodes(&store).await, 1, "only the root is left");
}

#[tokio::test]
async fn many_clients_leave_a_tree_in_memory() {
    for seed in 0..6 {
        storm(Store::new(Yielding(Store::memory())), seed, 150, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_leave_a_tree_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    storm(store, 9, 100, 1).await;
}

#[tokio::test]
async fn many_clients_of_two_services_leave_a_tree() {
    for seed in 0..6 {
        let store = Store::new(Yielding(Store::shared_memory()));
        storm(store, seed, 150, 2).await;
    }
}

#[tokio::test]
async fn two_renames_that_would_form_a_cycle_do_not_both_succeed() {
    for round in 0..100 {
        let fixture = Arc::new(Fixture::interleaving().await);
        // Addresses are inodes, so no path is read: only the walk to the root can conflict.
        let (one, two) =
            (fixture.make_directory("/x/1").await, fixture.make_directory("/y/2").await);
        let into = |name: &str, directory| MetaChange::Rename {
            from: At::entry(ROOT, name),
            to: At::entry(directory, "in"),
            mode: RenameMode::Replace,
        };
        let (x, y) = (into("x", two.id), into("y", one.id));
        let (first, second) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let first = tokio::spawn(async move { first.change(x).await });
        let second = tokio::spawn(async move { second.change(y).await });
        let (first, second) = (first.await.unwrap(), second.await.unwrap());
        assert!(first.is_ok() != second.is_ok(), "round {round}: {first:?}, {second:?}");
        check_tree(&fixture.store).await;
    }
}

#[tokio::test]
async fn a_name_added_while_its_directory_is_removed_is_not_lost() {
    for _ in 0..100 {
        let fixture = Arc::new(Fixture::interleaving().await);
        fixture.make_directory("/d").await;
        let (adds, removes) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let adds = tokio::spawn(async move { adds.change(create("/d/file")).await });
        let remove = MetaChange::RemoveDirectory { at: At::path("/d") };
        let removes = tokio::spawn(async move { removes.change(remove).await });
        let (add_result, remove_result) = (adds.await.unwrap(), removes.await.unwrap());
        assert!(add_result.is_ok() != remove_result.is_ok(), "{add_result:?}, {remove_result:?}");
        check_tree(&fixture.store).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creations_in_one_directory_do_not_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    let fixture = Arc::new(Fixture::open(store, config()).await);
    let creations: Vec<_> = (0..500)
        .map(|number| {
            let fixture = Arc::clone(&fixture);
            tokio::spawn(async move { fixture.create(&format!("/file-{number}")).await.id })
        })
        .collect();
    let mut ids = Vec::new();
    for creation in creations {
        ids.push(creation.await.unwrap());
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 500);
    match fixture.query(crate::MetaQuery::Status).await.unwrap() {
        MetaReply::Status(status) => assert_eq!(status.removals_pending, 0),
        other => panic!("{other:?}"),
    }
}
