//! Conflict detection: decides whether a transaction may commit. Pure.
//!
//! Keeps the last version that wrote each key, for a bounded number of writes. Transactions from
//! before the oldest kept write are refused.

use std::collections::{BTreeMap, VecDeque};

use crate::{BoundedAdd, Commit, KeyRange, KvError, Versionstamp};

#[derive(Debug)]
pub(crate) struct Resolver {
    /// Transactions that read below this version cannot be checked.
    floor: u64,
    writes_max: usize,
    last_write: BTreeMap<Vec<u8>, u64>,
    order: VecDeque<(u64, Vec<u8>)>,
}

impl Resolver {
    /// Without records of commits up to `version`.
    pub(crate) fn new(version: u64, writes_max: usize) -> Self {
        Self { floor: version, writes_max, last_write: BTreeMap::new(), order: VecDeque::new() }
    }

    /// Checks whether a transaction may commit now.
    pub(crate) fn check(&self, commit: &Commit) -> Result<(), KvError> {
        let read_version = commit.read_version;
        if read_version < self.floor {
            return Err(KvError::TooOld { version: read_version });
        }
        let key_conflicts =
            |key: &Vec<u8>| self.last_write.get(key).is_some_and(|version| *version > read_version);
        let range_conflicts = |range: &KeyRange| {
            !range.is_empty()
                && self
                    .last_write
                    .range(range.start.clone()..range.end.clone())
                    .any(|(_, version)| *version > read_version)
        };
        if commit.read_keys.iter().any(key_conflicts)
            || commit.read_ranges.iter().any(range_conflicts)
        {
            return Err(KvError::Conflict);
        }
        Ok(())
    }

    /// Records the keys written by a commit of `version`. For a cleared range, only the rows that
    /// existed: a transaction that read a row as missing is still valid.
    pub(crate) fn record(&mut self, version: u64, keys: Vec<Vec<u8>>) {
        for key in keys {
            self.last_write.insert(key.clone(), version);
            self.order.push_back((version, key));
        }
        while self.order.len() > self.writes_max {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((version, key)) = self.order.pop_front() else { return };
        self.floor = self.floor.max(version);
        if self.last_write.get(&key) == Some(&version) {
            self.last_write.remove(&key);
        }
    }
}

/// The key of a row with a versionstamp.
pub(crate) fn stamped_key(prefix: &[u8], stamp: Versionstamp, suffix: &[u8]) -> Vec<u8> {
    [prefix, &stamp.0, suffix].concat()
}

/// Adds to a counter row.
pub(crate) fn add(key: &[u8], current: Option<&[u8]>, delta: i64) -> Result<i64, KvError> {
    let current = match current {
        None => 0,
        Some(bytes) => i64::from_le_bytes(bytes.try_into().map_err(|_| {
            KvError::bad_row(key, format!("{} bytes are not a counter", bytes.len()))
        })?),
    };
    Ok(current.wrapping_add(delta))
}

/// The value of a counter row after a bounded addition.
pub(crate) fn add_within(addition: &BoundedAdd, current: Option<&[u8]>) -> Result<i64, KvError> {
    let BoundedAdd { key, delta, max, strict } = addition;
    let value = add(key, current, 0)?;
    match value.checked_add(*delta) {
        Some(sum) if (*delta <= 0 && !strict) || sum <= *max => Ok(sum),
        _ => Err(KvError::OverBound { key: key.clone(), value, delta: *delta, max: *max }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(read_version: u64, key: &str) -> Commit {
        Commit { read_version, read_keys: vec![key.into()], ..Commit::default() }
    }

    #[test]
    fn a_write_after_the_read_conflicts_and_one_before_does_not() {
        let mut resolver = Resolver::new(0, 100);
        resolver.record(5, vec!["a".into()]);
        assert_eq!(resolver.check(&reads(4, "a")), Err(KvError::Conflict));
        assert_eq!(resolver.check(&reads(5, "a")), Ok(()));
        assert_eq!(resolver.check(&reads(4, "b")), Ok(()));
    }

    #[test]
    fn transactions_older_than_the_records_are_refused() {
        let mut resolver = Resolver::new(0, 2);
        for (version, key) in [(1, "a"), (2, "b"), (3, "c")] {
            resolver.record(version, vec![key.into()]);
        }
        assert_eq!(resolver.check(&reads(0, "z")), Err(KvError::TooOld { version: 0 }));
        assert_eq!(resolver.check(&reads(1, "a")), Ok(()));
        assert_eq!(resolver.check(&reads(1, "b")), Err(KvError::Conflict));
    }

    #[test]
    fn a_range_conflicts_with_writes_in_it() {
        let mut resolver = Resolver::new(0, 100);
        resolver.record(7, vec!["c".into()]);
        let scan = |start: &str, end: &str| Commit {
            read_version: 6,
            read_ranges: vec![KeyRange::new(start, end)],
            ..Commit::default()
        };
        assert_eq!(resolver.check(&scan("a", "d")), Err(KvError::Conflict));
        assert_eq!(resolver.check(&scan("a", "c")), Ok(()));
        assert_eq!(resolver.check(&scan("d", "a")), Ok(()));
    }
}
