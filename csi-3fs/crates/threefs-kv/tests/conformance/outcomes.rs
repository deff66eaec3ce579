//! Outcomes that no member decides, with tokio's clock in place of the machine's.

use std::time::Duration;

use rustix::process::Signal;
use threefs_kv::{KvError, Store};
use tokio::time::{Instant, pause, resume};

use crate::backends::{get, put, start, with_bounds};
use crate::cluster::Cluster;

/// Waits until no process of the cluster runs: a signal takes effect a moment later.
async fn stop(cluster: &Cluster, store: &Store) {
    cluster.members.iter().for_each(|member| member.signal(Signal::STOP));
    let stopped = async { while store.begin().await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(60), stopped).await.unwrap();
}

#[tokio::test]
async fn an_outcome_that_no_member_decides_is_unknown_after_a_minute() {
    let Some(cluster) = Cluster::start(1, &with_bounds(&["--unsafe-no-fsync"])) else { return };
    let store = Store::etcd(cluster.config()).await.unwrap();
    // Creates the marker of a lane.
    put(&store, b"a", b"1").await;
    let mut txn = start(&store).await;
    txn.set(b"a", *b"2");
    stop(&cluster, &store).await;
    // From here on time passes only while every task waits.
    pause();
    let sent = Instant::now();
    let error = txn.commit().await.unwrap_err();
    let waited = sent.elapsed();
    resume();
    assert!(matches!(&error, KvError::CommitUnknown { .. }), "{error}");
    assert!(!error.retryable(), "a repetition must find out whether it was executed");
    assert!((60..90).contains(&waited.as_secs()), "{waited:?}");
    // The request may be executed now; later commits are not affected by it.
    cluster.members[0].signal(Signal::CONT);
    let again = async {
        loop {
            let Ok(mut txn) = store.begin().await else { continue };
            txn.set(b"b", *b"3");
            match txn.commit().await {
                Ok(_) => return,
                Err(KvError::Unavailable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), again).await.unwrap();
    let value = get(&store, b"a").await.unwrap();
    assert!(value == b"1" || value == b"2", "{value:?}");
    put(&store, b"a", b"4").await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"4");
}
