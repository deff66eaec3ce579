//! Interface of a store. Transactions, their write buffers and their retries are common to all
//! stores.

use std::collections::BTreeMap;

use fabric::BoxFuture;

use crate::{COMMIT_BYTES_MAX, KEY_BYTES_MAX, KvError, MUTATIONS_MAX, VALUE_BYTES_MAX, Watch};

/// A key and its value.
pub type Row = (Vec<u8>, Vec<u8>);

/// Position of a commit in the total order: version (8 bytes) and order within it (2), big endian,
/// so that byte order is commit order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Versionstamp(pub [u8; 10]);

impl Versionstamp {
    /// From version and order.
    pub fn new(version: u64, order: u16) -> Self {
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&version.to_be_bytes());
        bytes[8..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// The version of the commit: snapshots of this version and later see it.
    pub fn version(&self) -> u64 {
        let mut version = [0; 8];
        version.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(version)
    }
}

/// Keys from `start` up to `end`, exclusive.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyRange {
    /// The first key.
    pub start: Vec<u8>,
    /// The first key after the range.
    pub end: Vec<u8>,
}

impl KeyRange {
    /// From `start` up to `end`, exclusive.
    pub fn new(start: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) -> Self {
        Self { start: start.into(), end: end.into() }
    }

    /// All keys with `prefix`, which must not be all 0xff.
    pub fn prefix(prefix: &[u8]) -> Self {
        let mut end = prefix.to_vec();
        while end.last() == Some(&0xff) {
            end.pop();
        }
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Self { start: prefix.to_vec(), end }
    }

    /// The part of the range after `key`.
    pub fn after(mut self, key: &[u8]) -> Self {
        self.start = key.to_vec();
        self.start.push(0);
        self
    }

    /// Whether a key is in the range.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.start.as_slice() <= key && key < self.end.as_slice()
    }

    /// Whether the range contains no key.
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }
}

/// One change. A transaction's changes are applied in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Writes a row.
    Set {
        /// Its key.
        key: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
    },
    /// Removes a row, if it exists.
    Clear {
        /// Its key.
        key: Vec<u8>,
    },
    /// Removes all rows of a range.
    ClearRange {
        /// The range.
        range: KeyRange,
    },
    /// Adds to a row with an `i64` (little endian; a missing row is 0) without reading it: such
    /// additions do not conflict with each other.
    Add {
        /// Its key.
        key: Vec<u8>,
        /// The value to add; wraps.
        delta: i64,
    },
    /// Writes a row whose key is `prefix`, a [`Versionstamp`], `suffix`. The stamp in the key is
    /// unique, increases with the commits of one process, and is not above the commit's own.
    SetStamped {
        /// Key part before the stamp.
        prefix: Vec<u8>,
        /// Key part after the stamp.
        suffix: Vec<u8>,
        /// The row's value.
        value: Vec<u8>,
    },
}

/// A bounded addition to a counter row (an `i64`, little endian; a missing row is 0). Checked and
/// applied by the commit itself, after the mutations: such additions do not conflict with each
/// other, and no race lets a counter exceed its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundedAdd {
    /// Its key, which is written by bounded additions and clears only.
    pub key: Vec<u8>,
    /// The value to add. Additions that do not increase the counter are allowed unless `strict`.
    pub delta: i64,
    /// The bound of the counter.
    pub max: i64,
    /// The bound must hold although the counter is not increased.
    pub strict: bool,
}

impl BoundedAdd {
    /// Whether it changes the row, or only checks it.
    pub(crate) fn writes(&self) -> bool {
        self.delta != 0 || !self.strict
    }
}

/// A transaction to be committed.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    /// The version of its snapshot.
    pub read_version: u64,
    /// Keys that must not have been written since.
    pub read_keys: Vec<Vec<u8>>,
    /// Ranges that must not have been written since.
    pub read_ranges: Vec<KeyRange>,
    /// What the snapshot has returned; see [`Snapshot::into_seen`].
    pub seen: Seen,
    /// The changes.
    pub mutations: Vec<Mutation>,
    /// At most one per key.
    pub bounded_adds: Vec<BoundedAdd>,
}

/// Versions at which rows were last written, by key; 0: the row is absent.
pub type Seen = BTreeMap<Vec<u8>, u64>;

/// A consistent view of the store at one version.
pub trait Snapshot: Send + Sync {
    /// The last visible version.
    fn version(&self) -> u64;
    /// A row's value.
    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>>;
    /// At most `limit` rows in key order.
    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>>;
    /// The version of every row that was read, for stores that check a commit against these. Empty
    /// for stores that record the writes instead.
    fn into_seen(self: Box<Self>) -> Seen;
}

/// Bounds of one transaction. Larger ones are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of a key.
    pub key_bytes: usize,
    /// Maximum size of a value.
    pub value_bytes: usize,
    /// Maximum size of all keys and values that are written.
    pub commit_bytes: usize,
    /// Maximum number of mutations.
    pub mutations: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key_bytes: KEY_BYTES_MAX,
            value_bytes: VALUE_BYTES_MAX,
            commit_bytes: COMMIT_BYTES_MAX,
            mutations: MUTATIONS_MAX,
        }
    }
}

/// Space usage of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes used by rows.
    pub used_bytes: u64,
    /// Maximum size: the configured limit or the disk space, whichever is less.
    pub max_bytes: u64,
}

impl Room {
    /// Whether the remaining space must be kept for removals, which need space before they free
    /// any: a completely full store cannot remove rows.
    pub fn is_low(&self) -> bool {
        self.used_bytes >= self.max_bytes - self.max_bytes / 10
    }
}

/// A store.
pub trait Backend: Send + Sync + 'static {
    /// A snapshot of the newest committed state.
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>>;
    /// Checks for conflicts, applies the changes and makes them durable, atomically.
    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>>;
    /// Bounds of a transaction.
    fn limits(&self) -> Limits {
        Limits::default()
    }
    /// Starts to watch a key.
    fn watch(&self, key: &[u8]) -> Watch;
    /// Space usage of the store, if it is bounded.
    ///
    /// # Errors
    /// The usage cannot be read.
    fn room(&self) -> Result<Option<Room>, KvError> {
        Ok(None)
    }
    /// Id of this opening of the store, if no other process can have it open at the same time.
    fn exclusive_opening(&self) -> Option<u128>;
}

#[cfg(test)]
mod tests {
    use super::KeyRange;

    #[test]
    fn a_prefix_covers_exactly_its_keys() {
        let range = KeyRange::prefix(&[1, 0xff, 0xff]);
        assert_eq!(range.end, [2]);
        assert!(range.contains(&[1, 0xff, 0xff, 9]) && !range.contains(&[2]));
        assert!(KeyRange::new("b", "a").is_empty());
    }
}
