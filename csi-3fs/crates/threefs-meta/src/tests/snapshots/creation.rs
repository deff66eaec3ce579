//! Creation in steps that may be repeated, given up, and continued by another service.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use threefs_core::ids::Epoch;
use threefs_kv::Store;

use crate::Identity;
use crate::config::TreeConfig;
use crate::ops;
use crate::protocol::{EntryKind, MetaError, MetaRequest};
use crate::rows::{self, DentryRow};
use crate::tests::fixture::{Fixture, config, rename, soon};
use crate::tests::invariants::{all_rows, check_tree};
use crate::tests::snapshots::{TestFences, create_snapshot, remove_snapshot};

async fn services(count: usize) -> (Vec<Fixture>, Arc<TestFences>) {
    let store = Store::shared_memory();
    let fences = Arc::new(TestFences::default());
    let mut fixtures = Vec::new();
    for _ in 0..count {
        let fixture = Fixture::open(store.clone(), config()).await;
        fixtures.push(fixture.with_fences(Arc::clone(&fences) as Arc<_>));
    }
    (fixtures, fences)
}

#[tokio::test]
async fn a_snapshot_has_what_there_was_when_the_fence_was_raised() {
    let (fixtures, fences) = services(2).await;
    let [first, second] = fixtures.as_slice() else { panic!("two services") };
    first.volume("/v").await;
    first.create("/v/before").await;
    fences.hold.store(true, SeqCst);
    let request = MetaRequest::Change {
        id: first.next_id(),
        caller: Identity::ROOT,
        change: create_snapshot("/v", "s"),
    };
    let create = first.tree.answer(request.clone(), soon());
    // The same request through another service, and a file that is created meanwhile.
    let again = second.tree.answer(request, soon());
    let release = async {
        while fences.waiting.load(SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        second.create("/v/meanwhile").await;
        let other = second.snapshot("/v", "t").await;
        assert!(matches!(other, Err(MetaError::Unavailable { .. })), "{other:?}");
        fences.hold.store(false, SeqCst);
    };
    let (created, repeated, ()) = tokio::join!(create, again, release);
    assert_eq!(created, repeated);
    created.unwrap();
    first.create("/v/after").await;
    assert_eq!(second.names("/v/.snapshots/s").await, ["before", "meanwhile"]);
    assert_eq!(second.names("/v").await, ["after", "before", "meanwhile"]);
    assert_eq!(second.names("/v/.snapshots").await, ["s"]);
    let raised = fences.raised.lock().unwrap().clone();
    assert!(raised.iter().all(|fence| fence.epoch == Epoch::new(1, 1)), "{raised:?}");
    check_tree(&first.store).await;
}

#[tokio::test]
async fn a_creation_that_is_given_up_ends_the_epoch_without_a_snapshot() {
    let (fixtures, fences) = services(1).await;
    let fixture = &fixtures[0];
    fixture.volume("/v").await;
    fixture.create("/v/a").await;
    fences.fail.store(true, SeqCst);
    let refused = fixture.snapshot("/v", "s").await;
    assert!(matches!(refused, Err(MetaError::Unavailable { .. })), "{refused:?}");
    fences.fail.store(false, SeqCst);
    assert_eq!(fixture.snapshots("/v").await, []);
    fixture.snapshot("/v", "s").await.unwrap();
    let fence = fences.raised.lock().unwrap().last().cloned().unwrap();
    assert_eq!((fence.epoch, fence.shown.below), (Epoch::new(1, 2), 1));
    // Another volume gets another number.
    fixture.volume("/w").await;
    fixture.snapshot("/w", "s").await.unwrap();
    let fence = fences.raised.lock().unwrap().last().cloned().unwrap();
    assert_eq!(fence.epoch, Epoch::new(2, 1));
}

#[tokio::test]
async fn a_creation_whose_service_died_is_given_up_by_the_collector() {
    let (fixtures, fences) = services(1).await;
    let fixture = &fixtures[0];
    fixture.volume("/v").await;
    fences.hold.store(true, SeqCst);
    let dies = async {
        while fences.waiting.load(SeqCst) < 1 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        result = fixture.snapshot("/v", "s") => panic!("{result:?}"),
        () = dies => {}
    }
    fences.hold.store(false, SeqCst);
    let busy = fixture.snapshot("/v", "t").await;
    assert!(matches!(busy, Err(MetaError::Unavailable { .. })), "{busy:?}");
    let mut known = std::collections::HashMap::new();
    fixture.tree.abort_creations(&mut known, std::time::Duration::from_secs(600)).await.unwrap();
    assert!(fixture.snapshot("/v", "t").await.is_err(), "it is not old enough");
    fixture.tree.abort_creations(&mut known, std::time::Duration::ZERO).await.unwrap();
    fixture.snapshot("/v", "t").await.unwrap();
    let fence = fences.raised.lock().unwrap().last().cloned().unwrap();
    assert_eq!(fence.epoch, Epoch::new(1, 2));
}

#[tokio::test]
async fn names_are_unique_and_numbers_are_used_again_late() {
    let (fixtures, fences) = services(1).await;
    let fixture = &fixtures[0];
    fixture.volume("/v").await;
    fixture.snapshot("/v", "a").await.unwrap();
    let twice = fixture.snapshot("/v", "a").await;
    assert!(matches!(twice, Err(MetaError::Exists { .. })), "{twice:?}");
    for name in ["", ".", "..", "a/b", "a\0"] {
        let refused = fixture.snapshot("/v", name).await;
        assert!(matches!(refused, Err(MetaError::Invalid { .. })), "{name:?} {refused:?}");
    }
    let first = fixture.stat("/v/.snapshots/a").await.unwrap().id;
    fixture.change(remove_snapshot("/v", "a")).await.unwrap();
    fixture.tree.drop_history().await.unwrap();
    let gone = fixture.stat("/v/.snapshots/a").await;
    assert!(matches!(gone, Err(MetaError::NotFound { .. })), "{gone:?}");
    fixture.snapshot("/v", "a").await.unwrap();
    assert_ne!(fixture.stat("/v/.snapshots/a").await.unwrap().id, first);
    // The list after the removal was published.
    let raised = fences.raised.lock().unwrap().clone();
    let removal = raised.iter().find(|fence| fence.shown.below == 1).unwrap();
    assert!(removal.shown.counts.is_empty(), "{removal:?}");
}

#[tokio::test]
async fn rows_of_volumes_without_snapshots_and_the_schema_change_with_the_first_one() {
    let (fixtures, _) = services(1).await;
    let fixture = &fixtures[0];
    fixture.volume("/v").await;
    let file = fixture.create("/v/f").await.id;
    let read = async |key: Vec<u8>| {
        let mut rows = all_rows(&fixture.store).await.into_iter();
        rows.find(|row| row.0 == key).unwrap().1
    };
    let schema = async || rows::decode::<u64>(rows::SCHEMA, &read(rows::SCHEMA.into()).await);
    let former = postcard::to_allocvec(&(file, EntryKind::File)).unwrap();
    let entry = rows::dentry(fixture.stat("/v").await.unwrap().id, "f");
    assert_eq!(read(entry.clone()).await, former, "as in earlier releases");
    assert_eq!(schema().await.unwrap(), rows::SCHEMA_VERSION);
    fixture.snapshot("/v", "s").await.unwrap();
    assert_eq!(schema().await.unwrap(), rows::SCHEMA_WITH_SNAPSHOTS);
    let again = Fixture::open(fixture.store.clone(), config()).await;
    again.change(rename("/v/f", "/v/g")).await.unwrap();
    again.change(rename("/v/g", "/v/f")).await.unwrap();
    let row = DentryRow::decode(&entry, &read(entry.clone()).await).unwrap();
    assert_eq!((row.inode, row.since), (file, 1));
    assert_eq!(again.names("/v/.snapshots/s").await, ["f"]);
    check_tree(&fixture.store).await;
}

#[tokio::test]
async fn a_file_that_came_from_another_volume_delays_the_first_snapshot() {
    let store = Store::shared_memory();
    let config = TreeConfig { recount_wait_ms: 600_000, ..config() };
    let fixture = Fixture::open(store, config).await;
    let fixture = fixture.with_fences(Arc::new(TestFences::default()));
    fixture.volume("/v").await;
    fixture.volume("/w").await;
    fixture.create("/w/f").await;
    fixture.snapshot("/v", "early").await.unwrap();
    fixture.change(rename("/w/f", "/f")).await.unwrap();
    fixture.change(rename("/f", "/w/f")).await.unwrap();
    let refused = fixture.snapshot("/w", "s").await;
    assert!(matches!(refused, Err(MetaError::Unavailable { .. })), "{refused:?}");
    assert_eq!(fixture.snapshots("/w").await, []);
}

#[tokio::test]
async fn a_tree_with_inode_numbers_of_snapshots_gets_none() {
    let (fixtures, _) = services(1).await;
    let fixture = &fixtures[0];
    fixture.volume("/v").await;
    fixture.store.transact(soon(), &ops::ReserveInodes(1 << 55)).await.unwrap();
    let refused = fixture.snapshot("/v", "s").await;
    assert!(matches!(refused, Err(MetaError::NoSpace { .. })), "{refused:?}");
}
