//! Connections through shared memory: when they are used, and when TCP is.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::{JoinHandle, JoinSet};

use super::rpc_test::{CONTEXT, Running, key, serve, soon};
use crate::auth::Key;
use crate::auth::credentials::Credentials;
use crate::rpc::local::CONNECTION_BYTES;
use crate::rpc::*;
use crate::tls::Accepts;

fn pool(address: &str) -> Pool {
    pool_with(address, ConnectionConfig::new(CONTEXT, key()))
}

fn pool_with(address: &str, config: ConnectionConfig) -> Pool {
    Pool::new(address, PoolConfig::new(config))
}

async fn echo(pool: &Pool) -> Result<(), RpcError> {
    let payload = Bytes::from(vec![3; 3 << 20]);
    let message = Bytes::from_static(b"x");
    let reply = pool.call(message, payload.clone().into(), soon()).await?;
    assert!(reply.payload.into_bytes() == payload);
    Ok(())
}

/// Connections through shared memory, and all of them.
fn counts(running: &Running) -> (u64, u64) {
    let stats = &running.stats;
    (stats.local_connections.load(Relaxed), stats.connections.load(Relaxed))
}

fn port(running: &Running) -> &str {
    running.address.rsplit(':').next().unwrap()
}

#[tokio::test]
async fn clients_of_the_same_machine_use_shared_memory() {
    for (listen, hosts) in [
        ("127.0.0.1", &["127.0.0.1", "[::ffff:127.0.0.1]"][..]),
        ("127.0.0.5", &["127.0.0.5"]),
        ("0.0.0.0", &["127.0.0.1", "127.0.0.7"]),
        ("[::1]", &["[::1]"]),
        ("[::]", &["[::1]", "127.0.0.1"]),
    ] {
        // Not every machine has IPv6.
        if std::net::TcpListener::bind(format!("{listen}:0")).is_err() {
            continue;
        }
        let running = serve(&format!("{listen}:0"), |_| {}).await;
        for host in hosts {
            echo(&pool(&format!("{host}:{}", port(&running)))).await.unwrap();
        }
        let connections = hosts.len() as u64;
        assert_eq!(counts(&running), (connections, connections), "{listen}");
    }
}

#[tokio::test]
async fn a_server_that_listens_at_another_address_is_not_found() {
    let running = serve("127.0.0.1:0", |_| {}).await;
    // TCP leads nowhere: neither does shared memory.
    let mut config = ConnectionConfig::new(CONTEXT, key());
    config.connect_timeout = Duration::from_secs(60);
    let address = format!("127.0.0.2:{}", port(&running));
    let error = Connection::open(&address, config, soon()).await.err().unwrap();
    assert!(matches!(error, RpcError::Unreachable { .. }), "{error}");
    assert_eq!(counts(&running), (0, 0));
}

#[tokio::test]
async fn clients_beyond_the_memory_use_tcp_until_some_is_returned() {
    // One user gets half of it.
    let running =
        serve("127.0.0.1:0", |config| config.local_bytes_max = 2 * CONNECTION_BYTES).await;
    let (first, second) = (pool(&running.address), pool(&running.address));
    echo(&first).await.unwrap();
    echo(&second).await.unwrap();
    assert_eq!(counts(&running), (1, 2));
    drop(first);
    let started = Instant::now();
    while counts(&running).0 < 2 {
        echo(&pool(&running.address)).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(60), "the memory was not returned");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_of_all_sizes_share_a_connection_of_either_transport() {
    for (local_bytes_max, local) in [(0, 0), (CONNECTION_BYTES, 1)] {
        let change = |config: &mut ServerConfig| config.local_bytes_max = local_bytes_max;
        let running = serve("127.0.0.1:0", change).await;
        let pool = pool(&running.address);
        let mut calls = JoinSet::new();
        for number in 0..500_u32 {
            let pool = pool.clone();
            calls.spawn(async move {
                let count = 1 + number as usize * 7919 % 70_000;
                let payload = Bytes::from(number.to_le_bytes().repeat(count));
                let message = Bytes::from(vec![1; 1 + count % 9000]);
                let reply =
                    pool.call(message.clone(), payload.clone().into(), soon()).await.unwrap();
                assert!(reply.message == message && reply.payload.into_bytes() == payload);
            });
        }
        while let Some(call) = calls.join_next().await {
            call.unwrap();
        }
        assert_eq!(counts(&running), (local, 1));
    }
}

#[tokio::test]
async fn a_client_with_tls_uses_tcp() {
    for (accepts, plain) in [(Accepts::Both, (1, 2)), (Accepts::Tls, (0, 1))] {
        let running = serve("127.0.0.1:0", |config| config.tls = accepts).await;
        let credentials = Credentials::from(key()).over_tls(true);
        let over_tls = pool_with(&running.address, ConnectionConfig::new(CONTEXT, credentials));
        echo(&over_tls).await.unwrap();
        assert_eq!(counts(&running), (0, 1));
        let refused = echo(&pool(&running.address)).await;
        assert_eq!(refused.is_ok(), accepts == Accepts::Both);
        assert_eq!(counts(&running), plain);
    }
}

#[tokio::test]
async fn the_error_of_a_wrong_key_is_that_of_tcp() {
    let running = serve("127.0.0.1:0", |_| {}).await;
    let wrong = Key::from_bytes(b"another key of sixteen bytes").unwrap();
    let error = echo(&pool_with(&running.address, ConnectionConfig::new(CONTEXT, wrong))).await;
    assert!(matches!(error, Err(RpcError::Refused { .. })), "{error:?}");
}

/// A process that has taken a server's name, and what it does with a connection.
fn squat<F: Future<Output = ()> + Send + 'static>(
    name: String,
    act: impl Fn(UnixStream) -> F + Send + 'static,
) -> JoinHandle<()> {
    let listener = UnixListener::from_std(crate::shm::listen(&name).unwrap()).unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(act(socket));
        }
    })
}

#[tokio::test]
async fn a_process_that_has_taken_the_name_delays_clients_at_most() {
    let running = serve("127.0.0.1:0", |config| config.local_bytes_max = 0).await;
    let name = format!("fabric-rpc {}", running.address);
    let squatter = squat(name.clone(), |socket| async move {
        std::future::pending::<()>().await;
        drop(socket);
    });
    echo(&pool(&running.address)).await.unwrap();
    squatter.abort();
    let _ = squatter.await;
    let _garbage = squat(name, |mut socket| async move {
        let _ = socket.write_all(&[0x5a; 4096]).await;
    });
    echo(&pool(&running.address)).await.unwrap();
    assert_eq!(counts(&running), (0, 2));
}

#[tokio::test]
async fn a_relay_to_the_port_is_found_out() {
    let running = serve("127.0.0.1:0", |config| config.local_bytes_max = 0).await;
    let address = running.address.clone();
    let _relay = squat(format!("fabric-rpc {address}"), move |mut socket| {
        let address = address.clone();
        async move {
            let mut onward = TcpStream::connect(address).await.unwrap();
            let _ = copy_bidirectional(&mut socket, &mut onward).await;
        }
    });
    echo(&pool(&running.address)).await.unwrap();
    assert_eq!(counts(&running), (0, 1));
    assert_eq!(running.stats.refused.load(Relaxed) + running.stats.silent.load(Relaxed), 1);
}

#[tokio::test]
async fn a_relay_to_the_listener_of_another_name_is_refused() {
    let running = serve("0.0.0.0:0", |_| {}).await;
    let (real, exact) = (running.address.clone(), format!("127.0.0.1:{}", port(&running)));
    let _relay = squat(format!("fabric-rpc {exact}"), move |mut socket| {
        let listener =
            rustix::net::SocketAddrUnix::new_abstract_name(format!("fabric-rpc {real}").as_bytes())
                .unwrap();
        async move {
            let (family, kind) =
                (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
            let onward = rustix::net::socket(family, kind, None).unwrap();
            rustix::net::connect(&onward, &listener).unwrap();
            let onward = std::os::unix::net::UnixStream::from(onward);
            onward.set_nonblocking(true).unwrap();
            let mut onward = UnixStream::from_std(onward).unwrap();
            let _ = copy_bidirectional(&mut socket, &mut onward).await;
        }
    });
    echo(&pool(&exact)).await.unwrap();
    assert_eq!(counts(&running), (0, 1), "TCP leads to the server");
}
