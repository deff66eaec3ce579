//! mgmtd as a service: registration, long polls, a restart, invalid input.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use fabric::auth::Key;
use fabric::auth::keys::KeyRing;
use fabric::auth::ticket::{SealedTicket, Ticket};
use fabric::deadline::Deadline;
use fabric::rpc::{
    Connection, ConnectionConfig, DEFAULT_CLUSTER, Payload, Shutdown, ShutdownHandle, encode,
};
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{Incarnation, NodeId, RoutingVersion};
use threefs_mgmtd::protocol::{CONTEXT, MgmtdRequest, WAIT_MS_MAX};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, Timers};
use tokio::task::{JoinHandle, JoinSet};

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

async fn start(listen: &str, folder: &Path) -> (String, ShutdownHandle, JoinHandle<()>) {
    let config = MgmtdConfig {
        listen: listen.into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_mgmtd::StoreConfig::folder(folder.join("mgmtd")),
        bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 },
        rebalance: true,
        timers: Timers { scan_ms: 5, ..Timers::one_machine() },
    };
    let mgmtd = Mgmtd::open(config).await.unwrap();
    let (handle, shutdown) = Shutdown::new();
    let address = mgmtd.address().to_string();
    let task = tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
    (address, handle, task)
}

fn heartbeat(sequence: u64) -> Heartbeat {
    let (node, incarnation) = (NodeId(7), Incarnation(1));
    Heartbeat {
        node,
        address: "127.0.0.1:1".into(),
        incarnation,
        sequence,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    }
}

#[tokio::test]
async fn followers_learn_of_changes_at_once_and_through_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (address, handle, task) = start("127.0.0.1:0", folder.path()).await;
    let client = MgmtdClient::new(std::slice::from_ref(&address), &key());
    let follower = client.follow();
    client.heartbeat(heartbeat(1), soon()).await.unwrap();
    let routing = follower.wait_for(soon(), |routing| routing.chains.len() == 4).await.unwrap();
    assert_eq!(routing.address(NodeId(7)), Some("127.0.0.1:1"));
    let nothing = client.routing(routing.version, Duration::from_millis(50), soon()).await.unwrap();
    assert_eq!(nothing, None);

    handle.request();
    task.await.unwrap();
    let (_, _handle, _task) = start(&address, folder.path()).await;
    let status = client.status(soon()).await.unwrap();
    assert_eq!((status.epoch, status.chains), (2, 4));
    let same = client.routing(RoutingVersion(0), Duration::ZERO, soon()).await.unwrap().unwrap();
    assert_eq!(same, *routing);
    // The follower's connection was lost; it receives the next change nevertheless.
    let new_address = Heartbeat { address: "127.0.0.1:2".into(), ..heartbeat(2) };
    client.heartbeat(new_address, soon()).await.unwrap();
    follower
        .wait_for(soon(), |routing| routing.address(NodeId(7)) == Some("127.0.0.1:2"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_second_mgmtd_on_the_same_store_or_port_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _handle, _task) = start("127.0.0.1:0", folder.path()).await;
    let config = |listen: &str| MgmtdConfig {
        listen: listen.into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: threefs_mgmtd::StoreConfig::folder(folder.path().join("mgmtd")),
        bootstrap: Bootstrap { nodes: 1, replicas: 1, chains_per_node: 1 },
        rebalance: true,
        timers: Timers::one_machine(),
    };
    let error = Mgmtd::open(config(&address)).await.err().unwrap().to_string();
    assert!(error.contains(&address), "{error}");
    let error = Mgmtd::open(config("127.0.0.1:0")).await.err().unwrap().to_string();
    assert!(error.contains("mgmtd"), "{error}");
}

#[tokio::test]
async fn the_deadline_holds_without_any_reply() {
    let client = MgmtdClient::new(&["127.0.0.1:1".into()], &key());
    let error = client.status(Deadline::after(Duration::from_millis(200))).await.unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

fn ticket() -> SealedTicket {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let ticket = Ticket {
        cluster: DEFAULT_CLUSTER.into(),
        key_id: 0,
        directory: 77,
        path: "/volumes/a".into(),
        read_only: true,
        node: String::new(),
        expires_unix_s: now.as_secs() + 600,
    };
    ticket.seal(&KeyRing::of(key())).unwrap()
}

/// A refused heartbeat ends the leases of a node: a volume credential could stop the cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_polls_of_a_volume_never_exclude_a_heartbeat() {
    let folder = tempfile::tempdir().unwrap();
    let (address, _handle, _task) = start("127.0.0.1:0", folder.path()).await;
    let node = MgmtdClient::new(std::slice::from_ref(&address), &key());
    node.heartbeat(heartbeat(1), soon()).await.unwrap();
    let poll =
        MgmtdRequest::Routing { known_version: RoutingVersion(u64::MAX), wait_ms: WAIT_MS_MAX };
    let poll = encode(&poll).unwrap();
    let mut polls = JoinSet::new();
    for _ in 0..10 {
        let config = ConnectionConfig::new(CONTEXT, ticket());
        let connection = Connection::open(&address, config, soon()).await.unwrap();
        let connection = std::sync::Arc::new(connection);
        for _ in 0..1_000 {
            let (connection, poll) = (std::sync::Arc::clone(&connection), poll.clone());
            polls.spawn(async move { connection.call(poll, Payload::empty(), soon()).await });
        }
    }
    // Some are refused: the others use all available slots.
    while polls.join_next().await.unwrap().unwrap().is_ok() {}
    let deadline = Deadline::after(Duration::from_millis(WAIT_MS_MAX / 3));
    node.heartbeat(heartbeat(2), deadline).await.unwrap();
}
