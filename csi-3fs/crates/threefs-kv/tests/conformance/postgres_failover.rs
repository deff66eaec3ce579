//! A primary that is killed under load, and the standby that replaces it.

use threefs_kv::{KvError, PostgresConfig, Store};

use crate::backends::{get, put, try_start};
use crate::faults::{add, count, eventually, start_writers};
use crate::postgres::Servers;

/// The standby that has received the most.
async fn most_advanced(servers: &Servers, standbys: [usize; 2]) -> usize {
    let mut best = (String::new(), standbys[0]);
    for standby in standbys {
        let client = servers.servers[standby].client().await;
        let received = "SELECT lpad(split_part(pg_last_wal_receive_lsn()::text, '/', 1), 8, '0') \
            || lpad(split_part(pg_last_wal_receive_lsn()::text, '/', 2), 8, '0')";
        let received: String = client.query_one(received, &[]).await.unwrap().get(0);
        best = best.max((received, standby));
    }
    best.1
}

/// Each acknowledged commit is on one of two standbys, so the one with the most has all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_acknowledged_commit_is_lost_when_the_primary_is_killed() {
    let Some(mut servers) = Servers::start(2) else { return };
    let store = Store::postgres(servers.config()).await.unwrap();
    let check = start_writers(&store);
    eventually("no commits", async || count(&store).await.filter(|now| *now > 300)).await;
    servers.servers[0].end();
    let promoted = most_advanced(&servers, [1, 2]).await;
    let follower = 3 - promoted;
    servers.servers[promoted].promote();
    servers.follow(follower, promoted).await;
    let before = eventually("no server", async || count(&store).await).await;
    eventually("no commits", async || count(&store).await.filter(|now| *now > before + 300)).await;
    check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_killed_and_started_again_has_every_acknowledged_commit() {
    let Some(mut servers) = Servers::start(1) else { return };
    let store = Store::postgres(servers.config()).await.unwrap();
    for round in 0..3u8 {
        put(&store, &[b'k', round], b"1").await;
        servers.servers[0].end();
        servers.servers[0].start();
        eventually("no server", async || try_start(&store).await.ok()).await;
        assert_eq!(get(&store, &[b'k', round]).await.unwrap(), b"1");
    }
    eventually("no standby", async || add(&store, b"n").await.ok()).await;
}

/// A store whose newest commit is missing on the standby that was promoted, and its configuration.
async fn promoted_without_the_newest_commit() -> Option<(Servers, PostgresConfig, Store)> {
    let mut servers = Servers::start_with(1, "synchronous_standby_names = ''")?;
    let config = PostgresConfig { accept_single: true, ..servers.config() };
    let store = Store::postgres(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;
    servers.caught_up().await;
    servers.servers[1].end();
    put(&store, b"a", b"2").await;
    servers.servers[0].end();
    servers.servers[1].start();
    servers.servers[1].wait();
    servers.servers[1].promote();
    Some((servers, config, store))
}

/// The error with which a store notices that.
async fn refusal(store: &Store) -> KvError {
    eventually("the loss is not noticed", async || match try_start(store).await {
        Err(KvError::Unavailable { .. }) => None,
        other => other.err(),
    })
    .await
}

/// Without a synchronous standby, a promotion may lose acknowledged commits; a process that has
/// seen one of them does not continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_standby_without_all_commits_is_refused() {
    let Some((_servers, config, store)) = promoted_without_the_newest_commit().await else {
        return;
    };
    let error = refusal(&store).await;
    assert!(
        matches!(&error, KvError::Broken { detail, .. } if detail.contains("without all")),
        "{error}"
    );
    assert_eq!(add(&store, b"n").await, Err(error));
    // A process that starts now knows nothing of it, as after a restore.
    let store = Store::postgres(config).await.unwrap();
    assert_eq!(get(&store, b"a").await.unwrap(), b"1");
}

/// Another process may have committed on the promoted server by then: versions alone would match.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_history_is_refused_although_it_is_longer() {
    let Some((_servers, config, store)) = promoted_without_the_newest_commit().await else {
        return;
    };
    let other = Store::postgres(config).await.unwrap();
    for round in 0..5u8 {
        put(&other, b"b", &[round]).await;
    }
    let error = refusal(&store).await;
    assert!(error.to_string().contains("another history"), "{error}");
}
