//! Plan of a batch: one request for many commits. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::guard::{Guard, Observed, guards_of};
use crate::layer::{Layer, Write};
use crate::resolver::{add, add_within, stamped_key};
use crate::{Commit, KvError, Mutation, Versionstamp};

/// State of a counter row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counter {
    /// 0: the row is absent.
    pub revision: u64,
    pub value: Option<Vec<u8>>,
}

/// Counter rows by key. A missing one counts as absent; the guard detects the error.
pub(crate) type Counters = BTreeMap<Vec<u8>, Counter>;

/// A guard, and the commits that it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub guard: Guard,
    pub owners: Owners,
}

/// Commits by index, and whether the batch itself needs the row: a counter or a new stamp.
#[derive(Clone, Debug, Default)]
pub(crate) struct Owners {
    pub commits: Vec<usize>,
    pub batch: bool,
}

/// The request for a batch.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Conditions; if one is violated, nothing is applied.
    pub guards: Vec<Shared>,
    /// The folded writes.
    pub layer: Layer,
    /// Commits of the request by index, in the order in which they apply.
    pub admitted: Vec<usize>,
    /// Commits that fail, with their error.
    pub refused: Vec<(usize, KvError)>,
}

/// The counters that a commit changes.
pub(crate) fn counters_of(commit: &Commit) -> impl Iterator<Item = &Vec<u8>> {
    let added = commit.mutations.iter().filter_map(|mutation| match mutation {
        Mutation::Add { key, .. } => Some(key),
        _ => None,
    });
    added.chain(commit.bounded_adds.iter().map(|addition| &addition.key))
}

impl Plan {
    /// Plans commits in order. `stamps` yields the stamp of each row with one.
    pub(crate) fn new<'a>(
        commits: impl IntoIterator<Item = &'a Commit>,
        counters: &Counters,
        mut stamps: impl FnMut() -> Versionstamp,
    ) -> Self {
        let mut plan = Self::default();
        let mut guards: BTreeMap<Guard, Owners> = BTreeMap::new();
        for (index, commit) in commits.into_iter().enumerate() {
            match plan.admit(index, commit, counters, &mut stamps, &mut guards) {
                Ok(()) => plan.admitted.push(index),
                Err(error) => plan.refused.push((index, error)),
            }
        }
        let shared = guards.into_iter().map(|(guard, owners)| Shared { guard, owners });
        plan.guards = shared.collect();
        plan
    }

    fn admit(
        &mut self,
        index: usize,
        commit: &Commit,
        counters: &Counters,
        stamps: &mut impl FnMut() -> Versionstamp,
        guards: &mut BTreeMap<Guard, Owners>,
    ) -> Result<(), KvError> {
        // The snapshot is from before the batch, so a row that an earlier commit writes has changed.
        if commit.read_keys.iter().any(|key| self.layer.find(key).is_some())
            || commit.read_ranges.iter().any(|range| self.layer.overlaps(range))
        {
            return Err(KvError::Conflict);
        }
        let reads = guards_of(commit)?;
        let mut own = Layer::default();
        let mut unowned = Vec::new();
        for mutation in &commit.mutations {
            match mutation {
                Mutation::Set { key, value } => own.write(key.clone(), Some(value.clone())),
                Mutation::Clear { key } => own.write(key.clone(), None),
                Mutation::ClearRange { range } => own.clear(range.clone()),
                Mutation::Add { key, delta } => {
                    let current = self.current(&own, key, counters, &mut unowned);
                    let sum = add(key, current, *delta)?;
                    own.write(key.clone(), Some(sum.to_le_bytes().to_vec()));
                }
                Mutation::SetStamped { prefix, suffix, value } => {
                    let key = stamped_key(prefix, stamps(), suffix);
                    // Another process may have used the same stamp.
                    unowned.push(Guard::Row { key: key.clone(), revision: 0 });
                    own.write(key, Some(value.clone()));
                }
            }
        }
        for addition in &commit.bounded_adds {
            let current = self.current(&own, &addition.key, counters, &mut unowned);
            let sum = add_within(addition, current)?;
            if !addition.writes() {
                continue;
            }
            own.write(addition.key.clone(), Some(sum.to_le_bytes().to_vec()));
        }
        self.layer.append(own);
        for guard in unowned {
            guards.entry(guard).or_default().batch = true;
        }
        for guard in reads {
            guards.entry(guard).or_default().commits.push(index);
        }
        Ok(())
    }

    fn current<'a>(
        &'a self,
        own: &'a Layer,
        key: &[u8],
        counters: &'a Counters,
        unowned: &mut Vec<Guard>,
    ) -> Option<&'a [u8]> {
        if let Some(value) = own.find(key).or_else(|| self.layer.find(key)) {
            return value;
        }
        let counter = counters.get(key);
        let revision = counter.map_or(0, |counter| counter.revision);
        unowned.push(Guard::Row { key: key.to_vec(), revision });
        counter.and_then(|counter| counter.value.as_deref())
    }

    /// The writes of the request.
    pub(crate) fn writes(&self) -> Vec<Write> {
        self.layer.clone().into_writes()
    }

    /// Counters whose revision the request compares.
    pub(crate) fn guarded_counters(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.guards.iter().filter_map(|Shared { guard, owners }| match guard {
            Guard::Row { key, .. } if owners.batch => Some(key),
            _ => None,
        })
    }

    /// Commits whose guards are violated, after a refusal. Counters are updated.
    pub(crate) fn losers(&self, observed: &[Observed], counters: &mut Counters) -> BTreeSet<usize> {
        let mut losers = BTreeSet::new();
        for (Shared { guard, owners }, observed) in self.guards.iter().zip(observed) {
            if guard.holds(observed) {
                continue;
            }
            losers.extend(&owners.commits);
            if let (true, Guard::Row { key, .. }, Observed::Row { revision, value }) =
                (owners.batch, guard, observed)
                && let Some(counter) = counters.get_mut(key)
            {
                let value = (*revision != 0).then(|| value.clone());
                *counter = Counter { revision: *revision, value };
            }
        }
        losers
    }

    /// Updates counters after the request was applied at a revision.
    pub(crate) fn applied(&self, revision: u64, counters: &mut Counters) {
        counters.retain(|key, _| !self.layer.cleared().iter().any(|range| range.contains(key)));
        for (key, value) in self.layer.outcomes() {
            if let Some(counter) = counters.get_mut(key) {
                let revision = if value.is_some() { revision } else { 0 };
                *counter = Counter { revision, value: value.clone() };
            }
        }
    }
}
