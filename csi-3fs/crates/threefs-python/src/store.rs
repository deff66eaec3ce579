//! The store of mgmtd and meta in the configuration of a service or of a backup.

use std::path::PathBuf;

use serde::Deserialize;
use threefs_kv::{EmbeddedConfig, EtcdConfig, MAP_BYTES_MAX, StoreConfig};

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

/// The store in a folder or in etcd.
///
/// # Errors
/// Not exactly one of both, or half of a pair of settings.
pub(crate) fn store_config(
    data: Option<PathBuf>,
    map_bytes_max: usize,
    etcd: Option<EtcdJson>,
) -> Result<StoreConfig, String> {
    match (data, etcd) {
        (Some(path), None) => Ok(StoreConfig::Embedded(EmbeddedConfig { path, map_bytes_max })),
        (None, Some(json)) => json.config().map(StoreConfig::Etcd),
        _ => Err("either `data` or `etcd` must be set".into()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreJson {
    #[serde(default)]
    data: Option<PathBuf>,
    #[serde(default)]
    etcd: Option<EtcdJson>,
}

/// The store of a backup, from JSON.
///
/// # Errors
/// As [`store_config`], or it cannot be parsed.
pub(crate) fn store_of_json(json: &str) -> Result<StoreConfig, String> {
    let store: StoreJson = serde_json::from_str(json).map_err(|error| error.to_string())?;
    store_config(store.data, MAP_BYTES_MAX, store.etcd)
}

impl EtcdJson {
    fn config(self) -> Result<EtcdConfig, String> {
        let pair = |first, second, names: &str| match (first, second) {
            (Some(first), Some(second)) => Ok(Some((first, second))),
            (None, None) => Ok(None),
            _ => Err(format!("etcd: {names} must be set together")),
        };
        let certificate = pair(self.cert_file, self.key_file, "cert_file and key_file")?;
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
