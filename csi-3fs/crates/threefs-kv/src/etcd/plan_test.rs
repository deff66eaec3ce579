//! Plans against a model of etcd: a batch gives the same rows as its commits one by one.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::plan::{Counter, Counters, Plan, Shared, counters_of};
use crate::guard::{Guard, Observed};
use crate::layer::Write;
use crate::{BoundedAdd, Commit, KeyRange, KvError, Mutation, Versionstamp};

/// Rows with the revision of their last write; a request is refused as etcd refuses it.
#[derive(Clone, Debug, Default)]
struct Model {
    revision: u64,
    rows: BTreeMap<Vec<u8>, (u64, Vec<u8>)>,
}

impl Model {
    fn observe(&self, guard: &Guard) -> Observed {
        match guard {
            Guard::Row { key, .. } => {
                let (revision, value) = self.rows.get(key).cloned().unwrap_or_default();
                Observed::Row { revision, value }
            }
            Guard::Range { range, revision } => {
                let mut rows = self.rows.range(range.start.clone()..range.end.clone());
                Observed::Range { written: rows.any(|(_, (written, _))| written > revision) }
            }
        }
    }

    fn execute(&mut self, guards: &[Shared], writes: &[Write]) -> Result<u64, Vec<Observed>> {
        let observe = |it: &Shared| match (self.observe(&it.guard), it.owners.batch) {
            (Observed::Row { revision, .. }, false) => {
                Observed::Row { revision, value: Vec::new() }
            }
            (observed, _) => observed,
        };
        let observed: Vec<_> = guards.iter().map(observe).collect();
        if !guards.iter().zip(&observed).all(|(it, observed)| it.guard.holds(observed)) {
            return Err(observed);
        }
        let mut put = Vec::new();
        for write in writes {
            if let Write::Put { key, .. } | Write::Delete { key } = write {
                assert!(!put.contains(&key), "duplicate key in one request");
                put.push(key);
            }
        }
        self.revision += 1;
        for write in writes {
            match write {
                Write::Put { key, value } => {
                    self.rows.insert(key.clone(), (self.revision, value.clone()));
                }
                Write::Delete { key } => drop(self.rows.remove(key)),
                Write::DeleteRange { range } => {
                    let inside = |key: &&Vec<u8>| range.contains(key);
                    assert!(!put.iter().any(inside), "a key inside a deleted range");
                    self.rows.retain(|key, _| !range.contains(key));
                }
            }
        }
        Ok(self.revision)
    }

    fn counters(&self, commits: &[Commit]) -> Counters {
        let keys = commits.iter().flat_map(counters_of);
        keys.map(|key| {
            let row = self.rows.get(key).cloned();
            let revision = row.as_ref().map_or(0, |(revision, _)| *revision);
            (key.clone(), Counter { revision, value: row.map(|(_, value)| value) })
        })
        .collect()
    }

    fn values(&self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        self.rows.iter().map(|(key, (_, value))| (key.clone(), value.clone())).collect()
    }
}

fn key(random: &mut StdRng) -> Vec<u8> {
    vec![b'k', random.random_range(0..8)]
}

fn range(random: &mut StdRng) -> KeyRange {
    let (first, second) = (key(random), key(random));
    KeyRange::new(first.clone().min(second.clone()), first.max(second))
}

fn random_commit(model: &Model, random: &mut StdRng) -> Commit {
    let mut commit = Commit { read_version: model.revision, ..Commit::default() };
    for _ in 0..random.random_range(0..2) {
        let key = key(random);
        let revision = model.rows.get(&key).map_or(0, |(revision, _)| *revision);
        commit.seen.insert(key.clone(), revision);
        commit.read_keys.push(key);
    }
    if random.random_ratio(1, 3) {
        let range = range(random);
        let rows = model.rows.range(range.start.clone()..range.end.clone());
        commit.seen.extend(rows.map(|(key, (revision, _))| (key.clone(), *revision)));
        commit.read_ranges.push(range);
    }
    for _ in 0..random.random_range(1..5) {
        let key = key(random);
        commit.mutations.push(match random.random_range(0..5) {
            0 | 1 => Mutation::Set { key, value: random.random::<i64>().to_le_bytes().to_vec() },
            2 => Mutation::Clear { key },
            3 => Mutation::ClearRange { range: range(random) },
            _ => Mutation::Add { key, delta: random.random_range(-9..9) },
        });
    }
    if random.random_ratio(1, 2) {
        let delta = random.random_range(-3..5);
        commit.bounded_adds.push(BoundedAdd { key: vec![b'n'], delta, max: 10, strict: false });
    }
    commit
}

fn no_stamps() -> Versionstamp {
    Versionstamp::default()
}

/// Applies a commit alone, as a backend without batches does.
fn alone(model: &mut Model, commit: &Commit) -> Result<(), KvError> {
    let counters = model.counters(std::slice::from_ref(commit));
    let plan = Plan::new([commit], &counters, no_stamps);
    if let Some((_, error)) = plan.refused.into_iter().next() {
        return Err(error);
    }
    model.execute(&plan.guards, &plan.layer.into_writes()).map_err(|_| KvError::Conflict)?;
    Ok(())
}

#[test]
fn a_batch_gives_the_rows_of_its_commits_one_by_one() {
    let (mut batched, mut refused) = (0, 0);
    for seed in 0..3_000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut model = Model::default();
        for _ in 0..6 {
            let commits: Vec<_> = (0..random.random_range(1..6))
                .map(|_| random_commit(&model, &mut random))
                .collect();
            let mut serial = model.clone();
            let mut counters = model.counters(&commits);
            let plan = Plan::new(&commits, &counters, no_stamps);
            let revision = model.execute(&plan.guards, &plan.writes()).unwrap();
            plan.applied(revision, &mut counters);
            for index in &plan.admitted {
                alone(&mut serial, &commits[*index]).unwrap();
            }
            assert_eq!(model.values(), serial.values(), "seed {seed}: {commits:?}");
            for (key, counter) in &counters {
                let row = model.rows.get(key);
                let expected = row.map_or(0, |(revision, _)| *revision);
                assert_eq!(counter.revision, expected, "seed {seed}: the counter {key:?} is stale");
            }
            batched += plan.admitted.len();
            refused += plan.refused.len();
        }
    }
    assert!(batched > 10_000 && refused > 1_000, "{batched} {refused}");
}

#[test]
fn only_commits_whose_reads_changed_lose_and_counters_are_refreshed() {
    let mut lost = 0;
    for seed in 0..2_000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut model = Model::default();
        for _ in 0..3 {
            let commit = random_commit(&model, &mut random);
            let _ = alone(&mut model, &commit);
        }
        let commits: Vec<_> = (0..4).map(|_| random_commit(&model, &mut random)).collect();
        let mut counters = model.counters(&commits);
        let other = random_commit(&model, &mut random);
        let _ = alone(&mut model, &other);
        let plan = Plan::new(&commits, &counters, no_stamps);
        let Err(observed) = model.clone().execute(&plan.guards, &plan.writes()) else { continue };
        let losers = plan.losers(&observed, &mut counters);
        lost += losers.len();
        let rest: Vec<_> = plan
            .admitted
            .iter()
            .filter(|index| !losers.contains(index))
            .map(|index| &commits[*index])
            .collect();
        for loser in losers {
            assert!(alone(&mut model.clone(), &commits[loser]).is_err(), "seed {seed}");
        }
        // A counter whose first use was hidden by an earlier commit is refreshed by the next refusal.
        let attempts = (0..8).find(|_| {
            let again = Plan::new(rest.iter().copied(), &counters, no_stamps);
            let executed = model.execute(&again.guards, &again.writes());
            executed.map_err(|observed| again.losers(&observed, &mut counters)).is_ok()
        });
        assert!(attempts.is_some(), "seed {seed}");
    }
    assert!(lost > 300, "{lost}");
}

#[test]
fn a_read_without_its_revision_is_refused() {
    let commit = Commit { read_keys: vec![b"k".to_vec()], ..Commit::default() };
    let plan = Plan::new([&commit], &Counters::new(), no_stamps);
    assert!(matches!(plan.refused[..], [(0, KvError::BadRow { .. })]));
}
