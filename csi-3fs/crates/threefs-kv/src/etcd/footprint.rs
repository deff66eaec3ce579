//! Keys that the commits in flight read and write: other commits that overlap wait for them. Pure.

use std::collections::BTreeSet;

use super::plan::counters_of;
use crate::{Commit, KeyRange, Mutation};

/// Keys and ranges of several commits. Counters count as written.
#[derive(Debug, Default)]
pub(crate) struct Footprint {
    written: BTreeSet<Vec<u8>>,
    read: BTreeSet<Vec<u8>>,
    cleared: Vec<KeyRange>,
    read_ranges: Vec<KeyRange>,
}

impl Footprint {
    pub(crate) fn add(&mut self, commit: &Commit) {
        self.written.extend(written_keys(commit).cloned());
        self.read.extend(commit.read_keys.iter().cloned());
        self.cleared.extend(cleared_ranges(commit).cloned());
        self.read_ranges.extend(commit.read_ranges.iter().filter(|it| !it.is_empty()).cloned());
    }

    /// Whether the order of a commit and those of the footprint matters.
    pub(crate) fn overlaps(&self, commit: &Commit) -> bool {
        // Most commits overlap in a counter, so counters are compared first.
        counters_of(commit).any(|key| self.written.contains(key))
            || written_keys(commit).any(|key| self.touches(key))
            || commit.read_keys.iter().any(|key| self.writes(key))
            || commit.read_ranges.iter().any(|range| self.writes_in(range))
            || cleared_ranges(commit).any(|range| self.touches_in(range))
    }

    fn writes(&self, key: &[u8]) -> bool {
        self.written.contains(key) || self.cleared.iter().any(|range| range.contains(key))
    }

    fn touches(&self, key: &[u8]) -> bool {
        self.writes(key)
            || self.read.contains(key)
            || self.read_ranges.iter().any(|range| range.contains(key))
    }

    fn writes_in(&self, range: &KeyRange) -> bool {
        !range.is_empty() && (any_in(&self.written, range) || any_overlaps(&self.cleared, range))
    }

    fn touches_in(&self, range: &KeyRange) -> bool {
        self.writes_in(range) || any_in(&self.read, range) || any_overlaps(&self.read_ranges, range)
    }
}

fn any_in(keys: &BTreeSet<Vec<u8>>, range: &KeyRange) -> bool {
    keys.range(range.start.clone()..range.end.clone()).next().is_some()
}

fn any_overlaps(ranges: &[KeyRange], range: &KeyRange) -> bool {
    ranges.iter().any(|other| other.start < range.end && range.start < other.end)
}

fn written_keys(commit: &Commit) -> impl Iterator<Item = &Vec<u8>> {
    let mutated = commit.mutations.iter().filter_map(|mutation| match mutation {
        Mutation::Set { key, .. } | Mutation::Clear { key } | Mutation::Add { key, .. } => {
            Some(key)
        }
        // A row with a stamp is new.
        Mutation::ClearRange { .. } | Mutation::SetStamped { .. } => None,
    });
    mutated.chain(commit.bounded_adds.iter().map(|addition| &addition.key))
}

fn cleared_ranges(commit: &Commit) -> impl Iterator<Item = &KeyRange> {
    commit.mutations.iter().filter_map(|mutation| match mutation {
        Mutation::ClearRange { range } if !range.is_empty() => Some(range),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(reads: &[&str], ranges: &[(&str, &str)], mutations: Vec<Mutation>) -> Commit {
        Commit {
            read_keys: reads.iter().map(|key| key.as_bytes().to_vec()).collect(),
            read_ranges: ranges.iter().map(|(start, end)| KeyRange::new(*start, *end)).collect(),
            mutations,
            ..Commit::default()
        }
    }

    fn set(key: &str) -> Mutation {
        Mutation::Set { key: key.into(), value: Vec::new() }
    }

    fn clear(start: &str, end: &str) -> Mutation {
        Mutation::ClearRange { range: KeyRange::new(start, end) }
    }

    fn add(key: &str) -> Mutation {
        Mutation::Add { key: key.into(), delta: 1 }
    }

    #[test]
    fn a_write_overlaps_with_reads_and_writes_but_reads_do_not_overlap() {
        let commits = [
            ("read", commit(&["b"], &[], Vec::new())),
            ("range", commit(&[], &[("a", "c")], Vec::new())),
            ("set", commit(&[], &[], vec![set("b")])),
            ("clear", commit(&[], &[], vec![clear("a", "c")])),
            ("add", commit(&[], &[], vec![add("b")])),
        ];
        for (first, in_flight) in &commits {
            let mut footprint = Footprint::default();
            footprint.add(in_flight);
            for (second, commit) in &commits {
                let reads = ["read", "range"];
                let expected = !(reads.contains(first) && reads.contains(second));
                assert_eq!(footprint.overlaps(commit), expected, "{first} {second}");
            }
            let elsewhere =
                commit(&["x"], &[("x", "z")], vec![set("y"), clear("d", "e"), add("w")]);
            assert!(!footprint.overlaps(&elsewhere), "{first}");
        }
    }
}
