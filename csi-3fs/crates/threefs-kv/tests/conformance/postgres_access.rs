//! PostgreSQL over TLS, with a password and a user that may create schemas only.

use threefs_kv::{PostgresConfig, Store};

use crate::backends::{get, put};
use crate::postgres::Servers;
use crate::tls::Authority;

#[tokio::test]
async fn a_user_with_a_password_connects_over_tls_only() {
    let folder = tempfile::tempdir().unwrap();
    let Some(authority) = Authority::new(folder.path(), "authority") else { return };
    let Some(other) = Authority::new(folder.path(), "other") else { return };
    let Some(servers) = Servers::start(0) else { return };
    let server = &servers.servers[0];
    let (certificate, key) = authority.issue_signed("server", "subjectAltName=IP:127.0.0.1");
    server.install(&certificate, "server.crt");
    server.install(&key, "server.key");
    let (access, password) = (folder.path().join("hba"), folder.path().join("password"));
    std::fs::write(
        &access,
        "hostssl all member 127.0.0.1/32 scram-sha-256\nhost all threefs 127.0.0.1/32 trust\n",
    )
    .unwrap();
    std::fs::write(&password, "se:cr@t\n").unwrap();
    server.install(&access, "pg_hba.conf");
    let client = server.client().await;
    client
        .batch_execute(
            "CREATE USER member PASSWORD 'se:cr@t'; GRANT CREATE ON DATABASE postgres TO member",
        )
        .await
        .unwrap();
    client.batch_execute("ALTER SYSTEM SET ssl = on").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let config = PostgresConfig {
        url: servers.config().url.replace("threefs@", "member@"),
        ca_file: Some(authority.file("ca.crt")),
        password_file: Some(password.clone()),
        accept_single: true,
        ..servers.config()
    };
    let store = Store::postgres(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"1");

    let plain = PostgresConfig { ca_file: None, ..config.clone() };
    let error = Store::postgres(plain).await.err().unwrap().to_string();
    assert!(error.contains("no pg_hba.conf entry"), "{error}");
    let untrusted = PostgresConfig { ca_file: Some(other.file("ca.crt")), ..config.clone() };
    let error = Store::postgres(untrusted).await.err().unwrap().to_string();
    assert!(error.contains("certificate"), "{error}");
    std::fs::write(&password, "another").unwrap();
    let error = Store::postgres(config).await.err().unwrap().to_string();
    assert!(error.contains("password authentication failed"), "{error}");
    assert!(!error.contains("another"), "{error}");
}
