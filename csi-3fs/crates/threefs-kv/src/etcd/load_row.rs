//! Row of the last load of a dump into a store: whether the store is complete.

use etcd_client::KeyValue;
use serde::{Deserialize, Serialize};

use super::members::Members;
use crate::KvError;

/// Name of the row.
pub(crate) const ROW: &str = "load";
pub(crate) const FORMAT: u32 = 1;

/// The last load into a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoadRow {
    pub format: u32,
    /// Random id of the load.
    pub id: u128,
    pub complete: bool,
}

impl LoadRow {
    pub(crate) fn encode(self) -> Result<Vec<u8>, KvError> {
        postcard::to_allocvec(&self)
            .map_err(|error| KvError::bad_row(ROW.as_bytes(), format!("not encoded: {error}")))
    }

    pub(crate) fn decode(row: &KeyValue) -> Result<Self, KvError> {
        crate::rows::decode(row.key(), row.value())
    }
}

/// Refuses a store that a load has filled partially.
///
/// # Errors
/// [`KvError::Broken`].
pub(crate) fn check_complete(members: &Members, row: &KeyValue) -> Result<(), KvError> {
    let row = LoadRow::decode(row)?;
    if row.format != FORMAT {
        let format = row.format;
        let detail =
            format!("its load has format {format}, this program knows {FORMAT}; update it");
        return Err(members.broken(detail));
    }
    if row.complete {
        return Ok(());
    }
    let detail = "a load of a dump was interrupted or still runs, so rows are missing; repeat it \
                  with the same endpoints and prefix, for example `threefs meta load`";
    Err(members.broken(detail.into()))
}
