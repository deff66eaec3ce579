//! Configuration of the PostgreSQL backend.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::KvError;

/// Timeout for the connection to one host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A host whose kernel does not acknowledge data for this long is disconnected.
const TCP_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a schema's name: PostgreSQL cuts longer names off.
const SCHEMA_BYTES_MAX: usize = 63;

/// A PostgreSQL database, and the store in it.
#[derive(Clone, Debug, Default)]
pub struct PostgresConfig {
    /// `postgresql://user@host:port,host:port/database` without a password.
    pub url: String,
    /// Schema of the tables, one for each store of a database.
    pub schema: String,
    /// File with the certificate authority of the servers; without it, TLS is not used.
    pub ca_file: Option<PathBuf>,
    /// Files with the client's certificate and key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// File with the user's password.
    pub password_file: Option<PathBuf>,
    /// Accepts a server without a synchronous standby: acknowledged changes are lost with it.
    pub accept_single: bool,
    /// Accepts another server, or one that lacks acknowledged changes.
    pub accept_restored: bool,
}

/// How sessions are made.
#[derive(Clone)]
pub(crate) struct Connector {
    pub config: Config,
    pub tls: Option<MakeRustlsConnect>,
}

impl PostgresConfig {
    /// Name of the store in errors.
    pub(crate) fn name(&self) -> String {
        let parsed = self.url.parse::<Config>();
        let Ok(config) = parsed else { return format!("PostgreSQL, schema {}", self.schema) };
        let ports = config.get_ports();
        let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
        let hosts = config.get_hosts().iter().enumerate().map(|(at, host)| match host {
            Host::Tcp(name) => format!("{name}:{}", port(at)),
            Host::Unix(path) => path.display().to_string(),
        });
        let hosts: Vec<_> = hosts.collect();
        let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
        format!("PostgreSQL {}/{database}, schema {}", hosts.join(","), self.schema)
    }

    /// Checks the configuration and reads its files.
    pub(crate) fn connector(&self) -> Result<Connector, KvError> {
        let broken = |detail: String| KvError::Broken { store: self.name(), detail };
        if !is_schema(&self.schema) {
            return Err(broken(format!(
                "the schema is `{}`: expected lower-case letters, digits and `_`, at most \
                 {SCHEMA_BYTES_MAX}",
                self.schema
            )));
        }
        let parsed = self.url.parse::<Config>();
        let mut config = parsed.map_err(|error| broken(format!("invalid URL: {error}")))?;
        if config.get_password().is_some() {
            return Err(broken("the URL has a password; give it in a file".into()));
        }
        if config.get_hosts().is_empty() || config.get_user().is_none() {
            return Err(broken(
                "the URL needs a user and a host, as in postgresql://threefs@pg-0:5432/threefs"
                    .into(),
            ));
        }
        if let Some(file) = &self.password_file {
            let password = std::fs::read_to_string(file)
                .map_err(|error| broken(format!("`{}`: {error}", file.display())))?;
            config.password(password.trim_end_matches(['\r', '\n']));
        }
        let tls = self.tls(&config)?;
        config
            .ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable })
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .application_name("threefs")
            .connect_timeout(CONNECT_TIMEOUT)
            .keepalives_idle(TCP_TIMEOUT)
            .keepalives_interval(Duration::from_secs(1))
            .keepalives_retries(3)
            .tcp_user_timeout(TCP_TIMEOUT);
        Ok(Connector { config, tls })
    }

    fn tls(&self, config: &Config) -> Result<Option<MakeRustlsConnect>, KvError> {
        let broken = |detail: String| KvError::Broken { store: self.name(), detail };
        let Some(ca_file) = &self.ca_file else {
            return match (&self.certificate, config.get_ssl_mode()) {
                (None, SslMode::Disable | SslMode::Prefer) => Ok(None),
                _ => Err(broken(
                    "TLS needs the file of the certificate authority of the servers".into(),
                )),
            };
        };
        let wrong = |path: &Path, error: &dyn std::fmt::Display| {
            broken(format!("`{}`: {error}", path.display()))
        };
        let mut roots = RootCertStore::empty();
        let authorities = CertificateDer::pem_file_iter(ca_file);
        for authority in authorities.map_err(|error| wrong(ca_file, &error))? {
            let authority = authority.map_err(|error| wrong(ca_file, &error))?;
            roots.add(authority).map_err(|error| wrong(ca_file, &error))?;
        }
        if roots.is_empty() {
            return Err(wrong(ca_file, &"it has no certificate"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(ca_file, &error))?
            .with_root_certificates(roots);
        let client = match &self.certificate {
            None => builder.with_no_client_auth(),
            Some((file, key)) => {
                let chain = CertificateDer::pem_file_iter(file)
                    .and_then(Iterator::collect)
                    .map_err(|error| wrong(file, &error))?;
                let secret =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
                let built = builder.with_client_auth_cert(chain, secret);
                built.map_err(|error| wrong(file, &error))?
            }
        };
        Ok(Some(MakeRustlsConnect::new(client)))
    }
}

/// Whether a name needs no quotes, so that statements can contain it.
fn is_schema(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    first && name.len() <= SCHEMA_BYTES_MAX && name.bytes().all(valid) && !name.starts_with("pg_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(url: &str, schema: &str) -> String {
        let (url, schema) = (url.into(), schema.into());
        let config = PostgresConfig { url, schema, ..PostgresConfig::default() };
        config.connector().err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_password_never_comes_from_the_url_or_appears_in_an_error() {
        let error = error("postgresql://me:secret@host/db", "s");
        assert!(error.contains("give it in a file") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn invalid_settings_are_named() {
        let url = "postgresql://me@one:1,two:2/db";
        assert_eq!(error(url, "threefs_meta"), "");
        for schema in ["", "A", "a;b", "pg_x", "1a", "a\"b", &"a".repeat(64)] {
            assert!(error(url, schema).contains("the schema is"), "{schema}");
        }
        assert!(error("postgresql://host/db", "s").contains("needs a user"));
        assert!(error("nonsense", "s").contains("invalid URL"));
        let tls = error("postgresql://me@host/db?sslmode=require", "s");
        assert!(tls.contains("certificate authority"), "{tls}");
    }

    #[test]
    fn the_name_has_every_host() {
        let (url, schema) = ("postgresql://me@one:1,two:2/db".into(), "s".into());
        let config = PostgresConfig { url, schema, ..PostgresConfig::default() };
        assert_eq!(config.name(), "PostgreSQL one:1,two:2/db, schema s");
    }
}
