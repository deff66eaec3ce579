//! Restore of a tree from a dump, such that it can be written safely.
//!
//! Files created after the dump are missing from it, but their chunks may still exist, or storage
//! may refuse their inode numbers as forgotten. So a restored tree allocates numbers far above any
//! that the lost one can have used: inode numbers are never reused, also across restores.

use std::path::Path;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_kv::{DumpError, Dumped, EmbeddedConfig, Store};
use threefs_mgmtd::Claim;

use crate::ops;

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
        let (path, store) = (store.path.display().to_string(), Store::embedded(store)?);
        let reserve = ops::ReserveInodes(INODES_PASSED_OVER);
        store.transact(Deadline::after(TIMEOUT), &reserve).await.map_err(|error| {
            threefs_kv::KvError::Broken { store: path.clone(), detail: error.to_string() }
        })?;
        store
            .transact(Deadline::after(TIMEOUT), &ops::WriteClaim(Claim::Restored))
            .await
            .map_err(|error| threefs_kv::KvError::Broken { store: path, detail: error.to_string() })?;
        Ok(dumped)
    })
}
