//! Faults of PostgreSQL: lost replies, a lost standby, settings, locks, connections, other servers.

use std::time::Duration;

use threefs_kv::{KvError, PostgresConfig, Store};
use tokio::time::{Instant, pause, resume};

use crate::backends::{get, put, start, try_start};
use crate::faults::{add, eventually};
use crate::postgres::Servers;
use crate::proxy::{COMMIT_BYTES_MIN, Proxy};

/// Each batch whose reply is lost is executed once or not at all, and the caller receives the
/// outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_of_batches_are_decided() {
    let Some(servers) = Servers::start(1) else { return };
    let proxy = Proxy::start(&format!("127.0.0.1:{}", servers.servers[0].port)).await;
    let url = format!("postgresql://threefs@{}/postgres", proxy.address());
    let config = PostgresConfig { url, ..servers.config() };
    let store = Store::postgres(config).await.unwrap();
    let mut committed = 0i64;
    for round in 0..60 {
        if round % 2 == 0 {
            proxy.cut_next_reply_to_a_commit();
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
    }
    assert!(proxy.cuts() >= 25, "only {} replies were lost", proxy.cuts());
    assert!(committed >= 50, "{committed}");
    assert_eq!(get(&store, b"added").await.unwrap(), committed.to_le_bytes());
    assert_eq!(i64::from(get(&store, b"read").await.unwrap()[0]), committed);
}

#[tokio::test]
async fn an_outcome_that_no_standby_acknowledges_is_unknown_after_a_minute() {
    let Some(mut servers) = Servers::start(1) else { return };
    let store = Store::postgres(servers.config()).await.unwrap();
    put(&store, b"a", b"1").await;
    let mut txn = start(&store).await;
    txn.set(b"a", *b"2");
    servers.servers[1].end();
    let client = servers.servers[0].client().await;
    let commit = tokio::spawn(txn.commit());
    eventually("no commit waits", async || {
        let waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        client.query_opt(waiting, &[]).await.unwrap()
    })
    .await;
    // From here on time passes only while every task waits.
    pause();
    let sent = Instant::now();
    let error = commit.await.unwrap().unwrap_err();
    let waited = sent.elapsed();
    resume();
    assert!(matches!(&error, KvError::CommitUnknown { .. }), "{error}");
    assert!(!error.retryable(), "a repetition must find out whether it was executed");
    assert!((59..120).contains(&waited.as_secs()), "{waited:?}");
    // It is executed as soon as a standby has it; later commits are not affected.
    servers.servers[1].start();
    eventually("no standby", async || add(&store, b"n").await.ok()).await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"2");
    put(&store, b"a", b"3").await;
    assert_eq!(get(&store, b"a").await.unwrap(), b"3");
}

/// A wait for the standby that is cancelled ends with a commit that the primary alone has, and with
/// a warning in place of an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_wait_for_the_standby_does_not_acknowledge() {
    let Some(mut servers) = Servers::start(1) else { return };
    let store = Store::postgres(servers.config()).await.unwrap();
    put(&store, b"a", b"1").await;
    let mut txn = start(&store).await;
    txn.set(b"a", *b"2");
    servers.servers[1].end();
    let client = servers.servers[0].client().await;
    let commit = tokio::spawn(txn.commit());
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let cancel = format!("SELECT pid, pg_cancel_backend(pid) {waiting}");
    let cancelled: i32 = eventually("no commit waits", async || {
        client.query_opt(&cancel, &[]).await.unwrap().map(|row| row.get(0))
    })
    .await;
    // The session that decides the outcome waits for the standby, too.
    let others = format!("SELECT 1 {waiting} AND pid <> $1");
    eventually("nothing confirms the commit", async || {
        client.query_opt(&others, &[&cancelled]).await.unwrap()
    })
    .await;
    assert!(!commit.is_finished(), "acknowledged without a standby");
    servers.servers[1].start();
    commit.await.unwrap().unwrap();
    assert_eq!(get(&store, b"a").await.unwrap(), b"2");
}

#[tokio::test]
async fn a_server_that_can_lose_acknowledged_commits_is_refused_with_the_remedy() {
    let Some(servers) = Servers::start(0) else { return };
    let single = servers.config();
    let error = Store::postgres(single.clone()).await.err().unwrap().to_string();
    assert!(error.contains("synchronous_standby_names"), "{error}");
    let config = PostgresConfig { accept_single: true, ..single };
    let store = Store::postgres(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;
    // Also while it runs.
    let client = servers.servers[0].client().await;
    client.batch_execute("ALTER SYSTEM SET fsync = off").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let error = eventually("fsync is not noticed", async || add(&store, b"n").await.err()).await;
    assert!(error.to_string().contains("set fsync = on"), "{error}");
    let error = Store::postgres(config).await.err().unwrap().to_string();
    assert!(error.contains("set fsync = on"), "{error}");
    client.batch_execute("ALTER SYSTEM RESET fsync").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    eventually("it does not resume", async || add(&store, b"n").await.ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_read_only_servers_and_missing_connections_are_repeatable_errors() {
    let Some(servers) = Servers::start_with(0, "max_connections = 12") else { return };
    let config = PostgresConfig { accept_single: true, ..servers.config() };
    let store = Store::postgres(config.clone()).await.unwrap();
    put(&store, b"a", b"1").await;
    let client = servers.servers[0].client().await;
    let lock = format!("START TRANSACTION; SELECT 1 FROM {}.head FOR UPDATE", config.schema);
    client.batch_execute(&lock).await.unwrap();
    let error = add(&store, b"n").await.unwrap_err();
    assert!(matches!(&error, KvError::Unavailable { .. }) && error.retryable(), "{error}");
    client.batch_execute("ROLLBACK").await.unwrap();
    add(&store, b"n").await.unwrap();

    client.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let error = eventually("it still writes", async || add(&store, b"n").await.err()).await;
    assert!(matches!(&error, KvError::Unavailable { .. }), "{error}");
    client.batch_execute("SET default_transaction_read_only = off").await.unwrap();
    client.batch_execute("ALTER SYSTEM RESET default_transaction_read_only").await.unwrap();
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    eventually("it does not resume", async || add(&store, b"n").await.ok()).await;

    // Each transaction that is held open takes a session, until none is left.
    let mut held = Vec::new();
    let mut others = Vec::new();
    let url = format!("postgresql://threefs@127.0.0.1:{}/postgres", servers.servers[0].port);
    while let Ok((client, connection)) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await
    {
        tokio::spawn(connection);
        others.push(client);
    }
    let error = loop {
        match try_start(&store).await {
            Ok(txn) => held.push(txn),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("too many clients"), "{error}");
    assert!(matches!(&error, KvError::Unavailable { .. }), "{error}");
    drop((held, others));
    eventually("it does not resume", async || add(&store, b"n").await.ok()).await;
}

#[tokio::test]
async fn a_snapshot_ends_after_seconds_so_that_others_can_start() {
    let Some(servers) = Servers::start(0) else { return };
    let config = PostgresConfig { accept_single: true, ..servers.config() };
    let store = Store::postgres(config).await.unwrap();
    let mut held = Vec::new();
    // More than there are sessions: a separate one for each, because none waits.
    for _ in 0..9 {
        held.push(try_start(&store).await.unwrap());
    }
    let error = held[0].get(b"a").await.unwrap_err();
    assert!(matches!(error, KvError::TooOld { .. }), "{error}");
    assert_eq!(held[8].get(b"a").await.unwrap(), None);
}

/// A dump of the server's own tools that is restored elsewhere.
#[tokio::test]
async fn another_server_is_refused_until_it_is_accepted() {
    let Some(servers) = Servers::start(0) else { return };
    let mut config = PostgresConfig { accept_single: true, ..servers.config() };
    drop(Store::postgres(config.clone()).await.unwrap());
    let client = servers.servers[0].client().await;
    let moved = format!("UPDATE {}.head SET system = 1", config.schema);
    client.batch_execute(&moved).await.unwrap();
    let error = Store::postgres(config.clone()).await.err().unwrap().to_string();
    assert!(error.contains("last served by") && error.contains("accept-restored"), "{error}");
    config.accept_restored = true;
    drop(Store::postgres(config.clone()).await.unwrap());
    config.accept_restored = false;
    drop(Store::postgres(config).await.unwrap());
}

#[tokio::test]
async fn a_missing_database_and_a_format_of_later_versions_are_named() {
    let Some(servers) = Servers::start(0) else { return };
    let config = PostgresConfig { accept_single: true, ..servers.config() };
    let url = config.url.replace("/postgres", "/absent");
    let error = Store::postgres(PostgresConfig { url, ..config.clone() }).await.err().unwrap();
    assert!(error.to_string().contains("\"absent\" does not exist"), "{error}");
    drop(Store::postgres(config.clone()).await.unwrap());
    let client = servers.servers[0].client().await;
    client.batch_execute(&format!("UPDATE {}.head SET format = 2", config.schema)).await.unwrap();
    let error = tokio::time::timeout(Duration::from_secs(60), Store::postgres(config)).await;
    let error = error.unwrap().err().unwrap().to_string();
    assert!(error.contains("its format is 2"), "{error}");
}
