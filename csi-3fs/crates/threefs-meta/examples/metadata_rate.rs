//! Benchmark of durable creations and stats per second of one service over loopback TCP:
//! `cargo run --release -p threefs-meta --example metadata_rate [folder] [in flight]`.
// Errors abort the benchmark with a panic.
#![allow(clippy::unwrap_used)]

#[path = "../tests/calls/mod.rs"]
mod calls;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::auth::Key;
use fabric::deadline::Deadline;
use fabric::rpc::Shutdown;
use threefs_core::heartbeat::{DataFolder, Heartbeat};
use threefs_core::ids::{ClientId, Incarnation, NodeId};
use threefs_meta::{At, Meta, MetaClient, MetaConfig, NoChunks, TreeConfig};
use threefs_mgmtd::{Bootstrap, Mgmtd, MgmtdClient, MgmtdConfig, Timers};

use calls::Calls;

const FILES: usize = 20_000;

fn deadline() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "build/metadata-rate".into());
    let in_flight: usize = std::env::args().nth(2).map_or(64, |number| number.parse().unwrap());
    let _ = std::fs::remove_dir_all(&folder);
    let key = Key::from_bytes(&[7; 32]).unwrap();
    let bootstrap = Bootstrap { nodes: 1, replicas: 1, chains_per_node: 4 };
    let store_path = format!("{folder}/mgmtd").into();
    let (listen, timers) = ("127.0.0.1:0".to_owned(), Timers::one_machine());
    let mgmtd = MgmtdConfig {
        tls: fabric::tls::ServiceTls::default(),
        listen: listen.clone(),
        advertise: None,
        key: key.clone().into(),
        store_path,
        bootstrap,
        rebalance: true,
        timers,
    };
    let mgmtd = Mgmtd::open(mgmtd).await.unwrap();
    let addresses = vec![mgmtd.address().to_string()];
    let (_handle, shutdown) = Shutdown::new();
    tokio::spawn(mgmtd.serve(shutdown.clone()));
    let (node, address, incarnation) = (NodeId(1), "127.0.0.1:1".into(), Incarnation(1));
    let heartbeat = Heartbeat {
        node,
        address,
        incarnation,
        sequence: 1,
        targets: Vec::new(),
        capacity_bytes: 0,
        data: DataFolder::Empty,
    };
    MgmtdClient::new(&addresses, &key).heartbeat(heartbeat, deadline()).await.unwrap();
    let store_path = format!("{folder}/meta").into();
    let tree = TreeConfig::default();
    let meta = MetaConfig {
        tls: fabric::tls::ServiceTls::default(),
        listen,
        key: key.clone().into(),
        store_path,
        map_bytes_max: threefs_meta::MAP_BYTES_MAX,
        mgmtd: addresses,
        tree,
    };
    let meta = Meta::open(meta, Arc::new(NoChunks)).await.unwrap();
    let client = MetaClient::new(meta.address().to_string(), &key, ClientId(rand::random()));
    tokio::spawn(meta.serve(shutdown));
    client.make_directory(At::path("/d"), false, deadline()).await.unwrap();

    let creations = rate(in_flight, &client, |client, number| async move {
        client.create(At::path(format!("/d/{number}")), true, deadline()).await.unwrap();
    });
    println!("creations/s, {in_flight} in flight: {:.0}", creations.await);
    let stats = rate(in_flight, &client, |client, number| async move {
        client.stat(At::path(format!("/d/{number}")), deadline()).await.unwrap();
    });
    println!("stats/s,     {in_flight} in flight: {:.0}", stats.await);
}

async fn rate<F: Future<Output = ()> + Send + 'static>(
    in_flight: usize,
    client: &MetaClient,
    call: fn(MetaClient, usize) -> F,
) -> f64 {
    let started = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for number in (task..FILES).step_by(in_flight) {
                    call(client.clone(), number).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    FILES as f64 / started.elapsed().as_secs_f64()
}
