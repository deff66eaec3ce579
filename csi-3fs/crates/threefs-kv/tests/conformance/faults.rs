//! Faults of etcd: lost replies, killed and stopped members, compaction, bounds, space, restores.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use threefs_kv::{KeyRange, KvError, Store};

use crate::backends::{get, put, start, try_start, with_bounds};
use crate::cluster::Cluster;
use crate::proxy::{COMMIT_BYTES_MIN, Proxy};

const FAST: &str = "--unsafe-no-fsync";

/// Waits for a condition of a store.
pub(crate) async fn eventually<T>(what: &str, mut ready: impl AsyncFnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            match ready().await {
                Some(value) => return value,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(90), waiting)
        .await
        .unwrap_or_else(|_| panic!("{what}"))
}

pub(crate) async fn add(store: &Store, key: &[u8]) -> Result<(), KvError> {
    let mut txn = store.begin().await?;
    txn.atomic_add(key, 1);
    txn.commit().await.map(drop)
}

/// Each commit whose reply is lost is executed once or not at all, and the caller receives the outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_of_commits_are_decided() {
    let Some(cluster) = Cluster::start(3, &with_bounds(&[FAST])) else { return };
    let mut config = cluster.config();
    let mut proxies = Vec::new();
    for endpoint in &mut config.endpoints {
        let proxy = Proxy::start(endpoint.strip_prefix("http://").unwrap()).await;
        *endpoint = format!("http://{}", proxy.address());
        proxies.push(proxy);
    }
    let store = Store::etcd(config).await.unwrap();
    let (mut committed, mut cuts) = (0i64, 0);
    for round in 0..60 {
        if round % 2 == 0 {
            proxies.iter().for_each(Proxy::cut_next_reply_to_a_commit);
        }
        let mut txn = start(&store).await;
        let value = txn.get(b"read").await.unwrap().map_or(0, |value| value[0]);
        txn.set(b"read", [value + 1]);
        txn.set(b"padding", vec![0; COMMIT_BYTES_MIN]);
        txn.atomic_add(b"added", 1);
        match txn.commit().await {
            Ok(_) => committed += 1,
            Err(KvError::Unavailable { .. }) => {}
            Err(error) => panic!("round {round}: {error}"),
        }
        cuts = proxies.iter().map(Proxy::cuts).sum();
    }
    assert!(cuts >= 25, "only {cuts} replies were lost");
    assert!(committed >= 50, "{committed}");
    assert_eq!(get(&store, b"added").await.unwrap(), committed.to_le_bytes());
    assert_eq!(i64::from(get(&store, b"read").await.unwrap()[0]), committed);
}

/// Commits numbered transactions of two rows; returns those that were acknowledged, and the longest
/// time without one.
pub(crate) async fn write_until(store: &Store, stop: Arc<AtomicBool>) -> (BTreeSet<u64>, Duration) {
    let next = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..16)
        .map(|_| {
            let (store, next, stop) = (store.clone(), Arc::clone(&next), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut acknowledged = Vec::new();
                while !stop.load(SeqCst) {
                    let number = next.fetch_add(1, SeqCst).to_be_bytes();
                    let Ok(mut txn) = store.begin().await else { continue };
                    txn.set(&[b"a/".as_slice(), &number].concat(), *b"1");
                    txn.set(&[b"b/".as_slice(), &number].concat(), *b"2");
                    txn.bounded_add(b"count", 1, i64::MAX);
                    match txn.commit().await {
                        Ok(_) => acknowledged.push((u64::from_be_bytes(number), Instant::now())),
                        Err(KvError::Unavailable { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                acknowledged
            })
        })
        .collect();
    let mut all = Vec::new();
    for writer in writers {
        all.extend(writer.await.unwrap());
    }
    let mut times: Vec<_> = all.iter().map(|(_, at)| *at).collect();
    times.sort_unstable();
    let gap = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
    (all.into_iter().map(|(number, _)| number).collect(), gap)
}

pub(crate) async fn numbers(store: &Store, prefix: &[u8]) -> BTreeSet<u64> {
    let mut txn = start(store).await;
    let rows = txn.range(&KeyRange::prefix(prefix), usize::MAX).await.unwrap();
    rows.iter().map(|(key, _)| u64::from_be_bytes(key[2..].try_into().unwrap())).collect()
}

/// The number of transactions of [`write_until`]; `None` without a reply.
pub(crate) async fn count(store: &Store) -> Option<i64> {
    let value = try_start(store).await.ok()?.get(b"count").await.ok()??;
    Some(i64::from_le_bytes(value.try_into().unwrap()))
}

/// Starts [`write_until`]; the returned function ends it, and checks that exactly the acknowledged
/// transactions exist. It returns the longest time without one.
pub(crate) fn start_writers(store: &Store) -> impl AsyncFnOnce() -> Duration {
    let stop = Arc::new(AtomicBool::new(false));
    let (store, stopped) = (store.clone(), Arc::clone(&stop));
    let writers = {
        let store = store.clone();
        tokio::spawn(async move { write_until(&store, stopped).await })
    };
    async move || {
        stop.store(true, SeqCst);
        // An outcome that is unknown would end a writer.
        let (acknowledged, gap) = writers.await.unwrap();
        let (first, second) = (numbers(&store, b"a/").await, numbers(&store, b"b/").await);
        assert_eq!(first, second, "a transaction exists partially");
        let lost: Vec<_> = acknowledged.difference(&first).collect();
        assert!(lost.is_empty(), "lost {lost:?}");
        assert_eq!(first, acknowledged, "commits reported as not executed exist");
        assert_eq!(count(&store).await.unwrap() as usize, first.len());
        println!("{} commits, longest gap {gap:?}", first.len());
        gap
    }
}

async fn leader_fails(fail: impl Fn(&mut Cluster, usize), repair: impl Fn(&mut Cluster, usize)) {
    let Some(mut cluster) = Cluster::start(3, &with_bounds(&[FAST])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    let check = start_writers(&store);
    for _ in 0..3 {
        let before = eventually("no commits", async || count(&store).await).await;
        let leader = cluster.leader().await;
        fail(&mut cluster, leader);
        eventually("no commits without the leader", async || {
            count(&store).await.filter(|now| *now > before + 100)
        })
        .await;
        repair(&mut cluster, leader);
    }
    let gap = check().await;
    assert!(gap < Duration::from_secs(30), "{gap:?} without a commit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_acknowledged_commit_is_lost_when_leaders_are_killed() {
    leader_fails(
        |cluster, leader| cluster.members[leader].end(|| ()),
        |cluster, leader| cluster.members[leader].start(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_acknowledged_commit_is_lost_when_leaders_are_stopped() {
    leader_fails(
        |cluster, leader| cluster.members[leader].signal(Signal::STOP),
        |cluster, leader| cluster.members[leader].signal(Signal::CONT),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_written_and_it_resumes() {
    let Some(cluster) = Cluster::start(3, &with_bounds(&[FAST])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    put(&store, b"a", b"1").await;
    let mut txn = start(&store).await;
    txn.set(b"a", *b"2");
    let mut watch = store.watch(b"a");
    cluster.members[1..].iter().for_each(|member| member.signal(Signal::STOP));
    // A signal takes effect a moment later.
    let error = eventually("it does not stop", async || store.begin().await.err()).await;
    assert!(matches!(&error, KvError::Unavailable { .. }) && error.retryable(), "{error}");
    // Its outcome is open until a majority replies.
    let commit = tokio::spawn(txn.commit());
    cluster.members[1..].iter().for_each(|member| member.signal(Signal::CONT));
    let expected: &[u8] = match commit.await.unwrap() {
        Ok(_) => b"2",
        Err(KvError::Unavailable { .. }) => b"1",
        Err(error) => panic!("{error}"),
    };
    let value =
        eventually("no majority", async || store.begin().await.ok()?.get(b"a").await.ok()?);
    assert_eq!(value.await, expected);
    eventually("no majority", async || add(&store, b"n").await.ok()).await;
    put(&store, b"a", b"3").await;
    tokio::time::timeout(Duration::from_secs(60), watch.changed()).await.unwrap();
}

#[tokio::test]
async fn a_compacted_snapshot_is_too_old_and_its_commit_is_still_checked() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    put(&store, b"a", b"1").await;
    put(&store, b"b", b"1").await;
    let (mut valid, mut stale) = (start(&store).await, start(&store).await);
    valid.get(b"a").await.unwrap();
    stale.get(b"b").await.unwrap();
    put(&store, b"b", b"2").await;
    let newest = start(&store).await.read_version();
    let mut client = cluster.members[0].client().await;
    client.compact(newest as i64, None).await.unwrap();
    let error = valid.snapshot_get(b"b").await.unwrap_err();
    assert!(matches!(error, KvError::TooOld { .. }), "{error}");
    valid.set(b"c", *b"1");
    stale.set(b"d", *b"1");
    valid.commit().await.unwrap();
    assert_eq!(stale.commit().await, Err(KvError::Conflict));
}

#[tokio::test]
async fn a_member_with_low_bounds_is_refused_with_the_option_to_set() {
    for (option, index) in [("--max-txn-ops=8192", 1), ("--max-request-bytes=8388608", 0)] {
        let present = with_bounds(&[FAST]);
        let Some(cluster) = Cluster::start(1, &[present[index], FAST]) else { return };
        let error = Store::etcd(cluster.config()).await.err().unwrap().to_string();
        assert!(error.contains(option), "{error}");
    }
}

#[tokio::test]
async fn a_full_cluster_refuses_writes_completely_and_reports_its_room() {
    let quota = "--quota-backend-bytes=20971520";
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST, quota])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    assert!(!store.room().unwrap().unwrap().is_low());
    let mut filled = 0u32;
    let error = loop {
        let mut txn = start(&store).await;
        txn.set(&[b"f/".as_slice(), &filled.to_be_bytes()].concat(), vec![1; 400_000]);
        match txn.commit().await {
            Ok(_) => filled += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, KvError::NoSpace { .. }), "{error}");
    assert!(filled > 10, "{filled}");
    let mut txn = start(&store).await;
    let rows = txn.range(&KeyRange::prefix(b"f/"), usize::MAX).await.unwrap();
    assert_eq!(rows.len(), filled as usize);
    eventually("the room is not low", async || {
        store.room().unwrap().filter(|room| room.is_low() && room.max_bytes == 20 << 20)
    })
    .await;
}

#[tokio::test]
async fn a_cluster_that_went_back_is_refused() {
    let Some(mut cluster) = Cluster::start(1, &with_bounds(&[])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    put(&store, b"a", b"1").await;
    let member = &mut cluster.members[0];
    let (data, backup) = (member.folder().to_owned(), tempfile::tempdir().unwrap());
    let copy = |from: &std::path::Path, to: &std::path::Path| {
        let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
        assert!(status.unwrap().success());
    };
    member.end(|| copy(&data, &backup.path().join("data")));
    member.start();
    eventually("no leader", async || add(&store, b"n").await.ok()).await;
    cluster.members[0].end(|| {
        std::fs::remove_dir_all(&data).unwrap();
        copy(&backup.path().join("data"), &data);
    });
    cluster.members[0].start();
    let error = eventually("the restore is not noticed", async || match store.begin().await {
        Err(KvError::Unavailable { .. }) => None,
        other => other.err(),
    });
    let error = error.await;
    assert!(
        matches!(&error, KvError::Broken { detail, .. } if detail.contains("backup")),
        "{error}"
    );
    assert_eq!(add(&store, b"n").await, Err(error));
}

#[tokio::test]
async fn another_cluster_is_refused_until_it_is_accepted() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let Some(other) = Cluster::start(1, &with_bounds(&[FAST])) else { return };
    let config = cluster.config();
    drop(Store::etcd(config.clone()).await.unwrap());
    let key = format!("{}:i/identity", config.prefix);
    let mut client = cluster.members[0].client().await;
    let identity = client.get(key.clone(), None).await.unwrap().kvs()[0].value().to_vec();
    let mut client = other.members[0].client().await;
    client.put(key, identity, None).await.unwrap();
    let mut moved = threefs_kv::EtcdConfig { endpoints: other.config().endpoints, ..config };
    let error = Store::etcd(moved.clone()).await.err().unwrap().to_string();
    assert!(
        error.contains("last served by cluster") && error.contains("accept-restored"),
        "{error}"
    );
    moved.accept_restored = true;
    drop(Store::etcd(moved.clone()).await.unwrap());
    moved.accept_restored = false;
    Store::etcd(moved).await.unwrap();
}
