//! Key rotation under load, tickets over real sockets, and hostile clients.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::rpc_test::{CONTEXT, Running, key, ring, serve, serve_default, soon};
use crate::auth::credentials::Credentials;
use crate::auth::keys::{KeyRing, Keys};
use crate::auth::ticket::Ticket;
use crate::deadline::Deadline;
use crate::rpc::handshake::unix_now;
use crate::rpc::*;

const OLD: &str = "0:00112233445566778899aabbccddeeff";
const NEW: &str = "1:ffeeddccbbaa99887766554433221100";

fn pool(running: &Running, credentials: impl Into<Credentials>) -> Pool {
    Pool::new(&running.address, PoolConfig::new(ConnectionConfig::new(CONTEXT, credentials)))
}

async fn echo(pool: &Pool) -> Result<(), RpcError> {
    pool.call(Bytes::from_static(b"hello"), Payload::empty(), soon()).await.map(drop)
}

fn ticket(expires_in_s: u64) -> Ticket {
    Ticket {
        cluster: DEFAULT_CLUSTER.into(),
        key_id: 0,
        directory: 77,
        path: "/volumes/pvc-1".into(),
        read_only: false,
        node: String::new(),
        expires_unix_s: unix_now().as_secs() + expires_in_s,
    }
}

#[tokio::test]
async fn keys_are_rotated_under_load_without_a_refused_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (server_file, client_file) = (folder.path().join("server"), folder.path().join("client"));
    for file in [&server_file, &client_file] {
        std::fs::write(file, OLD).unwrap();
    }
    let server_keys = Keys::read(&server_file).unwrap();
    let credentials = Credentials::read(&client_file).unwrap();
    let keys = server_keys.clone();
    let running = serve("127.0.0.1:0", move |config| config.keys = keys).await;
    let pool = pool(&running, credentials.clone());
    echo(&pool).await.unwrap();
    // Each step reaches the server first, then the client; one step runs in the reverse order.
    let (both, swapped) = (format!("{OLD}\n{NEW}"), format!("{NEW}\n{OLD}"));
    for (content, server_first) in [(&both, true), (&swapped, false), (&NEW.to_owned(), true)] {
        for server in [server_first, !server_first] {
            let file = if server { &server_file } else { &client_file };
            std::fs::write(file, content).unwrap();
            if server {
                server_keys.read_now()
            } else {
                credentials.read_now()
            }
            let calls: Vec<_> = (0..16)
                .map(|_| {
                    let pool = pool.clone();
                    tokio::spawn(async move { echo(&pool).await })
                })
                .collect();
            for call in calls {
                call.await.unwrap().unwrap();
            }
            // This applies to new connections as well as to open ones.
            let fresh = Pool::new(
                &running.address,
                PoolConfig::new(ConnectionConfig::new(CONTEXT, credentials.clone())),
            );
            echo(&fresh).await.unwrap();
        }
    }
    assert_eq!(running.stats.refused.load(Relaxed), 0);
    // The old key is no longer accepted.
    let old = KeyRing::parse(Path::new("old"), OLD.as_bytes()).unwrap();
    let error = echo(&self::pool(&running, Keys::from(old))).await.unwrap_err();
    assert!(matches!(error, RpcError::Refused { .. }), "{error}");
}

#[tokio::test]
async fn a_connection_whose_key_was_removed_is_closed() {
    closes_connections(NEW).await;
}

#[tokio::test]
async fn a_connection_whose_key_was_replaced_under_its_id_is_closed() {
    closes_connections("0:ffeeddccbbaa99887766554433221100").await;
}

/// Connections of a key and of its ticket are closed when the server's file has this key instead.
async fn closes_connections(instead: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, OLD).unwrap();
    let keys = Keys::read(&file).unwrap();
    let served = keys.clone();
    let change = move |config: &mut ServerConfig| {
        (config.keys, config.key_poll) = (served, Duration::from_millis(10));
    };
    let running = serve("127.0.0.1:0", change).await;
    let old = KeyRing::parse(Path::new("old"), OLD.as_bytes()).unwrap();
    let sealed = ticket(3600).seal(&old).unwrap();
    let mut connections = Vec::new();
    for credentials in [Credentials::from(Keys::from(old)), sealed.into()] {
        let config = ConnectionConfig::new(CONTEXT, credentials);
        connections.push(Connection::open(&running.address, config, soon()).await.unwrap());
    }
    std::fs::write(&file, instead).unwrap();
    keys.read_now();
    let deadline = soon();
    while !connections.iter().all(Connection::is_closed) {
        assert!(deadline.remaining().is_some(), "still open");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_ticket_opens_for_its_time_and_is_renewed_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ticket");
    let sealed = |expires_in_s| ticket(expires_in_s).seal(&ring()).unwrap().to_text();
    std::fs::write(&file, sealed(2)).unwrap();
    let running = serve_default().await;
    let credentials = Credentials::read(&file).unwrap();
    let config = ConnectionConfig::new(CONTEXT, credentials.clone());
    let connection = Connection::open(&running.address, config, soon()).await.unwrap();
    let pool = pool(&running, credentials.clone());
    echo(&pool).await.unwrap();
    while !connection.is_closed() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The server closes the connection at the same time, and the client may notice it a moment
    // later.
    let error = loop {
        let short = Deadline::after(Duration::from_millis(300));
        if let Err(error) = pool.call(Bytes::from_static(b"hello"), Payload::empty(), short).await {
            break error;
        }
    };
    assert!(error.to_string().contains("`/volumes/pvc-1` has expired"), "{error}");
    assert!(error.retryable() && error.executed() == Executed::No);
    std::fs::write(&file, sealed(3600)).unwrap();
    credentials.read_now();
    echo(&pool).await.unwrap();
}

#[tokio::test]
async fn a_renewed_ticket_takes_new_calls_to_a_new_connection() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ticket");
    std::fs::write(&file, ticket(100).seal(&ring()).unwrap().to_text()).unwrap();
    let running = serve_default().await;
    let credentials = Credentials::read(&file).unwrap();
    let pool = pool(&running, credentials.clone());
    echo(&pool).await.unwrap();
    std::fs::write(&file, ticket(3600).seal(&ring()).unwrap().to_text()).unwrap();
    credentials.read_now();
    echo(&pool).await.unwrap();
    echo(&pool).await.unwrap();
    assert_eq!(running.stats.connections.load(Relaxed), 2);
}

#[tokio::test]
async fn unauthenticated_peers_are_refused_whatever_they_send() {
    let running = serve_default().await;
    let sealed = ticket(100).seal(&ring()).unwrap();
    let text = sealed.to_text();
    let ticket_bytes = text.split(':').nth(1).unwrap().len() / 2;
    let hello = |magic: &[u8; 8], length: u16| {
        let mut hello = magic.to_vec();
        hello.extend([7; 32]);
        hello.extend([0; 4]);
        hello.extend(length.to_le_bytes());
        hello.extend([0; 2]);
        hello
    };
    let cases = [
        hello(b"FFAUTH01", 0),
        hello(b"GET / HT", 0),
        hello(b"FFAUTH02", u16::MAX),
        [hello(b"FFAUTH02", ticket_bytes as u16), vec![0xff; ticket_bytes]].concat(),
        // A service's handshake with an invalid proof.
        [hello(b"FFAUTH02", 0), vec![1; 32]].concat(),
    ];
    for (number, case) in cases.iter().enumerate() {
        let mut stream = TcpStream::connect(&running.address).await.unwrap();
        stream.write_all(case).await.unwrap();
        let mut answer = Vec::new();
        // Ends when the server closes, possibly with a reset because of unread bytes.
        let read = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut answer));
        let _ = read.await.unwrap();
        assert!(answer.len() <= 64, "case {number}: {} bytes", answer.len());
    }
    while running.stats.refused.load(Relaxed) < cases.len() as u64 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(running.stats.connections.load(Relaxed), 0);
    echo(&pool(&running, key())).await.unwrap();
}

#[tokio::test]
async fn a_replayed_handshake_is_refused() {
    let running = serve_default().await;
    // A proxy that records what a genuine client sends.
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (at, target) = (proxy.local_addr().unwrap().to_string(), running.address.clone());
    let recording = tokio::spawn(async move {
        let (mut client, _) = proxy.accept().await.unwrap();
        let mut server = TcpStream::connect(target).await.unwrap();
        let (mut hello, mut challenge, mut proof) = ([0; 48], [0; 64], [0; 32]);
        client.read_exact(&mut hello).await.unwrap();
        server.write_all(&hello).await.unwrap();
        server.read_exact(&mut challenge).await.unwrap();
        client.write_all(&challenge).await.unwrap();
        client.read_exact(&mut proof).await.unwrap();
        (hello, proof)
    });
    let config = ConnectionConfig::new(CONTEXT, key());
    assert!(Connection::open(&at, config, Deadline::after(Duration::from_secs(2))).await.is_err());
    let (hello, proof) = recording.await.unwrap();
    let mut replay = TcpStream::connect(&running.address).await.unwrap();
    replay.write_all(&hello).await.unwrap();
    replay.read_exact(&mut [0; 64]).await.unwrap();
    replay.write_all(&proof).await.unwrap();
    let mut verdict = [0];
    assert!(!matches!(replay.read(&mut verdict).await, Ok(1)));
}
