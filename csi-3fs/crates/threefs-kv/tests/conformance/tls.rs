//! Stores over TLS, with certificates that `openssl` issues.

use std::path::{Path, PathBuf};
use std::process::Command;

use threefs_kv::{EtcdConfig, Store};

use crate::backends::{get, put, with_bounds};
use crate::cluster::Cluster;

/// A certificate authority, and certificates that it has issued.
pub(crate) struct Authority(PathBuf);

impl Authority {
    pub(crate) fn new(folder: &Path, name: &str) -> Option<Self> {
        let authority = Self(folder.join(name));
        std::fs::create_dir(&authority.0).unwrap();
        if Command::new("openssl").arg("version").output().is_err() {
            eprintln!("skipped: openssl is not installed");
            return None;
        }
        authority.issue("ca", &["-x509", "-addext", "basicConstraints=critical,CA:TRUE"]);
        Some(authority)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A pair of files, signed by the authority unless it is the authority's.
    fn issue(&self, name: &str, options: &[&str]) -> (PathBuf, PathBuf) {
        let (certificate, key) =
            (self.file(&format!("{name}.crt")), self.file(&format!("{name}.key")));
        let output = Command::new("openssl")
            .args(["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "2", "-subj"])
            .arg(format!("/CN={name}"))
            .args(options)
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (certificate, key)
    }

    pub(crate) fn issue_signed(&self, name: &str, extension: &str) -> (PathBuf, PathBuf) {
        let (ca, key) = (self.file("ca.crt"), self.file("ca.key"));
        let (ca, key) = (ca.to_str().unwrap(), key.to_str().unwrap());
        let options = ["-x509", "-CA", ca, "-CAkey", key, "-addext", extension];
        self.issue(name, &[&options[..], &["-addext", "basicConstraints=CA:FALSE"]].concat())
    }
}

fn option(name: &str, file: &Path) -> String {
    format!("--{name}={}", file.display())
}

#[tokio::test]
async fn members_and_client_check_the_certificates_of_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let Some(ours) = Authority::new(folder.path(), "ours") else { return };
    let Some(other) = Authority::new(folder.path(), "other") else { return };
    let (certificate, key) = ours.issue_signed("member", "subjectAltName=IP:127.0.0.1");
    let mut options = vec![
        option("cert-file", &certificate),
        option("key-file", &key),
        option("trusted-ca-file", &ours.file("ca.crt")),
    ];
    options.extend(["--client-cert-auth".into(), "--unsafe-no-fsync".into()]);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let Some(cluster) = Cluster::start_with("https", 3, &with_bounds(&options)) else { return };
    let config = EtcdConfig {
        ca_file: Some(ours.file("ca.crt")),
        certificate: Some(ours.issue_signed("client", "extendedKeyUsage=clientAuth")),
        ..cluster.config()
    };
    let store = Store::etcd(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"1");
    let again = Store::etcd(config.clone()).await.unwrap();
    assert_eq!(get(&again, b"a").await.unwrap(), b"1");

    let without = EtcdConfig { certificate: None, ..config.clone() };
    let foreign = other.issue_signed("client", "extendedKeyUsage=clientAuth");
    let foreign = EtcdConfig { certificate: Some(foreign), ..config.clone() };
    let untrusted = EtcdConfig { ca_file: Some(other.file("ca.crt")), ..config.clone() };
    let plain = EtcdConfig {
        endpoints: vec![config.endpoints[0].replace("https:", "http:")],
        ca_file: None,
        certificate: None,
        ..config.clone()
    };
    // Each is refused after the time that a cluster has to reply.
    let opened = tokio::join!(
        Store::etcd(without),
        Store::etcd(foreign),
        Store::etcd(untrusted),
        Store::etcd(plain),
    );
    let errors = [opened.0, opened.1, opened.2, opened.3].map(|it| it.err().unwrap().to_string());
    for error in &errors {
        assert!(config.endpoints.iter().any(|endpoint| error.contains(&endpoint[8..])), "{error}");
    }
    // The client checks the members; their refusal of a client's certificate may arrive after the
    // connection has ended, without a cause.
    assert!(errors[2].contains("invalid peer certificate"), "{}", errors[2]);
    let missing = EtcdConfig { ca_file: Some(folder.path().join("none")), ..config };
    let error = Store::etcd(missing).await.err().unwrap().to_string();
    assert!(error.contains("/none`: No such file"), "{error}");
}
