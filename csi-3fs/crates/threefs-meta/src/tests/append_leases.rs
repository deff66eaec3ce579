//! Append leases: turns, recalls, truncations, lost holders.

use threefs_core::ids::InodeId;

use crate::identity::Identity;
use crate::protocol::{
    At, LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaChange, MetaReply,
    MetaRequest,
};
use crate::tests::fixture::Fixture;
use crate::tests::locks::{Holder, RELEASED, lock, rows_of_locks, soon};

fn lease(inode: InodeId) -> LockRequest {
    LockRequest { kind: LockKind::Append, owner: 0, pid: 0, ..lock(inode, 0, u64::MAX) }
}

async fn recalled(holder: &Holder<'_>, releasing: &[InodeId]) -> LockAnswer {
    let (client, session, releasing) = (holder.client, 5, releasing.to_vec());
    loop {
        let query = LockQuery::Recalls { client, session, releasing: releasing.clone() };
        match holder.query(query).await {
            LockAnswer::Waiting => {}
            other => return other,
        }
    }
}

async fn truncate(holder: &Holder<'_>, inode: InodeId, length: u64) -> MetaReply {
    let (id, caller) = (holder.next_id(), Identity::ROOT);
    let change = MetaChange::SetLength { at: At::inode(inode), length };
    let request = MetaRequest::Change { id, caller, change };
    holder.fixture.tree.answer(request, soon()).await.unwrap()
}

#[tokio::test]
async fn a_lease_is_recalled_for_each_that_waits_and_passed_in_order() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let mut holders = Vec::new();
    for client in 1..=3 {
        holders.push(Holder::start(&fixture, client).await);
    }
    let [one, two, three] = &holders[..] else { panic!() };
    assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted);
    assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted, "it holds it");
    let (answer, waits) = tokio::join!(recalled(one, &[]), async {
        tokio::task::yield_now().await;
        [two.set(lease(file), Some(1)).await, three.set(lease(file), Some(1)).await]
    });
    assert_eq!(answer, LockAnswer::Recalled { inode: file });
    assert_eq!(waits, [LockAnswer::Waiting; 2]);
    assert_eq!(two.set(lease(file), Some(1)).await, LockAnswer::Waiting, "it waits once");
    assert_eq!(one.clear(lease(file)).await, RELEASED);
    assert_eq!(two.wait_for(lease(file), 1).await, LockAnswer::Granted);
    // The next one waits already.
    assert_eq!(recalled(two, &[]).await, LockAnswer::Recalled { inode: file });
    two.clear(lease(file)).await;
    assert_eq!(three.wait_for(lease(file), 1).await, LockAnswer::Granted);
    // Locks of the file are independent.
    assert_eq!(one.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
    let clear = LockChange::ClearFile { session: 5, inode: file };
    assert_eq!(three.change(clear).await, Ok(RELEASED));
    assert_eq!(
        two.set(lease(file), None).await,
        LockAnswer::Conflict { first: 0, last: u64::MAX, exclusive: true, pid: 0 }
    );
    three.clear(lease(file)).await;
    one.clear(lock(file, 0, 9)).await;
    assert_eq!(rows_of_locks(&fixture.store).await, (3, 3), "the sessions");
}

#[tokio::test]
async fn a_recall_is_not_repeated_while_its_lease_is_being_released() {
    let fixture = Fixture::memory().await;
    let files = [fixture.create("/a").await.id, fixture.create("/b").await.id];
    let (one, two) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    for file in files {
        assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted);
        assert_eq!(two.set(lease(file), Some(1)).await, LockAnswer::Waiting);
    }
    let LockAnswer::Recalled { inode: first } = recalled(&one, &[]).await else { panic!() };
    let LockAnswer::Recalled { inode: second } = recalled(&one, &[first]).await else { panic!() };
    assert_ne!(first, second);
}

#[tokio::test]
async fn a_truncation_waits_until_the_lease_of_another_client_is_released() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let (one, two) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted);
    assert!(matches!(truncate(&one, file, 100).await, MetaReply::Inode(_)), "its own");
    let (_, ()) = tokio::join!(truncate(&two, file, 10), async {
        assert_eq!(recalled(&one, &[]).await, LockAnswer::Recalled { inode: file });
        assert_eq!(fixture.stat("/file").await.unwrap().length(), 100);
        one.clear(lease(file)).await;
    });
    assert_eq!(fixture.stat("/file").await.unwrap().length(), 10);
    // It does not need the lease.
    assert_eq!(one.set(lease(file), None).await, LockAnswer::Granted);
}

/// A mount keeps the lease of a file after it was closed. Rows that stayed would count against the
/// locks of its volume.
#[tokio::test]
async fn the_lease_of_a_removed_file_leaves_no_rows() {
    let fixture = Fixture::memory().await;
    let (one, two) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    for name in ["/released", "/waited", "/lost"] {
        let file = fixture.create(name).await.id;
        assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted);
        if name == "/waited" {
            assert_eq!(two.set(lease(file), Some(1)).await, LockAnswer::Waiting);
        }
        fixture.change(MetaChange::Unlink { at: At::path(name) }).await.unwrap();
        fixture.collect_all().await;
        assert_eq!(fixture.stat(name).await.ok(), None);
        if name == "/lost" {
            break;
        }
        for holder in [&one, &two] {
            assert_eq!(holder.clear(lease(file)).await, RELEASED);
        }
        assert_eq!(rows_of_locks(&fixture.store).await, (2, 2), "{name}: the sessions");
    }
    for holder in [one, two] {
        holder.change(LockChange::End { session: 5 }).await.unwrap();
    }
    assert_eq!(rows_of_locks(&fixture.store).await, (0, 0));
}

/// Its last appends may not be in the file's length.
#[tokio::test]
async fn a_lost_holder_is_reported_until_a_holder_releases_the_lease() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let (one, two) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    assert_eq!(one.set(lease(file), Some(1)).await, LockAnswer::Granted);
    assert_eq!(two.set(lease(file), Some(1)).await, LockAnswer::Waiting);
    let end = one.change(LockChange::End { session: 5 });
    let (granted, _) = tokio::join!(two.wait_for(lease(file), 1), end);
    assert_eq!(granted, LockAnswer::GrantedAfterLoss);
    // Nor has this one reported it.
    two.change(LockChange::End { session: 5 }).await.unwrap();
    let three = Holder::start(&fixture, 3).await;
    assert_eq!(three.set(lease(file), Some(1)).await, LockAnswer::GrantedAfterLoss);
    let unknown = LockRequest { exclusive: false, ..lease(file) };
    assert_eq!(three.clear(unknown).await, RELEASED, "it did not learn the end");
    assert_eq!(three.set(lease(file), Some(1)).await, LockAnswer::GrantedAfterLoss);
    assert_eq!(three.clear(lease(file)).await, RELEASED);
    assert_eq!(three.set(lease(file), Some(1)).await, LockAnswer::Granted);
    assert_eq!(three.clear(lease(file)).await, RELEASED);
    // A wait that ends is not a loss.
    let four = Holder::start(&fixture, 4).await;
    assert_eq!(three.set(lease(file), Some(1)).await, LockAnswer::Granted);
    assert_eq!(four.set(lease(file), Some(1)).await, LockAnswer::Waiting);
    four.change(LockChange::End { session: 5 }).await.unwrap();
    three.clear(lease(file)).await;
    assert_eq!(three.set(lease(file), Some(1)).await, LockAnswer::Granted);
    three.clear(lease(file)).await;
    assert_eq!(rows_of_locks(&fixture.store).await, (1, 1));
}
