//! Epochs of the volume, in some of the schedules: snapshots are created at random times, clients learn
//! late that an epoch has ended, and read versions of such epochs. Some creations are given up, and some
//! snapshots removed; nodes learn of that late and drop the versions that no other snapshot shows.
//!
//! A creation raises the fence at the manager until all nodes have confirmed it. From then on no update
//! of an earlier epoch may be made.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use threefs_core::fence::{FenceTable, Fences, VolumeFence};
use threefs_core::heartbeat::FenceReport;
use threefs_core::ids::{ChunkId, ChunkVersion, Epoch, FencesVersion, InodeId};
use threefs_core::message::NamedVolume;
use threefs_core::replica::Event;
use threefs_core::routing::PublicState;
use threefs_core::shown::ShownEpochs;

use super::{Packet, SimEvent, Simulation, Violation};
use crate::fault_plan::FAULTS_END_US;
use crate::mutations::Mutation;
use crate::store::Slot;
use crate::topology::{At, chain_id};

/// Seed of the generator of epochs.
const SEED: u64 = 0x6570_6f63;
/// Maximum number of epochs that end.
const ENDS_MAX: usize = 4;
/// The number of the volume.
const VOLUME: u32 = 3;
/// Its directory.
const DIRECTORY: InodeId = InodeId(40);
/// Interval between two attempts of a creation.
const ATTEMPT_US: u64 = 5_000;

/// A creation of a snapshot.
#[derive(Clone, Copy, Debug)]
struct Creation {
    at: u64,
    /// It is given up after this time.
    tries_us: u64,
    /// When its snapshot is removed, after its creation; `None` if never.
    removed_after: Option<u64>,
}

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
    /// The next creations, the first one last.
    creations: Vec<Creation>,
    /// The end of each epoch, in order.
    ends: Vec<End>,
    /// The era of the manager in which the fences were published last.
    published_era: u32,
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
        let creations = times.into_iter().rev().map(|at| {
            let tries_us = rng.random_range(20_000..400_000);
            let after = rng.random_range(1_000..FAULTS_END_US);
            Creation { at, tries_us, removed_after: rng.random_bool(0.5).then_some(after) }
        });
        let creations = creations.collect();
        Self { rng, creations, ends: Vec::new(), published_era: 0 }
    }

    /// When the first creation starts, if there is one.
    pub(crate) fn first_at(&self) -> Option<u64> {
        self.creations.last().map(|creation| creation.at)
    }

    /// Whether nodes ask for fences in this schedule.
    pub(crate) fn are_some(&self) -> bool {
        !self.creations.is_empty() || !self.ends.is_empty()
    }

    /// Whether no creation is left.
    pub(crate) fn are_done(&self) -> bool {
        self.creations.is_empty()
    }

    /// The volume that an update names: earlier clients name none.
    pub(crate) fn named_volume(&mut self, epoch: Epoch, is_refused: bool) -> NamedVolume {
        let is_earlier = epoch == Epoch::default() && !is_refused;
        if is_earlier && (!self.are_some() || self.rng.random_bool(0.3)) {
            return NamedVolume::Unnamed;
        }
        NamedVolume::Volume(DIRECTORY)
    }

    /// The epoch of which clients learn from the metadata.
    pub(crate) fn current(&self, now: u64) -> Epoch {
        epoch(self.count(now))
    }

    /// The fence of the current epoch, or of the one after it.
    fn fence(&self, now: u64, raised: bool) -> VolumeFence {
        let count = self.count(now) + u32::from(raised);
        VolumeFence { volume: DIRECTORY, epoch: epoch(count), shown: self.shown(now) }
    }

    fn end(&mut self, now: u64, removed: Option<u64>) {
        self.ends.push(End { at: now, removed });
        self.creations.pop();
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
    /// Creates snapshots, and publishes the list of shown epochs.
    pub(super) fn run_creations(&mut self) -> Result<(), Violation> {
        self.push(ATTEMPT_US, SimEvent::Create);
        if self.manager_is_away() {
            return Ok(());
        }
        let now = self.now;
        // The metadata service learns late of a restore, and publishes all it has.
        if self.manager.is_unpublished() || self.manager_era() > self.epochs.published_era {
            if self.epochs.rng.random_bool(0.95) && !self.faults_ended {
                return Ok(());
            }
            self.epochs.published_era = self.manager_era();
            if self.epochs.are_some() {
                let raised = self.epochs.creations.last().is_some_and(|it| it.at <= now);
                if raised || !self.epochs.ends.is_empty() {
                    let fence = self.epochs.fence(now, raised);
                    self.manager.raise_fence(&fence);
                }
            }
            self.manager.fences_published();
            self.note(|| "PUBLISHED".into());
            return Ok(());
        }
        if !self.epochs.ends.is_empty() {
            let fence = self.epochs.fence(now, false);
            self.manager.raise_fence(&fence);
        }
        let Some(creation) = self.epochs.creations.last().copied() else { return Ok(()) };
        if now < creation.at {
            return Ok(());
        }
        let fence = self.epochs.fence(now, true);
        let version = self.manager.raise_fence(&fence);
        let waits_for = self.manager.fences_wait_for(version, self.manager_now());
        if waits_for.is_none() {
            self.note(|| format!("CONFIRMED {}", fence.epoch));
            self.confirm(fence.epoch);
            self.epochs.end(now, creation.removed_after.map(|after| now + after));
        } else if now > creation.at + creation.tries_us && !self.faults_ended {
            self.note(|| format!("GIVEN UP {}: it waits for {waits_for:?}", fence.epoch));
            self.epochs.end(now, Some(now));
        }
        Ok(())
    }

    /// From now on no update of an earlier epoch may be made. A chain without a serving target makes those
    /// that are pending before it serves again.
    fn confirm(&mut self, epoch: Epoch) {
        for chain in (0..self.topology.chains).filter(|chain| !self.promoted.contains_key(chain)) {
            let published = self.manager.chain(chain_id(chain));
            let serving = published.into_iter().flat_map(|it| &it.targets);
            if serving.clone().any(|place| place.state == PublicState::Serving) {
                self.epochs_ended.insert(chain, epoch);
            } else {
                self.epochs_ended.remove(&chain);
            }
        }
    }

    /// Checks the commit of a version, whether its replica serves or not.
    pub(super) fn check_epoch(&mut self, at: At, chunk: ChunkId) -> Result<(), Violation> {
        let Some(slot) = self.hosted(at).store.slots().get(&chunk) else { return Ok(()) };
        let version = slot.committed.state.version;
        if !self.committed.insert((chunk.first_version(), version)) {
            return Ok(());
        }
        let ended = self.epochs_ended.get(&at.chain).filter(|ended| chunk.epoch < **ended);
        match ended {
            Some(epoch) if !self.promoted.contains_key(&at.chain) => {
                let name = self.name(at);
                let what = format!("{name}: version {version} of {chunk} was made after {epoch}");
                Err(self.violation(what))
            }
            _ => Ok(()),
        }
    }

    /// A node asks for fences.
    pub(super) fn ask_fences(&mut self, node: usize) {
        let state = &self.nodes[node];
        let (known, incarnation) = (state.fences.version(), state.incarnation);
        self.send_to_managers(node, Packet::AskFences { known, incarnation });
    }

    /// Sends the fences that have changed to a node.
    pub(super) fn send_fences(
        &mut self,
        from: usize,
        node: usize,
        known: FencesVersion,
        incarnation: u64,
    ) {
        if let Some(fences) = self.manager.fences_after(known) {
            let fences = Box::new(fences);
            self.send(from, node, Packet::Fences { fences, incarnation });
        }
    }

    /// The fences that a node knows and confirms.
    pub(super) fn fence_report(&self, node: usize) -> FenceReport {
        let state = &self.nodes[node];
        let replicas = state.targets.iter().zip(0..).filter_map(|(hosted, chain)| {
            Some((At { node, chain }.target(), hosted.replica.as_ref()?.drained_fences()))
        });
        match self.mutation {
            Mutation::ConfirmEarly => {
                let named = state.fences_named;
                let drained = replicas.map(|(target, _)| (target, named));
                FenceReport { known: named, drained: drained.collect() }
            }
            _ => FenceReport { known: state.fences.version(), drained: replicas.collect() },
        }
    }

    /// A node receives fences.
    pub(super) fn give_fences(&mut self, node: usize, fences: &Fences) -> Result<(), Violation> {
        let mut table = FenceTable::clone(&self.nodes[node].fences);
        table.add(fences);
        let version = table.version();
        self.nodes[node].fences = Arc::new(table);
        for chain in 0..self.topology.chains {
            self.deliver_fences(At { node, chain })?;
        }
        self.nodes[node].lease.fences_known(version);
        Ok(())
    }

    /// Delivers the fences of a node to one of its targets.
    pub(super) fn deliver_fences(&mut self, at: At) -> Result<(), Violation> {
        let table = Arc::clone(&self.nodes[at.node].fences);
        match table.is_empty() && table.version() == FencesVersion(0) {
            true => Ok(()),
            false => self.deliver_event(at, Event::Fences(table)),
        }
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
