//! Restore of a tree from a dump, such that it can be written safely.
//!
//! Files created after the dump are missing from it, but their chunks may still exist, or storage
//! may refuse their inode numbers as forgotten. So a restored tree allocates numbers far above any
//! that the lost one can have used: inode numbers are never reused, also across restores.

use std::path::Path;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_kv::{Amendment, DumpError, Dumped, KvError, Report, Row, Store, StoreConfig, Values};
use threefs_mgmtd::Claim;

use crate::ops::{self, OpError};
use crate::protocol::ROOT;
use crate::rows::{CLAIM, NEXT_INODE, decode};

/// The kind of a dump of metadata.
pub const DUMP_KIND: &str = "meta";
/// Inode numbers skipped by a restore: there is room for sixteen million restores.
const INODES_PASSED_OVER: u64 = 1 << 40;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Loads a dump into an empty store, marked as restored.
///
/// # Errors
/// [`DumpError`]; no service serves the store then.
pub fn restore<'a>(
    store: &'a StoreConfig,
    file: &'a Path,
    report: Report<'a>,
) -> BoxFuture<'a, Result<Dumped, DumpError>> {
    // Rows of the load itself: after an interruption no service serves the store without them.
    let amendment = Amendment { keys: &[NEXT_INODE], rows: &restored_rows };
    Box::pin(threefs_kv::load(store, DUMP_KIND, file, amendment, report))
}

/// The rows that [`mark_restored`] writes.
fn restored_rows(dumped: &Values) -> Result<Vec<Row>, KvError> {
    let next = dumped.get(NEXT_INODE).map(|value| decode::<u64>(NEXT_INODE, value)).transpose()?;
    let next = next.unwrap_or(ROOT.0 + 1) + INODES_PASSED_OVER;
    let encoded = |key: &[u8], value: Result<Vec<u8>, postcard::Error>| {
        let value = value.map_err(|error| KvError::bad_row(key, error.to_string()))?;
        Ok((key.to_vec(), value))
    };
    Ok(vec![
        encoded(NEXT_INODE, postcard::to_allocvec(&next))?,
        encoded(CLAIM, postcard::to_allocvec(&Claim::Restored))?,
    ])
}

/// Skips inode numbers that the lost tree may have used, ends all lock sessions, and lets mgmtd accept
/// the older tree.
pub(crate) async fn mark_restored(store: &Store) -> Result<(), KvError> {
    let deadline = Deadline::after(TIMEOUT);
    let broken = |error: OpError| match error {
        OpError::Kv(error) => error,
        other => KvError::bad_row(b"", other.to_string()),
    };
    let reserve = ops::ReserveInodes(INODES_PASSED_OVER);
    store.transact(deadline, &reserve).await.map_err(broken)?;
    // Their locks may have been released, and granted to others, after the dump.
    store.transact(deadline, &ops::locks::ForgetLocks).await.map_err(broken)?;
    store.transact(deadline, &ops::WriteClaim(Claim::Restored)).await.map_err(broken)
}
