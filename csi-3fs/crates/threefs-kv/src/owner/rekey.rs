//! Replacement of the owner of a store by an operator, while the services of the store are stopped.

use fabric::deadline::Deadline;

use super::row::{self, Fingerprints};
use super::{OWNER_ROW, Owner, TIMEOUT};
use crate::folder::check_exists;
use crate::{KvError, Operation, Store, StoreConfig, Transaction, etcd, postgres};

/// Owners of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rekeyed {
    /// Fingerprints of the former owner; none if the row was absent or invalid.
    pub before: Fingerprints,
    /// Fingerprints of the new one.
    pub after: Fingerprints,
}

/// Makes the keys of `owner` the owner of a store that has rows.
///
/// # Errors
/// The store has no rows, or cannot be opened or written.
pub async fn rekey(config: StoreConfig, owner: &Owner) -> Result<Rekeyed, KvError> {
    match &config {
        StoreConfig::Embedded(config) => check_exists(&config.path)?,
        // Opening a store writes rows of the backend, also under a mistyped prefix.
        StoreConfig::Etcd(config) => drop(etcd::DumpSource::connect(config).await?.start().await?),
        StoreConfig::Postgres(config) => drop(postgres::DumpSource::start(config).await?),
    }
    let store = Store::open(config).await?;
    store.transact(Deadline::after(TIMEOUT), &Rekey(owner.current())).await
}

struct Rekey(Fingerprints);

impl Operation for Rekey {
    type Output = Rekeyed;
    type Error = KvError;

    async fn run(&self, txn: &mut Transaction) -> Result<Rekeyed, KvError> {
        let before = txn.get(OWNER_ROW).await?;
        let before = before.and_then(|row| row::decode(&row).ok()).unwrap_or_default();
        txn.set(OWNER_ROW, row::encode(&self.0));
        Ok(Rekeyed { before, after: self.0.clone() })
    }
}
