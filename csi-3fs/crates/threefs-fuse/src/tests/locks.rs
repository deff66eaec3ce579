//! Lock requests while the metadata service is older, does not answer, or answers again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use rustix::io::Errno;
use threefs_meta::{LockChange, LockKind, MetaChange, MetaQuery, MetaRequest};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::tests::fixture::{Mount, PATIENCE, TIMEOUT, Treatment, eventually};
use crate::wire::{Body, opcode, set};

const OWNER: u64 = 9;
const WRITE_LOCK: u32 = 1;
const UNLOCK: u32 = 2;

fn lock(handle: u64, access: u32) -> Body {
    Body::default().u64(handle).u64(OWNER).u64(0).u64(u64::MAX).u32(access).u32(77).u64(0)
}

/// Counts errors in the log.
#[derive(Clone, Default)]
struct Errors(Arc<AtomicUsize>);

impl Subscriber for Errors {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::ERROR
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, SeqCst);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn a_service_that_does_not_know_locks_means_enolck_and_one_line_in_the_log() {
    let errors = Errors::default();
    let _logged = tracing::subscriber::set_default(errors.clone());
    let mount = Mount::new().await;
    let handle = mount.open(7).await;
    mount.meta.set(|script| script.locks = Treatment::Refuse);
    for code in [opcode::SETLK, opcode::SETLKW, opcode::GETLK] {
        let refused = mount.request(code, 7, lock(handle, WRITE_LOCK)).await;
        assert_eq!(refused, Err(Errno::NOLCK));
    }
    assert_eq!(mount.request(opcode::SETLK, 7, lock(handle, UNLOCK)).await, Ok(Vec::new()));
    mount.flush(7, handle, OWNER).await.unwrap();
    mount.release(7, handle).await;
    let is_lock = |request: &MetaRequest| match request {
        MetaRequest::Query { query, .. } => matches!(query, MetaQuery::Lock(_)),
        MetaRequest::Change { change, .. } => matches!(change, MetaChange::Lock(_)),
    };
    assert_eq!(mount.meta.requests().iter().filter(|it| is_lock(it)).count(), 3, "sent once");
    assert_eq!(errors.0.load(SeqCst), 1);
}

#[tokio::test]
async fn a_wait_ends_when_the_service_does_not_know_locks_any_more() {
    let mount = Mount::new().await;
    let handle = mount.open(7).await;
    mount.meta.set(|script| script.wait = true);
    let waiting = mount.send(opcode::SETLKW, 7, lock(handle, WRITE_LOCK)).await;
    eventually(|| mount.meta.changes().len() == 2).await;
    mount.meta.set(|script| script.locks = Treatment::Refuse);
    assert_eq!(waiting.answer().await, Err(Errno::NOLCK));
}

#[tokio::test]
async fn requests_end_while_no_service_answers_and_locks_are_released_later() {
    let mount = Mount::new().await;
    let files = 7..=26;
    let mut handles = Vec::new();
    for file in files.clone() {
        handles.push(mount.open(file).await);
        let granted = mount.request(opcode::SETLK, file, lock(handles[0], WRITE_LOCK)).await;
        assert_eq!(granted, Ok(Vec::new()));
    }
    mount.meta.set(|script| script.locks = Treatment::Silence);
    let since = Instant::now();
    for access in [WRITE_LOCK, UNLOCK] {
        let refused = mount.request(opcode::SETLK, 7, lock(handles[0], access)).await;
        assert_eq!(refused, Err(Errno::TIMEDOUT));
    }
    assert!(since.elapsed() < PATIENCE / 4);
    // A process that closes many files waits once.
    let since = Instant::now();
    for (file, handle) in files.clone().zip(&handles) {
        assert_eq!(mount.flush(file, *handle, OWNER).await, Ok(Vec::new()));
    }
    assert!(since.elapsed() < 10 * TIMEOUT, "{:?}", since.elapsed());
    // It must not be released after it was granted again.
    assert_eq!(
        mount.request(opcode::SETLK, 26, lock(handles[19], WRITE_LOCK)).await,
        Err(Errno::TIMEDOUT)
    );
    let before = mount.meta.changes().len();
    mount.meta.set(|script| script.locks = Treatment::Answer);
    let again = mount.request(opcode::SETLK, 26, lock(handles[19], WRITE_LOCK)).await;
    assert_eq!(again, Ok(Vec::new()));
    let changes = mount.meta.changes().split_off(before);
    let position = |matches: &dyn Fn(&LockChange) -> bool| changes.iter().position(matches);
    let is_release = |file: u64| {
        move |change: &LockChange| {
            matches!(change, LockChange::Clear { lock, .. } if lock.inode.0 == file
                && lock.owner == OWNER && lock.kind == LockKind::Posix)
        }
    };
    for file in files {
        assert!(position(&is_release(file)).is_some(), "{file}: {changes:?}");
    }
    let set = position(&|change| matches!(change, LockChange::Set { .. }));
    assert!(position(&is_release(26)) < set, "{changes:?}");
}

/// It may be of an earlier session.
#[tokio::test]
async fn a_deferred_release_of_an_ended_session_does_not_end_the_current_one() {
    let mount = Mount::new().await;
    let mut handles = Vec::new();
    for file in [7, 8] {
        handles.push(mount.open(file).await);
        let wanted = lock(*handles.last().unwrap(), WRITE_LOCK);
        mount.request(opcode::SETLK, file, wanted).await.unwrap();
    }
    mount.meta.set(|script| script.locks = Treatment::Silence);
    mount.flush(7, handles[0], OWNER).await.unwrap();
    mount.meta.set(|script| (script.locks, script.releases_lost) = (Treatment::Answer, true));
    // Waits until the release was answered.
    let since = Instant::now();
    while mount.request(opcode::SETLK, 7, lock(handles[0], WRITE_LOCK)).await.is_err() {
        assert!(since.elapsed() < PATIENCE, "the release is answered");
    }
    let size = Body::default().u32(set::SIZE).u32(0).u64(handles[1]).u64(100).zeros(64);
    assert!(mount.request(opcode::SETATTR, 8, size).await.is_ok());
}

#[tokio::test]
async fn a_signal_ends_a_wait_while_no_service_answers_and_the_wait_is_cancelled_later() {
    let mount = Mount::new().await;
    let handle = mount.open(7).await;
    mount.meta.set(|script| script.wait = true);
    let waiting = mount.send(opcode::SETLKW, 7, lock(handle, WRITE_LOCK)).await;
    eventually(|| mount.meta.changes().len() == 2).await;
    mount.meta.set(|script| script.locks = Treatment::Silence);
    mount.interrupt(waiting.unique).await;
    assert_eq!(waiting.answer().await, Err(Errno::INTR));
    let cancelled = || {
        let is_cancel = |change: &LockChange| matches!(change, LockChange::Cancel { .. });
        mount.meta.changes().iter().filter(|change| is_cancel(change)).count()
    };
    let before = cancelled();
    mount.meta.set(|script| script.locks = Treatment::Answer);
    eventually(|| cancelled() > before).await;
}

#[tokio::test]
async fn files_without_locks_need_no_further_requests() {
    let mount = Mount::new().await;
    let use_file = async |file: u64| {
        let before = mount.meta.requests().len();
        let handle = mount.open(file).await;
        mount.flush(file, handle, OWNER).await.unwrap();
        mount.release(file, handle).await;
        let requests = mount.meta.requests().split_off(before);
        let is_open = |request: &MetaRequest| {
            matches!(request, MetaRequest::Query { query: MetaQuery::Open { .. }, .. })
        };
        assert!(requests.len() == 1 && is_open(&requests[0]), "{requests:?}");
    };
    use_file(8).await;
    let handle = mount.open(7).await;
    mount.request(opcode::SETLK, 7, lock(handle, WRITE_LOCK)).await.unwrap();
    use_file(8).await;
    // Nor do closes after the last lock was released.
    mount.request(opcode::SETLK, 7, lock(handle, UNLOCK)).await.unwrap();
    let before = mount.meta.requests().len();
    mount.flush(7, handle, OWNER).await.unwrap();
    mount.release(7, handle).await;
    assert_eq!(mount.meta.requests().len(), before);
}

/// As all updates of a file with locks.
#[tokio::test]
async fn a_truncation_of_a_locked_file_is_not_sent_while_its_session_is_not_renewed() {
    let mount = Mount::new().await;
    mount.meta.set(|script| script.lease_ms = 6_000);
    let handle = mount.open(7).await;
    mount.request(opcode::SETLK, 7, lock(handle, WRITE_LOCK)).await.unwrap();
    mount.meta.set(|script| script.renewals = Treatment::Silence);
    let size = || Body::default().u32(set::SIZE).u32(0).u64(handle).u64(100).zeros(64);
    let truncate = async || mount.request(opcode::SETATTR, 7, size()).await;
    let since = Instant::now();
    while truncate().await.is_ok() {
        assert!(since.elapsed() < PATIENCE, "it does not require the session");
    }
    let before = mount.meta.requests().len();
    // A signal does not end it: it must not be executed after the process has lost its locks.
    let sent = mount.send(opcode::SETATTR, 7, size()).await;
    mount.interrupt(sent.unique).await;
    assert_eq!(sent.answer().await, Err(Errno::TIMEDOUT));
    assert_eq!(mount.meta.requests().len(), before);
    mount.meta.set(|script| script.renewals = Treatment::Answer);
    let since = Instant::now();
    while truncate().await.is_err() {
        assert!(since.elapsed() < PATIENCE, "the session is renewed");
    }
}
