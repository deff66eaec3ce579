//! Errors of transactions.

use std::path::Path;

use crate::owner_error::OwnerError;

/// An error of a store. Cloned to every transaction of a batch that failed together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// A row that it read has been written since. Repeat it.
    #[error("the transaction conflicts with another; repeat it")]
    Conflict,
    /// Its snapshot is too old for a conflict check. Repeat it.
    #[error("the transaction is too old (version {version}); repeat it")]
    TooOld {
        /// Its read version.
        version: u64,
    },
    /// The store is full. Nothing was written.
    #[error("no space in the store at `{store}`: {detail}")]
    NoSpace {
        /// The store's folder or address.
        store: String,
        /// Error of the store, with a remedy.
        detail: String,
    },
    /// A key, a value or the whole transaction exceeds its limit. Nothing was written.
    #[error("{what} of {size} exceeds the limit of {size_max}")]
    TooLarge {
        /// `key`, `value`, `transaction` or `mutations`.
        what: &'static str,
        /// Bytes, or a count for `mutations`.
        size: usize,
        /// The limit.
        size_max: usize,
    },
    /// A counter would exceed its bound. Nothing was written.
    #[error("counter {key} is {value}: adding {delta} would exceed its bound of {max}", key = key.escape_ascii())]
    OverBound {
        /// The counter's key.
        key: Vec<u8>,
        /// Its value.
        value: i64,
        /// The value to be added.
        delta: i64,
        /// The bound.
        max: i64,
    },
    /// The store has no leader or does not reply. Nothing was written. Repeat it.
    #[error("the store at `{store}` is unavailable, nothing was written: {detail}")]
    Unavailable {
        /// The store's address.
        store: String,
        /// Error of the store.
        detail: String,
    },
    /// The store failed during the commit, which may have succeeded. A retry must recognise the
    /// success of the first attempt by what it wrote.
    #[error("unknown whether the transaction was committed: {detail}")]
    CommitUnknown {
        /// Error of the store.
        detail: String,
    },
    /// The store cannot be opened or read.
    #[error("store at `{store}`: {detail}")]
    Broken {
        /// The store's folder or address.
        store: String,
        /// The failure, with a remedy.
        detail: String,
    },
    /// The value of a row is invalid.
    #[error("row {key}: {detail}")]
    BadRow {
        /// The key, escaped.
        key: String,
        /// The error.
        detail: String,
    },
    /// The store belongs to another cluster.
    #[error(transparent)]
    Owner(Box<OwnerError>),
    /// The deadline passed before the transaction succeeded. The last attempt failed with `last`,
    /// so nothing was written.
    #[error("deadline exceeded after {attempts} attempts; last error: {last}")]
    DeadlinePassed {
        /// Number of attempts.
        attempts: u32,
        /// Error of the last attempt.
        last: String,
    },
}

impl KvError {
    /// Whether a repetition of the transaction may succeed, and this attempt certainly had no
    /// effect.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Conflict | Self::TooOld { .. } | Self::Unavailable { .. })
    }

    /// The error of a store that cannot be used.
    pub(crate) fn broken(store: &Path, detail: impl ToString) -> Self {
        Self::Broken { store: store.display().to_string(), detail: detail.to_string() }
    }

    /// The error for an invalid row.
    pub fn bad_row(key: &[u8], detail: impl Into<String>) -> Self {
        Self::BadRow { key: key.escape_ascii().to_string(), detail: detail.into() }
    }
}
