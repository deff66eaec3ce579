//! Interface of a store. Transactions, their write buffers and their retries are common to all
//! stores.

use fabric::BoxFuture;

use crate::{KvError, Watch};

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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Writes a row whose key is `prefix`, the commit's [`Versionstamp`], `suffix`.
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
    /// The value to add. Additions that do not increase the counter are always allowed.
    pub delta: i64,
    /// The bound of the counter.
    pub max: i64,
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
    /// Keys that count as written, in addition to those of the mutations.
    pub write_keys: Vec<Vec<u8>>,
    /// The changes.
    pub mutations: Vec<Mutation>,
    /// At most one per key.
    pub bounded_adds: Vec<BoundedAdd>,
}

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
