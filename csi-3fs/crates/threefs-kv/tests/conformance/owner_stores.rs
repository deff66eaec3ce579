//! The owner of stores that are opened by their configuration: folders and etcd.

use tempfile::TempDir;
use threefs_kv::{Amendment, DumpError, Entry, OWNER_ROW, Store, StoreConfig, dump, load, rekey};

use crate::backends::{get, put, start, with_bounds};
use crate::cluster::Cluster;
use crate::owner::{CLUSTER, CLUSTER_SEVEN, all_rows, cluster, owner, refused};

/// A folder, and a prefix of an etcd cluster if there is one.
fn configs(folder: &TempDir, name: &str, etcd: Option<&Cluster>) -> Vec<StoreConfig> {
    let folder = StoreConfig::folder(folder.path().join(name));
    etcd.map(|etcd| StoreConfig::Etcd(etcd.config())).into_iter().chain([folder]).collect()
}

fn etcd() -> Option<Cluster> {
    Cluster::start(1, &with_bounds(&["--unsafe-no-fsync"]))
}

/// Starts a service of a cluster over a store, which it leaves open.
async fn enter(config: &StoreConfig, keys: &[u32]) -> Result<(Store, Entry), threefs_kv::KvError> {
    let owner = owner(&cluster(keys), config);
    let store = Store::open_owned(config.clone(), &owner).await?;
    let entry = owner.enter(&store).await?;
    Ok((store, entry))
}

/// Everything in etcd, with revisions.
async fn everything(etcd: &Cluster) -> Vec<(Vec<u8>, i64)> {
    let options = etcd_client::GetOptions::new().with_all_keys().with_keys_only();
    let mut reply = etcd.members[0].client().await.get("", Some(options)).await.unwrap();
    let rows = reply.take_kvs().into_iter();
    rows.map(|row| (row.key().to_vec(), row.mod_revision())).collect()
}

#[tokio::test]
async fn another_cluster_is_refused_before_it_writes_a_row_of_the_backend() {
    let Some(etcd) = etcd() else { return };
    let config = StoreConfig::Etcd(etcd.config());
    let (store, _) = enter(&config, &[1]).await.unwrap();
    put(&store, CLUSTER, CLUSTER_SEVEN).await;
    drop(store);
    let before = everything(&etcd).await;
    let text = refused(enter(&config, &[2]).await.map(|(_, entry)| entry));
    let StoreConfig::Etcd(of_etcd) = &config else { panic!("not etcd") };
    assert!(text.contains(&of_etcd.prefix), "{text}");
    assert_eq!(everything(&etcd).await, before);
    // Neither does an operator who mistypes a prefix.
    let mistyped = StoreConfig::Etcd(etcd.config());
    let error = rekey(mistyped.clone(), &owner(&cluster(&[1]), &mistyped)).await.unwrap_err();
    assert!(error.to_string().contains("the prefix has no rows"), "{error}");
    assert_eq!(everything(&etcd).await, before);
    assert_eq!(enter(&config, &[1]).await.unwrap().1, Entry::Owned);
}

#[tokio::test]
async fn rekey_replaces_the_owner_also_if_its_row_is_invalid_or_absent() {
    let (folder, etcd) = (tempfile::tempdir().unwrap(), etcd());
    for config in configs(&folder, "store", etcd.as_ref()) {
        let (store, _) = enter(&config, &[1]).await.unwrap();
        put(&store, b"a", b"1").await;
        drop(store);
        let rekeyed = rekey(config.clone(), &owner(&cluster(&[2, 3]), &config)).await.unwrap();
        assert_eq!((rekeyed.before.len(), rekeyed.after.len()), (1, 2));
        assert!(rekeyed.before.is_disjoint(&rekeyed.after));
        refused(enter(&config, &[1]).await.map(|(_, entry)| entry));
        for keys in [[2], [3]] {
            assert_eq!(enter(&config, &keys).await.unwrap().1, Entry::Owned);
        }
        for invalid in [Some(b"garbage"), None] {
            let store = Store::open(config.clone()).await.unwrap();
            let mut txn = start(&store).await;
            match invalid {
                Some(value) => txn.set(OWNER_ROW, *value),
                None => txn.clear(OWNER_ROW),
            }
            txn.commit().await.unwrap();
            drop(store);
            let rekeyed = rekey(config.clone(), &owner(&cluster(&[4]), &config)).await.unwrap();
            assert!(rekeyed.before.is_empty());
            assert_eq!(enter(&config, &[4]).await.unwrap().1, Entry::Owned);
        }
    }
    let missing = StoreConfig::folder(folder.path().join("missing"));
    let error = rekey(missing.clone(), &owner(&cluster(&[1]), &missing)).await.unwrap_err();
    assert!(error.to_string().contains("the folder has no store"), "{error}");
    assert!(!folder.path().join("missing").exists());
}

/// Loads a dump into an empty store.
async fn load_into(config: &StoreConfig, file: &std::path::Path) -> Result<(), DumpError> {
    load(config, "mgmtd", file, Amendment::NONE, &|_, _| true).await.map(drop)
}

#[tokio::test]
async fn a_dump_keeps_the_owner_so_another_cluster_needs_rekey_after_a_load() {
    let (folder, etcd) = (tempfile::tempdir().unwrap(), etcd());
    let file = folder.path().join("dump");
    for (from, to) in configs(&folder, "from", etcd.as_ref()).into_iter().zip(configs(
        &folder,
        "to",
        etcd.as_ref(),
    )) {
        let (store, _) = enter(&from, &[1]).await.unwrap();
        put(&store, CLUSTER, CLUSTER_SEVEN).await;
        let rows = all_rows(&store).await;
        drop(store);
        dump(&from, "mgmtd", &file, &|_, _| true).await.unwrap();
        load_into(&to, &file).await.unwrap();
        let text = refused(enter(&to, &[2]).await.map(|(_, entry)| entry));
        assert!(text.contains(&format!("cluster-{:032x}", 7)), "{text}");
        let (store, entry) = enter(&to, &[1]).await.unwrap();
        assert_eq!((entry, all_rows(&store).await), (Entry::Owned, rows));
        assert!(get(&store, OWNER_ROW).await.is_some());
        drop(store);
        rekey(to.clone(), &owner(&cluster(&[2]), &to)).await.unwrap();
        assert_eq!(enter(&to, &[2]).await.unwrap().1, Entry::Owned);
        refused(enter(&to, &[1]).await.map(|(_, entry)| entry));
    }
}
