//! Guards: the conditions under which a commit may be applied, and the commits that violate them.
//! Pure.

use std::collections::BTreeMap;

use crate::{Commit, KeyRange, KvError};

/// A condition of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Guard {
    /// The row was last written at this revision; 0: it is absent. A comparison with the revision
    /// of the snapshot alone would miss a removal.
    Row { key: Vec<u8>, revision: u64 },
    /// No row of the range was written after this revision. Removals are found by the guards of
    /// the rows that were returned.
    Range { range: KeyRange, revision: u64 },
}

/// State of the store that the reply to a refused request returns for one guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Observed {
    /// Revision of the row, 0 if it is absent, and its value.
    Row { revision: u64, value: Vec<u8> },
    /// Whether a row of the range was written after the revision.
    Range { written: bool },
}

impl Guard {
    /// Whether the state satisfies the condition.
    pub(crate) fn holds(&self, observed: &Observed) -> bool {
        match (self, observed) {
            (Self::Row { revision, .. }, Observed::Row { revision: now, .. }) => revision == now,
            (Self::Range { .. }, Observed::Range { written }) => !written,
            _ => false,
        }
    }

    /// Approximate bytes in a request, with its part of the reply to a refused one.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Row { key, .. } => 2 * key.len() + 64,
            Self::Range { range, .. } => 2 * (range.start.len() + range.end.len()) + 64,
        }
    }
}

/// The guards of a commit: what it has read is unchanged.
///
/// # Errors
/// A read that is not in [`Commit::seen`]: an error of a wrapper of the snapshot.
pub(crate) fn guards_of(commit: &Commit) -> Result<Vec<Guard>, KvError> {
    let mut rows: BTreeMap<&[u8], u64> = BTreeMap::new();
    for key in &commit.read_keys {
        let revision = commit.seen.get(key).ok_or_else(|| {
            KvError::bad_row(key, "it was read, but its revision is not in `Commit::seen`")
        })?;
        rows.insert(key, *revision);
    }
    let mut guards = Vec::new();
    for range in commit.read_ranges.iter().filter(|range| !range.is_empty()) {
        let seen = commit.seen.range(range.start.clone()..range.end.clone());
        rows.extend(seen.filter(|(_, revision)| **revision != 0).map(|(k, r)| (&k[..], *r)));
        guards.push(Guard::Range { range: range.clone(), revision: commit.read_version });
    }
    let rows = rows.into_iter().map(|(key, revision)| Guard::Row { key: key.to_vec(), revision });
    guards.extend(rows);
    Ok(guards)
}
