//! Call slots of one class: limits the calls in flight, in total and per volume.
//!
//! Services hold the cluster's key and may take all slots. Holders of tickets share most of them,
//! and those of one volume a part, for any number of connections: one volume leaves slots to other
//! volumes, and all volumes together leave slots to services, whose heartbeats and forwards keep
//! the cluster available.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// One of this many slots is reserved for services.
const RESERVED_PARTS: usize = 4;

/// Maximum number of `all` slots, of calls or of connections, for tickets in total.
pub(super) fn volume_limit(all: usize) -> usize {
    all - all / RESERVED_PARTS
}

/// See the module documentation.
pub(super) struct CallSlots {
    calls_max: usize,
    all: Arc<Semaphore>,
    volumes: Arc<Mutex<Volumes>>,
    per_volume_max: usize,
}

#[derive(Default)]
struct Volumes {
    total: usize,
    by_volume: HashMap<u64, usize>,
}

/// One slot, released when dropped.
pub(super) struct CallSlot {
    _any: OwnedSemaphorePermit,
    _volume: Option<VolumeCount>,
}

struct VolumeCount {
    volumes: Arc<Mutex<Volumes>>,
    volume: u64,
}

impl CallSlots {
    /// A volume may have at most 1/`shares` of the slots.
    pub(super) fn new(calls_max: usize, shares: usize) -> Self {
        let per_volume_max = (calls_max / shares.max(1)).max(1);
        let all = Arc::new(Semaphore::new(calls_max));
        Self { calls_max, all, volumes: Arc::default(), per_volume_max }
    }

    /// A slot for a call of a service, or of a volume; `None` if no slot is free.
    pub(super) fn take(&self, volume: Option<u64>) -> Option<CallSlot> {
        let any = Arc::clone(&self.all).try_acquire_owned().ok()?;
        let Some(volume) = volume else { return Some(CallSlot { _any: any, _volume: None }) };
        let mut volumes = lock(&self.volumes);
        let count = volumes.by_volume.get(&volume).copied().unwrap_or(0);
        if count >= self.per_volume_max || volumes.total >= volume_limit(self.calls_max) {
            return None;
        }
        volumes.by_volume.insert(volume, count + 1);
        volumes.total += 1;
        drop(volumes);
        let volume_count = VolumeCount { volumes: Arc::clone(&self.volumes), volume };
        Some(CallSlot { _any: any, _volume: Some(volume_count) })
    }

    /// True if calls are refused because of the slots that services, or this volume, hold. Another
    /// volume at its own limit does not count.
    pub(super) fn are_exhausted(&self, volume: Option<u64>) -> bool {
        if self.all.available_permits() == 0 {
            return true;
        }
        let Some(volume) = volume else { return false };
        let volumes = lock(&self.volumes);
        volumes.total >= volume_limit(self.calls_max)
            || volumes.by_volume.get(&volume).is_some_and(|calls| *calls >= self.per_volume_max)
    }

    /// Completes when no call is in flight; new calls are refused from then on.
    pub(super) async fn drained(&self) {
        let all = u32::try_from(self.calls_max).unwrap_or(u32::MAX);
        // Fails only if the semaphore is closed, which never happens.
        if let Ok(permits) = self.all.acquire_many(all).await {
            permits.forget();
        }
    }
}

impl Drop for VolumeCount {
    fn drop(&mut self) {
        let mut volumes = lock(&self.volumes);
        volumes.total -= 1;
        if let Some(count) = volumes.by_volume.get_mut(&self.volume) {
            *count -= 1;
            if *count == 0 {
                volumes.by_volume.remove(&self.volume);
            }
        }
    }
}

fn lock(volumes: &Mutex<Volumes>) -> MutexGuard<'_, Volumes> {
    volumes.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_and_services_have_separate_shares() {
        let slots = CallSlots::new(16, 4);
        let take = |volume| (0..16).map_while(|_| slots.take(volume)).collect::<Vec<_>>();
        let exhausted = || [None, Some(1), Some(2)].map(|holder| slots.are_exhausted(holder));
        let first = take(Some(1));
        assert_eq!(exhausted(), [false, true, false], "it keeps out itself alone");
        drop(first);
        let slots_by_volume: Vec<Vec<CallSlot>> =
            (1..=4).map(|volume| take(Some(volume))).collect();
        assert_eq!(slots_by_volume.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4, 0]);
        assert_eq!(exhausted(), [false, true, true], "volumes find none");
        let services = take(None);
        assert_eq!(services.len(), 4);
        assert_eq!(exhausted(), [true; 3]);
        drop((slots_by_volume, services));
        assert!(lock(&slots.volumes).by_volume.is_empty());
        assert_eq!(exhausted(), [false; 3]);
        assert_eq!(take(Some(1)).len(), 4);
        assert_eq!(take(None).len(), 16);
    }

    #[test]
    fn a_volume_has_at_least_one_slot() {
        let slots = CallSlots::new(2, 8);
        assert!(slots.take(Some(1)).is_some());
    }
}
