//! Epochs of the volume, in some of the schedules: they end at random times, clients learn of that late
//! and read versions of epochs that have ended. Some of the epochs have no snapshot, or one that is
//! removed; nodes learn of that late and drop the versions that no other snapshot shows.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::ids::{ChunkId, ChunkVersion, Epoch};
use threefs_core::replica::Event;
use threefs_core::shown::ShownEpochs;

use super::{Simulation, Violation};
use crate::fault_plan::FAULTS_END_US;
use crate::mutations::Mutation;
use crate::store::Slot;
use crate::topology::At;

/// Seed of the generator of epochs.
const SEED: u64 = 0x6570_6f63;
/// Maximum number of epochs that end.
const ENDS_MAX: usize = 4;
/// The number of the volume.
const VOLUME: u32 = 3;
/// Maximum age of a list of shown epochs when a node receives it.
const LIST_AGE_US_MAX: u64 = 40_000;

/// The end of an epoch.
#[derive(Debug)]
struct End {
    at: u64,
    /// When its snapshot is removed; `None` if never.
    removed: Option<u64>,
}

/// The epochs of a schedule.
#[derive(Debug)]
pub(crate) struct Epochs {
    rng: ChaCha8Rng,
    /// The end of each epoch, in order.
    ends: Vec<End>,
}

/// Epoch number `count`: the one before the first snapshot is the same for all volumes.
fn epoch(count: u32) -> Epoch {
    if count == 0 { Epoch::default() } else { Epoch::new(VOLUME, count) }
}

impl Epochs {
    pub(crate) fn new(seed: u64, mutation: Mutation) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ SEED);
        let some = rng.random_bool(0.4) || mutation.needs_epochs();
        let count = if some { rng.random_range(1..=ENDS_MAX) } else { 0 };
        let mut times: Vec<u64> =
            (0..count).map(|_| rng.random_range(20_000..FAULTS_END_US)).collect();
        times.sort_unstable();
        let ends = times.into_iter().map(|at| {
            // At its end, it has no snapshot.
            let after = [0, rng.random_range(1_000..FAULTS_END_US)][rng.random_range(0..2)];
            End { at, removed: rng.random_bool(0.5).then_some(at + after) }
        });
        let ends = ends.collect();
        Self { rng, ends }
    }

    fn count(&self, now: u64) -> u32 {
        self.ends.iter().filter(|end| end.at <= now).count() as u32
    }

    /// The epoch of a new update: some clients do not know yet that the one before has ended.
    pub(crate) fn of_update(&mut self, now: u64) -> Epoch {
        match self.count(now) {
            0 => epoch(0),
            current => epoch(current - u32::from(self.rng.random_bool(0.2))),
        }
    }

    /// The epoch of a repeated update: its client may have learnt of a new one.
    pub(crate) fn of_repeated(&mut self, before: Epoch, now: u64) -> Epoch {
        let current = epoch(self.count(now));
        let learns = before < current && self.rng.random_bool(0.3);
        if learns { current } else { before }
    }

    /// The epoch of a read, if it is of a snapshot: one that is never removed.
    pub(crate) fn of_read(&mut self, now: u64) -> Option<Epoch> {
        if self.count(now) == 0 || !self.rng.random_bool(0.4) {
            return None;
        }
        let kept: Vec<Epoch> = self.kept(now).collect();
        (!kept.is_empty()).then(|| kept[self.rng.random_range(0..kept.len())])
    }

    /// The epochs of snapshots that are never removed.
    pub(crate) fn kept(&self, now: u64) -> impl Iterator<Item = Epoch> {
        let ended = self.ends.iter().zip(0..).filter(move |(end, _)| end.at <= now);
        // A snapshot of the epoch before the first one names its volume.
        ended.filter(|(end, _)| end.removed.is_none()).map(|(_, count)| Epoch::new(VOLUME, count))
    }

    /// The list of shown epochs at a time.
    pub(crate) fn shown(&self, now: u64) -> ShownEpochs {
        let ended = self.ends.iter().zip(0..).filter(|(end, _)| end.at <= now);
        let shown = ended.filter(|(end, _)| end.removed.is_none_or(|removed| now < removed));
        let counts = shown.map(|(_, count)| count).collect();
        ShownEpochs { volume: VOLUME, below: self.count(now), counts }
    }

    /// One of the versions of a chunk.
    pub(crate) fn pick(&mut self, versions: &[ChunkId]) -> Option<ChunkId> {
        match versions {
            [] => None,
            [only] => Some(*only),
            several => Some(several[self.rng.random_range(0..several.len())]),
        }
    }
}

impl Simulation {
    /// A node receives a list of shown epochs, possibly an old one.
    pub(super) fn give_shown(&mut self, node: usize) -> Result<(), Violation> {
        if self.epochs.ends.is_empty() {
            return Ok(());
        }
        let age = match self.faults_ended {
            true => 0,
            false => self.epochs.rng.random_range(0..LIST_AGE_US_MAX),
        };
        let list = Arc::new(self.epochs.shown(self.now.saturating_sub(age)));
        for chain in 0..self.topology.chains {
            self.deliver_event(At { node, chain }, Event::Shown(Arc::clone(&list)))?;
        }
        Ok(())
    }

    /// Whether no replica has a version that no snapshot shows, except the newest of each chunk.
    pub(super) fn all_dropped(&self) -> bool {
        let list = self.epochs.shown(self.now);
        let is_hidden = |older: (&ChunkId, &Slot), newer: (&ChunkId, &Slot)| {
            newer.0.is_version_of(*older.0)
                && newer.1.committed.state.version > ChunkVersion(0)
                && list.is_complete_to(newer.0.epoch)
                && !list.shows(older.0.epoch, newer.0.epoch)
        };
        self.members().all(|at| {
            let slots = self.hosted(at).store.slots();
            !slots.iter().zip(slots.iter().skip(1)).any(|(older, newer)| is_hidden(older, newer))
        })
    }
}
