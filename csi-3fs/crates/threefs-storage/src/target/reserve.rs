//! Space reservation: updates wait for disk space before a thread of their target applies them.
//!
//! The wait does not block a thread: the commits that free space need them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use threefs_chunkstore::Reservation;
use threefs_core::chunk::StoreUpdate;
use threefs_core::error::StoreError;
use threefs_core::replica::{Event, OpId};

use super::{Job, Target};

/// How long an update waits for space before it fails with `NoSpace`. Shorter than the
/// predecessor's timeout.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(10);

/// State of a reservation.
enum Stage {
    /// `ChunkStore::reserve` has not returned.
    Requested,
    /// It has returned without a result.
    Waiting,
    /// The result came before it returned.
    Answered(Result<Reservation, StoreError>),
}

impl Target {
    /// Applies an update once there is space for it: now, by the caller, or later.
    pub(super) fn apply(
        self: &Arc<Self>,
        op: OpId,
        update: StoreUpdate,
        payload: Bytes,
        class: u8,
    ) -> Option<Job> {
        let stage = Arc::new(Mutex::new(Stage::Requested));
        let ready = {
            let (stage, target) = (Arc::clone(&stage), Arc::downgrade(self));
            let (update, payload) = (update.clone(), payload.clone());
            move |reservation| {
                {
                    let mut stage = lock(&stage);
                    if matches!(*stage, Stage::Requested) {
                        *stage = Stage::Answered(reservation);
                        return;
                    }
                }
                let Some(target) = target.upgrade() else { return };
                target.handle(Event::RoomGiven { op });
                target.spawn(apply_in(op, update, payload, reservation));
            }
        };
        let wait = self.store.reserve(&update, payload.len(), class, Box::new(ready));
        let mut stage = lock(&stage);
        if let Stage::Answered(reservation) = std::mem::replace(&mut *stage, Stage::Waiting) {
            return Some(apply_in(op, update, payload, reservation));
        }
        // Under the lock, so that this event precedes the end of the wait.
        self.handle(Event::RoomAwaited { op });
        let wait = wait?;
        let target = Arc::downgrade(self);
        self.context.runtime.spawn(async move {
            tokio::time::sleep(RESERVE_TIMEOUT).await;
            if let Some(target) = target.upgrade() {
                target.store.expire(wait);
            }
        });
        None
    }
}

fn apply_in(
    op: OpId,
    update: StoreUpdate,
    payload: Bytes,
    reservation: Result<Reservation, StoreError>,
) -> Job {
    Box::new(move |target: &Arc<Target>| {
        let result = reservation
            .and_then(|reservation| target.store.apply_in(&update, &payload, reservation));
        Some(Event::Applied { op, result })
    })
}

fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}
