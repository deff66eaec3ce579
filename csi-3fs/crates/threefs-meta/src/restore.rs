//! Restore of a tree from a dump, such that it can be written safely.
//!
//! Files created after the dump are missing from it, but their chunks may still exist, or storage
//! may refuse their inode numbers as forgotten. So a restored tree allocates numbers far above any
//! that the lost one can have used: inode numbers are never reused, also across restores.

use std::path::Path;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_kv::{DumpError, Dumped, EmbeddedConfig, KvError, Store};
use threefs_mgmtd::Claim;

use crate::ops::{self, OpError};

/// The kind of a dump of metadata.
pub const DUMP_KIND: &str = "meta";
/// Inode numbers skipped by a restore: there is room for sixteen million restores.
const INODES_PASSED_OVER: u64 = 1 << 40;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Loads a dump into a folder without a store.
///
/// # Errors
/// [`DumpError`]; after an error of the store, remove its files and start again.
pub fn restore(store: EmbeddedConfig, file: &Path) -> BoxFuture<'_, Result<Dumped, DumpError>> {
    Box::pin(async move {
        let dumped = threefs_kv::load(&store, DUMP_KIND, file)?;
        mark_restored(&Store::embedded(store)?).await?;
        Ok(dumped)
    })
}

/// Skips inode numbers that the lost tree may have used, and lets mgmtd accept the older tree.
pub(crate) async fn mark_restored(store: &Store) -> Result<(), KvError> {
    let deadline = Deadline::after(TIMEOUT);
    let broken = |error: OpError| match error {
        OpError::Kv(error) => error,
        other => KvError::bad_row(b"", other.to_string()),
    };
    let reserve = ops::ReserveInodes(INODES_PASSED_OVER);
    store.transact(deadline, &reserve).await.map_err(broken)?;
    store.transact(deadline, &ops::WriteClaim(Claim::Restored)).await.map_err(broken)
}
