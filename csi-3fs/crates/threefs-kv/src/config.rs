//! Configuration of the store of a service.

use std::path::PathBuf;

use crate::{EmbeddedConfig, EtcdConfig, KvError, OWNER_ROW, Owner, PostgresConfig, Store, etcd};

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

    /// Name of the store in errors: its folder or address.
    pub fn name(&self) -> String {
        match self {
            Self::Embedded(config) => config.path.display().to_string(),
            Self::Etcd(config) => config.name(),
            Self::Postgres(config) => config.name(),
        }
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

    /// Opens the store of a service, which must [enter](Owner::enter) it next. Opening a store in
    /// etcd writes rows of the backend, but none into the store of another cluster.
    ///
    /// # Errors
    /// As [`Store::open`], and [`KvError::Owner`].
    pub async fn open_owned(config: StoreConfig, owner: &Owner) -> Result<Self, KvError> {
        if let StoreConfig::Etcd(config) = &config {
            let [row, cluster] = etcd::peek(config, [OWNER_ROW, owner.cluster_row()]).await?;
            if let Some(row) = row {
                owner.verify(&row, cluster.as_deref())?;
            }
        }
        Self::open(config).await
    }
}
