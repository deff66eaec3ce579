//! Background work of a metadata service: garbage collection and recounts of files.

pub(crate) mod gc;
pub(crate) mod recount;

use std::time::Duration;

use fabric::deadline::Deadline;

/// Timeout of one transaction.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5);

fn transaction() -> Deadline {
    Deadline::after(TRANSACTION_TIMEOUT)
}
