//! Replacement of the owner of a store by an operator, while the services of the store are stopped.

use crate::config::StoreConfig;
use crate::folder::check_exists;
use crate::owner::{Owner, Rekeyed};
use crate::{KvError, Store, etcd, postgres};

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
    owner.replace(&store).await
}
