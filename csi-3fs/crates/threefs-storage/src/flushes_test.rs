//! Flushes of two targets of a disk.

use std::sync::atomic::Ordering::SeqCst;

use threefs_core::message::StorageResult;
use tokio::task::JoinHandle;

use super::*;
use crate::target::Target;
use crate::target::tests::{Hanging, context, serving, until, write};

fn started(target: &Arc<Target>, index: u32) -> JoinHandle<StorageResult> {
    let target = Arc::clone(target);
    tokio::spawn(async move { write(&target, index).await })
}

async fn all_are_made(updates: Vec<JoinHandle<StorageResult>>) {
    for update in updates {
        assert!(update.await.unwrap().is_ok());
    }
}

/// Updates of both targets, one of which is being flushed.
async fn flushing() -> (Vec<JoinHandle<StorageResult>>, [(Arc<Target>, Arc<Hanging>); 2]) {
    let context = context();
    let targets = [serving(&context, 1), serving(&context, 2)];
    let [(first, log), (second, other)] = &targets;
    log.flushes.set(true);
    let mut updates = vec![started(first, 0)];
    until(|| log.log().started == 1).await;
    updates.extend((0..5).map(|index| started(second, index)));
    updates.extend((1..4).map(|index| started(first, index)));
    let waiting = || context.flushes.lock().waiting.iter().map(|it| it.staged.len()).sum::<usize>();
    until(|| waiting() == 8).await;
    assert_eq!((log.log().staged, other.log().staged), (4, 5));
    (updates, targets)
}

#[tokio::test]
async fn updates_that_are_applied_during_a_flush_share_the_next_one() {
    let (updates, [(_first, log), (_second, other)]) = flushing().await;
    assert!(updates.iter().all(|update| !update.is_finished()));
    assert_eq!((log.log().started, other.log().started), (1, 0));
    log.flushes.set(false);
    all_are_made(updates).await;
    assert_eq!((log.log().started, other.log().started), (2, 1));
    assert_eq!((log.log().durable, other.log().durable), (4, 5));
    // The first one, and one of the device for both.
    assert_eq!(log.log().flushed + other.log().flushed, 2);
}

#[tokio::test]
async fn after_a_panic_the_next_update_flushes() {
    let context = context();
    let [(first, log), (second, _)] = [serving(&context, 1), serving(&context, 2)];
    log.panics.store(true, SeqCst);
    let lost = started(&first, 0);
    until(|| !log.panics.load(SeqCst) && !context.flushes.lock().flushing).await;
    assert!(write(&second, 0).await.is_ok());
    assert!(!lost.is_finished());
}

/// For example while its logs are switched.
#[tokio::test]
async fn a_store_that_another_thread_flushes_does_not_delay_others() {
    let context = context();
    let [(first, log), (second, _)] = [serving(&context, 1), serving(&context, 2)];
    log.busy.store(true, SeqCst);
    log.flushes.set(true);
    let waiting = started(&first, 0);
    until(|| log.log().staged == 1).await;
    assert!(write(&second, 0).await.is_ok());
    assert!(!waiting.is_finished());
    log.flushes.set(false);
    assert!(waiting.await.unwrap().is_ok());
}
