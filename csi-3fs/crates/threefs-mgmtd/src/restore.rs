//! Restore of mgmtd's store from a backup, such that no acknowledged data is lost
//! (`threefs_core::membership`).

use std::path::Path;
use std::time::Duration;

use fabric::BoxFuture;
use fabric::deadline::Deadline;
use threefs_core::ids::RoutingVersion;
use threefs_kv::{Amendment, DumpError, Dumped, KvError, Report, Row, Store, StoreConfig, Values};

use crate::ops::{MarkRestored, OpError};
use crate::rows::{RESTORED, ROUTING, decode};

/// The kind of a dump of mgmtd.
pub const DUMP_KIND: &str = "mgmtd";
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
    let amendment = Amendment { keys: &[ROUTING], rows: &restored_rows };
    Box::pin(threefs_kv::load(store, DUMP_KIND, file, amendment, report))
}

/// The rows that [`MarkRestored`] writes.
fn restored_rows(dumped: &Values) -> Result<Vec<Row>, KvError> {
    let version = dumped.get(ROUTING).map(|value| decode::<RoutingVersion>(ROUTING, value));
    let version = version.transpose()?.unwrap_or_default().next_era();
    let encoded = |key: &[u8], value: Result<Vec<u8>, postcard::Error>| {
        let value = value.map_err(|error| KvError::bad_row(key, error.to_string()))?;
        Ok((key.to_vec(), value))
    };
    Ok(vec![
        encoded(ROUTING, postcard::to_allocvec(&version))?,
        encoded(RESTORED, postcard::to_allocvec(&true))?,
    ])
}

/// Marks a store that an operator has accepted as restored.
pub(crate) async fn mark_restored(store: &Store) -> Result<(), KvError> {
    let mark = MarkRestored { seen: RoutingVersion(0), fence: None };
    store.transact(Deadline::after(TIMEOUT), &mark).await.map_err(|error| match error {
        OpError::Kv(error) => error,
        fenced => KvError::bad_row(RESTORED, fenced.to_string()),
    })
}
