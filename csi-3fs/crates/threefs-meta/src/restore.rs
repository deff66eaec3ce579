//! A tree from a dump, made safe to write into.
//!
//! Files that were made after the dump are not in it, but their chunks may still exist, or storage
//! may refuse their numbers as forgotten. So a restored tree continues far above any number that the
//! lost one can have used: inode numbers are never used twice, over restores as well.

use std::path::Path;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_kv::{DumpError, Dumped, EmbeddedConfig, Store};
use threefs_mgmtd::Claim;

use crate::ops;

/// The kind of a dump of metadata.
pub const DUMP_KIND: &str = "meta";
/// Numbers that one restore passes over: there is room for sixteen million restores.
const INODES_PASSED_OVER: u64 = 1 << 40;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Makes a store of a dump in a folder that has none.
///
/// # Errors
/// [`DumpError`]; after an error of the store, remove what it holds and begin again.
pub fn restore(store: EmbeddedConfig, file: &Path) -> BoxFuture<'_, Result<Dumped, DumpError>> {
    Box::pin(async move {
        let dumped = threefs_kv::load(&store, DUMP_KIND, file)?;
        let (path, store) = (store.path.clone(), Store::embedded(store)?);
        let passed = ops::ReserveInodes(INODES_PASSED_OVER);
        store.transact(Deadline::after(TIMEOUT), &passed).await.map_err(|error| {
            threefs_kv::KvError::Broken { path: path.clone(), detail: error.to_string() }
        })?;
        store
            .transact(Deadline::after(TIMEOUT), &ops::WriteClaim(Claim::Restored))
            .await
            .map_err(|error| threefs_kv::KvError::Broken { path, detail: error.to_string() })?;
        Ok(dumped)
    })
}
