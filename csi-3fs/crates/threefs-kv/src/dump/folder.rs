//! Rows of an embedded store: another process reads an LMDB snapshot while the service writes, and
//! a load fills a temporary folder, which is renamed into place.

use std::ops::Bound;
use std::path::{Path, PathBuf};

use heed::types::Bytes;
use heed::{CommitOrAbort, Env, EnvOpenOptions, WithoutTls};

use super::{Draft, DumpError, Dumped, REPORT_ROWS, Report};
use crate::embedded::{RESERVED_KEYS_END, Rows, open_rows};
use crate::folder::{LOADING, Ownership, ROWS_FILE, check_exists, sync_folder, take_ownership};
use crate::{EmbeddedConfig, KvError, Row};

/// Rows per transaction of a load.
const BATCH_ROWS: usize = 10_000;
/// Bytes per transaction of a load, which are in memory until it is written.
const BATCH_BYTES: usize = 8 << 20;

/// Writes all rows of one snapshot.
pub(super) fn dump(
    store: &EmbeddedConfig,
    kind: &str,
    draft: &Path,
    report: Report<'_>,
) -> Result<Dumped, DumpError> {
    let broken = |detail: String| KvError::broken(&store.path, detail);
    check_exists(&store.path)?;
    let mut options = EnvOpenOptions::new().read_txn_without_tls();
    options.map_size(store.map_bytes_max);
    // SAFETY: LMDB's own lock file arbitrates between this reader and the service that writes; the
    // files are changed through LMDB alone, and this environment only reads.
    let env = unsafe { options.open(&store.path) }.map_err(|error| broken(error.to_string()))?;
    let rows = find_rows(&env).map_err(|error| broken(error.to_string()))?;
    let rows = rows.ok_or_else(|| broken("the store has no rows".into()))?;
    let txn = env.read_txn().map_err(|error| broken(error.to_string()))?;
    let total = rows.len(&txn).map_err(|error| broken(error.to_string()))?;
    let mut out = Draft::create(draft, kind)?;
    let bounds = (Bound::Included(RESERVED_KEYS_END), Bound::Unbounded);
    for row in rows.range(&txn, &bounds).map_err(|error| broken(error.to_string()))? {
        let (key, value) = row.map_err(|error| broken(error.to_string()))?;
        out.row(key, value)?;
        if out.rows().is_multiple_of(REPORT_ROWS) && !report(out.rows(), total) {
            return Err(DumpError::Stopped);
        }
    }
    out.finish()
}

fn find_rows(env: &Env<WithoutTls>) -> Result<Option<Rows>, heed::Error> {
    let database = env.open_databases_and_commit(env.read_txn()?, |opener, txn| {
        let database = opener.open_database::<Bytes, Bytes>(txn, None)?;
        Ok::<_, heed::Error>(database.map_or(CommitOrAbort::Abort(()), CommitOrAbort::Commit))
    })?;
    match database {
        CommitOrAbort::Commit(rows) => Ok(Some(rows)),
        CommitOrAbort::Abort(()) => Ok(None),
    }
}

/// A folder that is being filled.
pub(super) struct FolderTarget {
    path: PathBuf,
    draft: PathBuf,
    env: Env<WithoutTls>,
    rows: Rows,
    pending: Vec<Row>,
    pending_bytes: usize,
    _owner: Ownership,
}

impl FolderTarget {
    /// Refuses a folder with a store.
    pub(super) fn check_empty(store: &EmbeddedConfig) -> Result<(), DumpError> {
        match store.path.join(ROWS_FILE).exists() {
            true => Err(DumpError::Occupied(store.path.clone())),
            false => Ok(()),
        }
    }

    /// Creates the temporary folder. The rest of an interrupted load is removed.
    pub(super) fn start(store: &EmbeddedConfig) -> Result<Self, DumpError> {
        let broken = |error: heed::Error| KvError::broken(&store.path, error);
        let draft = store.path.join(LOADING);
        let file_error = |source| DumpError::File { path: draft.clone(), source };
        std::fs::create_dir_all(&store.path).map_err(file_error)?;
        let owner = take_ownership(&store.path)?;
        Self::check_empty(store)?;
        if draft.exists() {
            std::fs::remove_dir_all(&draft).map_err(file_error)?;
        }
        std::fs::create_dir(&draft).map_err(file_error)?;
        sync_folder(&store.path).map_err(file_error)?;
        let mut options = EnvOpenOptions::new().read_txn_without_tls();
        options.map_size(store.map_bytes_max);
        // SAFETY: this folder was created above, under the lock of its parent folder.
        let env = unsafe { options.open(&draft) }.map_err(broken)?;
        let rows = open_rows(&env).map_err(broken)?;
        let path = store.path.clone();
        Ok(Self { path, draft, env, rows, pending: Vec::new(), pending_bytes: 0, _owner: owner })
    }

    /// Writes a row.
    pub(super) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), DumpError> {
        self.pending_bytes += key.len() + value.len();
        self.pending.push((key, value));
        match self.pending.len() >= BATCH_ROWS || self.pending_bytes >= BATCH_BYTES {
            true => self.flush(),
            false => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), DumpError> {
        let written = self.env.write_txn().and_then(|mut txn| {
            for (key, value) in &self.pending {
                self.rows.put(&mut txn, key, value)?;
            }
            txn.commit()
        });
        written.map_err(|error| KvError::broken(&self.path, error))?;
        self.pending.clear();
        self.pending_bytes = 0;
        Ok(())
    }

    /// Moves the complete store into place.
    pub(super) fn finish(mut self) -> Result<(), DumpError> {
        self.flush()?;
        let Self { path, draft, env, .. } = self;
        let file_error = |source| DumpError::File { path: draft.clone(), source };
        env.prepare_for_closing().wait();
        std::fs::rename(draft.join(ROWS_FILE), path.join(ROWS_FILE)).map_err(file_error)?;
        std::fs::remove_dir_all(&draft).map_err(file_error)?;
        sync_folder(&path).map_err(file_error)
    }
}
