//! Locks over the store: sessions, waits, deadlocks, restarts, bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use fabric::deadline::Deadline;
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KeyRange, Store};

use crate::identity::Identity;
use crate::ops::locks::DropLocks;
use crate::protocol::{
    LockAnswer, LockChange, LockKind, LockQuery, LockRequest, MetaChange, MetaError, MetaQuery,
    MetaReply, MetaRequest, RequestId,
};
use crate::rows;
use crate::tests::fixture::{Fixture, config};

/// A client with one lock session.
pub(super) struct Holder<'a> {
    pub(super) fixture: &'a Fixture,
    pub(super) client: ClientId,
    session: u64,
    sequence: AtomicU64,
    scope: Option<InodeId>,
}

fn answer(reply: Result<MetaReply, MetaError>) -> Result<LockAnswer, MetaError> {
    match reply? {
        MetaReply::Lock(answer) => Ok(answer),
        other => panic!("{other:?}"),
    }
}

impl<'a> Holder<'a> {
    fn new(fixture: &'a Fixture, client: u128) -> Self {
        let (client, sequence) = (ClientId(client), AtomicU64::new(1));
        Self { fixture, client, session: 5, sequence, scope: None }
    }

    pub(super) async fn start(fixture: &'a Fixture, client: u128) -> Self {
        let holder = Self::new(fixture, client);
        let started = holder.change(LockChange::Start { session: 5 }).await.unwrap();
        assert_eq!(started, LockAnswer::Renewed { lease_ms: fixture.tree.config.lock_lease_ms });
        holder
    }

    pub(super) fn next_id(&self) -> RequestId {
        let sequence = self.sequence.fetch_add(1, SeqCst);
        RequestId { client: self.client, sequence, finished_below: 0 }
    }

    pub(super) async fn change(&self, change: LockChange) -> Result<LockAnswer, MetaError> {
        self.change_as(self.next_id(), change).await
    }

    async fn change_as(&self, id: RequestId, change: LockChange) -> Result<LockAnswer, MetaError> {
        let caller = Identity { scope: self.scope, ..Identity::ROOT };
        let request = MetaRequest::Change { id, caller, change: MetaChange::Lock(change) };
        answer(self.fixture.tree.answer(request, soon()).await)
    }

    pub(super) async fn query(&self, query: LockQuery) -> LockAnswer {
        answer(self.fixture.query(MetaQuery::Lock(query)).await).unwrap()
    }

    pub(super) async fn set(&self, lock: LockRequest, wait: Option<u64>) -> LockAnswer {
        self.change(LockChange::Set { session: self.session, lock, wait }).await.unwrap()
    }

    pub(super) async fn clear(&self, lock: LockRequest) -> LockAnswer {
        self.change(LockChange::Clear { session: self.session, lock }).await.unwrap()
    }

    pub(super) async fn wait_for(&self, lock: LockRequest, wait: u64) -> LockAnswer {
        loop {
            match self.query(LockQuery::Await { client: self.client, lock, wait }).await {
                LockAnswer::Waiting => {}
                other => return other,
            }
        }
    }

    pub(super) async fn renew(&self) -> LockAnswer {
        self.query(LockQuery::Renew { client: self.client, session: self.session }).await
    }
}

pub(super) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub(super) fn lock(inode: InodeId, first: u64, last: u64) -> LockRequest {
    let (kind, owner, exclusive, pid) = (LockKind::Posix, 1, true, 77);
    LockRequest { inode, kind, owner, first, last, exclusive, pid }
}

pub(super) const RELEASED: LockAnswer = LockAnswer::Released { in_use: false };

/// Number of rows of locks and sessions, and the counter.
pub(super) async fn rows_of_locks(store: &Store) -> (usize, i64) {
    let mut txn = store.begin().await.unwrap();
    let mut count = 0;
    for prefix in [rows::LOCK_SESSIONS, rows::LOCKED, rows::LOCKS, rows::APPENDS, rows::RECALLS] {
        count += txn.range(&KeyRange::prefix(prefix), usize::MAX).await.unwrap().len();
    }
    let counted = txn.get(&rows::lock_count(rows::ALL_VOLUMES)).await.unwrap();
    let counted = counted.map_or(0, |bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
    (count, counted)
}

#[tokio::test]
async fn a_lock_excludes_other_clients_until_it_is_released_and_leaves_no_rows() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let (first, second) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    assert_eq!(first.set(lock(file, 10, 19), None).await, LockAnswer::Granted);
    let conflict = LockAnswer::Conflict { first: 10, last: 19, exclusive: true, pid: 0 };
    assert_eq!(second.set(lock(file, 19, 30), None).await, conflict);
    let test = |client| LockQuery::Test { client, lock: lock(file, 0, u64::MAX) };
    assert_eq!(second.query(test(second.client)).await, conflict);
    let other = LockRequest { owner: 2, ..lock(file, 0, 15) };
    assert!(
        matches!(first.set(other, None).await, LockAnswer::Conflict { pid: 77, .. }),
        "a client sees the processes that hold its locks"
    );
    assert_eq!(second.set(lock(file, 20, 30), None).await, LockAnswer::Granted);
    assert_eq!(rows_of_locks(&fixture.store).await, (5, 4));
    let used = LockAnswer::Released { in_use: true };
    assert_eq!(first.clear(lock(file, 10, 12)).await, used);
    assert_eq!(first.clear(lock(file, 0, u64::MAX)).await, RELEASED);
    assert_eq!(first.clear(lock(file, 0, u64::MAX)).await, RELEASED, "nothing is held");
    let other = LockRequest { kind: LockKind::Flock, ..lock(file, 0, 0) };
    assert_eq!(second.set(other, None).await, LockAnswer::Granted);
    let clear = LockChange::ClearFile { session: 5, inode: file };
    assert_eq!(second.change(clear).await, Ok(RELEASED));
    assert_eq!(rows_of_locks(&fixture.store).await, (2, 2));
    for holder in [first, second] {
        assert_eq!(holder.change(LockChange::End { session: 5 }).await, Ok(RELEASED));
        assert_eq!(holder.renew().await, LockAnswer::Lost);
        assert_eq!(holder.set(lock(file, 0, 0), None).await, LockAnswer::Lost);
    }
    assert_eq!(rows_of_locks(&fixture.store).await, (0, 0));
}

#[tokio::test]
async fn a_repeated_request_changes_nothing_and_files_must_exist() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let holder = Holder::start(&fixture, 1).await;
    let id = holder.next_id();
    let set = LockChange::Set { session: 5, lock: lock(file, 0, 9), wait: None };
    assert_eq!(holder.change_as(id, set.clone()).await, Ok(LockAnswer::Granted));
    assert_eq!(holder.clear(lock(file, 0, 9)).await, RELEASED);
    assert_eq!(holder.change_as(id, set).await, Ok(LockAnswer::Granted), "the stored answer");
    assert_eq!(rows_of_locks(&fixture.store).await, (1, 1), "a late copy takes no lock");
    let missing = LockChange::Set { session: 5, lock: lock(InodeId(999), 0, 9), wait: None };
    assert!(matches!(holder.change(missing).await, Err(MetaError::NotFound { .. })));
    let reversed = LockChange::Set { session: 5, lock: lock(file, 9, 0), wait: None };
    assert!(matches!(holder.change(reversed).await, Err(MetaError::Invalid { .. })));
}

#[tokio::test]
async fn a_wait_ends_with_a_release_a_cancellation_or_the_holders_session() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let (first, second) = (Holder::start(&fixture, 1).await, Holder::start(&fixture, 2).await);
    let wanted = lock(file, 0, u64::MAX);
    let cancel = |wait| LockChange::Cancel { session: 5, lock: wanted, wait };
    assert_eq!(first.set(wanted, Some(1)).await, LockAnswer::Granted);
    assert_eq!(second.set(wanted, Some(8)).await, LockAnswer::Waiting);
    assert_eq!(second.change(cancel(8)).await, Ok(RELEASED));
    assert_eq!(second.wait_for(wanted, 8).await, LockAnswer::Lost);
    assert_eq!(second.set(wanted, Some(9)).await, LockAnswer::Waiting);
    let release = async {
        tokio::task::yield_now().await;
        first.clear(wanted).await
    };
    let (waited, _) = tokio::join!(second.wait_for(wanted, 9), release);
    assert_eq!(waited, LockAnswer::Granted);
    assert_eq!(second.change(cancel(9)).await, Ok(LockAnswer::Granted), "it was granted before");
    assert_eq!(first.set(wanted, Some(2)).await, LockAnswer::Waiting);
    let end = second.change(LockChange::End { session: 5 });
    assert_eq!(tokio::join!(first.wait_for(wanted, 2), end).0, LockAnswer::Granted);
}

#[tokio::test]
async fn owners_that_would_wait_for_each_other_get_an_error() {
    let fixture = Fixture::memory().await;
    let files = [fixture.create("/a").await.id, fixture.create("/b").await.id];
    let third = fixture.create("/c").await.id;
    let one = Holder::start(&fixture, 1).await;
    let two = Holder::start(&fixture, 2).await;
    let three = Holder::start(&fixture, 3).await;
    for kind in [LockKind::Posix, LockKind::Flock] {
        let lock = |inode| LockRequest { kind, ..lock(inode, 0, 4) };
        assert_eq!(one.set(lock(files[0]), None).await, LockAnswer::Granted);
        assert_eq!(two.set(lock(files[1]), None).await, LockAnswer::Granted);
        assert_eq!(three.set(lock(third), None).await, LockAnswer::Granted);
        assert_eq!(one.set(lock(files[1]), Some(1)).await, LockAnswer::Waiting);
        assert_eq!(two.set(lock(third), Some(1)).await, LockAnswer::Waiting);
        let closing = three.set(lock(files[0]), Some(1)).await;
        match kind {
            LockKind::Posix => assert_eq!(closing, LockAnswer::Deadlock),
            LockKind::Flock | LockKind::Append => {
                assert_eq!(closing, LockAnswer::Waiting, "as on Linux");
            }
        }
        if kind == LockKind::Posix {
            assert_eq!(three.wait_for(lock(files[0]), 1).await, LockAnswer::Lost);
            three.clear(lock(third)).await;
            assert_eq!(two.wait_for(lock(third), 1).await, LockAnswer::Granted);
        }
    }
}

#[tokio::test]
async fn locks_and_waits_survive_a_restart_of_the_service() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let wanted = lock(file, 0, 9);
    let before = Holder::start(&fixture, 1).await;
    assert_eq!(before.set(wanted, None).await, LockAnswer::Granted);
    assert_eq!(Holder::start(&fixture, 2).await.set(wanted, Some(4)).await, LockAnswer::Waiting);
    let restarted = Fixture::open(fixture.store.clone(), config()).await;
    let (one, two) = (Holder::new(&restarted, 1), Holder::new(&restarted, 2));
    assert!(matches!(one.renew().await, LockAnswer::Renewed { .. }));
    one.sequence.store(10, SeqCst);
    assert_eq!(one.clear(wanted).await, RELEASED);
    assert_eq!(two.wait_for(wanted, 4).await, LockAnswer::Granted);
}

#[tokio::test]
async fn a_restored_store_has_no_locks() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let holder = Holder::start(&fixture, 1).await;
    assert_eq!(holder.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
    crate::restore::mark_restored(&fixture.store).await.unwrap();
    assert_eq!(rows_of_locks(&fixture.store).await, (0, 0));
    assert_eq!(holder.renew().await, LockAnswer::Lost);
}

#[tokio::test]
async fn a_session_that_is_not_renewed_ends_and_a_renewed_one_does_not() {
    let lock_lease_ms = 0;
    let fixture = Fixture::open(Store::memory(), crate::TreeConfig { lock_lease_ms, ..config() });
    let fixture = fixture.await;
    let file = fixture.create("/file").await.id;
    let holder = Holder::start(&fixture, 1).await;
    assert_eq!(holder.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
    holder.renew().await;
    let end = |renewal| fixture.tree.end_lock_session(holder.client, 5, renewal, soon());
    assert_eq!(end(Some(0)).await, Ok(false), "it was renewed since");
    assert!(matches!(holder.renew().await, LockAnswer::Renewed { .. }));
    let mut observer = fixture.tree.session_observer();
    fixture.tree.end_silent_lock_sessions(&mut observer).await.unwrap();
    assert_eq!(holder.renew().await, LockAnswer::Lost);
    assert_eq!(rows_of_locks(&fixture.store).await, (0, 0));
    let other = Holder::start(&fixture, 2).await;
    assert_eq!(other.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
}

#[tokio::test]
async fn a_session_keeps_its_locks_until_its_client_was_silent_for_a_whole_lease() {
    let fixture = Fixture::memory().await;
    let file = fixture.create("/file").await.id;
    let holder = Holder::start(&fixture, 1).await;
    assert_eq!(holder.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
    let mut observer = fixture.tree.session_observer();
    for _ in 0..3 {
        fixture.tree.end_silent_lock_sessions(&mut observer).await.unwrap();
    }
    // Only a session that has ended releases its locks.
    let release = DropLocks { client: holder.client, session: 5 };
    let released = fixture.store.transact(soon(), &release).await.unwrap();
    assert_eq!(released, (Vec::new(), true));
    assert_eq!(rows_of_locks(&fixture.store).await, (3, 2));
    assert!(matches!(holder.renew().await, LockAnswer::Renewed { .. }));
}

#[tokio::test]
async fn a_new_session_of_a_client_ends_the_former_one_and_a_late_start_changes_nothing() {
    let fixture = Fixture::memory().await;
    let mut holder = Holder::new(&fixture, 1);
    let first = holder.next_id();
    holder.change_as(first, LockChange::Start { session: 5 }).await.unwrap();
    // More files than one transaction releases.
    for number in 0..40 {
        let file = fixture.create(&format!("/{number}")).await.id;
        assert_eq!(holder.set(lock(file, 0, 9), None).await, LockAnswer::Granted);
    }
    assert_eq!(rows_of_locks(&fixture.store).await, (81, 41));
    holder.change(LockChange::Start { session: 6 }).await.unwrap();
    assert_eq!(rows_of_locks(&fixture.store).await, (1, 1));
    holder.change_as(first, LockChange::Start { session: 5 }).await.unwrap();
    assert_eq!(holder.renew().await, LockAnswer::Lost);
    holder.session = 6;
    assert!(matches!(holder.renew().await, LockAnswer::Renewed { .. }));
}

#[tokio::test]
async fn the_locks_of_a_volume_are_bounded() {
    let fixture = Fixture::memory().await;
    let volume = fixture.make_directory("/volume").await.id;
    let file = fixture.create("/volume/file").await.id;
    let mut holder = Holder::new(&fixture, 1);
    holder.scope = Some(volume);
    let mut txn = fixture.store.begin().await.unwrap();
    txn.set(&rows::lock_count(volume), 16_383i64.to_le_bytes());
    txn.commit().await.unwrap();
    holder.change(LockChange::Start { session: 5 }).await.unwrap();
    let set = LockChange::Set { session: 5, lock: lock(file, 0, 9), wait: None };
    let error = holder.change(set).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "too many locks: lock sessions and locked files (once for each owner) are limited to \
         16384; release locks, or use fewer files"
    );
    assert_eq!(holder.change(LockChange::End { session: 5 }).await, Ok(RELEASED));
}

/// Transactions of all clients interleave.
#[tokio::test]
async fn clients_that_wait_for_one_lock_hold_it_one_after_the_other() {
    const CLIENTS: u128 = 6;
    const ROUNDS: u64 = 10;
    let fixture = Arc::new(Fixture::interleaving().await);
    let file = fixture.create("/file").await.id;
    let (inside, total) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for client in 1..=CLIENTS {
        let (fixture, inside, total) =
            (Arc::clone(&fixture), Arc::clone(&inside), Arc::clone(&total));
        tasks.spawn(async move {
            let holder = Holder::start(&fixture, client).await;
            for wait in 0..ROUNDS {
                let wanted = lock(file, 0, u64::MAX);
                match holder.set(wanted, Some(wait)).await {
                    LockAnswer::Granted => {}
                    LockAnswer::Waiting => {
                        assert_eq!(holder.wait_for(wanted, wait).await, LockAnswer::Granted);
                    }
                    other => panic!("{other:?}"),
                }
                assert_eq!(inside.fetch_add(1, SeqCst), 0, "only one holds it");
                tokio::task::yield_now().await;
                total.fetch_add(1, SeqCst);
                assert_eq!(inside.fetch_sub(1, SeqCst), 1);
                assert_eq!(holder.clear(wanted).await, RELEASED);
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(total.load(SeqCst), CLIENTS as u64 * ROUNDS);
}
