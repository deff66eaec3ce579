//! Writes of several commits, folded to one outcome per row. Pure.
//!
//! etcd refuses a transaction that writes a key twice or puts a key inside a deleted range, so a
//! cleared range is cut around the rows that are written later.

use std::collections::BTreeMap;

use crate::KeyRange;

/// One write of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    Put { key: Vec<u8>, value: Vec<u8> },
    Delete { key: Vec<u8> },
    DeleteRange { range: KeyRange },
}

/// The outcomes of writes: rows in `cleared` are absent, except those in `outcomes`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer {
    outcomes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    cleared: Vec<KeyRange>,
}

impl Layer {
    /// Writes a row, or removes it.
    pub(crate) fn write(&mut self, key: Vec<u8>, value: Option<Vec<u8>>) {
        self.outcomes.insert(key, value);
    }

    /// Removes all rows of a range.
    pub(crate) fn clear(&mut self, range: KeyRange) {
        if range.is_empty() {
            return;
        }
        self.outcomes.retain(|key, _| !range.contains(key));
        self.cleared.push(range);
    }

    /// The outcome of a row, if it is written.
    pub(crate) fn find(&self, key: &[u8]) -> Option<Option<&[u8]>> {
        match self.outcomes.get(key) {
            Some(outcome) => Some(outcome.as_deref()),
            None => self.cleared.iter().any(|range| range.contains(key)).then_some(None),
        }
    }

    /// Whether a row of the range is written.
    pub(crate) fn overlaps(&self, range: &KeyRange) -> bool {
        if range.is_empty() {
            return false;
        }
        let cleared = |cleared: &KeyRange| cleared.start < range.end && range.start < cleared.end;
        self.cleared.iter().any(cleared)
            || self.outcomes.range(range.start.clone()..range.end.clone()).next().is_some()
    }

    /// Adds later writes.
    pub(crate) fn append(&mut self, later: Self) {
        for range in later.cleared {
            self.clear(range);
        }
        self.outcomes.extend(later.outcomes);
    }

    /// The written rows; `None` is a removal.
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&Vec<u8>, &Option<Vec<u8>>)> {
        self.outcomes.iter()
    }

    /// The cleared ranges.
    pub(crate) fn cleared(&self) -> &[KeyRange] {
        &self.cleared
    }

    /// The writes of a request: disjoint, in key order.
    pub(crate) fn into_writes(self) -> Vec<Write> {
        let Self { outcomes, mut cleared } = self;
        let mut writes = Vec::with_capacity(outcomes.len() + cleared.len());
        cleared.sort_by(|a, b| a.start.cmp(&b.start));
        let mut merged: Vec<KeyRange> = Vec::new();
        for range in cleared {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = range.end.max(last.end.clone()),
                _ => merged.push(range),
            }
        }
        for mut range in merged {
            let puts = outcomes.range(range.start.clone()..range.end.clone());
            for (key, _) in puts.filter(|(_, value)| value.is_some()) {
                let before = KeyRange::new(range.start.clone(), key.clone());
                if !before.is_empty() {
                    writes.push(Write::DeleteRange { range: before });
                }
                range = range.after(key);
            }
            if !range.is_empty() {
                writes.push(Write::DeleteRange { range });
            }
        }
        let deleted = writes.len();
        for (key, value) in outcomes {
            match value {
                Some(value) => writes.push(Write::Put { key, value }),
                None if contains(&writes[..deleted], &key) => {}
                None => writes.push(Write::Delete { key }),
            }
        }
        writes
    }
}

fn contains(ranges: &[Write], key: &[u8]) -> bool {
    ranges.iter().any(|write| matches!(write, Write::DeleteRange { range } if range.contains(key)))
}
