//! Background work of a metadata service: garbage collection, recounts of files and expiry of the
//! trash by one service, and what services over one store exchange for it.

pub(crate) mod activity;
pub(crate) mod gc;
pub(crate) mod holds;
pub(crate) mod locks;
pub(crate) mod recount;
pub(crate) mod services;
pub(crate) mod snapshots;
pub(crate) mod trash;

use std::time::Duration;

use fabric::deadline::Deadline;

/// Timeout of one transaction.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5);

fn transaction() -> Deadline {
    Deadline::after(TRANSACTION_TIMEOUT)
}
