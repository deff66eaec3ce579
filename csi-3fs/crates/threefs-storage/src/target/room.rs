//! Updates that wait for room on the disk before a thread of their target makes them.
//!
//! The wait holds no thread: the commits that make room need them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use threefs_chunkstore::Room;
use threefs_core::chunk::StoreUpdate;
use threefs_core::error::StoreError;
use threefs_core::replica::{Event, OpId};

use super::{Job, Target};

/// An update waits so long for room, then it gets `NoSpace`. Shorter than the predecessor's wait
/// for the answer.
const ROOM_WAIT: Duration = Duration::from_secs(10);

/// Where a request for room stands.
enum Stage {
    /// [`threefs_chunkstore::ChunkStore::reserve`] has not returned.
    Asking,
    /// It has returned without an answer.
    Waiting,
    /// The answer came before it returned.
    Answered(Result<Room, StoreError>),
}

impl Target {
    /// Makes an update once there is room for it: now, by the caller, or later.
    pub(super) fn apply(
        self: &Arc<Self>,
        op: OpId,
        update: StoreUpdate,
        payload: Bytes,
        class: u8,
    ) -> Option<Job> {
        let stage = Arc::new(Mutex::new(Stage::Asking));
        let ready = {
            let (stage, target) = (Arc::clone(&stage), Arc::downgrade(self));
            let (update, payload) = (update.clone(), payload.clone());
            move |room| {
                {
                    let mut stage = lock(&stage);
                    if matches!(*stage, Stage::Asking) {
                        *stage = Stage::Answered(room);
                        return;
                    }
                }
                let Some(target) = target.upgrade() else { return };
                target.handle(Event::RoomGiven { op });
                target.spawn(apply_in(op, update, payload, room));
            }
        };
        let wait = self.store.reserve(&update, payload.len(), class, Box::new(ready));
        let mut stage = lock(&stage);
        if let Stage::Answered(room) = std::mem::replace(&mut *stage, Stage::Waiting) {
            return Some(apply_in(op, update, payload, room));
        }
        // With the lock held, so that it comes before the end of the wait.
        self.handle(Event::RoomAwaited { op });
        let wait = wait?;
        let target = Arc::downgrade(self);
        self.shared.runtime.spawn(async move {
            tokio::time::sleep(ROOM_WAIT).await;
            if let Some(target) = target.upgrade() {
                target.store.expire(wait);
            }
        });
        None
    }
}

fn apply_in(op: OpId, update: StoreUpdate, payload: Bytes, room: Result<Room, StoreError>) -> Job {
    Box::new(move |target: &Arc<Target>| {
        let result = room.and_then(|room| target.store.apply_in(&update, &payload, room));
        Some(Event::Applied { op, result })
    })
}

fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}
