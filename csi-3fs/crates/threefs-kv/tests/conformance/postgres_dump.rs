//! Dumps of stores in PostgreSQL: of one snapshot, and loaded completely or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use threefs_kv::{Amendment, DumpError, PostgresConfig, Store, StoreConfig};

use crate::backends::{get, put, start};
use crate::dump::{all, continues, dump, load, set_all};
use crate::postgres::Servers;

fn single(servers: &Servers) -> PostgresConfig {
    PostgresConfig { accept_single: true, ..servers.config() }
}

#[tokio::test]
async fn a_store_is_converted_to_postgres_and_back() {
    let Some(servers) = Servers::start(0) else { return };
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
    let config = single(&servers);
    let postgres = StoreConfig::Postgres(config.clone());
    assert_eq!(load(&postgres, &file).await.unwrap(), dumped);
    {
        // Versions, counters and stamps continue.
        let store = Store::postgres(config.clone()).await.unwrap();
        assert_eq!(all(&store).await, all(&Store::open(embedded("first")).await.unwrap()).await);
        set_all(&store, 10, 2).await;
        assert_eq!(get(&store, b"counter").await.unwrap(), 2i64.to_le_bytes());
    }
    assert_eq!(dump(&postgres, &again).await.unwrap().rows, dumped.rows + 1);
    load(&embedded("second"), &again).await.unwrap();
    let rows = all(&Store::open(embedded("second")).await.unwrap()).await;
    assert_eq!(rows, all(&Store::postgres(config).await.unwrap()).await);
}

#[tokio::test]
async fn an_interrupted_load_leaves_nothing_and_is_repeated() {
    let Some(servers) = Servers::start(0) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    set_all(&Store::open(first.clone()).await.unwrap(), 9000, 1).await;
    dump(&first, &file).await.unwrap();
    let config = single(&servers);
    let postgres = StoreConfig::Postgres(config.clone());
    let half = |done: u64, total: u64| done * 2 < total;
    let stopped = threefs_kv::load(&postgres, "test", &file, Amendment::NONE, &half).await;
    assert!(matches!(stopped, Err(DumpError::Stopped)), "{stopped:?}");
    let error = dump(&postgres, &folder.path().join("none")).await.unwrap_err().to_string();
    assert!(error.contains("has no rows"), "{error}");
    load(&postgres, &file).await.unwrap();
    let rows = all(&Store::postgres(config).await.unwrap()).await;
    assert_eq!(rows, all(&Store::open(first).await.unwrap()).await);
    let error = load(&postgres, &file).await.unwrap_err();
    assert!(matches!(error, DumpError::OccupiedSchema(_)), "{error}");
}

#[tokio::test]
async fn a_load_refuses_a_schema_that_a_service_has_used() {
    let Some(servers) = Servers::start(0) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let first = StoreConfig::folder(folder.path().join("first"));
    set_all(&Store::open(first.clone()).await.unwrap(), 1, 1).await;
    dump(&first, &file).await.unwrap();
    let config = single(&servers);
    drop(Store::postgres(config.clone()).await.unwrap());
    let error = load(&StoreConfig::Postgres(config.clone()), &file).await.unwrap_err();
    assert!(matches!(error, DumpError::OccupiedSchema(_)), "{error}");
    assert_eq!(all(&Store::postgres(config).await.unwrap()).await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_of_a_store_in_use_has_one_version() {
    let Some(servers) = Servers::start(0) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let config = single(&servers);
    let store = Store::postgres(config.clone()).await.unwrap();
    set_all(&store, 3000, 0).await;
    let rounds = Arc::new(AtomicU64::new(0));
    let writer = {
        let (store, rounds) = (store.clone(), Arc::clone(&rounds));
        tokio::spawn(async move {
            for round in 1.. {
                set_all(&store, 3000, round).await;
                rounds.fetch_add(1, SeqCst);
            }
        })
    };
    // At least one round lies between two pages of the dump.
    let wait = |_, _| {
        let before = rounds.load(SeqCst);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while rounds.load(SeqCst) == before && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        true
    };
    threefs_kv::dump(&StoreConfig::Postgres(config), "test", &file, &wait).await.unwrap();
    writer.abort();
    let mut values = std::collections::BTreeSet::new();
    threefs_kv::scan("test", &file, &continues, &mut |key, value| {
        if key.starts_with(b"ROWS") {
            values.insert(value.to_vec());
        }
    })
    .unwrap();
    assert_eq!(values.len(), 1, "rows of several versions");
    assert!(start(&store).await.get(b"counter").await.unwrap().is_some());
}
