//! Floors of clients: changes below are finished.

use threefs_core::ids::ClientId;
use threefs_kv::{KvError, Transaction};

use crate::rows::floor;

/// Raises the floor of a client, which all services share, to a sequence.
pub(crate) async fn raise_floor(
    txn: &mut Transaction,
    client: ClientId,
    sequence: u64,
) -> Result<(), KvError> {
    let key = floor(client);
    let current = match txn.get(&key).await? {
        Some(bytes) => i64::from_le_bytes(
            bytes.try_into().map_err(|_| KvError::bad_row(&key, "not a counter"))?,
        ),
        None => 0,
    };
    let raised = i64::try_from(sequence).unwrap_or(i64::MAX);
    if raised > current {
        txn.bounded_add(&key, raised - current, i64::MAX);
    }
    Ok(())
}

/// Requires that the floor of a client is not above a sequence when the transaction commits. A read
/// would conflict with each change of the client that raises the floor.
pub(crate) fn require_floor(txn: &mut Transaction, client: ClientId, sequence: u64) {
    txn.require_at_most(&floor(client), i64::try_from(sequence).unwrap_or(i64::MAX));
}
