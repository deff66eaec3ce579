//! kill -9 at random times: every acknowledged transaction exists afterwards, and no transaction
//! exists partially.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rand::Rng;
use threefs_kv::{EmbeddedConfig, KeyRange, Store};

const CHILD: &str = "THREEFS_KV_KILL_CHILD";
const ROUNDS: usize = 12;
const WRITERS: u64 = 16;
/// Maximum time without output of a child: output takes milliseconds, and a start from a cold disk
/// takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Commits numbered transactions of two rows each, from many concurrent tasks; prints each number
/// once it is acknowledged. Runs until it is killed.
async fn commit_for_ever(path: &Path) {
    let store = Store::embedded(EmbeddedConfig::new(path)).unwrap();
    let first = rows(&store).await.last().map_or(0, |last| last + 1);
    let next = std::sync::Arc::new(AtomicU64::new(first));
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| {
            let (store, next) = (store.clone(), next.clone());
            tokio::spawn(async move {
                loop {
                    let number = next.fetch_add(1, SeqCst);
                    let mut txn = store.begin().await.unwrap();
                    txn.set(&[b"a/".as_slice(), &number.to_be_bytes()].concat(), vec![7; 100]);
                    txn.set(&[b"b/".as_slice(), &number.to_be_bytes()].concat(), vec![8; 100]);
                    txn.commit().await.unwrap();
                    let mut out = std::io::stdout().lock();
                    writeln!(out, "acknowledged {number}").and_then(|()| out.flush()).unwrap();
                }
            })
        })
        .collect();
    // None of the tasks ends, so it is enough to await the first.
    writers.into_iter().next().unwrap().await.unwrap();
}

/// The numbers in the store; both rows of each must exist.
async fn rows(store: &Store) -> Vec<u64> {
    let mut txn = store.begin().await.unwrap();
    let mut numbers = Vec::new();
    for prefix in [b"a/", b"b/"] {
        let rows = txn.range(&KeyRange::prefix(prefix), usize::MAX).await.unwrap();
        let of_prefix: Vec<u64> =
            rows.iter().map(|(key, _)| u64::from_be_bytes(key[2..].try_into().unwrap())).collect();
        numbers.push(of_prefix);
    }
    assert_eq!(numbers[0], numbers[1], "a transaction exists partially");
    numbers.swap_remove(0)
}

/// The numbers that a child acknowledges, read by a thread, so that waits have a deadline.
fn listen(output: ChildStdout) -> Receiver<u64> {
    let (sender, numbers) = channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        let read = lines.filter_map(|line| line.strip_prefix("acknowledged ")?.parse().ok());
        read.map(|number| sender.send(number)).take_while(Result::is_ok).for_each(drop);
    });
    numbers
}

#[test]
fn acknowledged_commits_survive_kill_9() {
    if let Ok(path) = std::env::var(CHILD) {
        return runtime().block_on(commit_for_ever(Path::new(&path)));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kv");
    let mut acknowledged = BTreeSet::new();
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "acknowledged_commits_survive_kill_9", "--nocapture"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let numbers = listen(child.stdout.take().unwrap());
        // After this many commits, and a random time, so that the kill falls between two of them.
        let mut hangs = false;
        for _ in 0..rand::rng().random_range(90..200) {
            match numbers.recv_timeout(PATIENCE) {
                Ok(number) => _ = acknowledged.insert(number),
                Err(error) => {
                    hangs = error == RecvTimeoutError::Timeout;
                    break;
                }
            }
        }
        std::thread::sleep(Duration::from_micros(rand::rng().random_range(0..5_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!hangs, "round {round}: the child printed nothing for {PATIENCE:?}");
        acknowledged.extend(numbers);
        let stored_numbers: BTreeSet<u64> = runtime()
            .block_on(async { rows(&Store::embedded(EmbeddedConfig::new(&path)).unwrap()).await })
            .into_iter()
            .collect();
        let missing: Vec<_> = acknowledged.difference(&stored_numbers).collect();
        assert!(missing.is_empty(), "round {round}: lost {missing:?}");
    }
    assert!(acknowledged.len() > 1000, "only {} commits: too little", acknowledged.len());
}
