//! Two cluster managers over one store: the standby takes over when the primary is killed.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::{Duration, Instant};

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{Shutdown, ShutdownHandle};
use threefs_core::heartbeat::{DataFolder, FenceReport, Heartbeat, SeenRouting};
use threefs_core::ids::{Incarnation, NodeId, RoutingVersion};
use threefs_core::location::Location;
use threefs_kv::Store;
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, NodeReport, Timers};
use tokio::task::JoinHandle;

const TIMERS: Timers = Timers { node_failure_ms: 60_000, primary_lease_ms: 500, scan_ms: 10 };
const KILLS: usize = 4;

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn heartbeat(incarnation: u64) -> Heartbeat {
    Heartbeat {
        node: NodeId(1),
        address: "127.0.0.1:1".into(),
        incarnation: Incarnation(incarnation),
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    }
}

struct Service {
    address: String,
    task: JoinHandle<()>,
    _alive: ShutdownHandle,
}

impl Service {
    /// Retries until the port of its predecessor is free.
    async fn start(store: &Store, listen: &str) -> Self {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mgmtd = loop {
            let config = MgmtdConfig {
                listen: listen.into(),
                advertise: None,
                key: key().into(),
                tls: fabric::tls::ServiceTls::default(),
                store: threefs_kv::StoreConfig::folder("unused"),
                // No chains: a new primary knows at once that no node has targets.
                bootstrap: Bootstrap { nodes: 2, replicas: 1, chains_per_node: 4 },
                rebalance: true,
                timers: TIMERS,
            };
            match Mgmtd::open_on(store.clone(), config).await {
                Ok(mgmtd) => break mgmtd,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let address = mgmtd.address().to_string();
        let (handle, shutdown) = Shutdown::new();
        let task = tokio::spawn(async move { mgmtd.serve(shutdown).await.unwrap() });
        Self { address, task, _alive: handle }
    }
}

/// A primary that is stopped or cut off accepts connections and does not reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_with_short_deadlines_pass_a_silent_mgmtd() {
    let store = Store::shared_memory();
    let primary = Service::start(&store, "127.0.0.1:0").await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [silent.local_addr().unwrap().to_string(), primary.address.clone()];
    let client = MgmtdClient::new(&addresses, &key());
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut sequence = 0;
    loop {
        sequence += 1;
        let heartbeat = Heartbeat { sequence, ..heartbeat(1) };
        match client.heartbeat(heartbeat, Deadline::after(Duration::from_millis(250))).await {
            Ok(_) => break,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    }
    let states = client.status_of_each(Deadline::after(Duration::from_millis(250))).await;
    assert!(matches!(states[..], [Err(_), Ok(_)]), "{states:?}");
    let follower = client.follow();
    follower.wait_for(soon(), |routing| routing.version > RoutingVersion(0)).await.unwrap();
}

/// The times of the calls are much longer than the test may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_does_not_wait_for_a_silent_mgmtd() {
    let store = Store::shared_memory();
    let primary = Service::start(&store, "127.0.0.1:0").await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [silent.local_addr().unwrap().to_string(), primary.address.clone()];
    let client = MgmtdClient::new(&addresses, &key());
    let mut heartbeats = client.heartbeats::<u64>();
    let exchange = async {
        for sequence in 1..=100 {
            let report = NodeReport {
                heartbeat: Heartbeat { sequence, ..heartbeat(1) },
                location: Location::default(),
                seen: SeenRouting::default(),
                fences: FenceReport::default(),
            };
            heartbeats.send(&report, &sequence, Duration::from_secs(600));
            let reply = heartbeats.reply().await;
            // Before the mgmtd is the primary it refuses.
            assert_eq!((reply.tag, reply.missed), (sequence, false), "{:?}", reply.result);
            if reply.result.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no heartbeat was accepted");
    };
    tokio::time::timeout(Duration::from_secs(60), exchange).await.unwrap();
    // Other calls do not wait for the silent one either: their attempts last for seconds.
    let calls = async {
        for _ in 0..50 {
            client.status(soon()).await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(60), calls).await.unwrap();
}

/// The primary owes a reply while a report changes: the change is sent when it replies.
#[tokio::test]
async fn a_heartbeat_that_an_mgmtd_has_missed_is_named() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = MgmtdClient::new(&[silent.local_addr().unwrap().to_string()], &key());
    let mut heartbeats = client.heartbeats::<u64>();
    let report = NodeReport {
        heartbeat: heartbeat(1),
        location: Location::default(),
        seen: SeenRouting::default(),
        fences: FenceReport::default(),
    };
    heartbeats.send(&report, &1, Duration::from_millis(100));
    heartbeats.send(&report, &2, Duration::from_millis(100));
    let reply = heartbeats.reply().await;
    assert_eq!((reply.tag, reply.missed), (1, true));
    reply.result.unwrap_err();
    heartbeats.send(&report, &3, Duration::from_millis(100));
    let reply = heartbeats.reply().await;
    assert_eq!((reply.tag, reply.missed), (3, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_takes_over_from_a_killed_primary_and_loses_no_decision() {
    let store = Store::shared_memory();
    let mut services =
        [Service::start(&store, "127.0.0.1:0").await, Service::start(&store, "127.0.0.1:0").await];
    let addresses = services.each_ref().map(|service| service.address.clone());
    let client = MgmtdClient::new(&addresses, &key());
    let (mut version, mut epoch) = (RoutingVersion(0), 0);
    for kill in 0..KILLS as u64 {
        // Each start of the node is a decision, which is durable before it is answered.
        client.heartbeat(heartbeat(kill + 1), soon()).await.unwrap();
        let routing = client.routing(RoutingVersion(0), Duration::ZERO, soon()).await.unwrap();
        let routing = routing.unwrap();
        assert!(routing.version > version, "{:?} after {version:?}", routing.version);
        let status = client.status(soon()).await.unwrap();
        assert!(status.epoch > epoch);
        (version, epoch) = (routing.version, status.epoch);
        let primary = services.iter().position(|it| it.address == status.primary).unwrap();
        let killed = Instant::now();
        services[primary].task.abort();
        let _ = (&mut services[primary].task).await;
        let status = client.status(soon()).await.unwrap();
        assert_ne!(status.primary, addresses[primary]);
        println!("primary again after {:?}", killed.elapsed());
        services[primary] = Service::start(&store, &addresses[primary]).await;
    }
    // A former process of the node does not return.
    client.heartbeat(heartbeat(1), soon()).await.unwrap_err();
}
