//! Rows that services over one store share: which of them run, which one collects garbage, and the
//! removed files that their clients have open.

use serde::{Deserialize, Serialize};
use threefs_core::ids::{ClientId, InodeId};
use threefs_kv::{KvError, Row, Transaction};

use crate::rows::read;

pub(crate) const SERVICES: &[u8] = b"SERV";
/// Services that know snapshots.
pub(crate) const KNOWING: &[u8] = b"SFUN";
pub(crate) const HOLDS: &[u8] = b"HOLD";
pub(crate) const SEEN: &[u8] = b"SEEN";
pub(crate) const COLLECTOR: &[u8] = b"METAcollector";
pub(crate) const ROUND: &[u8] = b"METAround";

/// A running service. Another service removes the row once it has not changed for a whole lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServiceRow {
    /// Increased by each renewal. Clocks are not compared.
    pub renewal: u64,
    /// The service has stored a hold for each file that its clients have open and that was removed
    /// in a round up to this one. 0 = none.
    pub checked: u64,
    /// Services that were gone since this one started. With each of them, `checked` is reset.
    pub departures: u64,
}

/// The service that collects garbage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CollectorRow {
    /// Increases with every change of the collector; fences former ones.
    pub epoch: u64,
    pub run_id: u64,
}

/// A removed file that clients of a service have open: it is not collected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HoldRow {
    /// If the service is gone, the file waits until each of them has reported its open files or has
    /// expired.
    pub clients: Vec<ClientId>,
}

pub(crate) fn service(run_id: u64) -> Vec<u8> {
    [SERVICES, &run_id.to_be_bytes()].concat()
}

/// Marks a service that knows snapshots.
pub(crate) fn knowing(run_id: u64) -> Vec<u8> {
    [KNOWING, &run_id.to_be_bytes()].concat()
}

pub(crate) fn hold(inode: InodeId, run_id: u64) -> Vec<u8> {
    [HOLDS, &inode.0.to_be_bytes(), &run_id.to_be_bytes()].concat()
}

/// Prefix of all holds of a file.
pub(crate) fn holds(inode: InodeId) -> Vec<u8> {
    [HOLDS, &inode.0.to_be_bytes()].concat()
}

/// The last activity of a client, as published by the service that it uses.
pub(crate) fn seen(client: ClientId) -> Vec<u8> {
    [SEEN, &client.0.to_be_bytes()].concat()
}

/// The run of a service, at the end of a key.
pub(crate) fn run_of_key(key: &[u8]) -> Result<u64, KvError> {
    let bytes = key.last_chunk::<8>();
    bytes
        .map(|bytes| u64::from_be_bytes(*bytes))
        .ok_or_else(|| KvError::bad_row(key, "the key has no run of a service"))
}

/// The first key after a full page.
pub(crate) fn after_page(page: &[Row], limit: usize) -> Option<Vec<u8>> {
    let last = page.last().filter(|_| page.len() == limit);
    last.map(|(key, _)| [key.as_slice(), &[0]].concat())
}

/// The current round of the removal queues.
pub(crate) async fn round(txn: &mut Transaction) -> Result<u64, KvError> {
    Ok(read(txn, ROUND).await?.unwrap_or(1))
}
