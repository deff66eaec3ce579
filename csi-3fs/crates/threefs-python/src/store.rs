//! The store of mgmtd and meta in the configuration of a service or of a backup.

use std::path::PathBuf;

use serde::Deserialize;
use threefs_kv::{EmbeddedConfig, EtcdConfig, MAP_BYTES_MAX, PostgresConfig, StoreConfig};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EtcdJson {
    endpoints: Vec<String>,
    prefix: String,
    #[serde(default)]
    ca_file: Option<PathBuf>,
    #[serde(default)]
    cert_file: Option<PathBuf>,
    #[serde(default)]
    key_file: Option<PathBuf>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    password_file: Option<PathBuf>,
    #[serde(default)]
    accept_restored: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PostgresJson {
    url: String,
    schema: String,
    #[serde(default)]
    ca_file: Option<PathBuf>,
    #[serde(default)]
    cert_file: Option<PathBuf>,
    #[serde(default)]
    key_file: Option<PathBuf>,
    #[serde(default)]
    password_file: Option<PathBuf>,
    #[serde(default = "yes")]
    require_standby: bool,
    #[serde(default)]
    accept_restored: bool,
}

fn yes() -> bool {
    true
}

/// The store in a folder, in etcd or in PostgreSQL.
///
/// # Errors
/// Not exactly one of them, or half of a pair of settings.
pub(crate) fn store_config(
    data: Option<PathBuf>,
    map_bytes_max: usize,
    etcd: Option<EtcdJson>,
    postgres: Option<PostgresJson>,
) -> Result<StoreConfig, String> {
    match (data, etcd, postgres) {
        (Some(path), None, None) => {
            Ok(StoreConfig::Embedded(EmbeddedConfig { path, map_bytes_max }))
        }
        (None, Some(json), None) => json.config().map(StoreConfig::Etcd),
        (None, None, Some(json)) => json.config().map(StoreConfig::Postgres),
        _ => Err("one of `data`, `etcd` and `postgres` must be set".into()),
    }
}

fn pair<T>(first: Option<T>, second: Option<T>, names: &str) -> Result<Option<(T, T)>, String> {
    match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (None, None) => Ok(None),
        _ => Err(format!("{names} must be set together")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreJson {
    #[serde(default)]
    data: Option<PathBuf>,
    #[serde(default)]
    etcd: Option<EtcdJson>,
    #[serde(default)]
    postgres: Option<PostgresJson>,
}

/// The store of a backup, from JSON.
///
/// # Errors
/// As [`store_config`], or it cannot be parsed.
pub(crate) fn store_of_json(json: &str) -> Result<StoreConfig, String> {
    let store: StoreJson = serde_json::from_str(json).map_err(|error| error.to_string())?;
    store_config(store.data, MAP_BYTES_MAX, store.etcd, store.postgres)
}

impl EtcdJson {
    fn config(self) -> Result<EtcdConfig, String> {
        let certificate = pair(self.cert_file, self.key_file, "etcd: cert_file and key_file")?;
        let user = match (self.user, self.password_file) {
            (Some(user), Some(password_file)) => Some((user, password_file)),
            (None, None) => None,
            _ => return Err("etcd: user and password_file must be set together".into()),
        };
        Ok(EtcdConfig {
            endpoints: self.endpoints,
            prefix: self.prefix,
            ca_file: self.ca_file,
            certificate,
            user,
            accept_restored: self.accept_restored,
        })
    }
}

impl PostgresJson {
    fn config(self) -> Result<PostgresConfig, String> {
        let names = "postgres: cert_file and key_file";
        let certificate = pair(self.cert_file, self.key_file, names)?;
        Ok(PostgresConfig {
            url: self.url,
            schema: self.schema,
            ca_file: self.ca_file,
            certificate,
            password_file: self.password_file,
            accept_single: !self.require_standby,
            accept_restored: self.accept_restored,
        })
    }
}
