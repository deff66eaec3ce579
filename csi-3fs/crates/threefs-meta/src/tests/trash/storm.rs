//! Removals, restores, purges and expiry by several clients of several services at the same time.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::protocol::{MetaRequest, ROOT};
use crate::tests::backends::Yielding;
use crate::tests::fixture::{collect_with_all, create, make_directory, soon};

const CLIENTS: usize = 4;
const PLACES: [&str; 7] = ["/v/a", "/v/b", "/v/a/x", "/v/a/y", "/v/b/x", "/v/a/x/1", "/v/b/x/1"];

fn change_of(rng: &mut StdRng, entries: &[TrashEntry]) -> MetaChange {
    let mut place = || PLACES[rng.random_range(0..PLACES.len())];
    let (first, second) = (place(), place());
    let id = entries.get(rng.random_range(0..entries.len().max(1))).map(|entry| entry.id);
    match (rng.random_range(0..12), id) {
        (0 | 1, _) => create(first),
        (2 | 3, _) => make_directory(first, false),
        (4 | 5, _) => unlink(first),
        (6, _) => remove_directory(first),
        (7, _) => remove_tree(first),
        (8, _) => rename(first, second),
        (9, Some(id)) => restore("/v", id, None),
        (10, Some(id)) => restore("/v", id, Some(second)),
        (_, Some(id)) => purge("/v", &[id]),
        (_, None) => create(first),
    }
}

async fn storm(store: Store, seed: u64, changes: usize, services: usize) {
    let mut fixtures = Vec::new();
    for _ in 0..services {
        fixtures.push(Arc::new(Fixture::open(store.clone(), config()).await));
    }
    volume(&fixtures[0]).await;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let fixtures = fixtures.clone();
            tokio::spawn(async move {
                let mut rng = StdRng::seed_from_u64(seed * 100 + client as u64);
                let (fixture, other) =
                    (&fixtures[client % fixtures.len()], &fixtures[(client + 1) % fixtures.len()]);
                let mut restored = 0;
                for _ in 0..changes {
                    let change = change_of(&mut rng, &trash(fixture, "/v").await);
                    let restores = matches!(change, MetaChange::Trash(TrashChange::Restore { .. }));
                    let caller = crate::Identity::ROOT;
                    let request = MetaRequest::Change { id: fixture.next_id(), caller, change };
                    let first = fixture.tree.answer(request.clone(), soon());
                    let again = other.tree.answer(request, soon());
                    let (first, again) = tokio::join!(first, again);
                    if let (Ok(first), Ok(again)) = (&first, &again) {
                        assert_eq!(first, again, "it was executed twice");
                    }
                    for answer in [&first, &again] {
                        if let Err(
                            error @ (MetaError::Damaged { .. } | MetaError::Unavailable { .. }),
                        ) = answer
                        {
                            panic!("{error}")
                        }
                    }
                    restored += usize::from(restores && (first.is_ok() || again.is_ok()));
                }
                restored
            })
        })
        .collect();
    let background = tokio::spawn({
        let fixtures = fixtures.clone();
        async move {
            loop {
                for fixture in &fixtures {
                    fixture.tree.check_removals().await.unwrap();
                    fixture.tree.collect().await.unwrap();
                }
                fixtures[0].tree.expire_trash(now(), InodeId(0)).await.unwrap();
                check_tree(&fixtures[0].store).await;
                tokio::task::yield_now().await;
            }
        }
    });
    let mut restored = 0;
    for client in clients {
        restored += client.await.unwrap();
    }
    background.abort();
    assert!(background.await.is_err_and(|error| error.is_cancelled()), "the tree was broken");
    assert!(restored > 0, "nothing was restored");
    check_tree(&store).await;
    let _ = fixtures[0].change(remove_tree("/v")).await;
    collect_with_all(&fixtures).await;
    check_tree(&store).await;
    assert_eq!(count_inodes(&store).await, 1, "only {ROOT} is left");
}

#[tokio::test]
async fn a_trash_in_memory_stays_consistent() {
    for seed in 0..4 {
        storm(Store::new(Yielding(Store::memory())), seed, 100, 1).await;
    }
}

#[tokio::test]
async fn a_trash_of_two_services_stays_consistent() {
    for seed in 0..4 {
        storm(Store::new(Yielding(Store::shared_memory())), seed, 100, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trash_on_disk_stays_consistent() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    storm(store, 7, 100, 1).await;
}
