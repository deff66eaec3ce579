//! Versions of the rows that a snapshot has returned, against which a commit is checked.

use std::sync::{Mutex, PoisonError};

use crate::Seen;

/// The versions that the reads of one snapshot have returned so far.
#[derive(Default)]
pub(crate) struct SeenRows(Mutex<Seen>);

impl SeenRows {
    /// Records a read by key, which returned a row with its version, or none.
    pub(crate) fn row<T>(&self, key: &[u8], row: Option<(T, u64)>) -> Option<T> {
        let (value, version) = row.unzip();
        self.rows([(key.to_vec(), version.unwrap_or(0))]);
        value
    }

    /// Records returned rows with their versions.
    pub(crate) fn rows(&self, rows: impl IntoIterator<Item = (Vec<u8>, u64)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(rows);
    }

    pub(crate) fn into_inner(self) -> Seen {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
