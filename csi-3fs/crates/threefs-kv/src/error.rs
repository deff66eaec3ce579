//! Why a transaction did not do what it was asked.

use std::path::PathBuf;

/// An error of a store. Cloned to every transaction of a batch that failed together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// Something that it read has been written since. Run it again.
    #[error("the transaction conflicts with another; run it again")]
    Conflict,
    /// Its snapshot is too old to be checked. Run it again.
    #[error("the transaction is too old (version {version}); run it again")]
    TooOld {
        /// Its read version.
        version: u64,
    },
    /// The disk or the store's map is full. Nothing of it was written.
    #[error("no space in the store at `{path}`: {detail}; free space or enlarge `map_bytes_max`")]
    NoSpace {
        /// The store's folder.
        path: PathBuf,
        /// What the store said.
        detail: String,
    },
    /// A key, a value or the whole transaction is over its bound. Nothing of it was written.
    #[error("{what} of {size} is over the bound of {size_max}")]
    TooLarge {
        /// `key`, `value`, `transaction` or `mutations`.
        what: &'static str,
        /// Bytes, or a count for `mutations`.
        size: usize,
        /// The bound.
        size_max: usize,
    },
    /// A counter would grow past its bound. Nothing of it was written.
    #[error("counter {key} is {value}: {delta} more would pass its bound of {max}", key = key.escape_ascii())]
    OverBound {
        /// The counter's key.
        key: Vec<u8>,
        /// What it holds.
        value: i64,
        /// What was to be added.
        delta: i64,
        /// The bound.
        max: i64,
    },
    /// It may have been committed or not: the store failed meanwhile. Whoever retries recognises
    /// its own former success by what it wrote.
    #[error("it is unknown whether the transaction was committed: {detail}")]
    CommitUnknown {
        /// What the store said.
        detail: String,
    },
    /// The store cannot be opened or read.
    #[error("store at `{path}`: {detail}")]
    Broken {
        /// The store's folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        detail: String,
    },
    /// A row does not hold what its key promises.
    #[error("row {key}: {detail}")]
    BadRow {
        /// The key, escaped.
        key: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The deadline passed before the transaction succeeded. The last attempt had failed with
    /// `last`, so nothing was written.
    #[error("no success before the deadline, after {attempts} attempts; the last: {last}")]
    DeadlinePassed {
        /// How often it was run.
        attempts: u32,
        /// Why the last attempt failed.
        last: String,
    },
}

impl KvError {
    /// True when the same transaction, run again from the start, may succeed, and certainly had no
    /// effect this time.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Conflict | Self::TooOld { .. })
    }

    /// A row that cannot be understood.
    pub fn bad_row(key: &[u8], detail: impl Into<String>) -> Self {
        Self::BadRow { key: key.escape_ascii().to_string(), detail: detail.into() }
    }
}
