//! TLS below remote calls, with attackers on the path that read, relay, modify and mix data.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::rpc_test::{CONTEXT, Running, credential, key, ring, serve, soon};
use crate::auth::credentials::Credentials;
use crate::auth::keys::{KeyRing, Keys};
use crate::auth::ticket::Ticket;
use crate::auth::{AuthError, TlsError};
use crate::rpc::handshake::unix_now;
use crate::rpc::*;
use crate::tls::{Accepts, client_context, server_context};

const SECRET: &[u8] = b"a plaintext that must not appear on the path";

pub(super) async fn serving(accepts: Accepts) -> Running {
    serve("127.0.0.1:0", |config| config.tls = accepts).await
}

pub(super) async fn open(address: &str, tls: bool) -> Result<Connection, RpcError> {
    let credentials = Credentials::from(key()).over_tls(tls);
    Connection::open(address, ConnectionConfig::new(CONTEXT, credentials), soon()).await
}

pub(super) async fn echo(connection: &Connection, payload: Bytes) -> Result<Bytes, RpcError> {
    let message = Bytes::from_static(b"hello");
    let reply = connection.call(message, payload.into(), soon()).await?;
    Ok(reply.payload.into_bytes())
}

pub(super) fn pattern(length: usize, seed: usize) -> Bytes {
    (0..length).map(|at| (at.wrapping_mul(31) ^ (at >> 9) ^ seed) as u8).collect()
}

fn refused_with(error: RpcError) -> TlsError {
    match error {
        RpcError::Refused { source: AuthError::Tls { source, .. }, .. } => source,
        other => panic!("{other}"),
    }
}

/// Forwards bytes between clients and the service at `target`, after `change` of each piece, whose
/// argument also states whether the piece comes from the client.
async fn proxy(
    target: &str,
    change: impl Fn(bool, &mut Vec<u8>) + Clone + Send + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, target) = (listener.local_addr().unwrap().to_string(), target.to_owned());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&target).await.unwrap();
            let (client_reads, client_writes) = client.into_split();
            let (server_reads, server_writes) = server.into_split();
            for (from_client, mut reads, mut writes) in
                [(true, client_reads, server_writes), (false, server_reads, client_writes)]
            {
                let change = change.clone();
                tokio::spawn(async move {
                    let mut buffer = vec![0; 16 << 10];
                    while let Ok(read) = reads.read(&mut buffer).await {
                        let mut piece = buffer[..read].to_vec();
                        change(from_client, &mut piece);
                        if read == 0 || writes.write_all(&piece).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    address
}

async fn recorded(tls: bool) -> Vec<u8> {
    let running = serving(if tls { Accepts::Tls } else { Accepts::Plain }).await;
    let traffic = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&traffic);
    let change = move |_, piece: &mut Vec<u8>| record.lock().unwrap().extend_from_slice(piece);
    let address = proxy(&running.address, change).await;
    let connection = open(&address, tls).await.unwrap();
    assert_eq!(echo(&connection, Bytes::from_static(SECRET)).await.unwrap(), SECRET);
    let traffic = traffic.lock().unwrap();
    assert!(traffic.len() > 2 * SECRET.len(), "both directions went through the proxy");
    traffic.clone()
}

#[tokio::test]
async fn no_part_of_a_call_or_of_the_handshake_is_sent_in_plaintext() {
    let contains = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|it| it == part);
    let (plain, tls) = (recorded(false).await, recorded(true).await);
    for part in [SECRET, b"FFAUTH02"] {
        assert!(contains(&plain, part), "the proxy sees what is there to be seen");
        assert!(!contains(&tls, part));
    }
}

#[tokio::test]
async fn large_frames_and_many_calls_at_once_arrive_unchanged() {
    let running = serving(Accepts::Tls).await;
    let connection = Arc::new(open(&running.address, true).await.unwrap());
    let calls: Vec<_> = (0..256)
        .map(|number| {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move {
                // Around the sizes of a direct request, a record, a buffer, and a chunk.
                let length = [0, 1, 4 << 10, (8 << 10) + 1, 16 << 10, 65 << 10, 4 << 20]
                    [if number < 6 { 6 } else { number % 6 }];
                let payload = pattern(length, number);
                assert!(
                    echo(&connection, payload.clone()).await.unwrap() == payload,
                    "call {number}"
                );
            })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    assert!(!connection.is_closed());
    assert_eq!(running.stats.connections.load(Relaxed), 1);
}

/// Copies plaintext between two streams whose TLS is terminated here.
async fn relay(address: String, client_tls: bool, server_tls: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().to_string();
    trait Io: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send {}
    impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send> Io for T {}
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let mut client: Box<dyn Io> = if client_tls {
            Box::new(TlsAcceptor::from(server_context().unwrap()).accept(client).await.unwrap())
        } else {
            Box::new(client)
        };
        let server = TcpStream::connect(address).await.unwrap();
        let mut server: Box<dyn Io> = if server_tls {
            let (context, name) = client_context().unwrap();
            Box::new(TlsConnector::from(context).connect(name, server).await.unwrap())
        } else {
            Box::new(server)
        };
        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
    });
    at
}

#[tokio::test]
async fn a_relay_that_terminates_tls_is_refused_by_name() {
    // Also if the service accepts the relay's mode.
    for (accepts, server_tls) in
        [(Accepts::Tls, true), (Accepts::Both, true), (Accepts::Both, false)]
    {
        let running = serving(accepts).await;
        let relay = relay(running.address.clone(), true, server_tls).await;
        let error = open(&relay, true).await.err().unwrap();
        assert!(error.to_string().contains("a proxy between the two terminates TLS"), "{error}");
        assert_eq!(refused_with(error), TlsError::NotBound);
        assert_eq!(running.stats.connections.load(Relaxed), 0);
        open(&running.address, true).await.unwrap();
    }
    // TLS added on the path of a client without TLS.
    let running = serving(Accepts::Tls).await;
    let relay = relay(running.address.clone(), false, true).await;
    assert!(open(&relay, false).await.is_err());
    assert_eq!(running.stats.connections.load(Relaxed), 0);
}

#[tokio::test]
async fn a_wrong_key_is_refused_over_tls_too() {
    let running = serving(Accepts::Tls).await;
    let other = crate::auth::Key::from_bytes(b"another key of sixteen bytes").unwrap();
    let credentials = Credentials::from(other).over_tls(true);
    let config = ConnectionConfig::new(CONTEXT, credentials);
    let error = Connection::open(&running.address, config, soon()).await.err().unwrap();
    assert_eq!(refused_with(error), TlsError::NotBound);
    assert_eq!(running.stats.connections.load(Relaxed), 0);
}

#[tokio::test]
async fn the_binding_is_part_of_every_proof() {
    // Inside a genuine TLS connection, with the genuine key, but with another connection's binding.
    let running = serving(Accepts::Tls).await;
    for binding in [&[][..], &[0; 32]] {
        let (context, name) = client_context().unwrap();
        let stream = TcpStream::connect(&running.address).await.unwrap();
        let mut stream = TlsConnector::from(context).connect(name, stream).await.unwrap();
        let dialed = handshake::dial(&mut stream, &credential(), CONTEXT, binding, soon()).await;
        assert!(dialed.is_err());
    }
    assert_eq!(running.stats.connections.load(Relaxed), 0);
}

/// Flips one byte in the `nth` piece after the connection was opened.
async fn flipped(from_client: bool, nth: usize, payload: usize) {
    let running = serving(Accepts::Tls).await;
    let (armed, pieces) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let arm = Arc::clone(&armed);
    let change = move |client: bool, piece: &mut Vec<u8>| {
        if arm.load(Relaxed) && client == from_client && !piece.is_empty() {
            let number = pieces.fetch_add(1, Relaxed);
            if number == nth {
                let at = (number * 7919 + piece.len() / 2) % piece.len();
                piece[at] ^= 1;
            }
        }
    };
    let address = proxy(&running.address, change).await;
    let connection = open(&address, true).await.unwrap();
    armed.store(true, Relaxed);
    let request = pattern(payload, nth);
    // Later calls reach the flipped byte if earlier ones were too short.
    let mut failed = false;
    for _ in 0..8 {
        match echo(&connection, request.clone()).await {
            Ok(reply) => assert!(reply == request, "changed bytes were taken for data"),
            Err(error) => {
                failed = true;
                assert!(matches!(error, RpcError::Lost { .. } | RpcError::Unreachable { .. }));
                break;
            }
        }
    }
    assert!(failed && connection.is_closed());
}

#[tokio::test]
async fn a_changed_byte_ends_the_connection_and_is_never_data() {
    for from_client in [true, false] {
        for nth in [0, 1, 5] {
            flipped(from_client, nth, 1 << 20).await;
            flipped(from_client, nth, 100).await;
        }
    }
}

#[tokio::test]
async fn peers_with_different_tls_settings_are_refused_with_the_remedy() {
    let cases = [
        (Accepts::Tls, false, TlsError::Required, "set `tls: true` in the cluster.json"),
        (Accepts::Plain, true, TlsError::NotServed, "set `tls: true` in the service's"),
    ];
    for (accepts, tls, expected, remedy) in cases {
        let running = serving(accepts).await;
        let error = open(&running.address, tls).await.err().unwrap();
        assert!(error.to_string().contains(remedy), "{error}");
        assert!(!error.retryable());
        assert_eq!(error.executed(), Executed::No);
        assert_eq!(refused_with(error), expected);
        assert_eq!(running.stats.connections.load(Relaxed), 0);
        let deadline = soon();
        while running.stats.refused.load(Relaxed) == 0 {
            assert!(deadline.remaining().is_some());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        echo(&open(&running.address, !tls).await.unwrap(), Bytes::new()).await.unwrap();
    }
}

#[tokio::test]
async fn a_service_in_transition_accepts_both() {
    let running = serving(Accepts::Both).await;
    for tls in [false, true] {
        let request = pattern(100 << 10, 3);
        let connection = open(&running.address, tls).await.unwrap();
        assert!(echo(&connection, request.clone()).await.unwrap() == request);
    }
    assert_eq!(running.stats.connections.load(Relaxed), 2);
}

const OLD: &str = "0:00112233445566778899aabbccddeeff";
const NEW: &str = "1:ffeeddccbbaa99887766554433221100";

#[tokio::test]
async fn keys_are_rotated_under_tls_and_a_removed_one_closes_its_connections() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, OLD).unwrap();
    let (keys, credentials) = (Keys::read(&file).unwrap(), Credentials::read(&file).unwrap());
    let credentials = credentials.over_tls(true);
    let served = keys.clone();
    let running = serve("127.0.0.1:0", move |config| {
        (config.keys, config.tls) = (served, Accepts::Tls);
        config.key_poll = Duration::from_millis(10);
    })
    .await;
    let pool =
        Pool::new(&running.address, PoolConfig::new(ConnectionConfig::new(CONTEXT, &credentials)));
    let call = || async {
        pool.call(Bytes::from_static(b"hello"), Payload::empty(), soon()).await.unwrap();
    };
    call().await;
    let old = KeyRing::parse(Path::new("old"), OLD.as_bytes()).unwrap();
    let old = Credentials::from(Keys::from(old)).over_tls(true);
    let config = ConnectionConfig::new(CONTEXT, old);
    let with_old = Connection::open(&running.address, config.clone(), soon()).await.unwrap();
    for content in [format!("{OLD}\n{NEW}"), format!("{NEW}\n{OLD}"), NEW.to_owned()] {
        std::fs::write(&file, content).unwrap();
        keys.read_now();
        credentials.read_now();
        call().await;
    }
    let deadline = soon();
    while !with_old.is_closed() {
        assert!(deadline.remaining().is_some(), "still open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(Connection::open(&running.address, config, soon()).await.is_err());
    call().await;
}

#[tokio::test]
async fn a_ticket_is_accepted_over_tls_and_its_expiry_closes_the_connection() {
    let running = serving(Accepts::Tls).await;
    let ticket = Ticket {
        cluster: DEFAULT_CLUSTER.into(),
        key_id: 0,
        directory: 77,
        path: "/volumes/pvc-1".into(),
        read_only: false,
        node: String::new(),
        expires_unix_s: unix_now().as_secs() + 2,
    };
    let sealed = ticket.clone().seal(&ring()).unwrap();
    let config = ConnectionConfig::new(CONTEXT, Credentials::from(sealed).over_tls(true));
    let connection = Connection::open(&running.address, config, soon()).await.unwrap();
    echo(&connection, Bytes::new()).await.unwrap();
    let deadline = soon();
    while !connection.is_closed() {
        assert!(deadline.remaining().is_some(), "still open");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sealed = Ticket { expires_unix_s: 1, ..ticket }.seal(&ring()).unwrap();
    let config = ConnectionConfig::new(CONTEXT, Credentials::from(sealed).over_tls(true));
    let error = Connection::open(&running.address, config, soon()).await.err().unwrap();
    assert!(error.to_string().contains("has expired"), "{error}");
}
