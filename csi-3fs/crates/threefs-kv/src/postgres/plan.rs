//! Plan of a batch: which commits are applied, in which order, and their folded writes. Pure.
//!
//! The batch holds the lock of the store, so what was read after the lock stays true until the
//! batch is committed.

use std::collections::{BTreeMap, BTreeSet};

use crate::guard::{Guard, guards_of};
use crate::layer::Layer;
use crate::resolver::{add, add_within, stamped_key};
use crate::{Commit, KvError, Mutation, Versionstamp};

/// State of the store under its lock: what the commits of a batch depend on.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    /// Versions of guarded rows that exist.
    pub versions: BTreeMap<Vec<u8>, u64>,
    /// Values of counters that exist.
    pub counters: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Guards of ranges that are violated.
    pub violated: BTreeSet<Guard>,
}

impl Facts {
    fn holds(&self, guard: &Guard) -> bool {
        match guard {
            Guard::Row { key, revision } => {
                self.versions.get(key).copied().unwrap_or(0) == *revision
            }
            Guard::Range { .. } => !self.violated.contains(guard),
        }
    }
}

/// What a batch has to read under the lock.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    pub rows: BTreeSet<Vec<u8>>,
    pub ranges: BTreeSet<Guard>,
    pub counters: BTreeSet<Vec<u8>>,
}

impl Questions {
    /// # Errors
    /// As [`guards_of`].
    pub(crate) fn add(&mut self, commit: &Commit) -> Result<(), KvError> {
        for guard in guards_of(commit)? {
            match guard {
                Guard::Row { key, .. } => drop(self.rows.insert(key)),
                Guard::Range { .. } => drop(self.ranges.insert(guard)),
            }
        }
        for mutation in &commit.mutations {
            if let Mutation::Add { key, .. } = mutation {
                self.counters.insert(key.clone());
            }
        }
        self.counters.extend(commit.bounded_adds.iter().map(|addition| addition.key.clone()));
        Ok(())
    }
}

/// The outcome of a batch, if its writes are applied.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// One result for each commit.
    pub results: Vec<Result<Versionstamp, KvError>>,
    /// The folded writes.
    pub layer: Layer,
}

impl Plan {
    /// Plans commits in order, for the next version of the store.
    pub(crate) fn new<'a>(
        commits: impl IntoIterator<Item = &'a Commit>,
        facts: &Facts,
        version: u64,
    ) -> Self {
        let (mut plan, mut admitted) = (Self::default(), 0);
        for commit in commits {
            let stamp = Versionstamp::new(version, admitted);
            let admission = plan.admit(commit, facts, stamp);
            // Fits: a batch is far shorter than 2^16.
            admitted += u16::from(admission.is_ok());
            plan.results.push(admission.map(|()| stamp));
        }
        plan
    }

    /// Whether no commit is applied.
    pub(crate) fn is_empty(&self) -> bool {
        self.results.iter().all(Result::is_err)
    }

    fn admit(
        &mut self,
        commit: &Commit,
        facts: &Facts,
        stamp: Versionstamp,
    ) -> Result<(), KvError> {
        // The snapshot is from before the batch, so a row that an earlier commit writes has changed.
        if commit.read_keys.iter().any(|key| self.layer.find(key).is_some())
            || commit.read_ranges.iter().any(|range| self.layer.overlaps(range))
            || !guards_of(commit)?.iter().all(|guard| facts.holds(guard))
        {
            return Err(KvError::Conflict);
        }
        let mut own = Layer::default();
        for mutation in &commit.mutations {
            match mutation {
                Mutation::Set { key, value } => own.write(key.clone(), Some(value.clone())),
                Mutation::Clear { key } => own.write(key.clone(), None),
                Mutation::ClearRange { range } => own.clear(range.clone()),
                Mutation::Add { key, delta } => {
                    let sum = add(key, self.current(&own, key, facts), *delta)?;
                    own.write(key.clone(), Some(sum.to_le_bytes().to_vec()));
                }
                Mutation::SetStamped { prefix, suffix, value } => {
                    own.write(stamped_key(prefix, stamp, suffix), Some(value.clone()));
                }
            }
        }
        for addition in &commit.bounded_adds {
            let sum = add_within(addition, self.current(&own, &addition.key, facts))?;
            if addition.writes() {
                own.write(addition.key.clone(), Some(sum.to_le_bytes().to_vec()));
            }
        }
        self.layer.append(own);
        Ok(())
    }

    fn current<'a>(&'a self, own: &'a Layer, key: &[u8], facts: &'a Facts) -> Option<&'a [u8]> {
        match own.find(key).or_else(|| self.layer.find(key)) {
            Some(value) => value,
            None => facts.counters.get(key).map(Vec::as_slice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::Write;
    use crate::{BoundedAdd, KeyRange};

    fn read(key: &str, version: u64) -> Commit {
        Commit {
            read_keys: vec![key.into()],
            seen: [(key.into(), version)].into(),
            mutations: vec![Mutation::Set { key: b"x".to_vec(), value: Vec::new() }],
            ..Commit::default()
        }
    }

    fn bounded(delta: i64, max: i64) -> Commit {
        let addition = BoundedAdd { key: b"n".to_vec(), delta, max, strict: false };
        Commit { bounded_adds: vec![addition], ..Commit::default() }
    }

    #[test]
    fn a_changed_or_removed_row_conflicts() {
        let facts = Facts { versions: [(b"a".to_vec(), 5)].into(), ..Facts::default() };
        let commits = [read("a", 5), read("a", 4), read("a", 0), read("b", 0), read("b", 3)];
        let plan = Plan::new(&commits, &facts, 9);
        let valid: Vec<_> = plan.results.iter().map(Result::is_ok).collect();
        assert_eq!(valid, [true, false, false, true, false]);
    }

    #[test]
    fn a_range_conflicts_with_its_guard_and_with_writes_of_the_batch() {
        let range = KeyRange::new("d", "e");
        let guard = Guard::Range { range: range.clone(), revision: 7 };
        let scan = |read_version| Commit {
            read_version,
            read_ranges: vec![range.clone()],
            mutations: vec![Mutation::Set { key: b"d1".to_vec(), value: Vec::new() }],
            ..Commit::default()
        };
        let facts = Facts { violated: [guard].into(), ..Facts::default() };
        let plan = Plan::new(&[scan(7), scan(8), scan(8)], &facts, 9);
        let valid: Vec<_> = plan.results.iter().map(Result::is_ok).collect();
        assert_eq!(valid, [false, true, false]);
    }

    #[test]
    fn counters_are_summed_and_a_refused_addition_has_no_effect() {
        let facts = Facts {
            counters: [(b"n".to_vec(), 4i64.to_le_bytes().to_vec())].into(),
            ..Facts::default()
        };
        let commits = [bounded(3, 10), bounded(9, 10), bounded(3, 10), bounded(1, 10)];
        let plan = Plan::new(&commits, &facts, 9);
        assert!(matches!(plan.results[1], Err(KvError::OverBound { value: 7, .. })));
        assert!(matches!(plan.results[3], Err(KvError::OverBound { value: 10, .. })));
        assert_eq!(plan.results[2], Ok(Versionstamp::new(9, 1)));
        let value = 10i64.to_le_bytes().to_vec();
        assert_eq!(plan.layer.into_writes(), [Write::Put { key: b"n".to_vec(), value }]);
    }

    #[test]
    fn the_stamp_of_a_key_is_that_of_its_commit() {
        let stamped = Commit {
            mutations: vec![Mutation::SetStamped {
                prefix: b"p".to_vec(),
                suffix: b"s".to_vec(),
                value: Vec::new(),
            }],
            ..Commit::default()
        };
        let plan = Plan::new(&[bounded(1, 9), stamped], &Facts::default(), 9);
        let stamp = plan.results[1].clone().unwrap();
        let key = [b"p", &stamp.0[..], b"s"].concat();
        assert!(plan.layer.find(&key).is_some());
    }
}
