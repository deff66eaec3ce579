//! Dumps of stores in etcd: of one revision or refused, and loaded completely or not served.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use threefs_kv::{
    Amendment, DumpError, Dumped, EtcdConfig, KeyRange, KvError, Row, Store, StoreConfig,
};

use crate::backends::{put, start, with_bounds};
use crate::cluster::Cluster;
use crate::proxy::Proxy;

pub(crate) const FAST: &str = "--unsafe-no-fsync";

pub(crate) fn continues(_: u64, _: u64) -> bool {
    true
}

pub(crate) async fn dump(store: &StoreConfig, file: &Path) -> Result<Dumped, DumpError> {
    threefs_kv::dump(store, "test", file, &continues).await
}

pub(crate) async fn load(store: &StoreConfig, file: &Path) -> Result<Dumped, DumpError> {
    threefs_kv::load(store, "test", file, Amendment::NONE, &continues).await
}

/// Each round sets all rows to one value in one transaction.
pub(crate) async fn set_all(store: &Store, rows: u32, round: u32) {
    let mut txn = start(store).await;
    for number in 0..rows {
        txn.set(&[b"ROWS", &number.to_be_bytes()[..]].concat(), round.to_be_bytes());
    }
    txn.atomic_add(b"counter", 1);
    txn.set_stamped(b"STMP", b"x", b"stamped");
    txn.commit().await.unwrap();
}

pub(crate) async fn all(store: &Store) -> Vec<Row> {
    let range = KeyRange::new(vec![1], vec![0xff]);
    start(store).await.range(&range, usize::MAX).await.unwrap()
}

async fn rows_of(config: EtcdConfig) -> Vec<Row> {
    all(&Store::etcd(config).await.unwrap()).await
}

#[tokio::test]
async fn a_store_is_converted_to_etcd_and_back() {
    let Some(cluster) = Cluster::start(3, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (file, again) = (folder.path().join("dump"), folder.path().join("again"));
    let embedded = |name: &str| StoreConfig::folder(folder.path().join(name));
    {
        let store = Store::open(embedded("first")).await.unwrap();
        set_all(&store, 9000, 1).await;
        put(&store, b"long", &vec![7; 500_000]).await;
        put(&store, &[0xff; 400], b"last").await;
    }
    let dumped = dump(&embedded("first"), &file).await.unwrap();
    assert_eq!(dumped.rows, 9004);
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    assert_eq!(load(&etcd, &file).await.unwrap(), dumped);
    {
        // Versions, counters and stamps continue.
        let store = Store::etcd(config).await.unwrap();
        let before = all(&store).await;
        assert_eq!(before, all(&Store::open(embedded("first")).await.unwrap()).await);
        set_all(&store, 10, 2).await;
        assert_eq!(start(&store).await.get(b"counter").await.unwrap().unwrap(), 2i64.to_le_bytes());
    }
    let changed = dump(&etcd, &again).await.unwrap();
    assert_eq!(changed.rows, 9005);
    load(&embedded("second"), &again).await.unwrap();
    let rows = all(&Store::open(embedded("second")).await.unwrap()).await;
    assert_eq!(rows, all(&Store::open(etcd).await.unwrap()).await);
}

#[tokio::test]
async fn amended_rows_replace_those_of_the_dump() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    set_all(&Store::open(first.clone()).await.unwrap(), 1, 1).await;
    dump(&first, &file).await.unwrap();
    let amendment = Amendment {
        keys: &[b"counter"],
        rows: &|values| {
            assert_eq!(values[&b"counter"[..]], 1i64.to_le_bytes());
            Ok(vec![(b"counter".to_vec(), vec![9]), (b"new".to_vec(), vec![1])])
        },
    };
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    threefs_kv::load(&etcd, "test", &file, amendment, &continues).await.unwrap();
    let rows = rows_of(config).await;
    let amended: Vec<&Row> = rows.iter().filter(|(key, _)| key > &b"a".to_vec()).collect();
    assert_eq!(amended, [&(b"counter".to_vec(), vec![9]), &(b"new".to_vec(), vec![1])]);
}

/// The replies to half of the batches are lost, before or after they are executed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_whose_replies_are_lost_is_complete() {
    let Some(cluster) = Cluster::start(3, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    let store = Store::open(first.clone()).await.unwrap();
    for part in 0..20u32 {
        let mut txn = start(&store).await;
        for number in 0..1000 {
            let key = [b"PART", &part.to_be_bytes()[..], &u32::to_be_bytes(number)].concat();
            txn.set(&key, vec![part as u8; 700]);
        }
        txn.commit().await.unwrap();
    }
    let rows = all(&store).await;
    drop(store);
    dump(&first, &file).await.unwrap();
    let mut config = cluster.config();
    let direct = config.clone();
    let mut proxies = Vec::new();
    for endpoint in &mut config.endpoints {
        let proxy = Proxy::start(endpoint.strip_prefix("http://").unwrap()).await;
        *endpoint = format!("http://{}", proxy.address());
        proxies.push(proxy);
    }
    let cut = |_, _| {
        proxies.iter().for_each(Proxy::cut_next_reply_to_a_commit);
        true
    };
    let etcd = StoreConfig::Etcd(config);
    threefs_kv::load(&etcd, "test", &file, Amendment::NONE, &cut).await.unwrap();
    let cuts: u64 = proxies.iter().map(Proxy::cuts).sum();
    assert!(cuts >= 4, "only {cuts} replies were lost");
    assert_eq!(rows_of(direct).await, rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_a_store_in_use_has_one_revision() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let config = cluster.config();
    let store = Store::etcd(config.clone()).await.unwrap();
    set_all(&store, 3000, 0).await;
    let rounds = std::sync::Arc::new(AtomicU64::new(0));
    let writer = {
        let (store, rounds) = (store.clone(), std::sync::Arc::clone(&rounds));
        tokio::spawn(async move {
            for round in 1.. {
                set_all(&store, 3000, round).await;
                rounds.fetch_add(1, SeqCst);
            }
        })
    };
    for number in 0..3 {
        // At least one round lies between two pages of the dump.
        let wait = |_, _| {
            let before = rounds.load(SeqCst);
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while rounds.load(SeqCst) == before && std::time::Instant::now() < deadline {
                std::thread::yield_now();
            }
            true
        };
        let etcd = StoreConfig::Etcd(config.clone());
        threefs_kv::dump(&etcd, "test", &file, &wait).await.unwrap();
        let copy = StoreConfig::folder(folder.path().join(number.to_string()));
        load(&copy, &file).await.unwrap();
        let rows = all(&Store::open(copy).await.unwrap()).await;
        let values: std::collections::BTreeSet<&[u8]> = rows
            .iter()
            .filter(|(key, _)| key.starts_with(b"ROWS"))
            .map(|(_, it)| &it[..])
            .collect();
        assert_eq!(values.len(), 1, "rows of two revisions");
        let counter = rows.iter().find(|(key, _)| key == b"counter").unwrap();
        let round = u32::from_be_bytes(values.first().unwrap()[..].try_into().unwrap());
        assert_eq!(counter.1, i64::from(round + 1).to_le_bytes());
    }
    writer.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_whose_revision_is_compacted_starts_again_and_then_fails_by_name() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    let store = Store::etcd(config).await.unwrap();
    set_all(&store, 3000, 0).await;
    // Overwrites all rows and compacts the revision of the dump, after the first page of an attempt.
    let compactions = AtomicU64::new(0);
    let (handle, member) = (tokio::runtime::Handle::current(), &cluster.members[0]);
    let compact = |attempts: u64| {
        let (store, compactions, handle) = (store.clone(), &compactions, handle.clone());
        move |done: u64, _: u64| {
            let before = compactions.load(SeqCst);
            if before < attempts && done <= 1024 {
                compactions.store(before + 1, SeqCst);
                let change = async {
                    set_all(&store, 3000, before as u32 + 1).await;
                    let newest = start(&store).await.read_version();
                    member.client().await.compact(newest as i64, None).await.unwrap();
                };
                // Not in the thread of a runtime.
                std::thread::scope(|scope| {
                    scope.spawn(|| handle.block_on(change)).join().unwrap();
                });
            }
            true
        }
    };
    threefs_kv::dump(&etcd, "test", &file, &compact(2)).await.unwrap();
    assert_eq!(compactions.swap(0, SeqCst), 2);
    let copy = StoreConfig::folder(folder.path().join("copy"));
    load(&copy, &file).await.unwrap();
    assert_eq!(all(&Store::open(copy).await.unwrap()).await, all(&store).await);

    std::fs::remove_file(&file).unwrap();
    let error = threefs_kv::dump(&etcd, "test", &file, &compact(3)).await.unwrap_err();
    assert!(matches!(&error, DumpError::Compacted { attempts: 3, rows: 1024, .. }), "{error}");
    assert!(error.to_string().contains("etcdctl snapshot save"), "{error}");
    assert!(!file.exists());
}

#[tokio::test]
async fn an_interrupted_load_is_served_by_no_service_and_repeated() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    let store = Store::open(first.clone()).await.unwrap();
    for part in 0..3u32 {
        let mut txn = start(&store).await;
        for number in 0..6000 {
            txn.set(&[b"PART", &part.to_be_bytes()[..], &u32::to_be_bytes(number)].concat(), *b"v");
        }
        txn.commit().await.unwrap();
    }
    let rows = all(&store).await;
    drop(store);
    dump(&first, &file).await.unwrap();
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    let half = |done: u64, total: u64| done * 2 < total;
    let error = threefs_kv::load(&etcd, "test", &file, Amendment::NONE, &half).await.unwrap_err();
    assert!(matches!(error, DumpError::Stopped), "{error}");
    let names = format!("{}:r", config.prefix);
    let options = || Some(etcd_client::GetOptions::new().with_prefix().with_count_only());
    let mut client = cluster.members[0].client().await;
    let count = client.get(names.clone(), options()).await.unwrap().count();
    assert!((4000..18_000).contains(&count), "{count} rows");

    let error = Store::etcd(config.clone()).await.err().unwrap().to_string();
    assert!(error.contains("was interrupted") && error.contains("threefs meta load"), "{error}");
    let error = dump(&etcd, &folder.path().join("half")).await.unwrap_err().to_string();
    assert!(error.contains("was interrupted"), "{error}");

    // Rows of the interrupted load that are not in this dump do not remain.
    let small = StoreConfig::folder(folder.path().join("small"));
    put(&Store::open(small.clone()).await.unwrap(), b"PARTx", b"1").await;
    let small_file = folder.path().join("small.dump");
    dump(&small, &small_file).await.unwrap();
    load(&etcd, &small_file).await.unwrap();
    assert_eq!(rows_of(config).await, [(b"PARTx".to_vec(), b"1".to_vec())]);

    let other = cluster.config();
    load(&StoreConfig::Etcd(other.clone()), &file).await.unwrap();
    assert_eq!(rows_of(other).await, rows);
}

#[tokio::test]
async fn the_earlier_of_two_loads_is_fenced() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (file, other) = (folder.path().join("dump"), folder.path().join("other"));
    for (name, count, to) in [("a", 6000, &file), ("b", 1, &other)] {
        let store = StoreConfig::folder(folder.path().join(name));
        set_all(&Store::open(store.clone()).await.unwrap(), count, 1).await;
        dump(&store, to).await.unwrap();
    }
    let config = cluster.config();
    let etcd = StoreConfig::Etcd(config.clone());
    // The second load runs from start to end while the first one writes.
    let runs = AtomicU64::new(0);
    let (runs, etcd, other) = (&runs, &etcd, &other);
    let second = |done: u64, total: u64| {
        if done > 0 && done < total && runs.fetch_add(1, SeqCst) == 0 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let builder = &mut tokio::runtime::Builder::new_current_thread();
                    builder.enable_all().build().unwrap().block_on(load(etcd, other)).unwrap();
                });
            });
        }
        true
    };
    let error = threefs_kv::load(etcd, "test", &file, Amendment::NONE, &second).await.unwrap_err();
    assert_eq!(runs.load(SeqCst), 1);
    assert!(error.to_string().contains("another load"), "{error}");
    assert_eq!(rows_of(config).await.len(), 3);
}

#[tokio::test]
async fn a_load_refuses_a_prefix_in_use_and_a_dump_an_empty_one() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    set_all(&Store::open(first.clone()).await.unwrap(), 1, 1).await;
    dump(&first, &file).await.unwrap();
    // A service has started, and has written nothing yet.
    let config = cluster.config();
    drop(Store::etcd(config.clone()).await.unwrap());
    let etcd = StoreConfig::Etcd(config.clone());
    let error = load(&etcd, &file).await.unwrap_err();
    assert!(matches!(error, DumpError::OccupiedPrefix(_)), "{error}");
    assert_eq!(rows_of(config.clone()).await, []);
    let error = dump(&etcd, &folder.path().join("none")).await.unwrap_err().to_string();
    assert!(error.contains("has no rows"), "{error}");
    // A complete load is a store like any other.
    let loaded = StoreConfig::Etcd(cluster.config());
    load(&loaded, &file).await.unwrap();
    let error = load(&loaded, &file).await.unwrap_err();
    assert!(matches!(error, DumpError::OccupiedPrefix(_)), "{error}");
    // A damaged dump reserves nothing.
    let unused = cluster.config();
    std::fs::write(&file, b"3FSDUMP1").unwrap();
    let error = load(&StoreConfig::Etcd(unused.clone()), &file).await.unwrap_err();
    assert!(matches!(error, DumpError::Damaged { .. }), "{error}");
    drop(Store::etcd(unused).await.unwrap());
}

#[tokio::test]
async fn a_load_into_a_full_cluster_fails_by_name_and_is_repeated_elsewhere() {
    let quota = "--quota-backend-bytes=20971520";
    // Rows of an open batch do not count for the quota.
    let batch = "--backend-batch-limit=1";
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST, quota, batch])) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    {
        let store = Store::open(first.clone()).await.unwrap();
        for number in 0..80u32 {
            put(&store, &[b"large", &number.to_be_bytes()[..]].concat(), &vec![1; 400_000]).await;
        }
    }
    dump(&first, &file).await.unwrap();
    let config = cluster.config();
    let error = load(&StoreConfig::Etcd(config.clone()), &file).await.unwrap_err();
    assert!(matches!(error, DumpError::Store(KvError::NoSpace { .. })), "{error}");
    let error = Store::etcd(config).await.err().unwrap().to_string();
    assert!(error.contains("was interrupted"), "{error}");
    let second = StoreConfig::folder(folder.path().join("second"));
    assert_eq!(load(&second, &file).await.unwrap().rows, 80);
}
