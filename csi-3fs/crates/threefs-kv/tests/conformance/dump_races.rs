//! Dumps and loads during which the store is replaced, or requests arrive late.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use etcd_client::{DeleteOptions, GetOptions};
use threefs_kv::{Amendment, Store, StoreConfig};

use crate::backends::{put, start, with_bounds};
use crate::cluster::Cluster;
use crate::dump::{FAST, continues, dump, set_all};

/// A late copy of a request with the dumped row would undo the amendment.
#[tokio::test]
async fn an_amended_row_is_written_once() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    set_all(&Store::open(first.clone()).await.unwrap(), 1, 1).await;
    dump(&first, &file).await.unwrap();
    let amendment = Amendment { keys: &[], rows: &|_| Ok(vec![(b"counter".to_vec(), vec![9])]) };
    let config = cluster.config();
    let name = [config.prefix.as_bytes(), b":rcounter"].concat();
    let etcd = StoreConfig::Etcd(config);
    threefs_kv::load(&etcd, "test", &file, amendment, &continues).await.unwrap();
    let reply = cluster.members[0].client().await.get(name, None).await.unwrap();
    let row = reply.kvs().first().unwrap();
    assert_eq!((row.value(), row.version()), (&[9u8][..], 1));
}

/// Between two attempts of the dump, the store is replaced by the half of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_refuses_a_load_that_starts_between_its_attempts() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (file, other) = (folder.path().join("dump"), folder.path().join("other"));
    let source = StoreConfig::folder(folder.path().join("source"));
    {
        let store = Store::open(source.clone()).await.unwrap();
        for part in 0..3u8 {
            set_all(&store, 6000, 1).await;
            put(&store, &[b"PART", &[part][..]].concat(), &vec![1; 500_000]).await;
        }
    }
    dump(&source, &other).await.unwrap();
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    let store = Store::etcd(config.clone()).await.unwrap();
    set_all(&store, 3000, 0).await;
    let newest = start(&store).await.read_version();
    drop(store);
    let replaced = AtomicBool::new(false);
    let (handle, member) = (tokio::runtime::Handle::current(), &cluster.members[0]);
    let replace = |_: u64, _: u64| {
        if replaced.swap(true, SeqCst) {
            return true;
        }
        let change = async {
            let mut client = member.client().await;
            let all = DeleteOptions::new().with_prefix();
            let deleted = client.delete(format!("{}:", config.prefix), Some(all)).await.unwrap();
            assert!(deleted.deleted() > 3000);
            let half = |done: u64, total: u64| done * 2 < total;
            threefs_kv::load(&etcd, "test", &other, Amendment::NONE, &half).await.unwrap_err();
            let count = GetOptions::new().with_prefix().with_count_only();
            let rows = client.get(format!("{}:r", config.prefix), Some(count)).await.unwrap();
            assert!(rows.count() > 0);
            client.compact(newest as i64 + 1, None).await.unwrap();
        };
        // Not in the thread of a runtime.
        std::thread::scope(|scope| {
            scope.spawn(|| handle.block_on(change)).join().unwrap();
        });
        true
    };
    let error = threefs_kv::dump(&etcd, "test", &file, &replace).await.unwrap_err().to_string();
    assert!(error.contains("was interrupted"), "{error}");
    assert!(!file.exists());
}
