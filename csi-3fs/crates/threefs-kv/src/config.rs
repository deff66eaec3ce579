//! Configuration of the store of a service.

use std::path::PathBuf;

use crate::{EmbeddedConfig, EtcdConfig, KvError, PostgresConfig, Store};

/// A store to be opened.
#[derive(Clone, Debug)]
pub enum StoreConfig {
    /// A folder of this machine.
    Embedded(EmbeddedConfig),
    /// An etcd cluster.
    Etcd(EtcdConfig),
    /// A PostgreSQL database.
    Postgres(PostgresConfig),
}

impl StoreConfig {
    /// An embedded store of the default size.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        Self::Embedded(EmbeddedConfig::new(path))
    }

    /// Whether an operator accepts that the store was restored from an older backup.
    pub fn accepts_restored(&self) -> bool {
        match self {
            Self::Embedded(_) => false,
            Self::Etcd(config) => config.accept_restored,
            Self::Postgres(config) => config.accept_restored,
        }
    }
}

impl Store {
    /// Opens a store.
    ///
    /// # Errors
    /// As [`Store::embedded`], [`Store::etcd`] and [`Store::postgres`].
    pub async fn open(config: StoreConfig) -> Result<Self, KvError> {
        match config {
            StoreConfig::Embedded(config) => Self::embedded(config),
            StoreConfig::Etcd(config) => Self::etcd(config).await,
            StoreConfig::Postgres(config) => Self::postgres(config).await,
        }
    }
}
