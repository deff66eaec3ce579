//! The schedule of one seed.

use std::collections::BTreeMap;

use rand::seq::IteratorRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::meta::Meta;
use super::reference::{Reference, ReferenceSnapshot};
use super::storage::{Fenced, Storage};
use super::tasks::{Progress, Step, Task, World};
use super::{Id, Mutation, NODES, Slot, check};

/// Steps with new operations and faults; afterwards everything in progress ends.
const STEPS: u64 = 500;
/// Steps until everything has ended.
const STEPS_MAX: u64 = 20_000;
const TASKS_MAX: usize = 6;
const SNAPSHOTS_MAX: usize = 5;
const VOLUMES_MAX: usize = 3;

/// What a schedule did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Steps.
    pub steps: u64,
    /// Acknowledged writes and truncations.
    pub writes: u64,
    /// Snapshots that were created.
    pub snapshots: u64,
    /// Clones that were created.
    pub clones: u64,
    /// Creators that died.
    pub creators_lost: u64,
}

/// A violation of the guarantees.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// What was wrong.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "seed {}, step {}: {}", self.seed, self.step, self.what)
    }
}

/// Runs the schedule of one seed.
///
/// # Errors
/// The first violation.
pub fn run(seed: u64, mutation: Mutation) -> Result<Outcome, Violation> {
    let mut schedule = Schedule::new(seed, mutation);
    let result = schedule.run();
    let (step, mut outcome) = (schedule.world.now, schedule.outcome);
    outcome.steps = step;
    outcome.writes =
        schedule.world.reference.writes.values().filter(|it| it.end.is_some()).count() as u64;
    result.map(|()| outcome).map_err(|what| Violation { seed, step, what })
}

pub(super) struct Schedule {
    pub(super) rng: ChaCha8Rng,
    pub(super) world: World,
    pub(super) tasks: BTreeMap<u64, Task>,
    next_task: u64,
    /// Volumes and their roots in the reference.
    pub(super) roots: BTreeMap<Id, Id>,
    outcome: Outcome,
}

impl Schedule {
    fn new(seed: u64, mutation: Mutation) -> Self {
        let mut world = World {
            meta: Meta::new(mutation),
            storage: Storage::new(mutation),
            reference: Reference::default(),
            handles: BTreeMap::new(),
            now: 1,
            mutation,
        };
        let root = world.meta.make_volume(None);
        let counterpart = world.reference.fresh();
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            world,
            tasks: BTreeMap::new(),
            next_task: 0,
            roots: BTreeMap::from([(root, counterpart)]),
            outcome: Outcome::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while self.world.now < STEPS {
            self.world.now += 1;
            self.step()?;
        }
        for node in 0..NODES as usize {
            self.heal(node);
        }
        while !self.tasks.is_empty() || self.creating().is_some() {
            self.world.now += 1;
            if self.world.now > STEPS_MAX {
                return Err(format!("does not end: {:?}", self.tasks));
            }
            self.resume_creations();
            match self.rng.random_bool(0.5) {
                true => self.advance_one()?,
                false => self.complete_one(),
            }
        }
        self.check_all()
    }

    fn step(&mut self) -> Result<(), String> {
        match self.rng.random_range(0..100) {
            0..30 => self.advance_one(),
            30..50 => {
                self.complete_one();
                Ok(())
            }
            50..68 if self.tasks.len() < TASKS_MAX => {
                self.start_operation();
                Ok(())
            }
            68..80 => {
                self.change_names();
                Ok(())
            }
            80..84 => {
                self.start_creation();
                Ok(())
            }
            84..86 => {
                self.remove_or_clone();
                Ok(())
            }
            86..92 => {
                self.work_in_background();
                Ok(())
            }
            92..94 => {
                self.fail();
                Ok(())
            }
            94..96 => {
                self.resume_creations();
                Ok(())
            }
            96..98 => self.check_one_snapshot(),
            _ => Ok(()),
        }
    }

    pub(super) fn add(&mut self, task: Task) {
        self.next_task += 1;
        self.tasks.insert(self.next_task, task);
    }

    fn advance_one(&mut self) -> Result<(), String> {
        let Some(number) = self.tasks.keys().copied().choose(&mut self.rng) else { return Ok(()) };
        let Some(mut task) = self.tasks.remove(&number) else { return Ok(()) };
        match self.world.advance(number, &mut task)? {
            Progress::Continues => {
                self.tasks.insert(number, task);
            }
            Progress::Ended => {}
            Progress::Committed(slot, volume) => self.committed(slot, volume),
        }
        Ok(())
    }

    /// A node completes an update. The reply may be lost.
    fn complete_one(&mut self) {
        let node = self.rng.random_range(0..NODES as usize);
        let count = self.world.storage.executing(node);
        if count == 0 {
            return;
        }
        let number = self.rng.random_range(0..count);
        let Some((task, result)) = self.world.storage.complete(node, number) else { return };
        if self.rng.random_bool(0.2) {
            return;
        }
        let Some(mut waiting) = self.tasks.remove(&task) else { return };
        let (ended, next) = match result {
            Ok(()) => self.world.answered(&mut waiting),
            Err(Fenced) => {
                self.world.refused(&mut waiting);
                (false, None)
            }
        };
        if !ended {
            self.tasks.insert(task, waiting);
        }
        // The client may die before it reports.
        if let Some(next) = next.filter(|_| self.rng.random_bool(0.7)) {
            self.add(next);
        }
    }

    /// Takes the copy of the tree that the snapshot must equal.
    fn committed(&mut self, slot: Slot, volume: Id) {
        let known = self.world.reference.snapshots.contains_key(&slot);
        let created = self.world.meta.snapshots.contains_key(&slot);
        let Some(root) = self.roots.get(&volume).copied().filter(|_| created && !known) else {
            return;
        };
        let names = self.world.reference.tree(root);
        let (at, seen) = (self.world.now, BTreeMap::new());
        let snapshot = ReferenceSnapshot { root, names, at, seen };
        self.world.reference.snapshots.insert(slot, snapshot);
        self.outcome.snapshots += 1;
    }

    fn creating(&self) -> Option<(Id, Slot)> {
        let mut volumes = self.world.meta.volumes.iter();
        volumes.find_map(|(id, volume)| Some((*id, volume.creating?)))
    }

    fn start_creation(&mut self) -> Option<()> {
        let volume = self.roots.keys().copied().choose(&mut self.rng)?;
        let slot = self.next_task + 1;
        let (full, whole) =
            (self.world.meta.snapshots.len() >= SNAPSHOTS_MAX, self.world.meta.is_whole(volume));
        let row = self.world.meta.volumes.get_mut(&volume)?;
        if row.creating.is_some() || full || !whole {
            return None;
        }
        row.creating = Some(slot);
        self.add_creation(slot, volume, false);
        Some(())
    }

    fn add_creation(&mut self, slot: Slot, volume: Id, resumed: bool) {
        let fenced = vec![false; NODES as usize];
        self.add(Task::Create { slot, volume, step: Step::StoreFence, fenced, resumed });
    }

    /// Another process completes creations whose creator died.
    fn resume_creations(&mut self) {
        let creating = |task: &Task| match task {
            Task::Create { volume, .. } => Some(*volume),
            _ => None,
        };
        let Some((volume, slot)) = self.creating() else { return };
        if !self.tasks.values().any(|task| creating(task) == Some(volume)) {
            self.add_creation(slot, volume, true);
        }
    }

    fn remove_or_clone(&mut self) -> Option<()> {
        let listed = self.world.meta.snapshots.iter().filter(|(_, it)| !it.removed);
        let slot = listed.map(|(slot, _)| *slot).choose(&mut self.rng)?;
        if self.rng.random_bool(0.5) {
            self.world.meta.remove_snapshot(slot);
            self.world.reference.snapshots.remove(&slot);
            return Some(());
        }
        if self.roots.len() >= VOLUMES_MAX {
            return None;
        }
        // The reference copies what the snapshot has.
        let World { meta, storage, reference, .. } = &mut self.world;
        check::snapshot(meta, storage, reference, slot).ok()?;
        let root = reference.clone_snapshot(slot)?;
        let volume = meta.clone_snapshot(slot)?;
        self.roots.insert(volume, root);
        self.outcome.clones += 1;
        Some(())
    }

    fn work_in_background(&mut self) -> Option<()> {
        let node = self.rng.random_range(0..NODES as usize);
        let volume = self.roots.keys().copied().choose(&mut self.rng)?;
        let World { meta, storage, .. } = &mut self.world;
        match self.rng.random_range(0..5) {
            0 => {
                meta.copy_some(storage, volume);
            }
            1 => meta.sweep(),
            2 => storage.send_shown(node, volume, meta.epoch(volume), meta.shown(volume)),
            3 => storage.drop_versions(node),
            _ => storage.forget(&meta.forgotten(storage)),
        }
        Some(())
    }

    fn fail(&mut self) {
        let node = self.rng.random_range(0..NODES as usize);
        let is_up = self.world.storage.nodes.get(node).is_some_and(|it| it.up && it.reachable);
        if !is_up {
            return self.heal(node);
        }
        match self.rng.random_range(0..3) {
            0 => self.world.storage.crash(node, self.rng.random_bool(0.5)),
            1 => {
                if let Some(node) = self.world.storage.nodes.get_mut(node) {
                    node.reachable = false;
                }
            }
            _ => {
                let creators =
                    self.tasks.iter().filter(|(_, it)| matches!(it, Task::Create { .. }));
                let creator = creators.map(|(number, _)| *number).choose(&mut self.rng);
                if let Some(number) = creator
                    && let Some(Task::Create { slot, volume, .. }) = self.tasks.remove(&number)
                {
                    self.outcome.creators_lost += 1;
                    // Or it has given up.
                    if self.rng.random_bool(0.3) {
                        self.world.meta.abort_snapshot(slot, volume);
                    }
                }
            }
        }
    }

    fn heal(&mut self, node: usize) {
        let Some(row) = self.world.storage.nodes.get_mut(node) else { return };
        row.reachable = true;
        if !row.up {
            self.world.storage.restart(node);
        }
    }

    fn check_one_snapshot(&mut self) -> Result<(), String> {
        let slots = self.world.reference.snapshots.keys().copied();
        let Some(slot) = slots.choose(&mut self.rng) else { return Ok(()) };
        let World { meta, storage, reference, .. } = &mut self.world;
        check::snapshot(meta, storage, reference, slot)
    }

    fn check_all(&mut self) -> Result<(), String> {
        let World { meta, storage, reference, now, .. } = &mut self.world;
        let slots: Vec<Slot> = reference.snapshots.keys().copied().collect();
        for slot in slots {
            check::snapshot(meta, storage, reference, slot)?;
        }
        for (volume, root) in &self.roots {
            while meta.copy_some(storage, *volume) {}
            check::live(meta, storage, reference, *volume, *root, *now)?;
        }
        check::reads(reference)
    }
}
