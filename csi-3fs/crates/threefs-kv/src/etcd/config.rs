//! Configuration of the etcd backend.

use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};

use crate::KvError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A member that does not reply to a ping for this long is disconnected.
const PING: Duration = Duration::from_secs(2);

/// An etcd cluster, and the store in it.
#[derive(Clone, Debug, Default)]
pub struct EtcdConfig {
    /// `http://host:port` or `https://host:port` of each member.
    pub endpoints: Vec<String>,
    /// Prefix of all keys, one for each store of a cluster.
    pub prefix: String,
    /// File with the certificate authority of the members; the default for `https` is none.
    pub ca_file: Option<PathBuf>,
    /// Files with the client's certificate and key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// User, and the file with its password.
    pub user: Option<(String, PathBuf)>,
    /// Accepts a cluster that was restored from an older backup, and the loss of later changes.
    pub accept_restored: bool,
}

impl EtcdConfig {
    /// Name of the store in errors.
    pub(crate) fn name(&self) -> String {
        format!("etcd {}{}", self.endpoints.join(","), self.prefix)
    }

    /// Checks the configuration and reads its files.
    pub(crate) fn connect_options(&self) -> Result<ConnectOptions, KvError> {
        let broken = |detail: String| KvError::Broken { store: self.name(), detail };
        if self.endpoints.is_empty() {
            return Err(broken(
                "no endpoints; name every member, such as http://etcd-0:2379".into(),
            ));
        }
        let named = self.prefix.trim_end_matches('/').starts_with('/');
        if !named || self.prefix.contains(':') || self.prefix.len() > 100 {
            let detail = format!(
                "the prefix is `{}`: expected `/NAME` without a colon, at most 100 bytes",
                self.prefix
            );
            return Err(broken(detail));
        }
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| broken(format!("`{}`: {error}", path.display())))
        };
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(PING, PING)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        let secure = self.endpoints.iter().filter(|it| it.starts_with("https://")).count();
        let plain = self.endpoints.iter().filter(|it| it.starts_with("http://")).count();
        if secure + plain < self.endpoints.len() || (secure > 0 && plain > 0) {
            let detail = "each endpoint must start with http://, or each with https://".into();
            return Err(broken(detail));
        }
        if secure > 0 {
            let ca = self.ca_file.as_deref().ok_or_else(|| {
                broken("https endpoints need the file of their certificate authority".into())
            })?;
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?));
            if let Some((certificate, key)) = &self.certificate {
                tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
            }
            options = options.with_tls(tls);
        } else if self.ca_file.is_some() || self.certificate.is_some() {
            return Err(broken("certificates need endpoints with https://".into()));
        }
        if let Some((user, password_file)) = &self.user {
            let password = String::from_utf8(read(password_file)?).map_err(|_| {
                broken(format!("`{}`: the password is not UTF-8", password_file.display()))
            })?;
            options = options.with_user(user.clone(), password.trim_end_matches(['\r', '\n']));
        }
        Ok(options)
    }
}
