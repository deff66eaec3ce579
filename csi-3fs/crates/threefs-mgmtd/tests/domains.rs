//! Failure domains over the network, also with an mgmtd of an older version.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::{
    Call, Fault, FaultCode, Reply, Server, ServerConfig, Service, Shutdown, decode_request,
};
use threefs_core::heartbeat::{DataFolder, Heartbeat, HeartbeatReply};
use threefs_core::ids::{FencesVersion, Incarnation, NodeId, RoutingVersion};
use threefs_core::location::{Level, Location};
use threefs_mgmtd::protocol::CONTEXT;
use threefs_mgmtd::{
    Bootstrap, DrainChange, Mgmtd, MgmtdClient, MgmtdClientError, MgmtdConfig, MgmtdReply,
    MgmtdRequest, MgmtdResult, NodeReport, RebalancePlan, StoreConfig, Timers,
};

fn key() -> Key {
    Key::from_bytes(b"a key of sixteen bytes or more").unwrap()
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

async fn send(
    client: &MgmtdClient,
    location: Location,
    node: u32,
) -> Result<(HeartbeatReply, FencesVersion), MgmtdClientError> {
    let (seen, fences) = Default::default();
    let report = NodeReport { heartbeat: heartbeat(node), location, seen, fences };
    let mut heartbeats = client.heartbeats();
    heartbeats.send(&report, &(), Duration::from_secs(60));
    heartbeats.reply().await.result
}

fn heartbeat(node: u32) -> Heartbeat {
    Heartbeat {
        node: NodeId(node),
        address: format!("127.0.0.1:{node}"),
        incarnation: Incarnation(1),
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    }
}

#[tokio::test]
async fn chains_are_placed_by_the_locations_of_the_first_heartbeats() {
    let folder = tempfile::tempdir().unwrap();
    let config = MgmtdConfig {
        listen: "127.0.0.1:0".into(),
        advertise: None,
        key: key().into(),
        tls: fabric::tls::ServiceTls::default(),
        store: StoreConfig::folder(folder.path().join("mgmtd")),
        bootstrap: Bootstrap { nodes: 4, replicas: 2, chains_per_node: 3 },
        rebalance: true,
        timers: Timers { node_failure_ms: 60_000, scan_ms: 5, ..Timers::one_machine() },
    };
    let mgmtd = Mgmtd::open(config).await.unwrap();
    let (_handle, shutdown) = Shutdown::new();
    let client = MgmtdClient::new(&[mgmtd.address().to_string()], &key());
    let _serving = tokio::spawn(mgmtd.serve(shutdown));
    let follower = client.follow();
    for node in 1..=4 {
        let zone = if node <= 2 { "A" } else { "B" };
        let location = Location::new(zone, "", &format!("host-{node}")).unwrap();
        // Refused until this mgmtd is the primary.
        while send(&client, location.clone(), node).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let routing = follower.wait_for(soon(), |routing| !routing.chains.is_empty()).await.unwrap();
    assert_eq!(routing.nodes[&NodeId(1)].location.to_string(), "A//host-1");
    let zone = |node: &NodeId| routing.nodes[node].location.part(Level::Zone);
    for chain in routing.chains.values() {
        let zones: Vec<&str> = chain.targets.iter().map(|place| zone(&place.node)).collect();
        assert!(zones == ["A", "B"] || zones == ["B", "A"], "{zones:?}");
    }
    let report = client.domains(soon()).await.unwrap().unwrap();
    assert_eq!((report.level, report.violations_total), (Some(Level::Zone), 0));
    assert!(report.reasons.is_empty(), "{report:?}");
}

/// An mgmtd that does not know locations; node 3 is drained.
struct OldMgmtd(Arc<Mutex<Vec<MgmtdRequest>>>);

impl Service for OldMgmtd {
    async fn handle(&self, call: Call) -> Result<Reply, Fault> {
        let request: MgmtdRequest = decode_request(&call)?;
        self.0.lock().unwrap().push(request.clone());
        match request {
            MgmtdRequest::Heartbeat(_) => {
                let reply = HeartbeatReply { routing_version: RoutingVersion(1), lease_ms: 500 };
                Reply::of::<MgmtdResult>(&Ok(MgmtdReply::Heartbeat(reply)))
            }
            MgmtdRequest::Rebalance { leaving, .. } => {
                let plan = RebalancePlan {
                    automatic: true,
                    leaving: leaving.unwrap_or_else(|| vec![NodeId(3)]),
                    new_chains: 0,
                    moves: Vec::new(),
                    under_way: Vec::new(),
                    stuck: 0,
                };
                Reply::of::<MgmtdResult>(&Ok(MgmtdReply::Plan(plan)))
            }
            _ => Err(Fault { code: FaultCode::BadRequest, detail: "unknown variant".into() }),
        }
    }
}

#[tokio::test]
async fn an_older_mgmtd_gets_heartbeats_without_locations() {
    let server = ServerConfig::new(CONTEXT, key());
    let server = Server::bind("127.0.0.1:0", server).await.unwrap();
    let client = MgmtdClient::new(&[server.address().to_string()], &key());
    let requests = Arc::default();
    let (_handle, shutdown) = Shutdown::new();
    let _serving = tokio::spawn(server.serve(OldMgmtd(Arc::clone(&requests)), shutdown));
    let location = Location::new("A", "", "h").unwrap();
    let reply = send(&client, location, 1).await.unwrap();
    assert_eq!((reply.0.lease_ms, reply.1), (500, FencesVersion(0)));
    assert!(matches!(
        requests.lock().unwrap()[..],
        [
            MgmtdRequest::FencedHeartbeat { .. },
            MgmtdRequest::SeenHeartbeat { .. },
            MgmtdRequest::LocatedHeartbeat { .. },
            MgmtdRequest::Heartbeat(_)
        ]
    ));
    assert_eq!(client.domains(soon()).await.unwrap(), None);
    assert_eq!(client.moves(true, soon()).await.unwrap(), None);
    assert_eq!(client.unconfirmed(soon()).await.unwrap(), None);
    assert_eq!(client.move_rate(None, soon()).await.unwrap(), None);
    let error = client.move_rate(Some(5), soon()).await.unwrap_err();
    assert!(error.to_string().contains("unknown variant"), "{error}");
}

#[tokio::test]
async fn an_older_mgmtd_gets_the_list_of_all_drained_nodes() {
    let server = ServerConfig::new(CONTEXT, key());
    let server = Server::bind("127.0.0.1:0", server).await.unwrap();
    let client = MgmtdClient::new(&[server.address().to_string()], &key());
    let (_handle, shutdown) = Shutdown::new();
    let _serving = tokio::spawn(server.serve(OldMgmtd(Arc::default()), shutdown));
    for (change, leaving) in [
        (DrainChange::Add(vec![NodeId(1)]), vec![NodeId(1), NodeId(3)]),
        (DrainChange::Remove(vec![NodeId(3)]), Vec::new()),
        (DrainChange::RemoveAll, Vec::new()),
    ] {
        assert_eq!(client.drain(true, change, soon()).await.unwrap().leaving, leaving);
    }
}
