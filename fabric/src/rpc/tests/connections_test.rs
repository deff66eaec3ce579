//! Load tests of connections: many, silent and busy peers, and volumes that share a server.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::load::{KIB, MIB, Running, large, narrow, of_volume, open, send, serve, until};
use super::rpc_test::soon;
use crate::rpc::*;

#[tokio::test]
async fn callers_wait_for_a_busy_server_but_not_for_a_silent_one() {
    let running = serve(narrow).await;
    let connection = open(&running).await;
    let idle_timeout = Some(Duration::from_millis(150));
    let options = CallOptions { idle_timeout, ..CallOptions::default() };
    let hold =
        || connection.call_with(Bytes::from_static(b"hold"), Payload::empty(), soon(), options);
    let error = hold().await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { sent: true, waited_ms: 150.., .. }), "{error}");
    let talks = async {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            send(&connection, b"x", Payload::empty(), 0, soon()).await.unwrap();
        }
        running.gate.add_permits(2);
    };
    let (result, ()) = tokio::join!(hold(), talks);
    result.unwrap();
}

async fn silent(running: &Running, last: u8) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 7, last], 0).into()).unwrap();
    socket.connect(running.address.parse().unwrap()).await.ok()
}

/// More silent connections than the server has slots, from one address and from many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_never_exclude_authenticated_peers() {
    for addresses in [1, 40] {
        let running = serve(|config| {
            (config.connections_max, config.unauthenticated_max) = (64, 32);
            config.unauthenticated_per_address_max = 8;
            // Longer than the test: only eviction frees a slot.
            config.handshake_timeout = Duration::from_secs(600);
        })
        .await;
        let before = open(&running).await;
        let mut silent_streams = Vec::new();
        for number in 0..400_u32 {
            silent_streams.extend(silent(&running, 1 + (number % addresses) as u8).await);
            if number % 20 == 0 {
                send(&before, b"x", Payload::empty(), 0, soon()).await.unwrap();
                send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
            }
        }
        let remaining = if addresses == 1 { 8 } else { 32 };
        until(|| running.stats.evicted.load(Relaxed) >= 400 - remaining).await;
        assert_eq!(silent_streams.len(), 400);
        send(&before, b"x", large(), 0, soon()).await.unwrap();
    }
}

#[tokio::test]
async fn the_connections_of_one_address_are_bounded() {
    let running = serve(|config| config.connections_per_address_max = 3).await;
    let mut connections = Vec::new();
    for _ in 0..3 {
        connections.push(open(&running).await);
    }
    let over = open(&running).await;
    let result = send(&over, b"x", Payload::empty(), 0, soon()).await;
    assert!(result.is_err());
    connections.pop();
    // Its slot is released once the server has noticed that it closed.
    let started = Instant::now();
    while send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.is_err() {
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}

/// Calls of one volume, over any number of connections, leave slots to other volumes, and those of
/// all volumes leave slots to services.
#[tokio::test]
async fn calls_of_one_volume_do_not_exclude_other_callers() {
    let running = serve(|config| {
        config.budgets = vec![Budget { calls_max: 16, shares: 4, ..Budget::default() }];
    })
    .await;
    let mut connections = Vec::new();
    for volume in [1, 1, 1, 2, 3, 4] {
        connections.push(of_volume(&running, volume).await.unwrap());
    }
    let held_calls = || running.stats.calls.load(Relaxed) - connections.len() as u64;
    let mut holding = JoinSet::new();
    for (connection, expected) in connections.iter().zip([4, 4, 4, 8, 12, 12]) {
        for _ in 0..8 {
            let before = held_calls() + running.stats.overloaded.load(Relaxed);
            let connection = Arc::clone(connection);
            holding.spawn(async move {
                drop(send(&connection, b"hold", Payload::empty(), 0, soon()).await);
            });
            until(|| held_calls() + running.stats.overloaded.load(Relaxed) > before).await;
        }
        assert_eq!(held_calls(), expected);
    }
    send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
    running.gate.add_permits(16);
    while holding.join_next().await.is_some() {}
    send(&connections[5], b"x", Payload::empty(), 0, soon()).await.unwrap();
}

/// The same is true of the memory of requests and of replies: a volume with many connections gets
/// no more of it, and alternates with a volume that has a single connection.
#[tokio::test]
async fn a_volume_with_many_connections_leaves_memory_to_one_with_a_single_connection() {
    let running = serve(|config| {
        let bytes_max = 8 * (MIB + KIB);
        let reply_bytes_max = bytes_max;
        config.budgets =
            vec![Budget { bytes_max, reply_bytes_max, shares: 4, ..Budget::default() }];
    })
    .await;
    let mut many = Vec::new();
    for _ in 0..8 {
        many.push(of_volume(&running, 1).await.unwrap());
    }
    let (one, service) = (of_volume(&running, 2).await.unwrap(), open(&running).await);
    let before = running.stats.calls.load(Relaxed);
    let mut holding = JoinSet::new();
    for connection in many.iter().flat_map(|connection| vec![connection; 4]) {
        let connection = Arc::clone(connection);
        holding
            .spawn(async move { send(&connection, b"hold", large(), 0, soon()).await.map(drop) });
    }
    // Half of the memory, over at least four connections.
    until(|| running.stats.calls.load(Relaxed) == before + 4).await;
    for connection in [&one, &service] {
        for _ in 0..3 {
            send(connection, b"x", large(), 0, soon()).await.unwrap();
        }
    }
    assert_eq!(running.stats.calls.load(Relaxed), before + 10, "the others wait");
    running.gate.add_permits(32);
    while let Some(result) = holding.join_next().await {
        result.unwrap().unwrap();
    }
}

#[tokio::test]
async fn connections_with_tickets_leave_slots_to_services() {
    let running = serve(|config| config.connections_max = 8).await;
    let mut connections = Vec::new();
    for volume in 0..6 {
        connections.push(of_volume(&running, volume).await.unwrap());
    }
    assert!(of_volume(&running, 7).await.is_err());
    for _ in 0..2 {
        let service = open(&running).await;
        send(&service, b"x", Payload::empty(), 0, soon()).await.unwrap();
        connections.push(service);
    }
}

#[tokio::test]
async fn connections_of_one_volume_leave_slots_to_others() {
    let running = serve(|config| config.connections_max = 64).await;
    let mut connections = Vec::new();
    for _ in 0..36 {
        connections.push(of_volume(&running, 1).await.unwrap());
    }
    assert!(of_volume(&running, 1).await.is_err());
    for volume in [2, 3] {
        for _ in 0..6 {
            connections.push(of_volume(&running, volume).await.unwrap());
        }
        assert!(of_volume(&running, volume).await.is_err());
    }
    assert!(of_volume(&running, 4).await.is_err(), "the rest is for services");
    send(&*open(&running).await, b"x", Payload::empty(), 0, soon()).await.unwrap();
}
