//! Dumps of a store that is being written: complete or refused, and loaded as the same rows.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use threefs_kv::{
    Amendment, DumpError, Dumped, EmbeddedConfig, KeyRange, KvError, Row, Store, StoreConfig,
};

fn config(folder: &Path) -> EmbeddedConfig {
    EmbeddedConfig { path: folder.into(), map_bytes_max: 64 << 20 }
}

fn continues(_: u64, _: u64) -> bool {
    true
}

async fn dump(config: &EmbeddedConfig, file: &Path) -> Result<Dumped, DumpError> {
    let store = StoreConfig::Embedded(config.clone());
    threefs_kv::dump(&store, "test", file, &continues).await
}

async fn load(config: &EmbeddedConfig, kind: &str, file: &Path) -> Result<Dumped, DumpError> {
    let store = StoreConfig::Embedded(config.clone());
    threefs_kv::load(&store, kind, file, Amendment::NONE, &continues).await
}

async fn put(store: &Store, numbers: std::ops::Range<u32>, value: &[u8]) {
    let mut txn = store.begin().await.unwrap();
    for number in numbers {
        txn.set(&[b"ROWS", &number.to_be_bytes()[..]].concat(), value);
    }
    txn.set_stamped(b"STMP", b"x", b"stamped");
    txn.commit().await.unwrap();
}

async fn all(store: &Store) -> Vec<Row> {
    let mut txn = store.begin().await.unwrap();
    txn.range(&KeyRange::new(vec![1], vec![0xff]), usize::MAX).await.unwrap()
}

/// LMDB allows one process to open a folder once, so another process dumps, as the command does.
#[tokio::test]
#[ignore = "run by the tests below"]
async fn dumps_in_another_process() {
    let folder = std::env::var("DUMP_FOLDER").unwrap();
    let file = std::env::var("DUMP_FILE").unwrap();
    let dumped = dump(&config(folder.as_ref()), file.as_ref()).await.unwrap();
    println!("rows {}", dumped.rows);
}

fn dump_elsewhere(folder: &Path, file: &Path) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "dumps_in_another_process", "--ignored"])
        .env("DUMP_FOLDER", folder)
        .env("DUMP_FILE", file)
        .status()
        .unwrap();
    assert!(status.success());
}

#[tokio::test]
async fn a_dump_of_a_running_store_is_a_consistent_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dump");
    let store = Store::embedded(config(&folder.path().join("store"))).unwrap();
    put(&store, 0..1000, b"a").await;
    // Each transaction sets all rows to one value: a dump with two values is not from one snapshot.
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for round in 0..100_000u32 {
                put(&store, 0..1000, &round.to_le_bytes()).await;
            }
        })
    };
    for _ in 0..5 {
        let (at, to) = (folder.path().join("store"), file.clone());
        tokio::task::spawn_blocking(move || dump_elsewhere(&at, &to)).await.unwrap();
        let copy = tempfile::tempdir().unwrap();
        let dumped = load(&config(copy.path()), "test", &file).await.unwrap();
        let rows = all(&Store::embedded(config(copy.path())).unwrap()).await;
        assert_eq!(rows.len() as u64, dumped.rows);
        let values: std::collections::BTreeSet<&[u8]> = rows
            .iter()
            .filter(|(key, _)| key.starts_with(b"ROWS"))
            .map(|(_, it)| &it[..])
            .collect();
        assert_eq!(values.len(), 1, "rows of two snapshots");
    }
    writer.abort();
}

#[tokio::test]
async fn loaded_rows_equal_the_dumped_ones_and_versions_continue() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let file = folder.path().join("dump");
    let before = {
        let store = Store::embedded(config(&first)).unwrap();
        for round in 0..30 {
            put(&store, round * 1000..(round + 1) * 1000, b"value").await;
        }
        all(&store).await
    };
    let dumped = dump(&config(&first), &file).await.unwrap();
    assert_eq!(dumped.rows as usize, before.len());
    assert_eq!(threefs_kv::verify("test", &file, &[], &continues).unwrap().0, dumped);
    assert_eq!(load(&config(&second), "test", &file).await.unwrap(), dumped);
    let store = Store::embedded(config(&second)).unwrap();
    assert_eq!(all(&store).await, before);
    put(&store, 0..1, b"more").await;
    let error = load(&config(&second), "test", &file).await.unwrap_err();
    assert!(matches!(error, DumpError::Occupied(_)), "{error}");
}

#[tokio::test]
async fn a_truncated_altered_or_foreign_dump_is_refused_and_creates_no_store() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (folder.path().join("store"), folder.path().join("dump"));
    put(&Store::embedded(config(&store)).unwrap(), 0..100, b"value").await;
    dump(&config(&store), &file).await.unwrap();
    let whole = std::fs::read(&file).unwrap();
    let target = folder.path().join("target");
    let error_of = async |bytes: &[u8], kind: &str| {
        std::fs::write(&file, bytes).unwrap();
        let error = load(&config(&target), kind, &file).await.unwrap_err();
        assert!(matches!(error, DumpError::Damaged { .. }), "{error}");
        assert!(!target.join("data.mdb").exists());
    };
    error_of(&whole, "other").await;
    error_of(&[], "test").await;
    error_of(&[&whole[..], b"x"].concat(), "test").await;
    for at in (0..whole.len()).step_by(97) {
        error_of(&whole[..at], "test").await;
        let mut altered = whole.clone();
        altered[at] ^= 0x10;
        error_of(&altered, "test").await;
    }
    let mut huge = whole.clone();
    let at = 8 + 1 + 4;
    huge[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    error_of(&huge, "test").await;
    let error = dump(&config(&folder.path().join("none")), &file).await.unwrap_err();
    assert!(matches!(error, DumpError::Store(KvError::Broken { .. })), "{error}");
}

#[tokio::test]
async fn an_interrupted_load_is_noticed_by_a_service_and_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let file = folder.path().join("dump");
    put(&Store::embedded(config(&first)).unwrap(), 0..3000, b"value").await;
    let before = all(&Store::embedded(config(&first)).unwrap()).await;
    dump(&config(&first), &file).await.unwrap();
    let target = StoreConfig::Embedded(config(&second));
    let reports = std::sync::atomic::AtomicU64::new(0);
    // The file is read twice: the second time the rows are written.
    let stop = |_, _| reports.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 1;
    let error = threefs_kv::load(&target, "test", &file, Amendment::NONE, &stop).await.unwrap_err();
    assert!(matches!(error, DumpError::Stopped), "{error}");
    let error = Store::embedded(config(&second)).err().unwrap().to_string();
    assert!(error.contains("was interrupted") && error.contains("meta load"), "{error}");
    load(&config(&second), "test", &file).await.unwrap();
    assert_eq!(all(&Store::embedded(config(&second)).unwrap()).await, before);
}

#[tokio::test]
async fn amended_rows_replace_those_of_the_dump() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let file = folder.path().join("dump");
    put(&Store::embedded(config(&first)).unwrap(), 0..3, b"value").await;
    dump(&config(&first), &file).await.unwrap();
    let key = [b"ROWS", &1u32.to_be_bytes()[..]].concat();
    let amendment = Amendment {
        keys: &[&key, b"none"],
        rows: &|values| {
            assert_eq!(values.keys().collect::<Vec<_>>(), [&key]);
            Ok(vec![(key.clone(), b"amended".to_vec()), (b"new".to_vec(), b"1".to_vec())])
        },
    };
    let target = StoreConfig::Embedded(config(&second));
    threefs_kv::load(&target, "test", &file, amendment, &continues).await.unwrap();
    let rows = all(&Store::embedded(config(&second)).unwrap()).await;
    let values: Vec<&[u8]> = rows.iter().map(|(_, value)| &value[..]).collect();
    assert_eq!(values, [&b"value"[..], b"amended", b"value", b"stamped", b"1"]);
}

#[tokio::test]
async fn a_dump_that_fails_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    put(&Store::embedded(config(&store)).unwrap(), 0..5000, b"value").await;
    let file = folder.path().join("dump");
    let target = StoreConfig::Embedded(config(&store));
    let error = threefs_kv::dump(&target, "test", &file, &|_, _| false).await.unwrap_err();
    assert!(matches!(error, DumpError::Stopped), "{error}");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
