//! Places of a job's ranks, stored from the exchange of its world for later groups.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::membership::Membership;
use crate::topology::Place;

/// A world whose ranks have exchanged their places.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// Name of that exchange: another start of the job has another.
    pub(crate) exchange: String,
    places: Arc<[Place]>,
}

/// Job, world size and rank of the job.
type WorldKey = (String, u32, u32);

static WORLDS: Mutex<BTreeMap<WorldKey, World>> = Mutex::new(BTreeMap::new());

impl World {
    /// Stores the places that the world of this rank has exchanged; replaces those of an earlier
    /// world of the same job.
    pub(crate) fn store(job: &str, membership: &Membership, exchange: String, places: &[Place]) {
        let world = Self { exchange, places: places.into() };
        worlds().insert(key(job, membership), world);
    }

    /// The world in which the places of this group's ranks are known.
    pub(crate) fn of(job: &str, membership: &Membership) -> Option<Self> {
        worlds().get(&key(job, membership)).cloned()
    }

    /// The places of these ranks of the job; none if it has fewer ranks.
    pub(crate) fn places(&self, global_ranks: &[u32]) -> Option<Vec<Place>> {
        global_ranks.iter().map(|rank| self.places.get(*rank as usize).cloned()).collect()
    }
}

fn worlds() -> MutexGuard<'static, BTreeMap<WorldKey, World>> {
    WORLDS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(job: &str, membership: &Membership) -> WorldKey {
    (job.to_owned(), membership.world_size(), membership.global_rank())
}
