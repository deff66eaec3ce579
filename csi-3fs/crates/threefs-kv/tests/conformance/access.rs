//! Access to a cluster: users, endpoints and prefixes.

use etcd_client::{Permission, UserAddOptions};
use threefs_kv::{EtcdConfig, KvError, Store};

use crate::backends::{get, put, with_bounds};
use crate::cluster::Cluster;

const FAST: &str = "--unsafe-no-fsync";

#[tokio::test]
async fn a_user_with_rights_on_the_prefix_alone_uses_the_store_while_users_change() {
    // Unlike the default tokens, these carry the revision of the users.
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), [7; 32]).unwrap();
    let tokens = format!("--auth-token=jwt,priv-key={},sign-method=HS256", key.path().display());
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST, &tokens])) else { return };
    let mut config = cluster.config();
    let leader = cluster.leader().await;
    let mut client = cluster.members[leader].client().await;
    for user in ["root", "threefs"] {
        client.user_add(user, "secret", None::<UserAddOptions>).await.unwrap();
        client.role_add(user).await.unwrap();
        client.user_grant_role(user, user).await.unwrap();
    }
    let rights = Permission::read_write(config.prefix.clone()).with_prefix();
    client.role_grant_permission("threefs", rights).await.unwrap();
    client.auth_enable().await.unwrap();

    let error = Store::etcd(config.clone()).await.err().unwrap();
    assert!(matches!(&error, KvError::Broken { detail, .. } if detail.contains("user")), "{error}");
    let password = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(password.path(), "secret\n").unwrap();
    config.user = Some(("threefs".into(), password.path().into()));
    let store = Store::etcd(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;

    // A change of any user makes the tokens of all old.
    let mut client = root_client(&cluster).await;
    client.role_add("other").await.unwrap();
    put(&store, b"a", b"2").await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"2");

    config.prefix = "/elsewhere".into();
    let error = Store::etcd(config).await.err().unwrap().to_string();
    assert!(error.contains("permission denied"), "{error}");
}

async fn root_client(cluster: &Cluster) -> etcd_client::Client {
    let options = etcd_client::ConnectOptions::new().with_user("root", "secret");
    let endpoint = [&cluster.members[0].endpoint];
    etcd_client::Client::connect(endpoint, Some(options)).await.unwrap()
}

#[tokio::test]
async fn endpoints_of_two_clusters_are_refused() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let Some(other) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let mut config = cluster.config();
    config.endpoints.extend(other.config().endpoints);
    let error = Store::etcd(config.clone()).await.err().unwrap().to_string();
    assert!(error.contains("is of cluster") && error.contains(&config.endpoints[1]), "{error}");
}

#[tokio::test]
async fn a_prefix_is_a_path_without_colons() {
    for prefix in ["", "/", "3fs", "/3fs:r"] {
        let endpoints = vec!["http://127.0.0.1:1".into()];
        let config = EtcdConfig { endpoints, prefix: prefix.into(), ..EtcdConfig::default() };
        let error = Store::etcd(config).await.err().unwrap().to_string();
        assert!(error.contains("expected `/NAME`"), "{prefix}: {error}");
    }
}

#[tokio::test]
async fn a_store_below_the_prefix_of_another_is_apart() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let config = cluster.config();
    let prefix = format!("{}/rest", config.prefix);
    let below = Store::etcd(EtcdConfig { prefix, ..config.clone() }).await.unwrap();
    let store = Store::etcd(config).await.unwrap();
    put(&below, b"a", b"1").await;
    let mut txn = store.begin().await.unwrap();
    let all = threefs_kv::KeyRange::new([], [0xff]);
    assert_eq!(txn.range(&all, 10).await.unwrap(), []);
    txn.clear_range(all);
    txn.commit().await.unwrap();
    assert_eq!(get(&below, b"a").await.unwrap(), b"1");
}
