//! Creates per second on three etcd members that sync, through the store and one request each, and on
//! PostgreSQL with a standby.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use threefs_kv::Store;

use crate::backends::{start, with_bounds};
use crate::cluster::Cluster;
use crate::postgres::Servers;

const MEASURED: Duration = Duration::from_secs(5);

/// The rows of a create: 409 bytes of keys and values.
fn rows(number: u64) -> [(Vec<u8>, Vec<u8>); 3] {
    let row = |prefix: &[u8], key_bytes: usize, value_bytes: usize| {
        let mut key = [prefix, &number.to_be_bytes()].concat();
        key.resize(key_bytes, b'k');
        (key, vec![7; value_bytes])
    };
    [row(b"DENT", 40, 12), row(b"INOD", 12, 180), row(b"ANSW", 25, 140)]
}

/// Runs `create` in concurrent tasks; returns the rate and the 99th percentile of the latency.
async fn measure<F: Future<Output = ()> + Send>(
    tasks: usize,
    create: impl Fn(u64) -> F + Send + Sync + 'static,
) -> (f64, Duration) {
    let (next, create) = (Arc::new(AtomicU64::new(0)), Arc::new(create));
    let started = Instant::now();
    let running: Vec<_> = (0..tasks)
        .map(|_| {
            let (next, create) = (Arc::clone(&next), Arc::clone(&create));
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                while started.elapsed() < MEASURED {
                    let at = Instant::now();
                    create(next.fetch_add(1, SeqCst)).await;
                    latencies.push(at.elapsed());
                }
                latencies
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for task in running {
        latencies.extend(task.await.unwrap());
    }
    let rate = latencies.len() as f64 / started.elapsed().as_secs_f64();
    latencies.sort_unstable();
    (rate, latencies[latencies.len() * 99 / 100])
}

/// Creates through a store, by more and more callers.
async fn creates(store: Store) {
    for tasks in [1, 64, 256, 1024] {
        let (store, salt) = (store.clone(), (tasks as u64) << 40);
        let (rate, latency) = measure(tasks, move |number| {
            let store = store.clone();
            async move {
                let mut txn = start(&store).await;
                let rows = rows(salt | number);
                assert_eq!(txn.get(&rows[0].0).await.unwrap(), None);
                for (key, value) in rows {
                    txn.set(&key, value);
                }
                txn.bounded_add(b"bytes", 409, i64::MAX);
                txn.commit().await.unwrap();
            }
        })
        .await;
        println!("store, {tasks} callers: {rate:.0} creates/s, p99 {latency:?}");
    }
}

/// Reads of two rows, as a stat makes them, of the creates of 64 callers.
async fn stats(store: Store) {
    for tasks in [1, 64, 256, 1024] {
        let store = store.clone();
        let (rate, latency) = measure(tasks, move |number| {
            let store = store.clone();
            async move {
                let mut txn = start(&store).await;
                for (key, _) in &rows((64 << 40) | (number % 5000))[..2] {
                    assert!(txn.snapshot_get(key).await.unwrap().is_some());
                }
            }
        })
        .await;
        println!("store, {tasks} callers: {rate:.0} stats/s, p99 {latency:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; needs a quiet machine"]
async fn creates_per_second_with_a_standby() {
    let servers = Servers::start_in(&std::env::temp_dir(), 1, "").expect("needs PostgreSQL");
    let store = Store::postgres(servers.config()).await.unwrap();
    creates(store.clone()).await;
    stats(store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; needs a quiet machine"]
async fn creates_per_second() {
    let cluster = Cluster::start(3, &with_bounds(&[])).expect("needs etcd");
    creates(Store::etcd(cluster.config()).await.unwrap()).await;
    let mut clients = Vec::new();
    for member in &cluster.members {
        clients.push(member.client().await);
    }
    let (rate, latency) = measure(64, move |number| {
        let mut client = clients[number as usize % clients.len()].clone();
        async move {
            let rows = rows(number).map(|(key, value)| ([b"/one/", &key[..]].concat(), value));
            client.get(rows[0].0.clone(), None).await.unwrap();
            let absent = Compare::mod_revision(rows[0].0.clone(), CompareOp::Equal, 0);
            let puts: Vec<_> =
                rows.into_iter().map(|(key, value)| TxnOp::put(key, value, None)).collect();
            client.txn(Txn::new().when([absent]).and_then(puts)).await.unwrap();
        }
    })
    .await;
    println!("one request each, 64 callers: {rate:.0} creates/s, p99 {latency:?}");
}
