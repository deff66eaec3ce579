//! What a store must offer. Transactions, their buffers and their retries are common to all.

use fabric::BoxFuture;

use crate::{KvError, Watch};

/// A key and its value.
pub type Row = (Vec<u8>, Vec<u8>);

/// Where a commit stands in the order of all commits: version (8 bytes) and place within it (2),
/// big endian, so that bytes compare as commits follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Versionstamp(pub [u8; 10]);

impl Versionstamp {
    /// From its parts.
    pub fn new(version: u64, order: u16) -> Self {
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&version.to_be_bytes());
        bytes[8..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// The commit's version: snapshots of this version and later see it.
    pub fn version(&self) -> u64 {
        let mut version = [0; 8];
        version.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(version)
    }
}

/// Keys from `start` on and before `end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub start: Vec<u8>,
    /// The first key that is not meant any more.
    pub end: Vec<u8>,
}

impl KeyRange {
    /// From `start` on and before `end`.
    pub fn new(start: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) -> Self {
        Self { start: start.into(), end: end.into() }
    }

    /// All keys that begin with `prefix`, which must not be all 0xff.
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

    /// The same range from the key after `key` on.
    pub fn after(mut self, key: &[u8]) -> Self {
        self.start = key.to_vec();
        self.start.push(0);
        self
    }

    /// Whether a key lies in it.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.start.as_slice() <= key && key < self.end.as_slice()
    }

    /// True when no key can lie in it.
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }
}

/// One change. A transaction's changes are applied in the order in which it made them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Writes a row.
    Set {
        /// Its key.
        key: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
    },
    /// Removes a row, if there is one.
    Clear {
        /// Its key.
        key: Vec<u8>,
    },
    /// Removes all rows of a range.
    ClearRange {
        /// The range.
        range: KeyRange,
    },
    /// Adds to a row that holds an `i64` (little endian; a missing row holds 0), without having
    /// read it: such additions never conflict with each other.
    Add {
        /// Its key.
        key: Vec<u8>,
        /// What to add; wraps.
        delta: i64,
    },
    /// Writes a row whose key is `prefix`, the commit's [`Versionstamp`], `suffix`.
    SetStamped {
        /// Before the stamp.
        prefix: Vec<u8>,
        /// After the stamp.
        suffix: Vec<u8>,
        /// The row's value.
        value: Vec<u8>,
    },
}

/// An addition to a counter row (an `i64`, little endian; a missing row holds 0) that must stay
/// within a bound. Checked and applied by the commit itself, after the mutations: such additions
/// never conflict with each other, and no race lets a counter pass its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundedAdd {
    /// Its key. Only such additions write it, and clears.
    pub key: Vec<u8>,
    /// What to add. What does not grow a counter is always allowed.
    pub delta: i64,
    /// The largest value that the row may grow to.
    pub max: i64,
}

/// A finished transaction on its way into the store.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    /// The version of the snapshot that it read.
    pub read_version: u64,
    /// Keys that must not have been written since.
    pub read_keys: Vec<Vec<u8>>,
    /// Ranges in which nothing must have been written since.
    pub read_ranges: Vec<KeyRange>,
    /// Keys that count as written for others, besides those of the mutations.
    pub write_keys: Vec<Vec<u8>>,
    /// What to change.
    pub mutations: Vec<Mutation>,
    /// At most one for a key.
    pub bounded_adds: Vec<BoundedAdd>,
}

/// A consistent view of the whole store at one version.
pub trait Snapshot: Send + Sync {
    /// The last version that it sees.
    fn version(&self) -> u64;
    /// A row's value.
    fn get<'a>(&'a self, key: &'a [u8]) -> BoxFuture<'a, Result<Option<Vec<u8>>, KvError>>;
    /// At most `limit` rows in the order of their keys.
    fn range<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
    ) -> BoxFuture<'a, Result<Vec<Row>, KvError>>;
}

/// How full a store is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that rows take.
    pub used_bytes: u64,
    /// The most that they can: by the store's configuration and by the disk that it is on.
    pub max_bytes: u64,
}

impl Room {
    /// Whether what is left must be kept for removals, which take room before they give any: a
    /// store that is full to the last page cannot even remove.
    pub fn is_low(&self) -> bool {
        self.used_bytes >= self.max_bytes - self.max_bytes / 10
    }
}

/// A store.
pub trait Backend: Send + Sync + 'static {
    /// The newest committed state.
    fn snapshot(&self) -> BoxFuture<'_, Result<Box<dyn Snapshot>, KvError>>;
    /// Checks for conflicts, applies and makes durable, all or nothing.
    fn commit(&self, commit: Commit) -> BoxFuture<'_, Result<Versionstamp, KvError>>;
    /// Begins to watch a key.
    fn watch(&self, key: &[u8]) -> Watch;
    /// How full the store is, if it has a bound of its own.
    ///
    /// # Errors
    /// When that cannot be read.
    fn room(&self) -> Result<Option<Room>, KvError> {
        Ok(None)
    }
    /// A number of this opening of the store, if no other process can have it open meanwhile.
    fn exclusive_opening(&self) -> Option<u128>;
}
