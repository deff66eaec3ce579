//! The embedded store: restart, single owner, stamps in keys, full disk.

use threefs_kv::{EmbeddedConfig, KeyRange, KvError, Store};

use crate::backends::{get, put, start};
use crate::faults::eventually;

#[tokio::test]
async fn the_embedded_store_survives_a_restart_and_has_one_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/kv");
    let config = EmbeddedConfig::new(&path);
    let store = Store::embedded(config.clone()).unwrap();
    put(&store, b"a", b"1").await;
    let version = start(&store).await.read_version();
    let error = Store::embedded(config.clone()).err().unwrap().to_string();
    assert!(error.contains("another process holds the folder"), "{error}");
    let opening = store.exclusive_opening();
    drop(store);
    // A process that another test starts has the lock between its fork and its exec.
    let reopen = async || Store::embedded(config.clone()).ok();
    let store = eventually("the folder is not released", reopen).await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"1");
    assert!(start(&store).await.read_version() >= version, "versions do not decrease");
    assert_ne!(store.exclusive_opening(), opening);
    assert_eq!(get(&store, b"\0version").await, None, "internal rows are hidden");
}

#[tokio::test]
async fn a_full_store_reports_it_and_resumes_when_space_is_freed() {
    let folder = tempfile::tempdir().unwrap();
    let map_bytes_max = 1 << 20;
    let path = folder.path().to_owned();
    let store = Store::embedded(EmbeddedConfig { path, map_bytes_max }).unwrap();
    let mut filled = 0u32;
    let error = loop {
        let mut txn = start(&store).await;
        txn.get(b"guard").await.unwrap();
        txn.set(&filled.to_be_bytes().map(|byte| byte | 0x40), vec![1; 50_000]);
        match txn.commit().await {
            Ok(_) => filled += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, KvError::NoSpace { .. }), "{error}");
    assert!(filled > 5);
    // Everything acknowledged is there, and small rows still fit after some are removed.
    let mut txn = start(&store).await;
    assert_eq!(
        txn.range(&KeyRange::new([0x40], [0xff]), 100).await.unwrap().len(),
        filled as usize
    );
    txn.clear_range(KeyRange::new([0x40], [0xff]));
    txn.commit().await.unwrap();
    let mut txn = start(&store).await;
    assert_eq!(txn.get(b"guard").await.unwrap(), None);
    txn.set(b"guard", b"1");
    txn.commit().await.unwrap();
}

#[tokio::test]
async fn the_stamp_of_a_key_is_that_of_its_commit() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::embedded(EmbeddedConfig::new(folder.path())).unwrap();
    let mut txn = start(&store).await;
    txn.set_stamped(b"log/", b"", *b"1");
    let stamp = txn.commit().await.unwrap();
    assert_eq!(get(&store, &[&b"log/"[..], &stamp.0].concat()).await.unwrap(), b"1");
}
